"""Every event of random histories is undone and handled again: all is as before, and the second
outcome equals the first."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.core.history import History


class Undone(History):
    """A history whose every event is undone once."""

    undo = True


Undone.TestCase.settings = settings(
    max_examples=1000 if os.environ.get("HYPOTHESIS_PROFILE") == "more" else 150,
    stateful_step_count=40,
    derandomize=os.environ.get("HYPOTHESIS_PROFILE") != "more",
    deadline=None,
    suppress_health_check=tuple(HealthCheck),
)
TestUndone = Undone.TestCase
