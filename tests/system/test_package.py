"""The package on a machine of its own: installed, upgraded, removed, purged by apt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import product
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent
from tests.system.conftest import CONFIG
from tests.system.machine import Machine


@pytest.fixture
def fresh(layers: list[Path]) -> Iterator[Machine]:
    """A machine of this test's own."""
    with Machine(layers) as one:
        one.write("/etc/hetero-agent/hetero-agent.conf", CONFIG)
        yield one.boot()


@pytest.fixture
def own(fresh: Machine) -> Agent:
    """Its agent."""
    return Agent(fresh)


def _leased(own: Agent) -> tuple[str, str, str]:
    """Plug in an accelerator and lease it to a unit that holds it: its id, the lease, the unit."""
    hardware = Accelerators(own.machine)
    own.systemctl("restart", UNIT)
    (one,) = hardware.plug()
    own.wait_states({one.id: "idle"})
    job = own.job("job-package", one.node)
    lease = own.allocate(RESOURCE, unit=job)
    own.open_in(job)
    return one.id, lease, job


def test_upgrade_keeps_leases(fresh: Machine, own: Agent, deb: Path, tmp_path: Path) -> None:
    device, lease, job = _leased(own)
    before = own.manager()
    pid = own.pid
    own.heteroctl("cordon", device, "--reason", "stays")
    product.install(fresh, product.newer(deb, tmp_path), "-o", "Dpkg::Options::=--force-confold")
    assert fresh.shell("dpkg-query -W -f '${Version}' hetero-agent").endswith("+lab1")
    assert own.pid not in (0, pid)
    after = own.manager()
    assert after["Epoch"] != before["Epoch"]
    assert after["Generation"] > before["Generation"]
    assert list(own.leases()) == [lease]
    assert own.states() == {device: "in-use"}
    assert own.devices()[device]["Cordoned"] is True
    own.heteroctl("uncordon", device)
    own.systemctl("stop", job)
    own.wait_states({device: "idle"})


def test_remove_ends_leases_and_purge_leaves_nothing(fresh: Machine, own: Agent) -> None:
    _, _, job = _leased(own)
    product.remove(fresh)
    assert not own.on_bus()
    assert own.unit("LoadState") in ("not-found", "masked")
    # the job goes on, it has just no lease any more
    assert own.unit("ActiveState", job) == "active"
    ended = own.audit("HETERO_KIND=lease-ended")
    assert [entry["HETERO_REASON"] for entry in ended] == ["released"]
    assert fresh.path("/etc/hetero-agent/hetero-agent.conf").exists()
    product.remove(fresh, purge=True)
    left = fresh.shell(
        "find /etc /run /usr /var -xdev -name '*hetero*agent*'"
        " -not -path '/var/log/*' -not -path '/var/cache/apt/*'"
    ).split()
    assert left == []
    assert fresh.run("systemctl", "is-system-running", check=False).stdout == "running\n"
