"""The package on a machine of its own: installed, upgraded, removed, purged by apt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero_agent import names
from tests.system import product
from tests.system.accelerators import RESOURCE, Accelerator, Accelerators
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


#: nobody, who gets at a node by an entry in its ACL only.
_USER = 65534


@dataclass(frozen=True)
class Leased:
    """Two accelerators under leases: one a unit's that holds it, one a user's until it is released."""

    device: str
    job: str
    lease: str
    users: Accelerator
    users_lease: str

    def given(self, machine: Machine) -> tuple[bool, bool]:
        """Whether the user's lease has a CDI file, and its node an ACL."""
        ident = self.users_lease.rpartition("/l")[2]
        directory = machine.path(names.CDI_DIR)
        files = [path.name for path in directory.iterdir()] if directory.exists() else []
        acl = "system.posix_acl_access" in os.listxattr(machine.path(self.users.node))
        return any(ident in name for name in files), acl


def _leased(own: Agent) -> Leased:
    machine = own.machine
    hardware = Accelerators(machine)
    # the services' own views of /sys are from before
    machine.shell(f"systemctl stop hetero-agent-access.service; systemctl restart {UNIT}")
    one, other = hardware.plug(2)
    own.wait_states({one.id: "idle", other.id: "idle"})
    job = own.job("job-package", one.node)
    lease = own.allocate(RESOURCE, devices=[one.id], unit=job)
    own.open_in(job)
    group = int(machine.run("getent", "group", "hetero").stdout.split(":")[2])
    users = own.allocate(RESOURCE, devices=[other.id], uid=_USER, groups=[group])
    found = Leased(one.id, job, lease, other, users)
    assert found.given(machine) == (True, True)
    return found


def test_upgrade_keeps_leases(fresh: Machine, own: Agent, deb: Path, tmp_path: Path) -> None:
    leased = _leased(own)
    device = leased.device
    before = own.manager()
    pid = own.pid
    own.heteroctl("cordon", device, "--reason", "stays")
    product.install(fresh, product.newer(deb, tmp_path), "-o", "Dpkg::Options::=--force-confold")
    assert fresh.shell("dpkg-query -W -f '${Version}' hetero-agent").endswith("+lab1")
    assert own.pid not in (0, pid)
    after = own.manager()
    assert after["Epoch"] != before["Epoch"]
    assert after["Generation"] > before["Generation"]
    assert set(own.leases()) == {leased.lease, leased.users_lease}
    assert own.states() == {device: "in-use", leased.users.id: "in-use"}
    assert leased.given(fresh) == (True, True)
    assert own.devices()[device]["Cordoned"] is True
    assert own.unit("ActiveState", "hetero-agent-access.socket") == "active"
    own.heteroctl("uncordon", device)
    own.systemctl("stop", leased.job)
    assert own.release(leased.users_lease) is True
    own.wait_states({device: "idle", leased.users.id: "idle"})
    assert leased.given(fresh) == (False, False)


def test_remove_ends_leases_and_purge_leaves_nothing(fresh: Machine, own: Agent) -> None:
    leased = _leased(own)
    product.remove(fresh)
    assert not own.on_bus()
    assert own.unit("LoadState") in ("not-found", "masked")
    # the job goes on, it has just no lease any more
    assert own.unit("ActiveState", leased.job) == "active"
    ended = own.audit("HETERO_KIND=lease-ended")
    assert [entry["HETERO_REASON"] for entry in ended] == ["released", "released"]
    assert leased.given(fresh) == (False, False)
    assert fresh.path("/etc/hetero-agent/hetero-agent.conf").exists()
    product.remove(fresh, purge=True)
    left = fresh.shell(
        "find /etc /run /usr /var -xdev -name '*hetero*agent*'"
        " -not -path '/var/log/*' -not -path '/var/cache/apt/*'"
    ).split()
    assert left == []
    assert fresh.run("systemctl", "is-system-running", check=False).stdout == "running\n"


def test_remove_undoes_what_a_dead_agent_and_a_broken_configuration_left(fresh: Machine, own: Agent) -> None:
    """The records of what was made are enough for it."""
    leased = _leased(own)
    fresh.write("/etc/hetero-agent/hetero-agent.conf", "broken")
    fresh.run("systemctl", "kill", "--signal=KILL", UNIT)
    product.remove(fresh)
    assert leased.given(fresh) == (False, False)
    assert not fresh.path(names.ACCESS_DIR).exists()
