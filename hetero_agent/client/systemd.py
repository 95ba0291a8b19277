"""The system's service manager, as far as units get devices through it (org.freedesktop.systemd1(5)).

The connection is the D-Bus library's own: a transient unit is given file descriptors, which the agent's
clients never send.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from dbus_next.aio import MessageBus
from dbus_next.constants import MessageFlag, MessageType
from dbus_next.message import Message
from dbus_next.signature import Variant

from hetero_agent.client import wire
from hetero_agent.client.connection import DRIVER, DRIVER_PATH, socket_paths
from hetero_agent.client.errors import STANDARD_PREFIX, HeteroError, NoBus
from hetero_agent.text import printable

NAME: Final = "org.freedesktop.systemd1"
PATH: Final = "/org/freedesktop/systemd1"
_MANAGER: Final = NAME + ".Manager"
_PROPERTIES: Final = "org.freedesktop.DBus.Properties"

#: Interfaces of a unit's object.
UNIT: Final = NAME + ".Unit"
SERVICE: Final = NAME + ".Service"

#: Seconds for a call, and for one during which somebody may be asked for a password.
_WITHIN: Final = 25.0
_ASKING_WITHIN: Final = 120.0

#: Seconds after which a unit is looked at again though nothing was heard of it.
_LOOK_AGAIN: Final = 5.0

#: Seconds for which a manager that executes itself anew (daemon-reexec) is asked again, and between.
_AWAY: Final = 10.0
_PAUSE: Final = 0.1

_DENIED: Final = STANDARD_PREFIX + "AccessDenied"
_ASK_FIRST: Final = STANDARD_PREFIX + "InteractiveAuthorizationRequired"
_NOT_THERE: Final = frozenset(
    STANDARD_PREFIX + name for name in ("ServiceUnknown", "NameHasNoOwner", "Disconnected")
)
_ANEW: Final = _NOT_THERE | {STANDARD_PREFIX + "NoReply"}


class ManagerError(HeteroError):
    """The service manager refused, or did not answer; `name` is the D-Bus error's."""


class ManagerDenied(ManagerError):
    """The service manager does not let this caller do that."""


class NoManager(ManagerError):
    """No service manager of the system is on the bus."""


class Property(NamedTuple):
    """One property of a unit, as StartTransientUnit and SetUnitProperties take it."""

    name: str
    signature: str
    value: Any


