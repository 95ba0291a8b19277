"""The agent is killed at every step of a grant, a release and a return, and started again.

What was answered is known, what was not is rolled back or answered alike on a retry, and devices agree
with what processes hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetero_agent import faultpoints, names
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, Reply, V
from tests.support.hold import HoldingProcess
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

#: What a caller gets for a call that the agent died over.
GONE = {"org.freedesktop.DBus.Error.NoReply", "org.freedesktop.DBus.Error.ServiceUnknown"}


def config(confirm_within: float) -> str:
    return CONFIG.replace("[reclaim]\n", f"[grant]\nconfirm-within = {confirm_within}\n\n[reclaim]\n")


class Crash:
    """An agent that dies at a point, its provider, a caller, and the process of its lease, which
    opens npu-0 once it has it."""

    def __init__(self, bus: PrivateBus, point: str, confirm_within: float = 30) -> None:
        self.agent = AgentProcess(bus, config=config(confirm_within))
        self.agent.start(env={"HETERO_FAULT_POINT": point})
        self.vendor = Vendor(self.agent)
        self.client = Client(bus)
        self.vendor.add("npu-0")
        self.vendor.wait_idle()
        self.process = HoldingProcess(self.vendor.file("npu-0"), later=True)
        self.answers: dict[str, Reply] = {}
        self.lease = ""

    def close(self) -> None:
        self.process.close()
        self.client.close()
        self.vendor.close()
        self.agent.close()

    def allocate(self) -> Reply:
        reply = self.client.reply(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", "a", RESOURCE, 1, {})
        self.lease = reply.value[0]
        return reply

    def confirm(self) -> Reply:
        binding = {"pid": V("u", self.process.pid)}
        return self.client.reply(names.ROOT, names.MANAGER, "Confirm", "soa{sv}", "c", self.lease, binding)

    def release(self) -> Reply:
        return self.client.reply(names.ROOT, names.MANAGER, "Release", "so", "r", self.lease)

    def tell(self, *steps: Callable[[], Any]) -> None:
        """Take the steps until the agent dies; keep what was answered."""
        for step in steps:
            try:
                answer = step()
            except CallError as error:
                if error.name not in GONE:
                    raise
                break
            if isinstance(answer, Reply):
                self.answers[step.__name__] = answer
        wait_until(lambda: not self.agent.running(), what="the end at the fault point")
        assert self.agent.wait() == -9

    def restart(self) -> None:
        """Start the agent again without a fault; its provider reports again."""
        self.agent.start()
        self.vendor.register()
        self.vendor.report()

    @property
    def leases(self) -> list[str]:
        objects = self.client.call(names.ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
        return [path for path, interfaces in objects.items() if names.LEASE in interfaces]

    @property
    def state(self) -> str:
        return str(self.client.device("npu-0")["State"])

    def wait_over(self) -> None:
        """The device is idle, the lease gone, its ids spent, and the history without a gap or repeat."""
        self.client.wait_for_device("npu-0", State="idle")
        wait_until(lambda: not self.leases, what="the end of the lease")
        with pytest.raises(CallError) as caught:
            self.allocate()
        assert caught.value.name == "RequestSpent"
        path = names.device_path("npu-0")
        history = self.client.call(path, names.DEVICE, "GetHistory", "u", 20)
        sequence = [one["sequence"] for one in history]
        assert sequence == sorted(set(sequence))
        steps = [(one["from"], one["to"]) for one in history]
        assert steps[-1][1] == "idle"  # from reclaiming, or from probing after the restart


@pytest.fixture
def crash(bus: PrivateBus) -> Iterator[Callable[..., Crash]]:
    made: list[Crash] = []

    def make(point: str, confirm_within: float = 30) -> Crash:
        made.append(Crash(bus, point, confirm_within))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_every_step_has_its_test() -> None:
    assert set(faultpoints.STEPS) == {
        "allocate",
        "granted",
        "confirm",
        "attached",  # test_network.py
        "release",
        "owner-gone",
        "expired",
        "return",
    }


@pytest.mark.parametrize("stage", faultpoints.STAGES)
def test_killed_while_preparing_a_grant(crash: Callable[..., Crash], stage: str) -> None:
    one = crash(f"allocate:{stage}")
    one.tell(one.allocate)
    assert one.answers == {}
    one.restart()
    assert one.leases == []
    one.client.wait_for_device("npu-0", State="idle")
    first = one.allocate()
    assert one.allocate().bytes == first.bytes
    assert one.leases == [one.lease]
    one.release()
    one.wait_over()


@pytest.mark.parametrize("stage", faultpoints.STAGES)
def test_killed_while_completing_a_grant(crash: Callable[..., Crash], stage: str) -> None:
    one = crash(f"granted:{stage}")
    one.tell(one.allocate)
    one.restart()
    if stage == "decided":
        assert one.leases == []
        one.client.wait_for_device("npu-0", State="idle")
    else:
        (kept,) = one.leases
        assert one.state == "allocating"
        assert one.allocate().value[0] == kept
    first = one.allocate()
    assert one.allocate().bytes == first.bytes
    assert one.leases == [one.lease]
    one.release()
    one.wait_over()


@pytest.mark.parametrize("stage", faultpoints.STAGES)
def test_killed_while_confirming(crash: Callable[..., Crash], stage: str) -> None:
    one = crash(f"confirm:{stage}")
    one.tell(one.allocate, one.confirm)
    one.restart()
    assert one.state == ("allocating" if stage == "decided" else "in-use")
    assert one.allocate().bytes == one.answers["allocate"].bytes
    one.confirm()
    assert one.state == "in-use"
    one.process.kill()  # bound to it, so that is the end
    one.wait_over()


@pytest.mark.parametrize("stage", faultpoints.STAGES)
def test_killed_while_releasing(crash: Callable[..., Crash], stage: str) -> None:
    one = crash(f"release:{stage}")
    one.tell(one.allocate, one.confirm, one.process.open, one.release)
    one.restart()
    assert one.state == ("in-use" if stage == "decided" else "reclaiming")
    assert one.release().value == (True,)
    one.client.wait_for_device("npu-0", State="reclaiming")
    one.process.finish()
    one.wait_over()


@pytest.mark.parametrize("stage", faultpoints.STAGES)
def test_killed_when_the_owner_ends(crash: Callable[..., Crash], stage: str) -> None:
    one = crash(f"owner-gone:{stage}")
    one.tell(one.allocate, one.confirm, one.process.open, one.process.kill)
    one.restart()
    one.wait_over()


@pytest.mark.parametrize("stage", faultpoints.STAGES)
def test_killed_at_expiry(crash: Callable[..., Crash], stage: str) -> None:
    one = crash(f"expired:{stage}", confirm_within=0.5)
    one.tell(one.allocate, one.process.open)
    one.restart()
    one.client.wait_for_device("npu-0", State="reclaiming")
    one.process.finish()
    one.wait_over()


@pytest.mark.parametrize("stage", faultpoints.STAGES)
def test_killed_at_the_proof_of_return(crash: Callable[..., Crash], stage: str) -> None:
    one = crash(f"return:{stage}")
    one.tell(one.allocate, one.confirm, one.process.open, one.release, one.process.finish)
    one.restart()
    one.wait_over()


def test_grant_whose_caller_never_comes_back_ends_at_its_deadline(crash: Callable[..., Crash]) -> None:
    # so long that the next life begins before it
    one = crash("granted:stored", confirm_within=5)
    one.tell(one.allocate)
    one.restart()
    assert len(one.leases) == 1
    ended = one.client.wait_for_signal(names.MANAGER, "LeaseEnded")
    assert ended.body[1] == "expired"
    one.wait_over()


def test_killed_anywhere_in_between_keeps_what_was_answered(bus: PrivateBus) -> None:
    """No point at all: SIGKILL while calls are under way, again and again."""
    agent = AgentProcess(bus, config=CONFIG)
    try:
        agent.start()
        with Vendor(agent) as vendor, Client(bus) as client:
            ids = [f"npu-{number}" for number in range(8)]
            vendor.add(*ids)
            vendor.wait_idle()
            answered: dict[str, Reply] = {}
            confirmed = {"confirm": V("b", True)}  # no deadline goes by over all these lives
            for life in range(4):
                numbers = {
                    f"{life}-{n}": client.send(
                        names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", f"{life}-{n}", RESOURCE, 1, confirmed
                    )
                    for n in range(4)
                }
                # die when one of them has its answer: others are then on their way
                first = next(iter(numbers))
                try:
                    answered[first] = client.receive(numbers.pop(first))
                except CallError as error:
                    if error.name != "Unavailable":
                        raise
                agent.kill9()
                for request, number in numbers.items():
                    try:
                        answered[request] = client.receive(number)
                    except CallError as error:
                        if error.name not in {*GONE, "Unavailable"}:
                            raise
                agent.start()
                vendor.register()
                vendor.report()
            for request, reply in answered.items():
                again = client.reply(
                    names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", request, RESOURCE, 1, confirmed
                )
                assert again.bytes == reply.bytes
            devices = [reply.value[1]["devices"][0] for reply in answered.values()]
            assert len(devices) == len(set(devices)) <= 8
    finally:
        agent.close()
