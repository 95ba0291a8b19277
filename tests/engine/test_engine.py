"""The one writer: what an edge fails at costs that alone."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hetero_agent.core.effects import Changes, Effect, Restored
from hetero_agent.core.events import Allocate, Note, Observed, Release
from hetero_agent.core.governor import Governor
from hetero_agent.core.model import Actor, AuditKind, DeviceRecord, Options, State
from hetero_agent.core.settings import Settings
from hetero_agent.engine import Engine, instant

RESOURCE = "example.com/gpu"


class Edges:
    """All edges in one, which do nothing; those whose name is in FAILS have a defect."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        #: What has no room.
        self.full = ""
        self.tried = 0
        self.stored: list[Changes] = []

    def _do(self, name: str) -> None:
        if name == self.full:
            raise OSError(errno.ENOSPC, "no space left on device")
        if name in self.fails:
            raise RuntimeError(f"a defect in {name}")

    def commit(self, changes: Changes) -> None:
        self.tried += len(changes.audits)
        self._do("commit")
        self.stored.append(changes)

    def publish(self, effects: Sequence[Effect]) -> None:
        self._do("publish")

    async def prepare(self, lease: Any, records: Sequence[DeviceRecord]) -> dict[str, object]:
        return {"version": 1}

    async def revoke(self, lease: str) -> None:
        return

    async def sweep(self, live: frozenset[str]) -> None:
        return

    def note(self, changes: Changes) -> None:
        return

    def watch_nodes(self, device: str, record: DeviceRecord | None) -> None:
        self._do("watch_nodes")

    def watch(self, *_: object) -> None:
        self._do("watch")

    def unwatch(self, lease: str) -> None:
        self._do("unwatch")

    def unwatch_process(self, lease: str) -> None:
        self._do("unwatch_process")


def with_engine(test: Callable[[Engine, Edges], Any]) -> None:
    """Run TEST with an engine between edges that do nothing."""

    async def run() -> None:
        edges: Any = Edges()
        engine = Engine(Governor(Settings(), "e1"), edges, edges)
        engine.attach(
            access=edges,
            holders=edges,
            health=edges,
            owners=edges,
            publisher=edges,
            effects_timeout=10,
            scan_interval=3600,
        )
        engine.start(Restored())
        try:
            await asyncio.wait_for(test(engine, edges), 30)
        finally:
            await engine.stop()

    asyncio.run(run())


async def idle(engine: Engine) -> None:
    """Wait until the one device, which nothing can hold, is idle."""
    while engine.view.devices["d"].state is not State.IDLE:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "fails",
    [{"publish"}, {"watch_nodes"}, {"watch", "unwatch", "unwatch_process"}],
    ids=lambda one: sorted(one)[0],
)
def test_a_defect_of_an_edge_leaves_nobody_waiting(fails: set[str]) -> None:
    """Neither the caller for its answer, nor a device for what is to be done with it."""

    async def test(engine: Engine, edges: Edges) -> None:
        edges.fails = fails
        engine.submit(Observed(engine.now(), "kernel", (DeviceRecord("d", RESOURCE),), complete=True))
        await idle(engine)
        actor = Actor(0)
        lease = "0" * 32
        body = await engine.call(
            lambda token: Allocate(instant(), token, actor, "r", "f", RESOURCE, 1, Options(), lease)
        )
        assert json.loads(body)["lease"] == lease
        body = await engine.call(lambda token: Release(instant(), token, actor, "r", "f", lease))
        assert json.loads(body) == {"changed": True}
        await idle(engine)

    with_engine(test)


def test_facts_that_have_no_room_are_stored_once_there_is() -> None:
    """Without another event, and without each event writing all of those before it."""

    async def test(engine: Engine, edges: Edges) -> None:
        edges.full, edges.tried, before = "commit", 0, len(edges.stored)
        for number in range(500):
            engine.submit(Note(engine.now(), AuditKind.ACCESS, f"note {number}"))
        assert engine.store_problem
        assert edges.tried < 5000
        edges.full = ""
        while engine.store_problem:
            await asyncio.sleep(0.01)
        notes = [audit.message for one in edges.stored[before:] for audit in one.audits]
        assert notes == [f"note {number}" for number in range(500)]
        engine.submit(Note(engine.now(), AuditKind.ACCESS, "the next"))
        assert edges.stored[-1].audits[0].message == "the next"

    with_engine(test)


def test_facts_that_have_no_room_are_tried_once_more_at_the_end() -> None:
    stored: list[Changes] = []

    async def test(engine: Engine, edges: Edges) -> None:
        edges.full, edges.stored = "commit", stored
        engine.submit(Note(engine.now(), AuditKind.ACCESS, "a note"))
        assert not stored
        edges.full = ""

    with_engine(test)
    assert [audit.message for one in stored for audit in one.audits] == ["a note"]