class ServiceManager:
    """A link to the service manager.  Made by `connect`; a context manager that closes it.

    Everything may raise `ManagerError`, and InvalidArgument for text that can't be sent.  PERSON is as
    for `Client.connect`: whom polkit may ask.
    """

    def __init__(self, bus: Any, person: Callable[[], Awaitable[bool]] | None) -> None:
        self._bus = bus
        self._person = person
        self._news = asyncio.Event()
        self._removed: dict[str, str] = {}
        self._owner = ""
        self._subscribed = False
        self._gone = False
        self._met = False
        bus.add_message_handler(self._hear)

    @classmethod
    async def connect(
        cls, address: str, within: float = 5.0, person: Callable[[], Awaitable[bool]] | None = None
    ) -> ServiceManager:
        """Connect to the bus at ADDRESS.  Raises NoBus."""
        socket_paths(address)
        try:
            async with asyncio.timeout(within):
                bus = await MessageBus(bus_address=address, negotiate_unix_fd=True).connect()
        except Exception as error:  # the library's sign-on raises whatever it runs into
            raise NoBus(f"no bus at {printable(address)}: {printable(error)}") from error
        manager = cls(bus, person)
        bus._disconnect_future.add_done_callback(manager._lost)
        return manager

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the connection; the manager forgets a unit that was kept for it."""
        with contextlib.suppress(OSError):
            self._bus.disconnect()

    # -- units ----------------------------------------------------------------------------------
    async def start_transient(
        self,
        unit: str,
        properties: Iterable[Property],
        descriptors: Sequence[int],
        begun: Callable[[], None],
    ) -> str:
        """Make a unit of PROPERTIES and start it; return what became of its start job: ``done``, or
        ``failed`` and the like (org.freedesktop.systemd1(5), JobRemoved).  Values of the type ``h``
        are indices of DESCRIPTORS.  BEGUN is called once the manager has taken it.

        The manager keeps the unit for this connection, so that its end can be looked at.  Raises
        ManagerDenied.
        """
        (self._owner,) = await self._driver("GetNameOwner", NAME)
        rule = f"type='signal',sender='{NAME}',path='{PATH}',interface='{_MANAGER}',member='JobRemoved'"
        await self._driver("AddMatch", f"{rule},arg2='{unit}'")
        await self._subscribe()
        kept = Property("AddRef", "b", True)
        (job,) = await self._call(
            PATH,
            _MANAGER,
            "StartTransientUnit",
            "ssa(sv)a(sa(sv))",
            [unit, "fail", _packed([*properties, kept]), []],
            descriptors=descriptors,
            ask=True,
        )
        begun()
        while job not in self._removed:
            await self.news()
            found = await self.properties(unit, UNIT)
            if not found["Job"][0]:  # nobody told: the manager executed itself anew meanwhile
                self._removed.setdefault(job, "failed" if found["ActiveState"] == "failed" else "done")
        return self._removed[job]

    async def watch(self, unit: str) -> None:
        """Have `news` end when something of UNIT changes."""
        rule = f"type='signal',sender='{NAME}',interface='{_PROPERTIES}',member='PropertiesChanged'"
        await self._subscribe()
        await self._driver("AddMatch", f"{rule},path='{await self._path(unit)}'")

    async def news(self) -> None:
        """Wait until there may be something to look at."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AGAIN):
                await self._news.wait()
        self._news.clear()

    @property
    def connected(self) -> bool:
        """Whether the connection is still there; once lost, it does not come back."""
        return not self._gone

    async def properties(self, unit: str, interface: str) -> dict[str, Any]:
        """Return all properties of UNIT on INTERFACE.  Raises ManagerError if it is not loaded."""
        path = await self._path(unit)
        (found,) = await self._ask(path, _PROPERTIES, "GetAll", "s", [interface])
        return dict(found)

    async def set_runtime(self, unit: str, properties: Iterable[Property]) -> None:
        """Change properties of UNIT until the next boot.  Raises ManagerDenied."""
        body = [unit, True, _packed(properties)]
        await self._call(PATH, _MANAGER, "SetUnitProperties", "sba(sv)", body, ask=True)

    async def processes(self, unit: str) -> list[int]:
        """Return the pids of all processes of UNIT."""
        (found,) = await self._ask(PATH, _MANAGER, "GetUnitProcesses", "s", [unit])
        return [pid for _, pid, _ in found]

    async def dynamic_uid(self, user: str) -> int:
        """Return the uid that a user of ``DynamicUser=`` has now."""
        (uid,) = await self._ask(PATH, _MANAGER, "LookupDynamicUserByName", "s", [user])
        return int(uid)

    async def _path(self, unit: str) -> str:
        (path,) = await self._ask(PATH, _MANAGER, "GetUnit", "s", [unit])
        return str(path)

    # -- the connection ---------------------------------------------------------------------------
    async def _ask(
        self, path: str, interface: str, member: str, signature: str = "", body: Sequence[Any] = ()
    ) -> list[Any]:
        """Make a call that may be repeated: a manager that was there and executes itself anew leaves the
        bus, with what it was asked unanswered, and is back at once."""
        end = asyncio.get_running_loop().time() + _AWAY
        while True:
            try:
                return await self._call(path, interface, member, signature, body)
            except ManagerError as error:
                here = self._met and not self._gone and error.name in _ANEW
                if not here or asyncio.get_running_loop().time() > end:
                    raise
            await asyncio.sleep(_PAUSE)

    async def _call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: Sequence[Any] = (),
        *,
        descriptors: Sequence[int] = (),
        ask: bool = False,
    ) -> list[Any]:
        wire.check_text(list(body))
        ask = ask and self._person is not None
        reply = await self._send(path, interface, member, signature, body, descriptors, ask)
        if ask and reply.message_type is MessageType.ERROR and reply.error_name == _ASK_FIRST:
            assert self._person is not None
            if await self._person():
                reply = await self._send(path, interface, member, signature, body, descriptors, ask)
        if reply.message_type is not MessageType.ERROR:
            self._met = self._met or path != DRIVER_PATH
            return [wire.plain(value) for value in reply.body]
        text = reply.body[0] if reply.body and isinstance(reply.body[0], str) else reply.error_name
        kind: type[ManagerError] = ManagerError
        if reply.error_name in (_DENIED, _ASK_FIRST):
            kind = ManagerDenied
        elif reply.error_name in _NOT_THERE:
            kind = NoManager
        raise kind(text, reply.error_name)

    async def _send(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str,
        body: Sequence[Any],
        descriptors: Sequence[int],
        ask: bool,
    ) -> Any:
        message = Message(
            destination=DRIVER if path == DRIVER_PATH else NAME,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=list(body),
            unix_fds=list(descriptors),
            flags=MessageFlag.ALLOW_INTERACTIVE_AUTHORIZATION if ask else MessageFlag.NONE,
        )
        if self._gone:
            raise ManagerError("the bus closed the connection")
        try:
            async with asyncio.timeout(_ASKING_WITHIN if ask else _WITHIN):
                return await self._bus.call(message)
        except TimeoutError:
            raise ManagerError(f"the service manager did not answer {member} in time") from None
        except (OSError, EOFError) as error:
            raise ManagerError(f"the bus closed the connection: {error}") from error

    async def _driver(self, member: str, argument: str) -> list[Any]:
        return await self._call(DRIVER_PATH, DRIVER, member, "s", [argument])

    async def _subscribe(self) -> None:
        """Have the manager send its signals, which it does only for those who asked."""
        if not self._subscribed:
            self._subscribed = True
            await self._ask(PATH, _MANAGER, "Subscribe")

    def _hear(self, message: Any) -> bool:
        """A message arrived.  A signal is only a reason to look, since anybody may send one; but for
        the end of a job, which only the manager can tell."""
        if message.message_type is MessageType.SIGNAL:
            if message.sender == self._owner and message.interface == _MANAGER:
                _, job, _, result = message.body
                self._removed[job] = result
            self._news.set()
        return False

    def _lost(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            future.exception()
        self._gone = True
        self._news.set()


def _packed(properties: Iterable[Property]) -> list[list[Any]]:
    return [[one.name, Variant(one.signature, one.value)] for one in properties]
