"""One agent with one simulator for all tests of a module, put back in order after each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import process
from tests.support.agent import AgentProcess, SimProcess
from tests.support.bus import PrivateBus
from tests.support.ctl import Ctl
from tests.support.wait import wait_until

#: What a module's SCENARIO has, unless its own DEVICES says otherwise.
DEVICES = {"npu-0", "npu-1", "npu-2", "fpga-0"}


@dataclass
class Station:
    """The agent, and the simulator with the module's SCENARIO, which has DEVICES."""

    agent: AgentProcess
    sim: SimProcess
    devices: set[str]

    def ctl(self) -> Ctl:
        return Ctl(self.agent.bus.address, sim=self.sim.socket)

    def wait_idle(self) -> None:
        wait_until(lambda: self.states() == dict.fromkeys(self.devices, "idle"), what="idle devices")

    def states(self) -> dict[str, str]:
        return {one["id"]: one["state"] for one in self.ctl().json("list")["devices"]}


@contextlib.contextmanager
def standing(module: Any) -> Iterator[Station]:
    bus = PrivateBus()
    agent = AgentProcess(bus)
    try:
        agent.start()
        sim = SimProcess(agent, module.SCENARIO)
        try:
            yield Station(agent, sim.start(), getattr(module, "DEVICES", DEVICES))
        finally:
            sim.close()
    finally:
        agent.close()
        bus.close()


@pytest.fixture(scope="module")
def station(request: pytest.FixtureRequest) -> Iterator[Station]:
    with standing(request.module) as one:
        yield one


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[Station]:
    """A station for one test, which may restart what it likes."""
    with standing(request.module) as one:
        one.wait_idle()
        yield one


@pytest.fixture
def agent(station: Station) -> AgentProcess:
    return station.agent


@pytest.fixture
def ctl(station: Station) -> Iterator[Ctl]:
    """heteroctl on idle devices that nobody has, and nothing else."""
    process.logs.extend([("agent", station.agent.log_path), ("sim", station.sim.log_path)])
    station.wait_idle()
    yield station.ctl()
    ctl = station.ctl()
    for lease in ctl.json("leases"):
        ctl("release", lease["id"], code=None)  # it may have ended by now: its command did
    listed = {one["id"]: one["health"] for one in ctl.json("sim", "list")["devices"]}
    for name, health in listed.items():
        if name not in station.devices:
            ctl("sim", "remove", name)
        elif health != "healthy":
            ctl("sim", "recover", name)
    for name in station.devices - set(listed):
        ctl("sim", "add", name, "-r", f"example.com/{name.partition('-')[0]}")
    for device in ctl.json("list")["devices"]:
        if device["cordoned"]:
            ctl("uncordon", device["id"])
