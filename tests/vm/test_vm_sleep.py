"""The machine sleeps and wakes up (ACPI S3): deadlines run on, and no device is believed in unprobed."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hetero_agent import names
from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.support.wait import wait_until
from tests.vm.machine import Entry, Machine
from tests.vm.qemu import ACCELERATOR, GPU_0, GPU_1, SLEEPER

#: The root port that the accelerator is plugged into, and where its configuration space has the number
#: of the bus below it (PCI-to-PCI Bridge Architecture Specification 1.2, 3.2.5.4).
_PORT = "/sys/bus/pci/devices/0000:00:12.0/config"
_SECONDARY = 0x19


@contextmanager
def asleep(vm: Machine, command: str = "systemctl suspend") -> Iterator[None]:
    """The machine goes to sleep by COMMAND; it wakes up at the end of the block."""
    # later, since this command's own answer must come first
    vm.run(f"systemd-run --quiet --on-active=1 --timer-property=AccuracySec=1ms sh -c {shlex.quote(command)}")
    wait_until(lambda: vm.qemu.monitor("query-status")["status"] == "suspended", 60, "the sleep")
    yield
    vm.qemu.monitor("system_wakeup")
    vm.run("true", timeout=120)


def history(vm: Machine, device: str) -> list[tuple[str, str]]:
    """What befell the device, oldest first: trigger and state."""
    (found,) = vm.call(names.device_path(device), names.DEVICE, "GetHistory", "u", 20)
    return [(one["trigger"]["data"], one["to"]["data"]) for one in found]


def health(vm: Machine, device: str) -> list[str]:
    """What the journal says of the device's health."""
    entries = vm.journal(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.HEALTH]}", f"HETERO_DEVICE={device}")
    return [one["MESSAGE"].removeprefix(f"{device} is ") for one in entries]


def wait_for_doubt(vm: Machine, device: str, why: str) -> None:
    """Wait until the device was doubted because of the sleep, and is not any more."""
    wanted = [f"suspect (was healthy): {why}", "healthy (was suspect)"]
    wait_until(lambda: health(vm, device)[-2:] == wanted, 30, f"the doubt about {device} and its end")


def at(entry: Entry) -> float:
    """When that was, in seconds of the boot clock."""
    return int(entry["HETERO_TIME_BOOTTIME"]) / 1e6


def test_leases_and_deadlines_over_a_sleep(vm: Machine) -> None:
    kept, _ = vm.allocate("r1", "lab.test/gpu", device=GPU_0, confirm="b true")
    vm.confirm("c1", kept, vm.hold("/dev/dri/renderD128", "owner"))
    short, _ = vm.allocate("r2", "lab.test/gpu", device=GPU_1, confirm="b true", ttl="t 25000000")
    vm.hold("/dev/dri/renderD129", "user")
    unconfirmed, _ = vm.allocate("r3", "lab.test/accelerator", confirm_within="u 25")
    before = {lease: vm.lease(lease)["DeadlineBoottime"] for lease in (kept, short, unconfirmed)}
    states = vm.devices()
    assert (states[GPU_0], states[GPU_1], states[ACCELERATOR]) == ("in-use", "in-use", "allocating")

    with asleep(vm):
        time.sleep(26)  # longer than both deadlines

    # over by their time; what is held is not free for it
    vm.wait_for_device(ACCELERATOR, State="idle", Health="healthy")
    vm.wait_for_device(GPU_1, State="reclaiming")
    assert vm.lease(short)["Result"] == "expired"
    # the owner slept too: its lease goes on
    assert vm.wait_for_device(GPU_0, Health="healthy")["State"] == "in-use"
    assert vm.lease(kept)["State"] == "active"
    assert vm.lease(kept)["DeadlineBoottime"] == before[kept]
    vm.run("systemctl stop user")
    vm.wait_for_device(GPU_1, State="idle")
    vm.told(ACCELERATOR, ("allocating", "reclaiming", "expired"), ("reclaiming", "idle", ""))
    assert sorted(vm.signals("LeaseEnded")) == sorted([[short, "expired"], [unconfirmed, "expired"]])

    # the history tells of the sleep beside what it caused
    assert [one for one in history(vm, ACCELERATOR) if one[0] in ("suspend", "resume", "deadline")] in (
        [("suspend", "allocating"), ("resume", "allocating"), ("deadline", "reclaiming")],
        [("suspend", "allocating"), ("deadline", "reclaiming"), ("resume", "reclaiming")],
    )
    assert history(vm, GPU_0)[-2:] == [("suspend", "in-use"), ("resume", "in-use")]
    # from logind's word to the first good probe after it nobody believed in any device
    for device in (GPU_0, GPU_1, ACCELERATOR, SLEEPER):
        wait_for_doubt(vm, device, "the machine goes to sleep")
    # on both clocks of the trail the sleep is as long as it was
    matches = (f"MESSAGE_ID={MESSAGE_IDS[AuditKind.CORRELATION]}", f"HETERO_DEVICE={GPU_0}")
    suspend, resume = (vm.journal(*matches, f"HETERO_TRIGGER={word}")[-1] for word in ("suspend", "resume"))
    assert at(resume) - at(suspend) > 25
    assert int(resume["HETERO_TIME_REALTIME"]) - int(suspend["HETERO_TIME_REALTIME"]) > 25_000_000
    assert int(resume["__MONOTONIC_TIMESTAMP"]) - int(suspend["__MONOTONIC_TIMESTAMP"]) < 25_000_000


