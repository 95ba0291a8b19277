"""Render nodes get other numbers whenever the order of binding changes; the device is its place."""

from __future__ import annotations

from tests.vm.machine import Machine
from tests.vm.qemu import GPU_0, GPU_1

GPU = "lab.test/gpu"


def rebind(vm: Machine, *order: str) -> None:
    """Unbind both GPUs and bind them in ORDER."""
    for action, devices in (("unbind", order), ("bind", order)):
        for device in devices:
            vm.write(f"/sys/bus/pci/drivers/virtio-pci/{action}", device)


def render(vm: Machine, device: str) -> str:
    """Return the render node that sysfs has for the device, without the agent."""
    return vm.run(f"basename /sys/bus/pci/devices/{device}/drm/renderD*")


def test_render_nodes_swap_and_devices_do_not(vm: Machine) -> None:
    assert (render(vm, GPU_0), render(vm, GPU_1)) == ("renderD128", "renderD129")
    rebind(vm, GPU_1, GPU_0)
    assert (render(vm, GPU_0), render(vm, GPU_1)) == ("renderD129", "renderD128"), "the kernel swapped them"
    vm.wait_for_device(GPU_0, State="idle")
    vm.wait_for_device(GPU_1, State="idle")
    assert vm.nodes(GPU_0) == {"/dev/dri/renderD129": (226, 129), "/dev/dri/card1": (226, 1)}
    assert vm.nodes(GPU_1) == {"/dev/dri/renderD128": (226, 128), "/dev/dri/card0": (226, 0)}

    _, manifest = vm.allocate("r1", GPU, device=GPU_0)
    assert [node[1:] for node in manifest["nodes"]] == [
        ["/dev/dri/renderD129", "own", "char", 226, 129],
        ["/dev/dri/card1", "own", "char", 226, 1],
    ]
    assert manifest["env"]["LAB_RENDER_NODE"] == "/dev/dri/renderD129"
    # who has the node open holds the device that it is now
    vm.hold("/dev/dri/renderD128", "stranger")
    vm.wait_for_device(GPU_1, State="occupied")
    assert vm.device(GPU_0)["State"] == "allocating"
    vm.run("systemctl stop stranger")
    vm.wait_for_device(GPU_1, State="idle")


def test_a_lease_keeps_its_device_while_the_other_is_renumbered(vm: Machine) -> None:
    lease, _ = vm.allocate("r1", GPU, device=GPU_1, confirm="b true")
    pid = vm.hold("/dev/dri/renderD129", "holder")
    vm.confirm("r2", lease, pid)
    vm.write("/sys/bus/pci/drivers/virtio-pci/unbind", GPU_0)
    vm.wait_for_device(GPU_0, State="offline", Reason="no-driver")
    # something else takes the number that has become free
    vm.run("modprobe vgem")
    vm.write("/sys/bus/pci/drivers/virtio-pci/bind", GPU_0)
    vm.wait_for_device(GPU_0, State="idle")
    assert vm.nodes(GPU_0) == {"/dev/dri/renderD130": (226, 130), "/dev/dri/card2": (226, 2)}
    leased = vm.device(GPU_1)
    assert (leased["State"], leased["Lease"]) == ("in-use", lease)
    assert vm.nodes(GPU_1) == {"/dev/dri/renderD129": (226, 129), "/dev/dri/card1": (226, 1)}
    assert vm.holders(GPU_1) == [pid]


def test_nodes_that_change_before_the_lease_is_confirmed(vm: Machine) -> None:
    lease, _ = vm.allocate("r1", GPU, device=GPU_0)
    rebind(vm, GPU_1, GPU_0)
    vm.wait_for_device(GPU_0, State="idle", Lease="/")
    assert "/dev/dri/renderD129" in vm.nodes(GPU_0)
    vm.told(GPU_0, ("allocating", "lost", None), ("lost", "reclaiming", "back"), ("reclaiming", "idle", ""))
    assert vm.lease(lease)["State"] == "pending"
