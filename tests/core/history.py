"""Random histories of a small host: what can happen, as rules, and what must hold after each.

The machine is the world outside: processes that open and hold devices, scans that see them in
part, sources that plug and unplug, callers, a disk.  It knows what is true; the governor knows
only what it is told.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_agent.core.effects import (
    AttachAccess,
    Effect,
    ErrorKind,
    Outcome,
    PrepareAccess,
    Refuse,
    RenewAccess,
    Reply,
    RevokeAccess,
    StoreCordon,
    Terminate,
)
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
    DeviceScan,
    Event,
    HealthJudged,
    HealthSeen,
    NodesTouched,
    Observed,
    Opened,
    OwnerGone,
    ProviderGone,
    Reap,
    Release,
    Scanned,
    SetCordon,
    Signalled,
    Tick,
)
from hetero_agent.core.lifecycle import Trigger, settle
from hetero_agent.core.model import (
    IN_HANDS,
    Actor,
    AuditKind,
    Binding,
    Debt,
    Device,
    DeviceRecord,
    Health,
    Holder,
    Instant,
    LeaseState,
    Netdev,
    Node,
    Obstacle,
    OnEnd,
    OnFault,
    Opinion,
    Options,
    Origin,
    Policy,
    ProcessRef,
    RequestKey,
    Result,
    Role,
    State,
)
from hetero_agent.core.requests import MEMORY
from hetero_agent.core.settings import Settings
from tests.core.host import (
    GPU,
    HOUR,
    MS,
    PART,
    SECOND,
    Host,
    busy,
    card,
    own,
    rebooted,
    recount,
    rivals,
    snapshot,
)

SETTINGS = Settings(
    system_holders=("persist.service",),
    leases=6,
    leases_per_uid=4,
    leases_per_client=3,
    devices_per_lease=3,
    devices_per_client=4,
    requests_per_uid=300,
    waiting=2,
)

SHARED = "v/share"
VIRT = "sim/virt"

_CALLS = (Allocate, Confirm, Release, SetCordon, Reap)
_WORK = (PrepareAccess, RevokeAccess, RenewAccess, AttachAccess, Terminate, StoreCordon)
_SOON = (State.RECLAIMING, State.PROBING, State.OCCUPIED)

T = TypeVar("T")

picks = st.integers(0, 2**16)
instants = st.sampled_from([MS, MS, 20 * MS, 300 * MS, 2_100 * MS, 11 * SECOND, 31 * SECOND, 61 * SECOND])
uids = st.sampled_from([0, 1000, 1000, 1001])


def catalogue() -> dict[str, DeviceRecord]:
    """The host's devices, all plugged: a card with parts of it, shares of one node, a plain card
    with a serial, one without, one that nothing can hold, and a provider's."""
    shared = own(50)
    records = [
        card("c0", 0, serial="S0", attributes={"pcie-root": "a", "memory-free": 10}, numa_nodes=(0,)),
        card("c0-p1", 1, resource=PART, parent="c0"),
        card("c0-p2", 2, resource=PART, parent="c0"),
        card("c1", 3, serial="S1", attributes={"pcie-root": "a"}, numa_nodes=(0,)),
        card("c2", 4, attributes={"pcie-root": "b"}, numa_nodes=(1,), aliases=("twin", "c2-uuid")),
        card("s", 5, resource="v/whole"),
        card("s-1", resource=SHARED, parent="s", nodes=(shared,)),
        card("s-2", resource=SHARED, parent="s", nodes=(shared,)),
        card("bare", resource=GPU, nodes=(own(60, Role.CONTROL),), aliases=("twin",)),
    ]
    records += [
        DeviceRecord(
            f"sim-{index}",
            VIRT,
            source="sim",
            serial=f"V{index}",
            nodes=(Node(f"/run/sim/{index}", Role.OWN, "file", fsdev=9, inode=70 + index),),
        )
        for index in range(2)
    ]
    return {record.id: record for record in records}


@dataclass(eq=False)
class Process:
    """A process, and what it holds."""

    pid: int
    start: int
    uid: int
    parent: int = 0
    unit: str = ""
    hidden: bool = False
    holds: set[str] = field(default_factory=set)

    @property
    def ref(self) -> ProcessRef:
        """The process."""
        return ProcessRef(self.pid, self.start)


@dataclass
class Scan:
    """A scan under way: when it began, of what, and who held each then."""

    started: int
    devices: tuple[str, ...]
    held: dict[str, set[int]]


@dataclass
class Grant:
    """A grant that was answered: how it was asked for, and with what it was answered."""

    event: Allocate
    body: str
    lease: str
    over: bool = False
    over_at: int = 0


