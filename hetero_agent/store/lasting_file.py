"""The file of what outlives a reboot, as its thread uses it: read, write, reserve.

Every row has a checksum; a wrong one is dropped and noted.  When the file is removed or replaced
under us (an administrator's clean-up), it is made again and the cordons are written into it, so
that "stored" stays true.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hetero_agent.core.model import AuditRecord, Cordon
from hetero_agent.store.codec import decode, encode
from hetero_agent.store.database import (
    FreshFileError,
    Kind,
    StoreError,
    StoreInUse,
    StoreUnusable,
    checksum,
    damaged,
    open_file,
    set_aside,
)
from hetero_agent.text import printable

_log = logging.getLogger("hetero_agent.store")

#: Transitions kept per device (design section 3), and the most devices whose history and count
#: are kept: the ones not heard of for longest go.
HISTORY: Final = 20
DEVICES: Final = 8192

#: How many numbers are reserved at a time.
BLOCK: Final = 1_000_000

#: After so many written keys the tables are cut to `DEVICES`.
_PRUNE_EVERY: Final = 256

KIND: Final = Kind(
    application=0x48414C32,  # "HAL2"
    version=1,
    schema=(
        "CREATE TABLE cordons (key TEXT PRIMARY KEY, data TEXT NOT NULL, sum INTEGER NOT NULL)",
        "CREATE TABLE counts (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE,"
        " count INTEGER NOT NULL, sum INTEGER NOT NULL)",
        "CREATE TABLE history (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL,"
        " data TEXT NOT NULL, sum INTEGER NOT NULL)",
        "CREATE INDEX history_key ON history (key, number)",
        "CREATE TABLE ceilings (key TEXT PRIMARY KEY, ceiling INTEGER NOT NULL, sum INTEGER NOT NULL)",
    ),
    synchronous="FULL",
)

_PUT_CORDON: Final = "INSERT OR REPLACE INTO cordons (key, data, sum) VALUES (?, ?, ?)"
_PUT_COUNT: Final = "INSERT OR REPLACE INTO counts (key, count, sum) VALUES (?, ?, ?)"
_PUT_HISTORY: Final = "INSERT INTO history (key, data, sum) VALUES (?, ?, ?)"
_PUT_CEILING: Final = "INSERT OR REPLACE INTO ceilings (key, ceiling, sum) VALUES (?, ?, ?)"
_PRUNE_KEY: Final = (
    "DELETE FROM history WHERE key = ? AND number <="
    " (SELECT number FROM history WHERE key = ? ORDER BY number DESC LIMIT 1 OFFSET ?)"
)
_PRUNE_KEYS: Final = (
    "DELETE FROM history WHERE key IN"
    " (SELECT key FROM history GROUP BY key ORDER BY max(number) DESC LIMIT -1 OFFSET ?)"
)
_PRUNE_COUNTS: Final = (
    "DELETE FROM counts WHERE number IN (SELECT number FROM counts ORDER BY number DESC LIMIT -1 OFFSET ?)"
)


@dataclass(slots=True)
class Found:
    """What the file held.  CEILINGS lacks a name whose ceiling is not known."""

    cordons: dict[str, Cordon] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    history: dict[str, list[AuditRecord]] = field(default_factory=dict)
    ceilings: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class LastingFile:
    """The open file, or the attempt at one.  SCRATCH is where a copy is made of a file that can
    only be read."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self._path = path
        self._scratch = scratch
        self._db: sqlite3.Connection | None = None
        self._inode = (0, 0)
        self._cordons: dict[str, Cordon] = {}
        self._ceilings: dict[str, int] = {}
        self._written_keys = 0
        #: How many rows were read so far: whoever waits for `read` sees by it that it goes on.
        self.rows = 0

    def read(self) -> tuple[Found, str]:
        """Return what the file holds, and why it can't be written ("" if it can).
        Raises StoreUnusable and StoreInUse."""
        try:
            notes = self._open()
            try:
                found = self._read(self._connection())
            except sqlite3.Error as error:
                if not damaged(error):
                    raise StoreError(f"{self._path}: cannot be read: {printable(error)}") from error
                self.close()
                notes.append(set_aside(self._path, str(error)))
                notes += self._open()
                found = Found()
            found.notes += notes
            problem = ""
        except (StoreUnusable, StoreInUse):
            raise
        except FreshFileError as error:
            found, problem = Found(notes=error.notes), str(error)
        except StoreError as error:
            found, problem = self._read_copy(), str(error)
        self._cordons = dict(found.cordons)
        self._ceilings = dict(found.ceilings)
        return found, problem

    def put_cordon(self, device: str, cordon: Cordon | None) -> Cordon | None:
        """Write a cordon, or its removal, to the disk; return the one before.  Raises StoreError."""
        with self._transaction() as db:
            _put_cordon(db, device, cordon)
        before = self._cordons.pop(device, None)
        if cordon is not None:
            self._cordons[device] = cordon
        return before

    def put(
        self,
        counts: Mapping[str, int],
        history: Mapping[str, Iterable[AuditRecord]],
        ceilings: Mapping[str, int],
    ) -> None:
        """Write counts, new transitions and ceilings in one transaction.  Raises StoreError."""
        with self._transaction() as db:
            for key, count in counts.items():
                db.execute(_PUT_COUNT, (key, count, checksum(key, count)))
            for key, records in history.items():
                for record in records:
                    data = encode(record)
                    db.execute(_PUT_HISTORY, (key, data, checksum(key, data)))
                db.execute(_PRUNE_KEY, (key, key, HISTORY))
            for name, given in ceilings.items():
                ceiling = self._ceilings[name] = max(given, self._ceilings.get(name, 0))
                db.execute(_PUT_CEILING, (name, ceiling, checksum(name, ceiling)))
            self._written_keys += len(counts) + len(history)
            if self._written_keys >= _PRUNE_EVERY:
                self._written_keys = 0
                db.execute(_PRUNE_KEYS, (DEVICES,))
                db.execute(_PRUNE_COUNTS, (DEVICES,))

    def close(self) -> None:
        """Close it, if it is open."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"{self._path}: not open")
        return self._db

    def _open(self) -> list[str]:
        try:
            opened = open_file(self._path, KIND)
            facts = self._path.stat()
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(error.errno, f"{self._path}: {error.strerror}") from error
        self._db = opened.connection
        self._inode = (facts.st_dev, facts.st_ino)
        return opened.notes

    def _present(self) -> bool:
        try:
            facts = self._path.stat()
        except OSError:
            return False
        return (facts.st_dev, facts.st_ino) == self._inode

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction on the file that PATH names now, opened again if need be."""
        if self._db is None or not self._present():
            self.close()
            for note in self._open():
                _log.warning("%s", note)
            with self._transaction() as db:
                for device, cordon in self._cordons.items():
                    _put_cordon(db, device, cordon)
        db = self._connection()
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except (sqlite3.Error, ValueError, TypeError) as error:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            # What failed may be the file system under it: the next attempt starts from the path.
            self.close()
            raise StoreError(f"{self._path}: cannot be written: {printable(error)}") from error

    def _read(self, db: sqlite3.Connection) -> Found:
        """Read all.  What is read stays: to look for garbage in it, again and again, would take a fifth
        of the time."""

        def row() -> None:
            self.rows += 1

        collecting = gc.isenabled()
        gc.disable()
        try:
            return _read(db, self._path, row)
        finally:
            if collecting:
                gc.enable()

    def _read_copy(self) -> Found:
        """Read a file that can't be opened for writing (its journal must be replayed, so a copy)."""
        found = Found()
        try:
            with tempfile.TemporaryDirectory(dir=self._scratch, prefix="lasting-") as directory:
                copy = Path(directory) / self._path.name
                for side in ("", "-wal"):
                    source = Path(f"{self._path}{side}")
                    if not side or source.exists():
                        shutil.copyfile(source, f"{copy}{side}")
                opened = open_file(copy, KIND)
                try:
                    if not opened.new:
                        found = self._read(opened.connection)
                finally:
                    opened.connection.close()
                if opened.notes:
                    found.notes.append(f"{self._path} is damaged")
        except (OSError, sqlite3.Error) as error:
            found.notes.append(f"{self._path}: cordons, counts and history are not known: {printable(error)}")
        return found


