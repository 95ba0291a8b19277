"""The hands: what a lease changes on the host, made and undone.  Synchronous, and root's work.

Each step is written into the record (record.py) before it is made, and is undone by the record
alone; so neither a crash nor a grant that nobody remembers leaves anything behind.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from hetero_agent.access import acl, cdi
from hetero_agent.access.grant import Grant, GrantedNode
from hetero_agent.access.manifest import AccessError, each
from hetero_agent.access.record import Made, Records, place
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.access")


class Hands:
    """Makes what grants give, with their records in RECORDS.

    SPECIFICATIONS is the directory of CDI specifications, None for none, HOOK the program that they
    name; with ENTRIES a lease's uid gets an entry in the access control lists of its nodes.
    """

    def __init__(self, records: Path, specifications: Path | None, entries: bool, hook: cdi.Hook) -> None:
        self._records = Records(records)
        self._specifications = specifications
        self._entries = entries
        self._hook = hook

    def prepare(self, grant: Grant) -> None:
        """Make what GRANT gives and is not there yet.  Raises AccessError; a lease that had nothing
        before has nothing then."""
        before = self._records.get(grant.lease)
        try:
            self._make(grant, before)
        except (AccessError, OSError) as error:
            if before is None:
                try:
                    self.revoke(grant.lease)
                except AccessError as failure:
                    log.error("a failed grant is not undone: %s", printable(failure, 512))
            raise error if isinstance(error, AccessError) else _failed(grant.lease, error) from error

    def revoke(self, lease: str) -> None:
        """Undo all of LEASE; nothing to undo is no error.  Raises AccessError with what is left in
        the record, so that it can be tried again."""
        made = self._records.get(lease)
        if made is None:
            return
        steps = [functools.partial(self._take, lease, made.uid, node) for node in made.nodes]
        if made.directory:
            steps.insert(0, functools.partial(_remove, Path(made.directory), lease))
        each(*steps)
        try:
            self._records.remove(lease)
        except OSError as error:
            raise _failed(lease, error) from error

    def sweep(self, live: Collection[str]) -> None:
        """Undo every lease that is not LIVE.  Raises AccessError after all were tried."""
        gone = [lease for lease in self._records if lease not in live]
        each(
            *(functools.partial(self._revoke_named, lease) for lease in gone),
            functools.partial(self._sweep_strays, live),
        )

    def _revoke_named(self, lease: str) -> None:
        try:
            self.revoke(lease)
        except AccessError as error:
            raise AccessError(f"lease {lease}: {error}") from error

    def _sweep_strays(self, live: Collection[str]) -> None:
        """Remove specifications that no record knows: a container could be made with one."""
        if self._specifications is None:
            return
        try:
            strays = cdi.listed(self._specifications).difference(live, self._records)
        except OSError as error:
            raise AccessError(_says(error)) from error
        each(*(functools.partial(_remove, self._specifications, lease) for lease in strays))

    def _make(self, grant: Grant, before: Made | None) -> None:
        if before is not None and before.uid != grant.uid:
            self.revoke(grant.lease)
            before = None
        # what was made under other settings is still to be undone
        directory = before.directory if before is not None else ""
        if self._specifications is not None and directory != str(self._specifications):
            if directory:
                cdi.remove(Path(directory), grant.lease)
            directory = str(self._specifications)
        nodes = self._nodes(grant, before)
        if not nodes and not directory:
            return
        self._records.write(grant.lease, Made(grant.uid, directory, nodes))
        if self._specifications is not None:
            cdi.write(self._specifications, grant, self._hook)
        granted = {place(node) for node in grant.nodes}
        kept = tuple(node for node in nodes if place(node) in granted)
        each(
            functools.partial(self._take_lost, grant, directory, nodes, kept),
            functools.partial(self._give, grant, kept),
        )

    def _take_lost(
        self, grant: Grant, directory: str, nodes: tuple[GrantedNode, ...], kept: tuple[GrantedNode, ...]
    ) -> None:
        """Take back the entry on those of NODES that GRANT gave and does not any more, and have the
        record say what is KEPT: the devices went away, and may come back at the same nodes as
        somebody else's."""
        lost = [node for node in nodes if node not in kept]
        if lost:
            each(*(functools.partial(self._take, grant.lease, grant.uid, node) for node in lost))
            self._records.write(grant.lease, Made(grant.uid, directory, kept))

    def _take(self, lease: str, uid: int, node: GrantedNode) -> None:
        """Take back the entry of UID on NODE, unless another lease of his has it, too."""
        if not self._records.has_another(lease, node, uid):
            acl.take(node, uid)

    def _give(self, grant: Grant, nodes: Iterable[GrantedNode]) -> None:
        """Give the entry on NODES; one that is gone or sick costs the others nothing."""
        if self._entries:
            each(*(functools.partial(acl.give, node, grant.uid) for node in nodes))

    def _nodes(self, grant: Grant, before: Made | None) -> tuple[GrantedNode, ...]:
        """The nodes on which the entry of GRANT's uid is ours, or will be: an entry that was there
        before us, and is no other lease's, is not ours to take away."""
        ours = {place(node): node for node in before.nodes} if before is not None else {}
        if self._entries and grant.uid != 0:
            for node in grant.nodes:
                # each once: a lease's devices share their control nodes
                if place(node) not in ours and (
                    self._records.has_another(grant.lease, node, grant.uid) or acl.needs(node, grant.uid)
                ):
                    ours[place(node)] = node
        return tuple(ours.values())


def _remove(directory: Path, lease: str) -> None:
    """Remove the specification of LEASE; where no directory is, there is none.  Raises AccessError."""
    try:
        cdi.remove(directory, lease)
    except NotADirectoryError:
        pass
    except OSError as error:
        raise AccessError(_says(error)) from error


def _failed(lease: str, error: OSError) -> AccessError:
    return AccessError(f"the host can't be changed for lease {lease}: {_says(error)}")


def _says(error: OSError) -> str:
    return f"{printable(error.filename or 'it')}: {error.strerror}"
