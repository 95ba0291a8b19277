"""SR-IOV: virtual functions come and go; while they are there, they are the devices."""

from __future__ import annotations

import pytest

from tests.vm.machine import Machine

PHYSICAL = "0000:05:00.0"
VIRTUAL = ("0000:05:00.1", "0000:05:00.2")
RESOURCE = "lab.test/nvme"

#: As `nvme virt-mgmt` does it, NVMe Base Specification 2.0, 5.26 "Virtualization Management": first the
#: physical function gives up its flexible resources, then each virtual one gets some and goes online.
_MANAGE = """
import fcntl, struct, sys
def admin(controller, action, kind, number):
    # linux/nvme_ioctl.h: struct nvme_admin_cmd, NVME_IOCTL_ADMIN_CMD
    command = bytearray(struct.pack("<BBHIIIQQ10I", 0x1c, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                    controller << 16 | kind << 8 | action, number, 0, 0, 0, 0, 0, 0))
    with open("/dev/nvme0", "rb") as device:
        status = fcntl.ioctl(device, 0xC0484E41, command)
    if status:
        sys.exit(f"controller {controller}, action {action}: status {status:#x}")
queues, interrupts = 0, 1
give_up, assign, online = 1, 8, 9
if sys.argv[1] == "physical":
    admin(0, give_up, queues, 0)
    admin(0, give_up, interrupts, 0)
for controller in map(int, sys.argv[2:]):
    admin(controller, assign, queues, 2)
    admin(controller, assign, interrupts, 1)
    admin(controller, online, 0, 0)
"""


@pytest.fixture
def card(vm: Machine) -> Machine:
    """A machine with an NVMe controller that can have two virtual functions."""
    vm.plug(
        "nvme", "card", 4, serial="LAB-NVME-0", subsys="subsys0", sriov_max_vfs=2, sriov_vq_flexible=4,
        sriov_vi_flexible=2, max_ioqpairs=6, msix_qsize=5,
    )  # fmt: skip
    device = vm.wait_for_device(PHYSICAL, State="idle")
    assert (device["Resource"], device["Attributes"]["sriov-total"]) == (RESOURCE, 2)
    vm.write("/run/manage", _MANAGE)
    vm.run("python3 /run/manage physical && echo 1 > /sys/class/nvme/nvme0/reset_controller")
    return vm


def switch(vm: Machine, number: int) -> None:
    """Set the number of virtual functions."""
    vm.write(f"/sys/bus/pci/devices/{PHYSICAL}/sriov_numvfs", str(number))


def switch_on(vm: Machine) -> None:
    """Have two virtual functions, not bound to a driver yet."""
    vm.write(f"/sys/bus/pci/devices/{PHYSICAL}/sriov_drivers_autoprobe", "0")
    switch(vm, 2)
    vm.run("python3 /run/manage virtual 1 2")


def bind(vm: Machine, device: str) -> None:
    """Bind the driver of a virtual function."""
    vm.write(f"/sys/bus/pci/devices/{PHYSICAL}/sriov_drivers_autoprobe", "1")
    vm.write("/sys/bus/pci/drivers/nvme/bind", device)


def test_virtual_functions_come_and_go(card: Machine) -> None:
    switch_on(card)
    for device in VIRTUAL:
        found = card.wait_for_device(device, State="offline", Reason="no-driver")
        assert (found["Parent"], found["Resource"]) == (PHYSICAL, RESOURCE)
        assert found["Attributes"]["physical-function"] == PHYSICAL
    card.wait_until_gone(PHYSICAL)
    card.told(PHYSICAL, ("probing", "idle", ""), (None, "gone", "absent"))
    for device in VIRTUAL:
        bind(card, device)
        card.wait_for_device(device, State="idle", Driver="nvme")
        card.told(device, ("offline", "probing", "not scanned"), ("probing", "idle", ""))
    assert [list(card.nodes(device)) for device in VIRTUAL] == [["/dev/nvme1"], ["/dev/nvme2"]]
    # all of them at once, and the card itself has its device back
    lease, manifest = card.allocate("r1", RESOURCE, device=VIRTUAL[1])
    assert [node[1] for node in manifest["nodes"]] == ["/dev/nvme2"]
    assert card.release("r2", lease) is True
    card.wait_for_device(VIRTUAL[1], State="idle")
    switch(card, 0)
    for device in VIRTUAL:
        card.wait_until_gone(device)
        card.told(device, (None, "gone", "absent"))
    card.wait_for_device(PHYSICAL, State="idle")
    card.told(PHYSICAL, (None, "gone", "absent"), ("probing", "idle", ""))


def test_a_leased_virtual_function_vanishes(card: Machine) -> None:
    first, second = VIRTUAL
    switch_on(card)
    bind(card, first)
    bind(card, second)
    card.wait_for_device(first, State="idle")
    lease, _ = card.allocate("r1", RESOURCE, device=first, confirm="b true")
    card.hold("/dev/nvme1", "holder")
    switch(card, 0)
    assert card.wait_for_device(first, State="lost")["Lease"] == lease
    card.told(first, ("in-use", "lost", None))
    card.wait_until_gone(second)
    # the card is no other's while one of its functions is in a lease's hands
    card.wait_for_device(PHYSICAL, BlockedBy=[first])
    card.run("systemctl stop holder")
    assert card.release("r2", lease) is True
    card.wait_until_gone(first)
    assert card.signals("LeaseEnded") == [[lease, "released"]]
    card.wait_for_device(PHYSICAL, State="idle", BlockedBy=[])
