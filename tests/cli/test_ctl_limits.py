"""Resource limits for a command: raised as far as that is allowed, and what is short is said."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable

import pytest

from hetero_agent.cli.limits import give

MIB = 2**20
#: No limit, as manifests say it, and as resource does.
NONE, FREE = 2**64 - 1, resource.RLIM_INFINITY


def kernel(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, *, root: bool
) -> Callable[[], tuple[int, int]]:
    """Have a process 7 with these limits; only ROOT may raise the second (setrlimit(2))."""
    now = (soft, hard)

    def prlimit(pid: int, number: int, limits: tuple[int, int] | None = None) -> tuple[int, int]:
        nonlocal now
        assert (pid, number) == (7, resource.RLIMIT_MEMLOCK)
        if limits is not None:
            wanted = [2**64 if one == FREE else one for one in limits]
            if wanted[1] > (2**64 if now[1] == FREE else now[1]) and not root:
                raise PermissionError(1, "not allowed to raise maximum limit")
            if wanted[0] > wanted[1]:
                raise ValueError("current limit exceeds maximum limit")
            now = limits
        return now

    monkeypatch.setattr(resource, "prlimit", prlimit)
    return lambda: now


@pytest.mark.parametrize(
    ("soft", "hard", "want", "root", "then"),
    [
        (MIB, 4 * MIB, 2 * MIB, False, (2 * MIB, 4 * MIB)),
        (2 * MIB, 4 * MIB, MIB, False, (2 * MIB, 4 * MIB)),
        (MIB, FREE, NONE, False, (FREE, FREE)),
        (FREE, FREE, MIB, False, (FREE, FREE)),
        (MIB, 4 * MIB, NONE, True, (FREE, FREE)),
        (MIB, 4 * MIB, 8 * MIB, True, (8 * MIB, 8 * MIB)),
    ],
)
def test_what_may_be_given_is(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, want: int, root: bool, then: tuple[int, int]
) -> None:
    now = kernel(monkeypatch, soft, hard, root=root)
    assert give(7, {"memlock": want, "unheard-of": 1}) == []
    assert now() == then


def test_what_is_short_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = kernel(monkeypatch, MIB, 4 * MIB, root=False)
    [text] = give(7, {"memlock": NONE})
    assert now() == (4 * MIB, 4 * MIB)
    assert text == (
        f"the limit memlock is {4 * MIB} and the devices need unlimited: memlock in limits.conf(5), or"
        " LimitMEMLOCK= of the unit that this runs in"
    )


def test_of_a_real_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        resource.prlimit(sleeper.pid, resource.RLIMIT_MEMLOCK, (65536, 131072))
        assert give(sleeper.pid, {"memlock": 100_000}) == []
        assert resource.prlimit(sleeper.pid, resource.RLIMIT_MEMLOCK) == (100_000, 131072)
        sleeper.kill()
