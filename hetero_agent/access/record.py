"""What the hands have made on the host, so that it can be undone whatever happens.

One file a lease, named by its id, written before anything of it is made; the directory is root's and
goes with the boot, as all that stands in it does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_agent import names
from hetero_agent.access.grant import GrantedNode
from hetero_agent.access.manifest import AccessError
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.access")

VERSION: Final = 1

_NEW: Final = ".new"
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE: Final = 0o600


#: What tells a node from others: path, kind, numbers; the same one in another path has its own ACL.
Place = tuple[str, str, int, int]


def place(node: GrantedNode) -> Place:
    """Return what tells NODE from others, whichever device or role it is granted for."""
    return node.path, node.kind, node.major, node.minor


@dataclass(frozen=True, slots=True)
class Made:
    """What a lease has on the host: the CDI DIRECTORY that its specification lies in ("" for none),
    and the NODES on which UID has an ACL entry that is ours."""

    uid: int
    directory: str = ""
    nodes: tuple[GrantedNode, ...] = ()


class Records:
    """The records in DIRECTORY, read once: their only writer is this process.  All that looks at them
    raises AccessError as long as they can't be read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, Made] | None = None
        #: How many leases of a uid have a node.
        self._users: Counter[tuple[Place, int]] = Counter()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._all()))

    def get(self, lease: str) -> Made | None:
        """The record of LEASE, if there is one."""
        return self._all().get(lease)

    def has_another(self, lease: str, node: GrantedNode, uid: int) -> bool:
        """Whether another lease than LEASE has an entry of UID's on NODE."""
        made = self._all().get(lease)
        mine = made is not None and made.uid == uid and place(node) in map(place, made.nodes)
        return self._users[place(node), uid] > mine

    def write(self, lease: str, made: Made) -> None:
        """Have MADE stand in the record of LEASE.  Raises OSError; the record is as before then."""
        known = self._all()
        if known.get(lease) == made:
            return
        text = json.dumps({"version": VERSION, "uid": made.uid, "cdi": made.directory, "nodes": made.nodes})
        path = os.path.join(self._directory, lease)  # noqa: PTH118 (each grant waits for this)
        new = path + _NEW
        # no fsync: this is a tmpfs, and what is lost with the boot is lost with what it is about
        try:
            file = os.open(new, _WRITE, _MODE)
        except FileNotFoundError:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            file = os.open(new, _WRITE, _MODE)
        with open(file, "wb") as content:  # noqa: PTH123
            content.write(text.encode())
        os.replace(new, path)  # noqa: PTH105
        self._forget(lease)
        self._learn(lease, made)

    def remove(self, lease: str) -> None:
        """Forget LEASE.  Raises OSError."""
        (self._directory / lease).unlink(missing_ok=True)
        self._forget(lease)

    def _all(self) -> dict[str, Made]:
        if self._known is None:
            try:
                found = list(self._read())
            except OSError as error:
                # such as for want of descriptors: they are there, and are looked for again the next time
                raise AccessError(f"the records of leases can't be read now: {error.strerror}") from error
            self._known = {}
            for lease, made in found:
                self._learn(lease, made)
        return self._known

    def _learn(self, lease: str, made: Made) -> None:
        self._all()[lease] = made
        self._users.update((place(node), made.uid) for node in made.nodes)

    def _forget(self, lease: str) -> None:
        made = self._all().pop(lease, None)
        if made is None:
            return
        for node in made.nodes:
            key = (place(node), made.uid)
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]

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
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    log.error("the record %s can't be read: %s", printable(path), printable(error))


def _parse(text: str) -> Made:
    data = json.loads(text)
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']} instead of {VERSION}")
    return Made(int(data["uid"]), str(data["cdi"]), tuple(GrantedNode(*row) for row in data["nodes"]))
