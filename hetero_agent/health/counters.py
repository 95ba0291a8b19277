"""Error counters that only grow: what their growth between two probes says.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetero_agent.core.verdict import Finding, Grade

#: Counters of errors that the hardware corrected: their rate counts.
_CORRECTED = {"aer-correctable": "correctable PCIe errors", "ras-ce": "correctable memory errors"}
#: Counters of errors that nobody corrected: each one counts.
_BROKEN = {
    "aer-nonfatal": "uncorrectable PCIe errors",
    "aer-fatal": "fatal PCIe errors",
    "ras-ue": "uncorrectable memory errors",
}
_MINUTE = 60_000_000


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one boot time (µs)."""

    at: int
    counts: Mapping[str, int]


def judge(before: Sample | None, now: Sample, per_minute: int) -> list[Finding]:
    """Return what has come between BEFORE and NOW; a counter that fell began anew."""
    found: list[Finding] = []
    if before is None:
        return found
    passed = max(1, now.at - before.at)
    for name, count in now.counts.items():
        more = count - before.counts.get(name, count)
        if more <= 0:
            continue
        evidence = {name: str(count), f"{name}-more": str(more), "seconds": str(passed // 1_000_000)}
        if name in _BROKEN:
            found.append(Finding(Grade.BROKEN, f"{more} {_BROKEN[name]}", evidence))
        elif name in _CORRECTED and more > 1 and more * _MINUTE >= per_minute * passed:
            rate = more * _MINUTE // passed
            found.append(Finding(Grade.DEGRADED, f"{rate} {_CORRECTED[name]} per minute", evidence))
    return found
