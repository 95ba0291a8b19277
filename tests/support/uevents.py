"""Uevents from the kernel itself: injected into this network namespace.

Since Linux 4.18 the kernel's uevent socket takes messages from CAP_SYS_ADMIN of the namespace's
owner and broadcasts them in that namespace as its own (lib/kobject_uevent.c, uevent_net_rcv_skb).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

_NETLINK_KOBJECT_UEVENT = 15
_REQUEST, _ACK = 0x1, 0x4


def _message(flags: int, action: str, path: str, subsystem: str, properties: Mapping[str, str]) -> bytes:
    devpath = path.removeprefix("/sys")
    pairs = {"ACTION": action, "DEVPATH": devpath, "SUBSYSTEM": subsystem, **properties}
    body = f"{action}@{devpath}\0".encode() + b"".join(
        f"{key}={value}\0".encode() for key, value in pairs.items()
    )
    return struct.pack("=IHHII", 16 + len(body), 16, flags, 1, 0) + body


def flood(count: int, path: str, subsystem: str) -> None:
    """Have the kernel send COUNT uevents, as fast as it goes: every other of the device at PATH, the
    rest of devices beside it that come and go."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_KOBJECT_UEVENT) as sender:
        sender.bind((0, 0))
        for number in range(count):
            action = ("change", "add", "change", "remove")[number % 4]
            place = path if action == "change" else f"{path}-{number // 4 % 1000}"
            sender.sendto(_message(_REQUEST, action, place, subsystem, {}), (0, 0))


def inject(action: str, path: str, subsystem: str, **properties: str) -> None:
    """Have the kernel send a uevent for PATH below /sys.  Raises OSError if it refuses."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_KOBJECT_UEVENT) as sender:
        sender.bind((0, 0))
        sender.settimeout(5)
        sender.sendto(_message(_REQUEST | _ACK, action, path, subsystem, properties), (0, 0))
        error = struct.unpack("=i", sender.recv(4096)[16:20])[0]
    if error:
        raise OSError(-error, "the kernel refused a uevent")
