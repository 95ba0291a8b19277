"""The outbox writer: audit records from the ledger to the journal, in order, by a thread.

The queue is the ledger's outbox; only one page of it is in memory.  The loop pulls a page, the
thread writes it, the loop has the ledger forget it and pulls the next.  When journald does not
drain its socket, systemd.journal.send blocks: then the thread is stuck, the backlog grows in the
ledger, `stuck_for` says so, and nobody waits.
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
from hetero_agent.audit.journald import JOURNAL_SOCKET, reachable
from hetero_agent.core.model import AuditRecord
from systemd import journal

_log = logging.getLogger("hetero_agent.audit")

#: Records handed to the thread at a time.
_PAGE: Final = 256

#: Seconds that records are collected for before a page is pulled, so that a burst of calls is one
#: read and one delete; between attempts while the journal is away; and until a page is late.
_COLLECT: Final = 0.02
_RETRY: Final = 1.0
_LATE: Final = 5.0


class Outbox(Protocol):
    """What the writer needs of the ledger (`core.ports.Ledger`)."""

    @property
    def backlog(self) -> int:
        """How many records wait."""

    def outbox(self, after: int, limit: int) -> list[AuditRecord]:
        """Records above AFTER, in order.  Raises OSError."""

    def taken(self, sequences: Sequence[int]) -> None:
        """Forget these."""


class Unwritten(Exception):
    """The page could not be written now; all of it is to be written again."""


def _to_journal(page: Sequence[AuditRecord]) -> None:
    """Send PAGE.  Raises Unwritten unless journald was there before and after."""
    if not reachable():
        raise Unwritten(f"journald does not listen at {JOURNAL_SOCKET}")
    for record in page:
        fields = fields_of(record)
        try:
            # CODE_FUNC, for without it send() walks the stack and names this line.
            journal.send(fields.pop("MESSAGE"), CODE_FUNC="audit", **fields)
        except OSError as error:
            raise Unwritten(f"the journal refuses: {error.strerror}") from error
    if not reachable():
        raise Unwritten(f"journald left {JOURNAL_SOCKET}")


def _to_stderr(page: Sequence[AuditRecord]) -> None:
    text = "".join(line_of(record) + "\n" for record in page).encode()
    try:
        while text:
            text = text[os.write(2, text) :]
    except OSError as error:
        raise Unwritten(f"standard error refuses: {error.strerror}") from error


SINKS: Final[dict[str, Callable[[Sequence[AuditRecord]], None]]] = {
    "journal": _to_journal,
    "stderr": _to_stderr,
}


def choose(mode: str) -> str:
    """Return ``journal`` or ``stderr`` for MODE; ``auto`` is the journal where its socket exists."""
    if mode == "auto":
        return "journal" if Path(JOURNAL_SOCKET).exists() else "stderr"
    return mode


class JournalWriter:
    """Takes records from OUTBOX to the journal (MODE: ``auto``, ``journal`` or ``stderr``).

    Used on the loop: `wake` after a commit with audit records (the ledger's ``on_audit``).
    """

    def __init__(self, outbox: Outbox, mode: str = "auto") -> None:
        self.sink = choose(mode)
        self._outbox = outbox
        self._write = SINKS[self.sink]
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
        if self._timer is not None:
            self._timer.cancel()
        self._pages.put(None)

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

    def _done(self, failure: str) -> None:
        page, self._flight = self._flight, None
        if self._stopped or page is None:
            return
        if failure:
            self._failed(failure)
            return
        if self._warned:
            _log.warning("the audit trail is being written again after %.0f s", time.monotonic() - self._since)
        self._failure, self._warned = "", False
        self._after = page[-1].sequence
        self._outbox.taken([record.sequence for record in page])
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
            try:
                self._write(page)
                failure = ""
            except Unwritten as error:
                failure = str(error)
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._done, failure)
            except RuntimeError:  # the loop is closed
                return