# As drivers do that can't cope: what comes back from the sleep does not answer.  Then somebody wants it,
# before systemd says that the machine is awake.
_HOOK = f"""#!/bin/sh
[ "$1" = post ] || exit 0
printf '\\377' | dd of={_PORT} bs=1 seek={_SECONDARY} conv=notrunc status=none
%s >/run/hook 2>&1
echo "status $?" >>/run/hook
"""


def test_what_comes_back_broken_is_given_to_nobody(vm: Machine) -> None:
    bus = vm.run(f"od --address-radix=n --format=u1 --skip-bytes={_SECONDARY} --read-bytes=1 {_PORT}").strip()
    assert bus == "3"
    vm.write("/usr/lib/systemd/system-sleep/lab", _HOOK % vm.allocation("r1", "lab.test/accelerator"))
    vm.run("chmod 755 /usr/lib/systemd/system-sleep/lab")
    with asleep(vm):
        pass
    device = vm.wait_for_device(ACCELERATOR, 60, State="faulty")
    assert (device["Health"], device["Reason"]) == ("unhealthy", "off the bus: its config space reads 0xffff")
    asked = vm.read("/run/hook")
    assert "the machine goes to sleep" in asked
    assert asked.endswith("status 1")
    assert history(vm, ACCELERATOR)[-3:] == [("suspend", "idle"), ("resume", "idle"), ("unhealthy", "faulty")]
    assert vm.wait_for_device(GPU_0, Health="healthy")["State"] == "idle", "the others are what they were"
    alert = json.loads(vm.read(f"/run/hetero-agent/alerts/{ACCELERATOR}.json"))
    assert (alert["state"], alert["reason"]) == ("faulty", device["Reason"])

    vm.run(f"printf '\\003' | dd of={_PORT} bs=1 seek={_SECONDARY} conv=notrunc status=none")
    assert vm.wait_for_device(ACCELERATOR, 60, State="idle")["Health"] == "healthy"
    vm.told(ACCELERATOR, ("idle", "faulty", device["Reason"]), ("faulty", "idle", ""))
    wait_until(
        lambda: vm.attempt(f"test -e /run/hetero-agent/alerts/{ACCELERATOR}.json")[0], 10, "no alert any more"
    )
    assert vm.allocate("r2", "lab.test/accelerator")[1]["devices"] == [ACCELERATOR]


def test_a_sleep_that_nobody_told_of(vm: Machine) -> None:
    lease, _ = vm.allocate("r1", "lab.test/gpu", device=GPU_0, confirm="b true", ttl="t 3600000000")
    with asleep(vm, "echo mem > /sys/power/state"):
        time.sleep(5)
    for device, state in ((GPU_0, "in-use"), (GPU_1, "idle")):
        wait_for_doubt(vm, device, "the machine slept; not probed yet")
        told = history(vm, device)
        assert ("resume", state) in told
        assert "suspend" not in [trigger for trigger, _ in told]
    assert vm.device(GPU_0)["Lease"] == lease


def test_what_was_pulled_out_during_a_sleep(vm: Machine) -> None:
    """The kernel looks at the slot of a leased device when it wakes up, and finds nothing that answers."""
    place = "0000:05:00.0"
    vm.plug("virtio-blk-pci", "one", 4, **{"class": 0x1200, "drive": "memory1", "serial": "LAB-ACC-1"})
    vm.wait_for_device(place, State="idle")
    lease, _ = vm.allocate("r1", "lab.test/accelerator", device=place, confirm="b true")
    with asleep(vm):
        vm.qemu.monitor("device_del", id="one")
    device = vm.wait_for_device(place, 60, Health="unhealthy")
    assert (device["State"], device["Lease"]) == ("in-use", lease)
    told = [one for one in vm.signals("HealthEvent") if one[0] == names.device_path(place)]
    assert [(one[1], one[3]) for one in told] == [("unhealthy", lease)]
    assert "inaccessible" in told[0][2]
    assert vm.release("r2", lease) is True
    vm.wait_for_device(place, State="faulty")
    assert vm.device(ACCELERATOR)["State"] == "idle"
    vm.write(f"/sys/bus/pci/devices/{place}/remove", "1")
    vm.wait_until_gone(place)
    assert history(vm, GPU_0)[-2:] == [("suspend", "idle"), ("resume", "idle")]
