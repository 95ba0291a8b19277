"""One call on its way through the dispatcher, and what the table says of each member."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_agent.bus.errors import Decided
from hetero_agent.bus.transport import Incoming
from hetero_agent.bus.whomay import Caller
from hetero_agent.core.effects import Refusal
from hetero_agent.core.events import Event, Token
from hetero_agent.core.model import Actor
from hetero_agent.core.ports import Engine

#: What a handler gives: the values of the reply, or its body encoded already.
Result = Sequence[Any] | bytes


class Call:
    """A call by a known caller.  ARGUMENTS fit the method's signature; ``request`` is what the
    entry's PREPARE made of them; ``authority`` the polkit action that was granted to the caller for
    this call, "" if it needs none."""

    __slots__ = (
        "answered",
        "arguments",
        "authority",
        "caller",
        "member",
        "message",
        "path",
        "request",
        "request_id",
    )

    def __init__(self, message: Incoming, caller: Caller, member: str, arguments: list[Any]) -> None:
        self.message = message
        self.caller = caller
        self.member = member
        self.arguments = arguments
        self.path = message.path
        self.request: Any = None
        self.request_id = ""
        self.authority = ""
        self.answered = False

    @property
    def method(self) -> str:
        """The member without its interface."""
        return self.member.rpartition(".")[2]

    def actor(self, client: str = "") -> Actor:
        """The caller as the core and the audit know it, with what gave it the right to this call."""
        return self.caller.actor(client, self.authority)


def _nothing(call: Call) -> Any:
    del call


def _no_details(call: Call) -> Mapping[str, str]:
    del call
    return {}


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table.

    PREPARE decodes and validates (raises Refusal) and returns the request; SUBJECT finds what
    the who-may rule is about; ABOUT describes it to polkit, by the names of docs/decisions/polkit.md;
    ACT does it, at once or as a coroutine.  A coroutine begins in place, without a task, unless
    OWN_TASK says that it needs one from the start.  ABSENT: it is also about devices that are not there.
    """

    act: Callable[[Call], Result | Coroutine[Any, Any, Result]]
    prepare: Callable[[Call], Any] = _nothing
    subject: Callable[[Call], object] = _nothing
    about: Callable[[Call], Mapping[str, str]] = _no_details
    own_task: bool = False
    absent: bool = False


Table = Mapping[str, Entry]


async def ask(engine: Engine, make: Callable[[Token], Event]) -> Any:
    """Have the governor decide and return the reply's JSON value.  Raises Decided."""
    try:
        return json.loads(await engine.call(make))
    except Refusal as refusal:
        raise Decided(refusal) from None
