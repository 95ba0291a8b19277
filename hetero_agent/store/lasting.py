"""What outlives a reboot: cordons, allocation counts, history, ceilings; in the state directory.

One thread has the file; the loop gives it work and never waits, since a disk may be slow, full,
read-only or gone.  Then the agent goes on without: counts and history wait in memory (bounded),
only a cordon is refused, `problem` says why, and the thread tries again by itself.

Ceilings: numbers that must not come twice (generation, sequence) are reserved in blocks ahead of
their use, so that a life which begins at the ceiling repeats none, whatever the last one did.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hetero_agent.core.effects import Changes, Restored
from hetero_agent.core.model import HISTORIC, AuditRecord, Cordon
from hetero_agent.store.database import StoreError, StoreInUse, StoreUnusable
from hetero_agent.store.lasting_file import BLOCK, DEVICES, HISTORY, Found, LastingFile

#: Seconds between writes of counts and history, between attempts while nothing can be written,
#: that a start waits for the disk, and that a cordon or a close may take.
_WRITE_EVERY: Final = 1.0
_RETRY_EVERY: Final = 5.0
_START_WAIT: Final = 10.0
_CORDON_WAIT: Final = 10.0
_CLOSE_WAIT: Final = 2.0

GENERATION: Final = "generation"
SEQUENCE: Final = "sequence"


def history_key(record: AuditRecord) -> str:
    """Return what a transition is kept under: the serial once it is known, else the id (as the
    governor's key for counts and history)."""
    return f"serial:{record.serial}" if record.serial else record.device


@dataclass(slots=True)
class _Order:
    """A cordon to write; ANSWER gets the error text, in the thread.  OVER, under the lock: it was
    answered, or refused for being late."""

    device: str
    cordon: Cordon | None
    answer: Callable[[str], None]
    over: bool = False


@dataclass(slots=True)
class _Batch:
    """What is written when there is time for it."""

    counts: dict[str, int] = field(default_factory=dict)
    history: dict[str, deque[AuditRecord]] = field(default_factory=dict)
    ceilings: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts or self.history or self.ceilings)

    def add(self, later: _Batch) -> None:
        """Take LATER in; what is too much goes, the oldest first."""
        for key, count in later.counts.items():
            _make_room(self.counts, key)
            self.counts[key] = count
        for key, records in later.history.items():
            _make_room(self.history, key)
            self.history.setdefault(key, deque(maxlen=HISTORY)).extend(records)
        for name, ceiling in later.ceilings.items():
            self.ceilings[name] = max(ceiling, self.ceilings.get(name, 0))


def _make_room(table: dict[str, Any], key: str) -> None:
    if key not in table and len(table) >= DEVICES:
        del table[next(iter(table))]


