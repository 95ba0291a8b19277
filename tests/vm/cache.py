"""Where the lab keeps what is slow to make: each thing in a directory named after all it was made from.

That is ``vm`` in ``$HETERO_AGENT_LAB_CACHE`` or /var/cache/hetero-agent-lab; below it NAME-KEY
directories.  A thing is made beside its place and renamed into it, so what is there is whole; the two
newest of a name are kept, and those that another run uses.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.system.image import CACHE

ROOT: Final = CACHE / "vm"
_KEPT: Final = 2

#: What this process uses, locked for as long as it lives.
_used: Final[list[int]] = []


def digest(parts: Iterable[str | Path]) -> str:
    """Return a key of texts and files; of a directory all files below it count, with their names."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            found.update(b"text\0" + part.encode() + b"\0")
            continue
        files = [part] if part.is_file() else sorted(one for one in part.rglob("*") if one.is_file())
        for file in files:
            if "__pycache__" not in file.parts:
                found.update(str(file.relative_to(part.parent)).encode() + b"\0")
                found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


@contextmanager
def _locked() -> Iterator[None]:
    ROOT.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (ROOT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def has(name: str, key: str) -> bool:
    """Tell whether the directory NAME-KEY is there."""
    return (ROOT / f"{name}-{key}").exists()


def _use(place: Path) -> None:
    """Keep PLACE from being removed by others until this process ends."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    _used.append(descriptor)


def _in_use(place: Path) -> bool:
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def obtain(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the directory NAME-KEY; if it isn't there, MAKE fills it, nobody else meanwhile."""
    place = ROOT / f"{name}-{key}"
    with _locked():
        if not place.exists():
            fresh = ROOT / f"{name}-{key}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            started = time.monotonic()
            print(f"lab: making {place}", flush=True)
            make(fresh)
            fresh.rename(place)
            print(f"lab: made in {time.monotonic() - started:.0f} s", flush=True)
        os.utime(place)
        _use(place)
        known = sorted(ROOT.glob(f"{name}-*"), key=lambda one: one.stat().st_mtime)
        for old in known[:-_KEPT]:
            if not _in_use(old):
                shutil.rmtree(old)
    return place
