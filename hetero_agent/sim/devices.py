"""The virtual devices: what is known of each, and the file that stands for it.

A device is a regular file, found by its inode, which processes can open, map and hold.  It is never
a copy of another device's node: a node made like /dev/null shares its number with the stdin of half
the machine.
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hetero_agent.sim.commands import Add, SimError
from hetero_agent.text import printable

#: Where the files lie unless the command line says otherwise.
DIRECTORY: Final = "/run/hetero-agent-sim/devices"
#: Mode and group of the files unless the scenario says otherwise.
MODE: Final = 0o660
GROUP: Final = "hetero"

#: Most devices altogether; the agent's default limit for one provider.
MOST: Final = 4096

# One page, so that a device can be mapped.
_SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class Virtual:
    """One virtual device.  FROZEN_UNTIL is the time (of `Stock`'s caller) until which nothing new is
    reported of it: 0 for now on, infinity for until it recovers; SHOWN is what is reported then."""

    id: str
    resource: str
    path: str
    model: str
    memory: int = 0
    parent: str = ""
    numa: int = -1
    serial: str = ""
    health: str = "healthy"
    reason: str = ""
    frozen_until: float = 0.0
    shown: tuple[str, str] = ("healthy", "")

    def told(self, now: float) -> tuple[str, str]:
        """Health and reason as the provider tells them at NOW."""
        return self.shown if now < self.frozen_until else (self.health, self.reason)

    def entry(self, now: float) -> dict[str, Any]:
        """The device as ReportDevices wants it."""
        health, reason = self.told(now)
        attributes: dict[str, Any] = {"virtual": True}
        if self.memory:
            attributes |= {"memory-total": self.memory, "memory-free": self.memory}
        return {
            "id": self.id,
            "resource": self.resource,
            "nodes": [(self.path, "own")],
            "vendor": "Virtual",
            "model": self.model,
            "driver": "sim",
            "serial": self.serial,
            "parent": self.parent,
            "aliases": [self.serial] if self.serial and self.serial != self.id else [],
            "numa-nodes": [self.numa] if self.numa >= 0 else [],
            "attributes": attributes,
            "health": health,
            "reason": reason,
        }

    def listed(self, now: float) -> dict[str, Any]:
        """The device as the control socket's `list` shows it."""
        return {
            "id": self.id,
            "resource": self.resource,
            "path": self.path,
            "model": self.model,
            "memory": self.memory,
            "parent": self.parent,
            "numa": self.numa if self.numa >= 0 else None,
            "serial": self.serial,
            "health": self.health,
            "reason": self.reason,
            "hung": now < self.frozen_until,
        }


class Stock:
    """All virtual devices, by id.  Methods raise SimError and change nothing then."""

    def __init__(self, directory: Path, mode: int = MODE, group: str = GROUP) -> None:
        self.directory = directory
        self.devices: dict[str, Virtual] = {}
        self._mode = mode
        self._gid = _gid(group)
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise SimError(f"directory {printable(directory)}: {error.strerror}") from error

    def add(self, wanted: Add) -> tuple[str, ...]:
        """Make the devices and their files; return their ids.  A file that is there from an earlier
        run is kept: a process may still hold it."""
        ids = wanted.ids
        if len(ids) + len(self.devices) > MOST:
            raise SimError(f"add: that would be {len(ids) + len(self.devices)} devices; the most is {MOST}")
        for one in ids:
            if len(one) > 63:
                raise SimError(f"add: id {one} is longer than 63 characters")
            if one in self.devices:
                raise SimError(f"add: there is a device {one} already")
        if wanted.parent and wanted.parent not in self.devices:
            raise SimError(f"add: there is no device {wanted.parent} that could be the parent")
        used = {device.serial for device in self.devices.values() if device.serial}
        if wanted.serial and not used.isdisjoint(self._serial(wanted, at) for at in range(wanted.count)):
            raise SimError(f"add: serial {wanted.serial} is another device's already")
        made: list[Path] = []
        try:
            for one in ids:
                path = self.directory / one
                if self._make_file(path):
                    made.append(path)
        except SimError:
            for path in made:
                path.unlink(missing_ok=True)
            raise
        for at, one in enumerate(ids):
            self.devices[one] = Virtual(
                one,
                wanted.resource,
                str(self.directory / one),
                wanted.model,
                wanted.memory,
                wanted.parent,
                wanted.numa,
                self._serial(wanted, at),
            )
        return ids

    def remove(self, ids: Iterable[str]) -> None:
        """Take devices and their files away; processes that hold a file keep it."""
        wanted = set(ids)
        for one in wanted:
            self._get(one)
        for device in self.devices.values():
            if device.parent in wanted and device.id not in wanted:
                raise SimError(f"remove: {device.id} is a part of {device.parent}; remove it first")
        for one in wanted:
            device = self.devices.pop(one)
            try:
                Path(device.path).unlink(missing_ok=True)
            except OSError as error:
                raise SimError(f"remove: {device.path}: {error.strerror}") from error

    def set_health(self, device: str, health: str, reason: str) -> None:
        """Change a device's health; what is reported of a hung one stays as it is."""
        self.devices[device] = replace(self._get(device), health=health, reason=reason)

    def freeze(self, device: str, until: float, now: float) -> None:
        """Have the provider say nothing new of a device until the time UNTIL (0: from now on it does)."""
        one = self._get(device)
        self.devices[device] = replace(one, frozen_until=until, shown=one.told(now))

    def entries(self, now: float) -> list[dict[str, Any]]:
        """The full list for ReportDevices."""
        return [device.entry(now) for device in self.devices.values()]

    def _get(self, device: str) -> Virtual:
        try:
            return self.devices[device]
        except KeyError:
            raise SimError(f"there is no device {printable(device, 80)}") from None

    @staticmethod
    def _serial(wanted: Add, at: int) -> str:
        return f"{wanted.serial}-{at}" if wanted.serial and wanted.count > 1 else wanted.serial

    def _make_file(self, path: Path) -> bool:
        """Have a file of one page, our mode and group at PATH; tell whether it is new."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        new = not os.path.lexists(path)
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise SimError(f"file {printable(path)}: {error.strerror}") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise SimError(f"file {printable(path)}: something else is there already")
            if found.st_size < _SIZE:
                os.ftruncate(fd, _SIZE)
            os.fchown(fd, -1, self._gid)
            os.fchmod(fd, self._mode)
        except OSError as error:
            raise SimError(f"file {printable(path)}: {error.strerror}") from error
        finally:
            os.close(fd)
        return new


def _gid(group: str) -> int:
    """The group's gid; our own (-1: no change) where the host has no such group."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return -1
