"""journald's socket, in its native protocol (https://systemd.io/JOURNAL_NATIVE_PROTOCOL/).

One datagram is one entry.  The socket is non-blocking and connected, so that a journald that does
not drain, or is not there, is an error and not a wait or a success: sd_journal_send(3) does those,
and its Python binding does the first with the interpreter's lock held, which stops every thread
(docs/decisions/journal-socket.md).
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping
from typing import Final

JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"


def serialize(fields: Mapping[str, str]) -> bytes:
    """Return FIELDS as one datagram; values of several lines go with their length before them."""
    parts = []
    for name, value in fields.items():
        data = value.encode("utf-8", "backslashreplace")
        if b"\n" in data:
            parts.append(name.encode("ascii") + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode("ascii") + b"=" + data + b"\n")
    return b"".join(parts)


class JournalSocket:
    """A connection to journald, made when it is needed.  For one thread."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def send(self, fields: Mapping[str, str]) -> None:
        """Hand one entry to journald.  Raises BlockingIOError if its queue is full, another
        OSError if it can't be reached; nothing was sent then."""
        data = serialize(fields)
        if self._socket is not None:
            try:
                self._socket.send(data)
                return
            except BlockingIOError:
                raise
            except OSError:
                # Its socket went with it and there may be a new one.
                self.close()
        self._connect().send(data)

    def wait(self, seconds: float) -> None:
        """Wait until journald's queue has room, at most SECONDS."""
        if self._socket is not None:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll(seconds * 1000)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            one.connect(JOURNAL_SOCKET)
        except OSError:
            one.close()
            raise
        self._socket = one
        return one
