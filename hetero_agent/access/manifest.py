"""The manifest: all that the owner of a lease needs to use it.  Pure: no I/O, no clock.

The same lease and records give the same manifest, whenever it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from hetero_agent import names
from hetero_agent.core.model import DeviceRecord, Joining, Lease, Node

VERSION: Final = 1

LEASE_VARIABLE: Final = "HETERO_LEASE_ID"
DEVICES_VARIABLE: Final = "HETERO_DEVICES"
COUNT_VARIABLE: Final = "HETERO_DEVICE_COUNT"

_GROUP_READ_WRITE: Final = 0o060
_OTHER_READ_WRITE: Final = 0o006


class AccessError(ValueError):
    """A lease can't be given what it needs; the text names the path, what was expected and what
    was found."""


def each(*steps: Callable[[], object]) -> None:
    """Do all STEPS, and raise AccessError then with what failed."""
    problems = []
    for step in steps:
        try:
            step()
        except AccessError as error:
            problems.append(str(error))
    if problems:
        raise AccessError("; ".join(problems[:3]))


class UnansweredError(AccessError):
    """Nobody said whether it was done: it may be, or will be yet."""


def build(
    lease: Lease,
    records: Sequence[DeviceRecord],
    nodes: Mapping[str, Sequence[Node]],
    group_ids: Iterable[int],
    mounts: Iterable[tuple[str, str, str]] = (),
) -> dict[str, object]:
    """Return the manifest of LEASE as a JSON object (types on the bus are fixed by key).

    RECORDS are the lease's devices in its order; NODES what the kernel says of each device's nodes
    now, by device id; GROUP_IDS the gids of the groups that the profiles name; MOUNTS those that
    exist here.
    """
    confirm_by = confirm_by_boottime = 0
    if not lease.confirmed and lease.deadline:
        confirm_by_boottime = lease.deadline
        confirm_by = lease.created.real + (lease.deadline - lease.created.boot)
    return {
        "version": VERSION,
        "lease": lease.id,
        "resource": lease.resource,
        "devices": [record.id for record in records],
        "nodes": [
            [record.id, node.path, node.role.value, node.kind, node.major, node.minor]
            for record in records
            for node in nodes[record.id]
        ],
        "mounts": [list(mount) for mount in dict.fromkeys(mounts)],
        "env": environment(lease.id, records),
        "env-filtered": filtered(records),
        "groups": sorted({*group_ids, *_node_groups(node for found in nodes.values() for node in found)}),
        "limits": limits(records),
        "netdevs": [[record.id, name] for record in records for name in interfaces(record)],
        "confirm-by": confirm_by,
        "confirm-by-boottime": confirm_by_boottime,
    }


def environment(lease_id: str, records: Sequence[DeviceRecord]) -> dict[str, str]:
    """Return the variables of a lease: ours, and those of the devices, values joined by commas in
    the lease's order, or as the profile says.  A value that several devices share (a fixed setting,
    or two shares of one card) stands once."""
    env = {}
    for name, values in _values(records).items():
        joining = _joining(name, records)
        ordered = sorted(values, key=int) if _renumbered(joining, values) else values
        env[name] = joining.prefix + ",".join(ordered)
    env[LEASE_VARIABLE] = lease_id
    env[DEVICES_VARIABLE] = ",".join(record.id for record in records)
    env[COUNT_VARIABLE] = str(len(records))
    return env


def limits(records: Sequence[DeviceRecord]) -> dict[str, int]:
    """Return the resource limits that the lease's user needs, by setrlimit(2)'s names: the highest
    of the devices' each."""
    found: dict[str, int] = {}
    for record in records:
        for name, value in record.limits.items():
            found[name] = max(value, found.get(name, 0))
    return dict(sorted(found.items()))


def interfaces(record: DeviceRecord) -> list[str]:
    """Return the names of a device's network interfaces: its attribute `net`, commas between them."""
    listed = str(record.attributes.get("net", "")).split(",")
    return [name for name in listed if names.INTERFACE.fullmatch(name)]


def filtered(records: Sequence[DeviceRecord]) -> dict[str, str]:
    """Return the variables that are others where a device filter (a container's, a unit's
    DeviceAllow=) hides all devices but the lease's, so that the driver counts them from 0."""
    env = {}
    for name, values in _values(records).items():
        joining = _joining(name, records)
        if _renumbered(joining, values):
            env[name] = joining.prefix + ",".join(str(number) for number in range(len(values)))
    return env


def _values(records: Sequence[DeviceRecord]) -> dict[str, list[str]]:
    """The different values of each variable, in the lease's order."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in record.env.items():
            found.setdefault(name, {})[value] = None
    return {name: list(found[name]) for name in sorted(found)}


def _joining(name: str, records: Sequence[DeviceRecord]) -> Joining:
    return next((record.joining[name] for record in records if name in record.joining), Joining())


def _renumbered(joining: Joining, values: Sequence[str]) -> bool:
    """What is no number (a MIG device's UUID) means the same everywhere."""
    return joining.renumbered and all(value.isdecimal() for value in values)


def _node_groups(nodes: Iterable[Node]) -> set[int]:
    """The groups without which a node can't be opened for reading and writing."""
    return {
        node.gid
        for node in nodes
        if node.gid
        and node.mode & _GROUP_READ_WRITE == _GROUP_READ_WRITE
        and node.mode & _OTHER_READ_WRITE != _OTHER_READ_WRITE
    }
