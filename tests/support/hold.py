"""Processes that hold a device open, of any uid, with or without a child that keeps it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support.calls import as_user
from tests.support.process import PYTHON
from tests.support.wait import wait_until

# O_NOCTTY: an opened terminal must not become the holder's.
_HOLD = """
import os, sys, time
if sys.argv[3] == "later":
    print("started", flush=True)
    sys.stdin.readline()
fd = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
child = os.fork() if sys.argv[2] == "child" else -1
if child == 0:
    os.setsid()
    time.sleep(3600)
print(child, flush=True)
sys.stdin.read()
"""


class HoldingProcess:
    """A process of UID that has PATH open until it is told to close or killed.

    With CHILD it forks one that leaves its session and keeps the descriptor.  LATER: it opens the
    path when `open` says so, as the process of a lease does.
    """

    def __init__(
        self,
        path: str | Path,
        uid: int = 0,
        groups: Sequence[int] = (),
        child: bool = False,
        later: bool = False,
    ) -> None:
        self.path = path
        self.child = -1
        words = [str(path), "child" if child else "alone", "later" if later else "now"]
        self._process = subprocess.Popen(
            [*as_user(uid, groups), PYTHON, "-ISc", _HOLD, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        if later:
            assert self._line() == "started\n"
        else:
            self.child = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"could not open {self.path}: status {self._process.wait()}"
        return line

    def open(self) -> None:
        """Have it open the path now (LATER)."""
        assert self._process.stdin is not None
        self._process.stdin.write("open\n")
        self._process.stdin.flush()
        self.child = int(self._line())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def start(self) -> int:
        """Its start time in clock ticks since boot, as GetHolders and Reap have it."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19])

    def running(self) -> bool:
        return self._process.poll() is None

    def finish(self) -> None:
        """Have the process end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def kill(self) -> None:
        """SIGKILL; a child lives on."""
        self._process.kill()
        self._process.wait(30)

    def kill_child(self) -> None:
        os.kill(self.child, 9)
        wait_until(lambda: not _alive(self.child), what="the end of the child")
        self.child = -1

    def close(self) -> None:
        if self.running():
            self.kill()
        if self.child > 0 and _alive(self.child):
            self.kill_child()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> HoldingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _alive(pid: int) -> bool:
    """Tell whether PID is a process that still runs (a zombie holds nothing)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
