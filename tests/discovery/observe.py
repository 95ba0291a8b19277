"""A `KernelSource` under test, and what it submitted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from hetero_agent.config import DiscoveryTable
from hetero_agent.core.events import Event, Observed
from hetero_agent.core.model import DeviceRecord, Instant
from hetero_agent.discovery import correlate, profiles, sysfs
from hetero_agent.discovery.source import KernelSource
from tests.support.wait import wait_until_async


def now() -> Instant:
    return Instant(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000, time.time_ns() // 1000)


def enumerate_once(directory: Path | None = None) -> dict[str, DeviceRecord]:
    """What one reading of all of /sys gives, without any event."""
    chosen = profiles.load(directory)
    assert not chosen.problems
    found = [sysfs.read_device(anchor, chosen) for anchor in sysfs.list_anchors(chosen).anchors]
    return correlate.finish(
        correlate.correlate(facts, chosen.named(facts.profile)) for facts in found if facts is not None
    )


class Watched:
    """The source, its events in order, and the records as they add up."""

    def __init__(self, directory: Path | None = None, **named: object) -> None:
        table = named.pop("table", DiscoveryTable())
        self.events: list[Observed] = []
        self.records: dict[str, DeviceRecord] = {}
        self.source = KernelSource(table, directory, self._take, now, **named)  # type: ignore[arg-type]

    def _take(self, event: Event) -> None:
        assert isinstance(event, Observed)
        assert event.source == "kernel"
        self.events.append(event)
        self.records.update({record.id: record for record in event.records})
        for gone in event.gone:
            del self.records[gone]

    async def until(self, condition, what: str) -> None:  # type: ignore[no-untyped-def]
        await wait_until_async(lambda: condition(self.records), what=what)


@contextlib.asynccontextmanager
async def watching(directory: Path | None = None, **named: object) -> AsyncIterator[Watched]:
    watched = Watched(directory, **named)
    await watched.source.start()
    try:
        yield watched
    finally:
        await watched.source.stop()
