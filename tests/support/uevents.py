"""Uevents from the kernel itself: injected into this network namespace.

Since Linux 4.18 the kernel's uevent socket takes messages from CAP_SYS_ADMIN of the namespace's
owner and broadcasts them in that namespace as its own (lib/kobject_uevent.c, uevent_net_rcv_skb).
"""

from __future__ import annotations

import socket
import struct

_NETLINK_KOBJECT_UEVENT = 15
_REQUEST_AND_ACK = 0x1 | 0x4


def inject(action: str, path: str, subsystem: str, **properties: str) -> None:
    """Have the kernel send a uevent for PATH below /sys.  Raises OSError if it refuses."""
    devpath = path.removeprefix("/sys")
    pairs = {"ACTION": action, "DEVPATH": devpath, "SUBSYSTEM": subsystem, **properties}
    body = f"{action}@{devpath}\0".encode() + b"".join(
        f"{key}={value}\0".encode() for key, value in pairs.items()
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_KOBJECT_UEVENT) as sender:
        sender.bind((0, 0))
        sender.settimeout(5)
        sender.sendto(struct.pack("=IHHII", 16 + len(body), 16, _REQUEST_AND_ACK, 1, 0) + body, (0, 0))
        error = struct.unpack("=i", sender.recv(4096)[16:20])[0]
    if error:
        raise OSError(-error, "the kernel refused a uevent")
