"""Network interfaces as rtnetlink(7) tells of them, in whatever network namespace."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hetero_agent.access import namespaces

T = TypeVar("T")

#: linux/if_link.h: the ways in which an XDP program is attached (generic, driver, hardware), each with
#: the flag that names it.
_XDP_WAYS: Final = {
    "IFLA_XDP_SKB_PROG_ID": 1 << 1,
    "IFLA_XDP_DRV_PROG_ID": 1 << 2,
    "IFLA_XDP_HW_PROG_ID": 1 << 3,
}
_IFLA_XDP: Final = 43 | 1 << 15  # nested
_IFLA_XDP_FD, _IFLA_XDP_FLAGS = 1, 3
#: linux/rtnetlink.h, linux/netlink.h: a request that is to be acknowledged.
_RTM_SETLINK: Final = 19
_ACKNOWLEDGED: Final = 0x5
#: Bytes of a netlink message's header.
_HEADER: Final = 16


@dataclass(frozen=True, slots=True)
class Link:
    """An interface as one namespace shows it.

    PERMANENT is the address that it was made with, PARENT (``bus/name``) the device that it sits on,
    "" where it has none; LOWER the number of the interface that it is on top of, in the namespace
    with the id BEYOND if that is not -1; MASTER that of its bridge or bond, 0 for none.  FILTERS: the
    ways in which XDP programs are on it, for `unfilter`.  ALIASES are its further names (altname of
    ip-link(8)).
    """

    index: int
    name: str
    flags: int
    address: str
    mtu: int
    kind: str
    permanent: str
    parent: str
    lower: int
    beyond: int
    master: int
    filters: tuple[int, ...]
    aliases: tuple[str, ...] = ()


def above(link: Link, links: Sequence[Link], beyond: int = -1) -> list[Link]:
    """The interfaces that are on top of LINK; BEYOND is the id that its namespace has where LINKS are."""
    return [one for one in links if (one.lower, one.beyond) == (link.index, beyond) and one.kind != "veth"]


def links_of(namespace: int) -> list[Link]:
    """Return the interfaces of the open NAMESPACE.  Raises OSError."""
    return speak(namespace, all_links)


def speak(namespace: int, work: Callable[[Any], T]) -> T:
    """Return what WORK returns with a netlink socket of NAMESPACE.  Raises OSError."""

    def run() -> T:
        # late: a seventh of a second and 14 MiB
        from pyroute2 import IPRoute  # noqa: PLC0415
        from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415

        try:
            with IPRoute() as netlink:
                return work(netlink)
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from error

    return namespaces.inside(namespace, run)


def all_links(netlink: Any) -> list[Link]:
    """Return the interfaces of the namespace that the socket NETLINK is of."""
    return [_link(message) for message in netlink.get_links()]


def _link(message: Any) -> Link:
    def text(name: str) -> str:
        return str(message.get_attr(name) or "")

    information = message.get_attr("IFLA_LINKINFO")
    filters = message.get_attr("IFLA_XDP")
    bus, parent = text("IFLA_PARENT_DEV_BUS_NAME"), text("IFLA_PARENT_DEV_NAME")
    beyond = message.get_attr("IFLA_LINK_NETNSID")
    properties = message.get_attr("IFLA_PROP_LIST")
    return Link(
        index=message["index"],
        name=text("IFLA_IFNAME"),
        flags=message["flags"],
        address=text("IFLA_ADDRESS"),
        mtu=message.get_attr("IFLA_MTU") or 0,
        kind=str(information.get_attr("IFLA_INFO_KIND") or "") if information else "",
        permanent=text("IFLA_PERM_ADDRESS"),
        parent=f"{bus}/{parent}" if bus and parent else "",
        lower=message.get_attr("IFLA_LINK") or 0,
        beyond=-1 if beyond is None else beyond,
        master=message.get_attr("IFLA_MASTER") or 0,
        filters=_ways(filters) if filters else (),
        aliases=tuple(map(str, properties.get_attrs("IFLA_ALT_IFNAME"))) if properties else (),
    )


def _ways(filters: Any) -> tuple[int, ...]:
    ways = tuple(way for name, way in _XDP_WAYS.items() if filters.get_attr(name))
    return ways or ((0,) if filters.get_attr("IFLA_XDP_ATTACHED") else ())


def unfilter(index: int, way: int) -> None:
    """Take away the XDP program that is attached in a WAY to an interface of the namespace that this thread
    is in: without the way the kernel takes the driver's, and leaves a generic one where it is.  Raises
    OSError.  By hand, since pyroute2 0.7 packs the flags wrong."""
    none = struct.pack("=HHi", 8, _IFLA_XDP_FD, -1) + struct.pack("=HHI", 8, _IFLA_XDP_FLAGS, way)
    request = struct.pack("=BxHiII", 0, 0, index, 0, 0) + struct.pack("=HH", 4 + len(none), _IFLA_XDP) + none
    header = struct.pack("=IHHII", _HEADER + len(request), _RTM_SETLINK, _ACKNOWLEDGED, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as link:
        link.send(header + request)
        (error,) = struct.unpack_from("=i", link.recv(4096), _HEADER)
    if error:
        raise OSError(-error, os.strerror(-error))
