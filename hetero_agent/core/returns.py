"""Taking devices back: what is owed, proof of return, and strangers."""

from __future__ import annotations

from dataclasses import replace

from hetero_agent.core.effects import (
    ConflictSeen,
    OrphanFound,
    RequestScan,
)
from hetero_agent.core.endings import Endings, process_name
from hetero_agent.core.events import Closed, DeviceScan, Opened, Scanned
from hetero_agent.core.lifecycle import Trigger
from hetero_agent.core.model import (
    AGENT,
    Actor,
    AuditKind,
    Binding,
    Debt,
    Device,
    Holder,
    Instant,
    Lease,
    Node,
    OnEnd,
    ProcessRef,
    State,
)
from hetero_agent.core.rights import belongs, bound_to, is_system, may_reap, may_signal, names_processes
from hetero_agent.core.roster import siblings
from hetero_agent.core.world import World, in_hands
from hetero_agent.text import printable

#: Boot µs until a device is looked at again: while it is owed, and once that is overdue, while a
#: stranger has it, after an open that a scan did not cover, and after an open of a leased device.
_OWED_AGAIN = 1_000_000
_OVERDUE_AGAIN = 5_000_000
_OCCUPIED_AGAIN = 5_000_000
_DIRTY_AGAIN = 200_000
_INTRUDER_AGAIN = 2_000_000

#: Processes of an ended lease that are remembered over a restart.
_MOST_KIN = 256


