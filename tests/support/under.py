"""Tests that run as a whole under another command: a wrapper, a namespace, fewer capabilities."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import ParamSpec

from tests.support.process import ROOT

P = ParamSpec("P")

_INSIDE = "HETERO_AGENT_TEST_INSIDE"


def run_under(*command: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run the decorated test in a child pytest that COMMAND starts."""

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*arguments: P.args, **named: P.kwargs) -> None:
            if os.environ.get(_INSIDE):
                test(*arguments, **named)
                return
            node = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]
            done = subprocess.run(
                [*command, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node],
                cwd=ROOT,
                env={**os.environ, _INSIDE: "1"},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            shown = f"{done.stdout}\n{done.stderr}"
            assert done.returncode == 0, f"under {command[0]}: status {done.returncode}\n{shown}"
            assert "1 passed" in done.stdout, shown

        return run

    return decorate
