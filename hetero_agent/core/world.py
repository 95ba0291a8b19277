"""The state of the governor: leases, requests, cordons and histories on top of the roster, the
audit trail, and moving a device by the lifecycle's tables.

Every change of a table goes through a ``put_…`` method, which remembers how to undo it, keeps
the counts right, and notes what the ledger must store.  One event is one transaction: `begin`,
changes, then the ledger commits them or `undo` puts all back.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from hetero_agent.core.effects import (
    DeviceRemoved,
    RenewAccess,
    RevokeAccess,
    StateChanged,
    WatchHealth,
    WatchNodes,
)
from hetero_agent.core.lifecycle import Facts, To, Trigger, row, settle
from hetero_agent.core.model import (
    AGENT,
    IN_HANDS,
    Actor,
    AuditKind,
    AuditRecord,
    Cordon,
    Device,
    DeviceRecord,
    Holder,
    Instant,
    Lease,
    RequestKey,
    RequestRecord,
    Revocation,
    State,
)
from hetero_agent.core.roster import Roster
from hetero_agent.core.settings import Settings
from hetero_agent.text import printable

K = TypeVar("K")
V = TypeVar("V")

#: Transitions kept per device for GetHistory, and for how many devices, gone ones included.
HISTORY = 20
HISTORIES = 8192

#: States that keep a device's relatives from being granted.
_BUSY = frozenset({State.ALLOCATING, State.IN_USE, State.RECLAIMING, State.OCCUPIED, State.LOST})


class World(Roster):
    """All tables of the governor; see the module's text."""

    def __init__(self, settings: Settings, epoch: str) -> None:
        super().__init__()
        self.settings = settings
        self.epoch = epoch
        self.ready = False
        self.leases: dict[str, Lease] = {}
        self.requests: dict[RequestKey, RequestRecord] = {}
        self.cordons: dict[str, Cordon] = {}
        self.revoking: dict[str, Revocation] = {}
        self.counts: dict[str, int] = {}
        self.histories: dict[str, deque[AuditRecord]] = {}
        self.load: Counter[tuple[int, str]] = Counter()
        self.load_of_uid: Counter[int] = Counter()
        self.held: Counter[tuple[int, str]] = Counter()
        self.remembered: Counter[int] = Counter()
        self.gone: list[str] = []
        self.by_lease: defaultdict[str, set[RequestKey]] = defaultdict(set)
        self.remembered_leases: dict[str, int] = {}
        self._placed: defaultdict[str, set[str]] = defaultdict(set)

    def set_ready(self) -> None:
        """The first enumeration is complete."""
        before = self.ready

        def undo() -> None:
            self.ready = before

        self._undo.append(undo)
        self.ready = True

    def begin(self) -> None:
        """Start the changes of one event."""
        super().begin()
        self.gone.clear()

    # -- the other tables ------------------------------------------------------------------------
    def put_lease(self, lease: Lease) -> None:
        """Add or replace a lease."""
        old = self.leases.get(lease.id)
        self._undo.append(lambda: self._install_lease(lease.id, old))
        self._install_lease(lease.id, lease)
        self.outcome.changes.leases[lease.id] = lease

    def drop_lease(self, lease_id: str) -> None:
        """Take a lease out of the table; its request ids are spent from now on."""
        old = self.leases[lease_id]
        self._undo.append(lambda: self._install_lease(lease_id, old))
        self._install_lease(lease_id, None)
        self.outcome.changes.leases[lease_id] = None

    def _install_lease(self, lease_id: str, new: Lease | None) -> None:
        old = self.leases.pop(lease_id, None)
        for lease, step in ((old, -1), (new, 1)):
            if lease is not None:
                left = len(lease.devices) - len(lease.returned)
                self.load[lease.uid, lease.client] += step
                self.load_of_uid[lease.uid] += step
                self.held[lease.uid, lease.client] += step * left
        if new is not None:
            self.leases[lease_id] = new
        elif old is not None:
            key = (old.uid, old.client)
            if not self.load[key]:
                del self.load[key], self.held[key]
            if not self.load_of_uid[old.uid]:
                del self.load_of_uid[old.uid]

    def put_request(self, record: RequestRecord) -> None:
        """Remember an answered call."""
        old = self.requests.get(record.key)
        self._undo.append(lambda: self._install_request(record.key, old))
        self._install_request(record.key, record)
        self.outcome.changes.requests[record.key] = record

    def drop_request(self, key: RequestKey) -> None:
        """Forget a call."""
        old = self.requests.get(key)
        if old is not None:
            self._undo.append(lambda: self._install_request(key, old))
            self._install_request(key, None)
            self.outcome.changes.requests[key] = None

    def _install_request(self, key: RequestKey, new: RequestRecord | None) -> None:
        old = self.requests.pop(key, None)
        if old is not None:
            self.remembered[key.uid] -= 1
            if old.lease:
                self.by_lease[old.lease].discard(key)
                if not self.by_lease[old.lease]:
                    del self.by_lease[old.lease]
            if old.ended and key.method == "Allocate":
                self.remembered_leases.pop(old.lease, None)
        if new is not None:
            self.requests[key] = new
            self.remembered[key.uid] += 1
            if new.lease:
                self.by_lease[new.lease].add(key)
            if new.ended and key.method == "Allocate":
                self.remembered_leases[new.lease] = new.owner
        elif not self.remembered[key.uid]:
            del self.remembered[key.uid]

    def revoke(self, lease_id: str) -> None:
        """Have taken back what a lease gives: no device of it is returned before."""
        if lease_id not in self.revoking:
            self.assign(self.revoking, lease_id, Revocation())
        self.effect(RevokeAccess(lease_id))

    def left(self, lease_id: str, device_id: str) -> None:
        """A device goes: should it be back before what LEASE_ID gives is taken back, that may be given of
        it still."""
        before = self.revoking.get(lease_id)
        if before is not None and device_id not in before.away:
            self.assign(self.revoking, lease_id, replace(before, away=(*before.away, device_id)))

    def retract(self, lease: Lease) -> None:
        """Have taken back what a live lease gives of the devices that it lost: none of them is
        returned before."""
        if lease.id not in self.revoking:
            self.assign(self.revoking, lease.id, Revocation())
        self.effect(RenewAccess(lease))

    def history(self, record: DeviceRecord) -> list[AuditRecord]:
        """The last transitions of a device, oldest first: those since its serial is known, wherever
        it was, and those before in this place."""
        own = self.serial(record)
        kept = [*self.histories.get(record.id, ())]
        if record.serial:
            kept += self.histories.get(f"serial:{record.serial}", ())
        return sorted(
            (
                one
                for one in kept
                if (own and one.serial == own)
                or (one.device == record.id and one.serial in ("", record.serial))
            ),
            key=lambda one: one.sequence,
        )[-HISTORY:]

    def put_cordon(self, key: str, cordon: Cordon | None) -> None:
        """Place a cordon under its `cordon_key`, or take it away."""
        old = self.cordons.get(key)
        self._undo.append(lambda: self._install_cordon(key, old))
        self._install_cordon(key, cordon)

    def _install_cordon(self, key: str, new: Cordon | None) -> None:
        old = self.cordons.pop(key, None)
        if old is not None:
            self._placed[old.device].discard(key)
            if not self._placed[old.device]:
                del self._placed[old.device]
        if new is not None:
            self.cordons[key] = new
            self._placed[new.device].add(key)

    def cordons_of(self, record: DeviceRecord) -> list[str]:
        """The keys of the cordons that a device is under: that of its serial, wherever it is, and
        those of its place, except what is known to be another device's."""
        found = [f"serial:{record.serial}"] if f"serial:{record.serial}" in self.cordons else []
        for key in sorted(self._placed.get(record.id, ())):
            if key not in found and not (self.cordons[key].serial and record.serial):
                found.append(key)
        return found

    def cordons_at(self, place: str) -> list[str]:
        """The keys of the cordons of what was at a place and is not here now: no device is under them
        itself."""
        under = {key for device in self.devices.values() for key in self.cordons_of(device.record)}
        return [key for key in sorted(self._placed.get(place, ())) if key not in under]

    def cordon_of(self, record: DeviceRecord) -> Cordon | None:
        """The cordon that a device is under: its own, else that of its card, also while that is not
        there (a physical function, as long as it has virtual ones)."""
        seen = {record.id}
        while True:
            found = self.cordons_of(record)
            if found:
                return self.cordons[found[0]]
            if not record.parent or record.parent in seen:
                return None
            seen.add(record.parent)
            card = self.devices.get(record.parent)
            if card is None:
                left = sorted(self._placed.get(record.parent, ()))
                return self.cordons[left[0]] if left else None
            record = card.record

    # -- moving a device ---------------------------------------------------------------------------
    def facts(self, device: Device) -> Facts:
        """What `settle` needs to know of a device."""
        debt = self.debts.get(device.id)
        revocation = self.revoking.get(debt.lease) if debt is not None else None
        return Facts(
            present=device.present,
            unproven=debt is not None,
            overdue=debt is not None and debt.overdue,
            incomplete=debt is not None and debt.incomplete,
            unrevoked=revocation is not None and (revocation.waiting or bool(revocation.error)),
            cordoned=device.cordon is not None,
            obstacle=device.record.obstacle,
            health=device.health,
            evidence=device.health_reason,
            provider_gone=device.provider_gone,
            probed=device.probed,
            scanned=device.scanned,
            occupied=device.occupied,
            held_by=held_by(device.holders),
        )

    def move(
        self,
        device: Device,
        trigger: Trigger,
        at: Instant,
        *,
        reason: str = "",
        actor: Actor = AGENT,
        request_id: str = "",
        lease: str | None = None,
    ) -> Device | None:
        """Apply TRIGGER by the table to DEVICE (with its facts already changed) and store it.

        Returns the device as it is then, None if it is gone.  LEASE, if given, becomes the
        lease that has it.  Transitions are audited, new reasons in the same state are not.
        """
        found = row(device.state, trigger)
        to: State | None = device.state
        why = device.reason
        if found is not None and found.to is To.SETTLE:
            to, why = settle(self.facts(device))
        elif found is not None and found.to is not To.SAME:
            to, why = State(found.to), reason
        if lease is not None:
            device = replace(device, lease=lease)
        if to is None:
            self._audit_move(device, "gone", trigger, at, reason=why, actor=actor, request_id=request_id)
            self.drop_device(device.id)
            self.gone.append(device.id)
            self.audit(AuditKind.GONE, at, f"{device.id} is gone", device=device.record)
            self.effect(WatchNodes(device.id, None))
            self.effect(WatchHealth(device.id, None))
            self.effect(DeviceRemoved(device.id))
            return None
        if to is device.state:
            if why != device.reason:
                device = replace(device, reason=why)
            self.put_device(device)
            return device
        before = device
        device = replace(device, state=to, reason=why, since=at)
        self.put_device(device)
        self._audit_move(before, to, trigger, at, reason=why, actor=actor, request_id=request_id)
        return device

    def _audit_move(
        self,
        device: Device,
        to: str,
        trigger: Trigger,
        at: Instant,
        *,
        reason: str,
        actor: Actor,
        request_id: str,
    ) -> None:
        alert = to in (State.FAULTY, State.LOST)
        record = self.audit(
            AuditKind.TRANSITION,
            at,
            f"{device.id}: {device.state} -> {to} ({trigger}{': ' + reason if reason else ''})",
            priority=4 if alert else 6,
            device=device.record,
            lease=device.lease,
            from_state=device.state,
            to_state=to,
            trigger=trigger,
            reason=reason,
            actor=actor,
            request_id=request_id,
            took=max(0, at.boot - device.since.boot),
        )
        self._keep(self.key(device.record), record)
        self.effect(
            StateChanged(
                device.id,
                device.state,
                to,
                reason,
                {"sequence": record.sequence, "trigger": str(trigger), "lease": device.lease, "time": at.real},
            )
        )

    def correlate(self, device: Device, what: str, at: Instant, reason: str) -> None:
        """Put something that may be the cause of what comes next into a device's history."""
        record = self.audit(
            AuditKind.CORRELATION,
            at,
            f"{device.id}: {what}: {reason}",
            device=device.record,
            lease=device.lease,
            from_state=device.state,
            to_state=device.state,
            trigger=what,
            reason=reason,
        )
        self._keep(self.key(device.record), record)

    def _keep(self, key: str, record: AuditRecord) -> None:
        """Put a transition into the history, whose oldest entry goes if it is too much."""
        if key not in self.histories:
            if len(self.histories) >= HISTORIES:
                here = {self.key(device.record) for device in self.devices.values()}
                gone = next((one for one in self.histories if one not in here), None)
                if gone is not None:
                    self.discard(self.histories, gone)
            self.assign(self.histories, key, deque(maxlen=HISTORY))
        history = self.histories[key]
        dropped = history[0] if len(history) == HISTORY else None
        history.append(record)

        def undo() -> None:
            history.pop()
            if dropped is not None:
                history.appendleft(dropped)

        self._undo.append(undo)

    def audit(
        self,
        kind: AuditKind,
        at: Instant,
        message: str,
        *,
        priority: int = 6,
        device: DeviceRecord | None = None,
        lease: str = "",
        from_state: str = "",
        to_state: str = "",
        trigger: str = "",
        reason: str = "",
        actor: Actor = AGENT,
        request_id: str = "",
        took: int = 0,
        extra: Mapping[str, str] | None = None,
    ) -> AuditRecord:
        """Write one line of the audit trail, with the next sequence number."""
        sequence, generation = self.sequence, self.generation

        def undo() -> None:
            self.sequence, self.generation = sequence, generation

        self._undo.append(undo)
        self.sequence += 1
        self.generation += 1
        record = AuditRecord(
            sequence=self.sequence,
            generation=self.generation,
            at=at,
            kind=kind,
            message=printable(message, 512),
            priority=priority,
            device=device.id if device else "",
            serial=self.serial(device) if device else "",
            lease=lease,
            from_state=from_state,
            to_state=to_state,
            trigger=str(trigger),
            reason=printable(reason),
            actor=actor,
            request_id=request_id,
            took=took,
            extra=extra or {},
        )
        self.outcome.changes.audits.append(record)
        return record

    def access_failed(self, lease_id: str, at: Instant, what: str, error: str) -> None:
        """Write in the audit trail that something a lease gives on the host is not as it should be."""
        self.audit(
            AuditKind.ACCESS,
            at,
            f"lease {lease_id}: {what}: {printable(error)}",
            priority=4,
            lease=lease_id,
            trigger=Trigger.EFFECT_FAILED,
            reason=error,
        )


def held_by(holders: tuple[Holder, ...]) -> str:
    """Say in public words what keeps a device: how many processes (never which)."""
    if not holders:
        return ""
    return "held by 1 process" if len(holders) == 1 else f"held by {len(holders)} processes"


def in_hands(device: Device) -> bool:
    """Tell whether a lease has the device in its hands."""
    return device.state in IN_HANDS
