"""Control groups of any name, made where the agent looks: systemd's own hierarchy, else the unified."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.wait import wait_until


class ControlGroup:
    """The group PATH ("/system.slice/x.service"), at DIRECTORY while the mount below lasts."""

    def __init__(self, path: str, directory: Path) -> None:
        self.path = path
        self._directory = directory

    def add(self, pid: int) -> None:
        """Move a process into it."""
        (self._directory / "cgroup.procs").write_text(str(pid))


def _mounts() -> list[list[str]]:
    named = ["-t", "cgroup", "-o", "none,name=systemd"]
    unified = ["-t", "cgroup2"]
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return [named, unified] if any(":name=systemd:" in line for line in lines) else [unified]


@contextlib.contextmanager
def control_group(*paths: str) -> Iterator[list[ControlGroup]]:
    """Make the groups PATHS; they go with the block, and what is still in them goes to the root."""
    top = Path(tempfile.mkdtemp(prefix="hetero-agent-cgroup-", dir="/tmp"))
    for words in _mounts():
        if subprocess.run(["mount", *words, "none", str(top)], check=False, stderr=2).returncode == 0:
            break
    else:
        top.rmdir()
        raise RuntimeError("no control group hierarchy can be mounted")
    made: list[Path] = []
    try:
        groups = []
        for path in paths:
            directory = top
            for part in path.strip("/").split("/"):
                directory /= part
                if not directory.exists():
                    directory.mkdir()
                    made.append(directory)
            groups.append(ControlGroup(path, directory))
        yield groups
    finally:
        for directory in reversed(made):
            wait_until(lambda one=directory: _removed(one, top), what=f"the end of {directory}")
        subprocess.run(["umount", str(top)], check=True)
        top.rmdir()


def _empty(directory: Path, top: Path) -> None:
    for pid in (directory / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (top / "cgroup.procs").write_text(pid)


def _removed(directory: Path, top: Path) -> bool:
    try:
        # each time: what was in there may have forked meanwhile
        _empty(directory, top)
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
