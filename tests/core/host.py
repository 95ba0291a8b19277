"""A governor with what surrounds it: a clock, a ledger that stores whole changes, callers whose
answers are counted, and short ways to say what happens."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_agent.core.effects import (
    Changes,
    Effect,
    ErrorKind,
    LeaseRemoved,
    Outcome,
    PrepareAccess,
    Refuse,
    RenewAccess,
    Reply,
    RequestScan,
    Restored,
    RevokeAccess,
    StateChanged,
    StoreCordon,
    Terminate,
)
from hetero_agent.core.events import (
    AccessFailed,
    AccessPrepared,
    AccessRenewed,
    AccessRevoked,
    Allocate,
    Confirm,
    CordonStored,
    DeviceScan,
    Event,
    HealthSeen,
    Observed,
    Opened,
    Reap,
    Release,
    Scanned,
    SetCordon,
    Signalled,
    Tick,
)
from hetero_agent.core.governor import Governor
from hetero_agent.core.model import (
    HISTORIC,
    Actor,
    AuditKind,
    AuditRecord,
    Binding,
    Cordon,
    Debt,
    Device,
    DeviceRecord,
    Health,
    Holder,
    Instant,
    Lease,
    Node,
    Options,
    ProcessRef,
    RequestKey,
    RequestRecord,
    Role,
    State,
)
from hetero_agent.core.settings import Settings

#: Microseconds.
MS = 1_000
SECOND = 1_000_000
HOUR = 3600 * SECOND

#: Between boot clock and realtime clock at first.
REAL = 1_700_000_000 * SECOND

GPU = "v/gpu"
PART = "v/part"


def own(number: int, role: Role = Role.OWN) -> Node:
    """A character node with a number of its own."""
    return Node(f"/dev/accel{number}", role, "char", 261, number, mode=0o660, gid=44)


def card(
    name: str, number: int | None = None, *, resource: str = GPU, parent: str = "", **more: Any
) -> DeviceRecord:
    """A device with one own node, numbered by the digits of its name unless told."""
    if number is None:
        number = sum(ord(char) * 31**index for index, char in enumerate(name)) % 100_000
    more.setdefault("nodes", (own(number),))
    return DeviceRecord(name, resource, parent=parent, **more)


def holder(
    pid: int, uid: int = 1000, start: int = 1, ancestors: Iterable[int | ProcessRef] = (), **more: Any
) -> Holder:
    """A process of one uid; ANCESTORS that are mere pids started at 1."""
    more["ancestors"] = tuple(one if isinstance(one, ProcessRef) else ProcessRef(one, 1) for one in ancestors)
    return Holder(pid, start, (uid, uid, uid, uid), exe=f"/bin/p{pid}", comm=f"p{pid}", **more)


@dataclass
class Store:
    """The ledger and the lasting store: each `apply` is one transaction."""

    leases: dict[str, Lease] = field(default_factory=dict)
    debts: dict[str, Debt] = field(default_factory=dict)
    requests: dict[RequestKey, RequestRecord] = field(default_factory=dict)
    records: dict[str, DeviceRecord] = field(default_factory=dict)
    audits: list[AuditRecord] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    cordons: dict[str, Cordon] = field(default_factory=dict)
    history: dict[str, deque[AuditRecord]] = field(default_factory=dict)
    sequence: int = 0
    generation: int = 0

    def apply(self, changes: Changes) -> None:
        """Take all of CHANGES."""
        for table, rows in (
            (self.leases, changes.leases),
            (self.debts, changes.debts),
            (self.requests, changes.requests),
            (self.records, changes.records),
        ):
            for key, row in rows.items():
                if row is None:
                    table.pop(key, None)  # type: ignore[arg-type]
                else:
                    table[key] = row  # type: ignore[index,assignment]
        self.counts.update(changes.counts)
        for record in changes.audits:
            assert record.sequence == self.sequence + 1, "a gap in the audit"
            assert record.generation > self.generation, "the generation does not grow"
            self.sequence, self.generation = record.sequence, record.generation
            self.audits.append(record)
            if record.kind in HISTORIC:
                key = f"serial:{record.serial}" if record.serial else record.device
                self.history.setdefault(key, deque(maxlen=20)).append(record)
        assert changes.sequence == self.sequence or not changes
        assert changes.generation >= self.generation or not changes

    def restored(self) -> Restored:
        """What a start finds."""
        return Restored(
            leases=list(self.leases.values()),
            debts=list(self.debts.values()),
            requests=list(self.requests.values()),
            records=list(self.records.values()),
            cordons=list(self.cordons.values()),
            counts=dict(self.counts),
            history={key: list(records) for key, records in self.history.items()},
            sequence=self.sequence,
            generation=self.generation,
        )


class Host:
    """See the module's text.  `do` hands one event over and keeps its outcome."""

    def __init__(self, settings: Settings | None = None, **limits: Any) -> None:
        self.settings = settings or Settings(**limits)
        self.store = Store()
        self.boot = 100 * SECOND
        self.offset = REAL
        self.lives = 0
        self.answers: dict[int, list[Reply | Refuse]] = {}
        self.outcome = Outcome()
        self.effects: list[Effect] = []
        self._tokens = itertools.count(1)
        self._leases = itertools.count(1)
        self._ids = itertools.count(1)
        #: Whether what ended leases gave is taken back at once, as it usually is.
        self.revokes = True
        self.governor = self.begin()

    # -- time ----------------------------------------------------------------------------------
    def now(self) -> Instant:
        """This moment."""
        return Instant(self.boot, self.boot + self.offset)

    def later(self, microseconds: int = MS) -> Instant:
        """Let time pass."""
        self.boot += microseconds
        return self.now()

    def tick(self, microseconds: int = 0) -> Outcome:
        """Let time pass, then look at what is due."""
        return self.do(Tick(self.later(microseconds)))

    def ticks(self, microseconds: int) -> None:
        """Let time pass with a Tick at each deadline on the way."""
        end = self.boot + microseconds
        while (due := self.governor.next_deadline()) is not None and due <= end:
            self.boot = max(self.boot, due)
            self.do(Tick(self.now()))
        self.boot = end

    # -- life -----------------------------------------------------------------------------------
    def begin(self) -> Governor:
        """A new life of the agent, without anything kept."""
        self.lives += 1
        return Governor(self.settings, f"epoch{self.lives}")

    def restart(self, **more: Any) -> Outcome:
        """The agent dies and starts again; MORE is set in what it finds."""
        self.governor = self.begin()
        found = self.store.restored()
        for name, value in more.items():
            setattr(found, name, value)
        self.outcome = self.governor.restore(found, self.later())
        self.store.apply(self.outcome.changes)
        self.effects = list(self.outcome.effects)
        return self.outcome

    def do(self, event: Event) -> Outcome:
        """Hand EVENT over, store its changes, note its effects and answers."""
        while self.revokes and self._revoked(event):
            pass
        outcome = self.governor.handle(event)
        self.store.apply(outcome.changes)
        self.take(outcome)
        return outcome

    def _revoked(self, event: Event) -> bool:
        """Answer, before EVENT, the revocations that the last outcome asked for."""
        if isinstance(event, (AccessRevoked, AccessRenewed)):
            return False
        answers: list[Event] = [AccessRevoked(self.now(), one.lease) for one in self.of(RevokeAccess)]
        answers += [
            AccessRenewed(self.now(), one.lease.id, "", one.lease.lost)
            for one in self.of(RenewAccess)
            if one.lease.lost
        ]
        for answer in answers:
            self.do(answer)
        return bool(answers)

    def take(self, outcome: Outcome) -> None:
        """Note what an outcome asks for."""
        self.outcome = outcome
        self.effects += outcome.effects
        for effect in outcome.effects:
            if isinstance(effect, (Reply, Refuse)):
                self.answers.setdefault(effect.token, []).append(effect)

    # -- to read --------------------------------------------------------------------------------
    def state(self, device: str) -> str:
        """The state of a device, "gone" if there is none."""
        known = self.governor.devices.get(device)
        return str(known.state) if known else "gone"

    def device(self, device: str) -> Device:
        """A device."""
        return self.governor.devices[device]

    def states(self) -> dict[str, str]:
        """All devices' states."""
        return {one: str(known.state) for one, known in self.governor.devices.items()}

    def of(self, kind: type[Any]) -> list[Any]:
        """The effects of one kind in the last outcome."""
        return [one for one in self.outcome.effects if isinstance(one, kind)]

    def audits(self, kind: AuditKind) -> list[AuditRecord]:
        """The audit records of one kind in the last outcome."""
        return [one for one in self.outcome.changes.audits if one.kind is kind]

    def moves(self) -> list[tuple[str, str, str]]:
        """(device, from, to) of the last outcome."""
        return [(one.device, one.from_state, one.to_state) for one in self.of(StateChanged)]

    def ended(self) -> dict[str, str]:
        """Lease -> result of the leases that were over with the last outcome."""
        return {one.lease: one.result for one in self.of(LeaseRemoved)}

    def answer(self, token: int) -> Reply | Refuse:
        """The one answer to a call."""
        found = self.answers.get(token, [])
        assert len(found) == 1, f"token {token} has {len(found)} answers"
        return found[0]

    def error(self, token: int) -> ErrorKind:
        """The error that answered a call."""
        answer = self.answer(token)
        assert isinstance(answer, Refuse), answer
        return answer.error

    def body(self, token: int) -> str:
        """The body that answered a call."""
        answer = self.answer(token)
        assert isinstance(answer, Reply), answer
        return answer.body

    # -- facts ----------------------------------------------------------------------------------
    def observe(
        self, *records: DeviceRecord, gone: Sequence[str] = (), complete: bool = False, source: str = "kernel"
    ) -> Outcome:
        """A source has news."""
        return self.do(Observed(self.later(), source, records, tuple(gone), complete=complete))

    def scan_event(
        self,
        holders: Mapping[str, Iterable[Holder]] | None = None,
        *,
        devices: Iterable[str] | None = None,
        started: int | None = None,
        unread: Sequence[tuple[int, int]] = (),
        failed: str = "",
    ) -> Scanned:
        """A scan of DEVICES (all), begun now unless STARTED says when, which found HOLDERS."""
        held = dict(holders or {})
        begun = self.later().boot if started is None else started
        named = list(self.governor.devices) if devices is None else list(devices)
        found = {one: DeviceScan(tuple(held.get(one, ())), tuple(unread)) for one in named}
        return Scanned(self.later(), begun, found, failed)

    def scan(self, holders: Mapping[str, Iterable[Holder]] | None = None, **more: Any) -> Outcome:
        """Such a scan has ended."""
        return self.do(self.scan_event(holders, **more))

    def opened(self, device: str) -> Outcome:
        """Somebody opened a device."""
        return self.do(Opened(self.later(), device))

    def scans(self) -> list[str]:
        """The devices that the last outcome wants scanned."""
        return sorted({one for effect in self.of(RequestScan) for one in effect.devices})

    def ready(self, *records: DeviceRecord) -> None:
        """These devices are there and were found clean."""
        self.observe(*records, complete=True)
        self.scan()

    def health(self, device: str, health: Health, reason: str = "", source: str = "kernel") -> Outcome:
        """A source states a device's health."""
        return self.do(HealthSeen(self.later(), source, device, health, reason, {"xid": "79"}))

    # -- calls ----------------------------------------------------------------------------------
    def token(self) -> int:
        """A fresh token."""
        return next(self._tokens)

    def request_id(self) -> str:
        """A fresh request id."""
        return f"r{next(self._ids)}"

    def ask(
        self,
        resource: str = GPU,
        count: int = 1,
        *,
        uid: int = 1000,
        request_id: str = "",
        fingerprint: str = "",
        **options: Any,
    ) -> int:
        """Allocate; returns the token."""
        token = self.token()
        made = Options(**options)
        self.do(
            Allocate(
                self.later(),
                token,
                Actor(uid, 4242, bus_name=":1.7", client=made.client),
                request_id or self.request_id(),
                fingerprint or json.dumps([resource, count, repr(made)]),
                resource,
                count,
                made,
                f"{next(self._leases):032x}",
            )
        )
        return token

    def preparing(self) -> Lease:
        """The lease whose effects the last outcome wants."""
        [effect] = self.of(PrepareAccess)
        assert isinstance(effect, PrepareAccess)
        return effect.lease

    def prepared(self, lease: str) -> Outcome:
        """The effects of a grant are in place."""
        return self.do(AccessPrepared(self.later(), lease, {"version": 1, "lease": lease}))

    def failed(self, lease: str, reason: str = "no space") -> Outcome:
        """They are not."""
        return self.do(AccessFailed(self.later(), lease, reason))

    def grant(self, resource: str = GPU, count: int = 1, **options: Any) -> Lease:
        """Allocate, with success."""
        token = self.ask(resource, count, **options)
        lease = self.preparing().id
        self.prepared(lease)
        assert json.loads(self.body(token))["lease"] == lease
        return self.governor.leases[lease]

    def use(self, resource: str = GPU, count: int = 1, **options: Any) -> Lease:
        """Allocate and confirm at once, with success."""
        return self.grant(resource, count, confirm=True, **options)

    def confirm(
        self, lease: str, binding: Binding | None = None, *, uid: int = 1000, request_id: str = ""
    ) -> int:
        """Confirm; returns the token."""
        token = self.token()
        bound = binding or Binding()
        actor = Actor(uid)
        one = request_id or self.request_id()
        self.do(Confirm(self.later(), token, actor, one, f"{lease}{bound!r}", lease, bound))
        return token

    def release(self, lease: str, *, uid: int = 1000, request_id: str = "") -> int:
        """Release; returns the token."""
        token = self.token()
        one = request_id or self.request_id()
        self.do(Release(self.later(), token, Actor(uid), one, lease, lease))
        return token

    def cordon(
        self, device: str, reason: str | None = "broken fan", *, error: str | None = "", request_id: str = ""
    ) -> int:
        """Cordon (REASON None: Uncordon), and store it unless ERROR says why not (None: not yet)."""
        token = self.token()
        one = request_id or self.request_id()
        self.do(SetCordon(self.later(), token, Actor(0), one, f"{device}{reason}", device, reason))
        if error is not None:
            self.stored(error)
        return token

    def stored(self, error: str = "") -> None:
        """The state directory answers all that it was asked to store."""
        pending = self.of(StoreCordon)
        while pending:
            order = pending.pop(0)
            if not error and order.cordon is None:
                self.store.cordons.pop(order.place, None)
            elif not error:
                self.store.cordons[order.place] = order.cordon
            self.do(CordonStored(self.later(), order.token, error))
            pending += self.of(StoreCordon)

    def do_pending_cordon(self, token: int, error: str = "") -> None:
        """The state directory answers one call."""
        self.do(CordonStored(self.later(), token, error))

    def reap(self, device: str, *targets: ProcessRef, request_id: str = "") -> int:
        """Reap; returns the token."""
        token = self.token()
        one = request_id or self.request_id()
        self.do(Reap(self.later(), token, Actor(0), one, f"{device}{targets!r}", device, targets))
        return token

    def signalled(self, order: Terminate, sent: bool = True, reason: str = "") -> Outcome:
        """What became of a Terminate."""
        return self.do(
            Signalled(self.later(), order.device, order.holder.ref, order.signal, sent, "" if sent else reason)
        )


