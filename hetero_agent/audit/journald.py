"""Whether journald can be reached.

sd_journal_send(3) reports success when the socket is missing, so somebody must look first.
"""

from __future__ import annotations

import socket
from typing import Final

JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"


def reachable(path: str = JOURNAL_SOCKET) -> bool:
    """Tell whether somebody has the journal's socket open.  Takes microseconds, never blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
