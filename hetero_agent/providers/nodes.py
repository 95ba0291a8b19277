"""What the nodes that a provider names are on this host, by the kernel's word alone.

Blocking: the registry runs `inspect` in a thread with a deadline, since a provider's directory or a
sick driver's node can hang.  Nothing is opened but path descriptors (O_PATH), which no driver sees.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import Node, Role
from hetero_agent.text import printable

DEV: Final = "/dev/"

# Whatever the configuration lists: memory, terminals and consoles are nobody's accelerator, and 1:3 is
# the stdin of half the machine.  Majors as in the kernel's Documentation/admin-guide/devices.txt.
_NEVER_SUBSYSTEMS: Final = frozenset({"mem", "tty", "vc", "vtconsole", "block"})
_NEVER_MAJORS: Final = frozenset({1, 4, 5, 7, *range(128, 144)})
# Writable for everybody, or full of terminals.
_NEVER_DIRECTORIES: Final = ("/dev/shm/", "/dev/pts/", "/dev/mqueue/", "/dev/fd/")  # noqa: S108

_WALK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def inspect(
    claims: Iterable[tuple[str, Role]], subsystems: tuple[str, ...], directory: str
) -> dict[tuple[str, Role], Node | None]:
    """Return what each claimed (path, role) is; None where the path does not exist (yet).

    SUBSYSTEMS are the kernel subsystems that character nodes may belong to, DIRECTORY the one ("" for
    none) that file nodes lie in.  Raises Refusal for a node that is not the provider's to name.
    """
    inspector = _Inspector(subsystems, directory)
    try:
        return {claim: inspector.node(*claim) for claim in claims}
    finally:
        inspector.close()


class _Inspector:
    def __init__(self, subsystems: tuple[str, ...], directory: str) -> None:
        self._subsystems = subsystems
        self._roots: tuple[str, ...] = ()
        self._fd = -1
        self._fsdev = 0
        self._drivers: dict[int, str] | None = None
        if directory:
            resolved = os.path.realpath(directory)
            self._roots = (os.path.normpath(directory) + "/", resolved + "/")
            try:
                self._fd = os.open(resolved, _WALK | os.O_DIRECTORY)
                self._fsdev = os.fstat(self._fd).st_dev
            except OSError:
                self._fd = -1  # the directory comes with the provider's first file

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def node(self, path: str, role: Role) -> Node | None:
        for root in self._roots:
            if path.startswith(root):
                return self._file(path, path.removeprefix(root), role)
        if path.startswith(DEV):
            return self._char(path, role)
        where = f"{DEV} or {self._roots[0]}" if self._roots else DEV
        raise _refusal(path, f"lies outside {where}")

    def _file(self, path: str, below: str, role: Role) -> Node | None:
        if self._fd < 0:
            return None
        *parents, name = PurePosixPath(below).parts
        found = self._walk(path, parents, name)
        if found is None:
            return None
        if stat.S_ISLNK(found.st_mode):
            raise _refusal(path, "is a symbolic link")
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(path, f"is {_kind(found)}; in the provider's directory only regular files are taken")
        if found.st_nlink != 1:
            raise _refusal(
                path, "has a second name (hard link), which may lie outside the provider's directory"
            )
        if found.st_dev != self._fsdev:
            raise _refusal(path, "lies on another filesystem than the provider's directory")
        return Node(
            path,
            role,
            "file",
            fsdev=found.st_dev,
            inode=found.st_ino,
            mode=stat.S_IMODE(found.st_mode),
            gid=found.st_gid,
        )

    def _walk(self, path: str, parents: list[str], name: str) -> os.stat_result | None:
        """Stat NAME below PARENTS of the directory, each step by descriptor and no link followed."""
        opened: list[int] = []
        here = self._fd
        try:
            for part in parents:
                here = os.open(part, _WALK | os.O_DIRECTORY, dir_fd=here)
                opened.append(here)
            return os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            # ELOOP or ENOTDIR: a link or a file where a directory should be
            raise _refusal(path, f"cannot be reached without following links: {error.strerror}") from error
        finally:
            for fd in opened:
                os.close(fd)

    def _char(self, path: str, role: Role) -> Node | None:
        try:
            resolved = os.path.realpath(path, strict=True)
            if not resolved.startswith(DEV) or resolved.startswith(_NEVER_DIRECTORIES):
                raise _refusal(path, f"leads to {printable(resolved)}, which is no device node of the kernel")
            # the path is resolved, so whatever is a link now was put there meanwhile
            fd = os.open(resolved, _WALK)
            try:
                found = os.fstat(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _refusal(path, f"cannot be looked at: {error.strerror}") from error
        if not stat.S_ISCHR(found.st_mode):
            raise _refusal(path, f"is {_kind(found)}; below {DEV} only character nodes are taken")
        major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
        subsystem = self._subsystem(major, minor)
        if major in _NEVER_MAJORS or subsystem in _NEVER_SUBSYSTEMS:
            raise _refusal(
                path, f"({major}:{minor}, subsystem {subsystem or 'unknown'}) is never a provider's node"
            )
        if subsystem not in self._subsystems:
            allowed = ", ".join(self._subsystems) or "none"
            raise _refusal(
                path,
                f"belongs to subsystem {printable(subsystem) or 'unknown'}; those allowed for this provider"
                f" in the configuration: {allowed}",
            )
        mode, gid = stat.S_IMODE(found.st_mode), found.st_gid
        return Node(resolved, role, "char", major=major, minor=minor, mode=mode, gid=gid)

    def _subsystem(self, major: int, minor: int) -> str:
        """The node's subsystem; for numbers that sysfs lacks (NVIDIA's own), the driver's name in
        /proc/devices."""
        try:
            return Path(f"/sys/dev/char/{major}:{minor}/subsystem").readlink().name
        except OSError:
            if self._drivers is None:
                self._drivers = _character_drivers()
            return self._drivers.get(major, "")


def _character_drivers() -> dict[int, str]:
    drivers: dict[int, str] = {}
    text = Path("/proc/devices").read_text(encoding="ascii", errors="replace")
    for line in text.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            drivers.setdefault(int(number), name)
    return drivers


def _kind(found: os.stat_result) -> str:
    for test, word in (
        (stat.S_ISREG, "a regular file"),
        (stat.S_ISBLK, "a block node"),
        (stat.S_ISCHR, "a character node"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a FIFO"),
    ):
        if test(found.st_mode):
            return word
    return "a socket"


def _refusal(path: str, why: str) -> Refusal:
    return Refusal(ErrorKind.INVALID_ARGUMENT, f"node {path} {why}")