def snapshot(governor: Governor) -> dict[str, Any]:
    """All that the governor knows, without what only speeds it up; equal before an event and after
    that event is undone."""
    world, grants = governor.world, governor.grants
    returns, presence = governor.returns, governor.presence
    tables = {
        "devices": world.devices,
        "leases": world.leases,
        "debts": world.debts,
        "requests": world.requests,
        "cordons": world.cordons,
        "counts": world.counts,
        "revoking": world.revoking,
        "lacking": governor.upkeep._lacking,
        "renewed": governor.upkeep._renewed,
        "histories": {key: list(records) for key, records in world.histories.items()},
        "allocatable": world.allocatable,
        "free": +world.free,
        "confirming": world.confirming,
        "doubted": +world.doubted,
        "tally": {resource: +counts for resource, counts in world.tally.items()},
        "load": +world.load,
        "load_of_uid": +world.load_of_uid,
        "held": +world.held,
        "remembered": +world.remembered,
        "by_lease": dict(world.by_lease),
        "remembered_leases": world.remembered_leases,
        "names": dict(world._names),
        "members": dict(world._members),
        "serials": dict(world._serials),
        "children": dict(world._children),
        "owners": dict(world._owners),
        "placed": dict(world._placed),
        "busy": world._busy_ones,
        "alarms": world._due,
        "counters": (world.sequence, world.generation, world.ready),
        "tokens": grants._tokens,
        "news": grants._news,
        "within": grants._within,
        "parked": grants._parked,
        "attaching": grants.attachments._waiting,
        "known": returns._known,
        "strangers": returns._strangers,
        "steps": governor.endings._steps,
        "reaps": governor.reaps._waiting,
        "cordon waits": governor.cordons._waiting,
        "unseen": presence._unseen,
        "renumbered": presence._renumbered,
        "order": {resource: order(governor, resource) for resource in world._members},
    }
    # the records are frozen, so copies of the tables (and the sets and lists in them) are enough
    return {
        name: copy.deepcopy(table) if name in _NESTED else copy.copy(table) for name, table in tables.items()
    }


