"""dbus-next as transport: connect, authenticate, frames in, frames out; nothing that it does
beyond that is used, and all use of its private parts is in this file.

What is hardened, and why (docs/decisions/bus.md): the header of a message is read first and a
body over the bound is thrown away unread; a full socket is waited for, never an error; what
waits to be written is bounded, signals are dropped before anything else; a loop turn reads a
bounded amount; an unknown header field or an unparsable message costs that message only; no
file descriptors are taken; serials wrap; every call of our own has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from dbus_next import __version__ as library_version
from dbus_next.aio import MessageBus
from dbus_next.errors import AuthError, InvalidAddressError

from hetero_agent.bus import codec
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.bus")

#: The library version whose private parts this file knows.
PINNED = "0.2.3"

METHOD_CALL, METHOD_RETURN, ERROR, SIGNAL = 1, 2, 3, 4
NO_REPLY_EXPECTED, NO_AUTO_START, ALLOW_INTERACTIVE_AUTHORIZATION = 1, 2, 4

#: Largest body taken from a client, and from the bus itself (its lists of groups), in bytes.
MAX_BODY = 64 * 1024
MAX_BODY_OF_BUS = 1024 * 1024
#: Largest array of header fields; what the bus writes into it is far smaller.
MAX_HEADER = 16 * 1024
#: The specification's bound on a whole message.
MAX_MESSAGE = 128 * 1024 * 1024
#: Largest body sent: the bus disconnects who sends more than max_message_size, 32 MiB
#: (dbus-daemon(1)), with the header.
MAX_BODY_SENT = 32 * 1024 * 1024 - 64 * 1024
#: Bytes read in one loop turn, and messages taken out of them.
READ_CHUNK = 64 * 1024
MESSAGES_PER_TURN = 256
#: Bytes waiting to be written above which signals are dropped, and reading stops.
MAX_SIGNAL_BACKLOG = 16 * 1024 * 1024
MAX_BACKLOG = 32 * 1024 * 1024
#: Bytes waiting to be written above which `congested` is true.
CONGESTED = 4 * 1024 * 1024
#: Our own calls without an answer yet.
MAX_PENDING = 4096
CALL_TIMEOUT = 10.0
CONNECT_TIMEOUT = 10.0

BUS_DRIVER = "org.freedesktop.DBus"
BUS_DRIVER_PATH = "/org/freedesktop/DBus"

_LIMITS_EXCEEDED = "org.freedesktop.DBus.Error.LimitsExceeded"
_INVALID_ARGS = "org.freedesktop.DBus.Error.InvalidArgs"
_PAD = tuple(b"\0" * n for n in range(8))
_U32 = struct.Struct("<I")
_FIXED = struct.Struct("<BBBBIII")


class TransportError(OSError):
    """The bus can't be used; the text says why."""


