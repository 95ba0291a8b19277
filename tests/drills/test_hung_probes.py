"""256 devices, and ten of them hang whoever looks at them."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path

from tests.drills.endstate import all_free, no_gap
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client
from tests.support.fakesys import FakeSys, in_own_mounts
from tests.support.timing import within
from tests.support.wait import wait_until

RESOURCE = "heteroagent.org/accelerator"
ALL = [f"{domain:04x}:{bus:02x}:00.0" for domain in range(2) for bus in range(128)]
HUNG = ALL[::26]

_INTERVAL = 2.0
_CONFIG = (
    CONFIG.replace('log-level = "debug"', 'log-level = "info"')
    + f"[health]\ninterval = {_INTERVAL}\nconfirm = 0.5\ndeadline = 2.0\n"
)
_WATCHDOG = 6.0

_WELL, _OFF = b"\x52\x1e\x1e\x40", b"\xff\xff\xff\xff"


def config(device: str) -> Path:
    """The device's configuration space."""
    return Path(f"/sys/devices/pci0000:00/{device}/config")


def states(client: Client) -> dict[str, str]:
    """Of each device."""
    return {device: str(found["State"]) for device, found in client.devices().items()}


@in_own_mounts
def test_ten_of_256_devices_hang() -> None:
    machine = FakeSys()
    for device in ALL:
        machine.npu(device)
    bus = PrivateBus()
    agent = AgentProcess(bus, config=_CONFIG, sources="kernel", watchdog=_WATCHDOG)
    try:
        agent.start()
        with Client(bus, MEMBER, [GROUP_GID]) as client:
            all_free(client, agent, ALL)
            usual = [took for number in range(20) for took in _lease(client, f"before{number}")]
            for device in HUNG:
                machine.hang(config(device).parent, "config")
            answers = _answers_until_they_are_faulty(client)
            # on the bus nobody noticed
            assert statistics.median(answers) < 2 * statistics.median(usual) + 0.25
            assert sorted(answers)[len(answers) * 95 // 100] < 2 + max(usual)
            reasons = {client.device(device)["Reason"] for device in HUNG}
            assert reasons == {"unresponsive: a probe did not return within 2 s"}
            # the other 246 are what they were, and are looked at in time while the ten go on hanging
            found = states(client)
            assert {device for device in ALL if found[device] != "idle"} == set(HUNG)
            others = iter([device for device in ALL if device not in HUNG])

            def fault() -> float:
                device = next(others)
                begun = time.monotonic()
                config(device).write_bytes(_OFF)
                client.wait_for_device(device, State="faulty")
                took = time.monotonic() - begun
                config(device).write_bytes(_WELL)
                client.wait_for_device(device, State="idle")
                return took

            # found within its interval, and looked at twice more
            within(1.5 * _INTERVAL + 2 * 0.5 + 1, fault)
            lease, _ = client.allocate("many", RESOURCE, 64)
            assert client.release("back", lease)
            for device in HUNG:
                config(device).unlink()
                config(device).write_bytes(_WELL)
            wait_until(lambda: set(states(client).values()) == {"idle"}, 120, "all devices back")
            all_free(client, agent, ALL)
        times = [at for at, text in agent.notify.messages if "WATCHDOG=1" in text]
        assert max(after - before for before, after in itertools.pairwise(times)) < _WATCHDOG
        no_gap(agent)
    finally:
        agent.close()
        bus.close()


def _answers_until_they_are_faulty(client: Client) -> list[float]:
    """Lease a device again and again until the ten are faulty; return how long each call took."""
    took: list[float] = []
    numbers = itertools.count()
    end = time.monotonic() + 120
    while not {client.device(device)["State"] for device in HUNG} <= {"faulty"}:
        assert time.monotonic() < end, states(client)
        took += _lease(client, f"meanwhile{next(numbers)}")
    return took


def _lease(client: Client, request: str) -> tuple[float, float]:
    """Allocate and release a device; return the seconds that each took."""
    begun = time.monotonic()
    lease, _ = client.allocate(f"{request}-a", RESOURCE, 1)
    between = time.monotonic()
    assert client.release(f"{request}-r", lease)
    return between - begun, time.monotonic() - between
