"""Rounds: each device is probed in its turn, a sick one never at the cost of the others.

Devices that are due at the same time go to one worker in one request.  A device at which that worker
stands still loses its place there: the worker is given up, another takes the rest, and the slow one is
from now on looked at alone, by a worker of its own, under the whole deadline.  While a worker that was
given up has not ended, its device is looked at by nobody else.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import zlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from hetero_agent.config import HealthTable
from hetero_agent.core.model import Health
from hetero_agent.core.verdict import Finding, Grade, Rules
from hetero_agent.health.roster import Patient, Roster
from hetero_agent.workers.host import Host, LostError, StuckError
from hetero_agent.workers.process import Yard, command

log = logging.getLogger("hetero_agent.health")

#: How to start a probe worker.
COMMAND = command("hetero_agent.health.probe_worker")

#: Workers that don't come back, at most; the last one is kept for the round of all.
MOST_HUNG: Final = 16
#: Devices in one request.
_BATCH: Final = 256
#: Seconds by which a probe may be early, so that neighbours share a request.
_EARLY: Final = 0.25
#: Seconds that one device may hold up the others of a request.
_STALL: Final = 0.5
#: Seconds between looks at a device that blocks, at most, and after a worker was lost.
_LONGEST_PAUSE: Final = 60.0
_AFTER_LOSS: Final = 0.5
#: Workers lost in a row after which devices count as not probed.
_LOSSES: Final = 3
#: Times within the interval at which devices are probed, at least, and devices to one of them.
_SLOTS: Final = 3
_PER_SLOT: Final = 32
#: Quick answers in a row that give a device its place among the others back.
_PROMPT: Final = 3
#: Idle workers kept for devices that are looked at alone.
_SPARE: Final = 2

#: What one probe of one device came to: a finding, or what the worker answered.
Result = tuple[Patient, dict[str, Any] | Finding]


class Rounds:
    """The scheduler.  TAKE is given results and has to bring the standings up to date, by ``rules``.

    ``lost`` says why there is no probe worker, "" if there is; ``rounds`` counts requests answered.
    """

    def __init__(
        self,
        roster: Roster,
        table: HealthTable,
        take: Callable[[Sequence[Result]], None],
        start: Sequence[str] = COMMAND,
    ) -> None:
        self._roster = roster
        self._table = table
        self.rules = _rules(table)
        self._take = take
        self._start = start
        self._yard = Yard(MOST_HUNG)
        self._host = Host(start, self._stall, "probe worker", self._yard)
        self._spare: list[Host] = []
        self._lent: set[Host] = set()
        self._lanes = asyncio.Semaphore(MOST_HUNG - 1)
        self._agenda: list[tuple[float, str]] = []
        self._queue: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._lane: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._paused = False
        self._losses = 0
        self.lost = ""
        self.rounds = 0

    # -- settings ---------------------------------------------------------------------------------
    @property
    def _stall(self) -> float:
        return min(_STALL, self._table.deadline / 2)

    def configure(self, table: HealthTable) -> None:
        """Go by another ``[health]`` table; who would have been looked at much later is so by the new one."""
        self._table = table
        self.rules = _rules(table)
        self._host.configure(self._stall)
        for host in (*self._spare, *self._lent):
            host.configure(table.deadline)
        late = asyncio.get_running_loop().time() + table.interval
        for patient in self._roster:
            if patient.due > late:
                self._next(patient)

    @property
    def blocked(self) -> list[str]:
        """The devices that don't answer."""
        return sorted(patient.id for patient in self._roster if patient.blocked)

    @property
    def pids(self) -> set[int]:
        """The workers, blocked ones too."""
        return self._host.pids.union(*(host.pids for host in (*self._spare, *self._lent)))

    # -- the agenda ---------------------------------------------------------------------------------
    def soon(self, patient: Patient, seconds: float = 0.0) -> None:
        """Have a device probed in so many SECONDS."""
        patient.due = asyncio.get_running_loop().time() + seconds
        heapq.heappush(self._agenda, (patient.due, patient.id))
        self._arm()

    def all_soon(self) -> None:
        """Have all devices probed now."""
        for patient in self._roster:
            self.soon(patient)

    def pause(self, paused: bool) -> None:
        """Begin no more probes, or go on."""
        self._paused = paused
        if not paused:
            self.all_soon()

    def _next(self, patient: Patient) -> None:
        """Put the next probe on the agenda."""
        table, standing = self._table, patient.standing
        if standing.urgent(self.rules):
            self.soon(patient, table.confirm)
        elif patient.pause:
            self.soon(patient, max(table.interval, patient.pause))
        else:
            self._at_its_time(patient)

    def _at_its_time(self, patient: Patient) -> None:
        """Put the next probe at the device's own time within the interval.

        There are as many such times as make a request worth its while, the same for all: few devices
        are looked at together, many are spread out.
        """
        interval = self._table.interval
        slots = max(_SLOTS, len(self._roster) // _PER_SLOT)
        phase = zlib.crc32(patient.id.encode()) % slots / slots
        now = asyncio.get_running_loop().time()
        begun = now - now % interval + phase * interval
        # not before two thirds of the interval are over, nor after five thirds
        while begun < now + interval * 2 / 3:
            begun += interval
        self.soon(patient, begun - now)

    def _arm(self) -> None:
        if self._stopped or not self._agenda:
            return
        due = self._agenda[0][0]
        if self._timer is not None:
            if self._timer_at <= due:
                return
            self._timer.cancel()
        self._timer_at = due
        self._timer = asyncio.get_running_loop().call_at(due, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        early = min(_EARLY, self._table.confirm / 4)
        hung: list[Result] = []
        while self._agenda and self._agenda[0][0] <= now + early:
            due, device = heapq.heappop(self._agenda)
            patient = self._roster.get(device)
            if patient is None or patient.due != due or patient.busy or self._paused:
                continue
            if patient.blocked:
                hung.append((patient, self._unresponsive()))
            elif patient.alone:
                patient.busy = True
                self._spawn(self._look_alone(patient))
            else:
                patient.busy = True
                self._queue[device] = None
        self._done(hung)
        if self._queue and self._lane is None:
            self._lane = asyncio.get_running_loop().create_task(self._look(), name="health-round")
        self._arm()

    def _unresponsive(self) -> Finding:
        seconds = f"{self._table.deadline:g}"
        return Finding(Grade.FAILED, f"unresponsive: a probe did not return within {seconds} s", {})

    def _done(self, results: Sequence[Result]) -> None:
        if results and not self._stopped:
            self._take(results)
            for patient, _ in results:
                if patient.blocked and patient.standing.health is Health.UNHEALTHY:
                    patient.pause = min(_LONGEST_PAUSE, max(2 * patient.pause, self._table.interval))
                if self._roster.get(patient.id) is patient:
                    self._next(patient)

    # -- many at once -------------------------------------------------------------------------------
    async def _look(self) -> None:
        """Probe what is in the queue, request by request."""
        try:
            while self._queue:
                batch = [one for device in self._next_batch() if (one := self._roster.get(device)) is not None]
                if batch:
                    await self._look_at(batch)
        finally:
            self._lane = None

    def _next_batch(self) -> list[str]:
        batch = [device for device, _ in zip(self._queue, range(_BATCH), strict=False)]
        for device in batch:
            del self._queue[device]
        return batch

    async def _look_at(self, batch: list[Patient]) -> None:
        culprits: list[Patient] = []
        request = {"probe": [patient.spec for patient in batch]}
        try:
            answer = await self._host.ask(request, lambda: self._came_back(culprits, 0.0))
        except StuckError as stuck:
            self._blame(batch, stuck.item, culprits)
        except LostError as lost:
            await self._lose(batch, lost)
        else:
            self.lost, self._losses = "", 0
            self.rounds += 1
            for patient in batch:
                patient.busy = False
            self._done(list(zip(batch, answer["found"], strict=True)))

    def _blame(self, batch: list[Patient], item: int, culprits: list[Patient]) -> None:
        """The worker stood still at number ITEM; the others are looked at by the next one."""
        for number, patient in enumerate(batch, 1):
            if number != item:
                self._queue[patient.id] = None
                continue
            log.info("a look at %s takes long; it is looked at alone from now on", patient.id)
            culprits.append(patient)
            patient.busy = False
            patient.blocked = patient.alone = True
            patient.prompt = 0
            self.soon(patient, self._table.deadline - self._stall)

    async def _lose(self, batch: list[Patient], lost: LostError) -> None:
        """The worker died, or there can be none: another try, and after a few nobody knows."""
        self._losses += 1
        if str(lost) != self.lost:
            log.warning("%s", lost)
        self.lost = str(lost)
        if lost.item:
            batch[lost.item - 1].alone = True
        if self._losses < _LOSSES:
            for patient in batch:
                patient.busy = False
                self.soon(patient, _AFTER_LOSS)
        else:
            finding = Finding(Grade.UNKNOWN, f"not probed: {lost}")
            for patient in batch:
                patient.busy = False
            self._done([(patient, finding) for patient in batch])
            await asyncio.sleep(_AFTER_LOSS)

    def _came_back(self, patients: Sequence[Patient], seconds: float) -> None:
        """The worker that looked at these has ended: the kernel let go of it."""
        for patient in patients:
            patient.blocked = False
            if self._roster.get(patient.id) is patient:
                self.soon(patient, seconds)

    # -- one alone ----------------------------------------------------------------------------------
    async def _look_alone(self, patient: Patient) -> None:
        async with self._lanes:
            result = await self._ask_alone(patient)
        patient.busy = False
        self._done([(patient, result)])

    async def _ask_alone(self, patient: Patient) -> dict[str, Any] | Finding:
        if len(self._yard) >= self._yard.most - 1:
            return Finding(Grade.UNKNOWN, f"not probed: {len(self._yard)} probe workers are blocked")
        loop = asyncio.get_running_loop()
        host = self._spare.pop() if self._spare else self._another()
        self._lent.add(host)
        begun = loop.time()
        try:
            answer = await host.ask(
                {"probe": [patient.spec]}, lambda: self._came_back([patient], self._table.confirm)
            )
        except StuckError as stuck:
            if not stuck.item:
                return Finding(Grade.UNKNOWN, "not probed: the worker was held up")
            patient.blocked, patient.prompt = True, 0
            return self._unresponsive()
        except LostError as lost:
            return Finding(Grade.UNKNOWN, f"not probed: {lost}")
        finally:
            self._lent.discard(host)
            if len(self._spare) < _SPARE and not self._stopped:
                self._spare.append(host)
            else:
                host.dismiss()
        patient.pause = 0.0
        patient.prompt = patient.prompt + 1 if loop.time() - begun < self._stall else 0
        patient.alone = patient.prompt < _PROMPT
        found: dict[str, Any] = answer["found"][0]
        return found

    def _another(self) -> Host:
        return Host(self._start, self._table.deadline, "probe worker", self._yard)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="health-alone")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the end --------------------------------------------------------------------------------------
    async def stop(self) -> None:
        """Begin no more, end the workers; what the kernel holds on to stays behind."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._tasks, *([self._lane] if self._lane else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for host in self._spare:
            host.dismiss()
        await self._host.stop()


def _rules(table: HealthTable) -> Rules:
    return Rules(failures=table.failures, recoveries=table.recoveries)
