"""What the edge makes of kernel messages, wedged devices, sleep and restarts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_agent.core.events import Happened
from hetero_agent.core.model import AuditKind, DeviceRecord, Health, Opinion, Origin
from hetero_agent.core.symptoms import MessageRule, Symptoms
from hetero_agent.core.verdict import Fault
from hetero_agent.health.kernlog import Said
from hetero_agent.health.memory import Memory
from tests.health.rig import FAST, Rig, device_directory, kernel_record, with_rig

H = Health
K = Origin.KERNEL

#: Rules by class, in the order of `Fault`.
RULES = tuple(MessageRule(str(fault), fault, f"it is {fault} ({{code}})") for fault in Fault)
SYMPTOMS = {"test": Symptoms(messages=RULES), "other": Symptoms(messages=RULES[:2])}


def say(rig: Rig, fault: Fault, where: str = "0000:3b:00.0", **more: object) -> None:
    """The kernel says something of the device at WHERE."""
    given = {"name": "", "code": "7", "line": f"{fault} line", "device": "", "age": 0.0, "repeated": 0, **more}
    rig.edge._heard([Said(list(Fault).index(fault), where, **given)], "s=1")  # type: ignore[arg-type]


async def watched(rig: Rig, path: Path, **more: object) -> DeviceRecord:
    record = kernel_record(path, **more)
    rig.edge.watch(record.id, record, False)
    await rig.until(record.id, H.HEALTHY)
    return record


@pytest.mark.parametrize(
    "where",
    ["0000:3b:00.0", "0000:3B:00.0", "00000000:3b:00.0", "3b:00.0", "0000:3b:00", "3b:00", " 3b:00.0 "],
)
def test_every_spelling_of_the_address_finds_the_device(tmp_path: Path, where: str) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        say(rig, Fault.FATAL, where)
        assert rig.said(path.name, K)[-1] == Opinion(
            H.UNHEALTHY, "it is fatal (7)", {"line": "fatal line", "class": "fatal", "code": "7"}
        )

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


@pytest.mark.parametrize("where", ["0000:3c:00.0", "0000:3b:00.1", "0001:3b:00.0", "nonsense", "3b", ""])
def test_another_address_finds_nobody(tmp_path: Path, where: str) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        say(rig, Fault.FATAL, where)
        assert rig.said(path.name, K) == []

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_names_and_the_kernels_own_word_find_devices_too(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path, attributes={"kernel-names": "card0,renderD128", "rdma-device": "mlx5_3"})
        for number, more in enumerate(
            [
                {"name": "renderD128"},
                {"name": "mlx5_3"},
                {"device": "+pci:0000:3b:00.0"},
                {"device": "+drm:card0"},
            ],
            1,
        ):
            say(rig, Fault.FATAL, "", code=str(number), **more)
            assert rig.said(path.name, K)[-1].reason == f"it is fatal ({number})"
        say(rig, Fault.FATAL, "", name="mlx5_4")
        say(rig, Fault.FATAL, "", device="c226:0")
        assert len(rig.said(path.name, K)) == 4

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_a_message_about_a_port_is_about_what_is_below_it(tmp_path: Path) -> None:
    port = device_directory(tmp_path, "0000:3a:00.0")
    below, beside = device_directory(port), device_directory(tmp_path, "0000:40:00.0")

    async def test(rig: Rig) -> None:
        await watched(rig, below)
        await watched(rig, beside)
        say(rig, Fault.FATAL, "0000:3a:00.0")
        assert rig.health(below.name, K) is H.UNHEALTHY
        assert rig.said(beside.name, K) == []

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_units_are_left_to_their_card_and_stand_for_one_that_is_no_device(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        await watched(rig, path, device="0000:3b:00.0-p1", parent=path.name)
        say(rig, Fault.FATAL)
        assert rig.health(path.name, K) is H.UNHEALTHY
        assert rig.said("0000:3b:00.0-p1", K) == []
        rig.edge.watch(path.name, None, False)
        say(rig, Fault.FATAL)
        assert rig.health("0000:3b:00.0-p1", K) is H.UNHEALTHY

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_a_rule_is_for_the_devices_of_its_profile(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path, profile="other")
        say(rig, Fault.FATAL)
        assert rig.said(path.name, K) == []
        say(rig, Fault.DEGRADED)
        assert rig.health(path.name, K) is H.SUSPECT

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_a_programs_own_fault_is_noted_once_a_minute_and_no_more(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        for code in ("13", "13", "31", "13"):
            say(rig, Fault.APPLICATION, code=code)
        notes = rig.notes()
        assert [(one.kind, one.device) for one in notes] == [(AuditKind.APPLICATION_FAULT, path.name)] * 2
        assert [one.text for one in notes] == [
            f"{path.name}: it is application ({code}), a program's own fault" for code in ("13", "31")
        ]
        assert notes[0].evidence["line"] == "application line"
        await asyncio.sleep(2 * FAST.interval)
        assert rig.said(path.name, K) == []
        assert [one.health for one in rig.said(path.name)] == [H.HEALTHY]

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_old_messages_are_believed_only_if_they_are_grave(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        say(rig, Fault.APPLICATION, age=10_000.0)
        say(rig, Fault.DEGRADED, age=10_000.0)
        assert (rig.notes(), rig.said(path.name, K)) == ([], [])
        say(rig, Fault.NEEDS_RESET, age=10_000.0)
        assert rig.health(path.name, K) is H.UNHEALTHY

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_foreign_text_in_a_message_is_made_printable(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        say(rig, Fault.FATAL, line="\x1b[31mred\u202e" + "x" * 5000)
        line = rig.said(path.name, K)[-1].evidence["line"]
        assert line.startswith("\\x1b[31mred\\u202e")
        assert len(line) == 256

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_a_doubt_is_over_after_good_probes(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        say(rig, Fault.DEGRADED)
        assert rig.health(path.name, K) is H.SUSPECT
        await rig.until(path.name, H.HEALTHY, K)

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


async def never(rig: Rig, device: str, health: Health) -> None:
    """For as long as many probes take, the kernel's word is not HEALTH."""
    await asyncio.sleep(6 * FAST.interval)
    assert rig.health(device, K) is not health


