"""A process that nothing ends: it waits in the kernel (state D), with a leased device in its hands."""

from __future__ import annotations

import shlex

from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.support.wait import wait_until
from tests.vm.machine import Machine
from tests.vm.qemu import GPU_0, GPU_1

_CONFIG = """
[reclaim]
deadline = 5
kill-after = 1
"""

#: A file system whose writers wait in the kernel until it is thawed, whatever they are sent (fsfreeze(8)).
_FROZEN = (
    "modprobe loop && truncate --size=16M /run/lab.img && mke2fs -q -t ext4 -F /run/lab.img"
    " && mkdir -p /mnt/lab && mount -o loop /run/lab.img /mnt/lab && fsfreeze --freeze /mnt/lab"
)


def state(vm: Machine, pid: int) -> str:
    """Return the state of a process (proc_pid_stat(5)), "" if there is none."""
    return vm.attempt(f"ps --no-headers --format=s --pid={pid}")[1].strip()


def test_a_holder_that_waits_in_the_kernel(vm: Machine) -> None:
    vm.configure(_CONFIG)
    vm.run("systemctl reload hetero-agent")
    vm.run(_FROZEN)
    lease, _ = vm.allocate("r1", "lab.test/gpu", device=GPU_0, confirm="b true", on_end="s kill")
    command = "exec 9</dev/dri/renderD128; exec touch /mnt/lab/file"
    vm.run(f"systemd-run --quiet --unit=holder --service-type=exec bash -c {shlex.quote(command)}")
    pid = int(vm.run("systemctl show --value --property=MainPID holder"))
    wait_until(lambda: state(vm, pid) == "D", 15, "a process in state D")
    vm.confirm("r2", lease, pid)
    assert vm.release("r3", lease) is True
    device = vm.wait_for_device(GPU_0, 60, State="faulty")
    assert device["Reason"] == "reclaim-timeout"
    assert vm.holders(GPU_0) == [pid]
    assert state(vm, pid) == "D"
    # asked to end once and killed once; nobody else is held up, and it goes on being no news
    sent = (f"MESSAGE_ID={MESSAGE_IDS[AuditKind.SIGNALLED]}", f"HETERO_DEVICE={GPU_0}")
    before = [one["MESSAGE"] for one in vm.journal(*sent)]
    assert len(before) == 2
    assert vm.release("r5", vm.allocate("r4", "lab.test/gpu", confirm="b true")[0]) is True
    vm.wait_for_device(GPU_1, State="idle")
    alerts = vm.run("journalctl --priority=err --identifier=hetero-agent --output=cat").splitlines()
    assert len([one for one in alerts if GPU_0 in one]) == 1
    vm.run("heteroctl holders " + GPU_0)
    vm.run("sleep 6")
    assert [one["MESSAGE"] for one in vm.journal(*sent)] == before
    # the kernel lets go, and it is over without anybody's doing
    vm.run("fsfreeze --unfreeze /mnt/lab")
    vm.wait_for_device(GPU_0, State="idle", Lease="/")
    assert state(vm, pid) == ""
    assert vm.signals("LeaseEnded")[-1] == [lease, "released"]
    vm.told(GPU_0, ("reclaiming", "faulty", "reclaim-timeout"), ("faulty", "idle", ""))
    vm.run("umount /mnt/lab")
