"""A lasting link to the agent over connections that come and go: calls, retries, watches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from dbus_next.constants import MessageFlag, MessageType
from dbus_next.message import Message

from hetero_agent import names
from hetero_agent.client import events, wire
from hetero_agent.client.connection import DRIVER, DRIVER_PATH, SYSTEM_BUS, Connection, ConnectionLost
from hetero_agent.client.contract import METHODS
from hetero_agent.client.errors import (
    GONE,
    AuthenticationRequired,
    CallTimeout,
    NoAgent,
    NoBus,
    UnexpectedReply,
    from_reply,
)
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.client")

#: Seconds for a call: what is asked for by default, and the most (most D-Bus clients use 25).
CALL_TIMEOUT: Final = 20.0
LONGEST_CALL: Final = 25.0

#: Seconds that calls wait for an agent (or bus) that was there and went away.
PATIENCE: Final = 10.0

#: Seconds between attempts to reconnect: the first, and the most.
_FIRST_DELAY: Final = 0.05
_LONGEST_DELAY: Final = 5.0

#: Events kept for a slow reader of a watch.
_QUEUE: Final = 10_000

_OWNER_RULE: Final = (
    f"type='signal',sender='{DRIVER}',path='{DRIVER_PATH}',interface='{DRIVER}',"
    f"member='NameOwnerChanged',arg0='{names.BUS_NAME}'"
)


class Watch:
    """Events as an async iterator, from entering the context to leaving it."""

    def __init__(self, session: Session, kinds: tuple[type[events.Event], ...], path: str) -> None:
        self._session = session
        self._kinds = kinds
        self._path = path
        self._queue: deque[events.Event] = deque()
        self._missed = 0
        self._news = asyncio.Event()
        self.rules = [
            f"type='signal',sender='{names.BUS_NAME}',interface='{kind.interface}',member='{kind.member}'"
            + (f",path='{path}'" if path else "")
            for kind in kinds
            if kind.interface
        ]

    async def __aenter__(self) -> Self:
        await self._session.add_watch(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.remove_watch(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> events.Event:
        while not self._queue and not self._missed:
            self._news.clear()
            await self._news.wait()
        if self._missed:
            missed, self._missed = self._missed, 0
            return events.Missed(missed)
        return self._queue.popleft()

    def offer(self, event: events.Event, path: str) -> None:
        """Take EVENT if it is wanted."""
        if not isinstance(event, events.AgentChanged) and (
            not isinstance(event, self._kinds) or (self._path and path != self._path)
        ):
            return
        if len(self._queue) >= _QUEUE:
            self._queue.popleft()
            self._missed += 1
        self._queue.append(event)
        self._news.set()


class Session:
    """The link.  `start` it, `call`, `close` it.

    PERSON, if somebody may be asked to authenticate, makes sure that there is something to ask with
    and tells whether it is worth to call again.
    """

    def __init__(
        self,
        address: str | None,
        within: float = 5.0,
        person: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.address = address or os.environ.get(names.BUS_ADDRESS_VARIABLE) or SYSTEM_BUS
        #: The unique name of the agent's connection, "" while it is not there.
        self.owner = ""
        self._within = within
        self._person = person
        self._connection: Connection | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._gone_at: float | None = None
        self._watches: list[Watch] = []
        self._rules: dict[str, int] = {}
        self._reconnecting: asyncio.Task[None] | None = None

    @property
    def unique_name(self) -> str:
        """Our own name on the bus, "" while there is no connection."""
        return self._connection.unique_name if self._connection is not None else ""

    async def start(self) -> None:
        """Connect to the bus.  Raises NoBus; an agent need not be there."""
        await self._connect()

    async def close(self) -> None:
        """End the link; nothing is retried any more."""
        self._closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reconnecting
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def call(
        self,
        path: str,
        interface: str,
        member: str,
        *body: Any,
        within: float = CALL_TIMEOUT,
    ) -> list[Any]:
        """Call a method of the contract; return the body of the answer without variants.

        What goes unanswered because bus or agent went away is sent again, word for word, once
        they are back: reads change nothing, and all else carries a request id, which the agent
        answers once.  Raises the errors of `hetero_agent.client.errors`.
        """
        if self._person is None:
            return await self._call(path, interface, member, body, within)
        try:
            return await self._call(path, interface, member, body, within)
        except AuthenticationRequired:
            # polkit knows nobody to ask yet
            if not await self._person():
                raise
        return await self._call(path, interface, member, body, within)

    async def _call(
        self, path: str, interface: str, member: str, body: Sequence[Any], within: float
    ) -> list[Any]:
        wire.check_text(body)
        signature, returns = METHODS[interface, member]
        flags = MessageFlag.ALLOW_INTERACTIVE_AUTHORIZATION if self._person else MessageFlag.NONE
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(within, LONGEST_CALL)
        while True:
            connection = await self._agent(deadline)
            message = Message(
                destination=names.BUS_NAME,
                path=path,
                interface=interface,
                member=member,
                signature=signature,
                body=list(body),
                flags=flags,
            )
            try:
                reply = await connection.call(message, max(0.001, deadline - loop.time()))
            except ConnectionLost:
                continue
            if reply.message_type is not MessageType.ERROR:
                if reply.signature != returns:
                    raise UnexpectedReply(f"{member} answered {reply.signature!r}, not {returns!r}")
                return [wire.plain(value) for value in reply.body]
            text = reply.body[0] if reply.body and isinstance(reply.body[0], str) else ""
            if reply.error_name not in GONE:
                raise from_reply(reply.error_name, text)
            if loop.time() >= deadline:
                raise CallTimeout(f"{member} was not answered: {text}", reply.error_name)
            # the bus's own word; its NameOwnerChanged has come before this answer
            if self.owner:
                await asyncio.sleep(_FIRST_DELAY)

    async def _agent(self, deadline: float) -> Connection:
        """Return the connection once the agent is on it.  Raises NoBus, NoAgent."""
        loop = asyncio.get_running_loop()
        while True:
            connection = self._connection
            if connection is not None and not connection.lost and self.owner:
                return connection
            end = deadline if self._gone_at is None else min(deadline, self._gone_at + PATIENCE)
            if self._closed or self._gone_at is None or loop.time() >= end:
                if connection is None:
                    raise NoBus(f"no bus at {printable(self.address)}")
                raise NoAgent(f"the agent ({names.BUS_NAME}) is not on the bus at {printable(self.address)}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await self._changed.wait()

    # -- the connection -----------------------------------------------------------------------
    async def _connect(self) -> None:
        connection = await Connection.open(self.address, self._within, self._on_signal, self._on_lost)
        try:
            replies = await asyncio.gather(
                *(
                    connection.call(Connection.driver_call("AddMatch", "s", rule), self._within)
                    for rule in (_OWNER_RULE, *self._rules)
                ),
                connection.call(Connection.driver_call("GetNameOwner", "s", names.BUS_NAME), self._within),
            )
        except (ConnectionLost, CallTimeout) as error:
            connection.close()
            raise NoBus(f"the bus at {printable(self.address)} does not answer: {error}") from error
        for reply in replies[:-1]:
            if reply.message_type is MessageType.ERROR:
                connection.close()
                raise NoBus(f"the bus refuses to report signals: {printable(reply.error_name)}")
        self._connection = connection
        if replies[-1].message_type is not MessageType.ERROR:
            self._set_owner(replies[-1].body[0])
        self._changed.set()

    def _on_lost(self, connection: Connection) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._set_owner("")
        if not self._closed:
            if self._gone_at is None:
                self._gone_at = asyncio.get_running_loop().time()
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        delay = _FIRST_DELAY
        while True:
            await asyncio.sleep(delay * random.uniform(0.7, 1.3))  # noqa: S311 (only spreads load)
            try:
                await self._connect()
            except NoBus as error:
                log.debug("%s", error)
                delay = min(delay * 2, _LONGEST_DELAY)
            else:
                return

    def _set_owner(self, owner: str) -> None:
        if owner == self.owner:
            return
        if owner:
            self._gone_at = None
        elif self._gone_at is None:
            self._gone_at = asyncio.get_running_loop().time()
        self.owner = owner
        self._changed.set()
        for watch in self._watches:
            watch.offer(events.AgentChanged(owner), "")

    def _on_signal(self, message: Any) -> None:
        if message.sender == DRIVER and message.path == DRIVER_PATH:
            if message.interface == DRIVER and message.member == "NameOwnerChanged":
                name, _, new = message.body
                if name == names.BUS_NAME:
                    self._set_owner(new)
            return
        if not self.owner or message.sender != self.owner:
            return
        body = [wire.plain(value) for value in message.body]
        try:
            event = events.from_signal(message.interface, message.member, message.path, body)
        except (TypeError, ValueError) as error:
            log.debug("skipped a signal of another shape: %s", printable(error))
            return
        if event is not None:
            for watch in self._watches:
                watch.offer(event, message.path)

    # -- watches ------------------------------------------------------------------------------
    async def add_watch(self, watch: Watch) -> None:
        """Have the bus deliver what WATCH wants."""
        self._watches.append(watch)
        for rule in watch.rules:
            self._rules[rule] = self._rules.get(rule, 0) + 1
            if self._rules[rule] == 1:
                await self._driver("AddMatch", rule)

    async def remove_watch(self, watch: Watch) -> None:
        """Undo `add_watch`."""
        self._watches.remove(watch)
        for rule in watch.rules:
            self._rules[rule] -= 1
            if not self._rules[rule]:
                del self._rules[rule]
                await self._driver("RemoveMatch", rule)

    async def _driver(self, member: str, rule: str) -> None:
        """Tell the bus; a connection that is lost meanwhile gets all rules when it is back."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionLost, CallTimeout):
                await self._connection.call(Connection.driver_call(member, "s", rule), self._within)


def new_request_id() -> str:
    """Return a fresh request id: 128 random bits in hex."""
    return os.urandom(16).hex()
