"""The probe worker: a small process that looks at devices, because a sick one may never answer.

What `hetero_agent.workers.child` says of workers; the item at hand is the number of the device in
the request, counted from 1.  ``{"probe": [spec, ...]}`` is answered with ``{"found": [...]}``, what
`probes.probe` returns of each.
"""

from __future__ import annotations

from hetero_agent.health import probes
from hetero_agent.workers import child

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from typing import Any


def _answer(channel: child.Channel, request: dict[str, Any]) -> dict[str, Any]:
    found = []
    for item, spec in enumerate(request["probe"], 1):
        channel.announce(item)
        found.append(probes.probe(spec))
    channel.announce(0)
    return {"found": found}


def main(progress: int) -> None:
    """Serve until the agent is gone."""
    child.run(progress, lambda channel: channel.serve(lambda request: _answer(channel, request)))
