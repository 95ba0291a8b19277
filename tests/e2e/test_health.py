"""Health from end to end: an agent on a machine of the test's own, its bus, and what a caller sees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent import names
from tests.support import kmsg
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE
from tests.support.fakesys import FakeSys, in_own_mounts
from tests.support.systemd import POLICY, FakeSystemd
from tests.support.vendor import RESOURCE as VENDOR_RESOURCE
from tests.support.vendor import Vendor
from tests.support.wait import wait_until

RESOURCE = "heteroagent.org/accelerator"
HEALTH = "\n[health]\ninterval = 0.5\nconfirm = 0.15\ndeadline = 20\n"
#: Where something hangs.  Elsewhere a busy machine might keep a good probe for longer.
SHORT = HEALTH.replace("deadline = 20", "deadline = 1")

A, B = "0000:3b:00.0", "0000:af:00.0"
OFF_THE_BUS = "npu 0000:3b:00.0: it has fallen off the bus"


class Node:
    """The machine, the agent on it, and a member's connection to it."""

    def __init__(self, machine: FakeSys, bus: PrivateBus, agent: AgentProcess, member: Client) -> None:
        self.machine, self.bus, self.agent, self.member = machine, bus, agent, member

    def device(self, device: str) -> dict[str, object]:
        return self.member.device(device)

    def allocatable(self) -> int:
        resources = self.member.properties(names.ROOT, names.MANAGER)["Resources"]
        return int(resources.get(RESOURCE, {}).get("allocatable", 0))

    def alerts(self) -> list[str]:
        directory = self.agent.runtime / "alerts"
        return sorted(path.name for path in directory.iterdir()) if directory.exists() else []

    def history(self, device: str) -> list[tuple[str, str, str]]:
        rows = self.member.call(names.device_path(device), names.DEVICE, "GetHistory", "u", 20)
        return [(row["trigger"], row["to"], row["reason"]) for row in rows]


@contextlib.contextmanager
def node(*addresses: str, extra: str = HEALTH, policy: str = "") -> Iterator[Node]:
    """A machine with NPUs at ADDRESSES, all idle."""
    machine = FakeSys()
    for address in addresses or (A, B):
        machine.npu(address)
    bus = PrivateBus(extra=policy)
    agent = AgentProcess(bus, config=CONFIG + extra, sources="kernel")
    try:
        agent.start()
        with Client(bus, MEMBER, [GROUP_GID]) as member:
            for address in addresses or (A, B):
                member.wait_for_device(address, State="idle", Health="healthy")
            yield Node(machine, bus, agent, member)
    finally:
        agent.close()
        bus.close()


@in_own_mounts
def test_a_kernel_message_makes_a_device_faulty_and_good_probes_after_a_reset_bring_it_back() -> None:
    with node() as one:
        wait_until(lambda: "kernel messages are read from kmsg" in one.agent.log, what="the log worker")
        one.machine.kernel.say(OFF_THE_BUS)
        faulty = one.member.wait_for_device(A, State="faulty")
        assert (faulty["Health"], faulty["Reason"]) == ("unhealthy", "fallen off the bus")
        assert one.device(B)["State"] == "idle"
        assert one.allocatable() == 1
        told = one.member.wait_for_signal(names.MANAGER, "HealthEvent")
        assert told.body[:4] == (names.device_path(A), "unhealthy", "fallen off the bus", "/")
        assert told.body[4] == {"line": OFF_THE_BUS, "class": "fatal"}
        assert one.alerts() == [f"{A}.json"]
        alert = json.loads((one.agent.runtime / "alerts" / f"{A}.json").read_text())
        assert (alert["state"], alert["reason"], alert["evidence"]["line"]) == (
            "faulty",
            "fallen off the bus",
            OFF_THE_BUS,
        )
        wait_until(lambda: '"HETERO_KIND":"health"' in one.agent.log, what="the audit")
        one.agent.wait_for_log(f'"HETERO_EVIDENCE_LINE":"{OFF_THE_BUS}"')
        # good probes alone don't clear it
        time.sleep(2.5)
        assert one.device(A)["State"] == "faulty"
        one.machine.kernel.say("pcieport 0000:3b:00.0: AER: device recovery successful")
        one.member.wait_for_device(A, State="idle", Health="healthy")
        wait_until(lambda: one.alerts() == [], what="the end of the alert")
        assert [told.body[1] for told in one.member.signals(names.MANAGER, "HealthEvent")] == [
            "unhealthy",
            "healthy",
        ]