class History(RuleBasedStateMachine):
    """See the module's text.  With UNDO each event is also undone and handled again."""

    undo = False

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(SETTINGS)
        self.all = catalogue()
        self.plugged: dict[str, DeviceRecord] = {}
        self.provider = False
        self.processes: dict[int, Process] = {}
        self.scans: list[Scan] = []
        self.work: list[Effect] = []
        self.asked: dict[int, Event] = {}
        self.grants: dict[str, Grant] = {}
        self.spent: dict[RequestKey, int] = {}
        self.cordoned: dict[str, str] = {}
        self.meant: dict[int, str] = {}
        self.proof: dict[str, int] = {}
        self.need: dict[str, int] = {}
        self.given: set[str] = set()
        self.gave: dict[str, set[str]] = {}
        #: Where the network interfaces of leases are.
        self.places: dict[str, ProcessRef | None] = {}
        self.pids = itertools.count(100)
        self.numbers = itertools.count(1000)
        self.crash = ""
        self.store_fails = False
        self.restart_due = False

    # -- handing events over ---------------------------------------------------------------------
    def do(self, event: Event) -> None:
        """Hand one event over, as the engine does; perhaps the store fails, or the agent dies."""
        host, governor = self.host, self.host.governor
        if isinstance(event, _CALLS):
            self.asked[event.token] = event
        before = dict(governor.devices)
        debts = dict(governor.world.debts)
        kept = snapshot(governor) if self.undo else {}
        outcome = governor.handle(event)
        if self.undo:
            outcome = self._again(event, outcome, kept)
        fails, self.store_fails = self.store_fails, False
        attached = isinstance(event, AccessAttached) and not event.error
        if fails and outcome.changes and (attached or isinstance(event, (*_CALLS, AccessPrepared))):
            governor.undo()
            if isinstance(event, AccessPrepared):
                self.do(AccessFailed(event.at, event.lease, "disk full", store=True))
            elif isinstance(event, AccessAttached):
                self.do(replace(event, error="disk full", store=True))
            else:
                self.host.answers.setdefault(event.token, []).append(
                    Refuse(event.token, ErrorKind.STORE_FAILED, "")
                )
            return
        crash, self.crash = self.crash, ""
        if crash == "before":
            self._died()
            return
        host.store.apply(outcome.changes)
        if crash == "after":
            self._note_ends(outcome)
            self._died()
            return
        self._check_moves(event, before, debts, outcome)
        host.take(outcome)
        self._note_ends(outcome)
        self._act(outcome)
        if isinstance(event, Tick):
            self._nothing_overdue(event.at.boot)

    def _again(self, event: Event, outcome: Outcome, kept: dict[str, Any]) -> Outcome:
        """Undo the event: all must be as it was.  Then handle it again, with an equal outcome."""
        governor = self.host.governor
        governor.undo()
        after = snapshot(governor)
        if isinstance(event, Tick):
            alarms = kept.pop("alarms")
            late = {one: at for one, at in after.pop("alarms").items() if alarms.get(one) != at}
            assert set(late.values()) <= {event.at.boot + SECOND}, late
            assert set(late) <= {one for one, at in alarms.items() if at <= event.at.boot}
            assert set(alarms) <= set(governor.world._due)
            for (kind, name), at in alarms.items():
                governor.world.alarm(at, kind, name)
        for name, table in kept.items():
            assert after[name] == table, name
        again = governor.handle(event)
        assert again == outcome
        return again

    def _act(self, outcome: Outcome) -> None:
        """Take on the work that an outcome asks for."""
        for effect in outcome.effects:
            if isinstance(effect, _WORK):
                self.work.append(effect)
            if isinstance(effect, RevokeAccess):
                self.given.add(effect.lease)
            elif isinstance(effect, RenewAccess) and effect.lease.lost:
                self.given.add(effect.lease.id)
            if isinstance(effect, PrepareAccess):
                self._granted(effect)
            elif isinstance(effect, Reply):
                self._answered(effect)

    def _granted(self, effect: PrepareAccess) -> None:
        """No spent id, no busy relative or twin, nothing that was not free."""
        lease = effect.lease
        at = self.spent.get(lease.key)
        assert at is None or at + MEMORY <= self.host.boot, "a spent id grants"
        chosen = set(lease.devices)
        assert len(chosen) == len(lease.devices)
        for one in self.given:
            assert not chosen & self.gave.get(one, set()), "granted, and an earlier lease still gives it"
        self.gave[lease.id] = chosen
        for one in chosen:
            device = self.host.governor.devices[one]
            assert device.last_open < device.last_clean, "granted, and opened since the last clean scan"
            assert device.health in (Health.HEALTHY, Health.UNKNOWN)
            assert not device.suspected
            kin = rivals(self.host.governor, one)
            assert not kin & chosen, "two rivals in one lease"
            assert not [other for other in kin if busy(self.host.governor, other)], "a rival is busy"

    def _answered(self, reply: Reply) -> None:
        event = self.asked.get(reply.token)
        if isinstance(event, Allocate):
            lease = json.loads(reply.body)["lease"]
            if lease in self.grants:
                assert self.grants[lease].body == reply.body, "a retry has another body"
            else:
                self.grants[lease] = Grant(event, reply.body, lease)
        elif isinstance(event, SetCordon):
            self._cordon_answered(event)

    def _note_ends(self, outcome: Outcome) -> None:
        """Remember which leases ended, and when; from then on their ids are spent."""
        for lease_id, lease in outcome.changes.leases.items():
            grant = self.grants.get(lease_id)
            if grant is not None and (lease is None or not lease.alive) and not grant.over:
                grant.over, grant.over_at = True, self.host.boot
                self.spent[self._key(grant.event)] = self.host.boot

    @staticmethod
    def _key(event: Allocate) -> RequestKey:
        return RequestKey(event.actor.uid, event.options.client, "Allocate", event.request_id)

    def _check_moves(
        self, event: Event, before: dict[str, Device], debts: dict[str, Debt], outcome: Outcome
    ) -> None:
        """Nothing becomes idle without proof: a complete clean scan that began after the device
        came, after its last open and after its lease ended."""
        governor = self.host.governor
        if isinstance(event, Scanned) and not event.failed:
            for one, scan in event.devices.items():
                known = before.get(one)
                if known is not None and self._clean(known, debts.get(one), scan):
                    self.proof[one] = max(event.started, self.proof.get(one, 0))
        for record in outcome.changes.audits:
            if record.kind is not AuditKind.TRANSITION:
                continue
            one = record.device
            owed = debts.get(one)
            if record.trigger == Trigger.RETURN_PROVEN and owed is not None:
                assert owed.lease not in self.given, "returned, and what its lease gave is still there"
            if record.from_state in IN_HANDS or record.to_state == "gone":
                self.need[one] = record.at.boot
            if record.from_state == "gone":
                raise AssertionError("out of nothing")
        for one, device in governor.devices.items():
            old = before.get(one)
            if old is None or old.record.own_nodes != device.record.own_nodes:
                self.need[one] = self.host.boot
            if device.state is not State.IDLE or (old is not None and old.state is State.IDLE):
                continue
            proof = self.proof.get(one, 0)
            assert proof > self.need.get(one, 0), f"{one} is idle without proof"
            if old is not None and (old.state in _SOON or one in debts):
                assert proof > device.last_open, f"{one} is idle and was opened since"

    def _clean(self, device: Device, debt: Debt | None, scan: DeviceScan) -> bool:
        if device.id.startswith("s-"):
            return True  # a shared node: whose a holder is, `test_returns` tells
        if any(one.unit != "persist.service" or one.uids[0] == 1001 for one in scan.holders):
            return False
        seen = {one.pid for one in device.holders}
        return not any(pid in seen or (debt and uid == debt.uid) for pid, uid in scan.uninspected)

    def _nothing_overdue(self, boot: int) -> None:
        for lease in self.host.governor.leases.values():
            if lease.granted and lease.alive and lease.deadline:
                assert lease.deadline > boot, "past its deadline"

    # -- dying and starting ----------------------------------------------------------------------
    def _died(self) -> None:
        """The agent is gone at this point; what was not answered never will be."""
        self.work.clear()
        self.scans.clear()
        self.asked.clear()
        self.host.answers.clear()
        self.restart_due = True
        self.provider = False
        self._start()

    def _start(self) -> None:
        host = self.host
        living = {one: lease for one, lease in host.store.leases.items() if lease.granted and lease.alive}
        sequence, generation = host.store.sequence, host.store.generation
        host.restart()
        # what leases left that are over is swept
        self.given &= host.governor.leases.keys()
        self._act(host.outcome)
        self._note_ends(host.outcome)
        self.restart_due = False
        assert host.store.sequence > sequence
        assert host.governor.generation > generation
        for one, lease in living.items():
            assert host.governor.leases[one] == lease, "a lease did not survive"
        for one, grant in self.grants.items():
            assert grant.over or one in living, "an answered lease is lost"
        self.need.update(dict.fromkeys(host.governor.devices, host.boot))

    # -- rules: sources -----------------------------------------------------------------------------
    @initialize()
    def start(self) -> None:
        for one, record in self.all.items():
            if record.source == "kernel":
                self.plugged[one] = record
        self._enumerate()
        self._provide()
        self._scan_all()

    def _enumerate(self) -> None:
        records = tuple(one for one in self.plugged.values() if one.source == "kernel")
        self.do(Observed(self.host.later(), "kernel", records, complete=True))

    @precondition(lambda self: not self.host.governor.ready)
    @rule()
    def enumerate_now(self) -> None:
        self._enumerate()

    def _provide(self) -> None:
        for one, record in self.all.items():
            if record.source == "sim":
                self.plugged[one] = record
        if not self.provider and self.host.governor.ready:
            known = [d for d in self.host.governor.devices.values() if d.record.source == "sim"]
            if any(device.provider_gone for device in known):
                self.do(ProviderGone(self.host.later(), "sim", back=True))
        self.provider = True
        records = tuple(one for one in self.plugged.values() if one.source == "sim")
        self.do(Observed(self.host.later(), "sim", records, complete=True))

    def _pick(self, pick: int, things: Iterable[T]) -> T | None:
        found = list(things)
        return found[pick % len(found)] if found else None

    @rule(pick=picks)
    def unplug(self, pick: int) -> None:
        one = self._pick(pick, self.plugged)
        if one is None:
            return
        source = self.plugged.pop(one).source
        for process in self.processes.values():
            process.holds.discard(one)
        self.do(Observed(self.host.later(), source, gone=(one,)))

    @rule(pick=picks, serial=st.booleans())
    def plug(self, pick: int, serial: bool) -> None:
        one = self._pick(pick, [one for one in self.all if one not in self.plugged])
        if one is None or (self.all[one].source == "sim" and not self.provider):
            return
        record = self.all[one]
        self.plugged[one] = record
        if not serial and record.source == "kernel":
            self.plugged[one] = replace(record, serial="")
        self.do(Observed(self.host.later(), record.source, (self.plugged[one],)))

    @rule(
        pick=picks,
        what=st.sampled_from(["unbind", "bind", "vfio", "renumber", "serial", "hide", "move", "alias", "swap"]),
    )
    def change(self, pick: int, what: str) -> None:
        """A driver comes or goes, a node gets another number, another device is in the place."""
        one = self._pick(pick, [one for one, record in self.plugged.items() if record.source == "kernel"])
        if one is None:
            return
        record, whole = self.plugged[one], self.all[one]
        if what in ("unbind", "vfio"):
            for process in self.processes.values():
                process.holds.discard(one)
            obstacle = Obstacle.NO_DRIVER if what == "unbind" else Obstacle.VFIO
            record = replace(record, nodes=(), serial="", obstacle=obstacle)
        elif what == "bind":
            record = whole
        elif what == "renumber" and record.own_nodes and not one.startswith("s-"):
            record = replace(record, nodes=(own(next(self.numbers)),))
        elif what == "serial" and whole.serial:
            record = replace(record, serial=f"{whole.serial}-{next(self.numbers)}")
            for process in self.processes.values():
                process.holds.discard(one)
        elif what == "hide":
            record = replace(record, serial="")
        elif what == "move" and one.startswith("c0-"):
            record = replace(record, parent="" if record.parent else "c0")
        elif what == "alias":
            record = replace(record, aliases=(*record.aliases[:1], f"alias-{next(self.numbers)}"))
        elif what == "swap" and "S0" in (record.serial, self.all["c0"].serial) and one == "c2":
            record = replace(record, serial="S0")
        self.plugged[one] = record
        self.do(Observed(self.host.later(), "kernel", (record,)))

    @rule(pick=picks, other=picks, at_once=st.booleans())
    def exchange(self, pick: int, other: int, at_once: bool) -> None:
        """Two drivers are bound anew between two looks: each device has the other's node."""
        names = [
            one
            for one, record in self.plugged.items()
            if record.source == "kernel" and record.own_nodes and not one.startswith("s-")
        ]
        first, second = self._pick(pick, names), self._pick(other, names)
        if first is None or second is None or first == second:
            return
        nodes = {first: self.plugged[second].nodes, second: self.plugged[first].nodes}
        for process in self.processes.values():
            process.holds -= {first, second}
        for one, its in nodes.items():
            self.plugged[one] = replace(self.plugged[one], nodes=its)
            self.all[one] = replace(self.all[one], nodes=its)
        records = [self.plugged[one] for one in nodes]
        for some in [records] if at_once else [records[:1], records[1:]]:
            self.do(Observed(self.host.later(), "kernel", tuple(some)))

    @rule(pick=picks, health=st.sampled_from(list(Health)))
    def fault(self, pick: int, health: Health) -> None:
        device = self._pick(pick, self.host.governor.devices.values())
        if device is not None:
            self.do(HealthSeen(self.host.later(), device.record.source, device.id, health, f"is {health}"))

    @rule(
        pick=picks,
        origin=st.sampled_from([Origin.PROBE, Origin.KERNEL]),
        health=st.sampled_from(list(Health)),
        confirming=st.booleans(),
    )
    def judged(self, pick: int, origin: Origin, health: Health, confirming: bool) -> None:
        device = self._pick(pick, self.host.governor.devices.values())
        if device is not None:
            said = Opinion(health, f"{origin} says {health}", {}, confirming and health is Health.SUSPECT)
            self.do(HealthJudged(self.host.later(), origin, {device.id: said}))

    def _provider(self) -> None:
        """The provider leaves, or comes back."""
        if self.provider:
            self.provider = False
            self.do(ProviderGone(self.host.later(), "sim"))
        else:
            self._provide()

    # -- rules: processes and scans ---------------------------------------------------------------
    def _fork(self, uid: int, parent: int = 0, unit: str = "") -> Process:
        pid = next(self.pids)
        self.processes[pid] = Process(pid, pid, uid, parent, unit)
        return self.processes[pid]

    @rule(uid=uids, pick=picks, unit=st.sampled_from(["", "", "", "persist.service", "job.service"]))
    def fork(self, uid: int, pick: int, unit: str) -> None:
        if len(self.processes) < 6:
            self._fork(uid, self._pick(pick, [0, *self.processes]) or 0, unit)

    @rule(pick=picks, other=picks)
    def owner_opens(self, pick: int, other: int) -> None:
        """A process of a lease opens one of its devices."""
        lease = self._pick(pick, [one for one in self.host.governor.leases.values() if one.granted])
        if lease is None:
            return
        bound = lease.binding.pid
        uid = [one for one in self.processes.values() if one.uid == lease.uid]
        process = self.processes.get(bound.pid) if bound else self._pick(other, uid)
        one = self._pick(other, [one for one in lease.devices if one in self.plugged])
        if process is not None and one is not None and self.plugged[one].own_nodes:
            self._open(process, one)

    @rule(pick=picks, other=picks, silent=st.sampled_from([False, False, True]))
    def open(self, pick: int, other: int, silent: bool) -> None:
        """A process opens a device; through a copy of its node nobody hears of it."""
        process = self._pick(pick, self.processes.values())
        one = self._pick(other, [one for one, record in self.plugged.items() if record.own_nodes])
        if process is None or one is None:
            return
        self._open(process, one, silent)

    def _open(self, process: Process, one: str, silent: bool = False) -> None:
        process.holds.add(one)
        if not silent:
            for sharer in ["s-1", "s-2"] if one.startswith("s-") else [one]:
                self.do(Opened(self.host.later(0), sharer))

    @rule(pick=picks)
    def close(self, pick: int) -> None:
        process = self._pick(pick, [one for one in self.processes.values() if one.holds])
        if process is not None:
            one = process.holds.pop()
            self.do(Closed(self.host.later(0), one))

    @rule(pick=picks)
    def exit(self, pick: int) -> None:
        process = self._pick(pick, self.processes.values())
        if process is not None:
            self._exit(process)

    def _exit(self, process: Process) -> None:
        del self.processes[process.pid]
        for one in process.holds:
            self.do(Closed(self.host.later(0), one))
        for lease in list(self.host.governor.leases.values()):
            bound = lease.binding.pid
            if bound is not None and bound.pid == process.pid and lease.alive and lease.granted:
                self.do(OwnerGone(self.host.later(0), lease.id, "pid"))

    def _holding(self, one: str) -> set[int]:
        shares = {"s-1", "s-2"} if one.startswith("s-") else {one}
        return {process.pid for process in self.processes.values() if process.holds & shares}

    @rule(pick=picks)
    def begin_scan(self, pick: int) -> None:
        names = list(self.host.governor.devices)
        chosen = names if pick % 2 else names[pick % 3 :: 3]
        self.scans.append(
            Scan(self.host.later().boot, tuple(chosen), {one: self._holding(one) for one in chosen})
        )

    @precondition(lambda self: self.scans)
    @rule(pick=picks, fails=st.sampled_from([False] * 9 + [True]), sees=st.booleans())
    def end_scan(self, pick: int, fails: bool, sees: bool) -> None:
        """A scan ends: who held a device throughout is seen, who came or went perhaps."""
        self._end_scan(self.scans.pop(pick % len(self.scans)), "scan worker died" if fails else "", sees)

    def _end_scan(self, scan: Scan, failed: str, sees: bool) -> None:
        found = {}
        for one in scan.devices:
            first, last = scan.held[one], self._holding(one)
            seen = (first | last) if sees else (first & last)
            there = [self.processes[pid] for pid in sorted(seen) if pid in self.processes]
            found[one] = DeviceScan(
                tuple(self._holder(process) for process in there if not process.hidden),
                tuple((p.pid, p.uid) for p in self.processes.values() if p.hidden),
            )
        self.do(Scanned(self.host.later(), scan.started, found, failed))

    @rule()
    def scan_all(self) -> None:
        self._scan_all()

    def _scan_all(self) -> None:
        names = tuple(self.host.governor.devices)
        held = {one: self._holding(one) for one in names}
        self._end_scan(Scan(self.host.later().boot, names, held), "", True)

    def _holder(self, process: Process) -> Holder:
        above, one = [], process.parent
        while one in self.processes and self.processes[one].ref not in above:
            above.append(self.processes[one].ref)
            one = self.processes[one].parent
        group = f"/system.slice/{process.unit}" if process.unit else "/user.slice"
        return Holder(
            process.pid,
            process.start,
            (process.uid,) * 4,
            unit=process.unit,
            cgroup=group,
            ancestors=tuple(above),
            service_uid=1000 if process.unit == "persist.service" else -1,
        )

    # -- rules: calls -------------------------------------------------------------------------------
    @rule(
        uid=st.sampled_from([0, 1000, 1000, 1001]),
        resource=st.sampled_from([GPU, GPU, PART, SHARED, VIRT]),
        count=st.sampled_from([1, 1, 1, 2]),
        confirm=st.booleans(),
        ends=st.sampled_from(list(OnEnd)),
        faults=st.sampled_from(list(OnFault)),
        opens=st.booleans(),
    )
    def grant(
        self, uid: int, resource: str, count: int, confirm: bool, ends: OnEnd, faults: OnFault, opens: bool
    ) -> None:
        """A whole grant, with a process of its own that uses it."""
        process = self._fork(uid)
        options = Options(
            binding=Binding(process.ref) if opens else Binding(), confirm=confirm, on_end=ends, on_fault=faults
        )
        number = self._ask(uid, resource, count, options)
        work = [one for one in self.work if isinstance(one, PrepareAccess) and one.lease.id == f"{number:032x}"]
        for effect in work:
            self.work.remove(effect)
            self._work_done(effect, True)
        lease = self.host.governor.leases.get(f"{number:032x}")
        if lease is None:
            self.processes.pop(process.pid, None)
        elif opens:
            for one in lease.devices:
                if self.plugged.get(one) and self.plugged[one].own_nodes and process.pid in self.processes:
                    self._open(process, one)

    @rule(pick=picks)
    def owner_ends(self, pick: int) -> None:
        """A lease is given back, or its process ends."""
        lease = self._pick(pick, [one for one in self.host.governor.leases.values() if one.granted])
        if lease is None:
            return
        bound = lease.binding.pid
        if bound is not None and bound.pid in self.processes:
            self._exit(self.processes[bound.pid])
        else:
            token, number = self.host.token(), next(self.numbers)
            self.do(Release(self.host.later(), token, Actor(lease.uid), f"x{number}", lease.id, lease.id))

    def _ask(self, uid: int, resource: str, count: int, options: Options) -> int:
        number = next(self.numbers)
        self.do(
            Allocate(
                self.host.later(),
                self.host.token(),
                Actor(uid, 1, client=options.client),
                f"r{number}",
                f"f{number}",
                resource,
                count,
                options,
                f"{number:032x}",
            )
        )
        return number

    @rule(
        uid=uids,
        client=st.sampled_from(["", "k", "*"]),
        resource=st.sampled_from([GPU, GPU, GPU, PART, PART, SHARED, VIRT, "v/whole"]),
        count=st.sampled_from([1, 1, 1, 2, 2, 3, 4]),
        policy=st.sampled_from(list(Policy)),
        netdev=st.sampled_from([Netdev.KEEP, Netdev.KEEP, Netdev.MOVE]),
        confirm=st.booleans(),
        ends=st.sampled_from(list(OnEnd)),
        faults=st.sampled_from(list(OnFault)),
        ttl=st.sampled_from([0, 0, 0, 3 * SECOND]),
        pick=picks,
        named=st.booleans(),
    )
    def allocate(
        self,
        uid: int,
        client: str,
        resource: str,
        count: int,
        policy: Policy,
        netdev: Netdev,
        confirm: bool,
        ends: OnEnd,
        faults: OnFault,
        ttl: int,
        pick: int,
        named: bool,
    ) -> None:
        bound = self._pick(pick, [None, *(one for one in self.processes.values() if one.uid == uid)])
        binding = Binding(ProcessRef(bound.pid, bound.start) if bound else None, ttl=ttl)
        members = [device.id for device in self.host.governor.world.members(resource)]
        devices = tuple(members[pick % 2 :][:count]) if named and len(members) > count else ()
        options = Options(
            policy=policy,
            client=client,
            devices=devices,
            owner_uid=1001 if uid == 0 and pick % 2 else None,
            binding=binding,
            confirm=confirm,
            on_end=ends,
            on_fault=faults,
            netdev=netdev,
        )
        self._ask(uid, resource, count, options)

    @rule(pick=picks, changed=st.sampled_from([False, False, False, True]))
    def retry(self, pick: int, changed: bool) -> None:
        """The same request id again, of a call that was answered or not."""
        asked = [event for event in self.asked.values() if isinstance(event, Allocate)]
        event = self._pick(pick, [*asked, *(grant.event for grant in self.grants.values())])
        if event is None:
            return
        number = next(self.numbers)
        token = self.host.token()
        again = replace(
            event,
            at=self.host.later(),
            token=token,
            lease=f"{number:032x}",
            fingerprint=f"f{number}" if changed else event.fingerprint,
        )
        known = self.host.governor.world.requests.get(self._key(event))
        self.do(again)
        grant = next((one for one in self.grants.values() if self._key(one.event) == self._key(event)), None)
        if grant is None or grant.over or again.fingerprint != grant.event.fingerprint:
            return
        if known is not None and token in self.asked:
            [answer] = self.host.answers[token]
            assert isinstance(answer, Reply)
            assert answer.body == grant.body

    @rule(pick=picks, bind=picks, ttl=st.sampled_from([0, 3 * SECOND, 100 * HOUR]), ids=st.integers(0, 5))
    def confirm(self, pick: int, bind: int, ttl: int, ids: int) -> None:
        lease = self._pick(pick, [one for one in self.host.governor.leases.values() if one.granted])
        if lease is None:
            return
        bound = self._pick(bind, [None, *(p for p in self.processes.values() if p.uid == lease.uid)])
        binding = Binding(ProcessRef(bound.pid, bound.start) if bound else None, ttl=ttl)
        self.do(
            Confirm(
                self.host.later(),
                self.host.token(),
                Actor(lease.uid),
                f"c{ids}",
                f"{lease.id}{binding!r}",
                lease.id,
                binding,
            )
        )

    @rule(pick=picks, uid=st.sampled_from([None, None, None, 0, 1000, 1001]), ids=st.integers(0, 20))
    def release(self, pick: int, uid: int | None, ids: int) -> None:
        one = self._pick(pick, [*self.host.governor.leases, *self.grants])
        if one is None:
            return
        lease = self.host.governor.leases.get(one)
        owner = lease.uid if lease else self._owner(self.grants[one].event)
        token = self.host.token()
        actor = Actor(owner if uid is None else uid)
        alive = lease is not None and lease.granted and lease.alive
        self.do(Release(self.host.later(), token, actor, f"x{ids}", one, one))
        if token not in self.asked:
            return
        [answer] = self.host.answers[token]
        if isinstance(answer, Reply) and alive and json.loads(answer.body)["changed"]:
            assert one not in self.host.governor.leases or not self.host.governor.leases[one].alive
        if isinstance(answer, Refuse) and answer.error is ErrorKind.NOT_OWNER:
            assert actor.uid not in (owner, 0)

    @staticmethod
    def _owner(event: Allocate) -> int:
        given = event.options.owner_uid
        return event.actor.uid if given is None else given

    @rule(pick=picks, lift=st.booleans())
    def cordon(self, pick: int, lift: bool) -> None:
        devices = list(self.host.governor.devices.values())
        waiting = {one.event.device for one in self.host.governor.cordons._waiting.values()}
        if lift and pick % 4:
            devices = [one for one in devices if one.cordon or one.id in waiting]
        device = self._pick(pick, devices)
        if device is None:
            return
        number, token = next(self.numbers), self.host.token()
        self.meant[token] = device.record.serial
        self.do(
            SetCordon(
                self.host.later(),
                token,
                Actor(0),
                f"k{number}",
                f"f{number}",
                device.id,
                None if lift else "no good",
            )
        )

    @rule(pick=picks)
    def uncordon_absent(self, pick: int) -> None:
        """Lift the cordon of a device that is away, by its place."""
        there = self.host.governor.devices
        place = self._pick(pick, sorted({one for one in self.cordoned.values() if one not in there}))
        if place is None:
            return
        number, token = next(self.numbers), self.host.token()
        self.do(SetCordon(self.host.later(), token, Actor(0), f"k{number}", f"f{number}", place, None))

    def _cordon_answered(self, event: SetCordon) -> None:
        """Keep the model's own list of what is under a cordon: serials and places."""
        self.cordoned = {key: one.device for key, one in self.host.governor.world.cordons.items()}
        device = self.host.governor.devices.get(event.device)
        if device is not None and device.record.serial == self.meant.pop(event.token, None):
            own = self.host.governor.world.cordons_of(device.record)
            assert (not own) is (event.reason is None)
            # that of its card may hold on
            assert device.cordon is not None or event.reason is None

    @rule(pick=picks, other=picks)
    def reap(self, pick: int, other: int) -> None:
        device = self._pick(pick, [one for one in self.host.governor.devices.values() if one.holders])
        if device is None:
            return
        target = device.holders[other % len(device.holders)].ref
        number = next(self.numbers)
        self.do(
            Reap(
                self.host.later(),
                self.host.token(),
                Actor(0),
                f"p{number}",
                f"f{number}",
                device.id,
                (target,),
            )
        )

    # -- rules: the edges' answers -----------------------------------------------------------------
    @precondition(lambda self: self.work)
    @rule(pick=picks, well=st.sampled_from([True, True, True, False]))
    def work_done(self, pick: int, well: bool) -> None:
        effect = self.work[pick % len(self.work)]
        if isinstance(effect, AttachAccess):
            # what concerns the interfaces of one lease is done in the order in which it was wanted
            mine = [one for one in self.work if isinstance(one, AttachAccess)]
            effect = next(one for one in mine if one.lease.id == effect.lease.id)
        elif isinstance(effect, StoreCordon):
            # one thread stores what it is told to in that order
            effect = next(one for one in self.work if isinstance(one, StoreCordon))
        self.work.remove(effect)
        self._work_done(effect, well)

    def _work_done(self, effect: Effect, well: bool) -> None:
        at = self.host.later()
        if isinstance(effect, PrepareAccess):
            if well:
                self.places[effect.lease.id] = effect.lease.binding.pid
                self.do(AccessPrepared(at, effect.lease.id, {"version": 1}))
            else:
                self.do(AccessFailed(at, effect.lease.id, "no space"))
        elif isinstance(effect, RevokeAccess):
            if well:
                self.given.discard(effect.lease)
            self.do(AccessRevoked(at, effect.lease, "" if well else "read-only"))
        elif isinstance(effect, RenewAccess):
            assert effect.lease.granted
            lease = self.host.governor.leases.get(effect.lease.id)
            if well and lease is not None and lease.alive and lease.lost == effect.lease.lost:
                self.given.discard(lease.id)
            self.do(AccessRenewed(at, effect.lease.id, "" if well else "read-only", effect.lease.lost))
        elif isinstance(effect, AttachAccess):
            self._attached(effect, at, well)
        elif isinstance(effect, Terminate):
            process = self.processes.get(effect.holder.pid)
            there = process is not None and effect.device in process.holds
            if there and process is not None and effect.uid is not None:
                assert process.uid == effect.uid, "a signal to somebody else's process"
            if there and well and process is not None:
                self._exit(process)
            self.do(
                Signalled(at, effect.device, effect.holder.ref, effect.signal, there, "" if there else "gone")
            )
        elif isinstance(effect, StoreCordon):
            if well and effect.cordon is not None:
                self.host.store.cordons[effect.place] = effect.cordon
            elif well:
                self.host.store.cordons.pop(effect.place, None)
                self.cordoned.pop(effect.place, None)
            self.do(CordonStored(at, effect.token, "" if well else "read-only"))

    def _attached(self, effect: AttachAccess, at: Instant, well: bool) -> None:
        """The interfaces are where they were wanted; or on the host, as after every failure."""
        lease = effect.lease
        assert lease.granted
        assert lease.netdev is Netdev.MOVE
        self.places[lease.id] = effect.process if well else None
        self.do(AccessAttached(at, lease.id, effect.process, "" if well else "it is a member of bridge br0"))

    @rule(pick=picks)
    def touch(self, pick: int) -> None:
        device = self._pick(pick, list(self.host.governor.devices.values()))
        if device is not None:
            self.do(NodesTouched(self.host.later(), device.id))

    @rule(wait=instants)
    def tick(self, wait: int) -> None:
        self.do(Tick(self.host.later(wait)))

    @rule(wait=instants)
    def ticks(self, wait: int) -> None:
        """Time passes with a Tick when one is due."""
        end = self.host.boot + wait
        for _ in range(20):
            due = self.host.governor.next_deadline()
            if due is None or due > end:
                break
            self.host.boot = max(self.host.boot, due)
            self.do(Tick(self.host.now()))
        self.host.boot = max(self.host.boot, end)

    # -- rules: trouble ----------------------------------------------------------------------------
    @rule(
        what=st.sampled_from(
            ["dies", "dies", "before", "after", "disk", "hide", "hide", "provider", "provider", "reboot", "day"]
        ),
        pick=picks,
    )
    def trouble(self, what: str, pick: int) -> None:
        """The agent dies now, or at the next event before or after that is stored; the disk is full
        for one commit; a process can't be read any more, or again; ..."""
        if what == "dies":
            self._died()
            if pick % 4:
                self._enumerate()
        elif what in ("before", "after"):
            self.crash = what
        elif what == "disk":
            self.store_fails = True
        elif what == "hide" and self.processes:
            process = list(self.processes.values())[pick % len(self.processes)]
            process.hidden = not process.hidden
        elif what == "provider":
            self._provider()
        elif what == "reboot" and pick % 4 == 0:
            self._reboot()
        elif what == "day" and pick % 2 == 0:
            self._day()

    def _day(self) -> None:
        """A day passes: what was spent before is forgotten."""
        self.do(Tick(self.host.later(25 * HOUR)))
        # once more: the agent may have died at that, or the disk may have been full
        self.do(Tick(self.host.later()))
        requests = self.host.governor.world.requests
        gone = [one for one, at in self.spent.items() if at + MEMORY <= self.host.boot - 60 * SECOND]
        for key in gone:
            del self.spent[key]
            assert key not in requests or requests[key].lease in self.host.governor.leases
        self.grants = {one: grant for one, grant in self.grants.items() if self._key(grant.event) not in gone}

    def _reboot(self) -> None:
        """All processes end, the boot clock starts anew, and what was leased is not any more."""
        host = self.host
        before = host.now()
        self.processes.clear()
        self.provider = False
        self.given.clear()
        self.gave.clear()
        self.places.clear()
        for table in (self.work, self.scans, self.asked, host.answers, self.need, self.proof):
            table.clear()
        host.boot, host.offset = 5 * SECOND, before.real + 20 * SECOND
        found = rebooted(host.store, before, host.now())
        self.spent = {
            key: host.boot - (host.now().real - (at + before.real - before.boot))
            for key, at in self.spent.items()
        }
        host.restart(**{name: getattr(found, name) for name in ("other_boot", "other_boot_debts", "requests")})
        self._act(host.outcome)
        self._note_ends(host.outcome)
        assert not host.governor.leases
        assert not host.governor.world.debts
        self._enumerate()

    # -- what must hold after each step ----------------------------------------------------------
    @invariant()
    def holds(self) -> None:
        """All of the below."""
        self._devices_and_leases_agree()
        self._free_devices_are_settled()
        self._counts_add_up()
        self._a_cordon_stays()
        self._the_store_agrees()
        self._alarms_are_set()
        self._one_answer_each()
        self._interfaces_are_where_they_belong()

    def _devices_and_leases_agree(self) -> None:
        governor = self.host.governor
        debts = governor.world.debts
        claims: Counter[str] = Counter()
        for lease in governor.leases.values():
            assert lease.state in (LeaseState.PENDING, LeaseState.ACTIVE, LeaseState.ENDING)
            assert lease.alive is (lease.result is Result.NONE)
            left = [one for one in lease.devices if one not in lease.returned]
            claims.update(left)
            assert lease.alive or left, "an ended lease with nothing out"
            for one in left:
                device = governor.devices.get(one)
                owed = debts.get(one)
                if lease.alive:
                    has = device is not None and device.state in IN_HANDS and device.lease == lease.id
                    assert has or (owed is not None and owed.lease == lease.id and one in lease.lost), one
                else:
                    assert owed is not None, one
                    assert owed.lease == lease.id
        assert not claims or max(claims.values()) == 1, "a device in two leases"
        for device in governor.devices.values():
            if device.state in IN_HANDS:
                lease = governor.leases[device.lease]
                assert lease.alive
                assert device.id in lease.devices
                assert device.id not in lease.returned
                assert device.id not in debts
                if device.state is not State.LOST:
                    assert (device.state is State.IN_USE) is lease.confirmed
                    assert device.present
                    assert not governor.returns.overtaken(device), "it gives what is another device's"
        for debt in debts.values():
            assert debt.device in governor.devices
            # of one that went and came back the lease may be over
            assert not debt.lease or debt.lease in governor.leases or debt.uid == -1

    def _free_devices_are_settled(self) -> None:
        world = self.host.governor.world
        for device in world.devices.values():
            assert device.cordon == world.cordon_of(device.record), device.id
            self._health_is_the_worst(device)
            if device.state not in IN_HANDS:
                state, _ = settle(world.facts(device))
                assert device.state is state, device.id
                assert (device.id in world.debts) is (
                    device.state is State.RECLAIMING
                    or (device.state is State.FAULTY and device.id in world.debts)
                )
                assert device.present

    def _health_is_the_worst(self, device: Device) -> None:
        """Of what all say, the card's health included if that is bad."""
        order = [Health.HEALTHY, Health.UNKNOWN, Health.SUSPECT, Health.UNHEALTHY]
        said = [one.health for one in device.opinions.values()]
        assert device.health is max(said, key=order.index), device.id
        card = self.host.governor.devices.get(device.record.parent)
        if card is not None and card.health in (Health.SUSPECT, Health.UNHEALTHY):
            assert order.index(device.health) >= order.index(card.health), device.id
        elif Origin.PARENT in device.opinions:
            assert device.opinions[Origin.PARENT].health is Health.HEALTHY, device.id

    def _counts_add_up(self) -> None:
        governor = self.host.governor
        found, real = snapshot(governor), recount(governor)
        for name, table in real.items():
            assert found[name] == table, name
        for resource, counts in governor.resources().items():
            assert sum(counts[state] for state in State) == counts["total"]
            assert 0 <= counts["allocatable"] <= counts["idle"]
            assert counts["total"] == len(governor.world.members(resource))
        for one in found["allocatable"]:
            assert not [other for other in rivals(governor, one) if busy(governor, other)]
        assert {one for one in governor.devices if busy(governor, one)} == found["busy"]
        for one in governor.devices:
            blockers = sorted(other for other in rivals(governor, one) if busy(governor, other))
            assert list(governor.blocked_by(one)) == blockers

    def _a_cordon_stays(self) -> None:
        """Each cordon that was answered is on whatever device has its serial, or else its place."""
        world = self.host.governor.world
        for key in self.cordoned:
            place = self.cordoned[key]
            serial = key.removeprefix("serial:") if key.startswith("serial:") else ""
            adopted = [one for one in world.cordons.values() if one.device == place and one.serial]
            assert key in world.cordons or (not serial and adopted), key
        for device in world.devices.values():
            if device.cordon is not None:
                assert device.state is not State.IDLE

    def _the_store_agrees(self) -> None:
        world, store = self.host.governor.world, self.host.store
        assert store.leases == world.leases
        assert store.debts == world.debts
        assert store.requests == world.requests
        assert store.sequence == world.sequence
        assert store.generation == world.generation
        wanted = {one.id for one in world.devices.values() if one.state in IN_HANDS} | set(world.debts)
        leased = {one for lease in world.leases.values() for one in lease.devices}
        assert wanted <= set(store.records) <= wanted | leased

    def _alarms_are_set(self) -> None:
        world = self.host.governor.world
        for lease in world.leases.values():
            if lease.alive and lease.deadline:
                assert world._due["lease", lease.id] <= lease.deadline
            if lease.alive and lease.granted and not lease.confirmed:
                assert lease.deadline, "pending without a deadline"
        for debt in world.debts.values():
            if not debt.overdue:
                assert world._due["debt", debt.device] <= debt.deadline
        for lease_id, one in world.revoking.items():
            lease = world.leases.get(lease_id)
            alive = lease is not None and lease.alive
            asked = any(
                # what it was asked for before another binding or deadline is answered all the same
                (
                    isinstance(work, RenewAccess)
                    and alive
                    and (work.lease.id, work.lease.lost) == (lease_id, lease.lost)
                )
                or (isinstance(work, RevokeAccess) and work.lease == lease_id)
                for work in self.work
            )
            assert asked or ("renew" if alive else "revoke", lease_id) in world._due, "nobody takes it back"
            assert asked or one.error
        assert len(world._alarms) <= 4 * len(world._due) + 64

    def _interfaces_are_where_they_belong(self) -> None:
        """Those of a lease are with the process that it is bound to, unless that is being seen to."""
        for lease in self.host.governor.leases.values():
            if lease.netdev is not Netdev.MOVE or not lease.alive or not lease.granted:
                continue
            assert not lease.confirmed or lease.binding.pid is not None
            if any(isinstance(work, AttachAccess) and work.lease.id == lease.id for work in self.work):
                continue
            waiting = lease.id in self.host.governor.grants.attachments._waiting
            assert not waiting, "a Confirm waits for nobody"
            assert self.places[lease.id] in (lease.binding.pid, None)

    def _one_answer_each(self) -> None:
        for token, answers in self.host.answers.items():
            assert len(answers) == 1, token

    def teardown(self) -> None:
        """When all edges have answered and time has passed, each call has its answer."""
        for _ in range(50):
            if not self.work:
                break
            self._work_done(self.work.pop(0), True)
        self.do(Tick(self.host.later(6 * SECOND)))
        for _ in range(50):
            if not self.work:
                break
            self._work_done(self.work.pop(0), True)
        for token in self.asked:
            assert len(self.host.answers.get(token, [])) == 1, f"no answer to {self.asked[token]}"
        assert not self.host.governor.grants._tokens
        assert not self.host.governor.grants._news
        assert not self.host.governor.grants._within
