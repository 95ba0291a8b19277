"""The numbers of a lease's devices for a program of this process's user, in the place where it runs.

Most drivers count all devices of the host, whoever asks.  Some pass over those that the program can't
open, because its user has no right to them, or a container or a unit hides them: which these are is
known here only.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hetero_agent.client.errors import HeteroError
from hetero_agent.core import address

if TYPE_CHECKING:
    from hetero_agent.client.client import Client
    from hetero_agent.client.manifest import Manifest

#: Variables of such drivers, with the beginning of the nodes that they open; they count in PCI order.
#: Level Zero: intel/compute-runtime, shared/source/os_interface/linux/drm_neo.cpp, Drm::discoverDevices.
_OF_OPENED: Final = {"ZE_AFFINITY_MASK": "/dev/dri/renderD"}


async def here(client: Client, manifest: Manifest) -> Manifest:
    """Return MANIFEST with the numbers that hold here.  The lease's own devices count as ones that can be
    opened.  An agent that doesn't answer leaves it as it is."""
    env = dict(manifest.env)
    for variable in _OF_OPENED.keys() & manifest.env_filtered.keys():
        begin = _OF_OPENED[variable]
        own = {path for _, path, *_ in manifest.nodes if path.startswith(begin)}
        try:
            places = await _places(client, manifest, begin)
        except HeteroError:
            continue
        counted = [path for path in places if path in own or os.access(path, os.R_OK | os.W_OK)]
        if own <= places.keys():
            env[variable] = ",".join(str(number) for number, path in enumerate(counted) if path in own)
    return replace(manifest, env=env)


async def _places(client: Client, manifest: Manifest, begin: str) -> dict[str, str]:
    """The nodes that begin with BEGIN of all devices of the lease's vendor, with their devices' PCI
    addresses and in the order of these.  Raises HeteroError."""
    devices = (await client.snapshot()).devices
    vendors = {one.vendor for one in devices if one.id in manifest.devices}
    found = {}
    for one in devices:
        place = one.id.partition("-")[0]  # a slot's card
        if one.vendor in vendors and address.COMPONENT.fullmatch(place):
            found.update(
                {row.path: place for row in await client.nodes(one.path) if row.path.startswith(begin)}
            )
    return dict(sorted(found.items(), key=lambda item: address.order(item[1])))
