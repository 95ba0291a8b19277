"""An agent whose clocks a test moves: a sleep of the machine, and jumps of the wall clock."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from tests.support.process import PYTHON

#: What a sleep does: CLOCK_BOOTTIME and CLOCK_REALTIME go on, CLOCK_MONOTONIC stands still.  No
#: machine can be put to sleep by a test, and a time namespace has fixed offsets, so the agent and
#: its workers read these two clocks through a page that holds an offset in nanoseconds.
_SHIM = """
import mmap, os, struct, sys, time
_page = mmap.mmap(os.open({place!r}, os.O_RDONLY), 8, prot=mmap.PROT_READ)
_real = time.clock_gettime_ns
def _shifted(clock):
    now = _real(clock)
    if clock in (time.CLOCK_BOOTTIME, time.CLOCK_REALTIME):
        now += struct.unpack_from("=q", _page)[0]
    return now
time.clock_gettime_ns = _shifted
"""

_DAEMON = """
from hetero_agent.workers import process
_command = process.command
def command(module):
    interpreter, *flags, code, packages = _command(module)
    return (interpreter, *flags, {shim!r} + code, packages)
process.command = command
from hetero_agent.daemon import main
sys.exit(main())
"""

#: libfaketime of the package of that name, whatever the architecture.
_FAKETIME = "faketime/libfaketime.so.1"


class Sleep:
    """Sends a machine to sleep as far as one agent can tell: start that by PROGRAM."""

    def __init__(self, directory: Path) -> None:
        place = directory / "slept"
        place.write_bytes(bytes(8))
        shim = _SHIM.format(place=str(place))
        self.program = (PYTHON, "-c", shim + _DAEMON.format(shim=shim))
        self._file = os.open(place, os.O_RDWR)
        self._page = mmap.mmap(self._file, 8)

    @property
    def boot(self) -> int:
        """CLOCK_BOOTTIME in microseconds, as the agent has it."""
        return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) + self._offset) // 1000

    @property
    def _offset(self) -> int:
        return int(struct.unpack_from("=q", self._page)[0])

    def wake_after(self, seconds: float) -> None:
        """The machine wakes up after so many seconds of sleep."""
        struct.pack_into("=q", self._page, 0, self._offset + int(seconds * 1e9))

    def close(self) -> None:
        self._page.close()
        os.close(self._file)


class WallClock:
    """Moves CLOCK_REALTIME of one program, by libfaketime: start that with ENV."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "faketime"
        self.move(0)
        self.env = {
            "LD_PRELOAD": str(_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
        }

    def move(self, seconds: int) -> None:
        """Set it to SECONDS from the true time."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}\n")
        fresh.rename(self._file)


def _library() -> Path:
    found = sorted(Path("/usr/lib").glob(f"*/{_FAKETIME}"))
    assert found, "libfaketime is not installed (make setup)"
    return found[0]
