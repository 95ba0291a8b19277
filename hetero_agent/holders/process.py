"""Whose process a pid is, and the news of its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from hetero_agent.core.events import OwnerGone
from hetero_agent.core.model import Binding, Instant, ProcessRef
from hetero_agent.core.ports import ProcessFacts, Submit
from hetero_agent.holders import proc
from hetero_agent.text import printable

_log = logging.getLogger("hetero_agent.holders")

#: Seconds between looks at processes for which no descriptor was to be had.
_LOOK_EVERY = 1.0


def identify(pid: int) -> ProcessFacts | None:
    """Return what /proc says of PID, None if it is no living process (ended, a zombie, a
    thread of another process, a kernel thread).  Raises OSError if that can't be told, as for want
    of a descriptor: it may well live.

    Reads stat, status and cgroup, which never wait for the process's memory.
    """
    if pid <= 0:
        return None
    try:
        with proc.opened(pid) as base:
            facts = proc.stat(base)
            group, uids = proc.status(base)
            cgroup = proc.cgroup(base)
            owner = proc.namespace_owner(base)
    except (FileNotFoundError, ProcessLookupError):
        return None
    if group != pid or facts.ended or facts.flags & proc.KERNEL_THREAD:
        return None
    return ProcessFacts(ProcessRef(pid, facts.start), uids, printable(proc.unit_of(cgroup)), cgroup, owner)


def open_process(ref: ProcessRef) -> int | None:
    """Return a pidfd of exactly this process; None if it has ended.  Raises OSError."""
    try:
        pidfd = os.pidfd_open(ref.pid)
    except OSError as error:
        # EINVAL, ENOENT: the pid is a mere thread now
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return None
        raise
    try:
        # read after the descriptor is open: a match means that this is of the process
        same = proc.start_of(ref.pid) == ref.start
    except OSError:
        os.close(pidfd)
        raise
    if not same:
        os.close(pidfd)
        return None
    return pidfd


@dataclass(slots=True)
class _Watched:
    """A process and the leases bound to it; PIDFD -1 while it is looked at from time to time."""

    pidfd: int
    leases: set[str] = field(default_factory=set)


class ProcessWatch:
    """Tells of the end of bound processes.  A zombie has ended: a pidfd turns readable when the
    last thread exits, reaped or not (pidfd_open(2))."""

    def __init__(self, submit: Submit, now: Callable[[], Instant]) -> None:
        self._submit = submit
        self._now = now
        self._processes: dict[ProcessRef, _Watched] = {}
        self._leases: dict[str, ProcessRef] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, lease: str, binding: Binding) -> None:
        """Watch the pid of BINDING for LEASE in place of any earlier one; the news comes in a
        later turn of the loop, even if the process has ended already."""
        self.unwatch(lease)
        ref = binding.pid
        if ref is None:
            return
        self._leases[lease] = ref
        entry = self._processes.get(ref)
        if entry is None:
            entry = self._processes[ref] = _Watched(-1)
            self._open(ref, entry)
        entry.leases.add(lease)

    def unwatch(self, lease: str) -> None:
        """Forget the watch of LEASE, if there is one."""
        ref = self._leases.pop(lease, None)
        entry = self._processes.get(ref) if ref else None
        if ref is None or entry is None:
            return
        entry.leases.discard(lease)
        if not entry.leases:
            self._close(ref)

    @property
    def watched(self) -> int:
        """How many processes are watched."""
        return len(self._processes)

    @property
    def polled(self) -> int:
        """How many of them without a descriptor."""
        return sum(entry.pidfd < 0 for entry in self._processes.values())

    def close(self) -> None:
        """Forget all."""
        for ref in list(self._processes):
            self._close(ref)
        self._leases.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _open(self, ref: ProcessRef, entry: _Watched) -> None:
        loop = asyncio.get_running_loop()
        try:
            pidfd = open_process(ref)
        except OSError as error:
            _log.error("no descriptor for process %d, looking once a second: %s", ref.pid, error)
            self._look_later()
            return
        if pidfd is None:
            loop.call_soon(self._ended, ref)
            return
        entry.pidfd = pidfd
        loop.add_reader(pidfd, self._ended, ref)

    def _ended(self, ref: ProcessRef) -> None:
        leases = self._close(ref)
        at = self._now()
        for lease in sorted(leases):
            self._leases.pop(lease, None)
            self._submit(OwnerGone(at, lease, "pid"))

    def _close(self, ref: ProcessRef) -> set[str]:
        entry = self._processes.pop(ref, None)
        if entry is None:
            return set()
        if entry.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(entry.pidfd)
            os.close(entry.pidfd)
        return entry.leases

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._timer = None
        for ref, entry in list(self._processes.items()):
            if entry.pidfd >= 0:
                continue
            try:
                facts = identify(ref.pid)
            except OSError:
                # not known is not over
                self._look_later()
                continue
            if facts is None or facts.ref != ref:
                self._ended(ref)
            else:
                self._look_later()
