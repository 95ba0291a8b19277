"""The core's records and stored JSON as D-Bus values; the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from hetero_agent import names
from hetero_agent.bus.codec import V
from hetero_agent.bus.decode import OPTIONS
from hetero_agent.core.containers import container_of
from hetero_agent.core.model import (
    Attribute,
    AuditRecord,
    Binding,
    Device,
    Health,
    Holder,
    Instant,
    Lease,
)
from hetero_agent.core.ports import NodeAccess
from hetero_agent.text import printable

#: A property holds at most 1 KiB (design section 7): what does not fit is cut.
MAX_PROPERTY = 1024
MAX_BLOCKERS = 16
#: Characters of a text property; four bytes each fit.
MAX_NAME = 250

_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1

#: `names.device_path`, remembered: the same few paths are needed all the time.
device_path = lru_cache(maxsize=8192)(names.device_path)

#: The keys of a manifest and their types.
_MANIFEST: Mapping[str, str] = {
    "version": "u",
    "lease": "s",
    "resource": "s",
    "devices": "as",
    "nodes": "a(ssssuu)",
    "mounts": "a(sss)",
    "env": "a{ss}",
    "env-filtered": "a{ss}",
    "groups": "au",
    "limits": "a{st}",
    "netdevs": "a(ss)",
    "confirm-by": "t",
    "confirm-by-boottime": "t",
}
_REQUEST: Mapping[str, str] = {"request-id": "s", "resource": "s", "count": "u", **OPTIONS}

#: What a provider's session and report answers hold.
SESSION: Mapping[str, str] = {"protocol-version": "u", "epoch": "s", "page-size": "u", "grace": "t"}
REPORTED: Mapping[str, str] = {"accepted": "b", "version": "t", "reason": "s"}


def u32(value: int) -> int:
    """VALUE as it fits into u."""
    return value if 0 <= value <= _U32_MAX else min(max(value, 0), _U32_MAX)


def u64(value: int) -> int:
    """VALUE as it fits into t."""
    return value if 0 <= value <= _U64_MAX else min(max(value, 0), _U64_MAX)


def attribute(value: Attribute) -> V:
    """An attribute: b, t (x if negative) or s."""
    if isinstance(value, bool):
        return V("b", value)
    if isinstance(value, int):
        return V("t", u64(value)) if value >= 0 else V("x", max(value, -(2**63)))
    return V("s", value)


def typed(data: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, V]:
    """The keys of DATA that TYPES has, in the order of TYPES."""
    return {key: V(kind, data[key]) for key, kind in types.items() if key in data}


def manifest(data: Mapping[str, Any]) -> dict[str, V]:
    """A manifest, whatever the order of keys in the JSON object."""
    shown = dict(data)
    for key in ("env", "env-filtered"):
        if key in shown:
            shown[key] = dict(sorted(shown[key].items()))
    return typed(shown, _MANIFEST)


def request(data: Mapping[str, Any]) -> dict[str, V]:
    """What was asked for."""
    shown = dict(data)
    if "require" in shown:
        shown["require"] = attributes(shown["require"])
    return typed(shown, _REQUEST)


def attributes(data: Mapping[str, Attribute]) -> dict[str, V]:
    """Attributes by name, at most 1 KiB of them."""
    found: dict[str, V] = {}
    size = 0
    for key in sorted(data):
        value = data[key]
        size += len(key) + (len(value) if isinstance(value, str) else 8) + 16
        if size > MAX_PROPERTY:
            break
        found[key] = attribute(value)
    return found


def texts(values: Iterable[str]) -> list[str]:
    """Texts, at most 1 KiB of them."""
    found: list[str] = []
    size = 0
    for one in values:
        size += len(one) + 8
        if size > MAX_PROPERTY:
            break
        found.append(one)
    return found


def details(data: Mapping[str, str | int]) -> dict[str, V]:
    """The details of a StateChanged: s or t."""
    return {key: attribute(value) for key, value in data.items()}


def binding(bound: Binding) -> dict[str, V]:
    """The parts of a binding that are set."""
    found: dict[str, V] = {}
    if bound.pid is not None:
        found["pid"] = V("u", bound.pid.pid)
        found["start"] = V("t", bound.pid.start)
    if bound.unit is not None:
        found["unit"] = V("s", bound.unit.name)
        found["invocation"] = V("s", bound.unit.invocation)
    if bound.connection is not None:
        found["connection"] = V("s", bound.connection.name)
    if bound.ttl:
        found["ttl"] = V("t", bound.ttl)
    if bound.cgroup:
        found["cgroup"] = V("s", bound.cgroup)
    return found


def deadline(lease: Lease) -> tuple[int, int]:
    """Realtime and boottime of a lease's deadline, 0 for none.  The realtime is counted from the
    lease's creation, so that it does not waver."""
    if not lease.deadline:
        return 0, 0
    return u64(lease.created.real + lease.deadline - lease.created.boot), u64(lease.deadline)


