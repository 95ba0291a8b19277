"""The kernel's messages, said by a test: to the real /dev/kmsg, or to a private one.

A private one is a FIFO in its place, in a mount namespace of the test's.  Each record is written once
the one before has been read, so that one read gives one record, as the real one's does.
"""

from __future__ import annotations

import array
import fcntl
import itertools
import os
import termios
import time
from pathlib import Path

from tests.support.namespace import mount
from tests.support.wait import wait_until

_KMSG = Path("/dev/kmsg")


def real_is_writable() -> bool:
    """Whether messages of ours reach the real ring."""
    try:
        os.close(os.open(_KMSG, os.O_WRONLY))
    except OSError:
        return False
    return True


def say_real(line: str) -> None:
    """Say LINE in the real ring; a descriptor of its own, since the kernel counts messages by it.
    Without its end a line is not shown: it might be continued."""
    descriptor = os.open(_KMSG, os.O_WRONLY)
    try:
        os.write(descriptor, f"<3>{line}\n".encode())
    finally:
        os.close(descriptor)


class PrivateKmsg:
    """Puts a FIFO at /dev/kmsg of this mount namespace."""

    def __init__(self, path: Path = Path("/run/kmsg")) -> None:
        os.mkfifo(path)
        mount("--bind", str(path), str(_KMSG))
        self._fd = os.open(_KMSG, os.O_RDWR | os.O_NONBLOCK)
        self._numbers = itertools.count(1)

    def say(self, line: str | bytes, more: str = "", age: float = 0.0, skip: int = 0) -> None:
        """Say LINE as the kernel would; SKIP numbers before it are left out, as if nobody had read
        them."""
        for _ in range(skip):
            next(self._numbers)
        raw = line if isinstance(line, bytes) else line.encode()
        stamp = int((time.monotonic() - age) * 1e6)
        head = f"3,{next(self._numbers)},{stamp},-;".encode()
        self.write(head + raw + b"\n" + more.encode())

    def write(self, record: bytes) -> None:
        """Put a record, whatever it is, once somebody has read the one before."""
        wait_until(lambda: self._unread() == 0, what="a reader of the kernel's messages")
        os.write(self._fd, record)

    def _unread(self) -> int:
        count = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, count)
        return count[0]
