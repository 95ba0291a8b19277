"""The small reader through which everything in /sys and /proc is read.

Each read stands alone: a sick device answers EBUSY, EIO or nothing for one attribute, and only
that attribute is missing then.  What this process lacks (descriptors, memory) says nothing of any
device and is raised as OSError.  Nothing here opens a path outside /sys and /proc, so no device
node is ever opened; nodes are looked at by stat(2), which the driver doesn't notice.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

#: What sysfs gives at most for one attribute (a page), and what is kept of a /proc file.
ATTRIBUTE_MAX = 4096
TABLE_MAX = 65536
#: Entries of one directory that are looked at.
ENTRIES_MAX = 16384

_OUR_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
_ROOTS = ("/sys/", "/proc/")


@dataclass(frozen=True, slots=True)
class NodeStat:
    """What stat(2) says of a device node: KIND is ``char`` or ``block``; MODE permission bits."""

    kind: str
    major: int
    minor: int
    mode: int
    uid: int
    gid: int


def text(path: str, limit: int = ATTRIBUTE_MAX) -> str | None:
    """Return what the file holds, stripped, or None if it can't be read or is over LIMIT."""
    if not path.startswith(_ROOTS):
        raise ValueError(f"only /sys and /proc are read, not {path}")
    chunks = []
    left = limit + 1
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            while left > 0 and (chunk := os.read(handle, left)):
                chunks.append(chunk)
                left -= len(chunk)
        finally:
            os.close(handle)
    except OSError as error:
        _not_our_own(error)
        return None
    if left <= 0:
        return None
    return b"".join(chunks).decode("utf-8", "replace").strip()


def entries(path: str) -> list[str]:
    """Return the sorted names in a directory; none if it can't be read."""
    try:
        with os.scandir(path) as found:
            names = [entry.name for entry, _ in zip(found, range(ENTRIES_MAX), strict=False)]
    except OSError as error:
        _not_our_own(error)
        return []
    return sorted(names)


def _not_our_own(error: OSError) -> None:
    """Raise ERROR again if it is for want of something of this process."""
    if error.errno in _OUR_OWN:
        raise error


def link(path: str) -> str:
    """Return the last component of the link's target, "" if there is none."""
    try:
        return os.readlink(path).rsplit("/", 1)[-1]  # noqa: PTH115  (the text, not a Path)
    except OSError:
        return ""


def real(path: str) -> str:
    """Return PATH with all links resolved, "" if it leads nowhere."""
    try:
        return os.path.realpath(path, strict=True)
    except OSError:
        return ""


def is_there(path: str) -> bool:
    """Tell whether PATH exists; an error counts as no."""
    return os.path.lexists(path)


def node(path: str) -> NodeStat | None:
    """Return what PATH is if it is a device node (not a link to one), without opening it."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISCHR(found.st_mode):
        kind = "char"
    elif stat.S_ISBLK(found.st_mode):
        kind = "block"
    else:
        return None
    return NodeStat(
        kind=kind,
        major=os.major(found.st_rdev),
        minor=os.minor(found.st_rdev),
        mode=stat.S_IMODE(found.st_mode),
        uid=found.st_uid,
        gid=found.st_gid,
    )


def pairs(content: str, separator: str) -> dict[str, str]:
    """Return the ``key SEPARATOR value`` lines of CONTENT (uevent, /proc files)."""
    lines = (line.partition(separator) for line in content.splitlines())
    return {key.strip(): value.strip() for key, mark, value in lines if mark}
