"""The agent's signals, as types.  Device and lease are ids ("" for none), not paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hetero_agent import names
from hetero_agent.client.contract import OBJECT_MANAGER, PROPERTIES
from hetero_agent.client.results import device_of, lease_of


@dataclass(frozen=True)
class Event:
    """Anything that a watch yields.  INTERFACE is "" for what is no signal of the agent."""

    interface: ClassVar[str] = ""
    member: ClassVar[str] = ""


@dataclass(frozen=True)
class AgentChanged(Event):
    """The agent came (OWNER is its unique name) or went (OWNER ""): what was read before may be
    out of date.  Every watch yields it."""

    owner: str


@dataclass(frozen=True)
class Missed(Event):
    """COUNT events were dropped because the reader was slower than the agent: read anew."""

    count: int


@dataclass(frozen=True)
class StateChanged(Event):
    """A device went from one state to another."""

    interface = names.DEVICE
    member = "StateChanged"
    device: str
    from_state: str
    to_state: str
    reason: str
    details: Mapping[str, Any]

    @classmethod
    def of(cls, path: str, body: Sequence[Any]) -> StateChanged:
        """Read the signal."""
        return cls(device_of(path), *body)


@dataclass(frozen=True)
class InterfacesAdded(Event):
    """A device or lease object appeared, with its properties."""

    interface = OBJECT_MANAGER
    member = "InterfacesAdded"
    path: str
    properties: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, _path: str, body: Sequence[Any]) -> InterfacesAdded:
        """Read the signal."""
        return cls(*body)


@dataclass(frozen=True)
class InterfacesRemoved(Event):
    """A device or lease object is gone."""

    interface = OBJECT_MANAGER
    member = "InterfacesRemoved"
    path: str
    interfaces: Sequence[str]

    @classmethod
    def of(cls, _path: str, body: Sequence[Any]) -> InterfacesRemoved:
        """Read the signal."""
        return cls(*body)


@dataclass(frozen=True)
class PropertiesChanged(Event):
    """Properties of an object changed."""

    interface = PROPERTIES
    member = "PropertiesChanged"
    path: str
    of_interface: str
    changed: Mapping[str, Any]
    invalidated: Sequence[str]

    @classmethod
    def of(cls, path: str, body: Sequence[Any]) -> PropertiesChanged:
        """Read the signal."""
        return cls(path, *body)


@dataclass(frozen=True)
class Report(Event):
    """What the node has; replaces the report before."""

    interface = names.MANAGER
    member = "Report"
    protocol_version: int
    epoch: str
    generation: int
    complete: bool
    resources: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, _path: str, body: Sequence[Any]) -> Report:
        """Read the signal."""
        return cls(*body)


@dataclass(frozen=True)
class HealthEvent(Event):
    """A device became unhealthy, or healthy again."""

    interface = names.MANAGER
    member = "HealthEvent"
    device: str
    health: str
    reason: str
    lease: str
    evidence: Mapping[str, Any]

    @classmethod
    def of(cls, _path: str, body: Sequence[Any]) -> HealthEvent:
        """Read the signal."""
        device, health, reason, lease, evidence = body
        return cls(device_of(device), health, reason, lease_of(lease), evidence)


@dataclass(frozen=True)
class Conflict(Event):
    """Somebody's idea of a device and the agent's disagree."""

    interface = names.MANAGER
    member = "Conflict"
    kind: str
    lease: str
    device: str
    theirs: str
    ours: str

    @classmethod
    def of(cls, _path: str, body: Sequence[Any]) -> Conflict:
        """Read the signal."""
        kind, lease, device, theirs, ours = body
        return cls(kind, lease_of(lease), device_of(device), theirs, ours)


@dataclass(frozen=True)
class LeaseEnded(Event):
    """The last device of an ended lease has settled."""

    interface = names.MANAGER
    member = "LeaseEnded"
    lease: str
    result: str

    @classmethod
    def of(cls, _path: str, body: Sequence[Any]) -> LeaseEnded:
        """Read the signal."""
        lease, result = body
        return cls(lease_of(lease), result)


@dataclass(frozen=True)
class OrphanFound(Event):
    """COUNT processes outside any lease hold a device."""

    interface = names.MANAGER
    member = "OrphanFound"
    device: str
    count: int

    @classmethod
    def of(cls, _path: str, body: Sequence[Any]) -> OrphanFound:
        """Read the signal."""
        device, count = body
        return cls(device_of(device), count)


#: The events that are signals of the agent.
SIGNALS = (
    StateChanged,
    InterfacesAdded,
    InterfacesRemoved,
    PropertiesChanged,
    Report,
    HealthEvent,
    Conflict,
    LeaseEnded,
    OrphanFound,
)

_BY_NAME = {(kind.interface, kind.member): kind for kind in SIGNALS}


def from_signal(interface: str, member: str, path: str, body: Sequence[Any]) -> Event | None:
    """Return the event of a signal, None for one that is not in the contract.

    Raises TypeError or ValueError for a body of another shape.
    """
    kind = _BY_NAME.get((interface, member))
    return None if kind is None else kind.of(path, body)
