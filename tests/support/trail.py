"""The audit trail of an agent that writes it to its log (``--audit stderr``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.support.process import Program
from tests.support.wait import wait_until


def entries(agent: Program, kind: str) -> list[dict[str, Any]]:
    """The entries of one HETERO_KIND so far, oldest first.  What was written just before a crash is
    written once more, under its number."""
    found = {}
    for line in agent.log.splitlines():
        if line.startswith("{") and line.endswith("}") and f'"HETERO_KIND":"{kind}"' in line:
            entry = json.loads(line)
            found[entry["HETERO_SEQUENCE"]] = entry
    return list(found.values())


def signals(agent: Program, pid: int) -> list[str]:
    """What was sent to PID, or why not."""
    return [
        one["HETERO_REASON"] for one in entries(agent, "process-signalled") if one["HETERO_PID"] == str(pid)
    ]


def wait_signals(agent: Program, pid: int, wanted: Sequence[str]) -> None:
    """Wait until exactly WANTED is what became of signals to PID: the trail is written a little later."""
    wait_until(lambda: signals(agent, pid) == list(wanted), what=f"{wanted} for {pid}")
