"""Keeps one worker running, and replaces it when it is blocked or dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from hetero_agent.workers.process import WorkerProcess, Yard

_log = logging.getLogger("hetero_agent.workers")

#: Blocked workers that are left behind, at most, until the kernel lets go of one.
MOST_ABANDONED = 16

#: Looks at the progress page per deadline; as many without a change mean that it is blocked.
_LOOKS = 4
#: A worker that is ready to run but doesn't get a processor, or is starting, may take longer.
_PATIENCE = 10
_START_SECONDS = 10.0
_STOP_SECONDS = 1.0


class StuckError(Exception):
    """The worker made no progress and was given up; ITEM is the number of what it was at, 0 for
    nothing in particular (then what was at hand isn't to blame)."""

    def __init__(self, item: int) -> None:
        super().__init__(f"the worker is blocked at {item}")
        self.item = item


class LostError(Exception):
    """There is no worker: it died while it was at ITEM, or none can be started (ITEM 0).  The text
    says why."""

    def __init__(self, text: str, item: int = 0) -> None:
        super().__init__(text)
        self.item = item


class Host:
    """The one worker that START starts, when it is first needed.  Loop thread only.

    DEADLINE is how long one step may take in seconds.  WHAT names the worker in texts.  Blocked
    ones go into YARD, which several hosts may share.
    """

    def __init__(
        self, start: Sequence[str], deadline: float = 1.0, what: str = "worker", yard: Yard | None = None
    ) -> None:
        self._start = start
        self._deadline = deadline
        self._what = what
        self._worker: WorkerProcess | None = None
        self._yard = Yard(MOST_ABANDONED) if yard is None else yard
        self._turn = asyncio.Lock()

    @property
    def pids(self) -> set[int]:
        """The workers, blocked ones too."""
        return self._yard.pids | ({self._worker.pid} if self._worker else set())

    @property
    def abandoned(self) -> int:
        """How many blocked workers the kernel has not let go yet."""
        return len(self._yard)

    def configure(self, deadline: float) -> None:
        """Go by another DEADLINE from the next question on."""
        self._deadline = deadline

    def start(self) -> None:
        """Start the worker now if there is none.  Raises LostError."""
        if self._worker is not None:
            return
        if self._yard.full:
            raise LostError(f"{self._yard.most} {self._what}s are blocked in the kernel")
        try:
            self._worker = WorkerProcess(self._start)
        except OSError as error:
            raise LostError(f"no {self._what} can be started: {error}") from error

    async def ask(self, request: dict[str, Any], let_go: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Have the worker answer one request, after those asked before.

        Raises StuckError or LostError; the next call gets a new worker then, and LET_GO is called
        once the old one is gone, which may take for ever.
        """
        async with self._turn:
            self.start()
            worker = self._worker
            assert worker is not None
            exchange = asyncio.ensure_future(_exchange(worker, request))
            try:
                await self._watch(worker, exchange)
                return exchange.result()
            except BaseException as error:
                # whatever happened, an answer that comes late must not meet another question
                exchange.cancel()
                await asyncio.wait({exchange})
                item = worker.progress[1]
                self._give_up(worker, let_go)
                if isinstance(error, (OSError, EOFError, ValueError)):
                    raise LostError(f"the {self._what} died", item) from error
                raise

    async def _watch(self, worker: WorkerProcess, exchange: asyncio.Future[dict[str, Any]]) -> None:
        """Return when EXCHANGE is done.  Raises StuckError if the progress page stands still.

        Looks are counted, not time, so that a pause of the agent itself blames nobody.
        """
        last, looks = worker.progress, 0
        while not exchange.done():
            await asyncio.wait({exchange}, timeout=self._deadline / _LOOKS)
            now = worker.progress
            if now != last:
                last, looks = now, 0
                continue
            looks += 1
            if exchange.done() or looks < _LOOKS:
                continue
            state = worker.state
            waits = looks * self._deadline / _LOOKS
            if state == "R" and looks < _LOOKS * _PATIENCE:
                continue
            if now[0] == 0 and state in "RSD" and waits < _START_SECONDS:
                continue
            # stopped by a signal, or starved: that is nothing the item at hand did
            raise StuckError(now[1] if state in "SD" else 0)

    def _give_up(self, worker: WorkerProcess, gone: Callable[[], None]) -> None:
        if self._worker is worker:
            self._worker = None
        self._yard.take(worker, gone)

    def dismiss(self) -> None:
        """End the worker, if one is there and idle; the next question starts another."""
        if self._worker is not None and not self._turn.locked():
            self._give_up(self._worker, lambda: None)

    async def stop(self) -> None:
        """End the worker and wait a second for that; one that is blocked stays behind."""
        async with self._turn:
            if self._worker is not None:
                self._give_up(self._worker, lambda: None)
        for pid in await self._yard.empty(_STOP_SECONDS):
            _log.warning("%s %d is blocked in the kernel and stays behind", self._what, pid)


async def _exchange(worker: WorkerProcess, request: dict[str, Any]) -> dict[str, Any]:
    """Send REQUEST and return the answer.  Raises OSError or EOFError if the worker is gone."""
    await worker.send(request)
    return await worker.receive()
