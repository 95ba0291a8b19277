"""Opening an SQLite file of ours, whatever state it is in.

- missing: made whole under another name, then renamed, so that a crash leaves none or all of it;
- ours and readable: opened, and locked against a second process for as long as it is open;
- newer schema, or locked by another process: an error, and the file is not touched;
- anything else (no SQLite, empty, truncated, damaged, another program's): set aside as
  ``NAME.corrupt-TIME`` with its journal, at most three of them are kept, and a new one made.

File format: https://www.sqlite.org/fileformat2.html, section 1.3 (the header).
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetero_agent.text import printable

_MAGIC: Final = b"SQLite format 3\0"
_HEADER: Final = 100
_KEEP_ASIDE: Final = 3
_LOCK_WAIT: Final = 3.0
#: Pages in the WAL at which a commit moves them to the file: the longest such commit stays short.
_CHECKPOINT: Final = 250
_SIDES: Final = ("-wal", "-shm", "-journal")


class StoreError(OSError):
    """Nothing was stored; the text says why.  A later attempt may succeed."""


class StoreUnusable(StoreError):
    """The file's schema is newer than this program; it was not touched."""


class StoreInUse(StoreError):
    """Another process has the file open; it was not touched."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file: APPLICATION is its application_id, VERSION its schema's, SCHEMA what makes an
    empty one, SYNCHRONOUS what SQLite waits for at a commit (``OFF`` or ``FULL``)."""

    application: int
    version: int
    schema: Sequence[str]
    synchronous: str


@dataclass(slots=True)
class Opened:
    """An open file: its CONNECTION, whether it is NEW, and NOTES on what was wrong."""

    connection: sqlite3.Connection
    new: bool
    notes: list[str] = field(default_factory=list)


class _Corrupt(Exception):
    """The file is not what it should be."""


def checksum(*parts: object) -> int:
    """Return the checksum of a row: crc32 of its parts, which hold no NUL themselves."""
    return zlib.crc32("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"))


def open_file(path: Path, kind: Kind) -> Opened:
    """Open PATH, or make it.  Raises StoreUnusable, StoreInUse, FreshFileError and StoreError."""
    notes: list[str] = []
    try:
        present = _look(path, kind)
        if present:
            return Opened(_connect(path, kind), new=False, notes=notes)
    except _Corrupt as error:
        notes.append(_set_aside(path, str(error)))
    except sqlite3.Error as error:
        raise StoreError(f"{path}: cannot be opened: {printable(error)}") from error
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(error.errno, f"{path}: {error.strerror}") from error
    try:
        _make(path, kind)
        return Opened(_connect(path, kind), new=True, notes=notes)
    except (sqlite3.Error, OSError, _Corrupt) as error:
        raise FreshFileError(f"{path}: cannot be made: {_reason(error)}", notes) from error


class FreshFileError(StoreError):
    """There is no file (any more: NOTES says what became of it) and none can be made now."""

    def __init__(self, text: str, notes: list[str]) -> None:
        super().__init__(text)
        self.notes = notes


def set_aside(path: Path, reason: str) -> str:
    """Move a file that turned out damaged after it was opened (and closed again) out of the way;
    return the note on it.  Raises StoreError."""
    return _set_aside(path, reason)


def damaged(error: sqlite3.Error) -> bool:
    """Tell whether ERROR means that the file is damaged, not that it can't be used just now."""
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT"))


def _reason(error: BaseException) -> str:
    return printable(getattr(error, "strerror", None) or error)


def _look(path: Path, kind: Kind) -> bool:
    """Tell whether there is a file of ours, by its header alone.  Raises _Corrupt, StoreUnusable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _Corrupt("a symbolic link") from error
        raise
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise _Corrupt("not a regular file")
        header = os.read(descriptor, _HEADER)
    finally:
        os.close(descriptor)
    if not header:
        raise _Corrupt("empty")
    if len(header) < _HEADER or header[:16] != _MAGIC:
        raise _Corrupt("not an SQLite file")
    if int.from_bytes(header[68:72], "big") != kind.application:
        raise _Corrupt("another program's file")
    _check_version(path, int.from_bytes(header[60:64], "big"), kind)
    return True


def _check_version(path: Path, version: int, kind: Kind) -> None:
    if version > kind.version:
        raise StoreUnusable(
            f"{path}: written by a newer hetero-agent (schema {version}, this one knows {kind.version}); "
            "it was not touched: install that version again, or move the file away"
        )
    if version < 1:
        raise _Corrupt("no schema version")


def _connect(path: Path, kind: Kind) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, timeout=_LOCK_WAIT, cached_statements=64, check_same_thread=False
    )
    try:
        # The lock is taken by the first read and kept: one process, and no lock calls per commit.
        # It also keeps the WAL index in memory, so that no mapped file can be cut under us.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute(f"PRAGMA synchronous={kind.synchronous}")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT}")
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute("PRAGMA trusted_schema=OFF")
        _check_version(path, connection.execute("PRAGMA user_version").fetchone()[0], kind)
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _Corrupt(printable(" ".join(str(verdict).split())))
        made = {row[0] for row in connection.execute("SELECT sql FROM sqlite_master")}
        if not made.issuperset(kind.schema):
            raise _Corrupt("not the tables of its schema")
    except sqlite3.Error as error:
        connection.close()
        name = getattr(error, "sqlite_errorname", "")
        if damaged(error):
            raise _Corrupt(printable(error)) from error
        if name.startswith("SQLITE_BUSY"):
            raise StoreInUse(f"{path}: another process has it open: is a hetero-agent running?") from error
        raise
    except BaseException:
        connection.close()
        raise
    return connection


def _make(path: Path, kind: Kind) -> None:
    fresh = path.with_name(path.name + ".new")
    for side in ("", *_SIDES):
        Path(f"{fresh}{side}").unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(fresh, isolation_level=None)
    try:
        connection.execute(f"PRAGMA synchronous={kind.synchronous}")
        connection.execute("BEGIN")
        for statement in kind.schema:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id={kind.application}")
        connection.execute(f"PRAGMA user_version={kind.version}")
        connection.execute("COMMIT")
    finally:
        connection.close()
    # A WAL without its file, left by whoever removed that, would be replayed into the new one.
    for side in _SIDES:
        Path(f"{path}{side}").unlink(missing_ok=True)
    fresh.rename(path)
    if kind.synchronous != "OFF":
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _set_aside(path: Path, reason: str) -> str:
    moment = time.time_ns() // 1000
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(moment // 1_000_000))
    aside = path.with_name(f"{path.name}.corrupt-{stamp}.{moment % 1_000_000:06}Z")
    try:
        path.rename(aside)
        for side in _SIDES:
            beside = Path(f"{path}{side}")
            if beside.exists():
                beside.rename(f"{aside}{side}")
    except OSError as error:
        raise StoreError(
            error.errno, f"{path}: {reason}, and it cannot be set aside: {error.strerror}"
        ) from error
    _prune(path)
    return f"{path} was damaged ({printable(reason)}); it is kept as {aside.name} and a new one was started"


def _prune(path: Path) -> None:
    """Keep the newest few of the files set aside; the time in their names orders them."""
    aside = sorted(one for one in path.parent.glob(f"{path.name}.corrupt-*") if not one.name.endswith(_SIDES))
    for one in aside[:-_KEEP_ASIDE]:
        for side in ("", *_SIDES):
            with contextlib.suppress(OSError):
                Path(f"{one}{side}").unlink()
