"""Which network interfaces of the host may be moved: those that it does not need itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hetero_agent.access.links import Link, above, speak
from hetero_agent.access.manifest import AccessError
from hetero_agent.text import printable

#: A flag of interfaces (netdevice(7)).
_LOOPBACK: Final = 0x8

#: rtnetlink(7): the table of local addresses, a route of the kernel's own making, a unicast route,
#: and the scopes of addresses that mean nothing beyond the link and the host.
_TABLE_LOCAL: Final = 255
_PROTO_KERNEL: Final = 2
_UNICAST: Final = 1
_SCOPES_NEAR: Final = (253, 254)

#: Whether RDMA devices can be used in all network namespaces (ib_core's parameter: what
#: ``rdma system`` shows and sets).
_RDMA_SHARED: Final = "/sys/module/ib_core/parameters/netns_mode"


def movable(name: str, links: Sequence[Link], here: int) -> Link:
    """Return the host's interface NAME.  Raises AccessError, saying why, if the host needs it."""
    link = next((one for one in links if one.name == name), None)
    if link is None:
        raise AccessError(f"there is no network interface {printable(name)} on this host")
    reason = _needed(link, links) or _used(link, here) or _bound_to_host(link)
    if reason:
        raise AccessError(f"network interface {name} can't be moved: {reason}")
    return link


def _needed(link: Link, links: Sequence[Link]) -> str:
    if link.flags & _LOOPBACK:
        return "it is the loopback interface"
    if link.master:
        master = next((one for one in links if one.index == link.master), None)
        what = f"{master.kind or 'interface'} {master.name}" if master else f"interface {link.master}"
        return f"it is a member of {what}"
    upper = next(iter(above(link, links)), None)
    if upper is not None:
        return f"{upper.kind or 'interface'} {upper.name} is on top of it"
    return ""


def _used(link: Link, here: int) -> str:
    """Whether the host speaks through it: routes and addresses that are gone once it is moved."""

    def look(netlink: Any) -> str:
        for route in netlink.get_routes():
            table = route.get_attr("RTA_TABLE") or route["table"]
            if route["type"] != _UNICAST or table == _TABLE_LOCAL or link.index not in _outward(route):
                continue
            if route["dst_len"] == 0:
                return "the host's default route goes through it"
            if route["proto"] != _PROTO_KERNEL:
                return f"the host's route to {route.get_attr('RTA_DST')}/{route['dst_len']} goes through it"
        for one in netlink.get_addr(index=link.index):
            if one["index"] == link.index and one["scope"] not in _SCOPES_NEAR:
                return (
                    f"the host has the address {one.get_attr('IFA_ADDRESS')}/{one['prefixlen']} on it;"
                    f" take it away first: ip address flush dev {link.name}"
                )
        return ""

    return speak(here, look)


def _outward(route: Any) -> set[int]:
    hops = [hop["oif"] for hop in route.get_attr("RTA_MULTIPATH") or ()]
    return {route.get_attr("RTA_OIF") or 0, *hops}


def _bound_to_host(link: Link) -> str:
    """Whether the device's RDMA side would stay behind."""
    verbs = f"/sys/class/net/{link.name}/device/infiniband"
    if os.path.isdir(verbs) and _text(_RDMA_SHARED) == "N":  # noqa: PTH112
        return (
            "RDMA devices are in one network namespace each on this host, so that its verbs would stay"
            " behind: rdma system set netns shared"
        )
    return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
