"""The scan worker: a small process that reads /proc, because reading it can block for ever.

What `hetero_agent.workers.child` says of workers; the item at hand is a pid.  Requests:

- ``{"scan": {device: [[kind, a, b], ...]}, "skip": [pid, ...], "plain": [pid, ...], "contained":
  bool}`` is answered with what `scan.scan` returns;
- ``{"check": pid, "nodes": [[kind, a, b], ...]}`` with ``{"holds": bool, "start": ticks}``, or
  ``{"error": text}`` if the process can't be read (any more).
"""

from __future__ import annotations

import os

from hetero_agent.holders import proc, scan
from hetero_agent.workers import child

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from typing import Any


class Worker:
    """Answers requests one after the other."""

    def __init__(self, channel: child.Channel) -> None:
        self._announce = channel.announce

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        if "check" in request:
            return self._check(request["check"], request["nodes"])
        return scan.scan(
            _targets(request["scan"]),
            request["skip"],
            self._announce,
            request["contained"],
            request["plain"],
        )

    def _check(self, pid: int, nodes: list[list[Any]]) -> dict[str, Any]:
        self._announce(pid)
        try:
            with proc.opened(pid) as base:
                start = proc.stat(base).start
                held = scan.Walk(_targets({"": nodes})).inspect_open(pid, base)
        except OSError as error:
            return {"error": os.strerror(error.errno or 0)}
        finally:
            self._announce(0)
        return {"holds": bool(held), "start": start}


def _targets(given: dict[str, list[list[Any]]]) -> dict[str, list[scan.NodeKey]]:
    return {device: [(kind, a, b) for kind, a, b in nodes] for device, nodes in given.items()}


def main(progress: int) -> None:
    """Serve until the agent is gone."""
    child.run(progress, lambda channel: channel.serve(Worker(channel).answer))
