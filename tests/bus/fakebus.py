"""The bus's side of a socket, to send what a real bus filters out or never says."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

from hetero_agent.bus import codec
from hetero_agent.bus.codec import V


def frame(
    kind: int,
    fields: list[tuple[int, V]],
    body: bytes = b"",
    serial: int = 1,
    flags: int = 0,
) -> bytes:
    """Build a message of any shape (header fields as they are given)."""
    header = bytearray((0x6C, kind, flags, 1)) + struct.pack("<II", len(body), serial)
    codec.encode_into(header, "a(yv)", (fields,))
    return bytes(header) + b"\0" * (-len(header) % 8) + body


def call(member: str, body: bytes = b"", signature: str = "", serial: int = 1, **more: object) -> bytes:
    """Build a method call from ``:1.7``; MORE is ``extra``, a list of header fields."""
    fields = [
        (1, V("o", "/x")),
        (2, V("s", "a.b")),
        (3, V("s", member)),
        (6, V("s", ":1.1")),
        *more.get("extra", []),  # type: ignore[misc]
        (7, V("s", ":1.7")),
    ]
    if signature:
        fields.append((8, V("g", signature)))
    return frame(1, fields, body, serial)


class FakeBus:
    """Listens on PATH, lets one client in, answers Hello, and then sends what `send` is given;
    everything the client sends is kept in ``received``."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix:path={path}"
        self.received = bytearray()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        data = connection.recv(4096)
        while b"AUTH" not in data:
            data += connection.recv(4096)
        connection.sendall(b"OK 0123\r\n")
        while b"BEGIN\r\n" not in data:
            data += connection.recv(4096)
        data = data.partition(b"BEGIN\r\n")[2]
        while b"Hello" not in data:
            data += connection.recv(4096)
        serial = struct.unpack_from("<I", data, 8)[0]
        body = codec.encode("s", (":1.1",))
        fields = [(5, V("u", serial)), (7, V("s", "org.freedesktop.DBus")), (8, V("g", "s"))]
        self._connection = connection
        # before the answer: with it the client is there, and its test goes on
        self._ready.set()
        connection.sendall(frame(2, fields, body))
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            self.received += data

    def send(self, data: bytes) -> None:
        assert self._ready.wait(30)
        assert self._connection is not None
        self._connection.sendall(data)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        self._listener.close()
        self._thread.join(5)
