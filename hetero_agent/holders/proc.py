"""What /proc says of one process, read so that a recycled pid can't be mistaken for it.

Formats: proc(5), cgroups(7), and systemd's rule for the unit in a cgroup path
(cg_path_get_unit).  Everything is read relative to a descriptor of /proc/PID, which goes dead
with the process and never becomes another one.  Only standard modules, for the worker's sake.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

#: PF_KTHREAD of include/linux/sched.h, in field 9 of /proc/PID/stat.
KERNEL_THREAD = 0x00200000

_UNIT_TYPES = (".service", ".scope", ".socket", ".mount", ".swap", ".slice")
_CHUNK = 65536
_UID = struct.Struct("=I")
# ioctl_ns(2), _IO(0xb7, 4)
_NS_GET_OWNER_UID = 0xB704


class Stat:
    """The fields of /proc/PID/stat that are used here; START is in clock ticks since boot.

    No NamedTuple or dataclass: typing alone would cost the worker a megabyte.
    """

    __slots__ = ("comm", "flags", "parent", "session", "start", "state", "threads")

    def __init__(self, text: str) -> None:
        # comm may hold anything, brackets too: it ends at the last one
        head, _, tail = text.rpartition(")")
        rest = tail.split()
        self.comm = head.partition("(")[2]
        self.state = rest[0]
        self.parent = int(rest[1])
        self.session = int(rest[3])
        self.flags = int(rest[6])
        self.threads = int(rest[17])
        self.start = int(rest[19])

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more: a zombie, and not one whose threads live on."""
        return self.state in "ZX" and self.threads <= 1


@contextmanager
def opened(pid: int) -> Iterator[int]:
    """Give a descriptor of /proc/PID.  Raises FileNotFoundError if there is no such process."""
    fd = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def read(name: str, base: int) -> bytes:
    """Return the whole of one file under the descriptor BASE.  Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=base)
    try:
        parts = []
        while part := os.read(fd, _CHUNK):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def namespace_owner(base: int) -> int:
    """Return the uid that made the user namespace of the process under BASE and has all rights in
    it; -1 if that can't be told."""
    try:
        fd = os.open("ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=base)
    except OSError:
        return -1
    try:
        found = bytearray(_UID.size)
        fcntl.ioctl(fd, _NS_GET_OWNER_UID, found)
    except OSError:
        return -1
    finally:
        os.close(fd)
    return int(_UID.unpack(found)[0])


def stat(base: int) -> Stat:
    """Read /proc/PID/stat.  Raises OSError (ProcessLookupError once it is reaped)."""
    return Stat(read("stat", base).decode("utf-8", "backslashreplace"))


def start_of(pid: int) -> int | None:
    """Return the start time of PID in ticks, None if there is no such process.  Raises OSError if
    that can't be told, as for want of a descriptor."""
    try:
        with opened(pid) as base:
            return stat(base).start
    except (FileNotFoundError, ProcessLookupError):
        return None


def status(base: int) -> tuple[int, tuple[int, int, int, int]]:
    """Return thread group id and the real, effective, saved and filesystem uid."""
    group, uids = 0, (0, 0, 0, 0)
    for line in read("status", base).splitlines():
        if line.startswith(b"Tgid:"):
            group = int(line.split()[1])
        elif line.startswith(b"Uid:"):
            real, effective, saved, filesystem = (int(word) for word in line.split()[1:5])
            return group, (real, effective, saved, filesystem)
    return group, uids


def cgroup(base: int) -> str:
    """Return the cgroup path: of systemd's own v1 hierarchy if there is one, else of v2."""
    unified = named = ""
    for line in read("cgroup", base).decode("utf-8", "backslashreplace").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            unified = path
        elif controllers == "name=systemd":
            named = path
    return named if len(named) > 1 else unified or named


def unit_of(path: str) -> str:
    """Return the system unit that a cgroup path lies in, "" for none.

    The first component below the slices decides: what is delegated to users or container
    managers lies further down, so they can't choose this name.
    """
    for part in path.split("/"):
        if not part or part.endswith(".slice"):
            continue
        # systemd escapes names that clash with the kernel's by a leading underscore
        name = part.removeprefix("_")
        return name if name.endswith(_UNIT_TYPES) else ""
    return ""


def ancestors(parent: int, most: int = 64) -> list[tuple[int, int]]:
    """Return PARENT and the processes above it, nearest first, each with its start time, as far as
    they can be read."""
    found: list[tuple[int, int]] = []
    while parent > 0 and len(found) < most:
        try:
            with opened(parent) as base:
                facts = stat(base)
        except OSError:
            break
        found.append((parent, facts.start))
        parent = facts.parent
    return found