@in_own_mounts
def test_a_fault_outlives_a_kill_of_the_agent() -> None:
    with node() as one:
        wait_until(lambda: "kernel messages are read from kmsg" in one.agent.log, what="the log worker")
        one.machine.kernel.say(OFF_THE_BUS)
        one.member.wait_for_device(A, State="faulty")
        one.agent.kill9()
        one.agent.start()
        assert one.member.wait_for_device(A, State="faulty")["Reason"] == "fallen off the bus"
        assert one.alerts() == [f"{A}.json"]
        one.member.wait_for_device(B, State="idle")


@in_own_mounts
def test_a_programs_own_fault_changes_nothing_but_the_audit() -> None:
    rule = """
    [[kernel-log]]
    pattern = 'npu (?P<address>\\S+): job (?P<code>\\d+) failed'
    class = "application"
    """
    with node() as one:
        one.agent.wait_for_log("kernel messages are read from kmsg")
        shipped = Path(one.agent.profiles / "generic.toml")
        shipped.write_text(Path("hetero_agent/profiles/generic.toml").read_text() + rule)
        one.agent.reload()
        wait_until(lambda: one.agent.log.count("kernel messages are read from kmsg") >= 2, what="a new reader")
        one.machine.kernel.say(f"npu {A}: job 7 failed")
        wait_until(lambda: '"HETERO_KIND":"application-fault"' in one.agent.log, what="the note")
        assert (one.device(A)["State"], one.device(A)["Health"]) == ("idle", "healthy")


@in_own_mounts
def test_a_probe_that_fails_is_a_doubt_that_is_counted_then_a_fault_then_over() -> None:
    # the doubt lasts for two confirmations: long enough to be seen
    with node(extra=HEALTH.replace("0.15", "1")) as one:
        config = Path(f"/sys/devices/pci0000:00/{A}/config")
        config.write_bytes(b"\xff\xff\xff\xff")
        seen = []
        wait_until(
            lambda: (
                seen.append((one.device(A)["Health"], one.device(A)["State"], one.allocatable()))
                or seen[-1][0] == "unhealthy"
            ),
            what="the fault",
        )
        doubts = [row for row in seen if row[0] == "suspect"]
        assert doubts != []
        assert doubts[0] == ("suspect", "idle", 2), "a doubt is counted and not told as a fault"
        faulty = one.member.wait_for_device(A, State="faulty")
        assert faulty["Reason"] == "off the bus: its config space reads 0xffff"
        config.write_bytes(b"\x52\x1e\x1e\x40")
        one.member.wait_for_device(A, State="idle", Health="healthy")


@in_own_mounts
def test_a_flapping_device_stays_away_longer_and_says_why() -> None:
    with node(A) as one:
        config = Path(f"/sys/devices/pci0000:00/{A}/config")
        for _ in range(4):
            one.member.wait_for_device(A, State="idle", Health="healthy")
            config.write_bytes(b"\xff\xff\xff\xff")
            one.member.wait_for_device(A, State="faulty")
            config.write_bytes(b"\x52\x1e\x1e\x40")
        device = one.member.wait_for_device(A, Health="suspect", State="idle")
        # more often where so much else goes on that a probe takes too long
        assert re.fullmatch(
            r"was unhealthy \(.+\); flapping: \d times within 10 min, so \d+ good probes in a row are needed",
            str(device["Reason"]),
        )
        # neither counted nor granted, and those who ask are told why
        assert one.allocatable() == 0
        with pytest.raises(CallError, match="flapping: "):
            one.member.allocate("r1", RESOURCE, 1)
        explained, _ = one.member.manager("Explain", "sua{sv}", RESOURCE, 1, {})
        assert "flapping" in str(explained)
        assert "flapping: " in one.agent.log
        one.member.wait_for_device(A, Health="healthy", timeout=90)
        assert one.allocatable() == 1


