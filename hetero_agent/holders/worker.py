"""The scan worker: a small process that reads /proc, because reading it can block for ever.

Started by `host` as ``worker.main(PROGRESS_FD)`` with its end of a socket pair as descriptor 0.
Frames both ways are a length (4 bytes, big-endian) and that much JSON.  Requests:

- ``{"scan": {device: [[kind, a, b], ...]}, "skip": [pid, ...], "contained": bool}`` is answered
  with what `scan.scan` returns;
- ``{"check": pid, "nodes": [[kind, a, b], ...]}`` with ``{"holds": bool, "start": ticks}``, or
  ``{"error": text}`` if the process can't be read (any more).

What it is at stands in the shared page behind PROGRESS_FD: a counter that grows with every
process, and that process's pid (0 for none).  A counter that stays means a blocked read.
Memory is what counts here: no module that the scan doesn't need is imported.
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

from hetero_agent.holders import proc, scan

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from typing import Any

LENGTH = struct.Struct(">I")
PROGRESS = struct.Struct("=QQ")  # counter, pid
PROGRESS_SIZE = mmap.PAGESIZE

_PR_SET_PDEATHSIG = 1


class Worker:
    """Answers requests one after the other until the other end is closed."""

    def __init__(self, channel: socket.socket, page: mmap.mmap) -> None:
        self._channel = channel
        self._page = page
        self._count = 0

    def announce(self, pid: int) -> None:
        """Show that PID comes next."""
        self._count += 1
        PROGRESS.pack_into(self._page, 0, self._count, pid)

    def serve(self) -> None:
        """Answer until end of file."""
        self.announce(0)
        while (frame := self._receive()) is not None:
            self.announce(0)
            answer = json.dumps(self.answer(json.loads(frame))).encode()
            self._channel.sendall(LENGTH.pack(len(answer)) + answer)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        if "check" in request:
            return self._check(request["check"], request["nodes"])
        return scan.scan(_targets(request["scan"]), request["skip"], self.announce, request["contained"])

    def _check(self, pid: int, nodes: list[list[Any]]) -> dict[str, Any]:
        self.announce(pid)
        try:
            with proc.opened(pid) as base:
                start = proc.stat(base).start
                held = scan.Walk(_targets({"": nodes})).inspect_open(pid, base)
        except OSError as error:
            return {"error": os.strerror(error.errno or 0)}
        finally:
            self.announce(0)
        return {"holds": bool(held), "start": start}

    def _receive(self) -> bytes | None:
        head = self._exactly(LENGTH.size)
        return None if head is None else self._exactly(LENGTH.unpack(head)[0])

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            part = self._channel.recv(size - len(data))
            if not part:
                return None
            data += part
        return bytes(data)


def _targets(given: dict[str, list[list[Any]]]) -> dict[str, list[scan.NodeKey]]:
    return {device: [(kind, a, b) for kind, a, b in nodes] for device, nodes in given.items()}


def main(progress: int) -> None:
    """Serve on descriptor 0; dies with the thread that started it, or at end of file."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # a stop meant for the agent: it ends us itself when its last scan is done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # no cycles are made, and a collection would only dirty shared pages
    gc.disable()
    page = mmap.mmap(progress, PROGRESS_SIZE)
    os.close(progress)
    try:
        Worker(socket.socket(fileno=0), page).serve()
    except ConnectionError:
        return  # the agent is gone