_NESTED = frozenset({"by_lease", "names", "members", "serials", "children", "owners", "placed"})


def order(governor: Governor, resource: str) -> list[str]:
    """The grantable devices of a resource in the order in which they would be granted."""
    pool = governor.world.pool(resource)
    return pool.first(10_000, lambda _: True) if pool else []


def recount(governor: Governor) -> dict[str, Any]:
    """The counts of a governor, made anew from its devices and leases."""
    tally: dict[str, Counter[str]] = {}
    for device in governor.devices.values():
        counts = tally.setdefault(device.record.resource, Counter())
        counts[device.state] += 1
        counts["total"] += 1
    load: Counter[tuple[int, str]] = Counter()
    held: Counter[tuple[int, str]] = Counter()
    of_uid: Counter[int] = Counter()
    for lease in governor.leases.values():
        load[lease.uid, lease.client] += 1
        of_uid[lease.uid] += 1
        held[lease.uid, lease.client] += len(lease.devices) - len(lease.returned)
    remembered = Counter(key.uid for key in governor.world.requests)
    owners: dict[tuple[str, int, int], set[str]] = {}
    for device in governor.devices.values():
        for node in device.record.own_nodes:
            owners.setdefault(node.key, set()).add(device.id)
    grantable = {
        device.id: device.record.resource
        for device in governor.devices.values()
        if not governor.world.why_not(device)
    }
    held_back = {
        device.id: device.record.resource
        for device in governor.devices.values()
        if device.confirming and not governor.world.why_not(replace(device, health=Health.HEALTHY))
    }
    return {
        "tally": tally,
        "owners": owners,
        "confirming": held_back,
        "doubted": Counter(held_back.values()),
        "load": load,
        "load_of_uid": of_uid,
        "held": +held,
        "remembered": remembered,
        "allocatable": grantable,
        "free": Counter(grantable.values()),
        "order": {
            resource: sorted(
                (one for one, has in grantable.items() if has == resource),
                key=lambda one: (governor.devices[one].count, governor.devices[one].since.boot, one),
            )
            for resource in tally
        },
    }


