"""The network interfaces of a lease's devices, moved into a workload's network namespace and back.

An interface changes its name and number when that suits its new namespace, and what is in a
namespace that nobody keeps alive goes: a hardware interface falls back to the host under a name of
the kernel's, a virtual one dies.  So the namespace is kept alive by a mount, and what was moved is
found again by what stays with it: the device it sits on, and its permanent address.  All that is
written down before it is made (docs/network.md).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hetero_agent import names
from hetero_agent.access import namespaces
from hetero_agent.access.grant import Grant, GrantedNode
from hetero_agent.access.links import Link, above, all_links, links_of, speak, unfilter
from hetero_agent.access.manifest import AccessError, each
from hetero_agent.access.movable import movable
from hetero_agent.access.namespaces import Identity, Process
from hetero_agent.core import address
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.access")

VERSION: Final = 1

#: Flags of an interface that are put back (netdevice(7)): up, no ARP, promiscuous, all multicast.
_UP: Final = 0x1
_FLAGS: Final = _UP | 0x80 | 0x100 | 0x200

#: What a helper is told that has only the rights that it needs for everything else.
_NOT_ALLOWED: Final = (errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT)

_NEW: Final = ".new"


@dataclass(frozen=True, slots=True)
class Moved:
    """An interface of DEVICE that was moved, or is about to be, as it was on the host; ON_THE_WAY is
    the name that it has between the two."""

    device: str
    name: str
    index: int
    flags: int
    address: str
    mtu: int
    kind: str
    permanent: str
    parent: str
    on_the_way: str
    aliases: tuple[str, ...] = ()

    def is_it(self, link: Link) -> bool:
        """Whether LINK, of whatever namespace, is this interface."""
        if self.parent or link.parent:
            # interfaces of one device differ in their addresses
            return (self.parent, self.permanent) == (link.parent, link.permanent)
        if self.permanent or link.permanent:
            return (self.permanent, self.kind) == (link.permanent, link.kind)
        return self.kind == link.kind and (self.index == link.index or self.on_the_way == link.name)


@dataclass(frozen=True, slots=True)
class _Record:
    """What a lease has elsewhere: in NAMESPACE."""

    namespace: Identity
    moved: tuple[Moved, ...]


def belongs(interface: str, nodes: Sequence[GrantedNode]) -> bool:
    """Whether INTERFACE sits on the PCI device that one of NODES, a lease's own ones, belongs to."""
    device = address.last_in(os.path.realpath(f"/sys/class/net/{interface}"))
    if device is None or not names.INTERFACE.fullmatch(interface):
        return False
    for node in nodes:
        if node.role == "own" and node.kind in ("char", "block"):
            place = os.path.realpath(f"/sys/dev/{node.kind}/{node.major}:{node.minor}")
            if address.last_in(place) == device:
                return True
    return False


