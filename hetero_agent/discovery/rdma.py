"""The ports of RDMA devices (kernel documentation, ABI/stable/sysfs-class-infiniband).  Blocking."""

from __future__ import annotations

from typing import Final

from hetero_agent.discovery import reader

#: Ports of one device that are looked at.  Adapters have one or two.
_MOST: Final = 16

#: What is told of a port, by its file.
_FILES: Final = {"state": "state", "link-layer": "link_layer", "rate": "rate"}


def ports(path: str) -> dict[str, str]:
    """Return what the ports of the RDMA devices at PATH (a PCI device, or an RDMA device without one)
    are like.

    ``rdma-ports`` names them all, as in ``mlx5_0:1,mlx5_0:2``; ``ports`` counts them; ``port-state``,
    ``link-layer`` and ``port-rate`` are what they have, once if that is the same; of several ports each
    has ``port-N-state`` and so on too.  To read this asks the device.
    """
    devices = {name: f"{path}/infiniband/{name}" for name in reader.entries(f"{path}/infiniband")}
    # soft RoCE has no device behind it: PATH is that of the RDMA device then
    devices = devices or {path.rsplit("/", 1)[-1]: path}
    named = {
        f"{device}:{port}": f"{place}/ports/{port}"
        for device, place in sorted(devices.items())
        for port in sorted(filter(str.isdecimal, reader.entries(f"{place}/ports")), key=int)
    }
    shown = dict(list(named.items())[:_MOST])
    if not shown:
        return {}
    found = {"rdma-ports": ",".join(shown), "ports": str(len(shown))}
    for what, file in _FILES.items():
        values = [reader.text(f"{place}/{file}") or "" for place in shown.values()]
        found[what if what == "link-layer" else f"port-{what}"] = ", ".join(dict.fromkeys(filter(None, values)))
        if len(shown) > 1:
            found |= {f"port-{number}-{what}": value for number, value in enumerate(values, 1)}
    return {key: value for key, value in found.items() if value}