class SqliteLasting:
    """`core.ports.Lasting`.  Build it, `load` once, then use it from the loop's thread.

    SCRATCH is a directory for a copy of the file where it can only be read (the runtime
    directory).
    """

    def __init__(self, path: Path, scratch: Path) -> None:
        self._path = path
        self._file = LastingFile(path, scratch)
        self._lock = threading.Condition()
        self._orders: deque[_Order] = deque()
        self._batch = _Batch()
        self._reserved: dict[str, int] = {}
        self._problem = ""
        self._busy_since: float | None = None
        self._closing = False
        self._loaded = threading.Event()
        self._found = Found()
        self._failure: BaseException | None = None
        self._used: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="lasting-store", daemon=True)

    # -- the loop's side ---------------------------------------------------------------------
    @property
    def problem(self) -> str:
        """Why nothing can be written to the state directory now; "" while all is well."""
        with self._lock:
            if self._problem:
                return self._problem
            since = self._busy_since
        if since is not None and time.monotonic() - since > _RETRY_EVERY:
            return f"{self._path}: the disk has not answered for {time.monotonic() - since:.0f} s"
        return ""

    def load(self, restored: Restored) -> None:
        """Add to RESTORED (from the ledger) the cordons, counts and history, and set its sequence
        and generation to where this life starts.  Waits a few seconds at most for a disk that does not
        answer, and for one that does as long as it takes.
        Raises StoreUnusable for a newer schema, StoreInUse if another process has the file."""
        self._used = {GENERATION: restored.generation, SEQUENCE: restored.sequence}
        self._thread.start()
        if self._answered():
            if self._failure is not None:
                raise self._failure
            restored.cordons += self._found.cordons.values()
            restored.counts.update(self._found.counts)
            restored.history.update(self._found.history)
            restored.notes += self._found.notes
            starts, self._found = self._starts, Found()
        else:
            starts = _starts({}, self._used)
        if self.problem:
            restored.notes.append(f"{self.problem}; grants go on, cordons cannot be stored")
        restored.generation, restored.sequence = starts[GENERATION], starts[SEQUENCE]
        with self._lock:
            self._reserve(restored.generation, restored.sequence)

    def _answered(self) -> bool:
        """Wait for what the file holds; False if nothing of it has come for a while."""
        before = -1
        while not self._loaded.wait(_START_WAIT):
            if self._file.rows == before:
                return False
            before = self._file.rows
        return True

    def store_cordon(self, device: str, cordon: Cordon | None, done: Callable[[str], None]) -> None:
        """Write a cordon, or its removal; DONE is called on the loop with the error text, "" once
        it is on the disk."""
        loop = asyncio.get_running_loop()

        def expire() -> None:
            if self._end_order(order):
                done(f"{self._path}: the disk did not answer within {_CORDON_WAIT:.0f} s")

        def settle(error: str) -> None:
            timer.cancel()
            done(error)

        def answer(error: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, error)

        order = _Order(device, cordon, answer)
        timer = loop.call_later(_CORDON_WAIT, expire)
        with self._lock:
            self._orders.append(order)
            self._lock.notify()

    def note(self, changes: Changes) -> None:
        """Take counts and history of CHANGES along; written soon, lost without harm."""
        later = _Batch(counts=changes.counts)
        for record in changes.audits:
            if record.kind in HISTORIC and record.device:
                later.history.setdefault(history_key(record), deque(maxlen=HISTORY)).append(record)
        with self._lock:
            idle = not self._batch
            self._batch.add(later)
            self._reserve(changes.generation, changes.sequence)
            if idle and self._batch:
                self._lock.notify()

    def close(self) -> None:
        """Write what is pending (within two seconds) and close."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_WAIT)

    def _end_order(self, order: _Order) -> bool:
        """Whether ORDER was not over; it is now."""
        with self._lock:
            before, order.over = order.over, True
        return not before

    def _reserve(self, generation: int, sequence: int) -> None:
        """Have the next block reserved once half of this one is used."""
        for name, used in ((GENERATION, generation), (SEQUENCE, sequence)):
            if used + BLOCK // 2 > self._reserved.get(name, 0):
                self._reserved[name] = self._batch.ceilings[name] = used + BLOCK

    # -- the thread --------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._begin()
        except (StoreUnusable, StoreInUse) as error:
            self._failure = error
            return
        finally:
            self._loaded.set()
        next_write = 0.0
        while True:
            with self._lock:
                while not self._orders and not self._closing:
                    wait = next_write - time.monotonic() if self._batch else None
                    if wait is not None and wait <= 0:
                        break
                    self._lock.wait(wait)
                orders, self._orders = self._orders, deque()
                closing = self._closing
                batch = _Batch()
                if closing or time.monotonic() >= next_write:
                    batch, self._batch = self._batch, batch
                self._busy_since = time.monotonic()
            for order in orders:
                self._write_cordon(order)
            if batch:
                next_write = time.monotonic() + (_WRITE_EVERY if self._write(batch) else _RETRY_EVERY)
            with self._lock:
                self._busy_since = None
            if closing:
                self._file.close()
                return

    def _begin(self) -> None:
        """Read the file and reserve the numbers of this life before any of them is used."""
        with self._lock:
            self._busy_since = time.monotonic()
        found, problem = self._file.read()
        starts = _starts(found.ceilings, self._used)
        if not problem:
            ceilings = {name: start + BLOCK for name, start in starts.items()}
            try:
                self._file.put({}, {}, ceilings)
            except StoreError as error:
                problem = str(error)
        if problem:
            # Nothing could be reserved: begin at a number that no other life had.
            starts[GENERATION] = max(starts[GENERATION], time.time_ns() // 1000)
            ceilings = {}
        with self._lock:
            self._reserved = ceilings
            self._starts = starts
            self._problem = problem
            self._busy_since = None
            self._found = found

    def _write_cordon(self, order: _Order) -> None:
        """Write it, unless it was refused meanwhile for being late: then it must not stand, and those
        after it must."""
        if order.over:
            return
        before, problem = None, ""
        try:
            before = self._file.put_cordon(order.device, order.cordon)
        except StoreError as error:
            problem = str(error)
        in_time = self._end_order(order)
        if not in_time and not problem:
            try:
                self._file.put_cordon(order.device, before)
            except StoreError as error:
                problem = str(error)
        self._set_problem(problem)
        if in_time:
            order.answer(problem)

    def _write(self, batch: _Batch) -> bool:
        try:
            self._file.put(batch.counts, batch.history, batch.ceilings)
        except StoreError as error:
            self._set_problem(str(error))
            with self._lock:
                batch.add(self._batch)
                self._batch = batch
            return False
        self._set_problem("")
        return True

    def _set_problem(self, problem: str) -> None:
        with self._lock:
            self._problem = problem


def _starts(ceilings: dict[str, int], used: dict[str, int]) -> dict[str, int]:
    """Return the numbers that this life starts after.

    Generation: the ceiling, or the realtime in microseconds if that is lost.  Sequence: where a
    whole ledger ended, so that the trail has no gap, else the ceiling.
    """
    generation = ceilings[GENERATION] if GENERATION in ceilings else time.time_ns() // 1000
    return {
        GENERATION: max(used[GENERATION], generation),
        SEQUENCE: used[SEQUENCE] or ceilings.get(SEQUENCE, 0),
    }
