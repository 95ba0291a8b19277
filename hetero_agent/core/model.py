"""The words of the agent as types: devices, nodes, leases, owners, bindings, holders.

All records are frozen: a change is a new record, so undoing one is putting the old one back.
Times are microseconds; ``boot`` counts on CLOCK_BOOTTIME and ``real`` on CLOCK_REALTIME.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

#: A resource limit that is none (RLIM_INFINITY of setrlimit(2)).
UNLIMITED = 2**64 - 1

#: What an attribute of a device may be: text, a non-negative integer, or a truth value.
Attribute = str | int | bool


class State(StrEnum):
    """Where a device is in its life (design section 3)."""

    PROBING = "probing"
    IDLE = "idle"
    ALLOCATING = "allocating"
    IN_USE = "in-use"
    RECLAIMING = "reclaiming"
    OCCUPIED = "occupied"
    FAULTY = "faulty"
    OFFLINE = "offline"
    LOST = "lost"


#: The states in which a lease has the device in its hands.
IN_HANDS = frozenset({State.ALLOCATING, State.IN_USE, State.LOST})


class Health(StrEnum):
    """What is known of a device's health; `UNKNOWN` is no failure."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Origin(StrEnum):
    """Who may say something of a device's health; the worst word counts.

    `SOURCE` is who reports the device: the kernel, which can only say that it is there, or its
    provider.  `PARENT` is the card that the unit is a part of.
    """

    SOURCE = "source"
    PROBE = "probe"
    KERNEL = "kernel"
    PARENT = "parent"


class LeaseState(StrEnum):
    """Where a lease is in its life."""

    QUEUED = "queued"
    PENDING = "pending"
    ACTIVE = "active"
    ENDING = "ending"
    ENDED = "ended"


class Result(StrEnum):
    """Why a lease ended; empty while it lives."""

    NONE = ""
    RELEASED = "released"
    OWNER_GONE = "owner-gone"
    EXPIRED = "expired"
    FAILED = "failed"
    UNPLUGGED = "unplugged"
    REBOOT = "reboot"
    REPLACED = "replaced"


class Role(StrEnum):
    """What an open of a node proves: `OWN` the use of this device, the others nothing."""

    OWN = "own"
    PARENT = "parent"
    CONTROL = "control"


class Obstacle(StrEnum):
    """Why a present device has nothing to grant; it is offline for that reason."""

    NONE = ""
    NO_DRIVER = "no-driver"
    NO_NODE = "no-node"
    VFIO = "vfio"


class Policy(StrEnum):
    """How Allocate chooses among the grantable devices."""

    LEAST_ALLOCATED = "least-allocated"
    PACKED = "packed"
    MOST_FREE_MEMORY = "most-free-memory"


class OnFault(StrEnum):
    """What a fault does to the lease that has the device."""

    MARK = "mark"
    KILL = "kill"


class OnEnd(StrEnum):
    """What the end of a lease does to processes that still hold a device."""

    WAIT = "wait"
    KILL = "kill"


class Netdev(StrEnum):
    """What becomes of a lease's network interfaces: `KEEP` leaves them on the host, `MOVE` puts them
    into the network namespace of the process that the lease is bound to."""

    KEEP = "keep"
    MOVE = "move"


class Instant(NamedTuple):
    """One moment on both clocks, in microseconds."""

    boot: int
    real: int


class Opinion(NamedTuple):
    """What one origin says of a device's health.

    CONFIRMING: suspect by a first sign that is being looked into: not granted, still counted.
    """

    health: Health
    reason: str = ""
    evidence: Mapping[str, str] = {}
    confirming: bool = False


#: No moment at all.
NEVER = Instant(0, 0)


