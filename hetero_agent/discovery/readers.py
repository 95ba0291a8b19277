"""Threads that read what may hang, each read under a deadline.

A read that is stuck in the kernel can't be interrupted: its thread is abandoned, another takes
its place, and if the read ever returns the thread ends and says so.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

#: The most threads at once, stuck ones included.
MOST: Final = 16
#: Seconds after which a busy thread no longer counts as one that will soon take the next read.
_SLOW: Final = 0.1
#: Seconds after which an idle thread ends.
_IDLE: Final = 30.0


class ReadTimeoutError(Exception):
    """A read did not return by its deadline."""


class NoReaderError(Exception):
    """All threads hang, so the read was not even begun.  (One that only waits its turn goes on waiting.)"""


class _Job:
    __slots__ = ("_loop", "done", "started", "work")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
        self._loop = loop
        self.work = work
        self.done: asyncio.Future[object] = loop.create_future()
        self.started = 0.0

    def tell(self, call: Callable[..., object], *arguments: object) -> None:
        """Have the loop call something; nobody is left to care once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return

    def answer(self, result: object, error: BaseException | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(result)
            else:
                self.done.set_exception(error)


class _Worker:
    __slots__ = ("abandoned", "job", "returned")

    def __init__(self) -> None:
        self.job: _Job | None = None
        self.abandoned = False
        self.returned: Callable[[], None] | None = None


class Readers:
    """A pool that grows only when its threads don't return."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False
        #: when a thread last took up a read (time.monotonic)
        self._taken = 0.0

    @property
    def stuck(self) -> int:
        """How many threads hang in a read whose deadline is over."""
        return sum(1 for worker in list(self._workers) if worker.abandoned)

    async def call(self, work: Callable[[], T], deadline: float, returned: Callable[[], None]) -> T:
        """Return what WORK returns in a thread, or raise what it raises.

        Raises ReadTimeoutError DEADLINE seconds after the start, NoReaderError if no thread
        became free, for this read or another, in that time.  RETURNED is called on the loop if an
        abandoned read comes back.
        """
        job = _Job(asyncio.get_running_loop(), work)
        asked = time.monotonic()
        self._queue.put(job)
        while not job.done.done():
            self._ensure()
            await asyncio.wait({job.done}, timeout=_SLOW)
            begun = job.started or max(asked, self._taken)
            if not job.done.done() and time.monotonic() - begun > deadline:
                job.done.cancel()
                if not job.started:
                    raise NoReaderError
                if not self._abandon(job, returned):
                    asyncio.get_running_loop().call_soon(returned)
                raise ReadTimeoutError
        return job.done.result()  # type: ignore[return-value]

    def close(self) -> None:
        """Let idle threads end; stuck ones are daemon threads and end with the process."""
        self._closed = True
        for _ in list(self._workers):
            self._queue.put(None)

    def _ensure(self) -> None:
        """Start a thread if none is free or about to be."""
        now = time.monotonic()
        with self._lock:
            for worker in self._workers:
                job = worker.job
                if job is None or (not worker.abandoned and now - job.started < _SLOW):
                    return
            if len(self._workers) >= self._most:
                return
            worker = _Worker()
            self._workers.add(worker)
        threading.Thread(target=self._run, args=(worker,), name="discovery-reader", daemon=True).start()

    def _abandon(self, job: _Job, returned: Callable[[], None]) -> bool:
        """Give up the thread that has JOB; false if it has just come back."""
        with self._lock:
            for worker in self._workers:
                if worker.job is job:
                    worker.abandoned = True
                    worker.returned = returned
                    return True
        return False

    def _run(self, worker: _Worker) -> None:
        while True:
            try:
                job = self._queue.get(timeout=_IDLE)
            except queue.Empty:
                job = None
            if job is None or job.done.cancelled():
                with self._lock:
                    if job is None and (self._closed or self._queue.empty()):
                        self._workers.discard(worker)
                        return
                continue
            job.started = self._taken = time.monotonic()
            worker.job = job
            result: object = None
            failure: BaseException | None = None
            try:
                result = job.work()
            except Exception as error:
                failure = error
            with self._lock:
                worker.job = None
                if worker.abandoned:
                    self._workers.discard(worker)
            if worker.abandoned:
                if worker.returned is not None:
                    job.tell(worker.returned)
                return
            job.tell(job.answer, result, failure)
