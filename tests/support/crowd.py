"""Thousands of processes that do nothing, made in seconds: copies of one small interpreter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support.process import PYTHON
from tests.support.wait import wait_until

# The copies share the memory of the first.  They die of the TERM that it sends its group and is deaf
# to itself; nobody waits for them (SIGCHLD ignored, so the kernel reaps them), nor do they outlive it.
_CROWD = """
import os, signal, sys
keep = [os.open("/dev/null", os.O_RDONLY) for _ in range(int(sys.argv[2]))]
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
last = 0
for _ in range(int(sys.argv[1])):
    last = os.fork()
    if last == 0:
        os.close(0)
        signal.pause()
        os._exit(0)
print(last, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.readline()
os.killpg(0, signal.SIGTERM)
"""


class Crowd:
    """COUNT processes with DESCRIPTORS open files each beside the standard ones, run by BEFORE (as
    another user, say), until `close`."""

    def __init__(self, count: int, descriptors: int = 0, before: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*before, PYTHON, "-ISc", _CROWD, str(count), str(descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            self.close()
            raise AssertionError(f"a crowd of {count} processes could not be made")
        self.last = int(said)

    def close(self) -> None:
        """End them all, and wait until they are gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        wait_until(lambda: not _any_in(self._process.pid), 60, "the end of the crowd")

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _any_in(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def number_of_processes() -> int:
    """How many processes there are now."""
    return sum(one.name.isdecimal() for one in Path("/proc").iterdir())
