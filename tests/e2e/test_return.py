"""Taking back: a device is free again once nobody holds it, and not before."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from hetero_agent import names
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, OUTSIDER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.hold import HoldingProcess
from tests.support.timing import within
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

SHORT = CONFIG.replace("[reclaim]\n", "[reclaim]\ndeadline = 3\nkill-after = 0.5\n")


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    """An agent with a short reclaim deadline."""
    one = AgentProcess(bus, config=SHORT)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def member(bus: PrivateBus, vendor: Vendor) -> Iterator[Client]:
    """A caller in the group, on an agent with the idle device npu-0."""
    vendor.add("npu-0")
    vendor.wait_idle()
    with Client(bus, MEMBER, [GROUP_GID]) as client:
        yield client


def bound(member: Client, process: HoldingProcess, request: str = "bound", **options: object) -> str:
    """Allocate npu-0 confirmed and bound to PROCESS, which then opens it; return the lease."""
    binding = {"confirm": V("b", True), "pid": V("u", process.pid)}
    lease, _ = member.allocate(request, RESOURCE, 1, {**binding, **options})
    process.open()
    return lease


def test_kill_of_the_bound_process_returns_the_device_within_a_second(member: Client, vendor: Vendor) -> None:
    leases = []

    def attempt() -> float:
        with HoldingProcess(vendor.file("npu-0"), MEMBER, later=True) as process:
            leases.append(bound(member, process, request=f"bound-{len(leases)}"))
            member.wait_for_device("npu-0", State="in-use")
            process.kill()
            died = time.monotonic()
            member.wait_for_device("npu-0", State="idle")
            return time.monotonic() - died

    within(1, attempt)
    wait_until(lambda: len(member.signals(names.MANAGER, "LeaseEnded")) == len(leases), what="their ends")
    ended = [one.body for one in member.signals(names.MANAGER, "LeaseEnded")]
    assert ended == [(lease, "owner-gone") for lease in leases]


def test_last_of_several_handles_that_closes_returns_it_within_a_second(member: Client, vendor: Vendor) -> None:
    turns = itertools.count()

    def attempt() -> float:
        with HoldingProcess(vendor.file("npu-0"), MEMBER, child=True, later=True) as process:
            bound(member, process, request=f"bound-{next(turns)}")
            process.kill()
            member.wait_for_device("npu-0", State=("reclaiming", "faulty"))
            process.kill_child()
            freed = time.monotonic()
            member.wait_for_device("npu-0", State="idle")
            return time.monotonic() - freed

    within(1, attempt)


def test_child_that_keeps_it_keeps_it_reclaiming_then_faulty_then_idle(member: Client, vendor: Vendor) -> None:
    with HoldingProcess(vendor.file("npu-0"), MEMBER, child=True, later=True) as process:
        bound(member, process)
        process.kill()
        member.wait_for_device("npu-0", State=("reclaiming", "faulty"))
        with pytest.raises(CallError) as caught:
            member.allocate("next", RESOURCE)
        assert caught.value.name == "Unavailable"
        device = member.wait_for_device("npu-0", State="faulty")
        history = member.call(names.device_path("npu-0"), names.DEVICE, "GetHistory", "u", 20)
        assert [one["to"] for one in history][-3:] == ["in-use", "reclaiming", "faulty"]
        assert device["Reason"].startswith("reclaim-timeout")
        holders = member.call(names.device_path("npu-0"), names.DEVICE, "GetHolders")
        assert [one["pid"] for one in holders] == [process.child]
        process.kill_child()
        member.wait_for_device("npu-0", State="idle")
    member.wait_for_signal(names.MANAGER, "LeaseEnded")


def test_released_while_held_stays_reclaiming(member: Client, vendor: Vendor) -> None:
    with HoldingProcess(vendor.file("npu-0"), MEMBER, later=True) as process:
        lease, _ = member.allocate("r1", RESOURCE, 1, {"confirm": V("b", True)})
        process.open()
        assert member.release("r2", lease) is True
        member.wait_for_device("npu-0", State=("reclaiming", "faulty"))
        assert member.properties(lease, names.LEASE)["State"] == "ending"
        process.finish()
        member.wait_for_device("npu-0", State="idle")


def test_on_end_kill_ends_what_still_holds_it(member: Client, vendor: Vendor) -> None:
    with HoldingProcess(vendor.file("npu-0"), MEMBER, child=True, later=True) as process:
        bound(member, process, **{"on-end": V("s", "kill")})
        process.kill()
        member.wait_for_device("npu-0", State="idle")
        assert process.child > 0


def test_stranger_makes_it_occupied_and_leaves_it_idle(member: Client, vendor: Vendor) -> None:
    with HoldingProcess(vendor.file("npu-0"), OUTSIDER) as stranger:
        member.wait_for_device("npu-0", State="occupied")
        with pytest.raises(CallError) as caught:
            member.allocate("r1", RESOURCE)
        assert caught.value.name == "Unavailable"
        assert str(stranger.pid) not in caught.value.text
        holders = member.call(names.device_path("npu-0"), names.DEVICE, "GetHolders")
        assert [(one["pid"], one["uid"]) for one in holders] == [(stranger.pid, OUTSIDER)]
        stranger.finish()
        member.wait_for_device("npu-0", State="idle")
    member.allocate("r2", RESOURCE)


def test_intruder_on_a_leased_device_is_told(member: Client, vendor: Vendor) -> None:
    with HoldingProcess(vendor.file("npu-0"), MEMBER, later=True) as process:
        lease = bound(member, process)
        with HoldingProcess(vendor.file("npu-0"), OUTSIDER):
            told = member.wait_for_signal(names.MANAGER, "Conflict")
            assert told.body[:3] == ("intruder", lease, names.device_path("npu-0"))
            assert member.device("npu-0")["State"] == "in-use"


def test_unconfirmed_lease_expires_and_the_device_is_granted_again(member: Client) -> None:
    lease, manifest = member.allocate("r1", RESOURCE, options={"confirm-within": V("u", 1)})
    assert manifest["confirm-by-boottime"] <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000 + 1_000_000
    assert member.wait_for_signal(names.MANAGER, "LeaseEnded").body == (lease, "expired")
    member.wait_for_device("npu-0", State="idle")
    again, _ = member.allocate("r2", RESOURCE)
    assert again != lease
    with pytest.raises(CallError) as caught:
        member.confirm("r3", lease)
    assert caught.value.name == "LeaseEnded"


def test_connection_binding_ends_with_the_connection(bus: PrivateBus, member: Client) -> None:
    other = Client(bus, MEMBER, [GROUP_GID])
    other.allocate("r1", RESOURCE, 1, {"confirm": V("b", True), "connection": V("b", True)})
    member.wait_for_device("npu-0", State="in-use")
    other.kill()
    other.close()
    member.wait_for_device("npu-0", State="idle")
    assert member.wait_for_signal(names.MANAGER, "LeaseEnded").body[1] == "owner-gone"


def test_ttl_ends_unless_confirmed_again(member: Client) -> None:
    lease, _ = member.allocate("r1", RESOURCE, 1, {"confirm": V("b", True), "ttl": V("t", 4_000_000)})
    first = member.properties(lease, names.LEASE)["DeadlineBoottime"]
    member.confirm("r2", lease, {"ttl": V("t", 5_000_000)})
    second = member.properties(lease, names.LEASE)["DeadlineBoottime"]
    assert second > first
    assert member.wait_for_signal(names.MANAGER, "LeaseEnded").body == (lease, "expired")
    assert time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000 >= second


@pytest.mark.parametrize("whose", ["root", "another member"])
def test_foreign_process_cannot_be_bound(member: Client, vendor: Vendor, whose: str) -> None:
    with HoldingProcess("/dev/null", 0 if whose == "root" else OUTSIDER) as process:
        with pytest.raises(CallError) as caught:
            bound(member, process)
        assert caught.value.name == "NotAuthorized"
        assert process.running()
    assert member.device("npu-0")["State"] == "idle"


def test_fault_while_idle_and_recovery(member: Client, vendor: Vendor) -> None:
    vendor.health("npu-0", "unhealthy", "double bit error")
    device = member.wait_for_device("npu-0", State="faulty")
    assert device["Reason"] == "double bit error"
    vendor.health("npu-0", "healthy")
    member.wait_for_device("npu-0", State="idle", Health="healthy")


def test_fault_in_use_is_told_and_marked(member: Client, vendor: Vendor) -> None:
    lease, _ = member.allocate("r1", RESOURCE, 1, {"confirm": V("b", True)})
    vendor.health("npu-0", "unhealthy", "fell off the bus")
    told = member.wait_for_signal(names.MANAGER, "HealthEvent")
    assert told.body[:4] == (names.device_path("npu-0"), "unhealthy", "fell off the bus", lease)
    assert member.device("npu-0")["State"] == "in-use"


def test_unplugged_while_leased_is_lost_and_kept(member: Client, vendor: Vendor) -> None:
    lease, _ = member.allocate("r1", RESOURCE, 1, {"confirm": V("b", True)})
    vendor.remove("npu-0")
    member.wait_for_device("npu-0", State="lost")
    assert member.properties(lease, names.LEASE)["Lost"] == [names.device_path("npu-0")]
    assert member.release("r2", lease) is True
    wait_until(lambda: "npu-0" not in member.devices(), what="the end of the lost device")


def test_cordon_drains_and_uncordon_gives_back(bus: PrivateBus, member: Client) -> None:
    path = names.device_path("npu-0")
    lease, _ = member.allocate("r1", RESOURCE, 1, {"confirm": V("b", True)})
    with Client(bus) as root:
        root.call(path, names.DEVICE, "Cordon", "ss", "c1", "for repair")
        assert (member.device("npu-0")["State"], member.device("npu-0")["Cordoned"]) == ("in-use", True)
        member.release("r2", lease)
        member.wait_for_device("npu-0", State="offline", Reason="cordoned")
        root.call(path, names.DEVICE, "Uncordon", "s", "c2")
        member.wait_for_device("npu-0", State="idle", Cordoned=False)


def test_reap_ends_a_named_stranger_and_nobody_else(bus: PrivateBus, member: Client, vendor: Vendor) -> None:
    with HoldingProcess(vendor.file("npu-0"), OUTSIDER) as stranger:
        member.wait_for_device("npu-0", State="occupied")
        path = names.device_path("npu-0")
        with pytest.raises(CallError) as caught:
            member.manager("Reap", "soa(ut)", "x", path, [(stranger.pid, stranger.start)])
        assert caught.value.name == "NotAuthorized"
        with Client(bus) as root:
            with pytest.raises(CallError) as caught:
                root.manager("Reap", "soa(ut)", "k1", path, [(stranger.pid, stranger.start + 1)])
            assert caught.value.name == "NotFound"
            assert stranger.running()
            assert root.manager("Reap", "soa(ut)", "k2", path, [(stranger.pid, stranger.start)]) == 1
        wait_until(lambda: not stranger.running(), what="the end of the stranger")
        member.wait_for_device("npu-0", State="idle")


def test_confirm_retried_after_its_process_ended_gets_its_answer(agent: AgentProcess, vendor: Vendor) -> None:
    """The lease lives on by a later binding; the first call's answer is still its answer."""
    vendor.add("npu-0")
    vendor.wait_idle()
    client = Client(agent.bus)
    first, second = (HoldingProcess(vendor.file("npu-0"), later=True) for _ in range(2))
    try:
        lease = client.reply(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", "a", RESOURCE, 1, {}).value[0]

        def confirm(request: str, process: HoldingProcess) -> bytes | object:
            binding = {"pid": V("u", process.pid)}
            return client.reply(names.ROOT, names.MANAGER, "Confirm", "soa{sv}", request, lease, binding).value

        answer = confirm("c1", first)
        confirm("c2", second)
        first.close()
        assert confirm("c1", first) == answer
        assert client.device("npu-0")["State"] == "in-use"
    finally:
        first.close()
        second.close()
        client.close()
