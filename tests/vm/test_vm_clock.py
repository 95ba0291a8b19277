"""The wall clock jumps by a year, both ways: leases and deadlines run on."""

from __future__ import annotations

import re
import time

import pytest

from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.vm.machine import Machine
from tests.vm.qemu import ACCELERATOR, GPU_0, GPU_1

_YEAR = 365 * 86_400 * 1_000_000


def move(vm: Machine, years: int) -> int:
    """Move the guest's wall clock; returns by how many microseconds it says to be off then."""
    before = int(vm.run("date +%s%6N"))
    vm.run(f"date --set='@{before / 1_000_000 + years * 365 * 86_400:.6f}'")
    return int(vm.run("date +%s%6N")) - before


@pytest.mark.parametrize("years", [1, -1], ids=["forward", "back"])
def test_the_wall_clock_moves_by_a_year(vm: Machine, years: int) -> None:
    unconfirmed, _ = vm.allocate("r1", "lab.test/accelerator", confirm_within="u 25")
    renewed, _ = vm.allocate("r2", "lab.test/gpu", device=GPU_0, confirm="b true", ttl="t 3600000000")
    short, _ = vm.allocate("r3", "lab.test/gpu", device=GPU_1, confirm="b true", ttl="t 25000000")
    began = time.monotonic()
    boottime = {lease: vm.lease(lease)["DeadlineBoottime"] for lease in (unconfirmed, renewed, short)}
    assert abs(move(vm, years) - years * _YEAR) < 60_000_000

    # nothing ends because of the jump, and nothing lives a year longer for it
    states = vm.devices()
    assert (states[ACCELERATOR], states[GPU_0], states[GPU_1]) == ("allocating", "in-use", "in-use")
    assert {lease: vm.lease(lease)["DeadlineBoottime"] for lease in boottime} == boottime
    vm.wait_for_device(ACCELERATOR, 40, State="idle")
    vm.wait_for_device(GPU_1, 40, State="idle")
    assert time.monotonic() - began > 20, "not before their time"
    assert vm.device(GPU_0)["Lease"] == renewed
    assert sorted(vm.signals("LeaseEnded")) == sorted([[unconfirmed, "expired"], [short, "expired"]])
    vm.told(ACCELERATOR, ("allocating", "reclaiming", "expired"), ("reclaiming", "idle", ""))

    # the trail has both clocks: boot time in order, wall clock as it was then
    ended = vm.wait_for_entry(
        f"MESSAGE_ID={MESSAGE_IDS[AuditKind.EXPIRED]}", f"HETERO_LEASE={short.rpartition('/l')[2]}"
    )
    granted = vm.wait_for_entry(
        f"MESSAGE_ID={MESSAGE_IDS[AuditKind.GRANTED]}", f"HETERO_LEASE={short.rpartition('/l')[2]}"
    )
    lived = int(ended["HETERO_TIME_BOOTTIME"]) - int(granted["HETERO_TIME_BOOTTIME"])
    assert 25_000_000 <= lived < 35_000_000
    apart = int(ended["HETERO_TIME_REALTIME"]) - int(granted["HETERO_TIME_REALTIME"])
    assert abs(apart - lived - years * _YEAR) < 60_000_000
    assert re.search(r" 5[789]min ", vm.run("heteroctl leases")), "counted on the boot clock for people, too"
    # request ids are remembered by the boot clock
    assert vm.allocate("r2", "lab.test/gpu", device=GPU_0, confirm="b true", ttl="t 3600000000")[0] == renewed
    assert "ended" in vm.refusal("r3", "lab.test/gpu", device=GPU_1, confirm="b true", ttl="t 25000000")
