"""How long a start takes over what an earlier life left: devices with full histories, and leases."""

from __future__ import annotations

import statistics
import time

from hetero_agent import names
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

#: Devices of a lease; of so many leases that each device comes through its states in turn.
_SHARE = 64
#: A lease is three transitions of its devices; the agent keeps twenty.
_TURNS = 7


def _history(root: Client, count: int) -> int:
    """The transitions that are kept of the last device."""
    path = names.device_path(f"npu-{count - 1:04}")
    return len(root.call(path, names.DEVICE, "GetHistory", "u", 20))


def ready(count: int, times: int = 3) -> float:
    """Milliseconds from exec to READY=1 over COUNT devices with 20 transitions each, the median of TIMES."""
    config = CONFIG.replace('log-level = "debug"', 'log-level = "warning"')
    config += f"\n[limits]\ndevices-per-client = {max(count, 1)}\n"
    bus = PrivateBus()
    agent = AgentProcess(bus, config=config)
    try:
        agent.start()
        with Vendor(agent) as vendor, Client(bus, listen=False) as root:
            vendor.add(*(f"npu-{number:04}" for number in range(count)))

            def idle() -> bool:
                counts = root.properties(names.ROOT, names.MANAGER)["Resources"].get(RESOURCE, {})
                return bool(counts.get("idle") == count)

            for turn in range(_TURNS):
                wait_until(idle, 120, f"{count} idle devices")
                leases = []
                while (left := count - _SHARE * len(leases)) > 0:
                    one = f"{turn}-{len(leases)}"
                    leases.append(root.allocate(one, RESOURCE, min(left, _SHARE), {"confirm": V("b", True)})[0])
                for number, lease in enumerate(leases):
                    root.release(f"{turn}-{number}", lease)
            wait_until(idle, 120, f"{count} idle devices")
            kept = _history(root, count)
        if kept < 20:
            raise RuntimeError(f"only {kept} transitions are kept")
        took = []
        for _ in range(times):
            agent.terminate(60)
            begun = time.monotonic()
            agent.spawn()
            wait_until(agent.ready, 60, "READY=1")
            took.append((time.monotonic() - begun) * 1000)
        return statistics.median(took)
    finally:
        agent.close()
        bus.close()
