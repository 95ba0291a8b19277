"""What the agent answers, as types.  Times are microseconds, realtime, unless they say boot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_agent import names
from hetero_agent.client.manifest import Manifest


def lease_of(path: str) -> str:
    """Return the lease id in an object path, "" for ``/`` and for what is no lease's path."""
    try:
        return names.lease_id_of(path)
    except ValueError:
        return ""


def device_of(path: str) -> str:
    """Return the device id in an object path; the path itself if it is no device's."""
    try:
        return names.device_id_of(path)
    except ValueError:
        return path


@dataclass(frozen=True)
class Device:
    """One device, from the snapshot or from its object; LEASE is an id, "" for none.

    The fields from PARENT on are known of a single device only (`Client.device`).
    """

    id: str
    path: str
    resource: str
    state: str
    health: str
    reason: str
    cordoned: bool
    lease: str
    since: int
    vendor: str = ""
    model: str = ""
    driver: str = ""
    numa_nodes: tuple[int, ...] = ()
    blocked_by: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    allocation_count: int = 0
    parent: str = ""
    source: str = ""
    stable_id: bool = True
    sysfs: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    #: Of the cordon that it is under: reason, uid, since, and card if it is that of its card.
    cordon: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Device:
        """Read one row of GetSnapshot."""
        path, device_id, resource, state, health, reason, cordoned, lease, since, more = row
        return cls(
            id=device_id,
            path=path,
            resource=resource,
            state=state,
            health=health,
            reason=reason,
            cordoned=cordoned,
            lease=lease_of(lease),
            since=since,
            vendor=more.get("vendor", ""),
            model=more.get("model", ""),
            driver=more.get("driver", ""),
            numa_nodes=tuple(more.get("numa-nodes", ())),
            blocked_by=tuple(more.get("blocked-by", ())),
            aliases=tuple(more.get("aliases", ())),
            allocation_count=more.get("allocation-count", 0),
        )

    @classmethod
    def of_properties(cls, path: str, got: Mapping[str, Any]) -> Device:
        """Read the properties of a device object."""
        return cls(
            id=got["Id"],
            path=path,
            resource=got["Resource"],
            state=got["State"],
            health=got["Health"],
            reason=got["Reason"],
            cordoned=got["Cordoned"],
            lease=lease_of(got["Lease"]),
            since=got["Since"],
            vendor=got.get("Vendor", ""),
            model=got.get("Model", ""),
            driver=got.get("Driver", ""),
            numa_nodes=tuple(got.get("NumaNodes", ())),
            blocked_by=tuple(got.get("BlockedBy", ())),
            aliases=tuple(got.get("Aliases", ())),
            allocation_count=got.get("AllocationCount", 0),
            parent=got.get("Parent", ""),
            source=got.get("Source", ""),
            stable_id=got.get("StableId", True),
            sysfs=got.get("Path", ""),
            attributes=dict(got.get("Attributes", {})),
            cordon=dict(got.get("Cordon", {})),
        )


@dataclass(frozen=True)
class Snapshot:
    """All devices at one generation.  COMPLETE is false before the first enumeration is done."""

    epoch: str
    generation: int
    complete: bool
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Lease:
    """The public side of a lease.  DEADLINE is 0 if it never ends by itself; it is given on the wall clock
    as that was at the grant, and on CLOCK_BOOTTIME, which alone decides."""

    id: str
    path: str
    resource: str
    devices: tuple[str, ...]
    state: str
    result: str
    uid: int
    client: str
    created: int
    deadline: int
    deadline_boottime: int
    lost: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """Whether it still entitles its owner to the devices."""
        return self.state in ("pending", "active")

    @classmethod
    def of_properties(cls, path: str, got: Mapping[str, Any]) -> Lease:
        """Read the properties of a lease object."""
        return cls(
            id=got["Id"],
            path=path,
            resource=got["Resource"],
            devices=tuple(device_of(one) for one in got["Devices"]),
            state=got["State"],
            result=got["Result"],
            uid=got["OwnerUid"],
            client=got["Client"],
            created=got["Created"],
            deadline=got["Deadline"],
            deadline_boottime=got["DeadlineBoottime"],
            lost=tuple(device_of(one) for one in got.get("Lost", ())),
        )