class CallFailed(Exception):
    """A call of ours got an error reply (NAME, TEXT), or no reply in time."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


class Incoming:
    """One message that arrived; its body is decoded only when asked for."""

    __slots__ = (
        "body",
        "error_name",
        "flags",
        "interface",
        "kind",
        "little",
        "member",
        "path",
        "reply_serial",
        "sender",
        "serial",
        "signature",
    )

    def __init__(self, kind: int, flags: int, serial: int, little: bool) -> None:
        self.kind = kind
        self.flags = flags
        self.serial = serial
        self.little = little
        self.path = self.interface = self.member = self.error_name = ""
        self.sender = self.signature = ""
        self.reply_serial = 0
        self.body = b""

    @property
    def wants_reply(self) -> bool:
        """Whether the sender of this call waits for an answer."""
        return not self.flags & NO_REPLY_EXPECTED

    @property
    def may_ask(self) -> bool:
        """Whether somebody may be asked to authenticate for this call, which then takes its time."""
        return bool(self.flags & ALLOW_INTERACTIVE_AUTHORIZATION)

    def arguments(self) -> list[Any]:
        """Decode the body.  Raises codec.CodecError."""
        return codec.decode(self.signature, self.body, self.little)


def check_version() -> None:
    """Raise TransportError unless the dbus-next at hand is the one this file knows."""
    found = str(library_version.__version__)
    if found != PINNED:
        raise TransportError(
            f"dbus-next {PINNED} is needed, {printable(found)} is installed: "
            f"install python3-dbus-next or run pip install dbus-next=={PINNED}"
        )


class Connection(MessageBus):
    """One connection to a bus.

    ON_CALL takes method calls, ON_SIGNAL signals, both in order of arrival.  ON_TURN is called
    after each batch of messages, ON_DRAIN when `congested` is over.
    ``lost`` is done, with the reason, when the connection is gone; it never comes back.
    Create it inside the running loop.
    """

    def __init__(self, address: str) -> None:
        check_version()
        try:
            super().__init__(bus_address=address, negotiate_unix_fd=False)
        except (InvalidAddressError, ValueError) as error:
            raise TransportError(f"bus address {printable(address)}: {printable(error)}") from error
        except OSError as error:
            raise TransportError(f"cannot connect to the bus at {printable(address)}: {error}") from error
        self._serial: int = 0
        self._disconnected: bool = False
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self.on_call: Callable[[Incoming], None] = _ignore
        self.on_signal: Callable[[Incoming], None] = _ignore
        self.on_turn: Callable[[], None] = _nothing
        self.on_drain: Callable[[], None] = _nothing
        self.counters = dict.fromkeys(("oversized", "unparsable", "signals_dropped", "replies_dropped"), 0)
        self._pending: dict[int, asyncio.Future[Incoming]] = {}
        self._received = bytearray()
        self._skip = 0
        self._out: deque[bytes | bytearray] = deque()
        self._out_bytes = 0
        self._offset = 0
        self._writing = False
        self._flush_due = False
        self._in_turn = False
        self._behind = False
        self._was_congested = False
        self._reading = False
        self._paused = False

    # -- connecting -----------------------------------------------------------------------------
    async def open(self) -> None:
        """Authenticate and say Hello.  Raises TransportError."""
        try:
            await asyncio.wait_for(self._authenticate(), CONNECT_TIMEOUT)
            self._reading = True
            self._loop.add_reader(self._fd, self._message_reader)
            reply = await self.call(BUS_DRIVER, BUS_DRIVER_PATH, BUS_DRIVER, "Hello")
        except (OSError, AuthError, CallFailed, TimeoutError, ValueError) as error:
            text = f"the bus did not take the connection: {printable(error) or 'no answer'}"
            self._finalize(TransportError(text))
            raise TransportError(text) from error
        self.unique_name = reply[0]

    async def _auth_readline(self) -> str:
        # the library's own loop spins for ever once the other side has closed
        line = b""
        while not line.endswith(b"\r\n"):
            data = await self._loop.sock_recv(self._sock, 1)
            if not data:
                raise AuthError("the bus closed the connection")
            line += data
            if len(line) > MAX_HEADER:
                raise AuthError("the bus answers something else than D-Bus")
        return line[:-2].decode("ascii", "replace")

    def close(self) -> None:
        """Write what fits into the socket without waiting, and close."""
        if not self._disconnected:
            self._user_disconnect = True
            self._flush()
            self._finalize(TransportError("closed by the agent itself"))

    def _finalize(self, err: BaseException | None) -> None:
        if self._disconnected:
            return
        self._disconnected = True
        self._reading = False
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._out.clear()
        self._out_bytes = 0
        told = err is not None and str(err) and not isinstance(err, ConnectionError)
        reason = printable(err) if told else "the bus closed the connection"
        for future in self._pending.values():
            if not future.done():
                future.set_exception(CallFailed("org.freedesktop.DBus.Error.Disconnected", reason))
                # whoever waited may be gone already
                future.exception()
        self._pending.clear()
        self._stream.close()
        self._sock.close()
        if not self.lost.done():
            self.lost.set_result(reason)

    # -- reading ----------------------------------------------------------------------------------
    def _message_reader(self) -> None:
        if self._disconnected:
            return
        try:
            more = self._read_turn()
        except (OSError, EOFError, ValueError) as error:
            self._finalize(error)
            return
        finally:
            self._in_turn = False
        self._flush()
        if more and self._reading:
            self._loop.call_soon(self._more)

    def _more(self) -> None:
        if self._reading and not self._disconnected:
            self._message_reader()

    def _read_turn(self) -> bool:
        data = b""
        if not self._behind:
            try:
                data = self._sock.recv(READ_CHUNK)
            except (BlockingIOError, InterruptedError):
                pass
            else:
                if not data:
                    raise EOFError("the bus closed the connection")
        if self._skip and data:
            cut = min(self._skip, len(data))
            self._skip -= cut
            data = data[cut:]
        self._received += data
        self._in_turn = True
        taken = 0
        while taken < MESSAGES_PER_TURN and not self._disconnected and self._take_one():
            taken += 1
        if taken:
            _guarded(self.on_turn)
        # nothing more is read before what is here has been dealt with
        self._behind = taken == MESSAGES_PER_TURN
        return self._behind

    def _take_one(self) -> bool:
        received = self._received
        if len(received) < 16:
            return False
        little = received[0] == 0x6C
        if not little and received[0] != 0x42:
            raise ValueError("the bus sent something else than a message")
        letter = "<" if little else ">"
        body_length, serial, fields_length = struct.unpack_from(letter + "III", received, 4)
        start = 16 + fields_length + (-fields_length & 7)
        if start + body_length > MAX_MESSAGE:
            raise ValueError("the bus sent a message of impossible length")
        if fields_length > MAX_HEADER:
            self.counters["oversized"] += 1
            self._discard(start + body_length)
            return True
        if len(received) < start:
            return False
        message = Incoming(received[1], received[2], serial, little)
        readable = self._parse_fields(message, bytes(received[:start]), 16 + fields_length)
        bound = MAX_BODY_OF_BUS if message.sender == BUS_DRIVER else MAX_BODY
        if body_length > bound:
            self.counters["oversized"] += 1
            self._discard(start + body_length)
            self._reject(message, _LIMITS_EXCEEDED, f"a message may have at most {bound} bytes")
            return True
        if len(received) < start + body_length:
            return False
        message.body = bytes(received[start : start + body_length])
        del received[: start + body_length]
        if readable:
            self._route(message)
        else:
            self.counters["unparsable"] += 1
            self._reject(message, _INVALID_ARGS, "the message can't be read")
        return True

    def _discard(self, count: int) -> None:
        """Throw away COUNT bytes, those that are still to come included."""
        here = min(count, len(self._received))
        del self._received[:here]
        self._skip = count - here

    def _parse_fields(self, message: Incoming, data: bytes, end: int) -> bool:
        """Read the header fields; return whether the message can be used."""
        unpack = (_U32 if message.little else struct.Struct(">I")).unpack_from
        position = 16
        usable = METHOD_CALL <= message.kind <= SIGNAL
        try:
            while position < end:
                position += -position & 7
                code = data[position]
                kind = data[position + 1 : position + 4]
                value: Any
                if kind in (b"\1s\0", b"\1o\0"):
                    length = unpack(data, position + 4)[0]
                    value = data[position + 8 : position + 8 + length].decode()
                    position += 9 + length
                elif kind == b"\1g\0":
                    length = data[position + 4]
                    value = data[position + 5 : position + 5 + length].decode("ascii")
                    position += 6 + length
                elif kind == b"\1u\0":
                    value = unpack(data, position + 4)[0]
                    position += 8
                else:
                    value, position = codec.decode_at("v", data[:end], position + 1, message.little)
                slot = _FIELDS.get(code)
                if slot is None:
                    continue
                if isinstance(value, int if slot == "reply_serial" else str):
                    setattr(message, slot, value)
                else:
                    usable = False
        except (IndexError, ValueError, struct.error):
            return False
        return usable and position <= end

    def _reject(self, message: Incoming, name: str, text: str) -> None:
        if message.kind == METHOD_CALL and message.sender:
            self.error(message, name, text)
        elif message.kind in (METHOD_RETURN, ERROR):
            future = self._pending.pop(message.reply_serial, None)
            if future is not None and not future.done():
                future.set_exception(CallFailed(name, text))

    def _route(self, message: Incoming) -> None:
        if message.kind == METHOD_CALL:
            _guarded(self.on_call, message)
        elif message.kind == SIGNAL:
            _guarded(self.on_signal, message)
        else:
            future = self._pending.pop(message.reply_serial, None)
            if future is not None and not future.done():
                future.set_result(message)

    def _set_reading(self, wanted: bool) -> None:
        if wanted != self._reading and not self._disconnected:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._fd, self._message_reader)
                self._loop.call_soon(self._more)
            else:
                self._loop.remove_reader(self._fd)

    # -- writing ----------------------------------------------------------------------------------
    @property
    def congested(self) -> bool:
        """Whether so much waits to be written that it is better to make less of it."""
        return self._was_congested

    def next_serial(self) -> int:
        self._serial = self._serial % 0xFFFFFFFF + 1
        return self._serial

    def reply(self, call: Incoming, signature: str, body: bytes) -> None:
        """Answer a call with an encoded body, or with an error if the bus would not take it."""
        if len(body) > MAX_BODY_SENT:
            text = f"the answer has {len(body)} bytes, and the bus takes {MAX_BODY_SENT} at most; ask for less"
            self.error(call, _LIMITS_EXCEEDED, text)
        elif call.wants_reply:
            self._put(self._frame(METHOD_RETURN, len(body), call, signature) + body)

    def error(self, call: Incoming, name: str, text: str) -> None:
        """Answer a call with an error."""
        if call.wants_reply:
            body = codec.encode("s", (text,))
            self._put(self._frame(ERROR, len(body), call, "s", name) + body)

    def signal(self, path: str, interface: str, member: str, signature: str, body: bytes) -> bool:
        """Broadcast a signal with an encoded body; return False if it had to be dropped."""
        if self._out_bytes > MAX_SIGNAL_BACKLOG or len(body) > MAX_BODY_SENT:
            self.counters["signals_dropped"] += 1
            return False
        fields = _signal_fields(path, interface, member, signature)
        self._put(_head(SIGNAL, NO_REPLY_EXPECTED, len(body), self.next_serial(), fields) + body)
        return True

    async def call(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        arguments: Sequence[Any] = (),
        timeout: float = CALL_TIMEOUT,  # noqa: ASYNC109  (a timer on the reply, not on the caller)
    ) -> list[Any]:
        """Call a method of another service and return the reply's values.  Raises CallFailed,
        also when no reply comes within TIMEOUT seconds."""
        body = codec.encode(signature, arguments)
        fields = _call_fields(destination, path, interface, member, signature)
        if self._disconnected:
            raise CallFailed("org.freedesktop.DBus.Error.Disconnected", "the bus is gone")
        if len(self._pending) >= MAX_PENDING:
            raise CallFailed(_LIMITS_EXCEEDED, "too many calls of the agent's own are unanswered")
        serial = self.next_serial()
        future: asyncio.Future[Incoming] = self._loop.create_future()
        self._pending[serial] = future
        timer = self._loop.call_later(timeout, _time_out, future, destination, member, timeout)
        try:
            self._put(_head(METHOD_CALL, 0, len(body), serial, fields) + body)
            reply = await future
        finally:
            timer.cancel()
            self._pending.pop(serial, None)
        try:
            values = reply.arguments()
        except codec.CodecError as error:
            raise CallFailed(_INVALID_ARGS, f"the reply can't be read: {error}") from error
        if reply.kind == ERROR:
            text = values[0] if values and isinstance(values[0], str) else ""
            raise CallFailed(reply.error_name, printable(text))
        return values

    def tell(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str,
        arguments: Sequence[Any],
    ) -> None:
        """Call a method of a service that runs, without an answer."""
        body = codec.encode(signature, arguments)
        fields = _call_fields(destination, path, interface, member, signature)
        flags = NO_REPLY_EXPECTED | NO_AUTO_START
        self._put(_head(METHOD_CALL, flags, len(body), self.next_serial(), fields) + body)

    def _frame(self, kind: int, length: int, call: Incoming, signature: str, error: str = "") -> bytearray:
        fields = bytearray(b"\x05\x01u\0")
        fields += _U32.pack(call.serial)
        _add_text(fields, 6, b"s", call.sender)
        if error:
            _add_text(fields, 4, b"s", error)
        if signature:
            _add_signature(fields, signature)
        return _head(kind, NO_REPLY_EXPECTED, length, self.next_serial(), fields)

    def _put(self, frame: bytes | bytearray) -> None:
        if self._disconnected:
            self.counters["replies_dropped"] += 1
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes > CONGESTED:
            self._was_congested = True
        if self._out_bytes > MAX_BACKLOG:
            self._paused = True
            self._set_reading(False)
        if not (self._in_turn or self._flush_due or self._writing):
            self._flush_due = True
            self._loop.call_soon(self._flush_after)

    def _flush_after(self) -> None:
        """Flush after all that is ready to run: news and the answer it leads to go in one write,
        and each write wakes the bus."""
        self._loop.call_soon(self._flush)

    def flush(self) -> None:
        """Write what is queued now, instead of at the end of this loop turn."""
        if not (self._in_turn or self._writing):
            self._flush()

    def _flush(self) -> None:
        self._flush_due = False
        if self._disconnected or not self._out:
            return
        try:
            while self._out:
                if len(self._out) > 1 and len(self._out[0]) < READ_CHUNK and not self._offset:
                    self._merge()
                first = self._out[0]
                sent = self._sock.send(memoryview(first)[self._offset :] if self._offset else first)
                self._out_bytes -= sent
                self._offset += sent
                if self._offset < len(first):
                    break
                self._out.popleft()
                self._offset = 0
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._finalize(error)
            return
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            if self._writing:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)
        if self._paused and self._out_bytes < CONGESTED // 2:
            self._paused = False
            self._set_reading(True)
        if self._was_congested and self._out_bytes < CONGESTED // 2:
            self._was_congested = False
            self._loop.call_soon(_guarded, self.on_drain)

    def _merge(self) -> None:
        """Make one piece of the small ones at the front: one system call instead of many."""
        size = 0
        pieces = []
        while self._out and size < READ_CHUNK:
            piece = self._out.popleft()
            size += len(piece)
            pieces.append(piece)
        self._out.appendleft(b"".join(pieces))


#: Header field codes (D-Bus Specification, "Header Fields") that matter here.
_FIELDS = {
    1: "path",
    2: "interface",
    3: "member",
    4: "error_name",
    5: "reply_serial",
    7: "sender",
    8: "signature",
}


@lru_cache(maxsize=8192)
def _signal_fields(path: str, interface: str, member: str, signature: str) -> bytes:
    fields = bytearray()
    _add_text(fields, 1, b"o", path)
    _add_text(fields, 2, b"s", interface)
    _add_text(fields, 3, b"s", member)
    _add_signature(fields, signature)
    return bytes(fields)


def _call_fields(destination: str, path: str, interface: str, member: str, signature: str) -> bytearray:
    fields = bytearray()
    _add_text(fields, 1, b"o", path)
    _add_text(fields, 6, b"s", destination)
    _add_text(fields, 2, b"s", interface)
    _add_text(fields, 3, b"s", member)
    if signature:
        _add_signature(fields, signature)
    return fields


def _add_text(fields: bytearray, code: int, kind: bytes, text: str) -> None:
    raw = text.encode()
    fields += _PAD[-len(fields) & 7]
    fields += bytes((code, 1))
    fields += kind
    fields += b"\0"
    fields += _U32.pack(len(raw))
    fields += raw
    fields += b"\0"


def _add_signature(fields: bytearray, signature: str) -> None:
    raw = signature.encode("ascii")
    fields += _PAD[-len(fields) & 7]
    fields += b"\x08\x01g\0"
    fields.append(len(raw))
    fields += raw
    fields += b"\0"


def _head(kind: int, flags: int, body_length: int, serial: int, fields: bytes | bytearray) -> bytearray:
    head = bytearray(_FIXED.pack(0x6C, kind, flags, 1, body_length, serial, len(fields)))
    head += fields
    head += _PAD[-len(head) & 7]
    return head


def _time_out(future: asyncio.Future[Incoming], destination: str, member: str, seconds: float) -> None:
    if not future.done():
        future.set_exception(
            CallFailed(
                "org.freedesktop.DBus.Error.NoReply",
                f"{destination} did not answer {member} within {seconds:g} s",
            )
        )


def _guarded(callback: Callable[..., None], *arguments: Any) -> None:
    """Call what was hooked in; its failure is a bug, and no reason to leave the bus."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("handling a message failed")


def _ignore(message: Incoming) -> None:
    del message


def _nothing() -> None:
    return
