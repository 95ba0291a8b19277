"""Network namespaces: that of a process, kept alive by a name of ours, and work done inside one.

A namespace is known by an open descriptor of its file (namespaces(7)); device and inode of that
tell it from others as long as somebody keeps it alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from hetero_agent.access.manifest import AccessError

_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 4096
_MNT_DETACH: Final = 2
#: Most network namespaces of processes that are looked into (`others`).
_MOST: Final = 1024

T = TypeVar("T")


class Identity(NamedTuple):
    """What tells one living namespace from another: st_dev and st_ino of its file."""

    device: int
    inode: int


class Process(NamedTuple):
    """A process that can't be mistaken for a later one: START is field 22 of /proc/PID/stat."""

    pid: int
    start: int


def open_file(path: str | Path) -> int:
    """Return a descriptor of the namespace at PATH.  Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def identity(namespace: int) -> Identity:
    """Return what the open NAMESPACE is known by."""
    found = os.fstat(namespace)
    return Identity(found.st_dev, found.st_ino)


@contextlib.contextmanager
def home() -> Iterator[int]:
    """Yield the namespace that this process is in: the host's."""
    namespace = open_file("/proc/thread-self/ns/net")
    try:
        yield namespace
    finally:
        os.close(namespace)


@contextlib.contextmanager
def of_process(process: Process) -> Iterator[int]:
    """Yield the namespace of PROCESS.  Raises AccessError if it has ended, also if another one has
    its pid now."""
    try:
        # the start time is looked at after the namespace: who has it then had the pid all the time
        namespace = open_file(f"/proc/{process.pid}/ns/net")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            raise AccessError(f"process {process.pid} has ended") from error
        raise AccessError(
            f"the network namespace of process {process.pid} can't be opened: {error.strerror}"
        ) from error
    try:
        if _started(process.pid) != process.start:
            raise AccessError(f"process {process.pid} has ended")
        yield namespace
    finally:
        os.close(namespace)


def _started(pid: int) -> int:
    """Field 22 of /proc/PID/stat (proc(5)), -1 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return -1
    return int(text.rpartition(")")[2].split()[19])


def others(known: set[Identity]) -> Iterator[int]:
    """Yield the namespaces that processes of this host are in, each once, those KNOWN left out.
    Each descriptor is good until the next is asked for."""
    seen = set(known)
    for name in os.listdir("/proc"):  # noqa: PTH208 (names only)
        if not name.isdecimal() or len(seen) >= _MOST:
            continue
        try:
            namespace = open_file(f"/proc/{name}/ns/net")
        except OSError:
            continue  # it has ended, or may not be looked at
        try:
            if (one := identity(namespace)) not in seen:
                seen.add(one)
                yield namespace
        finally:
            os.close(namespace)


# -- a name of ours -----------------------------------------------------------------------------
def keep(namespace: int, path: Path) -> None:
    """Keep the open NAMESPACE alive, whatever becomes of its processes, as long as it is mounted at
    PATH (namespaces(7), "Namespace lifetime").  Raises OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.touch(mode=0o444)
    _call("mount", f"/proc/self/fd/{namespace}".encode(), os.fsencode(path), None, _MS_BIND, None)


def let_go(path: Path) -> None:
    """Take the name at PATH away, whether something is mounted there or not.  Raises OSError."""
    while _is_namespace(path):
        _call("umount2", os.fsencode(path), _MNT_DETACH)
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def kept(path: Path) -> Iterator[int | None]:
    """Yield the namespace that is kept at PATH, None if none is."""
    if not _is_namespace(path):
        yield None
        return
    namespace = open_file(path)
    try:
        yield namespace
    finally:
        os.close(namespace)


def _is_namespace(path: Path) -> bool:
    """Whether a namespace is mounted at PATH, and not only the empty file there."""
    try:
        return path.stat().st_dev == os.stat("/proc/self/ns/net").st_dev  # noqa: PTH116 (no object wanted)
    except FileNotFoundError:
        return False


# -- inside ---------------------------------------------------------------------------------------
def inside(namespace: int, work: Callable[[], T]) -> T:
    """Return what WORK returns in the open NAMESPACE, or raise what it raises: in a thread that ends
    then, so that no other ever is in the wrong namespace."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            _call("setns", namespace, _CLONE_NEWNET)
            result.append(work())
        except BaseException as error:  # for the caller, whatever it is
            failure.append(error)

    thread = threading.Thread(target=run, name="network-namespace", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _call(function: str, *arguments: Any) -> None:
    """Call FUNCTION of the C library.  Raises OSError."""
    import ctypes  # noqa: PLC0415 (late: only who moves something needs it)

    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
