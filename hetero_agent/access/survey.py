"""Who can open the nodes of devices without a lease: stray modes and foreign ACL entries, told once.

Looked at when a node was touched (inotify), when a device is new or another, and every ten minutes.
Nothing is mended: the mode of a node is udev's and the administrator's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from hetero_agent.access import acl, seats
from hetero_agent.access.door import in_thread
from hetero_agent.access.grant import GrantedNode
from hetero_agent.access.manifest import AccessError
from hetero_agent.core.events import Event, NodesTouched, Note, Observed
from hetero_agent.core.model import AuditKind, Instant, Node, Role
from hetero_agent.core.ports import NodeAccess, Submit, View
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.access")

#: Seconds from the first touch to the look: a lease's own entry is made and renewed meanwhile, udev done.
SETTLE: Final = 1.0
#: Seconds between looks at all devices: a lease that ended leaves no trace on an entry that was there before.
INTERVAL: Final = 600.0
#: Seconds without a look after one that hung, doubled each time.
_FIRST_PAUSE: Final = 60.0
_LAST_PAUSE: Final = 86400.0
#: What this process lacks; it says nothing of a node.
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: Characters of one line in the journal.
_TEXT_MAX: Final = 400

WRONG: Final = "wrong"
NOTE: Final = "note"

#: The nodes of a device, by its id.
Nodes = Mapping[str, Sequence[Node]]
#: The uids that leases give entries to, by node.
Leased = Mapping[str, Collection[int]]


class Survey:
    """Submits a Note per device when what is out of order there has changed.

    VIEW is the governor's; OPEN_TO_ALL tells which nodes are meant to be everybody's, by path;
    GIVES whether leases give ACL entries here.
    """

    def __init__(
        self,
        view: View,
        submit: Submit,
        now: Callable[[], Instant],
        open_to_all: Callable[[], Collection[str]],
        gives: Callable[[], bool],
    ) -> None:
        self._view = view
        self._submit = submit
        self._now = now
        self._open_to_all = open_to_all
        self._gives = gives
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        self._known: dict[str, tuple[tuple[str, str], ...]] = {}
        self._task: asyncio.Task[None] | None = None
        self._one = asyncio.Lock()
        self._pause = 0.0
        self._not_before = 0.0
        self._problem = ""

    # -- life -----------------------------------------------------------------------------------
    def start(self) -> None:
        """Look at all devices, and from now on at what changes."""
        self._task = asyncio.create_task(self._run(), name="survey")
        self.again()

    async def stop(self) -> None:
        """Nothing is submitted afterwards."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def tell(self, event: Event) -> None:
        """Take an event on its way to the engine."""
        match event:
            case NodesTouched():
                self._due.add(event.device)
            case Observed():
                self._due.update(record.id for record in event.records)
                self._due.update(event.gone)
            case _:
                return
        self._wake.set()

    def problems(self) -> list[str]:
        """What is out of order now, each thing once: parts of a card share nodes."""
        return list(
            dict.fromkeys(text for one in self._known.values() for level, text in one if level == WRONG)
        )

    async def look(self, device: str) -> Sequence[NodeAccess]:
        """See `core.ports.Exposure`.  Raises AccessError where a file system hangs."""
        # a task of its own: the bus begins calls outside of any, and a deadline needs one
        found = await asyncio.create_task(self._look([device]), name=f"survey {device}")
        return found.get(device, ())

    def again(self) -> None:
        """Look at all devices soon: what is right may be another thing now."""
        self._due.update(self._view.devices)
        self._wake.set()

    # -- rounds ---------------------------------------------------------------------------------
    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._wake.wait()
            except TimeoutError:
                self.again()
            await asyncio.sleep(SETTLE)
            self._wake.clear()
            due, self._due = self._due, set()
            try:
                found = await self._look(sorted(due))
            except AccessError as error:
                if not self._problem:
                    log.warning("who can open the nodes of devices can't be told: %s", printable(error))
                self._problem = str(error)
                self._due |= due
                continue
            self._problem = ""
            for device in sorted(due):
                self._compare(device, found.get(device, ()))

    async def _look(self, devices: Iterable[str]) -> dict[str, list[NodeAccess]]:
        async with self._one:
            now = asyncio.get_running_loop().time()
            if now < self._not_before:
                raise AccessError("the last look at nodes did not return; something there hangs")
            known = self._view.devices
            # what a lease still has though it was unplugged has no nodes: what is left in their places is
            # nobody's, or another's
            nodes = {
                device: known[device].record.nodes
                for device in devices
                if device in known and known[device].present
            }
            leased, open_to_all, gives = self._leased(), frozenset(self._open_to_all()), self._gives()
            try:
                found = await in_thread(
                    lambda: _survey(nodes, leased, open_to_all, gives), "the modes of nodes"
                )
            except AccessError as error:
                if isinstance(error.__cause__, TimeoutError):
                    # each look that hangs leaves a thread behind
                    self._pause = min(max(self._pause * 2, _FIRST_PAUSE), _LAST_PAUSE)
                    self._not_before = now + self._pause
                raise
            self._pause = 0.0
            return found

    def _leased(self) -> Leased:
        found: dict[str, set[int]] = {}
        for lease in self._view.leases.values():
            for name in lease.devices:
                device = self._view.devices.get(name)
                for node in device.record.nodes if device is not None else ():
                    found.setdefault(node.path, set()).add(lease.uid)
        return found

    def _compare(self, device: str, nodes: Sequence[NodeAccess]) -> None:
        """Tell what is new, and that all is well again."""
        remarks = tuple(remark for node in nodes for remark in node.remarks)
        before = self._known.pop(device, ())
        if remarks:
            self._known[device] = remarks
        new = [remark for remark in remarks if remark not in before]
        if new:
            text = "; ".join(text for _, text in new)
            priority = 4 if any(level == WRONG for level, _ in new) else 5
        elif before and nodes and not remarks:
            text = f"the nodes of {device} are closed again to all but their group and the owner of a lease"
            priority = 5
        else:
            return
        at = self._now()
        self._submit(Note(at, AuditKind.EXPOSURE, printable(text, _TEXT_MAX), priority, device))


