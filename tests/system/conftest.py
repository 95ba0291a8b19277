"""The lab's fixtures: the product installed once, a machine for each module, hardware for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import image, product
from tests.system import machine as machines
from tests.system.accelerators import Accelerators
from tests.system.agent import UNIT, Agent
from tests.system.machine import Machine

#: The agent of the lab: the container is all of the host that there is, and tests don't wait long.
CONFIG = """\
[reclaim]
pid-namespace = "own"
occupied-after = 0.3
"""

_DROP_INS = f"/run/systemd/system/{UNIT}.d"


@pytest.fixture(scope="session")
def base() -> Path:
    """The root file system without the product."""
    if os.geteuid() != 0:
        pytest.exit("the lab makes containers: run it as root", 2)
    machines.sweep()
    return image.build()


@pytest.fixture(scope="session")
def deb() -> Path:
    """The package."""
    return product.package()


@pytest.fixture(scope="session")
def layers(base: Path, deb: Path) -> Iterator[list[Path]]:
    """The layers of a machine with the product installed, the lowest last."""
    with Machine([base]) as machine:
        machine.boot()
        product.install(machine, deb)
        machine.halt()
        yield [machine.upper, base]


@pytest.fixture(scope="module")
def machine(layers: list[Path]) -> Iterator[Machine]:
    """A running machine with the product."""
    with Machine(layers) as one:
        one.write("/etc/hetero-agent/hetero-agent.conf", CONFIG)
        yield one.boot()


@pytest.fixture(scope="module")
def hardware(machine: Machine) -> Accelerators:
    """The machine's hardware, still without accelerators."""
    found = Accelerators(machine)
    # the services' own views of /sys are from before
    machine.shell(f"systemctl stop hetero-agent-access.service; systemctl restart {UNIT}")
    return found


@pytest.fixture
def agent(machine: Machine, hardware: Accelerators) -> Iterator[Agent]:
    """The running agent; afterwards all is as before: no leases, no accelerators, no settings."""
    one = Agent(machine)
    yield one
    machine.shell(
        f"rm -rf {_DROP_INS}; systemctl daemon-reload; systemctl stop 'job*' ; systemctl reset-failed"
    )
    machine.write("/etc/hetero-agent/hetero-agent.conf", CONFIG)
    one.systemctl("start", UNIT)
    for lease in one.leases():
        one.release(lease)
    hardware.unplug()
    machine.wait(lambda: not (one.devices() or one.leases()), 30, "an agent without devices and leases")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for one in Machine.running:
            if one.leader:
                command = ["journalctl", f"--unit={UNIT}", "--lines=100", "--output=short-precise"]
                report.sections.append(
                    (f"the agent's log on {one.name}", one.run(*command, check=False).stdout)
                )


def settings(machine: Machine, **service: str) -> None:
    """Give the unit other settings (of ``[Service]``) until the end of the test."""
    lines = "".join(f"{name}={value}\n" for name, value in service.items())
    machine.write(f"{_DROP_INS}/test.conf", f"[Service]\n{lines}")
    machine.run("systemctl", "daemon-reload")
