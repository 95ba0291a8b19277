"""One worker process as the agent sees it: started, spoken to, watched, let go."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetero_agent.workers.child import LENGTH, PROGRESS, PROGRESS_SIZE

PACKAGES = str(Path(__file__).resolve().parents[2])


def command(module: str) -> tuple[str, ...]:
    """Return how to start a worker whose ``main(PROGRESS_FD)`` is in MODULE; the number of the
    progress descriptor is appended.  Isolated (-I) and without site (-S): faster, smaller, and
    nobody's environment gets in."""
    start = f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; main(int(sys.argv[2]))"
    return (sys.executable, "-I", "-S", "-c", start, PACKAGES)


class WorkerProcess:
    """A worker with its channel, its progress page, and a pidfd for its end.

    Raises OSError if it can't be started.
    """

    def __init__(self, start: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("hetero-agent-worker")
        try:
            os.ftruncate(memory, PROGRESS_SIZE)
            self.page = mmap.mmap(memory, PROGRESS_SIZE)
            self.process = subprocess.Popen(
                [*start, str(memory)],
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
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def progress(self) -> tuple[int, int]:
        """The counter of its steps, and the number of what it is at."""
        count, item = PROGRESS.unpack_from(self.page)
        return count, item

    @property
    def state(self) -> str:
        """The letter in /proc/PID/stat (proc(5)), X once it is gone."""
        try:
            content = Path(f"/proc/{self.process.pid}/stat").read_bytes()
        except OSError:
            return "X"
        return content.rpartition(b")")[2].split()[0].decode()

    async def send(self, message: dict[str, Any]) -> None:
        """Send one frame.  Raises OSError if the worker is gone."""
        body = json.dumps(message).encode()
        await asyncio.get_running_loop().sock_sendall(self.channel, LENGTH.pack(len(body)) + body)

    async def receive(self) -> dict[str, Any]:
        """Wait for one frame.  Raises OSError or EOFError if the worker is gone."""
        size = LENGTH.unpack(await self._exactly(LENGTH.size))[0]
        message: dict[str, Any] = json.loads(await self._exactly(size))
        return message

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            part = await loop.sock_recv_into(self.channel, view[got:])
            if not part:
                raise EOFError("the worker closed its end")
            got += part
        return bytes(data)


class Yard:
    """Workers that were given up, until the kernel lets go of them.

    More than MOST are never kept: `full` says that nobody may start another.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._left: dict[int, tuple[WorkerProcess, Callable[[], None]]] = {}
        self._reaped = asyncio.Event()

    def __len__(self) -> int:
        return len(self._left)

    @property
    def full(self) -> bool:
        """Whether the kernel holds on to as many as may be."""
        return len(self._left) >= self.most

    @property
    def pids(self) -> set[int]:
        """The processes that are not gone yet."""
        return {worker.pid for worker, _ in self._left.values()}

    def take(self, worker: WorkerProcess, gone: Callable[[], None] = lambda: None) -> None:
        """Kill WORKER and wait for its end in the background; GONE is called then."""
        worker.channel.close()
        worker.process.kill()
        self._left[worker.pidfd] = (worker, gone)
        asyncio.get_running_loop().add_reader(worker.pidfd, self._reap, worker)

    def _reap(self, worker: WorkerProcess) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        _, gone = self._left.pop(worker.pidfd)
        os.close(worker.pidfd)
        worker.process.wait()
        worker.page.close()
        self._reaped.set()
        gone()

    async def empty(self, within: float) -> list[int]:
        """Wait until all are gone, WITHIN seconds at most; returns the pids that stay behind,
        which nobody waits for any more."""
        try:
            async with asyncio.timeout(within):
                while self._left:
                    self._reaped.clear()
                    await self._reaped.wait()
        except TimeoutError:
            for worker, _ in self._left.values():
                asyncio.get_running_loop().remove_reader(worker.pidfd)
        return sorted(self.pids)
