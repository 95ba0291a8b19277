"""A bus client made of a socket: sends what no library would, and reads only when told to."""

from __future__ import annotations

import io
import os
import socket
import struct
import time
from typing import Any

from dbus_next import Message, MessageType
from dbus_next._private.unmarshaller import Unmarshaller

from hetero_agent import names
from tests.support.bus import PrivateBus

DBUS = "org.freedesktop.DBus"


class RawClient:
    """A connection of this process to BUS, with Hello said."""

    def __init__(self, bus: PrivateBus) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(bus.socket))
        self.socket.settimeout(20)
        self.socket.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
        assert self.socket.recv(512).startswith(b"OK ")
        self.socket.sendall(b"BEGIN\r\n")
        self._buffer = bytearray()
        self._serial = 0
        self.unique_name = ""
        self.unique_name = self.call("/org/freedesktop/DBus", DBUS, "Hello", destination=DBUS).body[0]

    def frame(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: list[Any] | None = None,
        destination: str = names.BUS_NAME,
        kind: MessageType = MessageType.METHOD_CALL,
    ) -> tuple[int, bytes]:
        """Return serial and bytes of a message."""
        self._serial += 1
        message = Message(
            destination=destination,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=body or [],
            message_type=kind,
            serial=self._serial,
        )
        return self._serial, bytes(message._marshall())

    def send(self, *arguments: Any, **more: Any) -> int:
        """Send a message and return its serial; the arguments are those of `frame`."""
        serial, data = self.frame(*arguments, **more)
        self.socket.sendall(data)
        return serial

    def receive(self, serial: int, timeout: float = 30) -> Message:
        """Read until the answer to SERIAL has come, and return it."""
        end = time.monotonic() + timeout
        while True:
            message = self._next(end)
            if message.reply_serial == serial:
                return message

    def call(self, *arguments: Any, **more: Any) -> Message:
        """Send a call and return the answer, be it an error."""
        return self.receive(self.send(*arguments, **more))

    def _next(self, end: float) -> Message:
        while True:
            if len(self._buffer) >= 16:
                body, _, fields = struct.unpack_from("<III", self._buffer, 4)
                size = 16 + fields + (-fields & 7) + body
                if len(self._buffer) >= size:
                    frame = bytes(self._buffer[:size])
                    del self._buffer[:size]
                    return _parsed(frame)
            self.socket.settimeout(max(0.01, end - time.monotonic()))
            data = self.socket.recv(1 << 16)
            assert data, "the bus closed the connection"
            self._buffer += data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parsed(frame: bytes) -> Message:
    message = Unmarshaller(io.BytesIO(frame)).unmarshall()
    assert message is not None
    return message
