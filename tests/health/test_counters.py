"""Growing error counters."""

from __future__ import annotations

import pytest

from hetero_agent.core.verdict import Grade
from hetero_agent.health.counters import Sample, judge

SECOND = 1_000_000


def grown(name: str, before: int, now: int, seconds: int = 60, per_minute: int = 60) -> list[tuple[Grade, str]]:
    found = judge(Sample(0, {name: before}), Sample(seconds * SECOND, {name: now}), per_minute)
    return [(one.grade, one.reason) for one in found]


@pytest.mark.parametrize(
    ("name", "before", "now", "seconds", "expected"),
    [
        ("aer-correctable", 5, 5, 60, []),
        ("aer-correctable", 0, 59, 60, []),
        ("aer-correctable", 0, 60, 60, [(Grade.DEGRADED, "60 correctable PCIe errors per minute")]),
        ("aer-correctable", 0, 8, 8, [(Grade.DEGRADED, "60 correctable PCIe errors per minute")]),
        ("aer-correctable", 0, 1, 1, []),
        ("aer-correctable", 100, 3, 60, []),
        ("ras-ce", 0, 120, 60, [(Grade.DEGRADED, "120 correctable memory errors per minute")]),
        ("aer-nonfatal", 3, 4, 60, [(Grade.BROKEN, "1 uncorrectable PCIe errors")]),
        ("aer-fatal", 0, 2, 60, [(Grade.BROKEN, "2 fatal PCIe errors")]),
        ("aer-fatal", 2, 2, 60, []),
        ("aer-fatal", 2, 0, 60, []),
        ("ras-ue", 1, 2, 60, [(Grade.BROKEN, "1 uncorrectable memory errors")]),
        ("unheard-of", 1, 1000, 60, []),
    ],
)
def test_what_growth_means(
    name: str, before: int, now: int, seconds: int, expected: list[tuple[Grade, str]]
) -> None:
    assert grown(name, before, now, seconds) == expected


def test_what_was_there_before_the_first_look_means_nothing() -> None:
    assert judge(None, Sample(0, {"aer-fatal": 7}), 60) == []
    assert judge(Sample(0, {}), Sample(SECOND, {"aer-fatal": 7}), 60) == []


def test_the_evidence_has_the_numbers() -> None:
    [found] = judge(Sample(0, {"aer-fatal": 1}), Sample(8 * SECOND, {"aer-fatal": 3}), 60)
    assert found.evidence == {"aer-fatal": "3", "aer-fatal-more": "2", "seconds": "8"}
