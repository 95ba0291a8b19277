"""The lease ledger and audit outbox: SQLite in the runtime directory, used on the loop.

The directory is a tmpfs that a reboot empties, so nothing is gained by waiting for a disk:
``synchronous=OFF``.  What must hold is that a killed process leaves whole transactions: a WAL
does that, since what was written to it is in the page cache whatever becomes of the writer.

Every row has its boot id and a checksum; a row that is wrong is moved to the table
``quarantine`` alone.  A damaged audit row leaves a record that says so under its sequence
number, so that the trail stays gapless.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from hetero_agent.core.effects import Changes, Restored
from hetero_agent.core.model import (
    AuditKind,
    AuditRecord,
    Debt,
    DeviceRecord,
    Instant,
    Lease,
    RequestKey,
    RequestRecord,
)
from hetero_agent.store.codec import decode, encode
from hetero_agent.store.database import (
    FreshFileError,
    Kind,
    StoreError,
    checksum,
    damaged,
    open_file,
    set_aside,
)
from hetero_agent.text import printable

T = TypeVar("T")

#: How long an ended request is remembered (design section 4), in microseconds.
REMEMBER: Final = 24 * 3600 * 1_000_000

#: Pause between two looks for forgotten requests, and the most that one commit removes.
_PURGE_EVERY: Final = 60_000_000
_PURGE_BATCH: Final = 16

#: The newest audit records that are also kept in memory, so that the outbox is rarely read back.
_TAIL: Final = 512

#: Rows kept in ``quarantine``.
_QUARANTINE: Final = 1000

KIND: Final = Kind(
    application=0x48414C31,  # "HAL1"
    version=1,
    schema=(
        *(
            f"CREATE TABLE {table} (key TEXT PRIMARY KEY, boot TEXT NOT NULL, data TEXT NOT NULL,"
            " sum INTEGER NOT NULL)"
            for table in ("leases", "debts", "records", "counters")
        ),
        # AT and REAL (boottime, realtime) are when the day starts after which a request is forgotten,
        # NULL while its lease lives
        "CREATE TABLE requests (key TEXT PRIMARY KEY, boot TEXT NOT NULL, data TEXT NOT NULL,"
        " sum INTEGER NOT NULL, at INTEGER, real INTEGER)",
        "CREATE INDEX requests_ended ON requests (at) WHERE at IS NOT NULL",
        "CREATE TABLE outbox (key INTEGER PRIMARY KEY, boot TEXT NOT NULL, data TEXT NOT NULL,"
        " sum INTEGER NOT NULL)",
        "CREATE TABLE quarantine (number INTEGER PRIMARY KEY, source TEXT, key, boot, data, sum,"
        " reason TEXT, real INTEGER)",
    ),
    synchronous="OFF",
)

_PUT: Final = {
    table: f"INSERT OR REPLACE INTO {table} (key, boot, data, sum) VALUES (?, ?, ?, ?)"  # noqa: S608 own names
    for table in ("leases", "debts", "records", "counters", "outbox")
}
_DELETE: Final = {
    table: f"DELETE FROM {table} WHERE key IS ?"  # noqa: S608 own names
    for table in (*_PUT, "requests")
}
_QUARANTINE_ROW: Final = {
    table: "INSERT INTO quarantine (source, key, boot, data, sum, reason, real)"  # noqa: S608 own names
    f" SELECT ?, key, boot, data, sum, ?, ? FROM {table} WHERE key IS ?"
    for table in _DELETE
}
_PUT_REQUEST: Final = (
    "INSERT OR REPLACE INTO requests (key, boot, data, sum, at, real) VALUES (?, ?, ?, ?, ?, ?)"
)
#: By the boot clock, so that a jump of the wall clock makes no spent request id grant again; only
#: for rows of another boot the wall clock must do.
_PURGE: Final = (
    "DELETE FROM requests WHERE key IN (SELECT key FROM requests"
    " WHERE at IS NOT NULL AND CASE WHEN boot = ? THEN at < ? ELSE real < ? END LIMIT ?)"
)
_COUNTERS: Final = "last"


@dataclass(frozen=True, slots=True)
class Counters:
    """The last sequence and generation used."""

    sequence: int
    generation: int


def boot_id() -> str:
    """Return the kernel's id of this boot, 32 hex digits (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")


