"""Holder scans on request: one at a time, each answered by a `Scanned`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_agent.core.events import DeviceScan, Scanned
from hetero_agent.core.model import Holder, Instant, Node, ProcessRef, Role
from hetero_agent.core.ports import Submit
from hetero_agent.holders import proc
from hetero_agent.holders.process import identify
from hetero_agent.holders.scan import EVIDENCE, NodeKey, uid_of
from hetero_agent.text import printable
from hetero_agent.workers.host import Host, LostError, StuckError

_log = logging.getLogger("hetero_agent.holders")

#: A scan that had to be begun again for so many seconds is given up and reported as failed.
_BUDGET = 20.0
#: So often a worker may die within one scan.
_DEATHS = 3
#: Seconds that a process whose reading blocked is left out, doubled each time up to the last.
_FIRST_PAUSE = 30.0
_LAST_PAUSE = 3600.0

#: Seconds that systemd may take to tell a main process; it is asked again with the next scan.
_SERVICE_DEADLINE = 1.0

#: Lengths of what is kept of foreign texts: PATH_MAX is 4096, a comm 15, a unit name 255.
_EXE, _COMM, _CGROUP, _EVIDENCE = 1024, 32, 4096, 256

#: Return the main process of a systemd service, 0 if that can't be told.
MainPid = Callable[[str], Awaitable[int]]


def node_keys(nodes: Sequence[Node]) -> list[NodeKey]:
    """Return what the worker looks for: the own nodes only, the others are no proof of use."""
    return [node.key for node in nodes if node.role is Role.OWN]


@dataclass(slots=True)
class _Blocked:
    """A process whose reading blocked a worker; left out until RETRY (loop time)."""

    start: int
    uid: int
    retry: float
    pause: float


class _Pauses:
    """The processes that are left out for a while because reading WHAT of them blocks."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._blocked: dict[int, _Blocked] = {}

    @property
    def uids(self) -> dict[int, int]:
        """The processes, and the uid of each."""
        return {pid: entry.uid for pid, entry in self._blocked.items()}

    def now(self, now: float) -> list[int]:
        """Return those that are still to be left out; forgets those that have ended."""
        for pid, entry in list(self._blocked.items()):
            # stat never waits for a process's memory, so this can't block here
            with contextlib.suppress(OSError):
                if proc.start_of(pid) != entry.start:
                    del self._blocked[pid]
        return [pid for pid, entry in self._blocked.items() if entry.retry > now]

    def note(self, pid: int, now: float) -> None:
        """Remember that PID blocked."""
        try:
            start = proc.start_of(pid)
        except OSError as error:
            _log.warning("process %d blocks and can't be looked at: %s", pid, error)
            return
        if start is None:
            return
        earlier = self._blocked.get(pid)
        pause = min(earlier.pause * 2, _LAST_PAUSE) if earlier else _FIRST_PAUSE
        uid = uid_of(pid)
        self._blocked[pid] = _Blocked(start, uid, now + pause, pause)
        _log.warning(
            "reading %s of process %d of uid %d blocks; left out for %d s", self._what, pid, uid, pause
        )

    def keep(self, pids: Collection[int]) -> None:
        """Forget all but PIDS: they could be read this time."""
        for pid in [pid for pid in self._blocked if pid not in pids]:
            del self._blocked[pid]


