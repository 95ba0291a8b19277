"""News of network interfaces: a change of a link's state has no uevent (rtnetlink(7))."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

log = logging.getLogger("hetero_agent.discovery")

#: linux/rtnetlink.h: the group of news of interfaces, and the messages about them.
_GROUP_LINK: Final = 1
_LINK_MESSAGES: Final = (16, 17)
#: linux/netlink.h: struct nlmsghdr; linux/rtnetlink.h: struct ifinfomsg, struct rtattr, IFLA_IFNAME.
_HEADER: Final = struct.Struct("=IHHII")
_INTERFACE_SIZE: Final = 16
_ATTRIBUTE: Final = struct.Struct("=HH")
_NAME: Final = 3

_DATAGRAM_MAX: Final = 65536
#: Datagrams taken in one turn of the loop.
_BUDGET: Final = 32


class LinkNews:
    """Tells CHANGED, on the loop, the name of each interface of this network namespace that has news;
    None if some were lost."""

    def __init__(self, changed: Callable[[str | None], None]) -> None:
        self._changed = changed
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Listen, if not yet; where that is not to be had, changes are seen later, with whatever else is."""
        if self._socket is not None:
            return
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0
            )
            self._socket.bind((0, _GROUP_LINK))
        except OSError as error:
            log.warning("news of network interfaces can't be had: %s", error.strerror)
            self.stop()
            return
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def stop(self) -> None:
        """Listen no more."""
        if self._socket is not None:
            with contextlib.suppress(RuntimeError):  # it never came to listening
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _read(self) -> None:
        assert self._socket is not None
        for _ in range(_BUDGET):
            try:
                data = self._socket.recv(_DATAGRAM_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    log.warning("news of network interfaces ended: %s", error.strerror)
                    self.stop()
                self._changed(None)
                return
            for name in names_in(data):
                self._changed(name)


def names_in(data: bytes) -> Iterator[str]:
    """Yield the names of the interfaces that the messages in DATA are about."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        end = min(at + length, len(data))
        if length < _HEADER.size:
            return
        if kind in _LINK_MESSAGES:
            yield from _name(data, at + _HEADER.size + _INTERFACE_SIZE, end)
        at += (length + 3) & ~3


def _name(data: bytes, at: int, end: int) -> Iterator[str]:
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        if kind == _NAME:
            # any bytes but / and blanks may be one (net/core/dev.c, dev_valid_name); as sysfs's are read
            yield os.fsdecode(data[at + _ATTRIBUTE.size : min(at + length, end)].rstrip(b"\0"))
            return
        at += (length + 3) & ~3