@dataclass(frozen=True, slots=True)
class Node:
    """A device node.  KIND is ``char``, ``block`` or ``file`` (virtual devices only).

    MAJOR and MINOR are the numbers of a char or block node, 0 for a file; FSDEV and INODE name
    a file (st_dev, st_ino), 0 otherwise.  MODE is the permission bits, GID the node's group.
    """

    path: str
    role: Role
    kind: str = "char"
    major: int = 0
    minor: int = 0
    fsdev: int = 0
    inode: int = 0
    mode: int = 0
    gid: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells it from other nodes, whatever their paths: KIND with the number of a node, or
        with st_dev and inode of a file."""
        if self.kind == "file":
            return self.kind, self.fsdev, self.inode
        return self.kind, self.major, self.minor


@dataclass(frozen=True, slots=True)
class Joining:
    """How a variable's values of several devices become one, beside the commas between them.

    PREFIX stands once before all of them.  RENUMBERED: the values are the driver's numbers of the
    devices, which go in ascending order, and are 0 to N-1 where a device filter hides the others.
    """

    prefix: str = ""
    renumbered: bool = False


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What discovery or a provider states about one allocatable unit.

    ID is the place.  PARENT is the id of the card that this unit is a part or share of ("" for
    a whole card).  SOURCE is ``kernel`` or the provider's name.  OBSTACLE says why there is
    nothing to grant.  ENV, MOUNTS, OPTIONAL_MOUNTS, GROUPS and LIMITS (setrlimit(2)'s, by name) are
    what the profile adds to the manifest: ENV maps a variable to the value that stands for this device
    (values of several devices of a lease are joined by commas, and as JOINING says of the variable).
    Mounts are (host, container, options), and `*` in a host's name stands for any characters; the
    optional ones are left out where they don't exist.
    """

    id: str
    resource: str
    source: str = "kernel"
    profile: str = ""
    parent: str = ""
    aliases: tuple[str, ...] = ()
    vendor: str = ""
    model: str = ""
    driver: str = ""
    path: str = ""
    serial: str = ""
    stable_id: bool = True
    numa_nodes: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    obstacle: Obstacle = Obstacle.NONE
    health: Health = Health.HEALTHY
    health_reason: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    joining: Mapping[str, Joining] = field(default_factory=dict)
    mounts: tuple[tuple[str, str, str], ...] = ()
    optional_mounts: tuple[tuple[str, str, str], ...] = ()
    groups: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def own_nodes(self) -> tuple[Node, ...]:
        """The nodes whose open proves that this device is used."""
        return tuple(node for node in self.nodes if node.role is Role.OWN)


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process that can't be mistaken for a later one: pid and start time in clock ticks
    since boot (field 22 of /proc/PID/stat)."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class UnitRef:
    """One run of a systemd unit: its name and InvocationID (32 hex digits)."""

    name: str
    invocation: str


@dataclass(frozen=True, slots=True)
class ConnectionRef:
    """One connection of one life of a bus: unique name and the bus's GUID."""

    name: str
    bus: str


