"""Preparing and revoking what a lease gives: its nodes checked against the kernel, its manifest."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import grp
import logging
import os
import stat
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

from hetero_agent.access.grant import Grant
from hetero_agent.access.manifest import AccessError, UnansweredError, build
from hetero_agent.access.namespaces import Process
from hetero_agent.core.model import DeviceRecord, Lease, Netdev, Node, ProcessRef
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.access")

#: Seconds for what may hang: names of groups, mounts and files on filesystems not known to be local.
DEADLINE: Final = 5.0

# Where a stat can't hang, so that a thread would only cost time: it asks no server and no user.
_DEV: Final = "/dev/"
_LOCAL: Final = frozenset({"devtmpfs", "tmpfs", "ramfs", "ext4", "xfs", "btrfs", "f2fs"})

_SYSFS: Final = {"char": "/sys/dev/char", "block": "/sys/dev/block"}
_FORMATS: Final = {"char": stat.S_IFCHR, "block": stat.S_IFBLK, "file": stat.S_IFREG}

T = TypeVar("T")

#: Host, container, options.
Mount = tuple[str, str, str]


class Doer(Protocol):
    """Who has the hands do something (direct.py, remote.py)."""

    @property
    def problem(self) -> str:
        """What an administrator should know, "" if all is well."""

    async def prepare(self, grant: Grant) -> None:
        """Make what GRANT gives.  Raises AccessError."""

    async def renew(self, grant: Grant) -> None:
        """Make what is missing of GRANT, after all that is more urgent.  Raises AccessError."""

    async def attach(self, grant: Grant, process: Process | None) -> None:
        """Have the network interfaces of GRANT, which was prepared, in the namespace of PROCESS, on the
        host for None.  Raises AccessError."""

    async def revoke(self, lease: str) -> None:
        """Undo what was made for LEASE.  Raises AccessError."""

    async def sweep(self, live: Collection[str]) -> None:
        """Undo what was made for other leases than LIVE.  Raises AccessError."""

    def close(self) -> None:
        """Let go of what it has open."""


class Door:
    """What the engine knows as `Access`.  Without a DOER nothing is made on the host.  LOOK is told the
    places in sysfs of the kernel's devices that can't be given as discovery saw them."""

    def __init__(self, doer: Doer | None = None, look: Callable[[str], None] | None = None) -> None:
        self._doer = doer
        self._look = look
        self._turns: dict[str, asyncio.Lock] = {}
        self._gids: dict[str, int | None] = {}
        self._local: dict[int, bool] = {}

    @property
    def problem(self) -> str:
        """What an administrator should know, "" if all is well."""
        return self._doer.problem if self._doer is not None else ""

    def use(self, doer: Doer | None) -> None:
        """Have all that is made and undone from now on done by DOER."""
        if self._doer is not None:
            self._doer.close()
        self._doer = doer

    async def prepare(self, lease: Lease, records: Sequence[DeviceRecord]) -> dict[str, object]:
        """Check every node of the lease's devices against the kernel, make what they give on the
        host, and return the manifest.

        Raises AccessError, with nothing left behind, when a node is not what discovery saw, a
        mount's source is missing, or something can't be made.
        """
        async with self._turn(lease.id):
            return await self._prepare(lease, records)

    async def _prepare(self, lease: Lease, records: Sequence[DeviceRecord]) -> dict[str, object]:
        known = {record.id: record for record in records}
        try:
            ordered = [known[device] for device in lease.devices]
        except KeyError as error:
            raise AccessError(f"device {printable(error.args[0])} has no record any more") from error
        if lease.netdev is Netdev.MOVE:
            slot = next((record.id for record in ordered if "slot" in record.attributes), "")
            if slot:
                raise AccessError(f"{slot} shares its network interfaces with the other slots, so they stay")
        mounts = any(record.mounts or record.optional_mounts for record in ordered)

        def look() -> tuple[list[Mount], dict[str, list[Node]]]:
            return mounts_of(ordered), {
                record.id: [check_node(node, bool(record.path)) for node in record.nodes] for record in ordered
            }

        try:
            if not mounts and all(self._immediate(node) for record in ordered for node in record.nodes):
                existing, nodes = look()
            else:
                existing, nodes = await in_thread(look, "the nodes and mounts of the lease")
        except AccessError:
            self._doubt(ordered)
            raise
        groups = await self._group_ids({name for record in ordered for name in record.groups})
        manifest = build(lease, ordered, nodes, groups, existing)
        if self._doer is not None:
            try:
                grant = Grant(lease.id, lease.uid, manifest)
                await self._doer.prepare(grant)
                if lease.netdev is Netdev.MOVE:
                    await self._doer.attach(grant, _process(lease.binding.pid))
            except UnansweredError:
                # whoever makes it would not answer to this either: the lease's end has it undone
                raise
            except AccessError:
                # half of it may be there
                with contextlib.suppress(AccessError):
                    await self._doer.revoke(lease.id)
                raise
        elif lease.netdev is Netdev.MOVE:
            raise AccessError("network interfaces can't be moved: the agent is not root and has no helper")
        return manifest

    async def renew(self, lease: Lease) -> None:
        """Make again what is missing of what `prepare` made for LEASE.  Raises AccessError."""
        if self._doer is not None:
            async with self._turn(lease.id):
                await self._doer.renew(_what_is_left(lease))

    async def attach(self, lease: Lease, process: ProcessRef | None) -> None:
        """Have the network interfaces of LEASE, which was prepared, in the namespace of PROCESS, on the
        host for None.  Raises AccessError."""
        if self._doer is not None:
            async with self._turn(lease.id):
                await self._doer.attach(_what_is_left(lease), _process(process))

    async def revoke(self, lease: str) -> None:
        """Undo what `prepare` made for LEASE, whole or half.  Raises AccessError: it is to be tried
        again then."""
        # what was begun before the end is done before it is undone
        async with self._turn(lease):
            if self._doer is not None:
                await self._doer.revoke(lease)
        self._turns.pop(lease, None)

    def _turn(self, lease: str) -> asyncio.Lock:
        """Whose turn it is to make or undo what LEASE gives."""
        return self._turns.setdefault(lease, asyncio.Lock())

    async def sweep(self, live: frozenset[str]) -> None:
        """Undo what was made for leases other than LIVE.  Raises AccessError."""
        if self._doer is not None:
            await self._doer.sweep(live)

    def close(self) -> None:
        """Let go of what is open; all that was made stays."""
        if self._doer is not None:
            self._doer.close()

    def reload(self) -> None:
        """Forget what the names of groups meant."""
        self._gids.clear()

    def _doubt(self, records: Sequence[DeviceRecord]) -> None:
        """Have the kernel's devices among RECORDS looked at again, once each: what made their nodes
        others need not have sent a uevent (nvidia-modprobe makes them anew with another major)."""
        if self._look is not None:
            for place in dict.fromkeys(record.path for record in records if record.path):
                self._look(place)

    def _immediate(self, node: Node) -> bool:
        """Whether a look at NODE can't hang."""
        if node.kind != "file":
            return node.path.startswith(_DEV)
        local = self._local.get(node.fsdev)
        if local is None:
            local = self._local[node.fsdev] = _filesystem(node.fsdev) in _LOCAL
        return local

    async def _group_ids(self, wanted: set[str]) -> list[int]:
        """Return the gids of the groups that exist here.  Looked up once, off the loop, since the
        name service can hang.  A profile's group that this host lacks is no error: a node's own
        group is in the manifest in any case."""
        unknown = sorted(wanted - self._gids.keys())
        if unknown:
            looked = await in_thread(lambda: [_gid(name) for name in unknown], "the names of groups")
            self._gids.update(zip(unknown, looked, strict=True))
            missing = [name for name, gid in zip(unknown, looked, strict=True) if gid is None]
            if missing:
                log.warning("groups that profiles name and this host lacks: %s", printable(", ".join(missing)))
        return [gid for name in wanted if (gid := self._gids[name]) is not None]


