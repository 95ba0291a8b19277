"""SIGKILL in the middle of a reclaim: the next life goes on where this one was."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterator

import pytest

from hetero_agent import names
from tests.drills.endstate import all_free, leases, nothing_twice
from tests.holders.holding import Child, alive, as_user
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.hold import HoldingProcess
from tests.support.trail import entries, signals, wait_signals
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

SHORT = CONFIG.replace("[reclaim]\n", "[reclaim]\ndeadline = 3\nkill-after = 1\n")
#: Long enough for the test to be there between TERM and KILL.
PATIENT = "[reclaim]\ndeadline = 60\nkill-after = 5\n"
LATE = "did not come back in time"


@pytest.fixture
def agent(bus: PrivateBus, request: pytest.FixtureRequest) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, config=getattr(request, "param", SHORT))
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def member(bus: PrivateBus, vendor: Vendor) -> Iterator[Client]:
    vendor.add("npu-0")
    vendor.wait_idle()
    with Client(bus, MEMBER, [GROUP_GID]) as client:
        yield client


def again(agent: AgentProcess, vendor: Vendor) -> None:
    """The agent starts after its end, and its provider comes back to it."""
    agent.start()
    vendor.register()
    vendor.report()


@pytest.mark.parametrize("agent", [CONFIG.replace("[reclaim]\n", PATIENT)], indirect=True, ids=[""])
@pytest.mark.parametrize("moment", ["at once", "after TERM", "while it is down"])
def test_ending_goes_on(agent: AgentProcess, vendor: Vendor, member: Client, moment: str) -> None:
    """A holder that is deaf to TERM, on-end=kill."""
    lease, _ = member.allocate("a", RESOURCE, 1, {"confirm": V("b", True), "on-end": V("s", "kill")})
    child = Child(vendor.file("npu-0"), "deaf", as_user(MEMBER))
    try:
        if moment == "at once":
            agent.signal(signal.SIGSTOP)
            number = member.send(names.ROOT, names.MANAGER, "Release", "so", "r", lease)
            agent.signal(signal.SIGCONT)
            member.receive(number)
        else:
            member.release("r", lease)
        if moment == "after TERM":
            wait_signals(agent, child.pid, ["got SIGTERM"])
        agent.kill9()
        assert alive(child.pid)
        if moment == "while it is down":
            child.kill()
        again(agent, vendor)
        if moment != "while it is down":
            assert child.process.wait(30) == -signal.SIGKILL
            assert signals(agent, child.pid)[-1:] != []
        all_free(member, agent, ["npu-0"])
    finally:
        child.end()
    assert member.release("r", lease) is True  # the answer that it had
    assert LATE not in agent.log


def test_deadline_is_not_begun_anew(agent: AgentProcess, vendor: Vendor, member: Client) -> None:
    """It runs while the agent is down, and a fault that was told is not told again."""
    lease, _ = member.allocate("a", RESOURCE, 1, {"confirm": V("b", True)})
    with HoldingProcess(vendor.file("npu-0"), MEMBER) as process:
        begun = time.monotonic()
        member.release("r", lease)
        member.wait_for_device("npu-0", State=("reclaiming", "faulty"))
        for _ in range(2):
            agent.kill9()
            again(agent, vendor)
        # most of it is over at the last start: begun anew, it would be over only this much later
        time.sleep(max(0, begun + 2.5 - time.monotonic()))
        agent.kill9()
        again(agent, vendor)
        started = time.monotonic()  # whatever the start took
        member.wait_for_device("npu-0", State="faulty", Reason="reclaim-timeout")
        assert time.monotonic() - started < 2.5
        agent.wait_for_log(LATE)
        for _ in range(2):
            agent.kill9()
            again(agent, vendor)
            assert member.device("npu-0")["State"] == "faulty"
        assert list(leases(member)) == [lease]
        process.finish()
        all_free(member, agent, ["npu-0"])
    by = f"pid {process.pid} "
    assert len([one for one in entries(agent, "health") if one["HETERO_REASON"].startswith(by)]) == 1


def test_what_ended_in_between_is_free_at_once(agent: AgentProcess, vendor: Vendor, member: Client) -> None:
    """The deadline went by while the agent was down, and so did the holder: no fault to tell."""
    lease, _ = member.allocate("a", RESOURCE, 1, {"confirm": V("b", True)})
    with HoldingProcess(vendor.file("npu-0"), MEMBER) as process:
        member.release("r", lease)
        member.wait_for_device("npu-0", State="reclaiming")
        agent.kill9()
        process.finish()
    time.sleep(3.2)
    again(agent, vendor)
    all_free(member, agent, ["npu-0"])
    history = member.call(names.device_path("npu-0"), names.DEVICE, "GetHistory", "u", 20)
    assert "faulty" not in [one["to"] for one in history]
    assert LATE not in agent.log


def test_killed_again_and_again(agent: AgentProcess, vendor: Vendor, member: Client) -> None:
    """Four leases live on, four come back, over eight lives that end at odd moments."""
    ids = [f"npu-{number}" for number in range(8)]
    vendor.add(*ids[1:])
    vendor.wait_idle()
    chance = random.Random(4)
    with contextlib.ExitStack() as stack:
        processes = {}
        living = {}
        for number, device in enumerate(ids):
            process = stack.enter_context(HoldingProcess(vendor.file(device), MEMBER, later=True))
            options = {"confirm": V("b", True), "devices": V("as", [device]), "pid": V("u", process.pid)}
            lease, _ = member.allocate(f"a{number}", RESOURCE, 1, options)
            process.open()
            processes[device] = process
            if number % 2:
                living[device] = lease
            else:
                member.release(f"r{number}", lease)
        for life in range(8):
            time.sleep(chance.uniform(0, 0.4))
            agent.kill9()
            if life % 2 == 0 and life < 8:
                processes[ids[life]].finish()
            again(agent, vendor)
            nothing_twice(member)
            for device, lease in living.items():
                assert leases(member)[lease] == [device]
                assert member.device(device)["State"] == "in-use"
        wait_until(lambda: set(leases(member)) == set(living.values()), what="the four that came back")
        for device in ids[::2]:
            member.wait_for_device(device, State="idle")
        for device in living:
            processes[device].finish()
        all_free(member, agent, ids)