@in_own_mounts
def test_a_blip_goes_through_no_report_and_a_request_meanwhile_waits() -> None:
    with node(A, extra=HEALTH.replace("0.15", "2")) as one:
        config = Path(f"/sys/devices/pci0000:00/{A}/config")
        before = len(one.member.signals(names.MANAGER, "Report"))
        config.write_bytes(b"\xff\xff\xff\xff")
        one.member.wait_for_device(A, Health="suspect")
        config.write_bytes(b"\x52\x1e\x1e\x40")
        number = one.member.send(
            names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", "r1", RESOURCE, 1, {"confirm": V("b", True)}
        )
        lease = one.member.receive(number).value[0]
        assert one.member.properties(lease, names.LEASE)["Devices"] == [names.device_path(A)]
        reports = one.member.signals(names.MANAGER, "Report")[before:]
        # one because it was granted, perhaps one that was due; none because of the doubt
        counts = [report.body[4][RESOURCE]["allocatable"] for report in reports]
        assert counts == sorted(counts, reverse=True)
        assert one.member.signals(names.MANAGER, "HealthEvent") == []


@in_own_mounts
def test_a_device_that_hangs_is_unresponsive_and_the_others_are_on_time() -> None:
    addresses = [f"0000:{number:02x}:00.0" for number in range(16, 28)]
    with node(*addresses, extra=SHORT) as one:
        sick, other = addresses[0], addresses[5]
        one.machine.hang(Path(f"/sys/devices/pci0000:00/{sick}"), "config")
        device = one.member.wait_for_device(sick, State="faulty")
        assert device["Reason"] == "unresponsive: a probe did not return within 1 s"
        # while it goes on hanging the others' faults are found, and calls answered
        config = Path(f"/sys/devices/pci0000:00/{other}/config")
        config.write_bytes(b"\xff\xff\xff\xff")
        one.member.wait_for_device(other, State="faulty")
        lease, _ = one.member.allocate("r1", RESOURCE, 3)
        assert one.member.release("r2", lease)
        Path(f"/sys/devices/pci0000:00/{sick}/config").unlink()
        one.member.wait_for_device(sick, State="idle")


@in_own_mounts
def test_a_driver_that_goes_without_an_event_is_noticed_and_in_the_history() -> None:
    with node(extra=HEALTH + "\n[grant]\nconfirm-within = 20\n") as one:
        lease, _ = one.member.allocate("r1", RESOURCE, 1, {"devices": V("as", [A]), "confirm": V("b", True)})
        Path(f"/sys/devices/pci0000:00/{A}/driver").unlink()
        one.member.wait_for_device(A, State="lost", Driver="")
        assert ("driver-change", "in-use", "npu -> none") in one.history(A)
        one.machine.bind(Path(f"/sys/devices/pci0000:00/{A}"), "npu")
        one.member.release("r2", lease)


@pytest.mark.parametrize("ending", ["mark", "kill"])
@in_own_mounts
def test_a_fault_of_a_leased_device_is_told_and_ends_the_lease_only_if_it_asked(ending: str) -> None:
    with node() as one:
        wait_until(lambda: "kernel messages are read from kmsg" in one.agent.log, what="the log worker")
        options = {"devices": V("as", [A]), "confirm": V("b", True), "on-fault": V("s", ending)}
        lease, _ = one.member.allocate("r1", RESOURCE, 1, options)
        one.machine.kernel.say(OFF_THE_BUS)
        told = one.member.wait_for_signal(names.MANAGER, "HealthEvent")
        assert told.body[:4] == (names.device_path(A), "unhealthy", "fallen off the bus", lease)
        if ending == "mark":
            assert (one.device(A)["State"], one.device(A)["Health"]) == ("in-use", "unhealthy")
            assert one.member.properties(lease, names.LEASE)["State"] == "active"
            assert one.alerts() == [f"{A}.json"]
            one.member.release("r2", lease)
        else:
            ended = one.member.wait_for_signal(names.MANAGER, "LeaseEnded")
            assert ended.body == (lease, "failed")
        one.member.wait_for_device(A, State="faulty")
        with pytest.raises(CallError):
            one.member.allocate("r3", RESOURCE, 1, {"devices": V("as", [A])})