def busy(governor: Governor, device: str) -> bool:
    """Whether a device keeps its relatives from being granted."""
    known = governor.devices.get(device)
    return known is not None and (
        known.state in (State.ALLOCATING, State.IN_USE, State.RECLAIMING, State.OCCUPIED, State.LOST)
        or device in governor.world.debts
    )


def relatives(governor: Governor, device: str) -> set[str]:
    """All ancestors and descendants of a device that are there, found the slow way."""

    def above(one: str) -> list[str]:
        found: list[str] = []
        while one in governor.devices and governor.devices[one].record.parent not in ("", *found):
            one = governor.devices[one].record.parent
            found.append(one)
        return found

    below = {one for one in governor.devices if device in above(one)}
    return {one for one in (*above(device), *below) if one in governor.devices and one != device}


def rivals(governor: Governor, device: str) -> set[str]:
    """Those of which only one is granted at a time: relatives, and devices that are there, have one of its
    own nodes, and are no parts or slots of the same card."""
    record = governor.devices[device].record
    keys = {node.key for node in record.own_nodes}
    twins = {
        other.id
        for other in governor.devices.values()
        if other.id != device and other.present
        if not keys.isdisjoint(node.key for node in other.record.own_nodes)
        if not record.parent or other.record.parent != record.parent
    }
    return twins | relatives(governor, device)


def rebooted(store: Store, before: Instant, now: Instant) -> Restored:
    """What a start after a reboot finds: rows of another boot, request times translated.  BEFORE and
    NOW are moments in the two boots."""
    found = store.restored()
    found.other_boot = set(store.leases)
    found.other_boot_debts = set(store.debts)
    real = before.real - before.boot
    found.requests = [
        replace(one, boot=now.boot - max(0, now.real - (one.boot + real))) for one in found.requests
    ]
    return found
