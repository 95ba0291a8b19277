"""Named points at which the agent kills itself when told so, for tests of crash safety.

``HETERO_FAULT_POINT=release:stored`` makes the agent send itself SIGKILL when it gets there.
Without the variable (always, in a service) reaching a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from typing import Final

#: The steps: a grant is decided, stored as prepared, its effects are made, then decided and
#: stored as granted; a confirm (with network interfaces in two steps), a release, an owner's end and a
#: proven return likewise.
STEPS: Final = ("allocate", "granted", "confirm", "attached", "release", "owner-gone", "expired", "return")

#: Where in a step: before the ledger has it, before the bus hears, before the reply, after it.
STAGES: Final = ("decided", "stored", "published", "done")

#: All names that HETERO_FAULT_POINT may have.
POINTS: Final = tuple(f"{step}:{stage}" for step in STEPS for stage in STAGES)

_ARMED: Final = os.environ.get("HETERO_FAULT_POINT", "")


def reach(step: str, stage: str) -> None:
    """Die here if this is the armed point."""
    if _ARMED and step and f"{step}:{stage}" == _ARMED:
        os.kill(os.getpid(), signal.SIGKILL)
