"""What can happen to the governor: each event is a fact or a checked call, with its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_agent.core.model import (
    Actor,
    AuditKind,
    Binding,
    DeviceRecord,
    Health,
    Holder,
    Instant,
    Opinion,
    Options,
    Origin,
    ProcessRef,
)

#: A number that stands for the caller's pending reply; the edge that made it redeems it.
Token = int


# -- facts ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Observed:
    """What a source has now: RECORDS new or changed, GONE no longer there.

    RESYNC says why a whole comparison was made ("" for ordinary news); COMPLETE that the
    source's first enumeration is done with this event.
    """

    at: Instant
    source: str
    records: tuple[DeviceRecord, ...] = ()
    gone: tuple[str, ...] = ()
    resync: str = ""
    complete: bool = False


@dataclass(frozen=True, slots=True)
class HealthSeen:
    """What the SOURCE of a device (``kernel`` or a provider) says of its health."""

    at: Instant
    source: str
    device: str
    health: Health
    reason: str = ""
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HealthJudged:
    """What ORIGIN, which looks at devices of all sources, says of the health of some."""

    at: Instant
    origin: Origin
    opinions: Mapping[str, Opinion]


@dataclass(frozen=True, slots=True)
class Happened:
    """Something befell the host that devices may suffer from; it is put into their histories
    beside what it caused.  WHAT is a word (``daemon-reload``, ``suspend``, ``resume``); LEASED:
    it concerns only devices that a lease has."""

    at: Instant
    what: str
    text: str
    leased: bool = False


@dataclass(frozen=True, slots=True)
class DeviceScan:
    """What a scan says of one device: who holds it, and whether any process that matters could
    not be read (UNINSPECTED: pid and uid of processes that were not readable)."""

    holders: tuple[Holder, ...] = ()
    uninspected: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Scanned:
    """A holder scan that began at STARTED (boot µs) and looked at DEVICES.

    FAILED is the reason why it could not be done at all; DEVICES then name what was asked.
    """

    at: Instant
    started: int
    devices: Mapping[str, DeviceScan]
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """Somebody opened an own node of DEVICE (inotify)."""

    at: Instant
    device: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Somebody closed an own node of DEVICE (inotify)."""

    at: Instant
    device: str


@dataclass(frozen=True, slots=True)
class ProviderGone:
    """Provider NAME left the bus and its grace time is over; or it came BACK."""

    at: Instant
    name: str
    back: bool = False


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """What LEASE was bound to has ended; HOW says what: pid, unit or connection."""

    at: Instant
    lease: str
    how: str


@dataclass(frozen=True, slots=True)
class AccessPrepared:
    """The effects of a grant are in place and its nodes agree with the kernel."""

    at: Instant
    lease: str
    manifest: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class AccessFailed:
    """The effects of a grant could not be made; they are undone already.  STORE: they could,
    but not the row ``granted``."""

    at: Instant
    lease: str
    reason: str
    store: bool = False


@dataclass(frozen=True, slots=True)
class AccessRevoked:
    """What LEASE gave is taken back, or could not be for the reason ERROR."""

    at: Instant
    lease: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class AccessAttached:
    """The network interfaces of LEASE are in the namespace of PROCESS (None: the host's), or, for the
    reason ERROR, perhaps not.  STORE: they are, but that could not be stored."""

    at: Instant
    lease: str
    process: ProcessRef | None
    error: str = ""
    store: bool = False


@dataclass(frozen=True, slots=True)
class AccessRenewed:
    """What LEASE gives was looked at and is all there (again), or it could not be made for the
    reason ERROR.  LOST are the devices of it that were away and from which nothing is given any more."""

    at: Instant
    lease: str
    error: str = ""
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodesTouched:
    """The mode, owner or ACL of a node of DEVICE was changed, or the node was made anew (inotify)."""

    at: Instant
    device: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """What became of a Terminate effect: SENT, or the reason why not."""

    at: Instant
    device: str
    holder: ProcessRef
    signal: str
    sent: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CordonStored:
    """The state directory took (ERROR empty) or refused a cordon or its removal."""

    at: Instant
    token: Token
    error: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines are looked at."""

    at: Instant


# -- calls (decoded, validated and authorized; the governor decides) --------------------------
@dataclass(frozen=True, slots=True)
class Allocate:
    """A request for COUNT devices of RESOURCE.  LEASE is a fresh random id for the grant."""

    at: Instant
    token: Token
    actor: Actor
    request_id: str
    fingerprint: str
    resource: str
    count: int
    options: Options
    lease: str
    request: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Confirm:
    """The owner takes the lease into use, rebinds or renews it."""

    at: Instant
    token: Token
    actor: Actor
    request_id: str
    fingerprint: str
    lease: str
    binding: Binding


@dataclass(frozen=True, slots=True)
class Release:
    """The owner gives the lease back."""

    at: Instant
    token: Token
    actor: Actor
    request_id: str
    fingerprint: str
    lease: str


@dataclass(frozen=True, slots=True)
class SetCordon:
    """An administrator cordons a device (REASON) or lifts the cordon (REASON None)."""

    at: Instant
    token: Token
    actor: Actor
    request_id: str
    fingerprint: str
    device: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Reap:
    """The named holders of DEVICE are to be ended."""

    at: Instant
    token: Token
    actor: Actor
    request_id: str
    fingerprint: str
    device: str
    targets: tuple[ProcessRef, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A call was refused before the governor saw it; only the audit hears of it."""

    at: Instant
    actor: Actor
    method: str
    error: str
    text: str
    request_id: str = ""
    suppressed: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the audit trail that changes nothing (reloaded, stopped, a user's own fault
    on DEVICE)."""

    at: Instant
    kind: AuditKind
    text: str
    priority: int = 5
    device: str = ""
    evidence: Mapping[str, str] = field(default_factory=dict)


Event = (
    Observed
    | HealthSeen
    | HealthJudged
    | Happened
    | Scanned
    | Opened
    | Closed
    | ProviderGone
    | OwnerGone
    | AccessPrepared
    | AccessFailed
    | AccessRevoked
    | AccessRenewed
    | AccessAttached
    | NodesTouched
    | Signalled
    | CordonStored
    | Tick
    | Allocate
    | Confirm
    | Release
    | SetCordon
    | Reap
    | Refused
    | Note
)