@in_own_mounts
def test_sleep_reload_and_waking_up_are_in_the_history_and_nothing_is_granted_unprobed() -> None:
    with node(policy=POLICY) as one, FakeSystemd(one.bus) as host:
        wait_until(lambda: host.subscribed, what="the subscription")
        lease, _ = one.member.allocate("r1", RESOURCE, 1, {"devices": V("as", [A]), "confirm": V("b", True)})
        host.reloading(True)
        host.reloading(False)
        wait_until(lambda: one.history(A)[-1][0] == "daemon-reload", what="the reload in the history")
        assert [row[0] for row in one.history(B)].count("daemon-reload") == 0
        host.prepare_for_sleep(True)
        device = one.member.wait_for_device(B, Health="suspect")
        assert (device["State"], one.history(B)[-1][:2]) == ("idle", ("suspend", "idle"))
        Path(f"/sys/devices/pci0000:00/{B}/config").write_bytes(b"\xff\xff\xff\xff")
        host.prepare_for_sleep(False)
        one.member.wait_for_device(B, State="faulty")
        one.member.wait_for_device(A, State="in-use", Health="healthy")
        triggers = [row[0] for row in one.history(B)]
        assert triggers[-3:] == ["suspend", "resume", "unhealthy"]
        assert one.member.properties(lease, names.LEASE)["State"] == "active"


@in_own_mounts
def test_stop_and_kill_leave_no_worker() -> None:
    with node() as one:
        listed = Path(f"/proc/{one.agent.pid}/task/{one.agent.pid}/children")
        wait_until(lambda: len(listed.read_text().split()) == 3, what="workers for scans, probes, messages")
        children = listed.read_text().split()
        assert one.agent.terminate() == 0
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), what="their end")
        one.agent.start()
        children = Path(f"/proc/{one.agent.pid}/task/{one.agent.pid}/children").read_text().split()
        one.agent.kill9()
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), what="their end")


def test_workers_that_are_killed_are_replaced(bus: PrivateBus) -> None:
    agent = AgentProcess(bus, config=CONFIG + HEALTH)
    try:
        agent.start()
        with Vendor(agent) as vendor, Client(bus) as client:
            vendor.add("npu-0")
            client.wait_for_device("npu-0", State="idle")
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            vendor.file("npu-0").unlink()
            device = client.wait_for_device("npu-0", Health="unhealthy")
            assert device["Reason"] == f"its node {vendor.file('npu-0')} is gone"
            assert device["Resource"] == VENDOR_RESOURCE
    finally:
        agent.close()


@pytest.mark.skipif(not kmsg.real_is_writable(), reason="/dev/kmsg can't be written here")
def test_the_real_kernels_message_makes_a_real_device_faulty(bus: PrivateBus) -> None:
    word = f"hetero-agent test {time.time_ns()}"  # what an earlier run said is heard too
    rule = f"""
    [[kernel-log]]
    pattern = '{word}: console (?P<name>tty\\d+): error (?P<code>\\d+)'
    class = "fatal"
    text = "error {{code}}"
    """
    agent = AgentProcess(
        bus, config=CONFIG + HEALTH, profiles={"console.toml": PROFILE + rule}, sources="kernel"
    )
    try:
        agent.start()
        with Client(bus) as client:
            client.wait_for_device(DEVICE_ID, State="idle")
            wait_until(lambda: "kernel messages are read from" in agent.log, what="the log worker")
            kmsg.say_real(f"{word}: console {CONSOLE.name}: error 79")
            assert client.wait_for_device(DEVICE_ID, State="faulty")["Reason"] == "error 79"
            # whoever repaired it says so by lifting a cordon
            path = names.device_path(DEVICE_ID)
            client.call(path, names.DEVICE, "Cordon", "ss", "c1", "repair")
            client.wait_for_device(DEVICE_ID, State="offline")
            client.call(path, names.DEVICE, "Uncordon", "s", "c2")
            client.wait_for_device(DEVICE_ID, State="idle", Health="healthy")
    finally:
        agent.close()
