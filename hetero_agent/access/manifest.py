"""The manifest: all that the owner of a lease needs to use it.  Pure: no I/O, no clock.

The same lease and records give the same manifest, whenever it is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hetero_agent.core.model import DeviceRecord, Lease, Node

VERSION: Final = 1

LEASE_VARIABLE: Final = "HETERO_LEASE_ID"
DEVICES_VARIABLE: Final = "HETERO_DEVICES"
COUNT_VARIABLE: Final = "HETERO_DEVICE_COUNT"

_GROUP_READ_WRITE: Final = 0o060
_OTHER_READ_WRITE: Final = 0o006


class AccessError(ValueError):
    """A lease can't be given what it needs; the text names the path, what was expected and what
    was found."""


def build(
    lease: Lease,
    records: Sequence[DeviceRecord],
    nodes: Mapping[str, Sequence[Node]],
    group_ids: Iterable[int],
) -> dict[str, object]:
    """Return the manifest of LEASE as a JSON object (types on the bus are fixed by key).

    RECORDS are the lease's devices in its order; NODES what the kernel says of each device's nodes
    now, by device id; GROUP_IDS the gids of the groups that the profiles name.
    """
    confirm_by = confirm_by_boottime = 0
    if not lease.confirmed and lease.deadline:
        confirm_by_boottime = lease.deadline
        confirm_by = lease.created.real + (lease.deadline - lease.created.boot)
    mounts = dict.fromkeys(mount for record in records for mount in record.mounts)
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
        "mounts": [list(mount) for mount in mounts],
        "env": environment(lease.id, records),
        "groups": sorted({*group_ids, *_node_groups(node for found in nodes.values() for node in found)}),
        "confirm-by": confirm_by,
        "confirm-by-boottime": confirm_by_boottime,
    }


def environment(lease_id: str, records: Sequence[DeviceRecord]) -> dict[str, str]:
    """Return the variables of a lease: ours, and those of the devices, values joined by commas in
    the lease's order.  A value that several devices share (a fixed setting, or two shares of one
    card) stands once."""
    values: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in record.env.items():
            values.setdefault(name, {})[value] = None
    env = {name: ",".join(values[name]) for name in sorted(values)}
    env[LEASE_VARIABLE] = lease_id
    env[DEVICES_VARIABLE] = ",".join(record.id for record in records)
    env[COUNT_VARIABLE] = str(len(records))
    return env


def _node_groups(nodes: Iterable[Node]) -> set[int]:
    """The groups without which a node can't be opened for reading and writing."""
    return {
        node.gid
        for node in nodes
        if node.gid
        and node.mode & _GROUP_READ_WRITE == _GROUP_READ_WRITE
        and node.mode & _OTHER_READ_WRITE != _OTHER_READ_WRITE
    }
