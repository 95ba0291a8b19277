"""10,000 processes on the host: who holds a device is still told, in time, and nobody waits for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent import names
from tests.drills.endstate import all_free
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, OUTSIDER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V, as_user
from tests.support.crowd import Crowd, number_of_processes
from tests.support.hold import HoldingProcess
from tests.support.vendor import RESOURCE, Vendor

COUNT = 10_000
#: Seconds for what takes one scan of them (one or two), with plenty of room for a busy machine.
ONE_SCAN = 60.0


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    config = CONFIG.replace('log-level = "debug"', 'log-level = "info"')
    config = config.replace("[reclaim]\n", f"[reclaim]\ndeadline = {2 * ONE_SCAN}\n")
    one = AgentProcess(bus, config=config, watchdog=6)
    try:
        yield one.start()
    finally:
        one.close()


class Caller:
    """Asks for a device all the time; TOOK is how long each answer took, in seconds."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self.took: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            asked = time.monotonic()
            self._client.device("npu-1")
            self.took.append(time.monotonic() - asked)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def test_ten_thousand_processes(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    ids = [f"npu-{number}" for number in range(16)]
    vendor.add(*ids)
    vendor.wait_idle()
    with (
        Client(bus, MEMBER, [GROUP_GID]) as member,
        Client(bus) as other,
        Crowd(COUNT, before=as_user(OUTSIDER)),
    ):
        assert number_of_processes() > COUNT
        caller = Caller(other)
        try:
            with HoldingProcess(vendor.file("npu-0"), MEMBER, child=True, later=True) as process:
                options = {"confirm": V("b", True), "devices": V("as", ["npu-0"]), "pid": V("u", process.pid)}
                lease, _ = member.allocate("a", RESOURCE, 1, options)
                process.open()
                process.kill()
                # its child, one of them all, keeps the device
                member.wait_for_device("npu-0", ONE_SCAN, State="reclaiming", Reason="held by 1 process")
                (one,) = member.call(names.device_path("npu-0"), names.DEVICE, "GetHolders")
                assert one["pid"] == process.child
                process.kill_child()
                freed = time.monotonic()
                member.wait_for_device("npu-0", ONE_SCAN, State="idle")
                scan = time.monotonic() - freed
            with HoldingProcess(vendor.file("npu-2"), OUTSIDER):
                member.wait_for_device("npu-2", 2 * ONE_SCAN, State="occupied")
            member.wait_for_device("npu-2", 2 * ONE_SCAN, State="idle")
        finally:
            caller.stop()
        # there were more scans than that: who waited for them would have waited more often
        slow = [one for one in caller.took if one > max(1, scan / 2)]
        assert len(slow) <= 2, (slow, scan)
        assert member.wait_for_signal(names.MANAGER, "LeaseEnded").body == (lease, "owner-gone")
        # the worker keeps nothing of all it has seen
        workers = Path(f"/proc/{agent.pid}/task").glob("*/children")
        for pid in (pid for one in workers for pid in one.read_text().split()):
            status = Path(f"/proc/{pid}/status").read_text()
            anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
            assert int(anonymous.split()[1]) < 24_000
        all_free(member, agent, ids)
    signs = [at for at, text in agent.notify.messages if "WATCHDOG=1" in text]
    assert max(then - now for now, then in itertools.pairwise(signs)) < 6
