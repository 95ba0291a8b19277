"""A device that sleeps is not woken by being looked at, granted or watched."""

from __future__ import annotations

from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.support.wait import wait_until
from tests.vm.machine import Machine
from tests.vm.qemu import SLEEPER

_POWER = f"/sys/bus/pci/devices/{SLEEPER}/power"


def awake(vm: Machine) -> int:
    """Return the milliseconds that the device was awake until now; it has to be asleep."""
    assert vm.read(f"{_POWER}/runtime_status") == "suspended"
    return int(vm.read(f"{_POWER}/runtime_active_time"))


def test_a_sleeping_device_is_found_granted_and_taken_back_asleep(vm: Machine) -> None:
    before = awake(vm)
    device = vm.device(SLEEPER)
    assert (device["State"], device["Attributes"]["runtime-status"]) == ("idle", "suspended")
    assert device["Model"].startswith("82801I (ICH9 Family) SMBus Controller")
    vm.run("systemctl reload hetero-agent")
    vm.wait_for_entry(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.RESYNC]}", "HETERO_REASON=profiles-reloaded")
    vm.run(f"echo change > /sys/bus/pci/devices/{SLEEPER}/uevent && udevadm settle")
    lease, manifest = vm.allocate("r1", "lab.test/sleeper", confirm="b true")
    assert [node[1] for node in manifest["nodes"]] == ["/dev/i2c-0"]
    pid = vm.hold("/dev/i2c-0", "holder")
    vm.confirm("r2", lease, pid)
    wait_until(lambda: vm.holders(SLEEPER) == [pid], 15, "the holder")
    vm.run("systemctl stop holder")
    vm.wait_for_device(SLEEPER, State="idle", Lease="/")
    vm.told(SLEEPER, ("in-use", "reclaiming", "its pid ended"), ("reclaiming", "idle", ""))
    vm.run("systemctl restart hetero-agent")
    assert vm.wait_for_device(SLEEPER, State="idle")["Attributes"] == device["Attributes"]
    assert awake(vm) == before


def test_waking_and_sleeping_are_shown(vm: Machine) -> None:
    vm.write(f"{_POWER}/control", "on")
    assert vm.read(f"{_POWER}/runtime_status") == "active"
    vm.run(f"echo change > /sys/bus/pci/devices/{SLEEPER}/uevent")
    vm.wait_for_device(
        SLEEPER, Attributes=vm.device(SLEEPER)["Attributes"] | {"runtime-status": "active", "cpus": "0-1"}
    )
    vm.write(f"{_POWER}/control", "auto")
    wait_until(lambda: vm.read(f"{_POWER}/runtime_status") == "suspended", 15, "sleep")
    vm.run(f"echo change > /sys/bus/pci/devices/{SLEEPER}/uevent")
    asleep = vm.device(SLEEPER)["Attributes"] | {"runtime-status": "suspended"}
    assert vm.wait_for_device(SLEEPER, Attributes=asleep)["State"] == "idle"
    assert asleep["cpus"] == "0-1", "what was read while it was awake is kept"