class Netdevs:
    """Moves interfaces; one record a lease in DIRECTORY/netdev, its namespace in DIRECTORY/netns.

    MAY tells whether leases may have theirs moved on this host, BELONGS whether an interface is one
    of the device that has these nodes.  Synchronous.  Every call runs in the host's network namespace;
    they take turns.
    """

    def __init__(
        self,
        directory: Path,
        may: bool,
        belongs: Callable[[str, Sequence[GrantedNode]], bool] = belongs,
    ) -> None:
        self._records = directory / "netdev"
        self._mounts = directory / "netns"
        self._may = may
        self._belongs = belongs
        self._lock = threading.Lock()

    def __contains__(self, lease: str) -> bool:
        return (self._records / lease).exists()

    def leases(self) -> list[str]:
        """The leases that have interfaces elsewhere, or are about to."""
        with self._lock:
            try:
                found = sorted(entry.name for entry in os.scandir(self._records))
            except FileNotFoundError:
                return []
            for name in found:
                if name.endswith(_NEW):
                    # never came into force
                    (self._records / name).unlink(missing_ok=True)
            return [name for name in found if names.LEASE_ID.fullmatch(name)]

    def attach(self, grant: Grant, process: Process | None) -> None:
        """Have the interfaces of GRANT in the network namespace of PROCESS, after those that its lease
        has in another one were brought back; without a PROCESS, or for one on the host, only see that
        they are there and could be moved.

        Raises AccessError; if that was because of the interfaces, they are on the host.
        """
        lease = grant.lease
        with self._turn(), namespaces.home() as here, self._target(process, here) as target:
            there = namespaces.identity(target)
            before = self._read(lease)
            if before is not None:
                if before.namespace == there and self._complete(before, target):
                    return
                self._bring_back(lease, before)
            moving = self._find(grant, here)
            if namespaces.identity(here) != there:
                try:
                    self._write(lease, _Record(there, tuple(moving)))
                    namespaces.keep(target, self._mounts / lease)
                    for one in moving:
                        _move(one, here, target)
                except (OSError, AccessError) as error:
                    self._undo(lease)
                    if isinstance(error, AccessError):
                        raise
                    raise AccessError(
                        f"network interface {_all(moving)} can't be moved: {printable(error.strerror or error)}"
                    ) from error

    def retain(self, grant: Grant) -> None:
        """Bring back, or forget if they are gone with them, the interfaces of devices that GRANT does not
        have any more: those that come back in their place may be another lease's.  Raises AccessError."""
        with self._turn():
            record = self._read(grant.lease)
            devices = {device for device, _ in grant.interfaces}
            if record is None or all(one.device in devices for one in record.moved):
                return
            left = tuple(one for one in record.moved if one.device in devices)
            if not left:
                self._bring_back(grant.lease, record)
                return
            with namespaces.home() as here, namespaces.kept(self._mounts / grant.lease) as target:
                _bring_all_home([one for one in record.moved if one not in left], here, target)
            self._write(grant.lease, _Record(record.namespace, left))

    def detach(self, *leases: str) -> None:
        """Bring back what LEASES have elsewhere, under its old name and as it was; nothing is no error.
        Raises AccessError, after all were tried: it is to be done again."""
        each(*(functools.partial(self._detach, lease) for lease in leases))

    def _detach(self, lease: str) -> None:
        with self._turn():
            record = self._read(lease)
            if record is not None:
                self._bring_back(lease, record)

    @contextlib.contextmanager
    def _target(self, process: Process | None, here: int) -> Iterator[int]:
        if process is None:
            yield here
        else:
            with namespaces.of_process(process) as target:
                yield target

    def _find(self, grant: Grant, here: int) -> list[Moved]:
        """Return the interfaces of all devices of GRANT as they are on the host.  Raises AccessError
        if one can't be moved."""
        if not self._may:
            raise AccessError(
                "network interfaces are not moved on this host: move-netdevs in [access] of the configuration"
                " (docs/network.md)"
            )
        devices = dict.fromkeys(node.device for node in grant.nodes)
        for device in devices.keys() - {device for device, _ in grant.interfaces}:
            raise AccessError(f"device {printable(device)} has no network interface that could be moved")
        links = links_of(here)
        found = []
        for device, name in grant.interfaces:
            if not self._belongs(name, [node for node in grant.nodes if node.device == device]):
                raise AccessError(f"network interface {name} is none of device {printable(device)}")
            found.append(_moved(grant.lease, device, movable(name, links, here)))
        return found

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                what = printable(error.strerror or error)
                if error.errno in _NOT_ALLOWED:
                    what = f"they can't be moved with the rights that there are ({what}): see docs/network.md"
                raise AccessError(f"network interfaces: {what}") from error

    def _undo(self, lease: str) -> None:
        try:
            record = self._read(lease)
            if record is not None:
                self._bring_back(lease, record)
        except (AccessError, OSError) as error:
            log.error(
                "lease %s: a failed move of network interfaces is not undone: %s", lease, printable(error)
            )

    def _complete(self, record: _Record, target: int) -> bool:
        links = links_of(target)
        return all(any(one.is_it(link) for link in links) for one in record.moved)

    def _bring_back(self, lease: str, record: _Record) -> None:
        mount = self._mounts / lease
        with namespaces.home() as here, namespaces.kept(mount) as target:
            _bring_all_home(record.moved, here, target)
        namespaces.let_go(mount)
        (self._records / lease).unlink(missing_ok=True)

    # -- records --------------------------------------------------------------------------------
    def _write(self, lease: str, record: _Record) -> None:
        text = json.dumps(
            {"version": VERSION, "namespace": record.namespace, "moved": [asdict(one) for one in record.moved]}
        )
        self._records.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = self._records / (lease + _NEW)
        new.write_text(text, encoding="utf-8")
        new.replace(self._records / lease)

    def _read(self, lease: str) -> _Record | None:
        """The record of LEASE.  Raises AccessError for one that makes no sense."""
        try:
            data = json.loads((self._records / lease).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise AccessError(f"the record of lease {lease}'s network interfaces is damaged") from error
        try:
            if data["version"] != VERSION:
                raise ValueError
            moved = (Moved(**{**one, "aliases": tuple(one.get("aliases", ()))}) for one in data["moved"])
            return _Record(Identity(*data["namespace"]), tuple(moved))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise AccessError(f"the record of lease {lease}'s network interfaces makes no sense") from error


# -- moving ---------------------------------------------------------------------------------------
def _moved(lease: str, device: str, link: Link) -> Moved:
    return Moved(
        device=device,
        name=link.name,
        index=link.index,
        flags=link.flags & _FLAGS,
        address=link.address,
        mtu=link.mtu,
        kind=link.kind,
        permanent=link.permanent,
        parent=link.parent,
        # 15 characters at most; no two leases move the same, and no host has such names
        on_the_way=f"ha{lease[:8]}{link.index % 100_000:05d}",
        aliases=link.aliases,
    )


def _move(one: Moved, here: int, target: int) -> None:
    """Move an interface that is on the host; it is up there if it was up here."""
    if any(link.name == one.name for link in links_of(target)):
        raise AccessError(
            f"network interface {one.name} can't be moved: the workload's network namespace has one of"
            " that name"
        )

    def leave(netlink: Any) -> None:
        netlink.link("set", index=one.index, state="down")
        netlink.link("set", index=one.index, ifname=one.on_the_way)
        netlink.link("set", index=one.index, net_ns_fd=target)

    def arrive(netlink: Any) -> None:
        link = next((link for link in all_links(netlink) if link.name == one.on_the_way), None)
        if link is None:
            raise AccessError(f"network interface {one.name} did not arrive where it was moved")
        netlink.link("set", index=link.index, ifname=one.name)
        if one.flags & _UP:
            netlink.link("set", index=link.index, state="up")

    speak(here, leave)
    speak(target, arrive)


def _bring_all_home(moved: Sequence[Moved], here: int, target: int | None) -> None:
    """Have interfaces on the host, as they were; what is in the way of one is not in the way of the
    others.  Raises AccessError or OSError, after all were tried."""
    failures: list[OSError] = []

    def bring(one: Moved) -> None:
        try:
            _bring_home(one, here, target)
        except OSError as error:
            failures.append(error)

    each(*(functools.partial(bring, one) for one in moved))
    if failures:
        raise failures[0]


def _bring_home(one: Moved, here: int, target: int | None) -> None:
    """Have an interface on the host, as it was.  Raises AccessError."""
    if target is not None and _send_home(one, target, here):
        return _settle(one, here)
    if any(one.is_it(link) for link in links_of(here)):
        return _settle(one, here)
    if not (one.parent or one.permanent):
        # a virtual one: nothing tells it from those of others in namespaces that are not the lease's
        log.warning("network interface %s is gone; it is not brought back", one.name)
        return None
    known = {namespaces.identity(here)}
    if target is not None:
        known.add(namespaces.identity(target))
    for other in namespaces.others(known):
        if _send_home(one, other, here):
            return _settle(one, here)
    if one.parent and os.path.lexists(f"/sys/bus/{one.parent.replace('/', '/devices/')}/driver"):
        raise AccessError(
            f"network interface {one.name} is in none of the network namespaces that can be looked into, and"
            f" its device {one.parent.partition('/')[2]} is there"
        )
    log.warning("network interface %s is gone; it is not brought back", one.name)
    return None


def _send_home(one: Moved, namespace: int, here: int) -> bool:
    """Move the interface from NAMESPACE to the host, under a name that nobody has there, if it is
    in it; nothing of the workload's stays on top of it."""

    def leave(netlink: Any) -> bool:
        links = all_links(netlink)
        link = next((link for link in links if one.is_it(link)), None)
        if link is None:
            return False
        for upper in above(link, links):
            netlink.link("del", index=upper.index)
        _clear_beyond(link, namespace, here)
        netlink.link("set", index=link.index, state="down")
        for way in link.filters:
            unfilter(link.index, way)
        if link.name != one.on_the_way:
            netlink.link("set", index=link.index, ifname=one.on_the_way)
        if link.aliases:  # one that somebody on the host has would keep it here
            netlink.link("property_del", index=link.index, altname=link.aliases)
        netlink.link("set", index=link.index, net_ns_fd=here)
        return True

    return speak(namespace, leave)


def _clear_beyond(link: Link, namespace: int, here: int) -> None:
    """Take away what is on top of LINK in other namespaces than its own: it would go on to speak and to
    hear through it."""

    def clear(netlink: Any) -> None:
        links = [one for one in all_links(netlink) if one.beyond >= 0 and one.lower == link.index]
        if links:
            beyond = netlink.get_netnsid(fd=namespace)["nsid"]
            for upper in above(link, links, beyond):
                netlink.link("del", index=upper.index)

    for other in namespaces.others({namespaces.identity(namespace), namespaces.identity(here)}):
        with contextlib.suppress(OSError):  # it is going, or somebody was faster
            speak(other, clear)


def _settle(one: Moved, here: int) -> None:
    """Give an interface that is on the host what it had there.  Raises AccessError if another one
    has its name."""

    def look(netlink: Any) -> None:
        links = all_links(netlink)
        link = next(link for link in links if one.is_it(link))
        others = {name for other in links if other != link for name in (other.name, *other.aliases)}
        strange = [name for name in link.aliases if name not in one.aliases]
        if strange:
            netlink.link("property_del", index=link.index, altname=strange)
        taken = one.name in others
        renamed = link.name != one.name and not taken
        if renamed or link.address != one.address:
            netlink.link("set", index=link.index, state="down")
        if renamed:
            netlink.link("set", index=link.index, ifname=one.name)
        missing = [name for name in one.aliases if name not in {*link.aliases, *others}]
        if missing:
            netlink.link("property_add", index=link.index, altname=missing)
        if link.address != one.address:
            netlink.link("set", index=link.index, address=one.address)
        if link.mtu != one.mtu:
            netlink.link("set", index=link.index, mtu=one.mtu)
        netlink.link("set", index=link.index, flags=one.flags, change=_FLAGS)
        if taken:
            raise AccessError(
                f"network interface {one.name} is back as {link.name}: another interface has its name now;"
                " give that another one"
            )

    speak(here, look)


def _all(moving: Sequence[Moved]) -> str:
    return ", ".join(one.name for one in moving)
