"""Which of the grantable devices a request gets: the three policies and the index under them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from hetero_agent.core.model import Attribute, Device, Options, Policy

#: (times granted, boot time since idle, id): least-allocated order.
Key = tuple[int, int, str]


#: What an attribute of another type than the device's is called.
_KINDS: Mapping[type, str] = {int: "number", str: "text", bool: "truth value"}


def key_of(device: Device) -> Key:
    """Return the least-allocated order of a device: granted least often, then longest idle."""
    return (device.count, device.since.boot, device.id)


class Pool:
    """The grantable devices of one resource in least-allocated order.

    A heap with lazy removal: an entry counts only while `valid` says that its key is the
    device's key now, so undoing a change needs no more than adding the device again.
    """

    def __init__(self, valid: Callable[[Key], bool]) -> None:
        self._valid = valid
        self._heap: list[Key] = []

    def add(self, device: Device) -> None:
        """Take a device that became grantable, or whose key changed."""
        heapq.heappush(self._heap, key_of(device))

    def shrink(self, size: int) -> None:
        """Drop stale entries if they outnumber the SIZE grantable devices fourfold."""
        if len(self._heap) > 4 * size + 64:
            self._heap = sorted({key for key in self._heap if self._valid(key)})

    def first(self, count: int, fits: Callable[[str], bool]) -> list[str]:
        """Return up to COUNT device ids in order; FITS is asked in that order."""
        kept: list[Key] = []
        chosen: list[str] = []
        while self._heap and len(chosen) < count:
            key = heapq.heappop(self._heap)
            if not self._valid(key) or (kept and kept[-1] == key):
                continue
            kept.append(key)
            if fits(key[2]):
                chosen.append(key[2])
        for key in kept:
            heapq.heappush(self._heap, key)
        return chosen


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy chose: fewer ids than asked for mean that the request can't be met now."""

    devices: tuple[str, ...]
    note: str = ""


def mismatch(device: Device, require: Mapping[str, Attribute]) -> str:
    """Return "" if DEVICE has what REQUIRE names, else what it lacks.

    Texts and truth values must be equal, numbers at least as large; ``vendor``, ``model``,
    ``driver``, ``serial`` and ``numa-node`` are the record's fields, others its attributes.
    """
    record = device.record
    for name, wanted in require.items():
        if name == "numa-node":
            if wanted not in record.numa_nodes:
                return f"not on NUMA node {wanted}"
            continue
        has: Attribute | None
        if name in ("vendor", "model", "driver", "serial"):
            has = getattr(record, name)
        else:
            has = record.attributes.get(name)
        if has is None:
            return f"has no attribute {name}"
        if type(wanted) is int and type(has) is int:
            short = has < wanted
        else:
            short = type(has) is not type(wanted) or has != wanted
        if short:
            other = f", not a {_KINDS[type(wanted)]}" if type(has) is not type(wanted) else ""
            return f"{name} is {str(has).lower() if isinstance(has, bool) else has}{other}"
    return ""


def choose(
    pool: Pool | None,
    count: int,
    options: Options,
    *,
    candidates: Callable[[], Iterable[Device]],
    fits: Callable[[str], bool],
    kin: Callable[[str], Collection[str]],
) -> Choice:
    """Choose COUNT devices by the policy of OPTIONS.

    POOL has the grantable devices in order; CANDIDATES lists them for the policies that
    compare all (one pass and one sort: bounded by the number of devices).  FITS tells whether
    a device has what the request requires; of two relatives (KIN) only one is taken.
    """

    def fresh() -> Callable[[str], bool]:
        taken: set[str] = set()

        def free_of_kin(device_id: str) -> bool:
            if not fits(device_id) or any(relative in taken for relative in kin(device_id)):
                return False
            taken.add(device_id)
            return True

        return free_of_kin

    if pool is None:
        return Choice(())
    if options.policy is Policy.LEAST_ALLOCATED:
        return Choice(tuple(pool.first(count, fresh())))
    ordered = sorted((device for device in candidates() if fits(device.id)), key=key_of)
    if options.policy is Policy.MOST_FREE_MEMORY:
        if not any("memory-free" in device.record.attributes for device in ordered):
            note = "no device tells its free memory; chosen by least-allocated"
            return Choice(_take(ordered, count, fresh()), note)
        ordered.sort(key=_free_memory, reverse=True)
        return Choice(_take(ordered, count, fresh()))
    return _packed(ordered, count, fresh)


def _take(ordered: Iterable[Device], count: int, free_of_kin: Callable[[str], bool]) -> tuple[str, ...]:
    chosen: list[str] = []
    for device in ordered:
        if len(chosen) == count:
            break
        if free_of_kin(device.id):
            chosen.append(device.id)
    return tuple(chosen)


def _free_memory(device: Device) -> int:
    value = device.record.attributes.get("memory-free", -1)
    return value if isinstance(value, int) else -1


def _packed(ordered: list[Device], count: int, fresh: Callable[[], Callable[[str], bool]]) -> Choice:
    """Take all from the smallest group that has enough: a PCIe root, else a NUMA node; if no
    group has, from the largest ones first."""
    for name, group_of in (("PCIe root", _root), ("NUMA node", _numa)):
        groups: defaultdict[str, list[Device]] = defaultdict(list)
        for device in ordered:
            where = group_of(device)
            if where:
                groups[where].append(device)
        for group in sorted(groups.values(), key=len):
            chosen = _take(group, count, fresh()) if len(group) >= count else ()
            if len(chosen) == count:
                return Choice(chosen, f"all on one {name}" if count > 1 else "")
    by_root: defaultdict[str, list[Device]] = defaultdict(list)
    for device in ordered:
        by_root[_root(device)].append(device)
    spread = [device for group in sorted(by_root.values(), key=len, reverse=True) for device in group]
    return Choice(_take(spread, count, fresh()), "no PCIe root or NUMA node has that many free")


def _root(device: Device) -> str:
    return str(device.record.attributes.get("pcie-root", ""))


def _numa(device: Device) -> str:
    return ",".join(str(node) for node in device.record.numa_nodes)
