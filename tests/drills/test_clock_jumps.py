"""The wall clock jumps by a year, there and back: no deadline moves, and no lease is taken for one of
another boot."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from hetero_agent import names
from tests.drills.endstate import all_free, leases
from tests.holders.holding import Child, as_user
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.clocks import WallClock
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

CONFIRM_WITHIN, DEADLINE, KILL_AFTER, TTL = 2.0, 2.5, 1.0, 2.0
SHORT = CONFIG.replace(
    "[reclaim]\n",
    f"[grant]\nconfirm-within = {CONFIRM_WITHIN}\n\n"
    f"[reclaim]\ndeadline = {DEADLINE}\nkill-after = {KILL_AFTER}\n",
)
YEAR = 365 * 24 * 3600
#: How much later than its deadline something may be noticed: a tick, a scan, a busy machine.  A
#: deadline that went by the wall clock would be over at once, or a year late.
LATE = 25.0


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, config=SHORT)
    clock = WallClock(one.directory)
    one.env.update(clock.env)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def clock(agent: AgentProcess) -> WallClock:
    return WallClock(agent.directory)


@pytest.fixture
def member(bus: PrivateBus, vendor: Vendor) -> Iterator[Client]:
    vendor.add("npu-0", "npu-1", "npu-2", "npu-3")
    vendor.wait_idle()
    with Client(bus, MEMBER, [GROUP_GID]) as client:
        yield client


def agents_time(client: Client) -> float:
    """The wall clock of the agent, by when npu-0 came into its state."""
    return float(client.device("npu-0")["Since"]) / 1e6


def reset(client: Client) -> None:
    """Have npu-0 change its state."""
    lease, _ = client.allocate(f"reset-{time.monotonic_ns()}", RESOURCE, 1, {"devices": V("as", ["npu-0"])})
    client.release(f"reset-{time.monotonic_ns()}", lease)
    client.wait_for_device("npu-0", State="idle")


@pytest.mark.parametrize("years", [1, -1])
def test_deadlines_keep_their_time(
    agent: AgentProcess, clock: WallClock, vendor: Vendor, member: Client, years: int
) -> None:
    one = {"confirm": V("b", True)}
    begun = time.monotonic()
    pending, _ = member.allocate("pending", RESOURCE, 1, {"devices": V("as", ["npu-0"])})
    ttl = V("t", int(TTL * 1e6))
    timed, _ = member.allocate("ttl", RESOURCE, 1, {**one, "devices": V("as", ["npu-1"]), "ttl": ttl})
    ended, _ = member.allocate(
        "kill", RESOURCE, 1, {**one, "devices": V("as", ["npu-2"]), "on-end": V("s", "kill")}
    )
    stays, _ = member.allocate("stay", RESOURCE, 1, {**one, "devices": V("as", ["npu-3"])})
    deaf = Child(vendor.file("npu-2"), "deaf", as_user(MEMBER))
    left = Child(vendor.file("npu-3"), "open", as_user(MEMBER))
    try:
        released = time.monotonic()
        member.release("r1", ended)
        member.release("r2", stays)
        clock.move(years * YEAR)
        took: dict[str, float] = {}

        def look() -> bool:
            now = time.monotonic()
            results = {one.body[0]: one.body[1] for one in member.signals(names.MANAGER, "LeaseEnded")}
            for lease in (pending, timed):
                if results.get(lease) == "expired":
                    took.setdefault(lease, now - begun)
            if deaf.process.poll() is not None:
                took.setdefault("killed", now - released)
            if member.device("npu-3")["State"] == "faulty":
                took.setdefault("faulty", now - released)
            return len(took) == 4

        wait_until(look, what="all four deadlines")
        for what, after in (
            (pending, CONFIRM_WITHIN),
            (timed, TTL),
            ("killed", KILL_AFTER),
            ("faulty", DEADLINE),
        ):
            assert after - 0.1 <= took[what] < after + LATE, (what, took)
        assert deaf.process.wait(30) == -signal.SIGKILL
        # it is the clock that is shown, and nothing else
        reset(member)
        assert abs(agents_time(member) - (time.time() + years * YEAR)) < 100
        left.end()
        all_free(member, agent, vendor.devices)
    finally:
        for child in (deaf, left):
            if child.process.poll() is None:
                child.end()


def test_jumps_without_end(agent: AgentProcess, clock: WallClock, vendor: Vendor, member: Client) -> None:
    """Back and forth while leases come and go; what is spent stays spent, generations grow."""
    kept, _ = member.allocate("kept", RESOURCE, 1, {"confirm": V("b", True), "devices": V("as", ["npu-3"])})
    generation = 0
    for number, years in enumerate((1, -1, 5, 0, -20, 2)):
        clock.move(years * YEAR)
        lease, _ = member.allocate(f"a{number}", RESOURCE, 1, {"confirm": V("b", True)})
        member.release(f"r{number}", lease)
        now = member.properties(names.ROOT, names.MANAGER)["Generation"]
        assert now > generation
        generation = now
        wait_until(lambda: list(leases(member)) == [kept], what="the end of the lease")
        for earlier in range(number + 1):
            with pytest.raises(CallError) as caught:
                member.allocate(f"a{earlier}", RESOURCE, 1, {"confirm": V("b", True)})
            assert caught.value.name == "RequestSpent"
    member.release("r", kept)
    all_free(member, agent, vendor.devices)


@pytest.mark.parametrize("years", [1, -1])
def test_a_restart_on_another_day_is_no_reboot(
    agent: AgentProcess, clock: WallClock, vendor: Vendor, member: Client, years: int
) -> None:
    lease, _ = member.allocate("a", RESOURCE, 2, {"confirm": V("b", True)})
    before = leases(member)
    generation = member.properties(names.ROOT, names.MANAGER)["Generation"]
    agent.kill9()
    clock.move(years * YEAR)
    agent.start()
    vendor.register()
    vendor.report()
    assert leases(member) == before
    assert member.properties(lease, names.LEASE)["State"] == "active"
    assert member.properties(names.ROOT, names.MANAGER)["Generation"] > generation
    assert member.release("r", lease) is True
    all_free(member, agent, vendor.devices)