@pytest.mark.parametrize("how", ["bound anew", "plugged in anew", "the kernel says so", "somebody vouches"])
def test_a_fault_stays_until_the_device_was_reset(tmp_path: Path, how: str) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        record = await watched(rig, path, serial="S1")
        say(rig, Fault.FATAL)
        await never(rig, path.name, H.HEALTHY)
        if how == "bound anew":
            rig.edge.watch(path.name, replace(record, driver=""), False)
            (path / "driver").symlink_to(tmp_path)
            rig.edge.watch(path.name, replace(record, driver="nvidia"), False)
        elif how == "plugged in anew":
            rig.edge.watch(path.name, None, False)
            before = len(rig.events)
            rig.edge.watch(path.name, record, False)
            # the core knows the device no more: it is told again that it is sick
            assert rig.events[before:] != []
            assert rig.health(path.name, K) is H.UNHEALTHY
        elif how == "the kernel says so":
            say(rig, Fault.RECOVERED)
        else:
            rig.edge.watch(path.name, record, True)
        await rig.until(path.name, H.HEALTHY, K)

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_another_device_in_the_place_does_not_inherit_the_fault(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        record = await watched(rig, path, serial="S1")
        say(rig, Fault.FATAL)
        rig.edge.watch(path.name, None, False)
        before = len(rig.said(path.name, K))
        rig.edge.watch(path.name, replace(record, serial="S2"), False)
        await asyncio.sleep(2 * FAST.interval)
        assert len(rig.said(path.name, K)) == before

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


# -- restarts -------------------------------------------------------------------------------------
def test_a_fault_outlives_the_agent_and_its_end_does_too(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def sick(rig: Rig) -> None:
        await watched(rig, path, serial="S1")
        say(rig, Fault.FATAL)

    async def still(rig: Rig) -> None:
        record = await watched(rig, path, serial="S1")
        assert rig.said(path.name, K) == [
            Opinion(H.UNHEALTHY, "it is fatal (7)", {"line": "fatal line", "class": "fatal", "code": "7"})
        ]
        await never(rig, path.name, H.HEALTHY)
        rig.edge.watch(path.name, record, True)
        await rig.until(path.name, H.HEALTHY, K)

    async def well(rig: Rig) -> None:
        await watched(rig, path, serial="S1")
        await asyncio.sleep(FAST.interval)
        assert rig.said(path.name, K) == []

    for life in (sick, still, well):
        with_rig(life, tmp_path, symptoms=SYMPTOMS)


def test_a_fault_is_not_taken_over_by_a_device_with_another_serial(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def sick(rig: Rig) -> None:
        await watched(rig, path, serial="S1")
        say(rig, Fault.FATAL)

    async def other(rig: Rig) -> None:
        await watched(rig, path, serial="S2")
        assert rig.said(path.name, K) == []

    with_rig(sick, tmp_path, symptoms=SYMPTOMS)
    with_rig(other, tmp_path, symptoms=SYMPTOMS)


@pytest.mark.parametrize(("told", "later"), [("S1", ""), ("", "S1"), ("", "")])
def test_a_fault_and_its_end_outlive_the_agent_while_the_serial_can_not_be_read(
    tmp_path: Path, told: str, later: str
) -> None:
    path = device_directory(tmp_path)

    async def sick(rig: Rig) -> None:
        await watched(rig, path, serial=told)
        say(rig, Fault.FATAL)

    async def still(rig: Rig) -> None:
        record = await watched(rig, path, serial=later)
        assert rig.health(path.name, K) is H.UNHEALTHY
        # it woke up
        rig.edge.watch(path.name, record := replace(record, serial="S1"), False)
        await never(rig, path.name, H.HEALTHY)
        rig.edge.watch(path.name, record, True)
        await rig.until(path.name, H.HEALTHY, K)

    async def well(rig: Rig) -> None:
        await watched(rig, path, serial=later)
        assert rig.said(path.name, K) == []

    for life in (sick, still, well):
        with_rig(life, tmp_path, symptoms=SYMPTOMS)


def test_a_card_whose_serial_shows_late_does_not_keep_the_fault_of_another(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def sick(rig: Rig) -> None:
        await watched(rig, path, serial="S1")
        say(rig, Fault.FATAL)

    async def other(rig: Rig) -> None:
        record = await watched(rig, path, serial="")
        assert rig.health(path.name, K) is H.UNHEALTHY
        rig.edge.watch(path.name, replace(record, serial="S2"), False)
        await rig.until(path.name, H.HEALTHY, K)

    with_rig(sick, tmp_path, symptoms=SYMPTOMS)
    with_rig(other, tmp_path, symptoms=SYMPTOMS)


def test_that_a_device_was_plugged_in_anew_outlives_the_agent(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def sick(rig: Rig) -> None:
        record = await watched(rig, path, serial="S1")
        say(rig, Fault.FATAL)
        rig.edge.watch(path.name, None, False)
        rig.edge.watch(path.name, record, False)

    async def well(rig: Rig) -> None:
        await watched(rig, path, serial="S1")
        await rig.until(path.name, H.HEALTHY, K)

    with_rig(sick, tmp_path, symptoms=SYMPTOMS)
    with_rig(well, tmp_path, symptoms=SYMPTOMS)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"boot": 1}', '{"boot": "BOOT", "cursor": "", "faults": [1]}', "\0" * 100, "other boot"],
)
def test_a_damaged_memory_or_one_of_another_boot_is_no_memory(tmp_path: Path, content: str) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    path = tmp_path / "health.json"
    if content == "other boot":
        fault = {"device": "a", "serial": "", "fault": "fatal", "reason": "r", "evidence": {}, "reset": False}
        content = json.dumps({"boot": "0" * 36, "cursor": "s=1", "faults": [fault]})
    path.write_text(content.replace("BOOT", boot))
    memory = Memory(path)
    memory.load()
    assert (memory.faults, memory.cursor) == ({}, "")
    memory.save()
    assert json.loads(path.read_text()) == {"boot": boot, "cursor": "", "faults": []}


def test_a_memory_that_can_not_be_written_stops_nothing(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        say(rig, Fault.FATAL)
        assert rig.health(path.name, K) is H.UNHEALTHY

    with_rig(test, tmp_path / "no" / "such", symptoms=SYMPTOMS)


# -- wedged devices -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "health"), [("rebind", H.UNHEALTHY), ("rebind,bus-reset", H.UNHEALTHY), ("none", H.SUSPECT)]
)
def test_a_device_that_its_driver_gave_up(tmp_path: Path, how: str, health: Health) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        rig.edge.wedged(f"{path}/drm/card0", how)
        said = rig.said(path.name, K)[-1]
        assert (said.health, said.reason) == (health, f"its driver gave it up (recovery: {how})")
        rig.edge.wedged(f"{tmp_path}/0000:3b:00.01/drm/card0", how)
        assert len(rig.said(path.name, K)) == 1

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


# -- sleep ----------------------------------------------------------------------------------------
def test_nothing_is_believed_in_after_a_sleep_until_it_is_probed(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        rig.edge.sleep(True)
        assert rig.said(path.name)[-1] == Opinion(H.SUSPECT, "the machine goes to sleep", {}, True)
        await asyncio.sleep(3 * FAST.interval)
        assert len(rig.said(path.name)) == 2  # nobody looks at a device that goes to sleep
        rig.edge.sleep(False)
        await rig.until(path.name, H.HEALTHY)
        (path / "config").write_bytes(b"\xff\xff")
        rig.edge.sleep(False)
        assert rig.health(path.name) is H.SUSPECT
        await rig.until(path.name, H.UNHEALTHY)

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_a_providers_device_does_not_sleep(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        rig.edge.watch("npu-0", kernel_record("", "npu-0", source="vendor"), False)
        await rig.until("npu-0", H.HEALTHY)
        rig.edge.sleep(True)
        assert rig.health("npu-0") is H.HEALTHY
        rig.edge.sleep(False)

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_a_sleep_that_nobody_told_of_is_noticed(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        await watched(rig, path)
        rig.edge._slept -= 100  # as if the clocks had gone apart since the last look
        said = await rig.until(path.name, H.SUSPECT)
        assert said.reason == "the machine slept; not probed yet"
        await rig.until(path.name, H.HEALTHY)
        assert [one.what for one in rig.events if isinstance(one, Happened)] == ["resume"]

    with_rig(test, tmp_path, symptoms=SYMPTOMS)


def test_a_sick_sleeper_is_not_called_well_for_sleeping(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        record = await watched(rig, path)
        say(rig, Fault.FATAL)
        (path / "power/runtime_status").write_text("suspended\n")
        rig.edge.watch(path.name, record, True)
        await never(rig, path.name, H.HEALTHY)
        (path / "power/runtime_status").write_text("active\n")
        await rig.until(path.name, H.HEALTHY, K)

    with_rig(test, tmp_path, symptoms=SYMPTOMS)
