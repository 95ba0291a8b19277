"""What the hands have made on the host, so that it can be undone whatever happens.

One file a lease, named by its id, written before anything of it is made; the directory is root's and
goes with the boot, as all that stands in it does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_agent import names
from hetero_agent.access.grant import GrantedNode
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.access")

VERSION: Final = 1

_NEW: Final = ".new"


@dataclass(frozen=True, slots=True)
class Made:
    """What a lease has on the host: the CDI DIRECTORY that its specification lies in ("" for none),
    and the NODES on which UID has an ACL entry that is ours."""

    uid: int
    directory: str = ""
    nodes: tuple[GrantedNode, ...] = ()


class Records:
    """The records in DIRECTORY, read once: their only writer is this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, Made] | None = None

    def __getitem__(self, lease: str) -> Made:
        return self._all()[lease]

    def __contains__(self, lease: str) -> bool:
        return lease in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._all()))

    def get(self, lease: str) -> Made | None:
        """The record of LEASE, if there is one."""
        return self._all().get(lease)

    def items(self) -> Mapping[str, Made]:
        """All records by lease."""
        return self._all()

    def write(self, lease: str, made: Made) -> None:
        """Have MADE stand in the record of LEASE.  Raises OSError; the record is as before then."""
        known = self._all()
        if known.get(lease) == made:
            return
        text = json.dumps({"version": VERSION, "uid": made.uid, "cdi": made.directory, "nodes": made.nodes})
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = self._directory / (lease + _NEW)
        # no fsync: this is a tmpfs, and what is lost with the boot is lost with what it is about
        new.write_text(text, encoding="utf-8")
        new.replace(self._directory / lease)
        known[lease] = made

    def remove(self, lease: str) -> None:
        """Forget LEASE.  Raises OSError."""
        (self._directory / lease).unlink(missing_ok=True)
        self._all().pop(lease, None)

    def _all(self) -> dict[str, Made]:
        if self._known is None:
            self._known = dict(self._read())
        return self._known

    def _read(self) -> Iterator[tuple[str, Made]]:
        try:
            entries = sorted(entry.name for entry in os.scandir(self._directory))
        except FileNotFoundError:
            return
        for name in entries:
            path = self._directory / name
            if name.endswith(_NEW):
                # never came into force
                with contextlib.suppress(OSError):
                    path.unlink()
            elif names.LEASE_ID.fullmatch(name):
                try:
                    yield name, _parse(path.read_text(encoding="utf-8"))
                except (OSError, ValueError, TypeError, KeyError) as error:
                    log.error("the record %s can't be read: %s", printable(path), printable(error))


def _parse(text: str) -> Made:
    data = json.loads(text)
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']} instead of {VERSION}")
    return Made(int(data["uid"]), str(data["cdi"]), tuple(GrantedNode(*row) for row in data["nodes"]))
