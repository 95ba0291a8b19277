"""Keeps one scan worker running, and replaces it when it is blocked or dies."""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero_agent.holders import proc
from hetero_agent.holders.worker import LENGTH, PROGRESS, PROGRESS_SIZE

_log = logging.getLogger("hetero_agent.holders")

#: Blocked workers that are left behind, at most, until the kernel lets go of one.
MOST_ABANDONED = 16

_PACKAGES = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from hetero_agent.holders.worker import main; {}"

#: How to start a worker; the number of the progress descriptor is appended.  Isolated (-I) and
#: without site (-S): faster, smaller, and nobody's environment gets in.
COMMAND = (sys.executable, "-I", "-S", "-c", _START.format("main(int(sys.argv[2]))"), _PACKAGES)

#: Looks at the progress page per deadline; as many without a change mean that it is blocked.
_LOOKS = 4
#: A worker that is ready to run but doesn't get a processor, or is starting, may take longer.
_PATIENCE = 10
_START_SECONDS = 10.0
_STOP_SECONDS = 1.0


class StuckError(Exception):
    """The worker made no progress and was given up; PID is what it was reading, 0 for nothing
    in particular (then that process isn't to blame)."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"the scan worker is blocked at pid {pid}")
        self.pid = pid


class LostError(Exception):
    """There is no worker: it died, or none can be started.  The text says why."""


class _Running:
    """One worker process with its channel, its progress page, and a pidfd for its end."""

    def __init__(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("hetero-agent-scan")
        try:
            os.ftruncate(memory, PROGRESS_SIZE)
            self.page = mmap.mmap(memory, PROGRESS_SIZE)
            self.process = subprocess.Popen(
                [*command, str(memory)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=(memory,),
                cwd="/",
                env={},
            )
            self.pidfd = self._descriptor()
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)
        ours.setblocking(False)
        self.channel = ours

    def _descriptor(self) -> int:
        try:
            return os.pidfd_open(self.process.pid)
        except OSError:
            self.process.kill()
            self.process.wait()
            raise

    @property
    def progress(self) -> tuple[int, int]:
        count, pid = PROGRESS.unpack_from(self.page)
        return count, pid

    @property
    def state(self) -> str:
        """The letter in /proc/PID/stat."""
        try:
            with proc.opened(self.process.pid) as base:
                return proc.stat(base).state
        except OSError:
            return "X"


class Host:
    """The one worker, started when first needed.  Loop thread only."""

    def __init__(self, command: Sequence[str] = COMMAND, deadline: float = 1.0) -> None:
        self._command = command
        self._deadline = deadline
        self._worker: _Running | None = None
        self._abandoned: dict[int, _Running] = {}
        self._turn = asyncio.Lock()
        self._reaped = asyncio.Event()

    @property
    def pids(self) -> set[int]:
        """The workers, blocked ones too."""
        running = {self._worker.process.pid} if self._worker else set()
        return running | {worker.process.pid for worker in self._abandoned.values()}

    @property
    def abandoned(self) -> int:
        """How many blocked workers the kernel has not let go yet."""
        return len(self._abandoned)

    def start(self) -> None:
        """Start the worker now if there is none.  Raises LostError."""
        if self._worker is not None:
            return
        if len(self._abandoned) >= MOST_ABANDONED:
            raise LostError(f"{MOST_ABANDONED} scan workers are blocked in the kernel")
        try:
            self._worker = _Running(self._command)
        except OSError as error:
            raise LostError(f"no scan worker can be started: {error}") from error

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the worker answer one request, after those asked before.
        Raises StuckError or LostError; the next call gets a new worker then."""
        async with self._turn:
            self.start()
            worker = self._worker
            assert worker is not None
            exchange = asyncio.ensure_future(_exchange(worker.channel, json.dumps(request).encode()))
            try:
                await self._watch(worker, exchange)
                return exchange.result()
            except BaseException as error:
                # whatever happened, an answer that comes late must not meet another question
                exchange.cancel()
                await asyncio.wait({exchange})
                self._give_up(worker)
                if isinstance(error, (OSError, EOFError, ValueError)):
                    raise LostError("the scan worker died") from error
                raise

    async def _watch(self, worker: _Running, exchange: asyncio.Future[dict[str, Any]]) -> None:
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
            # stopped by a signal, or starved: that is nothing the process at hand did
            raise StuckError(now[1] if state in "SD" else 0)

    def _give_up(self, worker: _Running) -> None:
        """Kill WORKER and wait for its end in the background."""
        if self._worker is worker:
            self._worker = None
        worker.channel.close()
        worker.process.kill()
        self._abandoned[worker.pidfd] = worker
        asyncio.get_running_loop().add_reader(worker.pidfd, self._reap, worker)

    def _reap(self, worker: _Running) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        del self._abandoned[worker.pidfd]
        os.close(worker.pidfd)
        worker.process.wait()
        worker.page.close()
        self._reaped.set()

    async def stop(self) -> None:
        """End the worker and wait a second for that; one that is blocked stays behind."""
        async with self._turn:
            if self._worker is not None:
                self._give_up(self._worker)
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                while self._abandoned:
                    self._reaped.clear()
                    await self._reaped.wait()
        except TimeoutError:
            for worker in self._abandoned.values():
                asyncio.get_running_loop().remove_reader(worker.pidfd)
                pid = worker.process.pid
                _log.warning("scan worker %d is blocked in the kernel and stays behind", pid)


async def _exchange(channel: socket.socket, question: bytes) -> dict[str, Any]:
    """Send QUESTION and return the answer.  Raises OSError or EOFError if the worker is gone."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(channel, LENGTH.pack(len(question)) + question)
    size = LENGTH.unpack(await _exactly(channel, LENGTH.size))[0]
    answer: dict[str, Any] = json.loads(await _exactly(channel, size))
    return answer


async def _exactly(channel: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        part = await loop.sock_recv_into(channel, view[got:])
        if not part:
            raise EOFError("the scan worker closed its end")
        got += part
    return bytes(data)