@dataclass(frozen=True, slots=True)
class Binding:
    """What a lease's life hangs on; each given part ends it.  TTL is in microseconds.

    CGROUP is the control group of the container that the process runs in, "" for none: what else
    runs in it is the lease's too.
    """

    pid: ProcessRef | None = None
    unit: UnitRef | None = None
    connection: ConnectionRef | None = None
    ttl: int = 0
    cgroup: str = ""

    def __bool__(self) -> bool:
        return bool(self.pid or self.unit or self.connection or self.ttl)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who did something, as the bus and /proc say; ``uid`` -1 is the agent itself.

    AUTHORITY names the proof of an administrator's right that this one call came with (a polkit
    action); "" means that uid and groups alone gave the right.
    """

    uid: int = -1
    pid: int = 0
    unit: str = ""
    bus_name: str = ""
    client: str = ""
    authority: str = ""


#: The agent's own doing (deadlines, discovery, scans).
AGENT = Actor()


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has an own node open or mapped.

    UIDS are the real, effective, saved and filesystem uid.  CGROUP is the path in the unified
    (or systemd) hierarchy, UNIT the unit it lies in, ANCESTORS the processes above it, nearest
    first.  SINCE is the boot time in microseconds at which a scan first saw it on this device.
    SERVICE_UID is the uid of the unit's main process, -1 if it isn't known.  EVIDENCE is what
    else shows how it uses the device (docs/reclaim.md); nothing is decided by it.
    """

    pid: int
    start: int
    uids: tuple[int, int, int, int] = (0, 0, 0, 0)
    exe: str = ""
    comm: str = ""
    unit: str = ""
    cgroup: str = ""
    session: int = 0
    ancestors: tuple[ProcessRef, ...] = ()
    mapped: bool = False
    since: int = 0
    service_uid: int = -1
    evidence: Mapping[str, str] = field(default_factory=dict)

    @property
    def ref(self) -> ProcessRef:
        """The process behind it."""
        return ProcessRef(self.pid, self.start)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of Allocate, decoded and checked; the closed set of design section 7.

    Durations are microseconds; CONFIRM_WITHIN 0 means the configured one.
    """

    policy: Policy = Policy.LEAST_ALLOCATED
    require: Mapping[str, Attribute] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    client: str = ""
    label: str = ""
    owner_uid: int | None = None
    binding: Binding = field(default_factory=Binding)
    confirm: bool = False
    confirm_within: int = 0
    wait: int = 0
    on_fault: OnFault = OnFault.MARK
    on_end: OnEnd = OnEnd.WAIT
    netdev: Netdev = Netdev.KEEP


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The space a request id is unique in, and the id."""

    uid: int
    client: str
    method: str
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A mutating call that was answered (or is being granted).

    FINGERPRINT is a digest of the arguments.  BODY is the reply as JSON text ("" while the
    grant is being prepared).  LEASE is the lease it concerns ("" for none).  ENDED says that
    this lease has ended: the id is spent.  BOOT is the boot time of the answer, then of the
    end; a day after it the record is forgotten.  OWNER is the uid of the lease's owner.
    """

    key: RequestKey
    fingerprint: str
    body: str = ""
    lease: str = ""
    ended: bool = False
    boot: int = 0
    owner: int = -1


@dataclass(frozen=True, slots=True)
class Lease:
    """The grant of devices, all or none, to an owner.

    GRANTED is false between the row ``prepared`` and the row ``granted``.  DEADLINE (boot, µs;
    0 none) is the end of ``confirm-within`` while pending and of the ttl while active.
    RETURNED are the devices that have settled since the lease ended; the lease is gone when
    all have.  MANIFEST is the JSON object that the owner got.
    """

    id: str
    key: RequestKey
    resource: str
    devices: tuple[str, ...]
    uid: int
    client: str
    label: str
    state: LeaseState
    created: Instant
    granted: bool = False
    confirmed: bool = False
    result: Result = Result.NONE
    ended: Instant = NEVER
    deadline: int = 0
    binding: Binding = field(default_factory=Binding)
    on_fault: OnFault = OnFault.MARK
    on_end: OnEnd = OnEnd.WAIT
    creator: Actor = AGENT
    request: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    netdev: Netdev = Netdev.KEEP

    @property
    def alive(self) -> bool:
        """Whether it still entitles its owner to the devices."""
        return self.state in (LeaseState.PENDING, LeaseState.ACTIVE)


@dataclass(frozen=True, slots=True)
class Revocation:
    """What an ended lease gave, or a live one of devices that it lost, is being taken back.

    ERROR says why the last try failed, WAITING that a device of it was found free of holders
    meanwhile and is still not returned.  AWAY are devices of it that went meanwhile.
    """

    error: str = ""
    waiting: bool = False
    away: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Debt:
    """A device whose return is not proven yet.

    LEASE is the ended lease ("" after Reap of an outsider), UID its uid, SINCE the boot time
    from which a clean scan must have started, DEADLINE the boot time after which the device is
    faulty; OVERDUE is set then.  INCOMPLETE says that the last scan could not see all that
    matters.  With ON_END kill the lease's own holders are ended, with TARGETS (Reap) the named
    ones.  NODES are the own nodes to look for, even if the record has none any more.  KIN are
    processes that were seen to be the lease's.
    """

    device: str
    lease: str
    uid: int
    since: int
    deadline: int
    overdue: bool = False
    incomplete: bool = False
    on_end: OnEnd = OnEnd.WAIT
    targets: tuple[ProcessRef, ...] = ()
    nodes: tuple[Node, ...] = ()
    binding: Binding = field(default_factory=Binding)
    kin: tuple[ProcessRef, ...] = ()


class AuditKind(StrEnum):
    """The kinds of audit records; each has a MESSAGE_ID in the journal."""

    TRANSITION = "transition"
    APPEARED = "device-appeared"
    REPLACED = "device-replaced"
    GONE = "device-gone"
    GRANTED = "lease-granted"
    CONFIRMED = "lease-confirmed"
    ENDED = "lease-ended"
    EXPIRED = "lease-expired"
    REFUSED = "request-refused"
    CORDON = "cordon"
    HEALTH = "health"
    INTRUDER = "intruder"
    ORPHAN = "orphan"
    SIGNALLED = "process-signalled"
    PROVIDER = "provider"
    RESYNC = "resync"
    STARTED = "agent-started"
    STOPPED = "agent-stopped"
    STORE = "store"
    RELOADED = "config-reloaded"
    CORRELATION = "correlation"
    APPLICATION_FAULT = "application-fault"
    ACCESS = "access"
    EXPOSURE = "exposure"


#: What the history of a device is made of.
HISTORIC = frozenset({AuditKind.TRANSITION, AuditKind.CORRELATION})


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One line of the audit trail.  SEQUENCE is gapless over restarts within a boot of the
    ledger; TOOK is how long the step took in microseconds: the time in the state left, or from
    the request to its answer.  PRIORITY is syslog's (3 err, 4 warning, 5 notice, 6 info)."""

    sequence: int
    generation: int
    at: Instant
    kind: AuditKind
    message: str
    priority: int = 6
    device: str = ""
    serial: str = ""
    lease: str = ""
    from_state: str = ""
    to_state: str = ""
    trigger: str = ""
    reason: str = ""
    actor: Actor = AGENT
    request_id: str = ""
    took: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cordon:
    """An administrator's word that a device is not to be granted; follows place and serial."""

    device: str
    serial: str
    reason: str
    uid: int
    real: int


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the governor knows it: the record, its state and what that rests on.

    APPEARED, LAST_OPEN and LAST_CLEAN are boot times: since when its nodes are as they are, when
    somebody last opened one (or may have, unseen by a scan that failed), and when the last scan that
    found nobody began.  SUSPECTED are the
    holders outside any lease, OCCUPIED says that they were there twice.  OPINIONS are what HEALTH
    is made of; CONFIRMING says that it is suspect by a first sign only, TOLD that its users heard
    of a fault that is not over.  HEALTH_BEFORE is what the provider had said before it went.  COUNT
    is how often it was granted.  SYSTEM are holders that the system itself keeps, and that don't
    count.  FORMER are own nodes that it had and lost while the present lease has it.
    """

    record: DeviceRecord
    present: bool
    state: State
    reason: str
    since: Instant
    health: Health = Health.UNKNOWN
    health_reason: str = ""
    opinions: Mapping[Origin, Opinion] = field(default_factory=dict)
    confirming: bool = False
    told: bool = False
    cordon: Cordon | None = None
    lease: str = ""
    probed: bool = True
    scanned: bool = False
    appeared: int = 0
    last_open: int = 0
    last_clean: int = 0
    suspected: tuple[Holder, ...] = ()
    occupied: bool = False
    provider_gone: bool = False
    health_before: Health = Health.UNKNOWN
    holders: tuple[Holder, ...] = ()
    uninspected: bool = False
    count: int = 0
    system: tuple[Holder, ...] = ()
    former: tuple[Node, ...] = ()

    @property
    def id(self) -> str:
        """The device's id: its place."""
        return self.record.id

    @property
    def dirty(self) -> bool:
        """Whether somebody opened it since the last clean scan began."""
        return self.last_open >= self.last_clean
