"""A health edge in a loop of its own, with devices whose sysfs is a directory of the test's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero_agent.config import HealthTable
from hetero_agent.core.events import Event, HealthJudged, Note
from hetero_agent.core.model import DeviceRecord, Health, Instant, Node, Opinion, Origin, Role
from hetero_agent.core.symptoms import Symptoms
from hetero_agent.engine import instant
from hetero_agent.health import kernlog, rounds
from hetero_agent.health.edge import HealthEdge
from tests.support.wait import wait_until_async

#: Fast enough for a test; nothing is read from the kernel's messages unless a test says so.  A busy
#: machine may keep a good probe for a while.
FAST = HealthTable(interval=0.25, confirm=0.08, deadline=20, kernel_log="off")
#: Where something hangs.
SHORT = replace(FAST, deadline=0.4)

GOOD = Opinion(Health.HEALTHY)


def device_directory(top: Path, address: str = "0000:3b:00.0", **files: str) -> Path:
    """Make what sysfs has of a PCI device below TOP; ``__`` in a name is a slash, CONFIG's text is
    hex digits."""
    path = top / address
    path.mkdir(parents=True)
    (path / "power").mkdir()
    given = {"power__runtime_status": "active", "power__control": "on", "power_state": "D0", **files}
    for name, text in given.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        if name == "config":
            file.write_bytes(bytes.fromhex(text))
        else:
            file.write_text(text + "\n")
    return path


def bind(path: Path, driver: str = "nvidia") -> Path:
    """Give the device a driver; returns the driver's directory."""
    where = path.parent / "drivers" / driver
    where.mkdir(parents=True, exist_ok=True)
    (path / "driver").symlink_to(where)
    return where


def file_node(path: Path, role: Role = Role.OWN) -> Node:
    """A file as a node."""
    path.touch()
    found = path.stat()
    return Node(str(path), role, "file", fsdev=found.st_dev, inode=found.st_ino)


def kernel_record(path: Path | str, device: str = "", **more: Any) -> DeviceRecord:
    """A device of the kernel with its directory at PATH."""
    given = {"profile": "test", "path": str(path), **more}
    return DeviceRecord(device or Path(path).name, "example.com/npu", **given)


class Rig:
    """The edge, what it submitted, and the paths that it wants looked at again."""

    def __init__(
        self,
        runtime: Path,
        table: HealthTable = FAST,
        probe_command: tuple[str, ...] = rounds.COMMAND,
        log_command: tuple[str, ...] = kernlog.COMMAND,
    ) -> None:
        self.events: list[Event] = []
        self.times: list[float] = []
        self.looks: list[str] = []
        self.edge = HealthEdge(
            table, runtime, self._take, self.now, self.looks.append, probe_command, log_command
        )

    @staticmethod
    def now() -> Instant:
        return instant()

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self.times.append(time.monotonic())

    def said(self, device: str, origin: Origin = Origin.PROBE) -> list[Opinion]:
        """All that ORIGIN said of a device, the latest last."""
        return [
            one.opinions[device]
            for one in self.events
            if isinstance(one, HealthJudged) and one.origin is origin and device in one.opinions
        ]

    def health(self, device: str, origin: Origin = Origin.PROBE) -> Health | None:
        """What ORIGIN says of a device now."""
        said = self.said(device, origin)
        return said[-1].health if said else None

    def notes(self) -> list[Note]:
        """The notes for the audit."""
        return [one for one in self.events if isinstance(one, Note)]

    async def until(
        self, device: str, health: Health, origin: Origin = Origin.PROBE, timeout: float = 30
    ) -> Opinion:
        """Wait until ORIGIN says HEALTH of a device; returns that."""
        await wait_until_async(
            lambda: self.health(device, origin) is health,
            timeout,
            f"{device} {health} ({self.said(device, origin)})",
        )
        return self.said(device, origin)[-1]


def with_rig(
    test: Callable[[Rig], Awaitable[None]],
    runtime: Path,
    symptoms: Mapping[str, Symptoms] | None = None,
    **more: Any,
) -> Rig:
    """Run TEST with a rig, profiles' SYMPTOMS given; nothing is left behind."""

    async def run() -> Rig:
        rig = Rig(runtime, **more)
        rig.edge.start()
        rig.edge.listen(symptoms or {"test": Symptoms()})
        try:
            await test(rig)
        finally:
            await rig.edge.stop()
        return rig

    return asyncio.run(run())


def fifo(path: Path) -> Path:
    """Make a FIFO in the place of a file: whoever opens it to read waits."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path
