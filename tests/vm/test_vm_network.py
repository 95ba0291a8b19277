"""A network card whose interface goes along with a lease: real hardware, as far as the kernel knows.

A hardware interface outlives its namespace: the kernel puts it back on the host under a name that is
free there, switched off.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.support.process import ROOT
from tests.support.wait import wait_until
from tests.vm.machine import Machine

DEVICE = "0000:05:00.0"
RESOURCE = "lab.test/nic"
HELPER = "hetero-agent-access.service"

#: What the helper imports for a first move takes its time under emulation.
_CONFIG = """
[grant]
effects-timeout = 20
[access]
move-netdevs = true
"""


@pytest.fixture
def card(vm: Machine) -> Machine:
    """A machine with an Ethernet card, ``eth1``, and a helper with the rights to move it."""
    rights = (ROOT / "examples/access-network.conf").read_text()
    vm.run(f"mkdir -p /etc/systemd/system/{HELPER}.d")
    vm.write(f"/etc/systemd/system/{HELPER}.d/network.conf", rights)
    vm.write("/etc/hetero-agent/hetero-agent.conf", _CONFIG)
    # it is there before anybody asks it: a start takes long here
    vm.run(f"systemctl daemon-reload && systemctl restart {HELPER} && systemctl reload hetero-agent")
    vm.run("modprobe e1000e")
    vm.plug("e1000e", "nic", 4, mac="52:54:00:12:34:56", romfile="")
    device = vm.wait_for_device(DEVICE, State="idle")
    assert (device["Resource"], device["Attributes"]["net"]) == (RESOURCE, "eth1")
    vm.run("ip link set eth1 up")
    return vm


def job(vm: Machine) -> int:
    """A service with a network namespace of its own; its main process."""
    vm.run("systemd-run --quiet --unit=job --property=PrivateNetwork=yes sleep infinity")
    return int(vm.run("systemctl show --value --property=MainPID job"))


def links(vm: Machine, pid: int = 0) -> dict[str, dict[str, Any]]:
    """The interfaces of the guest, or of the namespace of one of its processes."""
    enter = f"nsenter --net --target={pid} " if pid else ""
    return {one["ifname"]: one for one in json.loads(vm.run(f"{enter}ip -details -json link"))}


def taken(vm: Machine) -> int:
    """The card is leased to a job, its interface with it."""
    lease, manifest = vm.allocate("r1", RESOURCE, netdev="s move")
    assert manifest["netdevs"] == [[DEVICE, "eth1"]]
    pid = job(vm)
    vm.confirm("r2", lease, pid)
    assert "eth1" not in links(vm)
    there = links(vm, pid)["eth1"]
    assert there["address"] == "52:54:00:12:34:56"
    assert "UP" in there["flags"]
    return pid


def inside(vm: Machine, pid: int, command: str) -> None:
    vm.run(f"nsenter --net --target={pid} sh -c {shlex.quote(command)}")


def back(vm: Machine) -> None:
    """It is on the host again, as it was."""
    vm.wait_for_device(DEVICE, State="idle")
    here = links(vm)["eth1"]
    assert here["address"] == "52:54:00:12:34:56"
    assert "UP" in here["flags"]
    assert here["parentdev"] == DEVICE
    vm.wait_for_device(DEVICE, Attributes=vm.device(DEVICE)["Attributes"] | {"net": "eth1"})
    assert vm.run("ls /run/hetero-agent-access/netns /run/hetero-agent-access/netdev").split() == [
        "/run/hetero-agent-access/netdev:",
        "/run/hetero-agent-access/netns:",
    ]


def test_it_goes_and_comes_back_whatever_the_workload_did(card: Machine) -> None:
    pid = taken(card)
    inside(card, pid, "ip link set eth1 down && ip link set eth1 name mine0 address 02:00:00:00:00:01")
    card.run("systemctl kill --signal=KILL job")
    back(card)
    card.told(DEVICE, ("in-use", "reclaiming", "its pid ended"), (None, "idle", None))


def test_back_by_the_kernel_and_its_name_is_taken(card: Machine) -> None:
    """Somebody unmounts what keeps the namespace alive, and gives its name to another interface."""
    taken(card)
    card.run("modprobe dummy && ip link add eth1 type dummy")
    card.run("systemctl kill --signal=STOP hetero-agent && umount /run/hetero-agent-access/netns/*")
    card.run("systemctl kill --signal=KILL job")
    fallen = "test $(ls /sys/bus/pci/devices/0000:05:00.0/net/) != eth1"
    wait_until(lambda: card.attempt(fallen)[0] == 0, what="the card's interface on the host")
    card.run("systemctl kill --signal=CONT hetero-agent")
    card.wait_for_device(DEVICE, State="reclaiming", Reason="access-not-revoked")
    card.run("ip link delete eth1")
    back(card)


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        (
            "modprobe bonding; ip link add bond7 type bond; ip link set eth1 down master bond7",
            "it is a member of bond bond7",
        ),
        (
            "modprobe 8021q; ip link add link eth1 name eth1.5 type vlan id 5",
            "vlan eth1.5 is on top of it",
        ),
    ],
)
def test_what_the_host_needs_stays(card: Machine, commands: str, reason: str) -> None:
    card.run(commands)
    assert f"network interface eth1 can't be moved: {reason}" in card.refusal("r1", RESOURCE, netdev="s move")
    assert "eth1" in links(card)
    card.wait_for_device(DEVICE, State="idle")


def test_the_card_is_pulled_out_while_its_interface_is_away(card: Machine) -> None:
    taken(card)
    card.unplug("nic")
    card.wait_for_device(DEVICE, State="lost")
    card.run("systemctl stop job")
    card.wait_until_gone(DEVICE)
    wait_until(lambda: not card.run("ls /run/hetero-agent-access/netdev"), what="an end of its record")
