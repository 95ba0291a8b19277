"""The holders edge: what the daemon builds, and the engine knows as `core.ports.Holders`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from hetero_agent.core.effects import Terminate
from hetero_agent.core.model import Binding, DeviceRecord, Instant, Node
from hetero_agent.core.ports import ProcessFacts, Submit
from hetero_agent.holders.ending import Ending
from hetero_agent.holders.process import ProcessWatch, identify
from hetero_agent.holders.scanner import MainPid, Scanner
from hetero_agent.holders.watch import NodeWatch
from hetero_agent.workers.host import Host, LostError
from hetero_agent.workers.process import command as start_of

_log = logging.getLogger("hetero_agent.holders")

#: How to start a scan worker.
COMMAND = start_of("hetero_agent.holders.worker")


class HolderEdge:
    """Scans, watches and signals; loop thread only.

    PROTECTED gives pids that are never signalled beside pid 1, the agent and its workers: the
    bus daemon's.  MAIN_PID tells the main process of a systemd service.  CONTAINED: no process
    outside the agent's pid namespace counts.  DEADLINE is what reading one process may take, in
    seconds, before it counts as blocked.  COMMAND starts a scan worker (see
    `workers.process.command`).
    """

    def __init__(
        self,
        submit: Submit,
        now: Callable[[], Instant],
        protected: Callable[[], set[int]],
        main_pid: MainPid,
        contained: bool = False,
        deadline: float = 1.0,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._host = Host(command, deadline, "scan worker")
        self._nodes = NodeWatch(submit, now)
        self._processes = ProcessWatch(submit, now)
        self._ending = Ending(self._host, submit, now, protected)
        self._scanner = Scanner(
            self._host, submit, now, self._nodes.settled, self._nodes.drain, main_pid, contained
        )
        self._deaf = ""

    async def start(self) -> None:
        """Start the watches and the scan worker.  What can't be started is logged, told by
        `stats`, and tried again or done without: scans still find what nobody told of."""
        try:
            self._nodes.start()
        except OSError as error:
            self._deaf = str(error)
            _log.error("opens of device nodes go unnoticed until the next scan: %s", error)
        try:
            self._host.start()
        except LostError as error:
            _log.error("%s", error)

    def configure(self, contained: bool) -> None:
        """Go by another CONTAINED from the next scan on."""
        self._scanner.contained = contained

    @property
    def problem(self) -> str:
        """Why the last scan is not complete, so that no device is granted; "" if it is."""
        failing = self._scanner.failing
        return f"who holds devices can't be told: {failing}" if failing else ""

    async def stop(self) -> None:
        """End everything; nothing is submitted and nobody signalled afterwards."""
        await self._ending.stop()
        await self._scanner.stop()
        self._nodes.close()
        self._processes.close()
        await self._host.stop()

    def request_scan(self, targets: dict[str, tuple[Node, ...]]) -> None:
        """Scan for the own nodes among TARGETS; see `core.ports.Holders`."""
        self._scanner.request(targets)

    def watch_nodes(self, device: str, record: DeviceRecord | None) -> None:
        """Watch the own nodes of a device, None: no more; see `core.ports.Holders`."""
        if record is None:
            self._scanner.forget(device)
        self._nodes.watch(device, record)

    def watch_process(self, lease: str, binding: Binding) -> None:
        """Watch the bound process, if a process is bound; see `core.ports.Holders`."""
        self._processes.watch(lease, binding)

    def unwatch_process(self, lease: str) -> None:
        """Forget it; see `core.ports.Holders`."""
        self._processes.unwatch(lease)

    def terminate(self, order: Terminate, nodes: tuple[Node, ...]) -> None:
        """Check once more and signal; see `core.ports.Holders`."""
        self._ending.terminate(order, nodes)

    def identify(self, pid: int) -> ProcessFacts | None:
        """Return whose process PID is, None if there is no such (living) process.  Raises OSError if
        that can't be told."""
        return identify(pid)

    def stats(self) -> dict[str, Any]:
        """Return figures for doctor: ``last-scan`` ({} before the first; took in µs, processes,
        uninspected, failed), ``blocked`` (pid → uid of processes left out), ``abandoned``
        workers, ``workers`` (pids), ``watched-nodes``, ``unwatched-nodes`` (path → reason),
        ``watching-blocked``, ``deaf`` (why there is no inotify, "" if there is), ``overflows``,
        ``watched-processes`` and ``polled-processes``."""
        return {
            "last-scan": dict(self._scanner.last),
            "blocked": self._scanner.blocked,
            "abandoned": self._host.abandoned,
            "workers": sorted(self._host.pids),
            "watched-nodes": self._nodes.watched,
            "unwatched-nodes": self._nodes.unwatched,
            "watching-blocked": self._nodes.blocked,
            "deaf": self._deaf,
            "overflows": self._nodes.overflows,
            "watched-processes": self._processes.watched,
            "polled-processes": self._processes.polled,
        }
