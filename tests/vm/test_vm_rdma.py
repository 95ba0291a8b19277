"""Soft RoCE: an RDMA device without a PCI device, whose port goes down and up."""

from __future__ import annotations

import pytest

from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.vm.machine import Machine

DEVICE = "infiniband-rxe0"
RESOURCE = "lab.test/rdma"
NODES = {"/dev/infiniband/uverbs0": (231, 192)}


#: The kernel sends no uevent when a port's state changes: it is seen by probes and by comparing.
_CONFIG = """
[discovery]
resync-interval = 2
[health]
interval = 2
confirm = 0.5
"""


@pytest.fixture
def rdma(vm: Machine) -> Machine:
    """A machine with an RDMA device over its Ethernet; its agent looks often."""
    vm.configure(_CONFIG)
    vm.run("systemctl reload hetero-agent")
    vm.run("modprobe rdma_rxe && ip link set eth0 up && ip address add 192.0.2.1/24 dev eth0")
    vm.run("rdma link add rxe0 type rxe netdev eth0")
    device = vm.wait_for_device(DEVICE, State="idle")
    assert (device["Resource"], device["StableId"]) == (RESOURCE, False)
    return vm


def port(vm: Machine, action: str, state: str, health: str) -> None:
    """Take the link up or down and wait until the agent knows it; compare with the kernel."""
    vm.run(f"ip link set eth0 {action}")
    vm.wait_for_device(DEVICE, Health=health)
    vm.wait_for_device(DEVICE, Attributes=vm.device(DEVICE)["Attributes"] | {"port-state": state})
    assert vm.read("/sys/class/infiniband/rxe0/ports/1/state") == state


def test_a_port_goes_down_and_up(rdma: Machine) -> None:
    assert rdma.nodes(DEVICE) == NODES
    port(rdma, "down", "1: DOWN", "suspect")
    # it is there and counted, and nobody gets it
    assert rdma.device(DEVICE)["State"] == "idle"
    assert rdma.nodes(DEVICE) == NODES
    assert "port rxe0/1 is DOWN" in rdma.refusal("r1", RESOURCE)
    port(rdma, "up", "4: ACTIVE", "healthy")
    entries = rdma.journal(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.HEALTH]}", f"HETERO_DEVICE={DEVICE}")
    assert [entry["MESSAGE"].partition(" (")[0] for entry in entries][-2:] == [
        f"{DEVICE} is suspect",
        f"{DEVICE} is healthy",
    ]
    assert rdma.allocate("r1", RESOURCE)[1]["devices"] == [DEVICE]


def test_a_lease_outlives_the_port(rdma: Machine) -> None:
    lease, manifest = rdma.allocate("r1", RESOURCE, confirm="b true")
    assert [node[1] for node in manifest["nodes"]] == ["/dev/infiniband/uverbs0"]
    pid = rdma.hold("/dev/infiniband/uverbs0", "holder")
    rdma.confirm("r2", lease, pid)
    port(rdma, "down", "1: DOWN", "suspect")
    assert rdma.device(DEVICE)["State"] == "in-use"
    port(rdma, "up", "4: ACTIVE", "healthy")
    assert rdma.holders(DEVICE) == [pid]
    rdma.run("systemctl stop holder")
    rdma.wait_for_device(DEVICE, State="idle")
    rdma.told(DEVICE, ("in-use", "reclaiming", "its pid ended"), ("reclaiming", "idle", ""))
    assert rdma.signals("LeaseEnded") == [[lease, "owner-gone"]]


def test_the_device_itself_goes_and_comes(rdma: Machine) -> None:
    rdma.run("rdma link delete rxe0")
    rdma.wait_until_gone(DEVICE)
    rdma.told(DEVICE, (None, "gone", "absent"))
    assert DEVICE not in rdma.devices()
    rdma.run("rdma link add rxe0 type rxe netdev eth0")
    rdma.wait_for_device(DEVICE, State="idle")
    assert rdma.nodes(DEVICE) == NODES
