"""No file descriptor is left to the agent: it stays, answers, says so, and all is well afterwards."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_agent import names
from tests.drills.endstate import all_free, leases, nothing_twice
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, OTHER_MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.hold import HoldingProcess
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, config=CONFIG, watchdog=6)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def member(bus: PrivateBus, vendor: Vendor) -> Iterator[Client]:
    vendor.add(*(f"npu-{number}" for number in range(6)))
    vendor.wait_idle()
    with Client(bus, MEMBER, [GROUP_GID]) as client:
        yield client


def exhaust(agent: AgentProcess) -> None:
    """Leave not one number: all below the limit are in use."""
    used = {int(one.name) for one in Path(f"/proc/{agent.pid}/fd").iterdir()}
    hard = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)[1]
    lowest_free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (lowest_free, hard))


def relieve(agent: AgentProcess) -> None:
    hard = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (hard, hard))


def attempt(client: Client, request: str, **options: Any) -> tuple[str, CallError]:
    """Allocate a device, confirmed; return the lease, or "" and the error."""
    given = {"confirm": V("b", True), **options}
    try:
        return client.allocate(request, RESOURCE, 1, given)[0], CallError("none", "")
    except CallError as error:
        return "", error


def workers(agent: AgentProcess) -> list[int]:
    return [
        int(pid)
        for one in Path(f"/proc/{agent.pid}/task").glob("*/children")
        for pid in one.read_text().split()
    ]


def test_no_descriptor_is_left(bus: PrivateBus, agent: AgentProcess, vendor: Vendor, member: Client) -> None:
    with (
        HoldingProcess(vendor.file("npu-0"), MEMBER, later=True) as owner,
        HoldingProcess(vendor.file("npu-1"), MEMBER, later=True) as late,
    ):
        bound = {"confirm": V("b", True), "devices": V("as", ["npu-0"]), "pid": V("u", owner.pid)}
        kept, _ = member.allocate("kept", RESOURCE, 1, bound)
        owner.open()
        member.wait_for_device("npu-0", State="in-use")
        exhaust(agent)
        began = time.monotonic()
        # callers, known and new, are answered, and in time
        with Client(bus, OTHER_MEMBER, [GROUP_GID]) as stranger:
            for client in (member, stranger):
                asked = time.monotonic()
                assert client.device("npu-0")["State"] == "in-use"
                assert time.monotonic() - asked < 15
        # a grant works or is refused; what says yes is a lease
        given = []
        for number in range(3):
            lease, why = attempt(member, f"a{number}")
            given += [lease] if lease else []
            assert lease or why.name in ("Unavailable", "StoreFailed"), why
        # a process that can't be looked at is not said to be none
        lease, why = attempt(member, "bound", pid=V("u", late.pid))
        given += [lease] if lease else []
        assert lease or (why.name, "open files" in why.text) == ("Unavailable", True), why
        # the scan worker dies, and no other can be started: nothing is proven meanwhile
        for pid in workers(agent):
            os.kill(pid, 9)
        if given:
            assert member.release("r0", given[0]) is True
            (device,) = leases(member)[given[0]]
            member.wait_for_device(device, State="reclaiming")
        wait_until(
            lambda: any("who holds devices can't be told" in line for line in agent.notify.lines("STATUS=")),
            what="a STATUS that says so",
        )
        time.sleep(max(0, 3 - (time.monotonic() - began)))
        assert agent.running()
        nothing_twice(member)
        assert kept in leases(member)
        relieve(agent)
        # and on as if nothing had been
        for number, lease in enumerate(given[1:], 1):
            assert member.release(f"r{number}", lease) is True
        wait_until(lambda: set(leases(member)) == {kept}, what="the end of the others")
        lease, _ = member.allocate("again", RESOURCE, 1, {"confirm": V("b", True), "pid": V("u", late.pid)})
        late.finish()
        wait_until(lambda: set(leases(member)) == {kept}, what="the end of the bound one")
        owner.finish()
        all_free(member, agent, vendor.devices)
    signs = [at for at, text in agent.notify.messages if "WATCHDOG=1" in text]
    assert all(then - now < 6 for now, then in itertools.pairwise(signs))
    assert member.properties(names.ROOT, names.MANAGER)["Ready"] is True
