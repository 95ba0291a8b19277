"""A cgroup whose processes can be frozen so that not even SIGKILL ends them: as near as a test gets
to a process that waits in the kernel for a sick device."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wait import wait_until


class Freezer:
    """The cgroup GROUP of the first version's freezer controller."""

    def __init__(self, group: Path) -> None:
        self._group = group
        self._state = group / "freezer.state"

    def freeze(self, pid: int) -> None:
        """Freeze a process, with those that are frozen already."""
        (self._group / "cgroup.procs").write_text(str(pid))
        self._state.write_text("FROZEN")
        wait_until(lambda: self._state.read_text() == "FROZEN\n", what="frozen")

    def thaw(self) -> None:
        """Let all of them go on."""
        self._state.write_text("THAWED")

    def close(self) -> None:
        """Thaw, and wait until all have ended."""
        self.thaw()
        wait_until(lambda: not (self._group / "cgroup.procs").read_text(), what="an empty cgroup")
        self._group.rmdir()


@contextlib.contextmanager
def freezing() -> Iterator[Freezer]:
    """Mount the controller for one test; skips it where that can't be done."""
    top = Path(f"/tmp/hetero-agent-freezer-{os.getpid()}")
    top.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "cgroup", "-o", "freezer", "none", str(top)], check=False)
        if done.returncode:
            pytest.skip("no cgroup v1 freezer can be mounted here")
        try:
            group = top / f"hetero-agent-test-{os.getpid()}"
            group.mkdir()
            one = Freezer(group)
            yield one
            one.close()
        finally:
            subprocess.run(["umount", str(top)], check=True)
    finally:
        top.rmdir()