def _what_is_left(lease: Lease) -> Grant:
    """What LEASE gives: a device that was unplugged has no nodes and no interfaces; those of its others
    are to be kept up."""
    rows = {
        key: [row for row in lease.manifest.get(key, ()) if row[0] not in lease.lost]
        for key in ("nodes", "netdevs")
    }
    return Grant(lease.id, lease.uid, {**lease.manifest, **rows})


def _process(bound: ProcessRef | None) -> Process | None:
    return Process(bound.pid, bound.start) if bound is not None else None


def check_node(node: Node, in_sysfs: bool) -> Node:
    """Return NODE with its mode and group as they are now.  IN_SYSFS: the device is one of the
    kernel's, so its driver must still know the number.  Raises AccessError if the path leads to
    anything but the node that discovery saw."""
    where = f"node {printable(node.path)}"
    try:
        found = os.lstat(node.path)
    except OSError as error:
        raise AccessError(f"{where}: expected {_expected(node)}, found nothing: {error.strerror}") from error
    same = stat.S_IFMT(found.st_mode) == _FORMATS[node.kind] and (
        (found.st_dev, found.st_ino) == (node.fsdev, node.inode)
        if node.kind == "file"
        else found.st_rdev == os.makedev(node.major, node.minor)
    )
    if not same:
        raise AccessError(f"{where}: expected {_expected(node)}, found {_found(found)}")
    if in_sysfs and node.kind != "file" and not _driven(node):
        raise AccessError(
            f"{where}: expected {_expected(node)} with a driver behind it, found none in"
            f" {_SYSFS[node.kind]} and /proc/devices"
        )
    return replace(node, mode=stat.S_IMODE(found.st_mode), gid=found.st_gid)


