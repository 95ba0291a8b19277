"""What the engine needs of each edge, as types; the edges fit them without importing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hetero_agent.core.effects import Changes, Effect, Restored, Terminate
from hetero_agent.core.events import Event, Token
from hetero_agent.core.model import (
    AuditRecord,
    Binding,
    Cordon,
    Device,
    DeviceRecord,
    Holder,
    Instant,
    Lease,
    Node,
    Options,
    ProcessRef,
    RequestKey,
)

#: Hand an event to the engine, from the loop's thread.
Submit = Callable[[Event], None]


class Ledger(Protocol):
    """The lease ledger with the audit outbox, SQLite in the runtime directory."""

    def load(self, now: Instant) -> Restored:
        """Read all; rows of another boot are given as they are (the governor closes them)."""

    def commit(self, changes: Changes) -> None:
        """Store all of CHANGES in one transaction.  Raises OSError; nothing is stored then."""

    def outbox(self, after: int, limit: int) -> list[AuditRecord]:
        """Return records not yet taken by the journal, SEQUENCE above AFTER, in order."""

    def taken(self, sequences: Sequence[int]) -> None:
        """Forget outbox rows that the journal has taken."""

    def close(self) -> None:
        """Close the file; leases stay in it."""


class Lasting(Protocol):
    """What outlives a reboot; a thread writes it, the loop never waits."""

    def store_cordon(self, device: str, cordon: Cordon | None, done: Callable[[str], None]) -> None:
        """Write a cordon; DONE is called on the loop with the error text, "" for success."""

    def note(self, changes: Changes) -> None:
        """Take counts and history of CHANGES along; written soon, lost without harm."""

    def close(self) -> None:
        """Write what is pending (bounded time) and close."""


class Access(Protocol):
    """The one door to what a lease gives."""

    async def prepare(self, lease: Lease, records: Sequence[DeviceRecord]) -> dict[str, object]:
        """Make the effects, check the nodes against the kernel, return the manifest.
        Raises AccessError (ValueError) with all undone."""

    async def renew(self, lease: Lease) -> None:
        """Make again what is missing of the effects of a granted lease, and undo those for devices
        that it lost.  Raises AccessError."""

    async def attach(self, lease: Lease, process: ProcessRef | None) -> None:
        """Have the network interfaces of a granted lease in the namespace of PROCESS, the host's for
        None.  Raises AccessError; they are on the host then."""

    async def revoke(self, lease: str) -> None:
        """Undo, whole or half, as often as called.  Raises AccessError: it is to be tried again."""

    async def sweep(self, live: frozenset[str]) -> None:
        """Undo what was made for leases other than these.  Raises AccessError."""


class Holders(Protocol):
    """Who has nodes open, whose process it is, and ending it."""

    def request_scan(self, targets: dict[str, tuple[Node, ...]]) -> None:
        """Have these devices scanned soon; answers with Scanned."""

    def watch_nodes(self, device: str, record: DeviceRecord | None) -> None:
        """Report Opened and Closed for the own nodes of a device."""

    def watch_process(self, lease: str, binding: Binding) -> None:
        """Report OwnerGone(lease, "pid") when the bound process ends, at once if it has."""

    def unwatch_process(self, lease: str) -> None:
        """Forget it."""

    def terminate(self, order: Terminate, nodes: tuple[Node, ...]) -> None:
        """Carry out a Terminate; answers with Signalled."""


class HealthWatch(Protocol):
    """Probes devices and hears what the kernel says of them."""

    def watch(self, device: str, record: DeviceRecord | None, repaired: bool) -> None:
        """Probe a device (None: no more); answers with HealthJudged, the first time soon."""


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """Who may open a node.  MODE has the owning group's own rights as the group's bits, whatever
    the mask of an ACL says; ENTRIES are the rights (``rw-``) of each uid with an entry of its own.
    REMARKS are what is out of order (``wrong``) or worth knowing (``note``), with the words for it."""

    path: str
    role: str
    mode: int
    uid: int
    gid: int
    entries: Mapping[int, str]
    remarks: tuple[tuple[str, str], ...] = ()


class Exposure(Protocol):
    """Who may open the nodes of devices, by the host's own modes and ACLs."""

    async def look(self, device: str) -> Sequence[NodeAccess]:
        """Look at the nodes of a device now; those that can't be looked at are left out."""


class Publisher(Protocol):
    """The bus side of the news effects."""

    def publish(self, effects: Sequence[Effect]) -> None:
        """Update objects and queue signals; PropertiesChanged goes once per object and turn."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What /proc says of a process that a caller wants to bind: its real, effective, saved and
    filesystem uid, its control group, the systemd unit that this lies in ("" for none), and the uid
    that owns its user namespace (-1: not told)."""

    ref: ProcessRef
    uids: tuple[int, int, int, int]
    unit: str = ""
    cgroup: str = ""
    owner: int = -1


@dataclass(frozen=True, slots=True)
class Explanation:
    """What Explain answers.  VERDICT is ``now``, ``later`` (enough devices exist, but not all
    are free) or ``never`` (this host can't satisfy it); CHOSEN what a grant would take now;
    NOTE what the policy could not do; DEVICES (id, state, eligible, reason) of the resource."""

    verdict: str
    text: str
    chosen: tuple[str, ...] = ()
    note: str = ""
    devices: tuple[tuple[str, str, bool, str], ...] = field(default=())


class View(Protocol):
    """What the bus may read of the governor (never changes anything)."""

    @property
    def epoch(self) -> str:
        """The name of this life of the agent."""

    @property
    def generation(self) -> int:
        """Grows with every change."""

    @property
    def ready(self) -> bool:
        """Whether the first enumeration is complete."""

    @property
    def devices(self) -> Mapping[str, Device]:
        """All devices by id."""

    @property
    def leases(self) -> Mapping[str, Lease]:
        """All leases that have devices out, by id."""

    def remembers(self, key: RequestKey) -> bool:
        """Whether a call with this id was answered, or is being granted."""

    def resources(self) -> Mapping[str, Mapping[str, int]]:
        """Per resource: one count per state, plus ``total`` and ``allocatable``."""

    def find_device(self, name: str) -> Device | None:
        """The device with this id or alias."""

    def blocked_by(self, device: str) -> tuple[str, ...]:
        """The relatives and twins that keep it from being granted."""

    def role_of(self, device: Device, holder: Holder) -> str:
        """What a holder counts as: lease, leftover, intruder, outsider or system."""

    def history(self, device: str, most: int) -> Sequence[AuditRecord]:
        """Its last transitions, oldest first, at most MOST (and never over 20)."""

    def explain(self, resource: str, count: int, options: Options) -> Explanation:
        """What Allocate would do now, by the same code path; grants nothing."""

    def usage(self) -> Mapping[str, int]:
        """What is in use of each limit, by the limit's key (leases, waiting, ...)."""


class Engine(Protocol):
    """The one writer, as the bus sees it."""

    @property
    def view(self) -> View:
        """The governor, to read."""

    def now(self) -> Instant:
        """This moment."""

    def submit(self, event: Event) -> None:
        """Take a fact."""

    async def call(self, make: Callable[[Token], Event]) -> str:
        """Submit the call that MAKE builds around a fresh token and return the reply's JSON
        text.  Raises Refusal."""
