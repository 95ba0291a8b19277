"""The state of the governor: tables with undo, counts, relatives, the audit and the alarms.

Every change of a table goes through a ``put_…`` method, which remembers how to undo it, keeps
the counts and the index right, and notes what the ledger must store.  One event is one
transaction: `begin`, changes, then the ledger commits them or `undo` puts all back.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from hetero_agent.core.effects import (
    DeviceChanged,
    DeviceRemoved,
    Effect,
    Outcome,
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
    Debt,
    Device,
    DeviceRecord,
    Health,
    Holder,
    Instant,
    Lease,
    RequestKey,
    RequestRecord,
    State,
)
from hetero_agent.core.selection import Key, Pool, key_of
from hetero_agent.text import printable

K = TypeVar("K")
V = TypeVar("V")

#: Transitions kept per device for GetHistory, and for how many devices, gone ones included.
HISTORY = 20
HISTORIES = 8192

#: States that keep a device's relatives from being granted.
_BUSY = frozenset({State.ALLOCATING, State.IN_USE, State.RECLAIMING, State.OCCUPIED, State.LOST})


@dataclass(frozen=True, slots=True)
class Settings:
    """What the governor goes by; durations in microseconds, limits as in the configuration.

    PROBES: devices are probed, so a new one waits for its first probe."""

    confirm_within: int = 30_000_000
    reclaim_deadline: int = 60_000_000
    kill_after: int = 10_000_000
    occupied_after: int = 2_000_000
    park: int = 5_000_000
    orphans_kill: bool = False
    probes: bool = False
    system_holders: tuple[str, ...] = ()
    leases: int = 4096
    leases_per_uid: int = 1024
    leases_per_client: int = 256
    devices_per_lease: int = 64
    devices_per_client: int = 1024
    requests_per_uid: int = 50_000
    waiting: int = 256


class World:
    """All tables of the governor; see the module's text."""

    def __init__(self, settings: Settings, epoch: str) -> None:
        self.settings = settings
        self.epoch = epoch
        self.ready = False
        self.sequence = 0
        self.generation = 0
        self.devices: dict[str, Device] = {}
        self.leases: dict[str, Lease] = {}
        self.debts: dict[str, Debt] = {}
        self.requests: dict[RequestKey, RequestRecord] = {}
        self.cordons: dict[str, Cordon] = {}
        self.counts: dict[str, int] = {}
        self.histories: dict[str, deque[AuditRecord]] = {}
        self.allocatable: dict[str, str] = {}
        self.free: Counter[str] = Counter()
        self.confirming: dict[str, str] = {}
        self.doubted: Counter[str] = Counter()
        self.tally: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.load: Counter[tuple[int, str]] = Counter()
        self.load_of_uid: Counter[int] = Counter()
        self.held: Counter[tuple[int, str]] = Counter()
        self.remembered: Counter[int] = Counter()
        self.outcome = Outcome()
        self.gone: list[str] = []
        self.by_lease: defaultdict[str, set[RequestKey]] = defaultdict(set)
        self.remembered_leases: dict[str, int] = {}
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._members: defaultdict[str, set[str]] = defaultdict(set)
        self._serials: defaultdict[str, set[str]] = defaultdict(set)
        self._children: defaultdict[str, set[str]] = defaultdict(set)
        self._placed: defaultdict[str, set[str]] = defaultdict(set)
        self._pools: dict[str, Pool] = {}
        self._busy_ones: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._alarms: list[tuple[int, str, str]] = []
        self._due: dict[tuple[str, str], int] = {}

    # -- one event, one transaction ----------------------------------------------------------
    def begin(self) -> None:
        """Start the changes of one event."""
        self.outcome = Outcome()
        self.gone.clear()
        self._undo.clear()

    def finish(self) -> Outcome:
        """End the event; `undo` still works until the next `begin`."""
        self.outcome.changes.sequence = self.sequence
        self.outcome.changes.generation = self.generation
        return self.outcome

    def undo(self) -> None:
        """Put back all that changed since `begin`."""
        self.outcome = Outcome()
        while self._undo:
            self._undo.pop()()
        self.outcome = Outcome()

    def effect(self, effect: Effect) -> None:
        """Have EFFECT carried out once the changes are stored."""
        self.outcome.effects.append(effect)

    def note(self, undo: Callable[[], None]) -> None:
        """Remember how to undo a change that was made outside the tables."""
        self._undo.append(undo)

    def set_ready(self) -> None:
        """The first enumeration is complete."""
        before = self.ready

        def undo() -> None:
            self.ready = before

        self._undo.append(undo)
        self.ready = True

    def assign(self, table: dict[K, V], key: K, value: V) -> None:
        """Set an entry of a table that is not the world's own, in a way that `undo` knows."""
        had, old = key in table, table.get(key)
        table[key] = value

        def undo() -> None:
            if had:
                table[key] = old  # type: ignore[assignment]
            else:
                del table[key]

        self._undo.append(undo)

    def discard(self, table: dict[K, V], key: K) -> None:
        """Take an entry, if there, out of a table, in a way that `undo` knows."""
        if key in table:
            old = table.pop(key)
            self._undo.append(lambda: table.__setitem__(key, old))

    # -- devices -------------------------------------------------------------------------------
    def put_device(self, device: Device) -> None:
        """Add or replace a device."""
        old = self.devices.get(device.id)
        self._undo.append(lambda: self._install(device.id, old))
        self._install(device.id, device)
        if old is not None and old != device:
            self.effect(DeviceChanged(device.id))

    def drop_device(self, device_id: str) -> None:
        """Take a device out of the table."""
        old = self.devices.get(device_id)
        self._undo.append(lambda: self._install(device_id, old))
        self._install(device_id, None)

    def _install(self, device_id: str, new: Device | None) -> None:
        old = self.devices.get(device_id)
        around: set[str] = set()
        moved = old is None or new is None or old.record.parent != new.record.parent
        if old is not None:
            if moved:
                around.update(self.relatives(device_id, old.record))
            self._count(old, -1)
            if new is None or new.record is not old.record:
                self._unlink(old.record)
        if new is None:
            self.devices.pop(device_id, None)
        else:
            self.devices[device_id] = new
            self._count(new, 1)
            if old is None or new.record is not old.record:
                self._link(new.record)
            if moved:
                around.update(self.relatives(device_id, new.record))
        self._index(device_id)
        self._refresh_kin(device_id, around)

    def _refresh_kin(self, device_id: str, around: set[str]) -> None:
        """Look again at AROUND, whose family has changed, and at all relatives of a device that
        became busy or free."""
        busy = self._busy(self.devices.get(device_id))
        if busy != (device_id in self._busy_ones):
            (self._busy_ones.add if busy else self._busy_ones.discard)(device_id)
            around = around.union(self.relatives(device_id))
        for relative in sorted(around):
            if relative in self.devices:
                self._index(relative)
                self.effect(DeviceChanged(relative))

    def _count(self, device: Device, step: int) -> None:
        counts = self.tally[device.record.resource]
        counts[device.state] += step
        counts["total"] += step
        if not counts["total"]:
            del self.tally[device.record.resource]

    def _link(self, record: DeviceRecord) -> None:
        self._members[record.resource].add(record.id)
        if record.serial:
            self._serials[record.serial].add(record.id)
        if record.parent:
            self._children[record.parent].add(record.id)
        for alias in record.aliases:
            self._names[alias].add(record.id)

    def _unlink(self, record: DeviceRecord) -> None:
        for table, key in (
            (self._members, record.resource),
            (self._serials, record.serial),
            (self._children, record.parent),
            *((self._names, alias) for alias in record.aliases),
        ):
            if key in table:
                table[key].discard(record.id)
                if not table[key]:
                    del table[key]

    def _index(self, device_id: str) -> None:
        """Bring the grantable set and the pool into line with the device as it is now."""
        device = self.devices.get(device_id)
        before = self.allocatable.pop(device_id, None)
        if before is not None:
            self.free[before] -= 1
        before = self.confirming.pop(device_id, None)
        if before is not None:
            self.doubted[before] -= 1
        if device is None or device.state is not State.IDLE:
            return
        if device.confirming and not self._in_the_way(device):
            self.confirming[device_id] = device.record.resource
            self.doubted[device.record.resource] += 1
        if not self.why_not(device):
            resource = device.record.resource
            self.allocatable[device_id] = resource
            self.free[resource] += 1
            pool = self._pools.get(resource)
            if pool is None:
                pool = self._pools[resource] = Pool(self._valid)
            pool.add(device)
            pool.shrink(len(self._members[resource]))

    def _valid(self, key: Key) -> bool:
        device = self.devices.get(key[2])
        return device is not None and key[2] in self.allocatable and key_of(device) == key

    def why_not(self, device: Device) -> str:
        """Return "" if the device could be granted now, else why not."""
        if device.state is not State.IDLE:
            return f"{device.state}" + (f" ({device.reason})" if device.reason else "")
        if device.health is Health.SUSPECT:
            return "suspect" + (f" ({device.health_reason})" if device.health_reason else "")
        return self._in_the_way(device)

    def _in_the_way(self, device: Device) -> str:
        """Return what beside state and health keeps the device from being granted."""
        if device.suspected:
            return "somebody has it open; looking again"
        if device.dirty:
            return "opened since the last scan; scanning"
        blockers = self.blocked_by(device.id)
        if blockers:
            return f"its relative {blockers[0]} is busy"
        return ""

    def passing(self, device: Device) -> bool:
        """Tell whether a scan or a probe that is under way may make the device grantable."""
        return device.state is State.IDLE and (device.dirty or bool(device.suspected) or device.confirming)

    def pool(self, resource: str) -> Pool | None:
        """The grantable devices of RESOURCE in least-allocated order."""
        return self._pools.get(resource)

    def members(self, resource: str) -> list[Device]:
        """All devices of a resource, by id."""
        return [self.devices[device_id] for device_id in sorted(self._members.get(resource, ()))]

    def allocatable_of(self, resource: str) -> int:
        """How many devices of a resource could be granted now; one that is suspect by a first sign
        counts until that is confirmed, so that a blip does not go through every report."""
        return self.free[resource] + self.doubted[resource]

    def find(self, name: str) -> Device | None:
        """The device with this id, or the one with this alias; an alias of several is nobody's."""
        known = self._names.get(name, ())
        return self.devices.get(name) or (self.devices.get(next(iter(known))) if len(known) == 1 else None)

    # -- relatives -------------------------------------------------------------------------------
    def units_of(self, device_id: str) -> list[str]:
        """The ids of the parts and shares of a device itself."""
        return sorted(self._children.get(device_id, ()))

    def _busy(self, device: Device | None) -> bool:
        if device is None:
            return False
        return device.state in _BUSY or (device.state is State.FAULTY and device.id in self.debts)

    def relatives(self, device_id: str, record: DeviceRecord | None = None) -> Iterator[str]:
        """Yield the ids of all ancestors and descendants (present or not)."""
        known = self.devices.get(device_id)
        record = record or (known.record if known else None)
        seen = {device_id}
        parent = record.parent if record else ""
        while parent and parent not in seen:
            seen.add(parent)
            yield parent
            above = self.devices.get(parent)
            parent = above.record.parent if above else ""
        below = list(self._children.get(device_id, ()))
        while below:
            child = below.pop()
            if child not in seen:
                seen.add(child)
                yield child
                below += self._children.get(child, ())

    def blocked_by(self, device_id: str) -> tuple[str, ...]:
        """The relatives that keep a device from being granted."""
        record = self.devices[device_id].record if device_id in self.devices else None
        if record is None or not (record.parent or device_id in self._children):
            return ()
        return tuple(sorted(one for one in self.relatives(device_id) if self._busy(self.devices.get(one))))

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

    def put_debt(self, debt: Debt) -> None:
        """Add or replace what a device owes."""
        self._install_debt(debt.device, debt)
        self.outcome.changes.debts[debt.device] = debt
        self.alarm(debt.deadline, "debt", debt.device)

    def drop_debt(self, device_id: str) -> None:
        """A return is proven, or the device is gone."""
        if device_id in self.debts:
            self._install_debt(device_id, None)
            self.outcome.changes.debts[device_id] = None
            self.outcome.changes.records[device_id] = None

    def keep_record(self, device: Device) -> None:
        """Have the ledger hold the record of a leased device."""
        self.outcome.changes.records[device.id] = device.record

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

    def _install_debt(self, device_id: str, debt: Debt | None) -> None:
        old = self.debts.pop(device_id, None)
        self._undo.append(lambda: self._set_debt(device_id, old))
        self._set_debt(device_id, debt)

    def _set_debt(self, device_id: str, debt: Debt | None) -> None:
        self.debts.pop(device_id, None)
        if debt is not None:
            self.debts[device_id] = debt
        if device_id in self.devices:
            self._refresh_kin(device_id, set())

    # -- identity ----------------------------------------------------------------------------------
    def serial(self, record: DeviceRecord) -> str:
        """The serial that tells this device from all others, "" if it has none of its own."""
        return record.serial if len(self._serials.get(record.serial, ())) <= 1 else ""

    def key(self, record: DeviceRecord) -> str:
        """What counts and history go by: the serial once it is known and unique, else the id."""
        serial = self.serial(record)
        return f"serial:{serial}" if serial else record.id

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

    def cordon_of(self, record: DeviceRecord) -> Cordon | None:
        """The cordon that a device is under."""
        found = self.cordons_of(record)
        return self.cordons[found[0]] if found else None

    # -- moving a device ---------------------------------------------------------------------------
    def facts(self, device: Device) -> Facts:
        """What `settle` needs to know of a device."""
        debt = self.debts.get(device.id)
        return Facts(
            present=device.present,
            unproven=debt is not None,
            overdue=debt is not None and debt.overdue,
            incomplete=debt is not None and debt.incomplete,
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

    # -- alarms --------------------------------------------------------------------------------------
    def alarm(self, boot: int, kind: str, name: str) -> None:
        """Have `due` name (KIND, NAME) once the boot clock is at BOOT.

        There is one alarm for each, the earliest: whoever handles it asks for the next."""
        waiting = self._due.get((kind, name))
        if waiting is None or boot < waiting:
            self._undo.append(lambda: self._install_alarm((kind, name), waiting))
            self._install_alarm((kind, name), boot)

    def _install_alarm(self, entry: tuple[str, str], boot: int | None) -> None:
        if boot is None:
            self._due.pop(entry, None)
            return
        self._due[entry] = boot
        heapq.heappush(self._alarms, (boot, *entry))
        if len(self._alarms) > 4 * len(self._due) + 64:
            self._alarms = sorted((at, *one) for one, at in self._due.items())

    def due(self, boot: int) -> list[tuple[str, str]]:
        """Take the alarms that are due; whoever handles one checks that it still applies.
        `undo` sets them a second later, so that a defect does not make the agent spin."""
        found: list[tuple[str, str]] = []
        while (first := self.next_alarm()) is not None and first <= boot:
            _, *names = heapq.heappop(self._alarms)
            entry = (names[0], names[1])
            del self._due[entry]
            found.append(entry)

        def undo() -> None:
            for entry in found:
                self._install_alarm(entry, min(boot + 1_000_000, self._due.get(entry, boot + 1_000_000)))

        self._undo.append(undo)
        return found

    def next_alarm(self) -> int | None:
        """The boot time of the next alarm."""
        while self._alarms and self._due.get(self._alarms[0][1:]) != self._alarms[0][0]:
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None


def held_by(holders: tuple[Holder, ...]) -> str:
    """Say in public words what keeps a device: how many processes (never which)."""
    if not holders:
        return ""
    return "held by 1 process" if len(holders) == 1 else f"held by {len(holders)} processes"


def in_hands(device: Device) -> bool:
    """Tell whether a lease has the device in its hands."""
    return device.state in IN_HANDS
