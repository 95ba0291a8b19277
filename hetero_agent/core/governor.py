"""The one decider: each event in, its changes and effects out.  Pure and synchronous.

The governor only dispatches: `presence` knows what is there and how it is, `grants` who has
it, `upkeep` what it gives, `returns` whether it came back; `world` holds the tables and undoes a failed event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero_agent.core import requests
from hetero_agent.core.cordons import Cordons
from hetero_agent.core.effects import (
    Outcome,
    Refusal,
    Refuse,
    RequestScan,
    Restored,
    WatchNodes,
    WatchOwner,
)
from hetero_agent.core.endings import Endings
from hetero_agent.core.events import (
    AccessAttached,
    AccessFailed,
    AccessPrepared,
    AccessRenewed,
    AccessRevoked,
    Allocate,
    Closed,
    Confirm,
    CordonStored,
    Event,
    Happened,
    HealthJudged,
    HealthSeen,
    NodesTouched,
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
from hetero_agent.core.lifecycle import Trigger, settle
from hetero_agent.core.model import (
    AuditKind,
    AuditRecord,
    Debt,
    Device,
    DeviceRecord,
    Health,
    Holder,
    Instant,
    Lease,
    LeaseState,
    Obstacle,
    Opinion,
    Options,
    Origin,
    RequestKey,
    Result,
    State,
)
from hetero_agent.core.ports import Explanation
from hetero_agent.core.presence import Presence, evidence_fields
from hetero_agent.core.reaps import Reaps
from hetero_agent.core.returns import Returns
from hetero_agent.core.settings import Settings
from hetero_agent.core.upkeep import Upkeep
from hetero_agent.core.world import HISTORY, World
from hetero_agent.text import printable

#: The source whose first complete word makes the agent ready.
KERNEL = "kernel"


class Governor:
    """See the module's text.  `handle` is the only way to change it; the rest is to read."""

    def __init__(self, settings: Settings, epoch: str) -> None:
        self.world = World(settings, epoch)
        self.endings = Endings(self.world)
        self.returns = Returns(self.world, self.endings)
        self.reaps = Reaps(self.world, self.returns, self.endings)
        self.grants = Grants(self.world, self.returns)
        self.upkeep = Upkeep(self.world)
        self.cordons = Cordons(self.world)
        self.presence = Presence(self.world, self.grants, self.returns, self.cordons)

    # -- events -----------------------------------------------------------------------------------
    def handle(self, event: Event) -> Outcome:
        """Decide what EVENT changes.  A call that is refused changes nothing but the audit."""
        self.world.begin()
        try:
            self._dispatch(event)
            self.presence.cards_gone(event.at)
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
            case AccessRevoked():
                self.upkeep.revoked(event)
            case AccessRenewed():
                self.upkeep.renewed(event)
            case AccessAttached():
                self.grants.attached(event)
            case NodesTouched():
                self.upkeep.touched(event)
            case OwnerGone():
                self.grants.owner_gone(event)
            case Opened():
                self.returns.opened(event)
            case Closed():
                self.returns.closed(event)
            case Scanned():
                for device_id, lease in self.returns.scanned(event):
                    if lease:
                        self.grants.returned(lease, (device_id,), event.at)
            case Signalled():
                self.endings.signalled(event)
                self.reaps.signalled(event)
            case Reap():
                self.reaps.asked(event)
            case Observed():
                self.presence.observed(event)
                if event.complete and event.source == KERNEL:
                    self.world.set_ready()
            case HealthSeen():
                self.presence.health(event)
            case HealthJudged():
                self.presence.judged(event)
            case Happened():
                self.presence.happened(event)
            case ProviderGone():
                self.presence.provider_gone(event)
            case SetCordon():
                self.cordons.asked(event)
            case CordonStored():
                self.cordons.stored(event)
            case Refused():
                self._audit_refused(event)
            case Note():
                self._note(event)
            case Tick():
                self._tick(event.at)

    def _note(self, event: Note) -> None:
        device = self.world.devices.get(event.device)
        self.world.audit(
            event.kind,
            event.at,
            event.text,
            priority=event.priority,
            device=device.record if device else None,
            lease=device.lease if device else "",
            reason=event.text if device else "",
            extra=evidence_fields(event.evidence),
        )

    def _tick(self, at: Instant) -> None:
        for kind, name in self.world.due(at.boot):
            if kind == "lease":
                self.grants.deadline(name, at)
            elif kind == "debt":
                self.returns.overdue(name, at)
            elif kind == "check":
                self.returns.check(name)
            elif kind == "renew":
                self.upkeep.renew(name)
            elif kind == "revoke":
                self.upkeep.again(name)
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
            world.put_cordon(f"serial:{cordon.serial}" if cordon.serial else cordon.device, cordon)
        for key, records in restored.history.items():
            world.histories[key] = deque(records, maxlen=HISTORY)
        world.audit(AuditKind.STARTED, at, f"started, epoch {world.epoch}", priority=5)
        for note in restored.notes:
            world.audit(AuditKind.STORE, at, note, priority=4)
        known = {record.id: record for record in restored.records}
        owed = [
            debt
            for debt in restored.debts
            if debt.device not in restored.other_boot_debts and debt.lease not in restored.other_boot
        ]
        for request in restored.requests:
            world.put_request(request)
        requests.purge_at(world, at.boot)
        for lease in restored.leases:
            if lease.id in restored.other_boot:
                self._close_of_other_boot(lease, at)
            elif not lease.granted and lease.alive:
                self._roll_back(lease, known, at)
            else:
                self._take_up(lease, known, at)
        for debt in owed:  # also of a device that has come back to a lease which lives on
            self._take_debt(debt, known, at)
        self._sweep(restored, at)
        return world.finish()

    def _take_debt(self, debt: Debt, known: Mapping[str, DeviceRecord], at: Instant) -> None:
        world = self.world
        lease = world.leases.get(debt.lease)
        record = known.get(debt.device)
        if record is None and lease is not None:
            record = _unknown(debt.device, lease.resource)
        if record is None:
            # it is looked at before it is granted, like any device that appears
            world.outcome.changes.debts[debt.device] = None
            return
        world.put_debt(debt)
        self._placeholder(record, State.RECLAIMING, debt.lease, at)
        world.alarm(at.boot + 1_000_000, "check", debt.device)

    def _sweep(self, restored: Restored, at: Instant) -> None:
        """Let go of rows that concern nothing that is left."""
        world = self.world
        for lease in list(world.leases.values()):
            if not lease.alive:
                owed = {one.device for one in world.debts.values() if one.lease == lease.id}
                away = [one for one in lease.devices if one not in owed]
                self.grants.returned(lease.id, away, at)
        for debt in restored.debts:
            if debt.device not in world.debts:
                world.outcome.changes.debts[debt.device] = None
        for record in restored.records:
            if record.id not in world.devices:
                world.outcome.changes.records[record.id] = None
        for request in list(world.requests.values()):
            if request.lease and request.lease not in world.leases and not request.ended:
                if request.body:
                    requests.spend(world, request.lease, at)
                else:
                    world.drop_request(request.key)

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
            extra={"RESULT": str(Result.REBOOT)},
        )
        world.drop_lease(lease.id)
        requests.spend(world, lease.id, at)
        world.revoke(lease.id)

    def _roll_back(self, lease: Lease, known: Mapping[str, DeviceRecord], at: Instant) -> None:
        """Nobody was told of it, but what it gives may be there, whole or half: its devices are not
        granted before that is taken back."""
        self.world.put_lease(lease)
        self._place(lease, known, at)
        self.grants.end(
            lease,
            Trigger.EFFECT_FAILED,
            at,
            reason="it was being prepared when the agent died",
            request_id=lease.key.request_id,
        )

    def _place(self, lease: Lease, known: Mapping[str, DeviceRecord], at: Instant) -> None:
        """Put the devices of LEASE into its hands."""
        for device_id in lease.devices:
            if device_id in lease.returned:
                continue
            record = known.get(device_id) or _unknown(device_id, lease.resource)
            state = State.IN_USE if lease.confirmed else State.ALLOCATING
            if device_id in lease.lost:
                state = State.LOST
            self._placeholder(record, state, lease.id, at)

    def _take_up(self, lease: Lease, known: Mapping[str, DeviceRecord], at: Instant) -> None:
        world = self.world
        world.put_lease(lease)
        if not lease.alive:
            world.revoke(lease.id)
            return
        self._place(lease, known, at)
        if lease.deadline:
            world.alarm(lease.deadline, "lease", lease.id)
        if lease.binding:
            world.effect(WatchOwner(lease.id, lease.binding))
        self.upkeep.renew(lease.id)
        self.grants.attachments.restore(lease)

    def _placeholder(self, record: DeviceRecord, state: State, lease: str, at: Instant) -> None:
        """A device that the ledger knows before its source has spoken."""
        world = self.world
        said = Opinion(Health.UNKNOWN)
        if record.source == KERNEL:
            said = Opinion(record.health, record.health_reason)
        device = Device(
            record=record,
            present=state is not State.LOST,
            state=state,
            reason="",
            since=at,
            health=said.health,
            health_reason=said.reason,
            opinions={Origin.SOURCE: said},
            lease=lease,
            probed=not world.settings.probes,
            appeared=at.boot,
            count=world.counts.get(world.key(record), 0),
            cordon=world.cordon_of(record),
        )
        if record.id in world.debts:
            settled, reason = settle(world.facts(device))
            device = replace(device, state=settled or state, reason=reason)
        world.put_device(device)
        world.effect(WatchNodes(record.id, record))
        world.effect(RequestScan((record.id,)))
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

    def remembers(self, key: RequestKey) -> bool:
        """Whether a call with this id was answered, or is being granted."""
        return key in self.world.requests

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
        """The relatives and twins that keep it from being granted."""
        return self.world.blocked_by(device)

    def role_of(self, device: Device, holder: Holder) -> str:
        """What a holder counts as: lease, leftover, intruder, outsider or system."""
        return self.returns.role_of(device, holder)

    def history(self, device: str, most: int) -> Sequence[AuditRecord]:
        """Its last transitions, oldest first, at most MOST (and never over 20)."""
        known = self.world.devices.get(device)
        return self.world.history(known.record)[-most:] if known and most > 0 else []

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


def _unknown(device_id: str, resource: str) -> DeviceRecord:
    """What stands for a leased device whose record was damaged, until its source speaks: no
    source, so that any may, and nothing to grant."""
    return DeviceRecord(device_id, resource, source="", obstacle=Obstacle.NO_NODE)
