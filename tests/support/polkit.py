"""An authority that answers as the test says under polkit's name on a private bus, by the protocol of
org.freedesktop.PolicyKit1.Authority (polkit reference manual)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbus_next import Message, MessageType
from dbus_next.aio import MessageBus

from tests.support.bus import PrivateBus
from tests.support.wait import wait_until

NAME = "org.freedesktop.PolicyKit1"

#: What the bus must allow for it.
POLICY = f"""
<policy user="root"><allow own="{NAME}"/></policy>
<policy context="default"><allow send_destination="{NAME}"/></policy>
"""

#: is_authorized, is_challenge, details.
_RESULTS: dict[str, list[Any]] = {
    "yes": [True, False, {}],
    "no": [False, False, {}],
    "challenge": [False, True, {}],
    "dismissed": [False, False, {"polkit.dismissed": "true"}],
}


@dataclass(frozen=True)
class Question:
    """A CheckAuthorization: whether the connection SUBJECT may do ACTION."""

    subject: str
    action: str
    details: dict[str, str]
    interactive: bool
    ticket: str


class FakePolkit:
    """Owns polkit's name on BUS.

    ANSWERS maps actions to what they get: a key of the results above, ``error``, ``nonsense``, or
    ``hold`` for no answer before `answer`.  A challenge is held as well if somebody may be asked and
    an agent is REGISTERED.
    """

    def __init__(self, bus: PrivateBus) -> None:
        self.answers: dict[str, str] = {}
        self.asked: list[Question] = []
        self.cancelled: list[str] = []
        #: Subjects (kind, details) for which an authentication agent was registered.
        self.registered: list[tuple[str, dict[str, Any]]] = []
        #: Called when one was.
        self.on_agent: Callable[[], None] = lambda: None
        self._held: dict[str, Message] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._address = bus.address
        self._bus: MessageBus
        self.come()

    def come(self) -> None:
        """Connect and take the name."""
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result(10)

    def leave(self) -> None:
        """Drop the connection, with whatever is unanswered."""
        self._do(self._bus.disconnect)

    async def _connect(self) -> None:
        self._bus = await MessageBus(bus_address=self._address).connect()
        # nobody waits for the end of the connection; the loop would complain of that
        self._bus._disconnect_future.add_done_callback(lambda ended: ended.exception())
        self._bus.add_message_handler(self._handle)
        await self._bus.request_name(NAME)

    def _handle(self, message: Message) -> Message | bool:
        if message.message_type is not MessageType.METHOD_CALL:
            return False
        if message.member == "CancelCheckAuthorization":
            self.cancelled.append(message.body[0])
            return True
        if message.member in ("RegisterAuthenticationAgent", "RegisterAuthenticationAgentWithOptions"):
            kind, details = message.body[0]
            self.registered.append((kind, {key: value.value for key, value in details.items()}))
            self.on_agent()
            return Message.new_method_return(message)
        if message.member == "UnregisterAuthenticationAgent":
            return Message.new_method_return(message)
        if message.member != "CheckAuthorization":
            return Message.new_error(message, "org.freedesktop.DBus.Error.UnknownMethod", message.member)
        (kind, subject), action, details, flags, ticket = message.body
        assert kind == "system-bus-name"
        question = Question(subject["name"].value, action, details, bool(flags & 1), ticket)
        answer = self.answers.get(action, "no")
        if answer == "hold" or (answer == "challenge" and question.interactive and self.registered):
            self._held[ticket] = message
            self.asked.append(question)
            return True
        self.asked.append(question)
        if answer == "error":
            return Message.new_error(message, NAME + ".Error.Failed", "polkit has a cold")
        if answer == "nonsense":
            return Message.new_method_return(message, "s", ["maybe"])
        return Message.new_method_return(message, "(bba{ss})", [_RESULTS[answer]])

    def wait_asked(self, count: int = 1, timeout: float = 30) -> Question:
        """Wait until COUNT questions have come, and return the last."""
        return wait_until(lambda: self.asked if len(self.asked) >= count else None, timeout, "a question")[-1]

    def answer(self, ticket: str, answer: str) -> None:
        """Answer a question that is held."""
        reply = Message.new_method_return(self._held.pop(ticket), "(bba{ss})", [_RESULTS[answer]])
        self._do(lambda: self._bus.send(reply))

    def forget(self) -> None:
        """Be as at first; what is held stays unanswered."""
        self.answers, self.asked, self.cancelled, self.registered = {}, [], [], []
        self._held.clear()

    def _do(self, what: Callable[[], Any]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (what(), done.set()))
        assert done.wait(30)

    def close(self) -> None:
        self.leave()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> FakePolkit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
