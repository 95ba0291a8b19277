"""Who carries out what leases change on the host: this process, or the privileged helper."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hetero_agent import names
from hetero_agent.access.door import Doer
from hetero_agent.access.grantfile import DIRECTORY
from hetero_agent.access.places import is_system, specifications
from hetero_agent.access.remote import Remote
from hetero_agent.config import AccessTable

#: What the helper may take of the time for a grant: there is some left to say that it was too slow.
_HELPERS_SHARE = 0.8


def choose(table: AccessTable, runtime: Path, bus: str, deadline: float) -> Doer:
    """Return who does it by the configuration's TABLE for the agent whose runtime directory is
    RUNTIME, and which is on the bus at the address BUS.

    ``auto`` is the system's helper for the system's agent, and where its socket is missing this
    process, if it is root.  DEADLINE is the seconds that all of a grant may take.
    """
    named = table.helper not in ("auto", "none")
    path = Path(table.helper if named else names.ACCESS_SOCKET)
    mine = os.geteuid() == 0 and (table.helper == "none" or not path.exists())
    if not named and (mine or not is_system(runtime)):
        return _direct(table, runtime, bus)
    wanted = table.helper != "none" and (table.acl or table.cdi_directory != "" or table.move_netdevs)
    return Remote(path, runtime / DIRECTORY, deadline * _HELPERS_SHARE, wanted=wanted)


def _direct(table: AccessTable, runtime: Path, bus: str) -> Doer:
    # late: an agent with a helper needs none of it
    from hetero_agent.access.cdi import confirming  # noqa: PLC0415
    from hetero_agent.access.direct import Direct  # noqa: PLC0415
    from hetero_agent.access.hands import Hands  # noqa: PLC0415
    from hetero_agent.access.netdev import Netdevs  # noqa: PLC0415

    # the helper's own records, so that either can undo what the other made
    records = Path(names.ACCESS_DIR) if is_system(runtime) else runtime / "access"
    hook = confirming(bus, sys.executable)
    hands = Hands(records, specifications(table, runtime), table.acl and os.geteuid() == 0, hook)
    return Direct(hands, Netdevs(records, table.move_netdevs))
