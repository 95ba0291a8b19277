"""Waiting for a condition instead of sleeping for luck."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds that a test waits for what must come.  Long enough for a machine that is busy with other
#: things: it is no bound.  What must come within a time is measured (`tests.support.timing`).
PATIENCE = 30.0


def wait_until(condition: Callable[[], T], timeout: float = PATIENCE, what: str = "the condition") -> T:
    """Return the first true value of CONDITION; fail the test after TIMEOUT seconds."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"{what} did not come within {timeout} s; last: {value!r}"
        time.sleep(0.005)


async def wait_until_async(
    condition: Callable[[], T], timeout: float = PATIENCE, what: str = "the condition"
) -> T:
    """Like `wait_until`, and lets the loop run between looks."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"{what} did not come within {timeout} s; last: {value!r}"
        await asyncio.sleep(0.005)
