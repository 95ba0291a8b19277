"""What the agent has decided that a lease gives, as far as the host has to be changed for it.

This is all that the hands (hands.py) go by: whoever carries it out needs no ledger and no bus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class GrantedNode(NamedTuple):
    """One row of a manifest's ``nodes``: KIND is ``char``, ``block`` or ``file``; MAJOR and MINOR
    are 0 for a file."""

    device: str
    path: str
    role: str
    kind: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease and what it gives: UID is its owner's, MANIFEST the JSON object of manifest.py."""

    lease: str
    uid: int
    manifest: Mapping[str, object] = field(default_factory=dict)

    @property
    def interfaces(self) -> tuple[tuple[str, str], ...]:
        """The network interfaces of the manifest: device and name."""
        rows = self.manifest.get("netdevs", ())
        assert isinstance(rows, Sequence)
        return tuple((device, name) for device, name in rows)

    @property
    def nodes(self) -> tuple[GrantedNode, ...]:
        """The nodes of the manifest."""
        rows = self.manifest.get("nodes", ())
        assert isinstance(rows, Sequence)
        return tuple(GrantedNode(*row) for row in rows)
