"""The package's own test (debian/tests) under systemd, and the removal of an agent that is stopped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import ROOT
from tests.system import product
from tests.system.agent import UNIT, Agent
from tests.system.conftest import CONFIG
from tests.system.machine import Machine

#: The simulator with one device.
_SIMULATOR = """
systemctl restart hetero-agent
printf '[[device]]\\nid = "npu"\\nresource = "example.com/npu"\\n' >/run/scenario.toml
systemd-run --quiet --unit=simulator hetero-agent-sim --scenario /run/scenario.toml
"""


@pytest.fixture
def fresh(layers: list[Path]) -> Iterator[Machine]:
    """A machine of this test's own."""
    with Machine(layers) as one:
        yield one.boot()


def test_the_packages_own_test(fresh: Machine) -> None:
    assert (ROOT / "debian/tests/control").read_text().startswith("Tests: round-trip\n")
    shutil.copy(ROOT / "debian/tests/round-trip", fresh.path("/root/round-trip"))
    shown = fresh.run("/root/round-trip", timeout=120).stdout
    assert "--- a lease outlives a restart\n" in shown
    assert shown.endswith("--- well\n")
    assert fresh.shell("dpkg --verify hetero-agent") == "", "the configuration is as it was"


def test_remove_of_a_stopped_agent_ends_its_leases(fresh: Machine) -> None:
    own = Agent(fresh)
    fresh.write(
        "/etc/hetero-agent/hetero-agent.conf",
        CONFIG + '[providers.sim]\ndirectory = "/run/hetero-agent-sim/devices"\n',
    )
    fresh.shell(_SIMULATOR)
    own.wait_states({"npu": "idle"})
    own.heteroctl("allocate", "-r", "example.com/npu", "--confirm")
    own.systemctl("stop", UNIT)
    product.remove(fresh)
    ended = own.audit("HETERO_KIND=lease-ended")
    assert [entry["HETERO_REASON"] for entry in ended] == ["released"]
    assert not own.on_bus()
    assert not fresh.path("/run/hetero-agent").exists()
