"""What the governor wants done after its changes are stored; the edges carry it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hetero_agent.core.events import Token
from hetero_agent.core.model import (
    AuditRecord,
    Binding,
    Cordon,
    Debt,
    DeviceRecord,
    Holder,
    Lease,
    ProcessRef,
    RequestKey,
    RequestRecord,
)


class ErrorKind(StrEnum):
    """The error names of the bus, without their common prefix (design section 7)."""

    NOT_READY = "NotReady"
    INVALID_ARGUMENT = "InvalidArgument"
    NOT_FOUND = "NotFound"
    UNAVAILABLE = "Unavailable"
    LIMIT_EXCEEDED = "LimitExceeded"
    QUEUE_FULL = "QueueFull"
    NOT_AUTHORIZED = "NotAuthorized"
    NOT_OWNER = "NotOwner"
    REQUEST_CONFLICT = "RequestConflict"
    REQUEST_SPENT = "RequestSpent"
    LEASE_ENDED = "LeaseEnded"
    TIMEOUT = "Timeout"
    PROTOCOL_UNSUPPORTED = "ProtocolUnsupported"
    NOT_SUPPORTED = "NotSupported"
    STORE_FAILED = "StoreFailed"
    INTERNAL = "Internal"


# -- answers ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Reply:
    """Answer TOKEN with BODY, the JSON text that was stored (the same bytes for a retry)."""

    token: Token
    body: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer TOKEN with an error that says what to do."""

    token: Token
    error: ErrorKind
    text: str


# -- work ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PrepareAccess:
    """Make what the lease gives and check its nodes; answer AccessPrepared or AccessFailed."""

    lease: Lease
    records: tuple[DeviceRecord, ...]


@dataclass(frozen=True, slots=True)
class RevokeAccess:
    """Undo what PrepareAccess made for this lease, whole or half; answer AccessRevoked."""

    lease: str


@dataclass(frozen=True, slots=True)
class RenewAccess:
    """See that all is there that the lease gives, and nothing of the devices that it lost; answer
    AccessRenewed."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class AttachAccess:
    """Have the network interfaces of this lease in the namespace of PROCESS (None: the host's); answer
    AccessAttached."""

    lease: Lease
    process: ProcessRef | None


@dataclass(frozen=True, slots=True)
class RequestScan:
    """Look for holders of these devices (none: of all) as soon as possible."""

    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchOwner:
    """Report OwnerGone when any part of BINDING ends; replaces an earlier watch."""

    lease: str
    binding: Binding


@dataclass(frozen=True, slots=True)
class UnwatchOwner:
    """Forget the watch of this lease."""

    lease: str


@dataclass(frozen=True, slots=True)
class WatchNodes:
    """Report opens and closes of the own nodes of this device (RECORD None: stop)."""

    device: str
    record: DeviceRecord | None


@dataclass(frozen=True, slots=True)
class WatchHealth:
    """Probe this device, as RECORD describes it now (RECORD None: stop).  REPAIRED: somebody
    vouches for it, as if it had been reset."""

    device: str
    record: DeviceRecord | None
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGNAL (``TERM`` or ``KILL``) to HOLDER if it still is that process and still holds
    DEVICE; LEASE_UID is the uid it must have with all its uids (None: any)."""

    device: str
    lease: str
    holder: Holder
    signal: str
    uid: int | None


@dataclass(frozen=True, slots=True)
class StoreCordon:
    """Make a cordon (or its removal) outlive a reboot; answer CordonStored.  PLACE is what it is
    kept under: ``serial:`` and the serial once that is known, else the device's id."""

    token: Token
    place: str
    cordon: Cordon | None


# -- news for the bus -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DeviceAdded:
    """A device object appeared."""

    device: str


@dataclass(frozen=True, slots=True)
class DeviceRemoved:
    """A device object is gone."""

    device: str


@dataclass(frozen=True, slots=True)
class DeviceChanged:
    """Properties of a device changed (which ones, the bus finds out)."""

    device: str


@dataclass(frozen=True, slots=True)
class StateChanged:
    """A device went from one state to another; DETAILS is public (no pids, no labels)."""

    device: str
    from_state: str
    to_state: str
    reason: str
    details: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaseAdded:
    """A lease object appeared."""

    lease: str


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    """Properties of a lease changed."""

    lease: str


@dataclass(frozen=True, slots=True)
class LeaseRemoved:
    """The last device of a lease has settled: LeaseEnded, then the object goes."""

    lease: str
    result: str


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """HealthEvent: a device became unhealthy or healthy again."""

    device: str
    health: str
    reason: str
    lease: str
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConflictSeen:
    """Conflict: theirs and ours disagree (``intruder``: a holder that is not the lease's)."""

    kind: str
    lease: str
    device: str
    theirs: str
    ours: str


@dataclass(frozen=True, slots=True)
class OrphanFound:
    """Processes outside any lease hold a device."""

    device: str
    count: int


Effect = (
    Reply
    | Refuse
    | PrepareAccess
    | RevokeAccess
    | RenewAccess
    | AttachAccess
    | RequestScan
    | WatchOwner
    | UnwatchOwner
    | WatchNodes
    | WatchHealth
    | Terminate
    | StoreCordon
    | DeviceAdded
    | DeviceRemoved
    | DeviceChanged
    | StateChanged
    | LeaseAdded
    | LeaseChanged
    | LeaseRemoved
    | HealthChanged
    | ConflictSeen
    | OrphanFound
)


@dataclass(slots=True)
class Changes:
    """What one event changed and the ledger must hold before anything is answered.

    A value of None means the row goes.  RECORDS are the records of devices that a lease or a
    debt names, so that a restart knows them before their source has spoken.  COUNTS are
    allocation counts by serial, else id (the lasting store's).  SEQUENCE and GENERATION are
    the last ones used.
    """

    leases: dict[str, Lease | None] = field(default_factory=dict)
    debts: dict[str, Debt | None] = field(default_factory=dict)
    requests: dict[RequestKey, RequestRecord | None] = field(default_factory=dict)
    audits: list[AuditRecord] = field(default_factory=list)
    records: dict[str, DeviceRecord | None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sequence: int = 0
    generation: int = 0

    def __bool__(self) -> bool:
        return bool(self.leases or self.debts or self.requests or self.audits or self.records or self.counts)


@dataclass(slots=True)
class Outcome:
    """The governor's answer to one event: store CHANGES, then carry out EFFECTS in order."""

    changes: Changes = field(default_factory=Changes)
    effects: list[Effect] = field(default_factory=list)


@dataclass(slots=True)
class Restored:
    """What the ledger and the lasting store give back at start.

    OTHER_BOOT are the leases, OTHER_BOOT_DEBTS the devices of debts, whose rows were written in
    another boot: their processes are gone and their boot times mean nothing.  COUNTS and HISTORY
    are by serial, else id.  SEQUENCE and GENERATION are the last ones that may have been used.
    NOTES say what was damaged, quarantined or set aside.
    """

    leases: list[Lease] = field(default_factory=list)
    debts: list[Debt] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    records: list[DeviceRecord] = field(default_factory=list)
    cordons: list[Cordon] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    history: dict[str, list[AuditRecord]] = field(default_factory=dict)
    other_boot: set[str] = field(default_factory=set)
    other_boot_debts: set[str] = field(default_factory=set)
    sequence: int = 0
    generation: int = 0
    notes: list[str] = field(default_factory=list)


class Refusal(Exception):
    """A call is refused: KIND is the error's name, TEXT says the cause and the next step."""

    def __init__(self, kind: ErrorKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
