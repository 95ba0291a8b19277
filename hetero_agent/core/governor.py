"""The one decider: each event in, its changes and effects out.  Pure and synchronous.

The governor only dispatches: `presence` knows what is there and how it is, `grants` who has
it, `returns` whether it came back; `world` holds the tables and undoes a failed event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero_agent.core import requests
from hetero_agent.core.effects import (
    Outcome,
    Refusal,
    Refuse,
    RequestScan,
    Restored,
    RevokeAccess,
    WatchNodes,
    WatchOwner,
)
from hetero_agent.core.events import (
    AccessFailed,
    AccessPrepared,
    Allocate,
    Closed,
    Confirm,
    CordonStored,
    Event,
    HealthSeen,
    Note,
    Observed,
    Opened,
    OwnerGone,
    ProviderGone,
    Reap,
    Refused,
    Release,
    Scanned,
    SetCordon,
    Signalled,
    Tick,
)
from hetero_agent.core.grants import Grants
from hetero_agent.core.model import (
    AuditKind,
    AuditRecord,
    Device,
    DeviceRecord,
    Health,
    Instant,
    Lease,
    LeaseState,
    Options,
    Result,
    State,
)
from hetero_agent.core.ports import Explanation
from hetero_agent.core.presence import Presence
from hetero_agent.core.returns import Returns
from hetero_agent.core.world import HISTORY, Settings, World
from hetero_agent.text import printable

#: The source whose first complete word makes the agent ready.
KERNEL = "kernel"


class Governor:
    """See the module's text.  `handle` is the only way to change it; the rest is to read."""

    def __init__(self, settings: Settings, epoch: str) -> None:
        self.world = World(settings, epoch)
        self.returns = Returns(self.world)
        self.grants = Grants(self.world, self.returns)
        self.presence = Presence(self.world, self.grants, self.returns)

    # -- events -----------------------------------------------------------------------------------
    def handle(self, event: Event) -> Outcome:
        """Decide what EVENT changes.  A call that is refused changes nothing but the audit."""
        self.world.begin()
        try:
            self._dispatch(event)
        except Refusal as refusal:
            self.world.undo()
            if isinstance(event, (Allocate, Confirm, Release, SetCordon, Reap)):
                self._refused(event, refusal)
        else:
            self.grants.serve_parked(event.at)
        return self.world.finish()

    def configure(self, settings: Settings) -> None:
        """Go by other settings from now on; deadlines that run keep their time."""
        self.world.settings = settings

    def undo(self) -> None:
        """Put back all that the last `handle` changed: it could not be stored."""
        self.world.undo()

    def _dispatch(self, event: Event) -> None:
        match event:
            case Allocate():
                self.grants.allocate(event)
            case Confirm():
                self.grants.confirm(event)
            case Release():
                self.grants.release(event)
            case AccessPrepared():
                self.grants.prepared(event)
            case AccessFailed():
                self.grants.failed(event)
            case OwnerGone():
                self.grants.owner_gone(event)
            case Opened():
                self.returns.opened(event)
            case Closed():
                self.returns.closed(event)
            case Scanned():
                for device_id, lease in self.returns.scanned(event):
                    self._proven(device_id, lease, event.at)
            case Signalled():
                self.returns.signalled(event)
            case Reap():
                self.returns.reap(event)
            case Observed():
                self.presence.observed(event)
                if event.complete and event.source == KERNEL:
                    self.world.ready = True
            case HealthSeen():
                self.presence.health(event)
            case ProviderGone():
                self.presence.provider_gone(event)
            case SetCordon():
                self.presence.set_cordon(event)
            case CordonStored():
                self.presence.cordon_stored(event)
            case Refused():
                self._audit_refused(event)
            case Note(at, kind, text, priority):
                self.world.audit(kind, at, text, priority=priority)
            case Tick():
                self._tick(event.at)

    def _proven(self, device_id: str, lease: str, at: Instant) -> None:
        if lease:
            self.grants.returned(lease, (device_id,), at)
        if device_id not in self.world.devices:
            self.world.effect(WatchNodes(device_id, None))

    def _tick(self, at: Instant) -> None:
        for kind, name in self.world.due(at.boot):
            if kind == "lease":
                self.grants.deadline(name, at)
            elif kind == "debt":
                self.returns.overdue(name, at)
            elif kind == "check":
                self.returns.check(name)
            elif kind == "purge":
                requests.purge(self.world, at)

    def next_deadline(self) -> int | None:
        """The boot time at which a Tick is due, None if nothing waits for time to pass."""
        return self.world.next_alarm()

    def _refused(self, event: Allocate | Confirm | Release | SetCordon | Reap, refusal: Refusal) -> None:
        method = type(event).__name__
        if isinstance(event, SetCordon):
            method = "Uncordon" if event.reason is None else "Cordon"
        self._audit_refused(
            Refused(event.at, event.actor, method, str(refusal.kind), refusal.text, event.request_id)
        )
        self.world.effect(Refuse(event.token, refusal.kind, refusal.text))

    def _audit_refused(self, event: Refused) -> None:
        more = f" ({event.suppressed} like it before)" if event.suppressed else ""
        self.world.audit(
            AuditKind.REFUSED,
            event.at,
            f"{event.method} of uid {event.actor.uid} refused: {event.error}: {printable(event.text)}{more}",
            priority=5,
            reason=event.error,
            actor=event.actor,
            request_id=event.request_id,
        )

    # -- start ----------------------------------------------------------------------------------------
    def restore(self, restored: Restored, at: Instant) -> Outcome:
        """Take up what the stores kept: leases that were answered live on, half-made grants are
        rolled back, those of another boot are closed.  To be called once, before any event."""
        world = self.world
        world.begin()
        world.sequence, world.generation = restored.sequence, restored.generation
        world.counts.update(restored.counts)
        for cordon in restored.cordons:
            self.presence.place_cordon(cordon.device, cordon)
        for key, records in restored.history.items():
            world.histories[key] = deque(records, maxlen=HISTORY)
        world.audit(AuditKind.STARTED, at, f"started, epoch {world.epoch}", priority=5)
        for note in restored.notes:
            world.audit(AuditKind.STORE, at, note, priority=4)
        other = set(restored.other_boot)
        known = {record.id: record for record in restored.records}
        for request in restored.requests:
            world.put_request(request)
            world.alarm(request.boot + requests.MEMORY, "purge", "")
        for lease in restored.leases:
            if lease.id in other:
                self._close_of_other_boot(lease, at)
            elif not lease.granted:
                self._roll_back(lease, at)
            else:
                self._take_up(lease, known, at)
        for debt in restored.debts:
            record = known.get(debt.device)
            lease_known = not debt.lease or debt.lease in world.leases
            if record is None or not lease_known or debt.device in world.devices:
                world.drop_debt(debt.device)
                world.outcome.changes.debts[debt.device] = None
                continue
            world.put_debt(debt)
            self._placeholder(record, State.RECLAIMING, debt.lease, at)
            world.effect(RequestScan((debt.device,)))
            world.alarm(at.boot + 1_000_000, "check", debt.device)
        # a lease whose devices are neither here nor owed any more is over
        for lease in list(world.leases.values()):
            if not lease.alive:
                away = [one for one in lease.devices if one not in world.devices]
                self.grants.returned(lease.id, away, at)
        return world.finish()

    def _close_of_other_boot(self, lease: Lease, at: Instant) -> None:
        world = self.world
        world.put_lease(replace(lease, state=LeaseState.ENDED, result=Result.REBOOT, ended=at))
        world.audit(
            AuditKind.ENDED,
            at,
            f"lease {lease.id} of uid {lease.uid} ended with the last boot",
            priority=5,
            lease=lease.id,
            reason=str(Result.REBOOT),
        )
        world.drop_lease(lease.id)
        requests.spend(world, lease.id, at)
        world.effect(RevokeAccess(lease.id))

    def _roll_back(self, lease: Lease, at: Instant) -> None:
        world = self.world
        world.put_lease(lease)
        world.drop_lease(lease.id)
        world.drop_request(lease.key)
        world.audit(
            AuditKind.ENDED,
            at,
            f"lease {lease.id} of uid {lease.uid} was being prepared when the agent died; rolled back",
            priority=4,
            lease=lease.id,
            reason="rolled-back",
            request_id=lease.key.request_id,
        )
        for device_id in lease.devices:
            world.outcome.changes.records[device_id] = None
        world.effect(RevokeAccess(lease.id))

    def _take_up(self, lease: Lease, known: Mapping[str, DeviceRecord], at: Instant) -> None:
        world = self.world
        world.put_lease(lease)
        if not lease.alive:
            return
        for device_id in lease.devices:
            record = known.get(device_id)
            if record is None or device_id in lease.returned:
                continue
            state = State.IN_USE if lease.confirmed else State.ALLOCATING
            if device_id in lease.lost:
                state = State.LOST
            self._placeholder(record, state, lease.id, at)
            world.effect(RequestScan((device_id,)))
        if lease.deadline:
            world.alarm(lease.deadline, "lease", lease.id)
        if lease.binding:
            world.effect(WatchOwner(lease.id, lease.binding))

    def _placeholder(self, record: DeviceRecord, state: State, lease: str, at: Instant) -> None:
        """A device that the ledger knows before its source has spoken."""
        world = self.world
        debt = world.debts.get(record.id)
        if debt is not None and debt.overdue:
            state = State.FAULTY
        kernel = record.source == KERNEL
        world.put_device(
            Device(
                record=record,
                present=state is not State.LOST,
                state=state,
                reason="",
                since=at,
                health=record.health if kernel else Health.UNKNOWN,
                lease=lease,
                appeared=at.boot,
                count=world.counts.get(world.key(record), 0),
                cordon=world.cordon_of(record),
            )
        )
        world.effect(WatchNodes(record.id, record))
        self.presence.expect(record.id)

    # -- the view ---------------------------------------------------------------------------------------
    @property
    def epoch(self) -> str:
        """The name of this life of the agent."""
        return self.world.epoch

    @property
    def generation(self) -> int:
        """Grows with every change."""
        return self.world.generation

    @property
    def ready(self) -> bool:
        """Whether the first enumeration is complete."""
        return self.world.ready

    @property
    def devices(self) -> Mapping[str, Device]:
        """All devices by id."""
        return self.world.devices

    @property
    def leases(self) -> Mapping[str, Lease]:
        """All leases that have devices out, by id."""
        return self.world.leases

    def resources(self) -> Mapping[str, Mapping[str, int]]:
        """Per resource: one count per state, plus ``total`` and ``allocatable``."""
        return {
            resource: {
                **{str(state): counts[state] for state in State},
                "total": counts["total"],
                "allocatable": self.world.allocatable_of(resource),
            }
            for resource, counts in sorted(self.world.tally.items())
        }

    def find_device(self, name: str) -> Device | None:
        """The device with this id or alias."""
        return self.world.find(name)

    def blocked_by(self, device: str) -> tuple[str, ...]:
        """The relatives that keep it from being granted."""
        return self.world.blocked_by(device)

    def history(self, device: str, most: int) -> Sequence[AuditRecord]:
        """Its last transitions, oldest first, at most MOST (and never over 20)."""
        known = self.world.devices.get(device)
        records = self.world.histories.get(self.world.key(known.record), ()) if known else ()
        return list(records)[-most:] if most > 0 else []

    def explain(self, resource: str, count: int, options: Options) -> Explanation:
        """What Allocate would do now, by the same code path; grants nothing."""
        return self.grants.explain(resource, count, options)

    def usage(self) -> Mapping[str, int]:
        """What is in use of each limit, by the limit's key."""
        return {
            "leases": len(self.world.leases),
            "devices": len(self.world.devices),
            "waiting": self.grants.waiting,
        }

    def owed(self) -> int:
        """How many devices are being taken back."""
        return len(self.world.debts)

    def scan_targets(self, names: Sequence[str]) -> dict[str, Device]:
        """The devices to look at for a RequestScan: the named ones, or all."""
        chosen = names or list(self.world.devices)
        return {one: self.world.devices[one] for one in chosen if one in self.world.devices}
