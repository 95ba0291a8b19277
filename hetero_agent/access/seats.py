"""Who sits at this machine: logind gives the active user of a seat an ACL entry on nodes with udev's
tag ``uaccess``, which systemd's own rules put on graphics cards."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Final

# logind writes a file per seat here (sd_seat_get_active(3) reads them)
_SEATS: Final = Path("/run/systemd/seats")


@functools.cache
def _libsystemd() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libsystemd.so.0")
    except OSError:
        return None


def active() -> dict[int, str]:
    """Return the seat of each uid whose session is in the foreground there; empty where no logind
    runs."""
    library = _libsystemd()
    try:
        seats = os.listdir(_SEATS)  # noqa: PTH208 (names)
    except OSError:
        return {}
    found = {}
    for seat in seats:
        uid = ctypes.c_uint32()
        if library is not None and library.sd_seat_get_active(seat.encode(), None, ctypes.byref(uid)) >= 0:
            found[uid.value] = seat
    return found