@dataclass(frozen=True)
class Grant:
    """What Allocate gave.  REQUEST_ID is the one it was asked with."""

    lease: str
    path: str
    manifest: Manifest
    request_id: str


@dataclass(frozen=True)
class Verdict:
    """What Explain says of one device."""

    device: str
    state: str
    eligible: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What Allocate would do now: VERDICT is ``now``, ``later`` or ``never``."""

    verdict: str
    text: str
    chosen: tuple[str, ...]
    note: str
    devices: tuple[Verdict, ...]


@dataclass(frozen=True)
class Node:
    """A device node; ROLE is own, parent or control."""

    path: str
    role: str
    kind: str
    major: int
    minor: int


@dataclass(frozen=True)
class NodeAccess:
    """Who may open a node: its MODE (the group's bits are the owning group's own rights), owner and
    group, the ENTRIES of users in its access control list, and what is out of order: pairs of
    ``wrong`` or ``note`` and the words for it."""

    path: str
    role: str
    mode: int
    uid: int
    gid: int
    entries: Mapping[int, str] = field(default_factory=dict)
    remarks: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, got: Mapping[str, Any]) -> NodeAccess:
        """Read one entry of GetAccess."""
        return cls(
            path=got["path"],
            role=got["role"],
            mode=got["mode"],
            uid=got["uid"],
            gid=got["gid"],
            entries=dict(got.get("entries", {})),
            remarks=tuple((level, text) for level, text in got.get("remarks", ())),
        )


@dataclass(frozen=True)
class Holder:
    """A process that has a device open or mapped; START is in clock ticks since boot.  ROLE is lease,
    leftover, intruder, outsider or system."""

    pid: int
    start: int
    uid: int
    exe: str
    comm: str
    unit: str
    since: int
    mapped: bool
    lease: str
    role: str = ""
    container: str = ""
    pod: str = ""
    evidence: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, got: Mapping[str, Any]) -> Holder:
        """Read one entry of GetHolders."""
        return cls(
            pid=got["pid"],
            start=got["start"],
            uid=got["uid"],
            exe=got.get("exe", ""),
            comm=got.get("comm", ""),
            unit=got.get("unit", ""),
            since=got.get("since", 0),
            mapped=got.get("mapped", False),
            lease=lease_of(got.get("lease", "/")),
            role=got.get("role", ""),
            container=got.get("container", ""),
            pod=got.get("pod", ""),
            evidence=dict(got.get("evidence", {})),
        )


@dataclass(frozen=True)
class Status:
    """The agent at a glance: RESOURCES maps name to counts, LIMITS name to (use or None, most)."""

    version: str
    protocol_versions: tuple[int, ...]
    epoch: str
    generation: int
    ready: bool
    resources: Mapping[str, Mapping[str, int]]
    limits: Mapping[str, tuple[int | None, int]]
    durations: Mapping[str, int]

    @classmethod
    def of_properties(cls, got: Mapping[str, Any]) -> Status:
        """Read the properties of the Manager."""
        limits = {}
        for key, value in got.items():
            if key.startswith("Max"):
                used = got.get(key.removeprefix("Max"))
                limits[key.removeprefix("Max")] = (used if isinstance(used, int) else None, value)
        return cls(
            version=got.get("AgentVersion", ""),
            protocol_versions=tuple(got.get("ProtocolVersions", ())),
            epoch=got.get("Epoch", ""),
            generation=got.get("Generation", 0),
            ready=got.get("Ready", False),
            resources=got.get("Resources", {}),
            limits=limits,
            durations={
                key: got[key]
                for key in ("ConfirmWithin", "ReclaimDeadline", "KillAfter", "OccupiedAfter")
                if key in got
            },
        )


@dataclass(frozen=True)
class Registration:
    """A provider's registration: PAGE_SIZE is the most devices in one page, GRACE is µs."""

    protocol_version: int
    epoch: str
    page_size: int
    grace: int


@dataclass(frozen=True)
class ReportAnswer:
    """What became of a report: VERSION is the one in force now."""

    accepted: bool
    version: int
    reason: str