def history(record: AuditRecord, with_actor: bool) -> dict[str, V]:
    """One transition; who did it only if WITH_ACTOR."""
    found = {
        "sequence": V("t", record.sequence),
        "generation": V("t", record.generation),
        "time": V("t", u64(record.at.real)),
        "boottime": V("t", u64(record.at.boot)),
        "from": V("s", record.from_state),
        "to": V("s", record.to_state),
        "trigger": V("s", record.trigger),
        "reason": V("s", record.reason),
        "lease": V("o", names.lease_path(record.lease)),
        "took": V("t", u64(record.took)),
        "request-id": V("s", record.request_id),
    }
    if with_actor and record.actor.uid >= 0:
        found["uid"] = V("u", record.actor.uid)
        found["pid"] = V("u", u32(record.actor.pid))
        found["unit"] = V("s", record.actor.unit)
        found["bus-name"] = V("s", record.actor.bus_name)
        found["client"] = V("s", record.actor.client)
        if record.actor.authority:
            found["authority"] = V("s", record.actor.authority)
    return found


def cordon(device: Device) -> dict[str, V]:
    """Who keeps a device from being granted, why and since when; empty if nobody does."""
    one, record = device.cordon, device.record
    if one is None:
        return {}
    told = {"reason": V("s", one.reason), "uid": V("u", u32(one.uid)), "since": V("t", u64(one.real))}
    own = one.serial == record.serial if one.serial and record.serial else one.device == record.id
    return told if own else {**told, "card": V("s", record.parent)}


def about_device(device: Device) -> dict[str, str]:
    """What polkit is told of a device."""
    return {"device": device.id, "resource": device.record.resource}


def about_lease(lease: Lease | None) -> dict[str, str]:
    """What polkit is told of a lease, if there is one."""
    if lease is None:
        return {}
    return {"lease": lease.id, "owner": str(lease.uid), "resource": lease.resource}


def access(one: NodeAccess) -> dict[str, V]:
    """Who may open a node."""
    return {
        "path": V("s", one.path),
        "role": V("s", one.role),
        "mode": V("u", one.mode),
        "uid": V("u", one.uid),
        "gid": V("u", one.gid),
        "entries": V("a{us}", dict(one.entries)),
        "remarks": V("a(ss)", [list(remark) for remark in one.remarks]),
    }


def holder(one: Holder, role: str, lease: str, now: Instant) -> dict[str, V]:
    """One holder of a device and what it counts as; when it was first seen becomes realtime."""
    container = container_of(one.cgroup)
    return {
        "pid": V("u", one.pid),
        "start": V("t", one.start),
        "uid": V("u", u32(one.uids[0])),
        "exe": V("s", one.exe),
        "comm": V("s", one.comm),
        "unit": V("s", one.unit),
        "container": V("s", printable(container.name) if container else ""),
        "pod": V("s", container.pod if container else ""),
        "since": V("t", u64(now.real - (now.boot - one.since))),
        "mapped": V("b", one.mapped),
        "role": V("s", role),
        "lease": V("o", names.lease_path(lease if role in ("lease", "leftover") else "")),
        "evidence": V("a{ss}", dict(one.evidence)),
    }


def reason_of(device: Device) -> str:
    """Return why a device is in its state; if that needs no reason, why it is suspect or unhealthy."""
    ill = device.health in (Health.SUSPECT, Health.UNHEALTHY)
    return (device.reason or (device.health_reason if ill else ""))[:MAX_NAME]


#: Getters of the properties that a device object has, by name.
DEVICE: Mapping[str, Callable[[Device, tuple[str, ...]], Any]] = {
    "Id": lambda one, _: one.record.id,
    "Aliases": lambda one, _: texts(one.record.aliases),
    "Resource": lambda one, _: one.record.resource,
    "State": lambda one, _: str(one.state),
    "Health": lambda one, _: str(one.health),
    "Reason": lambda one, _: reason_of(one),
    "Since": lambda one, _: u64(one.since.real),
    "SinceBoottime": lambda one, _: u64(one.since.boot),
    "Cordoned": lambda one, _: one.cordon is not None,
    "Cordon": lambda one, _: cordon(one),
    "BlockedBy": lambda _, blockers: list(blockers[:MAX_BLOCKERS]),
    "Vendor": lambda one, _: one.record.vendor[:MAX_NAME],
    "Model": lambda one, _: one.record.model[:MAX_NAME],
    "Driver": lambda one, _: one.record.driver[:MAX_NAME],
    "Path": lambda one, _: one.record.path[:MAX_NAME],
    "NumaNodes": lambda one, _: list(one.record.numa_nodes),
    "Attributes": lambda one, _: attributes(one.record.attributes),
    "Lease": lambda one, _: names.lease_path(one.lease),
    "AllocationCount": lambda one, _: u32(one.count),
    "Parent": lambda one, _: one.record.parent,
    "StableId": lambda one, _: one.record.stable_id,
    "Source": lambda one, _: one.record.source,
}

#: Getters of the properties that a lease object has, by name.
LEASE: Mapping[str, Callable[[Lease], Any]] = {
    "Id": lambda one: one.id,
    "Resource": lambda one: one.resource,
    "Devices": lambda one: [device_path(device) for device in one.devices],
    "State": lambda one: str(one.state),
    "Result": lambda one: str(one.result),
    "OwnerUid": lambda one: one.uid,
    "Client": lambda one: one.client,
    "Created": lambda one: u64(one.created.real),
    "CreatedBoottime": lambda one: u64(one.created.boot),
    "Deadline": lambda one: deadline(one)[0],
    "DeadlineBoottime": lambda one: deadline(one)[1],
    "Lost": lambda one: [device_path(device) for device in one.lost],
}
