"""Resource limits that the devices of a lease need, for the command that uses them."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from hetero_agent.client.manifest import UNLIMITED


def give(pid: int, wanted: Mapping[str, int]) -> list[str]:
    """Raise the limits of process PID to those WANTED (setrlimit(2)'s names, lower case), as far as that
    is allowed; return what is left below, said for whoever can do something about it."""
    short = []
    for name, value in sorted(wanted.items()):
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            continue
        want = resource.RLIM_INFINITY if value == UNLIMITED else value
        soft, hard = resource.prlimit(pid, number)
        if _reaches(soft, want):
            continue
        if _set(pid, number, want, hard if _reaches(hard, want) else want):
            continue
        _set(pid, number, hard, hard)
        short.append(
            f"the limit {name} is {_shown(hard)} and the devices need {_shown(want)}: {name} in"
            f" limits.conf(5), or Limit{name.upper()}= of the unit that this runs in"
        )
    return short


def _set(pid: int, number: int, soft: int, hard: int) -> bool:
    try:
        resource.prlimit(pid, number, (soft, hard))
    except (PermissionError, ValueError):
        return False
    return True


def _reaches(have: int, want: int) -> bool:
    return have == resource.RLIM_INFINITY or (want != resource.RLIM_INFINITY and have >= want)


def _shown(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
