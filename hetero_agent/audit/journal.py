"""The outbox writer: audit records from the ledger to the journal, in order, by a thread.

The queue is the ledger's outbox; only one page of it is in memory.  The loop pulls a page, the
thread writes it, the loop has the ledger forget it and pulls the next.  While journald does not
drain its socket, only the thread waits; the backlog grows in the ledger and `problem` says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from hetero_agent.audit.fields import fields_of, line_of
from hetero_agent.audit.journald import JOURNAL_SOCKET, JournalSocket
from hetero_agent.core.model import AuditRecord

_log = logging.getLogger("hetero_agent.audit")

#: Records handed to the thread at a time.
_PAGE: Final = 256

#: Seconds that records are collected for before a page is pulled, so that a burst of calls is one
#: read and one delete; between attempts while the journal is away; and until a page is late.
_COLLECT: Final = 0.02
_RETRY: Final = 1.0
_LATE: Final = 5.0

#: Seconds after which the thread looks whether it should stop, while journald is stuck.
_POLL: Final = 0.2


class Outbox(Protocol):
    """What the writer needs of the ledger (`core.ports.Ledger`)."""

    @property
    def backlog(self) -> int:
        """How many records wait."""

    def outbox(self, after: int, limit: int) -> list[AuditRecord]:
        """Records above AFTER, in order.  Raises OSError."""

    def taken(self, sequences: Sequence[int]) -> None:
        """Forget these."""


class Sink(Protocol):
    """Where records go; used by the thread."""

    def write(self, record: AuditRecord, stop: threading.Event) -> None:
        """Write RECORD, as long as it takes, or until STOP is set.  Raises OSError: not written."""


class JournalSink:
    """The journal."""

    def __init__(self) -> None:
        self._socket = JournalSocket()

    def write(self, record: AuditRecord, stop: threading.Event) -> None:
        """Send it, and wait while journald's queue is full.  Raises OSError."""
        fields = fields_of(record)
        while True:
            try:
                self._socket.send(fields)
                return
            except BlockingIOError:
                if stop.is_set():
                    raise
                self._socket.wait(_POLL)
            except OSError as error:
                raise OSError(f"journald does not listen at {JOURNAL_SOCKET}: {error.strerror}") from error


class ErrorSink:
    """Standard error, a line of JSON each."""

    def write(self, record: AuditRecord, stop: threading.Event) -> None:  # noqa: ARG002 a write can't be stopped
        """Write it.  Raises OSError."""
        data = (line_of(record) + "\n").encode()
        try:
            while data:
                data = data[os.write(2, data) :]
        except OSError as error:
            raise OSError(f"standard error refuses: {error.strerror}") from error


SINKS: Final[dict[str, Callable[[], Sink]]] = {"journal": JournalSink, "stderr": ErrorSink}


def choose(mode: str) -> str:
    """Return ``journal`` or ``stderr`` for MODE; ``auto`` is the journal where its socket exists."""
    if mode == "auto":
        return "journal" if Path(JOURNAL_SOCKET).exists() else "stderr"
    return mode


class JournalWriter:
    """Takes records from OUTBOX to the journal (MODE: ``auto``, ``journal`` or ``stderr``).

    Used on the loop: `wake` after a commit with audit records.
    """

    def __init__(self, outbox: Outbox, mode: str = "auto") -> None:
        self.sink = choose(mode)
        self._outbox = outbox
        self._writer = SINKS[self.sink]()
        self._stop = threading.Event()
        self._pages: queue.SimpleQueue[list[AuditRecord] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="audit-writer", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flight: list[AuditRecord] | None = None
        self._since = 0.0
        self._after = 0
        self._failure = ""
        self._warned = False
        self._stopped = False
        self._drained: asyncio.Event | None = None

    def start(self) -> None:
        """Start the thread, and with what an earlier life left."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """There are new records."""
        if self._loop is not None and self._timer is None and self._flight is None and not self._stopped:
            self._timer = self._loop.call_later(0 if self._drained else _COLLECT, self._pull)

    @property
    def stuck_for(self) -> float:
        """Seconds for which a page has been waiting for the journal, 0 if it takes its usual time."""
        if self._flight is None and not self._failure:
            return 0.0
        waiting = time.monotonic() - self._since
        return waiting if self._failure or waiting > _LATE else 0.0

    @property
    def problem(self) -> str:
        """What is wrong with the journal, in words for STATUS and doctor; "" if nothing."""
        stuck = self.stuck_for
        if not stuck:
            return ""
        cause = self._failure or "journald does not drain its socket"
        return f"audit: {cause}; {self._outbox.backlog} records wait in the ledger, {stuck:.0f} s so far"

    async def stop(self, within: float) -> None:
        """Write what there is, in WITHIN seconds; the rest stays in the ledger for next time."""
        self._drained = asyncio.Event()
        if self._loop is not None and self._outbox.backlog and not self._failure:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self.wake()
            try:
                await asyncio.wait_for(self._drained.wait(), within)
            except TimeoutError:
                _log.warning("%d audit records stay in the ledger until the next start", self._outbox.backlog)
        self._stopped = True
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()
        self._pages.put(None)
        # What the thread wrote of its last page shall not be written twice; if it is stuck for
        # good, it may be.
        for _ in range(10):
            if self._flight is None:
                break
            await asyncio.sleep(_POLL / 5)

    # -- the loop's side ---------------------------------------------------------------------
    def _pull(self) -> None:
        self._timer = None
        if self._stopped or self._flight is not None:
            return
        try:
            page = self._outbox.outbox(self._after, _PAGE)
        except OSError as error:
            self._failed(str(error))
            return
        if page:
            self._flight = page
            if not self._failure:
                self._since = time.monotonic()
            self._pages.put(page)
        elif self._drained is not None:
            self._drained.set()

    def _done(self, written: int, failure: str) -> None:
        page, self._flight = self._flight, None
        if page is None:
            return
        if written:
            self._after = page[written - 1].sequence
            self._outbox.taken([record.sequence for record in page[:written]])
        if self._stopped:
            return
        if failure:
            self._failed(failure)
            return
        if self._warned:
            _log.warning("the audit trail is being written again after %.0f s", time.monotonic() - self._since)
        self._failure, self._warned = "", False
        if self._outbox.backlog or self._drained is not None:
            self._pull()

    def _failed(self, failure: str) -> None:
        if not self._failure:
            self._since = time.monotonic()
        self._failure = failure
        if not self._warned:
            self._warned = True
            _log.warning("audit records wait in the ledger: %s", failure)
        if self._drained is not None:
            self._drained.set()
        elif self._loop is not None and self._timer is None:
            self._timer = self._loop.call_later(_RETRY, self._pull)

    # -- the thread ----------------------------------------------------------------------------
    def _run(self) -> None:
        while (page := self._pages.get()) is not None:
            written, failure = 0, ""
            try:
                for record in page:
                    self._writer.write(record, self._stop)
                    written += 1
            except OSError as error:
                failure = str(error)
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._done, written, failure)
            except RuntimeError:  # the loop is closed
                return
