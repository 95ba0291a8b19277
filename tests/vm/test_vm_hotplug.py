"""Devices come and go on a real PCI bus, free or leased and held."""

from __future__ import annotations

import pytest

from hetero_agent import names
from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.support.wait import wait_until
from tests.vm.machine import Machine
from tests.vm.qemu import ACCELERATOR, GPU_0, GPU_1, SLEEPER

#: Where the firmware puts what is plugged into port 4, and the resource of `plug`'s device.
SPARE = "0000:05:00.0"
RESOURCE = "lab.test/accelerator"


def plug(vm: Machine) -> None:
    """Plug a second device of class 0x1200 in."""
    vm.plug("virtio-blk-pci", "spare", 4, **{"class": 0x1200, "drive": "memory1", "serial": "LAB-ACC-1"})


def number(vm: Machine, node: str) -> tuple[int, int]:
    """Return the number of a character node, without the agent."""
    major, minor = vm.run(f"stat --format='%Hr %Lr' {node}").split()
    return int(major), int(minor)


def test_the_machine_as_it_boots(vm: Machine) -> None:
    assert vm.devices() == {ACCELERATOR: "idle", GPU_0: "idle", GPU_1: "idle", SLEEPER: "idle"}
    accelerator = vm.device(ACCELERATOR)
    assert accelerator["Resource"] == RESOURCE
    assert accelerator["Driver"] == "uio_pci_generic"
    assert accelerator["StableId"] is True
    assert accelerator["Attributes"]["class"] == "120000"
    assert accelerator["Attributes"]["pcie-root"] == "pci0000:00"
    assert vm.nodes(ACCELERATOR) == {"/dev/uio0": number(vm, "/dev/uio0")}
    assert vm.nodes(GPU_0) == {"/dev/dri/renderD128": (226, 128), "/dev/dri/card0": (226, 0)}
    assert vm.run("heteroctl doctor").endswith("nothing is wrong")


def test_an_accelerator_is_plugged_in_and_pulled_out(vm: Machine) -> None:
    plug(vm)
    device = vm.wait_for_device(SPARE, State="idle")
    assert device["Resource"] == RESOURCE
    assert device["Path"] == "/sys/devices/pci0000:00/0000:00:14.0/0000:05:00.0"
    assert vm.nodes(SPARE) == {"/dev/uio1": number(vm, "/dev/uio1")}
    vm.told(SPARE, ("probing", "idle", ""))
    assert vm.wait_for_entry(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.APPEARED]}", f"HETERO_DEVICE={SPARE}")[
        "MESSAGE"
    ].startswith(f"{SPARE} appeared as {RESOURCE}: Lab ")
    (resources,) = vm.call(
        names.ROOT, "org.freedesktop.DBus.Properties", "Get", "ss", names.MANAGER, "Resources"
    )
    assert resources["data"][RESOURCE]["total"] == 2

    vm.unplug("spare")
    vm.wait_until_gone(SPARE)
    vm.told(SPARE, (None, "gone", "absent"))
    assert vm.wait_for_entry(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.GONE]}", f"HETERO_DEVICE={SPARE}")
    paths = [one[0] for one in vm.signals("InterfacesAdded") + vm.signals("InterfacesRemoved")]
    assert paths == [names.device_path(SPARE)] * 2
    wait_until(lambda: vm.signals("Report")[-1][4][RESOURCE]["total"] == 1, 5, "a report without the device")


def test_a_gpu_is_removed_and_found_again(vm: Machine) -> None:
    nodes = vm.nodes(GPU_0)
    vm.write(f"/sys/bus/pci/devices/{GPU_0}/remove", "1")
    vm.wait_until_gone(GPU_0)
    vm.told(GPU_0, (None, "gone", "absent"))
    assert vm.device(GPU_1)["State"] == "idle"
    vm.write("/sys/bus/pci/rescan", "1")
    vm.wait_for_device(GPU_0, State="idle")
    assert vm.nodes(GPU_0) == nodes
    # it may have been seen before its driver was bound
    vm.told(GPU_0, ("probing", "idle", ""))
    assert vm.changes(GPU_1) == [], "the other one has no part in it"