def _survey(
    nodes: Nodes, leased: Leased, open_to_all: Collection[str], gives: bool
) -> dict[str, list[NodeAccess]]:
    """Look at NODES.  Blocking, as far as a provider's files can hang."""
    sitting = seats.active()
    found: dict[str, list[NodeAccess]] = {}
    for device, rows in nodes.items():
        found[device] = []
        for node in rows:
            try:
                here = acl.look(GrantedNode(device, node.path, node.role, node.kind, node.major, node.minor))
            except AccessError as error:
                if getattr(error.__cause__, "errno", 0) in _OURS:
                    raise
                continue  # discovery and health say what is wrong with it
            users = leased.get(node.path, ())
            remarks = (
                *_mode(node, here, node.path in open_to_all, gives),
                *_owner(node, here, users),
                *_foreign(printable(node.path), here, users, sitting),
            )
            found[device].append(
                NodeAccess(node.path, node.role, here.mode, here.uid, here.gid, here.entries, remarks)
            )
    return found


def _mode(node: Node, rights: acl.Rights, open_to_all: bool, gives: bool) -> Iterable[tuple[str, str]]:
    """What is out of order with a mode.  A control node is often everybody's, and a file a provider's
    own affair."""
    if node.role is Role.CONTROL or node.kind == "file":
        return
    mode, path = f"{rights.mode & 0o777:04o}", printable(node.path)
    if rights.mode & 0o006 and not open_to_all:
        yield (
            WRONG,
            f"{path} is open to every user ({mode}): anybody can use it without a lease;"
            " look for a stray udev rule with MODE=",
        )
    elif not rights.mode & 0o077 and rights.uid == 0 and rights.gid == 0:
        who = "root and the owner of a lease" if gives else "root"
        yield (
            NOTE if gives else WRONG,
            f"{path} is root:root {mode}: only {who} can use it;"
            ' a udev rule with GROUP= and MODE="0660" lets a group in',
        )


def _owner(node: Node, rights: acl.Rights, leased: Collection[int]) -> Iterable[tuple[str, str]]:
    """A node that belongs to somebody, who can change its mode, too.  A file is a provider's."""
    if rights.uid and node.role is not Role.CONTROL and node.kind != "file" and rights.uid not in leased:
        yield (
            WRONG,
            f"{printable(node.path)} belongs to user {rights.uid}, who can use it without a lease; look for a"
            " stray udev rule with OWNER=",
        )


def _foreign(
    path: str, rights: acl.Rights, leased: Collection[int], sitting: Mapping[int, str]
) -> Iterable[tuple[str, str]]:
    """The entries that are no lease's."""
    for uid, letters in rights.entries.items():
        if letters == "---" or uid in leased or uid == rights.uid:
            continue
        if uid in sitting:
            yield (
                NOTE,
                f"{path} is open to user {uid}, who sits at {sitting[uid]} (udev's tag uaccess, set by logind)"
                " and can use it without a lease",
            )
        else:
            yield (
                WRONG,
                f"{path} has an ACL entry for user {uid} ({letters}) that no lease gives: they can use it"
                f" without one; remove it with: setfacl -x u:{uid} {path}",
            )
