"""PCIe errors that the kernel sees (AER): its log and counters have them; the device stays what it is."""

from __future__ import annotations

import re

import pytest

from hetero_agent import names
from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.support.wait import wait_until
from tests.vm.machine import Machine
from tests.vm.qemu import ACCELERATOR

#: linux/drivers/pci/pcie/aer_inject.c, struct aer_error_inj: bus, device, function, then the
#: uncorrectable and the correctable status, the header log, the domain.
_INJECT = """
import struct, time
with open("/dev/aer_inject", "wb", buffering=0) as out:
    for _ in range({times}):
        out.write(struct.pack("=BBBx7I", 3, 0, 0, {uncorrectable}, {correctable}, 0, 1, 2, 3, 0))
        time.sleep(0.2)
"""

_BAD_TLP = 1 << 6
_POISONED = 1 << 12


def inject(vm: Machine, *, correctable: int = 0, uncorrectable: int = 0) -> None:
    """Have the accelerator's error registers show an error, with its interrupt."""
    text = _INJECT.format(times=1, correctable=correctable, uncorrectable=uncorrectable)
    vm.run(f"modprobe aer_inject && python3 -c '{text}'")


def count(vm: Machine, kind: str) -> int:
    """Return the kernel's count of errors of a kind."""
    table = vm.read(f"/sys/bus/pci/devices/{ACCELERATOR}/aer_dev_{kind}")
    return int(table.splitlines()[-1].split()[1])


@pytest.fixture
def leased(vm: Machine) -> tuple[Machine, str]:
    """A machine whose accelerator is leased and held, and the lease."""
    lease, _ = vm.allocate("r1", "lab.test/accelerator", confirm="b true")
    vm.confirm("r2", lease, vm.hold("/dev/uio0", "holder"))
    return vm, lease


def kernel_said(vm: Machine, text: str) -> bool:
    """Tell whether a line of the kernel's log names the accelerator and has TEXT."""
    return any(
        ACCELERATOR in one["MESSAGE"] and text in one["MESSAGE"] for one in vm.journal("_TRANSPORT=kernel")
    )


def test_a_corrected_error_is_counted_and_changes_nothing(leased: tuple[Machine, str]) -> None:
    vm, lease = leased
    before = vm.device(ACCELERATOR)
    inject(vm, correctable=_BAD_TLP)
    wait_until(lambda: count(vm, "correctable") == 1, 10, "the kernel's count")
    wait_until(lambda: kernel_said(vm, "severity=Corrected"), 10, "the kernel's word")
    # read again, it is the same device
    vm.run(f"udevadm trigger --settle /sys/bus/pci/devices/{ACCELERATOR}")
    vm.run("systemctl reload hetero-agent")
    vm.wait_for_entry(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.RESYNC]}", "HETERO_REASON=profiles-reloaded")
    after = vm.device(ACCELERATOR)
    assert (after["State"], after["Lease"], after["Since"]) == ("in-use", lease, before["Since"])
    assert after["Attributes"] == before["Attributes"]
    vm.run("systemctl stop holder")
    assert vm.wait_for_device(ACCELERATOR, State="idle")["Health"] == "healthy"
    vm.told(ACCELERATOR, ("in-use", "reclaiming", "its pid ended"), ("reclaiming", "idle", ""))


def test_a_storm_of_corrected_errors_is_a_doubt_until_it_is_over(vm: Machine) -> None:
    vm.write("/run/storm", _INJECT.format(times=100_000, correctable=_BAD_TLP, uncorrectable=0))
    vm.run("modprobe aer_inject && systemd-run --quiet --unit=storm python3 /run/storm")
    vm.wait_for_device(ACCELERATOR, 60, Health="suspect")
    # it is waited for until that is sure, and then given to nobody
    assert "correctable PCIe errors per minute" in vm.refusal("r1", "lab.test/accelerator")
    device = vm.device(ACCELERATOR)
    assert (device["State"], device["Health"]) == ("idle", "suspect")
    vm.run("systemctl stop storm")
    vm.wait_for_device(ACCELERATOR, 90, Health="healthy")
    told = vm.journal(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.HEALTH]}", f"HETERO_DEVICE={ACCELERATOR}")
    assert "unhealthy" not in " ".join(one["MESSAGE"] for one in told)
    assert vm.changes(ACCELERATOR) == [], "it was there all the time"


def test_an_error_that_could_not_be_recovered_from(leased: tuple[Machine, str]) -> None:
    vm, lease = leased
    inject(vm, uncorrectable=_POISONED)
    wait_until(lambda: count(vm, "nonfatal") == 1, 10, "the kernel's count")
    # its driver has no error handler, so the kernel says that recovery failed: the lease is told, and goes on
    device = vm.wait_for_device(ACCELERATOR, Health="unhealthy")
    assert (device["State"], device["Lease"]) == ("in-use", lease)
    wait_until(
        lambda: [names.device_path(ACCELERATOR), "unhealthy", lease] in [
            [one[0], one[1], one[3]] for one in vm.signals("HealthEvent")
        ],
        10,
        "the event for the lease's owner",
    )  # fmt: skip
    entry = vm.wait_for_entry(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.HEALTH]}", f"HETERO_DEVICE={ACCELERATOR}")
    # the kernel's message, or a probe that saw its counter first
    assert re.search("recovery failed|uncorrectable PCIe errors", entry["MESSAGE"])
    assert entry["PRIORITY"] == "3"
    vm.run("systemctl stop holder")
    vm.wait_for_device(ACCELERATOR, State="faulty")
    vm.told(ACCELERATOR, ("in-use", "reclaiming", "its pid ended"), ("reclaiming", "faulty", None))
    assert "recovery failed" in vm.refusal("r3", "lab.test/accelerator")
    # taken out and put in again, it is as good as new
    vm.write(f"/sys/bus/pci/devices/{ACCELERATOR}/remove", "1")
    vm.wait_until_gone(ACCELERATOR)
    vm.write("/sys/bus/pci/rescan", "1")
    assert vm.wait_for_device(ACCELERATOR, 60, State="idle")["Health"] == "healthy"