class Returns:
    """See the module's text."""

    def __init__(self, world: World, endings: Endings) -> None:
        self.world = world
        self.endings = endings
        #: By (lease, device): its holders of the lease's, and the strangers, of the last scan.
        self._known: dict[tuple[str, str], frozenset[ProcessRef]] = {}
        self._strangers: dict[tuple[str, str], frozenset[ProcessRef]] = {}

    # -- owing ---------------------------------------------------------------------------------
    def owe(
        self,
        device: Device,
        lease: Lease | None,
        trigger: Trigger,
        at: Instant,
        *,
        reason: str = "",
        actor: Actor = AGENT,
        request_id: str = "",
        kill: bool = False,
    ) -> None:
        """The owner side is done: DEVICE is reclaiming until a scan proves its return."""
        world = self.world
        world.put_debt(
            Debt(
                device=device.id,
                lease=lease.id if lease else "",
                uid=lease.uid if lease else -1,
                since=at.boot,
                deadline=at.boot + world.settings.reclaim_deadline,
                on_end=OnEnd.KILL if kill else OnEnd.WAIT,
                nodes=(*device.record.own_nodes, *device.former),
                binding=lease.binding if lease else Binding(),
                kin=self._lasting_kin(lease) if lease and kill else (),
            )
        )
        world.keep_record(device)
        world.move(
            replace(device, suspected=(), occupied=False, former=()),
            trigger,
            at,
            reason=reason,
            actor=actor,
            request_id=request_id,
        )
        world.effect(RequestScan((device.id,)))
        self._look_again(device.id, at.boot + _OWED_AGAIN)

    def owe_again(self, device: Device, at: Instant) -> None:
        """DEVICE appears: if one went from this place and its lease's access is still being taken back,
        it is owed."""
        world = self.world
        lease = next((one for one, revocation in world.revoking.items() if device.id in revocation.away), "")
        if lease:
            deadline = at.boot + world.settings.reclaim_deadline
            nodes = device.record.own_nodes
            world.put_debt(Debt(device.id, lease, -1, since=at.boot, deadline=deadline, nodes=nodes))
            world.keep_record(device)

    def forget_lease(self, lease: Lease) -> None:
        """The lease is over: its processes need not be known any more."""
        for device_id in lease.devices:
            self.world.discard(self._known, (lease.id, device_id))
            self.world.discard(self._strangers, (lease.id, device_id))

    def _kin(self, lease: Lease) -> frozenset[ProcessRef]:
        """The processes that were seen to be the lease's, on any of its devices."""
        return frozenset[ProcessRef]().union(*(self._known.get((lease.id, one), ()) for one in lease.devices))

    def _lasting_kin(self, lease: Lease) -> tuple[ProcessRef, ...]:
        """Those of them that are still to be known as the lease's if the agent dies: only of a root
        lease, the processes of others are known by their uid."""
        if lease.uid != 0:
            return ()
        return tuple(sorted(self._kin(lease), key=lambda one: (one.start, one.pid))[:_MOST_KIN])

    def nodes_of(self, device: Device) -> tuple[Node, ...]:
        """The nodes that a scan looks for: those of the record, and those under other numbers that
        its last lease had, or that its present one has had, unless another device has these now."""
        own = device.record.own_nodes
        debt = self.world.debts.get(device.id)
        here = {node.key for node in own}
        former = device.former if debt is None else debt.nodes
        before = [node for node in former if node.key not in here]
        if not before:
            return own
        return (*own, *(node for node in before if not self.world.owners(node, device.id)))

    def overtaken(self, device: Device) -> bool:
        """Whether a node that a device had is another's now, and not one that it shared with that."""
        here = {node.key for node in device.record.own_nodes}
        return any(
            not siblings(other.record, device.record)
            for node in device.former
            if node.key not in here
            for other in self.world.owners(node, device.id)
        )

    def role_of(self, device: Device, holder: Holder) -> str:
        """What a holder of a device counts as: ``lease`` (the lease's that has it), ``leftover``
        (still there after the lease's end), ``intruder``, ``outsider`` (on a device that no lease
        has), or ``system`` (kept by the system, and ignored)."""
        if is_system(holder, self.world.settings.system_holders):
            return "system"
        lease = self.world.leases.get(device.lease)
        if in_hands(device) and lease is not None:
            return "lease" if belongs(holder, lease, self._kin(lease)) else "intruder"
        debt = self.world.debts.get(device.id)
        return "leftover" if debt is not None and debt.lease else "outsider"

    def _look_again(self, device_id: str, boot: int) -> None:
        self.world.alarm(boot, "check", device_id)

    # -- opens and closes ------------------------------------------------------------------------
    def opened(self, event: Opened) -> None:
        """Somebody opened an own node: not clean until a scan that began later says so."""
        device = self.world.devices.get(event.device)
        if device is None:
            return
        was_dirty = device.dirty
        quiet = device.last_open + _INTRUDER_AGAIN <= event.at.boot
        self.world.put_device(replace(device, last_open=event.at.boot))
        if in_hands(device):
            # at once after a quiet time, else on a coarse grid: a busy owner costs no scan per open
            if quiet:
                self.world.effect(RequestScan((device.id,)))
            self._look_on_grid(device.id, event.at.boot)
        elif not was_dirty:
            self.world.effect(RequestScan((device.id,)))

    def closed(self, event: Closed) -> None:
        """A handle was closed: perhaps the last one."""
        device = self.world.devices.get(event.device)
        if device is None:
            return
        if in_hands(device):
            self._look_on_grid(device.id, event.at.boot)
        elif device.id in self.world.debts or device.occupied or device.suspected:
            self.world.effect(RequestScan((device.id,)))

    def _look_on_grid(self, device_id: str, boot: int) -> None:
        """Have who holds a leased device looked at within the next `_INTRUDER_AGAIN`."""
        self._look_again(device_id, (boot // _INTRUDER_AGAIN + 1) * _INTRUDER_AGAIN)

    # -- scans -------------------------------------------------------------------------------------
    def scanned(self, event: Scanned) -> list[tuple[str, str]]:
        """Take a scan's word on each device; returns (device, lease) of the proven returns."""
        proven = []
        for device_id, scan in event.devices.items():
            device = self.world.devices.get(device_id)
            if device is None or event.started < device.last_clean:
                continue
            if event.failed:
                self._not_scanned(device, event)
            elif in_hands(device):
                self._check_intruders(device, scan, event.at)
            elif device_id in self.world.debts:
                lease = self._check_debt(device, scan, event)
                if lease is not None:
                    proven.append((device_id, lease))
            else:
                self._check_free(device, scan, event)
        return proven

    def _not_scanned(self, device: Device, event: Scanned) -> None:
        debt = self.world.debts.get(device.id)
        if debt is not None and not debt.incomplete:
            self.world.put_debt(replace(debt, incomplete=True))
        if not in_hands(device):
            # who opened it since the last clean scan can't be told: none is granted on the strength of that
            device = replace(device, last_open=event.at.boot)
            self.world.move(device, Trigger.SCANNED, event.at)
            self._look_again(device.id, event.at.boot + _OWED_AGAIN)

    def _sort(self, device: Device, scan: DeviceScan) -> tuple[tuple[Holder, ...], tuple[Holder, ...]]:
        """Return the holders that count, and those that the system itself keeps."""
        units = self.world.settings.system_holders
        since = {holder.ref: holder.since for holder in (*device.holders, *device.system)}
        seen = [replace(holder, since=since.get(holder.ref, holder.since)) for holder in scan.holders]
        system = tuple(holder for holder in seen if is_system(holder, units))
        found = tuple(holder for holder in seen if holder not in system)
        return self._outsiders(device, found) if found else (), system

    def _outsiders(self, device: Device, found: tuple[Holder, ...]) -> tuple[Holder, ...]:
        """Those of FOUND that count: not another live lease's on a shared node; a holder of no live
        lease counts for the lease that ended last on that node."""
        twins = (self.world.devices[one] for one in sorted(self.world.twins(device.record)))
        sharers = [*self.sharers(device), *twins]
        if not sharers:
            return found
        leases = self._leases_of(sharers)
        mine = self.world.debts.get(device.id)
        ended = self.world.leases.get(mine.lease) if mine else None

        def elsewhere(holder: Holder) -> bool:
            # by its uid alone a process is nobody's whose lease it is known to be
            known = ended is not None and belongs(holder, ended, self._kin(ended))
            return any(
                belongs(holder, lease, kin) and (names_processes(lease.binding) or not known)
                for lease, kin in leases
            )

        found = tuple(holder for holder in found if not elsewhere(holder))
        return () if self._owed_last(sharers) > (mine.since if mine else -1) else found

    def _leases_of(self, sharers: list[Device]) -> list[tuple[Lease, frozenset[ProcessRef]]]:
        """The live leases that have them, each with the processes that were seen to be its."""
        leases = [self.world.leases.get(one.lease) for one in sharers if in_hands(one)]
        return [(lease, self._kin(lease)) for lease in leases if lease is not None]

    def _owed_last(self, sharers: list[Device]) -> int:
        """When the last of their leases ended that has something to return, -1 for none."""
        return max(
            (self.world.debts[one.id].since for one in sharers if one.id in self.world.debts), default=-1
        )

    def sharers(self, device: Device) -> list[Device]:
        """Other devices of the same card that have one of its own nodes too."""
        if not device.record.parent:
            return []
        own = {node.key for node in device.record.own_nodes}
        return [
            other
            for one in self.world.relatives(device.record.parent)
            if one != device.id and (other := self.world.devices.get(one)) is not None
            if any(node.key in own for node in other.record.own_nodes)
        ]

    def _incomplete(self, device: Device, scan: DeviceScan) -> bool:
        """Whether a process that could not be read matters here: one that was last seen on the
        device, or, while it is owed, one of the ended lease's uid or its bound process.

        Pid 1 is of uid 0 like many an owner, may be unreadable even for root (a container
        manager, a virtual machine's first process), and no lease's work runs in it: its uid
        alone says nothing.
        """
        if not scan.uninspected:
            return False
        debt = self.world.debts.get(device.id)
        seen = {holder.pid for holder in device.holders}
        bound = debt.binding.pid.pid if debt and debt.binding.pid else 0
        return any(
            pid in seen or (debt is not None and (pid == bound or (uid == debt.uid and pid != 1)))
            for pid, uid in scan.uninspected
        )

    def _check_debt(self, device: Device, scan: DeviceScan, event: Scanned) -> str | None:
        """Returns the lease whose device this proves clean ("" for none), None if not proven."""
        world = self.world
        debt = world.debts[device.id]
        holders, system = self._sort(device, scan)
        incomplete = self._incomplete(device, scan)
        if event.started <= debt.since and not holders:
            world.effect(RequestScan((device.id,)))
            return None
        if event.started <= device.last_open and not holders:
            self._look_again(device.id, event.at.boot + _DIRTY_AGAIN)
            return None
        if holders or incomplete:
            if incomplete != debt.incomplete:
                world.put_debt(replace(debt, incomplete=incomplete))
            device = replace(device, holders=holders or device.holders, system=system, uninspected=incomplete)
            world.move(device, Trigger.SCANNED, event.at)
            self._end_holders(device, world.debts[device.id], holders, event.at)
            self._look_again(device.id, event.at.boot + (_OVERDUE_AGAIN if debt.overdue else _OWED_AGAIN))
            return None
        revocation = world.revoking.get(debt.lease)
        if revocation is not None:
            # free of holders, but its owner, or a container, could still open it
            world.assign(world.revoking, debt.lease, replace(revocation, waiting=True))
            if debt.incomplete:
                world.put_debt(replace(debt, incomplete=False))
            device = replace(device, holders=(), system=system, uninspected=False)
            world.move(device, Trigger.SCANNED, event.at)
            return None
        world.drop_debt(device.id)
        self.endings.forget(device.id)
        device = replace(
            device, scanned=True, last_clean=event.started, holders=(), system=system, uninspected=False
        )
        world.move(device, Trigger.RETURN_PROVEN, event.at, lease="")
        return debt.lease

    def _check_free(self, device: Device, scan: DeviceScan, event: Scanned) -> None:
        world = self.world
        if event.started <= device.appeared:
            world.effect(RequestScan((device.id,)))
            return
        holders, system = self._sort(device, scan)
        device = replace(device, system=system)
        incomplete = self._incomplete(device, scan)
        if not holders and (incomplete or event.started <= device.last_open):
            # nothing is proven: neither that somebody has it nor that nobody has
            world.move(replace(device, uninspected=incomplete), Trigger.SCANNED, event.at)
            self._look_again(device.id, event.at.boot + (_OWED_AGAIN if incomplete else _DIRTY_AGAIN))
            return
        if not holders:
            device = replace(
                device,
                scanned=True,
                last_clean=event.started,
                holders=(),
                suspected=(),
                occupied=False,
                uninspected=False,
            )
            self.endings.forget(device.id)
            world.move(device, Trigger.SCANNED, event.at)
            return
        first = {holder.ref: holder.since for holder in device.suspected}
        suspected = tuple(replace(one, since=first.get(one.ref, event.at.boot)) for one in holders)
        since = min(one.since for one in suspected)
        newly = not device.occupied and since + world.settings.occupied_after <= event.at.boot
        device = replace(
            device,
            scanned=device.scanned or newly,
            holders=suspected,
            suspected=suspected,
            occupied=device.occupied or newly,
            uninspected=incomplete,
        )
        world.move(device, Trigger.SCANNED, event.at)
        if newly:
            self._tell_orphans(device, event.at)
        if device.occupied:
            self._end_orphans(device, event.at)
            self._look_again(device.id, event.at.boot + _OCCUPIED_AGAIN)
        else:
            self._look_again(device.id, since + world.settings.occupied_after)

    def _tell_orphans(self, device: Device, at: Instant) -> None:
        world = self.world
        names = ", ".join(process_name(holder) for holder in device.holders[:8])
        world.audit(
            AuditKind.ORPHAN,
            at,
            f"{device.id} is held outside any lease by {names}",
            priority=4,
            device=device.record,
            reason=names,
        )
        world.effect(OrphanFound(device.id, len(device.holders)))

    def _check_intruders(self, device: Device, scan: DeviceScan, at: Instant) -> None:
        world = self.world
        lease = world.leases.get(device.lease)
        if lease is None or device.state is State.LOST:
            return
        kin = self._kin(lease)
        sharers = self.sharers(device)
        others = self._leases_of(sharers)
        leftovers = self._owed_last(sharers) >= 0
        # on a shared node a uid tells nothing: until the lease is bound none is known to be its
        certain = not sharers or names_processes(lease.binding)
        own, strangers, seen = set(), [], []
        for holder in scan.holders:
            mine = belongs(holder, lease, kin)
            if mine and certain:
                own.add(holder.ref)
            elif not is_system(holder, world.settings.system_holders):
                if leftovers or any(
                    belongs(holder, other, known) and (not mine or names_processes(other.binding))
                    for other, known in others
                ):
                    continue  # on the shared node, but not for this device
                if not mine:
                    strangers.append(holder)
            seen.append(holder)
        entry = (lease.id, device.id)
        told = self._strangers.get(entry, frozenset())
        world.assign(self._known, entry, frozenset(own))
        world.assign(self._strangers, entry, frozenset(holder.ref for holder in strangers))
        since = {holder.ref: holder.since for holder in device.holders}
        holders = tuple(replace(one, since=since.get(one.ref, one.since)) for one in seen)
        if holders != device.holders or device.system:
            world.put_device(replace(device, holders=holders, system=()))
        for holder in strangers:
            if holder.ref in told:
                continue
            world.audit(
                AuditKind.INTRUDER,
                at,
                f"{device.id} is leased to uid {lease.uid}, but {process_name(holder)} has it open",
                priority=4,
                device=device.record,
                lease=lease.id,
                trigger=Trigger.INTRUDER,
                reason=process_name(holder),
            )
            world.effect(
                ConflictSeen(
                    "intruder", lease.id, device.id, f"a process of uid {holder.uids[0]}", f"uid {lease.uid}"
                )
            )

    # -- ending processes ----------------------------------------------------------------------------
    def _end_holders(self, device: Device, debt: Debt, holders: tuple[Holder, ...], at: Instant) -> None:
        """One step for each holder that may be ended."""
        lease = self.world.leases.get(debt.lease)
        kin = self._kin(lease).union(debt.kin) if lease is not None else debt.kin
        for holder in holders:
            if holder.ref in debt.targets:
                refused, uid = may_reap(holder, debt.uid if debt.lease else None), None
            elif debt.on_end is OnEnd.KILL:
                own = bound_to(holder, debt.binding, kin)
                refused = may_signal(holder, debt.uid, own)
                uid = debt.uid if debt.uid > 0 else None
            else:
                continue
            self.endings.step(device, debt.lease, holder, refused, uid, at)

    def _end_orphans(self, device: Device, at: Instant) -> None:
        """If the configuration says so, end those that hold a device outside any lease."""
        if self.world.settings.orphans_kill:
            for holder in device.holders:
                refused = may_signal(holder, None)
                self.endings.step(device, "", holder, refused, holder.uids[0], at)

    # -- alarms ------------------------------------------------------------------------------------
    def overdue(self, device_id: str, at: Instant) -> None:
        """The deadline of a debt may be over: the device is faulty until the return is proven."""
        world = self.world
        debt = world.debts.get(device_id)
        device = world.devices.get(device_id)
        if debt is None or device is None or debt.overdue:
            return
        if debt.deadline > at.boot:
            world.alarm(debt.deadline, "debt", device_id)
            return
        world.put_debt(replace(debt, overdue=True))
        names = ", ".join(process_name(holder) for holder in device.holders[:8]) or "nobody that could be seen"
        why = f"it is held by {names}"
        reason = names
        revocation = world.revoking.get(debt.lease)
        if revocation is not None and not device.holders:
            reason = printable(revocation.error) or "no answer"
            why = f"what its lease gave could not be taken back: {reason}"
        world.audit(
            AuditKind.HEALTH,
            at,
            f"{device_id} did not come back in time; {why}",
            priority=3,
            device=device.record,
            lease=debt.lease,
            trigger=Trigger.RETURN_OVERDUE,
            reason=reason,
        )
        world.move(device, Trigger.RETURN_OVERDUE, at)

    def check(self, device_id: str) -> None:
        """A look that was put off is due."""
        device = self.world.devices.get(device_id)
        if device is not None and (
            in_hands(device)
            or device_id in self.world.debts
            or device.dirty
            or device.suspected
            or device.occupied
            or not device.scanned
        ):
            self.world.effect(RequestScan((device_id,)))
