"""Signals to holders: the last look before one is sent.

Who may be signalled is decided in the core; here each condition is checked once more against
the process as it is now, and the signal goes through a pidfd, so never to a later process with
the same pid.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from hetero_agent.core.effects import Terminate
from hetero_agent.core.events import Signalled
from hetero_agent.core.model import Instant, Node
from hetero_agent.core.ports import Submit
from hetero_agent.holders import proc
from hetero_agent.holders.process import open_process
from hetero_agent.holders.scanner import node_keys
from hetero_agent.workers.host import Host, LostError, StuckError

_log = logging.getLogger("hetero_agent.holders")

_SIGNALS = {"TERM": signal.SIGTERM, "KILL": signal.SIGKILL}


class _RefusedError(Exception):
    """The signal isn't sent; the text says why."""


class Ending:
    """Carries out Terminate effects.  PROTECTED gives the pids that no signal may ever reach."""

    def __init__(
        self, host: Host, submit: Submit, now: Callable[[], Instant], protected: Callable[[], set[int]]
    ) -> None:
        self._host = host
        self._submit = submit
        self._now = now
        self._protected = protected
        self._tasks: set[asyncio.Task[None]] = set()

    def terminate(self, order: Terminate, nodes: tuple[Node, ...]) -> None:
        """Check and signal in the background; NODES are those of the device."""
        task = asyncio.get_running_loop().create_task(self._run(order, nodes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Drop what is under way: no signal is sent after this."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, order: Terminate, nodes: tuple[Node, ...]) -> None:
        try:
            await self._carry_out(order, nodes)
            sent, reason = True, ""
        except _RefusedError as refused:
            sent, reason = False, str(refused)
        except OSError as error:
            sent, reason = False, os.strerror(error.errno or 0)
        except Exception:  # an answer must come, whatever it was
            _log.exception("ending a holder failed")
            sent, reason = False, "internal error"
        self._submit(Signalled(self._now(), order.device, order.holder.ref, order.signal, sent, reason))

    async def _carry_out(self, order: Terminate, nodes: tuple[Node, ...]) -> None:
        """Signal the holder.  Raises _RefusedError or OSError."""
        ref = order.holder.ref
        number = _SIGNALS.get(order.signal)
        if number is None:
            raise _RefusedError("only TERM and KILL are sent")
        if ref.pid <= 1 or ref.pid == os.getpid() or ref.pid in self._host.pids | self._protected():
            raise _RefusedError("this process is never signalled")
        pidfd = open_process(ref)
        if pidfd is None:
            raise _RefusedError("the process has ended")
        try:
            _check_user_process(ref.pid)
            await self._check_holds(ref.pid, nodes)
            _check_identity(ref.pid, order.uid)
            signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)

    async def _check_holds(self, pid: int, nodes: tuple[Node, ...]) -> None:
        try:
            answer = await self._host.ask({"check": pid, "nodes": node_keys(nodes)})
        except (StuckError, LostError) as error:
            raise _RefusedError(f"it can't be told whether it holds the device: {error}") from error
        if "error" in answer:
            raise _RefusedError(f"it can't be told whether it holds the device: {answer['error']}")
        if not answer["holds"]:
            raise _RefusedError("it does not hold the device any more")


def _check_user_process(pid: int) -> None:
    with proc.opened(pid) as base:
        if proc.stat(base).flags & proc.KERNEL_THREAD:
            raise _RefusedError("it is a kernel thread")


def _check_identity(pid: int, uid: int | None) -> None:
    """Last of all, as a process can change its uids by exec.  Raises _RefusedError or OSError."""
    if uid is None:
        return
    with proc.opened(pid) as base:
        if set(proc.status(base)[1]) != {uid}:
            raise _RefusedError(f"it does not run as uid {uid} alone")
