"""What must hold at the end of every drill: nothing lost, nothing given twice, nothing kept for ever."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from hetero_agent import names
from tests.support.agent import AgentProcess
from tests.support.calls import Client
from tests.support.wait import wait_until


def leases(client: Client) -> dict[str, list[str]]:
    """The leases that there are, and the ids of the devices that each has."""
    objects = client.call(names.ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
    return {
        path: [names.device_id_of(one) for one in interfaces[names.LEASE]["Devices"]]
        for path, interfaces in objects.items()
        if names.LEASE in interfaces
    }


def nothing_twice(client: Client) -> None:
    """No device is in two leases; what a lease has lost may be another's by now."""
    objects = client.call(names.ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
    held = [interfaces[names.LEASE] for interfaces in objects.values() if names.LEASE in interfaces]
    counted = Counter(device for one in held for device in set(one["Devices"]) - set(one["Lost"]))
    assert not counted or max(counted.values()) == 1, counted


def all_free(client: Client, agent: AgentProcess, devices: Iterable[str], timeout: float = 30) -> None:
    """Every device is there and idle, no lease is left, and the audit trail has no gap."""
    wanted = dict.fromkeys(devices, "idle")

    def look() -> bool:
        states = {device: found["State"] for device, found in client.devices().items()}
        return {device: states.get(device) for device in wanted} == wanted

    wait_until(look, timeout, f"{len(wanted)} idle devices")
    wait_until(lambda: not leases(client), what="the end of all leases")
    assert client.properties(names.ROOT, names.MANAGER)["Leases"] == 0
    no_gap(agent)


def no_gap(agent: AgentProcess) -> None:
    """The audit trail of all lives of AGENT has every sequence number (some perhaps twice)."""

    def missing() -> list[int]:
        numbers = {
            int(json.loads(line)["HETERO_SEQUENCE"])
            for line in agent.log.splitlines()
            if line.startswith("{") and '"HETERO_SEQUENCE"' in line and line.endswith("}")
        }
        return sorted(set(range(1, max(numbers, default=0) + 1)) - numbers)

    wait_until(lambda: not missing(), what="an audit trail without a gap")
