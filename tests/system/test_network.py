"""The privileged helper with the rights of examples/access-network.conf, under a real systemd."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hetero_agent import names
from tests.support.network import NIC as RESOURCE
from tests.support.network import NIC_PROFILE
from tests.support.process import ROOT
from tests.system.accelerators import Accelerator, Accelerators
from tests.system.agent import UNIT, Agent, Refused
from tests.system.conftest import CONFIG
from tests.system.machine import Machine

HELPER = "hetero-agent-access.service"


@pytest.fixture
def card(agent: Agent, machine: Machine, hardware: Accelerators) -> Iterator[Accelerator]:
    """An accelerator with the network interface ``hca0``, which leases may move."""
    machine.write("/etc/hetero-agent/hetero-agent.conf", CONFIG + "[access]\nmove-netdevs = true\n")
    machine.write("/etc/hetero-agent/profiles.d/nic.toml", NIC_PROFILE)
    machine.run("systemctl", "reload", UNIT)
    machine.shell("ip link add hca0 type veth peer name wire0 && ip link set hca0 up && ip link set wire0 up")
    (one,) = hardware.plug()
    child = machine.path(f"/sys{one.directory}/net/hca0")
    child.mkdir(parents=True)
    (child / "uevent").write_text("INTERFACE=hca0\n")
    (child / "subsystem").symlink_to("../../../../../class/net")
    # it is a virtual one, and the kernel says so
    shown = machine.path("/sys/class/net/hca0")
    shown.unlink()
    shown.symlink_to(f"../..{one.directory}/net/hca0")
    hardware.change(one)
    agent.wait_states({one.id: "idle"})
    yield one
    for lease in agent.leases():
        agent.release(lease)
    machine.shell(f"systemctl stop job || true; rm -rf /run/systemd/system/{HELPER}.d; systemctl daemon-reload")
    machine.shell("ip link delete wire0; rm /etc/hetero-agent/profiles.d/nic.toml")
    shown.unlink()
    machine.write("/etc/hetero-agent/hetero-agent.conf", CONFIG)
    machine.run("systemctl", "reload", UNIT)


def give_rights(machine: Machine) -> None:
    """Do what the example's first lines say."""
    text = (ROOT / "examples/access-network.conf").read_text()
    machine.write(f"/run/systemd/system/{HELPER}.d/network.conf", text)
    machine.shell(f"systemctl daemon-reload && systemctl stop {HELPER}")


def job(machine: Machine) -> int:
    """A service with a network namespace of its own; its main process."""
    machine.run("systemd-run", "--unit=job", "--property=PrivateNetwork=yes", "sleep", "infinity")
    return int(machine.run("systemctl", "show", "--value", "--property=MainPID", "job").stdout)


def interfaces(machine: Machine, pid: int = 0) -> set[str]:
    """The interfaces of the machine, or of the namespace of one of its processes."""
    enter = ["nsenter", "--net", f"--target={pid}"] if pid else []
    found = json.loads(machine.run(*enter, "ip", "-json", "link").stdout)
    return {one["ifname"] for one in found} & {"hca0", "wire0", "mine0"}


def test_without_the_rights_it_says_so(agent: Agent, machine: Machine, card: Accelerator) -> None:
    with pytest.raises(Refused, match="can't be moved with the rights that there are"):
        agent.allocate(RESOURCE, confirm=False, netdev="move")
    agent.wait_states({card.id: "idle"})
    assert interfaces(machine) == {"hca0", "wire0"}
    told = machine.shell("heteroctl doctor || true")
    assert f"move-netdevs is on, but {HELPER} lacks CapabilityBoundingSet=CAP_NET_ADMIN" in told
    assert "/access-network.conf" in told
    give_rights(machine)
    assert f"{HELPER} has what moving network interfaces needs" in machine.shell("heteroctl doctor || true")


def test_an_interface_goes_along_and_comes_back(agent: Agent, machine: Machine, card: Accelerator) -> None:
    give_rights(machine)
    lease = agent.allocate(RESOURCE, confirm=False, netdev="move")
    pid = job(machine)
    agent.confirm(lease, pid=pid)
    assert interfaces(machine, pid) == {"hca0"}
    assert interfaces(machine) == {"wire0"}
    # the helper may end, as it does when idle, and the namespace stays
    machine.run("systemctl", "stop", HELPER)
    mounts = machine.read("/proc/1/mountinfo")
    assert f"{names.ACCESS_DIR}/netns/{lease.rpartition('/l')[2]}" in mounts
    machine.run("nsenter", "--net", f"--target={pid}", "ip", "link", "set", "hca0", "down")
    machine.run("nsenter", "--net", f"--target={pid}", "ip", "link", "set", "hca0", "name", "mine0")
    machine.run("systemctl", "kill", "--signal=KILL", "job")
    agent.wait_states({card.id: "idle"})
    assert interfaces(machine) == {"hca0", "wire0"}
    (shown,) = json.loads(machine.run("ip", "-json", "link", "show", "hca0").stdout)
    assert "UP" in shown["flags"]
    assert names.ACCESS_DIR + "/netns" not in machine.read("/proc/1/mountinfo")


def test_the_helper_dies_in_between(agent: Agent, machine: Machine, card: Accelerator) -> None:
    give_rights(machine)
    lease = agent.allocate(RESOURCE, confirm=False, netdev="move")
    pid = job(machine)
    agent.confirm(lease, pid=pid)
    killed = agent.pid
    machine.shell(f"systemctl kill --signal=KILL {UNIT} {HELPER}")
    machine.run("systemctl", "kill", "--signal=KILL", "job")
    machine.wait(lambda: agent.restarted_since(killed), 30, "the agent's next life")
    agent.wait_states({card.id: "idle"})
    assert interfaces(machine) == {"hca0", "wire0"}