class SqliteLedger:
    """`core.ports.Ledger`.  BOOT is this boot's id (only tests give another)."""

    def __init__(self, path: Path, now: Callable[[], Instant], boot: str | None = None) -> None:
        self._path = path
        self._now = now
        self._boot = boot or boot_id()
        self._db: sqlite3.Connection | None = None
        self._opened = False
        self._backlog = 0
        self._tail: deque[AuditRecord] = deque(maxlen=_TAIL)
        self._untaken: list[tuple[int, int]] = []
        self._purge_at = 0

    @property
    def backlog(self) -> int:
        """How many audit records the journal has not taken yet."""
        return self._backlog

    # -- reading -------------------------------------------------------------------------------
    def load(self, now: Instant) -> Restored:
        """Open or make the file and read all; rows of another boot are given as they are.

        Raises StoreUnusable for a newer schema, StoreInUse if another process has the file,
        StoreError if it can't be opened.  If there is none and none can be made (no space), that is a note,
        and every `commit` tries again.
        """
        restored = Restored()
        try:
            opened = open_file(self._path, KIND)
            restored.notes += opened.notes
            self._db = opened.connection
            try:
                self._read_all(opened.connection, restored, now)
            except sqlite3.Error as error:
                opened.connection.close()
                self._db = None
                if not damaged(error):
                    raise StoreError(f"{self._path}: cannot be read: {printable(error)}") from error
                restored = Restored(notes=restored.notes)
                restored.notes.append(set_aside(self._path, str(error)))
                self._db = open_file(self._path, KIND).connection
        except FreshFileError as error:
            restored.notes += [*error.notes, str(error)]
        self._opened = True
        return restored

    def _read_all(self, db: sqlite3.Connection, restored: Restored, now: Instant) -> None:
        bad: list[tuple[str, object, str]] = []
        restored.leases, foreign = self._read(db, "leases", Lease, lambda one: one.id, bad)
        restored.other_boot.update(foreign)
        restored.debts, foreign = self._read(db, "debts", Debt, lambda one: one.device, bad)
        restored.other_boot_debts.update(foreign)
        restored.records, _ = self._read(db, "records", DeviceRecord, lambda one: one.id, bad)
        restored.requests, foreign = self._read(db, "requests", RequestRecord, lambda one: _key(one.key), bad)
        self._translate(db, restored, set(foreign), now)
        counters, _ = self._read(db, "counters", Counters, lambda _: _COUNTERS, bad)
        audits, _ = self._read(db, "outbox", AuditRecord, lambda one: one.sequence, bad)
        lost = [key for table, key, _ in bad if table == "outbox" and isinstance(key, int)]
        for one in counters:
            restored.sequence, restored.generation = one.sequence, one.generation
        restored.sequence = max([restored.sequence, *lost, *(one.sequence for one in audits)])
        restored.generation = max([restored.generation, *(one.generation for one in audits)])
        self._backlog = len(audits) + len(lost)
        for table, key, reason in bad:
            restored.notes.append(
                f"{self._path}: a damaged row of {table} ({reason}) is in quarantine: {printable(key, 80)}"
            )
        self._quarantine(db, bad, lost, restored, now)

    def _read(
        self,
        db: sqlite3.Connection,
        table: str,
        kind: type[T],
        key_of: Callable[[T], object],
        bad: list[tuple[str, object, str]],
    ) -> tuple[list[T], list[str]]:
        """Return the good rows of TABLE and the keys of those of another boot; note bad ones."""
        good: list[T] = []
        foreign: list[str] = []
        for key, boot, data, total in db.execute(f"SELECT key, boot, data, sum FROM {table} ORDER BY rowid"):  # noqa: S608 own names
            try:
                if not isinstance(data, str) or checksum(key, boot, data) != total:
                    raise ValueError("checksum")
                record = decode(kind, data)
                if key_of(record) != key:
                    raise ValueError("another key")
            except ValueError as error:
                bad.append((table, key, printable(error)))
                continue
            good.append(record)
            if boot != self._boot:
                foreign.append(str(key))
        return good, foreign

    def _translate(self, db: sqlite3.Connection, restored: Restored, foreign: set[str], now: Instant) -> None:
        """Give requests of another boot a time on this boot's clock, and leave out old ones."""
        kept = []
        for record in restored.requests:
            key = _key(record.key)
            if key in foreign:
                real = db.execute("SELECT real FROM requests WHERE key = ?", (key,)).fetchone()[0]
                record = replace(record, boot=now.boot - max(0, now.real - (real or now.real)))  # noqa: PLW2901
            if not (record.ended or not record.lease) or record.boot >= now.boot - REMEMBER:
                kept.append(record)
        restored.requests = kept

    def _quarantine(
        self,
        db: sqlite3.Connection,
        bad: Sequence[tuple[str, object, str]],
        lost: Sequence[int],
        restored: Restored,
        now: Instant,
    ) -> None:
        """Move bad rows away and put a record in the place of lost audit records.  Without space
        for that they stay where they are and are skipped again at the next start."""
        if not bad:
            return
        try:
            db.execute("BEGIN IMMEDIATE")
            for table, key, reason in bad:
                db.execute(_QUARANTINE_ROW[table], (table, reason, now.real, key))
                db.execute(_DELETE[table], (key,))
            for sequence in lost:
                self._put(db, "outbox", sequence, encode(_lost_record(sequence, restored.generation, now)))
            db.execute(
                "DELETE FROM quarantine WHERE number <= (SELECT max(number) FROM quarantine) - ?",
                (_QUARANTINE,),
            )
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if damaged(error):
                raise
            restored.notes.append(f"{self._path}: nothing can be written now: {printable(error)}")

    # -- writing -------------------------------------------------------------------------------
    def commit(self, changes: Changes) -> None:
        """Store all of CHANGES in one transaction.  Raises StoreError; nothing is stored then."""
        db = self._open_again()
        try:
            try:
                self._store(db, changes)
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorname", "") != "SQLITE_FULL":
                    raise
                # Part of the space may be taken by pages in the WAL that the file could hold.
                self._roll_back(db)
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                self._store(db, changes)
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise StoreError(f"{self._path}: not stored: {printable(error)}") from error
        finally:
            self._roll_back(db)
        if changes.audits:
            self._backlog += len(changes.audits)
            self._tail.extend(changes.audits)

    def _store(self, db: sqlite3.Connection, changes: Changes) -> None:
        now = self._now()
        db.execute("BEGIN IMMEDIATE")
        self._put_all(db, "leases", changes.leases.items())
        self._put_all(db, "debts", changes.debts.items())
        self._put_all(db, "records", changes.records.items())
        for key, request in changes.requests.items():
            self._put_request(db, _key(key), request, now)
        for audit in changes.audits:
            self._put(db, "outbox", audit.sequence, encode(audit))
        self._put(db, "counters", _COUNTERS, encode(Counters(changes.sequence, changes.generation)))
        purge_at = self._purge(db, now)
        db.execute("COMMIT")
        self._purge_at = purge_at

    def _open_again(self) -> sqlite3.Connection:
        if self._db is None:
            if not self._opened:
                raise StoreError(f"{self._path}: not open")
            # Only ever after `load` found that there is no file, so no row is passed over.
            self._db = open_file(self._path, KIND).connection
        return self._db

    def _put_all(self, db: sqlite3.Connection, table: str, rows: Iterable[tuple[str, object | None]]) -> None:
        for key, record in rows:
            if record is None:
                db.execute(_DELETE[table], (key,))
            else:
                self._put(db, table, key, encode(record))

    def _put(self, db: sqlite3.Connection, table: str, key: str | int, data: str) -> None:
        db.execute(_PUT[table], (key, self._boot, data, checksum(key, self._boot, data)))

    def _put_request(
        self, db: sqlite3.Connection, key: str, record: RequestRecord | None, now: Instant
    ) -> None:
        if record is None:
            db.execute(_DELETE["requests"], (key,))
            return
        data = encode(record)
        at, real = (record.boot, now.real) if record.ended or not record.lease else (None, None)
        db.execute(_PUT_REQUEST, (key, self._boot, data, checksum(key, self._boot, data), at, real))

    def _purge(self, db: sqlite3.Connection, now: Instant) -> int:
        """Remove a few requests that ended a day ago; return the boot time of the next look."""
        if now.boot < self._purge_at:
            return self._purge_at
        cursor = db.execute(_PURGE, (self._boot, now.boot - REMEMBER, now.real - REMEMBER, _PURGE_BATCH))
        return now.boot if cursor.rowcount >= _PURGE_BATCH else now.boot + _PURGE_EVERY

    def _roll_back(self, db: sqlite3.Connection) -> None:
        """End a transaction that is still open; after some errors SQLite has ended it itself."""
        if db.in_transaction:
            db.execute("ROLLBACK")

    # -- outbox ----------------------------------------------------------------------------------
    def outbox(self, after: int, limit: int) -> list[AuditRecord]:
        """Return records that the journal has not taken, SEQUENCE above AFTER, in order.
        Raises StoreError."""
        if self._db is None:
            return []
        if self._tail and self._tail[0].sequence <= after + 1:
            return [record for record in self._tail if record.sequence > after][:limit]
        try:
            rows = self._db.execute(
                "SELECT key, data FROM outbox WHERE key > ? ORDER BY key LIMIT ?", (after, limit)
            ).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: outbox cannot be read: {printable(error)}") from error
        return [self._audit(sequence, data) for sequence, data in rows]

    def _audit(self, sequence: int, data: str) -> AuditRecord:
        try:
            return decode(AuditRecord, data)
        except (ValueError, TypeError):
            return _lost_record(sequence, 0, self._now())

    def taken(self, sequences: Sequence[int]) -> None:
        """Forget outbox rows that the journal has taken.  If that can't be stored now it is done
        later; after a crash in between, those records are sent again."""
        if not sequences:
            return
        self._untaken.append((min(sequences), max(sequences)))
        self._backlog -= len(sequences)
        while self._tail and self._tail[0].sequence <= max(sequences):
            self._tail.popleft()
        db = self._db
        if db is None:
            return
        try:
            db.execute("BEGIN IMMEDIATE")
            for low, high in self._untaken:
                db.execute("DELETE FROM outbox WHERE key BETWEEN ? AND ?", (low, high))
            db.execute("COMMIT")
            self._untaken.clear()
        except sqlite3.Error:
            self._roll_back(db)
            self._untaken = [(self._untaken[0][0], self._untaken[-1][1])]

    def close(self) -> None:
        """Close the file; leases stay in it."""
        if self._db is not None:
            self._db.close()
            self._db = None
        self._opened = False


def _key(key: RequestKey) -> str:
    return encode((key.uid, key.client, key.method, key.request_id))


def _lost_record(sequence: int, generation: int, now: Instant) -> AuditRecord:
    return AuditRecord(
        sequence=sequence,
        generation=generation,
        at=now,
        kind=AuditKind.STORE,
        priority=4,
        message=f"audit record {sequence} was damaged in the ledger and is lost",
        reason="damaged",
    )
