"""The machine sleeps: CLOCK_BOOTTIME has gone on when it wakes up.  First look, then expire."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent import names
from tests.drills.endstate import all_free, leases
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.clocks import Sleep
from tests.support.hold import HoldingProcess
from tests.support.systemd import POLICY, FakeSystemd
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

HOUR = 3600.0
SLEPT = "the machine slept for"


@pytest.fixture
def bus() -> Iterator[PrivateBus]:
    """A private bus on which there may be a logind."""
    one = PrivateBus(extra=POLICY)
    yield one
    one.close()


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, config=CONFIG)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def sleep(agent: AgentProcess) -> Iterator[Sleep]:
    """The sleep of the machine that `agent` runs on; the agent runs."""
    one = Sleep(agent.directory)
    agent.program = one.program
    agent.start()
    yield one
    one.close()


@pytest.fixture
def vendor(sleep: Sleep, agent: AgentProcess) -> Iterator[Vendor]:
    with Vendor(agent) as one:
        one.add("npu-0", "npu-1")
        one.wait_idle()
        yield one


@pytest.fixture
def member(bus: PrivateBus, vendor: Vendor) -> Iterator[Client]:
    with Client(bus, MEMBER, [GROUP_GID]) as client:
        yield client


def scan_worker(agent: AgentProcess) -> int:
    """The pid of the agent's scan worker."""
    children = [
        pid for one in Path(f"/proc/{agent.pid}/task").glob("*/children") for pid in one.read_text().split()
    ]
    (found,) = [
        int(pid)
        for pid in children
        if b"hetero_agent.holders.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def states(client: Client, device: str) -> list[str]:
    """The states that the device came into, oldest first."""
    history = client.call(names.device_path(device), names.DEVICE, "GetHistory", "u", 20)
    return [one["to"] for one in history if one["from"] != one["to"]]


def test_deadlines_that_went_by_asleep(
    agent: AgentProcess, sleep: Sleep, vendor: Vendor, member: Client
) -> None:
    """A ttl is over; a bound lease, whose owner slept too, goes on."""
    with HoldingProcess(vendor.file("npu-0"), MEMBER, later=True) as owner:
        bound = {"confirm": V("b", True), "devices": V("as", ["npu-0"]), "pid": V("u", owner.pid)}
        kept, _ = member.allocate("kept", RESOURCE, 1, bound)
        owner.open()
        timed = {"confirm": V("b", True), "devices": V("as", ["npu-1"]), "ttl": V("t", 60_000_000)}
        lease, _ = member.allocate("ttl", RESOURCE, 1, timed)
        with HoldingProcess(vendor.file("npu-1"), MEMBER) as user:
            member.wait_for_device("npu-1", State="in-use")
            sleep.wake_after(HOUR)
            agent.wait_for_log(SLEPT)
            # over by its time, and not free before its user is gone
            member.wait_for_device("npu-1", State="reclaiming")
            assert member.properties(lease, names.LEASE)["Result"] == "expired"
            assert set(leases(member)) == {kept, lease}
            user.finish()
            member.wait_for_device("npu-1", State="idle")
        assert member.device("npu-0")["State"] == "in-use"
        assert member.properties(kept, names.LEASE)["State"] == "active"
        owner.finish()
        all_free(member, agent, ["npu-0", "npu-1"])


def test_holder_that_ended_before_anybody_looked(
    agent: AgentProcess, sleep: Sleep, vendor: Vendor, member: Client
) -> None:
    """Its deadline went by in the sleep: looked at first, it is free, and no fault is told."""
    lease, _ = member.allocate("a", RESOURCE, 1, {"confirm": V("b", True), "devices": V("as", ["npu-0"])})
    with HoldingProcess(vendor.file("npu-0"), MEMBER) as process:
        member.release("r", lease)
        member.wait_for_device("npu-0", State="reclaiming")
        scanner = scan_worker(agent)
        for pid in (agent.pid, scanner):
            os.kill(pid, signal.SIGSTOP)
        sleep.wake_after(HOUR)
        process.finish()
        os.kill(agent.pid, signal.SIGCONT)
        # other news come before the look that is under way has ended, and change nothing
        agent.wait_for_log(SLEPT)
        vendor.health("npu-1", "healthy")
        member.manager("GetSnapshot", "u", 0)
        os.kill(scanner, signal.SIGCONT)
    all_free(member, agent, ["npu-0", "npu-1"])
    assert "faulty" not in states(member, "npu-0")
    assert "did not come back in time" not in agent.log


def test_holder_that_is_still_there_is_told(
    agent: AgentProcess, sleep: Sleep, vendor: Vendor, member: Client
) -> None:
    lease, _ = member.allocate("a", RESOURCE, 1, {"confirm": V("b", True), "devices": V("as", ["npu-0"])})
    with HoldingProcess(vendor.file("npu-0"), MEMBER) as process:
        member.release("r", lease)
        member.wait_for_device("npu-0", State="reclaiming")
        sleep.wake_after(HOUR)
        member.wait_for_device("npu-0", State="faulty", Reason="reclaim-timeout")
        process.finish()
        all_free(member, agent, ["npu-0", "npu-1"])


def test_the_history_tells_of_the_sleep_beside_what_it_caused(
    bus: PrivateBus, agent: AgentProcess, sleep: Sleep, vendor: Vendor, member: Client
) -> None:
    lease, _ = member.allocate("a", RESOURCE, 1, {"devices": V("as", ["npu-0"])})
    with FakeSystemd(bus) as system:
        system.prepare_for_sleep(True)
        wait_until(lambda: "suspend" in _triggers(member), what="the suspend in the history")
        agent.signal(signal.SIGSTOP)
        sleep.wake_after(8 * HOUR)
        # waits for the agent on the bus: logind's word is there when it wakes up
        system.prepare_for_sleep(False)
        agent.signal(signal.SIGCONT)
        wait_until(lambda: "resume" in _triggers(member), what="the resume in the history")
    assert member.wait_for_signal(names.MANAGER, "LeaseEnded").body == (lease, "expired")
    wanted = ["suspend", "resume", "deadline"]
    assert [one for one in _triggers(member) if one in wanted] == wanted
    all_free(member, agent, ["npu-0", "npu-1"])


def _triggers(client: Client) -> list[str]:
    history = client.call(names.device_path("npu-0"), names.DEVICE, "GetHistory", "u", 20)
    return [one["trigger"] for one in history]
