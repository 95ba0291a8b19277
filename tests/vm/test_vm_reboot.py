"""A reboot ends every lease; cordons, counts and history outlive it."""

from __future__ import annotations

import pytest

from hetero_agent import names
from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.vm.machine import Machine
from tests.vm.qemu import ACCELERATOR, GPU_0, GPU_1


def manager(vm: Machine) -> dict[str, object]:
    """Return the Manager's properties."""
    return vm.properties(names.ROOT, names.MANAGER)


@pytest.mark.parametrize("kept", [False, True], ids=["run-is-empty", "run-is-kept"])
def test_reboot_with_leases_and_cordons(vm: Machine, kept: bool) -> None:
    confirmed, _ = vm.allocate("r1", "lab.test/gpu", device=GPU_0, confirm="b true")
    vm.confirm("r2", confirmed, vm.hold("/dev/dri/renderD128", "holder"))
    waiting, _ = vm.allocate("r3", "lab.test/accelerator")
    vm.call(names.device_path(GPU_1), names.DEVICE, "Cordon", "ss", "r4", "fan noise")
    vm.wait_for_device(GPU_1, State="offline", Reason="cordoned")
    before = manager(vm)
    if kept:
        # as if the runtime directory were on a disk: the leases of the boot before are found there
        vm.run("cp --archive /run/hetero-agent /var/tmp/kept")
        vm.write("/etc/tmpfiles.d/lab.conf", "C /run/hetero-agent - - - - /var/tmp/kept")

    vm.reboot()
    vm.wait_for_device(GPU_1, 60, State="offline", Reason="cordoned", Cordoned=True)
    vm.wait_for_device(GPU_0, 60, State="idle", Lease="/")
    vm.wait_for_device(ACCELERATOR, 60, State="idle", Lease="/")
    after = manager(vm)
    assert after["Leases"] == 0
    assert after["Generation"] > before["Generation"]
    assert after["Epoch"] != before["Epoch"]
    closed = vm.journal(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.ENDED]}", "HETERO_RESULT=reboot")
    assert {entry["HETERO_LEASE"] for entry in closed} == (
        {lease.rpartition("/l")[2] for lease in (confirmed, waiting)} if kept else set()
    )
    # what outlives the reboot whatever becomes of /run
    assert vm.device(GPU_0)["AllocationCount"] == 1
    (history,) = vm.call(names.device_path(GPU_1), names.DEVICE, "GetHistory", "u", 20)
    assert [(one["from"]["data"], one["to"]["data"]) for one in history][-3:] == [
        ("probing", "idle"),
        ("idle", "offline"),
        ("probing", "offline"),
    ]
    generations = [one["generation"]["data"] for one in history]
    assert generations == sorted(generations)
    vm.call(names.device_path(GPU_1), names.DEVICE, "Uncordon", "s", "r5")
    vm.wait_for_device(GPU_1, State="idle", Cordoned=False)
    status, out, _ = vm.attempt(vm.allocation("r1", "lab.test/gpu", device=GPU_0, confirm="b true"))
    assert (status == 0) is not kept, f"a request id that is remembered is spent, another is new: {out}"