class Scanner:
    """Coalesces requests, repeats scans that a blocked process spoiled, remembers first sightings.

    CONTAINED: the processes of the agent's own pid namespace are all that could hold a device.
    BEFORE is awaited ahead of each scan; AFTER is called ahead of each Scanned, so that opens
    the kernel has already told of are submitted before the proof that they may spoil.  MAIN_PID
    tells of systemd's services.
    """

    def __init__(
        self,
        host: Host,
        submit: Submit,
        now: Callable[[], Instant],
        before: Callable[[], Awaitable[None]],
        after: Callable[[], None],
        main_pid: MainPid,
        contained: bool = False,
    ) -> None:
        self._host = host
        self._submit = submit
        self._now = now
        self._before = before
        self._after = after
        self._main_pid = main_pid
        self._wanted: dict[str, tuple[Node, ...]] = {}
        self._task: asyncio.Task[None] | None = None
        self._blocked = _Pauses("files and memory")
        self._opaque = _Pauses("evidence")
        self._services: dict[tuple[int, int], int] = {}
        self._since: dict[str, dict[tuple[int, int], int]] = {}
        self.last: dict[str, Any] = {}
        self.contained = contained
        self.failing = ""

    def request(self, targets: Mapping[str, tuple[Node, ...]]) -> None:
        """Scan TARGETS with the next scan, which begins after this call."""
        self._wanted.update(targets)
        if self._task is None and self._wanted:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def forget(self, device: str) -> None:
        """Drop the first sightings of a device that is gone."""
        self._since.pop(device, None)

    @property
    def blocked(self) -> dict[int, int]:
        """The processes that are left out because reading them blocks, with their uids."""
        return self._blocked.uids

    async def stop(self) -> None:
        """Give up what is under way and what is wanted."""
        self._wanted.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._wanted:
                begun = loop.time()
                batch, self._wanted = self._wanted, {}
                try:
                    await self._before()
                    scanned = await self._scan(batch)
                except Exception as error:  # a scan that fails must be heard of, whatever it was
                    _log.exception("holder scan failed")
                    scanned = self._failure(batch, f"internal error: {printable(error)}")
                if scanned.failed and scanned.failed != self.failing:
                    _log.warning("who holds devices can't be told: %s", scanned.failed)
                self.failing = scanned.failed
                self._after()
                self._submit(scanned)
                # requests without end get half of a worker's time, not all of it
                await asyncio.sleep(loop.time() - begun if self._wanted else 0)
        finally:
            self._task = None

    async def _scan(self, batch: Mapping[str, tuple[Node, ...]]) -> Scanned:
        loop = asyncio.get_running_loop()
        end = loop.time() + _BUDGET
        deaths = 0
        targets = {device: node_keys(nodes) for device, nodes in batch.items()}
        while True:
            skipped, plain = self._blocked.now(loop.time()), self._opaque.now(loop.time())
            request = {"scan": targets, "skip": skipped, "plain": plain, "contained": self.contained}
            try:
                answer = await self._host.ask(request)
            except StuckError as stuck:
                self._note(stuck.item, loop.time())
                if loop.time() > end:
                    return self._failure(batch, "reading /proc blocks again and again")
                continue
            except LostError as lost:
                deaths += 1
                if deaths >= _DEATHS:
                    return self._failure(batch, str(lost))
                continue
            self._blocked.keep(skipped)
            self._opaque.keep(plain)
            await self._ask_services(answer["processes"])
            return self._result(batch, answer)

    def _note(self, item: int, now: float) -> None:
        """Remember what the worker was blocked at."""
        if not item:
            _log.warning("the scan worker stood still and was replaced")
        elif item >= EVIDENCE:
            self._opaque.note(item - EVIDENCE, now)
        else:
            self._blocked.note(item, now)

    async def _ask_services(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Learn which uid the main processes of the system's services have that hold something."""
        known, self._services = self._services, {}
        asked: dict[str, int] = {}
        for process in found:
            ref, unit = (process["pid"], process["start"]), process["unit"]
            if not process["cgroup"].startswith("/system.slice/") or set(process["uids"]) == {0}:
                continue
            if ref not in known and unit not in asked:
                asked[unit] = await self._service_uid(unit)
            uid = known[ref] if ref in known else asked[unit]
            if uid >= 0:
                self._services[ref] = uid

    async def _service_uid(self, unit: str) -> int:
        """The uid of the main process of a service, -1 if it can't be told."""
        try:
            async with asyncio.timeout(_SERVICE_DEADLINE):
                main = identify(await self._main_pid(unit))
        except OSError:  # a timeout, too
            return -1
        return main.uids[0] if main is not None and main.unit == unit else -1

    def _result(self, batch: Mapping[str, tuple[Node, ...]], answer: Mapping[str, Any]) -> Scanned:
        at = self._now()
        uninspected = tuple((pid, uid) for pid, uid in (*answer["uninspected"], *self._blocked.uids.items()))
        holders: dict[str, list[Holder]] = {}
        for found in answer["processes"]:
            for device, mapped in found["devices"].items():
                holders.setdefault(device, []).append(self._holder(device, found, mapped, at.boot))
        nobody = DeviceScan((), uninspected)
        devices: dict[str, DeviceScan] = {}
        for device in batch:
            mine = holders.get(device)
            if mine:
                devices[device] = DeviceScan(tuple(mine), uninspected)
                self._since[device] = {(one.pid, one.start): one.since for one in mine}
            else:
                devices[device] = nobody
                self._since.pop(device, None)
        self.last = {
            "took": answer["took"],
            "processes": answer["seen"],
            "uninspected": len(uninspected),
            "failed": answer["blind"],
        }
        return Scanned(at, answer["started"], devices, answer["blind"])

    def _holder(self, device: str, found: Mapping[str, Any], mapped: bool, now: int) -> Holder:
        pid, start = found["pid"], found["start"]
        real, effective, saved, filesystem = found["uids"]
        return Holder(
            pid=pid,
            start=start,
            uids=(real, effective, saved, filesystem),
            exe=printable(found["exe"], _EXE),
            comm=printable(found["comm"], _COMM),
            unit=printable(found["unit"]),
            cgroup=printable(found["cgroup"], _CGROUP),
            session=found["session"],
            ancestors=tuple(ProcessRef(pid, start) for pid, start in found["ancestors"]),
            mapped=mapped,
            since=self._since.get(device, {}).get((pid, start), now),
            service_uid=self._services.get((pid, start), -1),
            evidence={key: printable(text, _EVIDENCE) for key, text in found["evidence"][device].items()},
        )

    def _failure(self, batch: Mapping[str, tuple[Node, ...]], reason: str) -> Scanned:
        at = self._now()
        self.last = {"took": 0, "processes": 0, "uninspected": 0, "failed": reason}
        return Scanned(at, at.boot, {device: DeviceScan() for device in batch}, reason)
