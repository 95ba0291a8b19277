"""One connection to a message bus: sign-on, framing, calls with deadlines.

The D-Bus library does the marshalling; the socket is asyncio's, so that a full socket, a half
message or one that can't be parsed is never the end of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import struct
import urllib.parse
from collections.abc import Callable
from typing import Any, Final

from dbus_next._private.unmarshaller import Unmarshaller
from dbus_next.constants import MessageFlag, MessageType
from dbus_next.message import Message

from hetero_agent.client.errors import CallTimeout, InvalidArgument, NoBus, TurnedAway
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.client")

DRIVER: Final = "org.freedesktop.DBus"
DRIVER_PATH: Final = "/org/freedesktop/DBus"

#: The system bus where no address is given (D-Bus specification, "Well-known message buses").
SYSTEM_BUS: Final = "unix:path=/run/dbus/system_bus_socket"

#: dbus-daemon's system bus drops larger ones (max_message_size, 32 MiB).
_LARGEST: Final = 32 << 20
_LONGEST_LINE: Final = 4096


class ConnectionLost(Exception):
    """The connection ended while a reply was awaited."""


def socket_paths(address: str) -> list[str]:
    """Return the socket paths in a bus ADDRESS, abstract ones with a leading NUL.

    Only ``unix:path=`` and ``unix:abstract=`` are known (D-Bus specification, "Server
    addresses").  Raises NoBus for anything else.
    """
    found = []
    for entry in filter(None, address.split(";")):
        transport, _, rest = entry.partition(":")
        pairs = dict(item.partition("=")[::2] for item in rest.split(",") if item)
        if transport == "unix" and "path" in pairs:
            found.append(urllib.parse.unquote(pairs["path"]))
        elif transport == "unix" and "abstract" in pairs:
            found.append("\0" + urllib.parse.unquote(pairs["abstract"]))
    if not found:
        raise NoBus(f"bus address {printable(address)!r} names no unix socket; expected unix:path=/…")
    return found


def _in_user_database() -> bool:
    """Whether our uid has an entry: dbus-daemon looks up the groups of whoever signs on, and drops who has
    none (bus_connections_setup_connection, bus/connection.c)."""
    import pwd  # noqa: PLC0415

    try:
        return bool(pwd.getpwuid(os.geteuid()))
    except KeyError:
        return False


class Connection(asyncio.Protocol):
    """A signed-on connection.  Made by `open`."""

    def __init__(self, on_signal: Callable[[Any], None], on_lost: Callable[[Connection], None]) -> None:
        self._on_signal = on_signal
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._serial = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._signed_on: asyncio.Future[None] = self._loop.create_future()
        self._authenticated = False
        self.lost = False
        #: The bus's GUID, from its answer to the sign-on.
        self.guid = ""
        self.unique_name = ""

    @classmethod
    async def open(
        cls,
        address: str,
        within: float,
        on_signal: Callable[[Any], None],
        on_lost: Callable[[Connection], None],
    ) -> Connection:
        """Connect and say Hello within WITHIN seconds.  Raises NoBus."""
        loop = asyncio.get_running_loop()
        failure = ""
        for path in socket_paths(address):
            one = cls(on_signal, on_lost)
            trouble: Exception | None = None
            try:
                async with asyncio.timeout(within):
                    await loop.create_unix_connection(lambda one=one: one, path)  # type: ignore[misc]
                    await one._signed_on
                    hello = await one.call(cls.driver_call("Hello"), within)
                if hello.message_type is MessageType.ERROR:
                    raise ConnectionLost(f"it refuses us: {hello.error_name}")
                one.unique_name = hello.body[0]
            except TimeoutError:
                failure = "no answer"
            except (OSError, ConnectionLost, CallTimeout) as error:
                trouble = error
                failure = getattr(error, "strerror", None) or str(error) or "closed by the bus"
            else:
                return one
            one.close()
            if one._authenticated and isinstance(trouble, ConnectionLost) and not _in_user_database():
                uid = os.geteuid()
                raise TurnedAway(
                    f"the bus at {printable(address)} lets uid {uid} not on: the user database has no such user"
                )
        raise NoBus(f"no bus at {printable(address)}: {printable(failure)}")

    @staticmethod
    def driver_call(member: str, signature: str = "", *body: Any) -> Any:
        """Return a call to the bus itself."""
        return Message(
            destination=DRIVER,
            path=DRIVER_PATH,
            interface=DRIVER,
            member=member,
            signature=signature,
            body=list(body),
        )

    async def call(self, message: Any, within: float) -> Any:
        """Send a call and return the reply, a method return or an error, within WITHIN seconds.

        Raises ConnectionLost, CallTimeout, and InvalidArgument for what can't be marshalled.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        serial = self.send(message)
        self._pending[serial] = future
        try:
            async with asyncio.timeout(within):
                return await future
        except TimeoutError:
            raise CallTimeout(f"{message.member} was not answered within {within:.1f} s") from None
        finally:
            self._pending.pop(serial, None)

    def send(self, message: Any) -> int:
        """Queue a message; return its serial.  Raises ConnectionLost, InvalidArgument."""
        if self.lost or self._transport is None:
            raise ConnectionLost
        self._serial = self._serial % 0xFFFF_FFFF + 1
        message.serial = self._serial
        try:
            frame = message._marshall()
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            raise InvalidArgument(f"{message.member} can't be sent: {error}") from error
        self._transport.write(bytes(frame))
        return self._serial

    def close(self) -> None:
        """End the connection; what is queued is still written."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ---------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the sign-on: EXTERNAL, as whoever the kernel says that we are.  The uid that we know
        is another where we are in a user namespace, as in the hook of a rootless container."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(b"\0AUTH EXTERNAL\r\nDATA\r\n")

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what is pending and tell the owner."""
        self.lost = True
        if not self._signed_on.done():
            self._signed_on.set_exception(error or ConnectionLost("closed by the bus"))
            # whoever gave up waiting is not there to take it
            self._signed_on.exception()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionLost("the bus closed the connection"))
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes: lines during the sign-on, frames after it."""
        self._buffer += data
        if not self._authenticated and not self._sign_on():
            return
        while True:
            frame = self._next_frame()
            if frame is None:
                return
            self._take(frame)

    def _sign_on(self) -> bool:
        while True:
            line, end, _ = self._buffer.partition(b"\r\n")
            if not end:
                if len(self._buffer) > _LONGEST_LINE:
                    self._refuse("no D-Bus at the other end")
                return False
            del self._buffer[: len(line) + 2]
            if line != b"DATA":  # so it asks for our identity, of which we have sent none
                break
        if not line.startswith(b"OK "):
            self._refuse(f"sign-on refused: {printable(bytes(line))}")
            return False
        self.guid = line[3:].decode("ascii", "replace")
        assert self._transport is not None
        self._transport.write(b"BEGIN\r\n")
        self._authenticated = True
        if not self._signed_on.done():
            self._signed_on.set_result(None)
        return True

    def _refuse(self, why: str) -> None:
        if not self._signed_on.done():
            self._signed_on.set_exception(ConnectionLost(why))
            self._signed_on.exception()
        if self._transport is not None:
            self._transport.abort()

    def _next_frame(self) -> bytes | None:
        """Return the next whole message (fixed header: D-Bus specification, "Message Format")."""
        if len(self._buffer) < 16:
            return None
        order = {ord("l"): "<", ord("B"): ">"}.get(self._buffer[0])
        if order is None:
            self._refuse("not a D-Bus message")
            return None
        body, _, fields = struct.unpack_from(order + "III", self._buffer, 4)
        size = 16 + fields + (-fields & 7) + body
        if size > _LARGEST:
            self._refuse("message too large")
            return None
        if len(self._buffer) < size:
            return None
        frame = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return frame

    def _take(self, frame: bytes) -> None:
        try:
            message = Unmarshaller(io.BytesIO(frame)).unmarshall()
        except Exception as error:
            # the library raises whatever its parsing runs into; a later message is unharmed
            log.debug("skipped a message that can't be parsed: %s", printable(error))
            return
        if message is None:
            return
        if message.message_type is MessageType.SIGNAL:
            self._on_signal(message)
        elif message.message_type is MessageType.METHOD_CALL:
            if not message.flags & MessageFlag.NO_REPLY_EXPECTED:
                name = f"{DRIVER}.Error.UnknownMethod"
                with contextlib.suppress(ConnectionLost):
                    self.send(Message.new_error(message, name, "this client has no methods"))
        else:
            future = self._pending.get(message.reply_serial)
            if future is not None and not future.done():
                future.set_result(message)