def _put_cordon(db: sqlite3.Connection, device: str, cordon: Cordon | None) -> None:
    if cordon is None:
        db.execute("DELETE FROM cordons WHERE key = ?", (device,))
    else:
        data = encode(cordon)
        db.execute(_PUT_CORDON, (device, data, checksum(device, data)))


def _read(db: sqlite3.Connection, path: Path, row: Callable[[], None]) -> Found:
    found = Found()

    def rows(table: str, query: str) -> Iterator[tuple[str, Any]]:
        for key, value, total in db.execute(query):
            row()
            if checksum(key, value) == total:
                yield key, value
            else:
                found.notes.append(f"{path}: a damaged row of {table} was dropped: {printable(key, 80)}")

    for key, data in rows("cordons", "SELECT key, data, sum FROM cordons"):
        try:
            found.cordons[key] = decode(Cordon, data)
        except ValueError as error:
            found.notes.append(f"{path}: cordon of {printable(key, 80)} was dropped: {printable(error)}")
    found.counts.update(rows("counts", "SELECT key, count, sum FROM counts"))
    found.ceilings.update(rows("ceilings", "SELECT key, ceiling, sum FROM ceilings"))
    for key, data in rows("history", "SELECT key, data, sum FROM history ORDER BY number"):
        try:
            found.history.setdefault(key, []).append(decode(AuditRecord, data))
        except ValueError as error:
            found.notes.append(f"{path}: history of {printable(key, 80)} was dropped: {printable(error)}")
    return found
