"""The one writer: takes events in order, has the governor decide, stores, then acts.

Order of each event: decide -> commit to the ledger in one transaction -> bus news -> replies ->
work for the edges.  A call whose changes can't be stored is undone and refused; facts can't be
undone, so their changes wait in memory for the next commit that succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from hetero_agent import faultpoints
from hetero_agent.access_jobs import AccessJobs
from hetero_agent.core.effects import (
    AttachAccess,
    Changes,
    Effect,
    ErrorKind,
    Outcome,
    PrepareAccess,
    Refusal,
    Refuse,
    RenewAccess,
    Reply,
    RequestScan,
    Restored,
    RevokeAccess,
    StoreCordon,
    Terminate,
    UnwatchOwner,
    WatchHealth,
    WatchNodes,
    WatchOwner,
)
from hetero_agent.core.events import (
    AccessAttached,
    AccessFailed,
    AccessPrepared,
    Allocate,
    Confirm,
    CordonStored,
    DeviceScan,
    Event,
    OwnerGone,
    Reap,
    Release,
    Scanned,
    SetCordon,
    Tick,
    Token,
)
from hetero_agent.core.governor import Governor
from hetero_agent.core.model import Binding, Instant
from hetero_agent.core.ports import Access, HealthWatch, Holders, Lasting, Ledger, Publisher
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.engine")

#: Events handled in one turn of the loop before others get theirs.
BUDGET = 64

#: Seconds between attempts to store what can't be undone, while there is no room for it.
STORE_AGAIN = 1.0

#: Boot µs after a start or a sleep in which nothing expires.
LOOK_FIRST = 1_000_000

_CALLS = (Allocate, Confirm, Release, SetCordon, Reap)
_STEPS: dict[type, str] = {
    Allocate: "allocate",
    AccessPrepared: "granted",
    Confirm: "confirm",
    AccessAttached: "attached",
    Release: "release",
    OwnerGone: "owner-gone",
}


class Owners(Protocol):
    """Watches units and bus connections that leases are bound to; answers with OwnerGone."""

    def watch(self, lease: str, binding: Binding) -> None:
        """Watch the unit and connection of BINDING, whichever are set."""

    def unwatch(self, lease: str) -> None:
        """Forget the lease."""


def instant() -> Instant:
    """Return this moment on both clocks."""
    return Instant(
        time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000,
        time.clock_gettime_ns(time.CLOCK_REALTIME) // 1000,
    )


class Engine:
    """See the module's text.  `attach` it to its edges, `start` it, then `submit` and `call`."""

    def __init__(self, governor: Governor, ledger: Ledger, lasting: Lasting) -> None:
        self.governor = governor
        self.ledger = ledger
        self.lasting = lasting
        self.store_problem = ""
        self.on_stored: Callable[[], None] = lambda: None
        self._jobs: AccessJobs
        self._holders: Holders
        self._health: HealthWatch
        self._owners: Owners
        self._publisher: Publisher
        self._queue: deque[Event] = deque()
        self._busy = False
        self._waiters: dict[Token, asyncio.Future[str]] = {}
        self._last_token = 0
        self._backlog = Changes()
        self._store_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._not_before = 0
        self._scan_interval = 60.0
        self._scan_timer: asyncio.TimerHandle | None = None
        self._slept = self._offset()
        self._loop: asyncio.AbstractEventLoop
        self._progress = time.monotonic()

    def attach(
        self,
        *,
        access: Access,
        holders: Holders,
        health: HealthWatch,
        owners: Owners,
        publisher: Publisher,
        effects_timeout: float,
        scan_interval: float,
    ) -> None:
        """Give it its edges, and the durations of `configure`."""
        self._jobs = AccessJobs(access, self.governor.leases, self.submit, self.now)
        self._jobs.timeout = effects_timeout
        self._health = health
        self._holders = holders
        self._owners = owners
        self._publisher = publisher
        self._scan_interval = scan_interval
        self._loop = asyncio.get_running_loop()

    def start(self, restored: Restored) -> None:
        """Take up what the stores kept and act on it."""
        outcome = self.governor.restore(restored, self.now())
        self._store(outcome.changes)
        self._jobs.sweep()
        self._carry_out(outcome)
        self._look_first()
        self._scan_timer = self._loop.call_later(self._scan_interval, self._full_scan)

    @property
    def running(self) -> bool:
        """Whether it has been started."""
        return self._scan_timer is not None

    def configure(self, effects_timeout: float, scan_interval: float) -> None:
        """Go by other durations from now on: seconds that what leases give may take to be made, and
        between full scans."""
        self._jobs.timeout = effects_timeout
        self._scan_interval = scan_interval

    async def stop(self) -> None:
        """Stop taking events; leases stay as they are."""
        for timer in (self._timer, self._scan_timer):
            if timer is not None:
                timer.cancel()
        if self.running:
            # a start that fails may end before it has its edges
            await self._jobs.stop()
        if self._store_timer is not None:
            self._store_backlog()
        if self._store_timer is not None:
            self._store_timer.cancel()

    # -- what the bus sees ----------------------------------------------------------------------
    @property
    def view(self) -> Governor:
        """The governor, to read."""
        return self.governor

    @staticmethod
    def now() -> Instant:
        """This moment."""
        return instant()

    @property
    def progress(self) -> float:
        """When the last event was done, or the queue was seen empty (monotonic seconds)."""
        if not self._queue and not self._busy:
            self._progress = time.monotonic()
        return self._progress

    async def call(self, make: Callable[[Token], Event]) -> str:
        """Submit the call that MAKE builds around a fresh token; return the reply's JSON text.

        Raises Refusal.  If the caller goes away the call itself still runs to its end.
        """
        self._last_token += 1
        token = self._last_token
        future: asyncio.Future[str] = self._loop.create_future()
        self._waiters[token] = future
        self.submit(make(token))
        try:
            return await future
        finally:
            self._waiters.pop(token, None)

    def submit(self, event: Event) -> None:
        """Take an event; it is handled now, or after those before it."""
        self._queue.append(event)
        if not self._busy:
            self._drain()

    def _drain(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            for _ in range(BUDGET):
                if not self._queue:
                    break
                self._process(self._queue.popleft())
                self._progress = time.monotonic()
            else:
                self._loop.call_soon(self._drain)
        finally:
            self._busy = False
        self._arm()

    # -- one event ---------------------------------------------------------------------------------
    def _process(self, event: Event) -> None:
        try:
            outcome = self.governor.handle(event)
        except Exception:
            # a defect must cost the one event, not the authority over the whole node
            self.governor.undo()
            log.exception("event %s failed; its changes were undone", type(event).__name__)
            self._fail(event)
            return
        step = self._step(event, outcome)
        faultpoints.reach(step, "decided")
        if outcome.changes or self._backlog:
            error = self._store(outcome.changes, undoable=_undoable(event))
            if error:
                self.governor.undo()
                self._not_stored(event, error)
                return
        faultpoints.reach(step, "stored")
        self._carry_out(outcome, step)
        faultpoints.reach(step, "done")

    @staticmethod
    def _step(event: Event, outcome: Outcome) -> str:
        """The fault point's step that handling EVENT is, "" for none."""
        if isinstance(event, Scanned):
            return "return" if None in outcome.changes.debts.values() else ""
        if isinstance(event, Tick):
            return "expired" if outcome.changes.leases else ""
        return _STEPS.get(type(event), "")

    def _store(self, changes: Changes, undoable: bool = False) -> str:
        """Commit CHANGES, with what could not be committed before.  Returns "" or the error;
        what is not undoable is kept for the next time, which comes by itself, and not with each event:
        all of it has to be written then."""
        both = _merge(self._backlog, changes) if self._backlog else changes
        if self._store_timer is not None and not undoable:
            self._backlog = both
            return ""
        try:
            self.ledger.commit(both)
        except OSError as error:
            problem = printable(error)
            if not self.store_problem:
                log.error("the ledger can't be written: %s", problem)
            self.store_problem = problem
            if undoable:
                return problem
            self._backlog = both
            self._store_timer = self._loop.call_later(STORE_AGAIN, self._store_backlog)
            return ""
        self._backlog = Changes()
        if self._store_timer is not None:
            self._store_timer.cancel()
            self._store_timer = None
        if self.store_problem:
            log.warning("the ledger can be written again")
            self.store_problem = ""
        self.lasting.note(both)
        if both.audits:
            self.on_stored()
        return ""

    def _store_backlog(self) -> None:
        """Try again to commit what could not be committed."""
        if self._store_timer is not None:
            self._store_timer.cancel()
            self._store_timer = None
        self._store(Changes())

    def _not_stored(self, event: Event, error: str) -> None:
        if isinstance(event, AccessPrepared):
            self._process(
                AccessFailed(event.at, event.lease, f"the ledger can't be written: {error}", store=True)
            )
        elif isinstance(event, AccessAttached):
            self._process(replace(event, error=f"the ledger can't be written: {error}", store=True))
        elif isinstance(event, _CALLS):
            text = f"the ledger can't be written ({error}); nothing was changed, try again later"
            self._answer(Refuse(event.token, ErrorKind.STORE_FAILED, text))

    def _fail(self, event: Event) -> None:
        if isinstance(event, _CALLS):
            self._answer(Refuse(event.token, ErrorKind.INTERNAL, "the agent failed; its log says how"))
        elif isinstance(event, AccessPrepared):
            self._process(AccessFailed(event.at, event.lease, "the agent failed; its log says how"))
        elif isinstance(event, AccessAttached) and not event.error:
            self._process(replace(event, error="the agent failed; its log says how"))

    # -- effects --------------------------------------------------------------------------------------
    def _carry_out(self, outcome: Outcome, step: str = "") -> None:
        news: list[Effect] = []
        answers: list[Reply | Refuse] = []
        work: list[Effect] = []
        scans: set[str] = set()
        for effect in outcome.effects:
            if isinstance(effect, (Reply, Refuse)):
                answers.append(effect)
            elif isinstance(effect, RequestScan):
                scans.update(effect.devices)
            elif isinstance(effect, _WORK):
                work.append(effect)
            else:
                news.append(effect)
        if news:
            self._have("publishing news", self._publisher.publish, news)
        faultpoints.reach(step, "published")
        for answer in answers:
            self._answer(answer)
        for effect in work:
            self._have(type(effect).__name__, self._do, effect)
        if scans:
            self._scan(scans)

    @staticmethod
    def _have(what: str, step: Callable[..., None], *arguments: object) -> None:
        """Have an edge do something: a defect of it must not cost what else follows from the event."""
        try:
            step(*arguments)
        except Exception:
            log.exception("%s failed", what)

    def _answer(self, answer: Reply | Refuse) -> None:
        future = self._waiters.get(answer.token)
        if future is None or future.done():
            return
        if isinstance(answer, Reply):
            future.set_result(answer.body)
        else:
            future.set_exception(Refusal(answer.error, answer.text))

    def _do(self, effect: Effect) -> None:
        match effect:
            case PrepareAccess() | RevokeAccess() | RenewAccess() | AttachAccess():
                self._jobs.start(effect)
            case WatchOwner(lease, binding):
                if binding.pid is not None:
                    self._holders.watch_process(lease, binding)
                if binding.unit is not None or binding.connection is not None:
                    self._owners.watch(lease, binding)
            case UnwatchOwner(lease):
                self._holders.unwatch_process(lease)
                self._owners.unwatch(lease)
            case WatchNodes(device, record):
                self._holders.watch_nodes(device, record)
            case WatchHealth(device, record, repaired):
                self._health.watch(device, record, repaired)
            case Terminate():
                held = self.governor.devices.get(effect.device)
                nodes = self.governor.returns.nodes_of(held) if held is not None else ()
                self._holders.terminate(effect, nodes)
            case StoreCordon(token, name, cordon):
                self.lasting.store_cordon(
                    name, cordon, lambda error: self.submit(CordonStored(self.now(), token, error))
                )

    # -- scans and time ---------------------------------------------------------------------------------
    def _scan(self, names: Iterable[str]) -> None:
        """Have devices scanned; one without any node has nothing that a process could hold."""
        targets = {}
        bare = []
        for name in names:
            device = self.governor.devices.get(name)
            if device is None:
                continue
            nodes = self.governor.returns.nodes_of(device)
            if nodes:
                targets[name] = nodes
            else:
                bare.append(name)
        if targets:
            self._have("asking for a scan", self._holders.request_scan, targets)
        if bare:
            self._loop.call_soon(self._nothing_to_scan, bare)

    def _nothing_to_scan(self, names: list[str]) -> None:
        now = self.now()
        self.submit(Scanned(now, now.boot, {name: DeviceScan() for name in names}))

    def _full_scan(self) -> None:
        self._scan(list(self.governor.devices))
        self._scan_timer = self._loop.call_later(self._scan_interval, self._full_scan)

    def _arm(self) -> None:
        """Have a Tick when the next deadline is due; looked at every second while there is one,
        since the loop's own clock stands still while the machine sleeps."""
        due = self.governor.next_deadline()
        if due is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        due = max(due, self._not_before)
        if self._timer is not None:
            if self._timer_at <= due:
                return
            self._timer.cancel()
        boot = self.now().boot
        wait = min(max(due - boot, 0), 1_000_000)
        self._timer_at = boot + wait
        self._timer = self._loop.call_later(wait / 1e6, self._tick)

    def _tick(self) -> None:
        self._timer = None
        slept, self._slept = self._slept, self._offset()
        now = self.now()
        if self._slept - slept > 2_000_000:
            log.info("the machine slept for %d s; looking at all holders", (self._slept - slept) // 1_000_000)
            self._scan(list(self.governor.devices))
            self._look_first()
            return
        due = self.governor.next_deadline()
        if due is not None and due <= now.boot:
            self.submit(Tick(now))
        self._arm()

    def _look_first(self) -> None:
        """Have nothing expire before a scan had time to end: after a sleep, or while the agent was
        down, deadlines went by that nobody could keep."""
        self._not_before = self.now().boot + LOOK_FIRST
        self._arm()

    @staticmethod
    def _offset() -> int:
        """How long the machine has slept since its boot, in microseconds."""
        return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()) // 1000


_WORK = (
    PrepareAccess,
    RevokeAccess,
    RenewAccess,
    AttachAccess,
    WatchOwner,
    UnwatchOwner,
    WatchNodes,
    WatchHealth,
    Terminate,
    StoreCordon,
)


def _undoable(event: Event) -> bool:
    """Whether what EVENT changes can be taken back: then somebody waits for it and is told."""
    if isinstance(event, AccessAttached):
        return not event.error
    return isinstance(event, (*_CALLS, AccessPrepared))


def _merge(first: Changes, then: Changes) -> Changes:
    """Return both as one, THEN winning."""
    return Changes(
        leases=first.leases | then.leases,
        debts=first.debts | then.debts,
        requests=first.requests | then.requests,
        audits=first.audits + then.audits,
        records=first.records | then.records,
        counts=first.counts | then.counts,
        sequence=max(first.sequence, then.sequence),
        generation=max(first.generation, then.generation),
    )