def _driven(node: Node) -> bool:
    numbers = Path(_SYSFS[node.kind])
    if os.path.lexists(numbers / f"{node.major}:{node.minor}"):
        return True
    # NVIDIA's driver registers its major and shows no device of it in sysfs
    if any(entry.name.startswith(f"{node.major}:") for entry in numbers.iterdir()):
        return False
    text = Path("/proc/devices").read_text(encoding="ascii", errors="replace")
    char, _, block = text.partition("Block devices:")
    majors = {line.split()[0] for line in (char if node.kind == "char" else block).splitlines() if line.strip()}
    return str(node.major) in majors


def _filesystem(device: int) -> str:
    """The type of the filesystem with this st_dev, "" if none is mounted here (proc(5), mountinfo)."""
    numbers = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split(" ", 3)[2] == numbers:
            return rest.partition(" ")[0]
    return ""


def mounts_of(records: Sequence[DeviceRecord]) -> list[Mount]:
    """Return the mounts of RECORDS that exist here, (host, container, options), those with `*` in
    the host's name once for each path that it stands for.  Raises AccessError, naming the path, if
    there is nothing for one that is not optional."""
    found: list[Mount] = []
    # the devices of one vendor want the same, and each pattern costs a look at a directory
    needed = {mount: record.id for record in records for mount in record.mounts}
    for mount, device in needed.items():
        existing = _existing(mount)
        if not existing:
            raise AccessError(
                f"mount {printable(mount[0])}: {printable(device)} needs it, and there is no such file or"
                " directory here"
            )
        found += existing
    for mount in dict.fromkeys(mount for record in records for mount in record.optional_mounts):
        found += _existing(mount)
    return found


def _existing(mount: Mount) -> list[Mount]:
    host, _, options = mount
    if "*" in host:
        # a pattern's container path is its own (discovery/profiles.py)
        return [(path, path, options) for path in sorted(glob.glob(host))]  # noqa: PTH207 (the text)
    # what may not be looked at counts as missing, where Path.exists() raises
    return [mount] if os.path.exists(host) else []  # noqa: PTH110


def _expected(node: Node) -> str:
    if node.kind == "file":
        return f"file {os.major(node.fsdev)}:{os.minor(node.fsdev)} inode {node.inode}"
    return f"{node.kind} node {node.major}:{node.minor}"


def _found(found: os.stat_result) -> str:
    kind = next((kind for kind, form in _FORMATS.items() if form == stat.S_IFMT(found.st_mode)), "")
    if kind == "file":
        return f"file {os.major(found.st_dev)}:{os.minor(found.st_dev)} inode {found.st_ino}"
    if kind:
        return f"{kind} node {os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return f"something of mode {stat.filemode(found.st_mode)}"


def _gid(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


async def in_thread(work: Callable[[], T], what: str, deadline: float | None = None) -> T:
    """Run WORK in a thread of its own: one that hangs is left behind and holds up nothing, not even
    the end of the process.  DEADLINE is in seconds, `DEADLINE` unless given."""
    seconds = DEADLINE if deadline is None else deadline
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: list[T], error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result[0])

    def run() -> None:
        result: list[T] = []
        failure: Exception | None = None
        try:
            result.append(work())
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: the agent stops
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=f"access: {what}", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await future
    except TimeoutError as error:
        raise AccessError(f"looking at {what} takes more than {seconds:g} s; something there hangs") from error
