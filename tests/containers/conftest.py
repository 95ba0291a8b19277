"""An agent with two kernel devices and a vendor's virtual ones, and podman, whose /run/cdi it fills."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import process
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client
from tests.support.console import CONSOLE, spare
from tests.support.ctl import Ctl
from tests.support.podman import Podman
from tests.support.vendor import Vendor
from tests.support.wait import wait_until

OTHER_CONSOLE = spare()

CONSOLES = "example.com/console"

PROFILE = f"""
schema = 1
resource = "{CONSOLES}"

[[match]]
subsystem = "tty"
names = ["{CONSOLE.name}", "{OTHER_CONSOLE.name}"]

[[nodes]]
subsystem = "tty"
pattern = "tty*"
role = "own"

[env.CONSOLES]
value = "{{index}}"
renumbered = true
"""


# containers have copies of the nodes, whose opening only a full scan sees
_CONFIG = CONFIG.replace("[reclaim]\n", "[reclaim]\nscan-interval = 1\n")


@dataclass
class Station:
    """The agent with its devices, a person at a shell, and podman."""

    agent: AgentProcess
    vendor: Vendor
    podman: Podman
    ctl: Ctl
    root: Client

    @property
    def specifications(self) -> Path:
        """The directory that the agent writes to and podman reads."""
        return self.agent.runtime / "cdi"

    def specification(self, lease: str) -> Path:
        return self.specifications / f"heteroagent.org-lease_{lease}.json"

    def devices(self) -> dict[str, str]:
        return {one["id"]: one["state"] for one in self.ctl.json("list")["devices"]}

    def wait_idle(self) -> None:
        """Wait until all devices are free, as each test finds them."""
        wait_until(lambda: set(self.devices().values()) == {"idle"}, what="idle devices")

    def lease(self, *options: str) -> str:
        """Allocate with OPTIONS; return the id."""
        return str(self.ctl.json("allocate", *options)["lease"])


@contextlib.contextmanager
def _standing() -> Iterator[Station]:
    bus = PrivateBus()
    try:
        agent = AgentProcess(bus, _CONFIG, profiles={"console.toml": PROFILE}, sources="kernel")
        try:
            agent.start()
            (agent.runtime / "cdi").mkdir(exist_ok=True)
            with (
                Vendor(agent) as vendor,
                Client(bus) as root,
                Podman(agent.runtime / "cdi") as podman,
            ):
                vendor.add("npu-0", "npu-1")
                yield Station(agent, vendor, podman, Ctl(bus.address), root)
        finally:
            agent.close()
    finally:
        bus.close()


@pytest.fixture(scope="module")
def _shared() -> Iterator[Station]:
    with _standing() as one:
        yield one


@pytest.fixture
def station(_shared: Station) -> Iterator[Station]:
    """The station of the module, with nothing leased and no container before and after."""
    process.logs.append(("agent", _shared.agent.log_path))
    _shared.wait_idle()
    yield _shared
    _shared.podman.clear()
    for lease in _shared.ctl.json("leases"):
        _shared.ctl("release", lease["id"], code=None)  # it may have ended by now: its container did
    _shared.wait_idle()
    assert list(_shared.specifications.iterdir()) == []


@pytest.fixture
def own() -> Iterator[Station]:
    """A station for one test, which may restart the agent."""
    with _standing() as one:
        one.wait_idle()
        yield one
