"""Whose call is next."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hetero_agent.bus.callers import Callers
from hetero_agent.bus.transport import METHOD_CALL, Incoming
from hetero_agent.bus.turns import Turns
from hetero_agent.bus.whomay import Caller


class _Known:
    """Knows everybody: ``:UID.NUMBER`` is a connection of that uid."""

    def get(self, bus_name: str) -> Caller:
        return Caller(bus_name, int(bus_name[1:].partition(".")[0]), 1, frozenset(), "")


def _turns(served: list[str], limit: int = 32) -> Turns:
    def dispatch(message: Incoming, caller: Caller) -> None:
        served.append(caller.bus_name)
        turns.done(message.sender)

    def never(*_: Any) -> None:
        raise AssertionError("refused")

    turns = Turns(cast("Callers", _Known()), dispatch, never, never, lambda: False, limit)
    return turns


def _offer(turns: Turns, sender: str, count: int = 1) -> None:
    for _ in range(count):
        message = Incoming(METHOD_CALL, 0, 1, True)
        message.sender = sender
        turns.offer(message)


def _run(turns: Turns) -> None:
    async def until_idle() -> None:
        turns.run()
        while turns._clients:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(until_idle(), 30))


def test_one_call_of_each_connection_in_turn() -> None:
    served: list[str] = []
    turns = _turns(served)
    _offer(turns, ":7.1", 3)
    _offer(turns, ":7.2", 1)
    _offer(turns, ":7.3", 2)
    _run(turns)
    assert served == [":7.1", ":7.2", ":7.3", ":7.1", ":7.3", ":7.1"]


def test_many_connections_get_no_more_turns_than_one() -> None:
    """A uid may have some hundred connections: another one must not wait for all of them."""
    served: list[str] = []
    turns = _turns(served)
    for number in range(100):
        _offer(turns, f":7.{number}", 2)
    _offer(turns, ":0.1", 3)
    _offer(turns, ":8.1", 1)
    _run(turns)
    assert served[:8] == [":7.0", ":0.1", ":8.1", ":7.1", ":0.1", ":7.2", ":0.1", ":7.3"]
    assert len(served) == 204
    assert not turns._clients
    assert not turns._ready
