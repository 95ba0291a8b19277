"""Thousands of steps of random histories; HYPOTHESIS_PROFILE=more walks further and elsewhere."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.core.history import History

_CALM = tuple(HealthCheck)

settings.register_profile(
    "ci", max_examples=300, stateful_step_count=50, derandomize=True, deadline=None, suppress_health_check=_CALM
)
settings.register_profile(
    "more", max_examples=3000, stateful_step_count=80, deadline=None, suppress_health_check=_CALM
)

History.TestCase.settings = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
TestHistory = History.TestCase
