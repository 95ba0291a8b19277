"""The device table, with what is found through it: names, resources, relatives, who can be granted.

`put_device` and `put_debt` keep the counts, the pools and the relatives right; a device counts as
busy for its relatives also while its return is owed, so what devices owe is kept here too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TypeVar

from hetero_agent.core.effects import DeviceChanged
from hetero_agent.core.model import Debt, Device, DeviceRecord, Health, Node, State
from hetero_agent.core.selection import Key, Pool, key_of
from hetero_agent.core.transaction import Transaction

#: States that keep a device's relatives from being granted.
_BUSY = frozenset({State.ALLOCATING, State.IN_USE, State.RECLAIMING, State.OCCUPIED, State.LOST})

K = TypeVar("K", str, tuple[str, int, int])


class Roster(Transaction):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: dict[str, Device] = {}
        self.debts: dict[str, Debt] = {}
        self.allocatable: dict[str, str] = {}
        self.free: Counter[str] = Counter()
        self.confirming: dict[str, str] = {}
        self.doubted: Counter[str] = Counter()
        self.tally: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._members: defaultdict[str, set[str]] = defaultdict(set)
        self._serials: defaultdict[str, set[str]] = defaultdict(set)
        self._children: defaultdict[str, set[str]] = defaultdict(set)
        #: By what tells a node from others: the devices whose own it is.
        self._owners: defaultdict[tuple[str, int, int], set[str]] = defaultdict(set)
        self._pools: dict[str, Pool] = {}
        self._busy_ones: set[str] = set()

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
        moved = old is None or new is None or _place(old) != _place(new)
        if old is not None:
            if moved:
                around.update(self.rivals(device_id, old.record))
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
                around.update(self.rivals(device_id, new.record))
        self._index(device_id)
        self._refresh_kin(device_id, around)

    def _refresh_kin(self, device_id: str, around: set[str]) -> None:
        """Look again at AROUND, whose family has changed, and at all rivals of a device that became
        busy or free."""
        busy = self._busy(self.devices.get(device_id))
        if busy != (device_id in self._busy_ones):
            (self._busy_ones.add if busy else self._busy_ones.discard)(device_id)
            around = around.union(self.rivals(device_id))
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
        for node in record.own_nodes:
            self._owners[node.key].add(record.id)

    def _unlink(self, record: DeviceRecord) -> None:
        _take_out(self._members, record.resource, record.id)
        _take_out(self._serials, record.serial, record.id)
        _take_out(self._children, record.parent, record.id)
        for alias in record.aliases:
            _take_out(self._names, alias, record.id)
        for node in record.own_nodes:
            _take_out(self._owners, node.key, record.id)

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
            return "no clean scan since it was opened, or a scan failed; scanning"
        blockers = self.blocked_by(device.id)
        if blockers:
            what = "its twin" if blockers[0] in self.twins(device.record) else "its relative"
            return f"{what} {blockers[0]} is busy"
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

    def twins(self, record: DeviceRecord) -> set[str]:
        """The ids of devices that have an own node of this one's without being parts or slots of one
        card: two sources report one thing, or one has not heard yet that a node is another's now."""
        # the number of a node of what is away may have been given anew
        return {
            other.id
            for node in record.own_nodes
            for other in self.owners(node, record.id)
            if other.present and not siblings(other.record, record)
        }

    def owners(self, node: Node, but: str) -> list[Device]:
        """The devices whose own node this is, present or not, without the one with the id BUT."""
        return [self.devices[one] for one in self._owners.get(node.key, ()) if one != but]

    def rivals(self, device_id: str, record: DeviceRecord | None = None) -> Iterator[str]:
        """Yield the ids of the devices of which only one can be granted at a time: relatives and twins."""
        known = self.devices.get(device_id)
        record = record or (known.record if known else None)
        seen = set()
        for one in self.relatives(device_id, record):
            seen.add(one)
            yield one
        if record is not None:
            yield from self.twins(record) - seen

    def blocked_by(self, device_id: str) -> tuple[str, ...]:
        """The relatives and twins that keep a device from being granted."""
        if device_id not in self.devices:
            return ()
        return tuple(sorted(one for one in self.rivals(device_id) if self._busy(self.devices.get(one))))

    # -- what devices owe ------------------------------------------------------------------------
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


def siblings(one: DeviceRecord, other: DeviceRecord) -> bool:
    """Whether both are parts or slots of the same card: these may have nodes in common."""
    return bool(one.parent) and one.parent == other.parent


def _take_out(table: dict[K, set[str]], key: K, device_id: str) -> None:
    """Take a device out of an index; a key that has none left goes, too."""
    if key in table:
        table[key].discard(device_id)
        if not table[key]:
            del table[key]


def _place(device: Device) -> tuple[str, bool, frozenset[tuple[str, int, int]]]:
    """What a device's rivals follow from."""
    record = device.record
    return record.parent, device.present, frozenset(node.key for node in record.own_nodes)
