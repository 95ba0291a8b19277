"""The uevent monitor: the one edge to pyudev's netlink socket.

A monitor that lost events (ENOBUFS) or fails in any other way stays deaf in pyudev: poll()
raises before it reads, for ever.  So it is thrown away and a new one made, and the owner is told
to compare with the whole of /sys.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyudev

#: Where udevd listens; without it the ``udev`` source never says anything.
UDEV_CONTROL: Final = "/run/udev/control"
#: Events taken in one turn of the loop; the rest waits for the next turn.
BUDGET: Final = 64
#: What systemd asks for (SO_RCVBUFFORCE, needs CAP_NET_ADMIN), and what is tried after a refusal.
BUFFER_SIZES: Final = (128 * 1024 * 1024, 8 * 1024 * 1024)
#: Seconds until a monitor that could not be made is tried again.
RETRY: Final = 1.0


@dataclass(frozen=True, slots=True)
class Uevent:
    """One uevent.  PATH is below /sys; OLD_PATH, after a ``move``, where it was before.  WEDGED is
    how a DRM driver that gave up its device says that it can be recovered (kernel documentation,
    "DRM UAPI", Device Wedging)."""

    action: str
    subsystem: str
    path: str
    old_path: str = ""
    wedged: str = ""


def choose_source(configured: str) -> tuple[str, str]:
    """Return the source to listen to (``udev`` or ``kernel``) and what is wrong about it.

    udev's events come after its rules, so nodes have their final modes then; the kernel's come
    in any case.
    """
    there = os.path.exists(UDEV_CONTROL)  # noqa: PTH110  (one stat, no object wanted)
    if configured == "udev" and not there:
        return "udev", f"{UDEV_CONTROL} is missing, so udev sends no events: only resyncs see changes"
    if configured == "auto" and not there:
        return "kernel", (
            f"{UDEV_CONTROL} is missing: listening to the kernel's own uevents, which come before"
            " any rule has set a node's mode"
        )
    return ("kernel" if configured == "kernel" else "udev"), ""


class Monitor:
    """Uevents of some subsystems, handed over on the loop.

    EVENTS gets what one turn of the loop read, LOST the reason after events were (or may have
    been) lost; the new monitor listens already when it is called.
    """

    def __init__(
        self,
        source: str,
        subsystems: Iterable[str],
        events: Callable[[list[Uevent]], None],
        lost: Callable[[str], None],
        buffer_sizes: tuple[int, ...] = BUFFER_SIZES,
    ) -> None:
        self.source = source
        self._subsystems = tuple(sorted(subsystems))
        self._events = events
        self._lost = lost
        self._buffer_sizes = buffer_sizes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._monitor: Any = None
        self._retry: asyncio.TimerHandle | None = None
        self.last_alive = 0.0
        self.problem = ""

    def start(self) -> None:
        """Listen.  Raises OSError if the socket can't be had."""
        self._loop = asyncio.get_running_loop()
        self._open()

    def stop(self) -> None:
        """Listen no more."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._close()

    def check(self) -> None:
        """Look at the socket now, which proves that it can still be read; read what is there."""
        if self._monitor is not None:
            self._read()

    def _open(self) -> None:
        assert self._loop is not None
        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source=self.source)
        for subsystem in self._subsystems:
            monitor.filter_by(subsystem)
        for size in self._buffer_sizes:
            try:
                monitor.set_receive_buffer_size(size)
                break
            except OSError:
                continue
        monitor.start()
        self._monitor = monitor
        self._loop.add_reader(monitor.fileno(), self._read)
        self.last_alive = time.monotonic()
        self.problem = ""

    def _close(self) -> None:
        """Drop the monitor; its socket closes with the object."""
        if self._monitor is not None and self._loop is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._monitor = None

    def _read(self) -> None:
        events: list[Uevent] = []
        reason = ""
        try:
            for _ in range(BUDGET):
                device = self._monitor.poll(0)
                if device is None:
                    break
                event = _uevent(device)
                if event is not None:
                    events.append(event)
        except (OSError, ValueError, OverflowError) as error:
            # pyudev gives ENOBUFS as OSError without errno (from poll) and EINVAL as ValueError
            reason = _reason(error)
        self.last_alive = time.monotonic()
        if events:
            self._events(events)
        if reason:
            self._renew(reason)

    def _renew(self, reason: str) -> None:
        self._close()
        self._retry = None
        try:
            self._open()
        except OSError as error:
            assert self._loop is not None
            self.problem = f"the uevent monitor can't be made ({error.strerror}); it is tried every {RETRY:g} s"
            self._retry = self._loop.call_later(RETRY, self._renew, reason)
            return
        self._lost(reason)


def _uevent(device: Any) -> Uevent | None:
    """Take what is needed of a pyudev device; None for an event that makes no sense."""
    try:
        path = str(device.sys_path)
        old = device.properties.get("DEVPATH_OLD") if device.action == "move" else None
        wedged = str(device.properties.get("WEDGED") or "")
        subsystem = str(device.subsystem or "")
        return Uevent(str(device.action), subsystem, path, f"/sys{old}" if old else "", wedged)
    except (UnicodeDecodeError, AttributeError, KeyError):
        return None


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number == errno.ENOBUFS or "polling" in str(error):
        return "events-lost"
    return "monitor-failed"
