"""The inside of a worker process: frames, the progress page, and the loop that answers.

Started by `host` with its end of a socket pair as descriptor 0 and the number of the progress
page's descriptor as its argument.  Frames both ways are a length (4 bytes, big-endian) and that
much JSON.  What the worker is at stands in the shared page: a counter that grows with every
step, and the number of what is at hand (0 for nothing in particular).  A counter that stays
means a blocked read.

Memory is what counts here: no module is imported that a worker doesn't need.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import signal
import socket
import struct

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LENGTH = struct.Struct(">I")
PROGRESS = struct.Struct("=QQ")  # counter, item
PROGRESS_SIZE = mmap.PAGESIZE

_PR_SET_PDEATHSIG = 1


class Channel:
    """The worker's end: frames in and out, and the progress page."""

    def __init__(self, channel: socket.socket, page: mmap.mmap) -> None:
        self._channel = channel
        self._page = page
        self._count = 0

    def announce(self, item: int) -> None:
        """Show that ITEM comes next."""
        self._count += 1
        PROGRESS.pack_into(self._page, 0, self._count, item)

    def send(self, message: dict[str, Any]) -> None:
        """Send one frame.  Raises ConnectionError if the agent is gone."""
        body = json.dumps(message).encode()
        self._channel.sendall(LENGTH.pack(len(body)) + body)

    def receive(self) -> dict[str, Any] | None:
        """Wait for a frame; None at end of file."""
        head = self._exactly(LENGTH.size)
        body = None if head is None else self._exactly(LENGTH.unpack(head)[0])
        if body is None:
            return None
        message: dict[str, Any] = json.loads(body)
        return message

    def serve(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Answer one frame after the other until end of file."""
        self.announce(0)
        while (request := self.receive()) is not None:
            self.announce(0)
            self.send(answer(request))

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            part = self._channel.recv(size - len(data))
            if not part:
                return None
            data += part
        return bytes(data)


def begin(progress: int) -> Channel:
    """Make this process a worker: it dies with the thread that started it.  Returns its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # a stop meant for the agent: it ends us itself when its last request is answered
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # no cycles are made, and a collection would only dirty shared pages
    gc.disable()
    page = mmap.mmap(progress, PROGRESS_SIZE)
    os.close(progress)
    return Channel(socket.socket(fileno=0), page)


def run(progress: int, work: Callable[[Channel], None]) -> None:
    """Do WORK on the channel until the agent is gone."""
    try:
        work(begin(progress))
    except ConnectionError:
        return
