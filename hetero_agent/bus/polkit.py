"""Asking polkit whether a caller may do what its uid and groups alone do not allow.

The protocol is org.freedesktop.PolicyKit1.Authority as in polkit's reference manual.  The subject
is always the bus name of the caller: unlike a pid it can't be another's by the time polkit looks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hetero_agent.bus.codec import V
from hetero_agent.bus.transport import BUS_DRIVER, CallFailed, Connection
from hetero_agent.bus.whomay import Caller
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.bus")

POLKIT = "org.freedesktop.PolicyKit1"
_PATH = "/org/freedesktop/PolicyKit1/Authority"
_AUTHORITY = POLKIT + ".Authority"
#: CheckAuthorizationFlags: the user may be asked for a password.
_ALLOW_USER_INTERACTION = 1

#: Seconds for polkit to answer by itself, and for a person to answer it.  A call is answered after
#: 20 s whatever happens (dispatcher.CALL_DEADLINE), and what was asked for takes time too.
WITHIN = 5.0
WITHIN_FOR_A_PERSON = 18.0
#: Questions without an answer yet, of one uid and in all.
MAX_OF_UID = 8
MAX_IN_ALL = 64
#: Characters kept of each detail, which a person may see in a dialog.
_DETAIL_LIMIT = 128

#: Errors of the bus which mean that there is no polkit on it, nor one to be started.
_ABSENT = frozenset(f"{BUS_DRIVER}.Error.{name}" for name in ("ServiceUnknown", "NameHasNoOwner"))


class Verdict(StrEnum):
    """polkit's answer: CHALLENGE means yes, once somebody has authenticated."""

    YES = "yes"
    NO = "no"
    CHALLENGE = "challenge"


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict; DISMISSED if somebody was asked to authenticate and did not want to."""

    verdict: Verdict
    dismissed: bool = False


class NoPolkit(Exception):
    """There is no polkit on this bus."""


class NoAnswer(Exception):
    """polkit is there and gave no answer; the text says why."""


class Polkit:
    """Questions to polkit, each with a time limit, few at once, given up when the caller leaves."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._open: dict[str, tuple[Caller, asyncio.Task[list[Any]]]] = {}
        self._of_uid: Counter[int] = Counter()
        self._left: set[str] = set()

    async def check(
        self, caller: Caller, action: str, details: Mapping[str, str], interactive: bool = False
    ) -> Answer:
        """Ask whether CALLER may do ACTION; DETAILS are for polkit's rules and for the person that is
        asked for a password, which nobody is unless INTERACTIVE.

        Raises NoPolkit, NoAnswer, and Refusal if too many questions are open.
        """
        self._make_room(caller.uid)
        seconds = WITHIN_FOR_A_PERSON if interactive else WITHIN
        ticket = f"hetero-agent-{next(self._numbers)}"
        asking = self._connection.call(
            POLKIT,
            _PATH,
            _AUTHORITY,
            "CheckAuthorization",
            "(sa{sv})sa{ss}us",
            (
                ("system-bus-name", {"name": V("s", caller.bus_name)}),
                action,
                {key: printable(value, _DETAIL_LIMIT) for key, value in details.items() if value},
                _ALLOW_USER_INTERACTION if interactive else 0,
                ticket,
            ),
            timeout=seconds,
        )
        task = asyncio.get_running_loop().create_task(asking)
        self._open[ticket] = caller, task
        self._of_uid[caller.uid] += 1
        answered = False
        try:
            reply = await task
            answered = True
        except CallFailed as error:
            if error.name in _ABSENT:
                answered = True
                raise NoPolkit from None
            raise NoAnswer(_why(error, seconds, interactive)) from None
        except asyncio.CancelledError:
            if ticket in self._left:
                raise NoAnswer("the caller has left the bus") from None
            raise
        finally:
            task.cancel()
            self._close(ticket, caller.uid)
            if not answered:
                # a dialog may be open for it, and polkit may still be thinking
                self._connection.tell(POLKIT, _PATH, _AUTHORITY, "CancelCheckAuthorization", "s", (ticket,))
        return _read(reply)

    def caller_gone(self, bus_name: str) -> None:
        """The connection has left the bus: what was asked for it is of no use any more."""
        for ticket, (caller, task) in self._open.items():
            if caller.bus_name == bus_name:
                self._left.add(ticket)
                task.cancel()

    def _make_room(self, uid: int) -> None:
        for have, limit, whose in (
            (self._of_uid[uid], MAX_OF_UID, f"for uid {uid}"),
            (len(self._open), MAX_IN_ALL, "in all"),
        ):
            if have >= limit:
                raise Refusal(
                    ErrorKind.LIMIT_EXCEEDED,
                    f"{have} questions to polkit {whose} are unanswered, the most allowed; ask again later",
                )

    def _close(self, ticket: str, uid: int) -> None:
        del self._open[ticket]
        self._left.discard(ticket)
        self._of_uid[uid] -= 1
        if not self._of_uid[uid]:
            del self._of_uid[uid]


def _read(reply: list[Any]) -> Answer:
    """The result (bba{ss}): authorized, would be after a challenge, details.  Raises NoAnswer."""
    try:
        ((authorized, challenge, details),) = reply
        dismissed = details.get("polkit.dismissed", "") != ""
    except (TypeError, ValueError, AttributeError):
        raise NoAnswer("polkit's answer can't be read") from None
    if authorized:
        return Answer(Verdict.YES)
    return Answer(Verdict.CHALLENGE if challenge and not dismissed else Verdict.NO, dismissed)


def _why(error: CallFailed, seconds: float, interactive: bool) -> str:
    if error.name == f"{BUS_DRIVER}.Error.NoReply":
        what = "nobody has authenticated" if interactive else "polkit did not answer"
        return f"{what} within {seconds:g} s"
    return f"polkit could not answer: {printable(error.text, 200)}"
