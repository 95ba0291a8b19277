"""Records in the making: what `correlate` and its helpers hand to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_agent.core.model import Attribute, DeviceRecord, Node


@dataclass(frozen=True, slots=True)
class Draft:
    """A record before `correlate.finish`: VALUES are what its profile's templates may name.

    If COUNTED it has an index among those of its GROUP, by ORDER first, then in PCI order.
    """

    record: DeviceRecord
    values: Mapping[str, Attribute]
    env: Mapping[str, str]
    counted: bool
    group: str = ""
    order: int = 0


@dataclass(slots=True)
class Nodes:
    """The nodes that were found, by the rules of the profile."""

    found: list[Node] = field(default_factory=list)
    by_child: dict[str, Node] = field(default_factory=dict)
    missing: bool = False
    open_to_all: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