def test_unplugged_while_leased_and_held(vm: Machine) -> None:
    plug(vm)
    vm.wait_for_device(SPARE, State="idle")
    lease, manifest = vm.allocate("r1", RESOURCE, device=SPARE, confirm="b true")
    assert manifest["nodes"][0][1] == "/dev/uio1"
    pid = vm.hold("/dev/uio1", "holder")
    vm.confirm("r2", lease, pid)
    vm.unplug("spare")
    device = vm.wait_for_device(SPARE, State="lost")
    assert device["Lease"] == lease
    assert vm.lease(lease)["Lost"] == [names.device_path(SPARE)]
    vm.told(SPARE, ("in-use", "lost", None))
    assert vm.attempt("systemctl is-active holder")[0] == 0, "nobody ends the owner's process"

    vm.run("systemctl stop holder")
    vm.wait_until_gone(SPARE)
    wait_until(lambda: not vm.lease(lease), 15, "the end of the lease")
    assert vm.signals("LeaseEnded") == [[lease, "owner-gone"]]
    vm.told(SPARE, ("lost", "gone", "absent"))
    ended = vm.wait_for_entry(
        f"MESSAGE_ID={MESSAGE_IDS[AuditKind.ENDED]}", f"HETERO_LEASE={lease.rpartition('/l')[2]}"
    )
    assert ended["HETERO_RESULT"] == "owner-gone"


def test_plugged_in_again_while_its_lease_lives(vm: Machine) -> None:
    plug(vm)
    vm.wait_for_device(SPARE, State="idle")
    lease, _ = vm.allocate("r1", RESOURCE, device=SPARE, confirm="b true")
    pid = vm.hold("/dev/uio1", "holder")
    nodes = vm.nodes(SPARE)
    vm.unplug("spare")
    vm.wait_for_device(SPARE, State="lost")
    plug(vm)
    # this driver's numbers are given anew while they are held: who holds the old device can't be told from
    # who holds the new one, so nobody gets it
    vm.wait_for_device(SPARE, State="reclaiming")
    assert (vm.nodes(SPARE), vm.holders(SPARE)) == (nodes, [pid])
    vm.run("systemctl stop holder")
    vm.wait_for_device(SPARE, State="idle")
    vm.told(SPARE, ("in-use", "lost", None), ("lost", "reclaiming", "back"), ("reclaiming", "idle", ""))
    assert vm.lease(lease)["State"] == "active", "the lease is its owner's until it ends"
    assert vm.release("r2", lease) is True
    wait_until(lambda: vm.signals("LeaseEnded") == [[lease, "released"]], 10, "the end of the lease")
    assert vm.device(SPARE)["State"] == "idle"


def driver(vm: Machine, name: str, action: str, device: str) -> None:
    """Bind or unbind the device's driver."""
    vm.write(f"/sys/bus/pci/drivers/{name}/{action}", device)


def test_a_driver_is_unbound_and_bound(vm: Machine) -> None:
    driver(vm, "uio_pci_generic", "unbind", ACCELERATOR)
    device = vm.wait_for_device(ACCELERATOR, State="offline", Reason="no-driver")
    assert device["Driver"] == ""
    assert vm.nodes(ACCELERATOR) == {}
    # the nodes go before the driver: either may be the first that is seen missing
    vm.told(ACCELERATOR, ("idle", "offline", None))
    assert "1 offline (no-driver)" in vm.refusal("r1", RESOURCE)
    driver(vm, "uio_pci_generic", "bind", ACCELERATOR)
    vm.wait_for_device(ACCELERATOR, State="idle", Driver="uio_pci_generic")
    vm.told(ACCELERATOR, ("offline", "probing", "not scanned"), ("probing", "idle", ""))


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_a_driver_is_unbound_under_a_lease(vm: Machine, held: bool) -> None:
    lease, _ = vm.allocate("r1", "lab.test/gpu", device=GPU_0, confirm="b true")
    if held:
        vm.hold("/dev/dri/renderD128", "holder")
    driver(vm, "virtio-pci", "unbind", GPU_0)
    vm.wait_for_device(GPU_0, State="lost", Lease=lease)
    driver(vm, "virtio-pci", "bind", GPU_0)
    vm.wait_for_device(GPU_0, State="idle", Lease="/")
    vm.told(GPU_0, ("in-use", "lost", None), ("lost", "reclaiming", "back"), ("reclaiming", "idle", ""))
    # a second one gets it, with the nodes that are the device's now
    _, manifest = vm.allocate("r2", "lab.test/gpu", device=GPU_0, confirm="b true")
    granted = {path: (major, minor) for _, path, _, _, major, minor in manifest["nodes"]}
    assert granted == vm.nodes(GPU_0)
    assert ("/dev/dri/renderD128" in granted) is not held
