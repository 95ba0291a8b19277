"""The agent under a supervisor: ready, alive, reloading, stopping, and leases over all of it."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from hetero_agent import names
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V, busctl
from tests.support.hold import HoldingProcess
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until


def test_ready_comes_when_the_name_is_owned(bus: PrivateBus, agent: AgentProcess) -> None:
    assert busctl(bus, "status", names.BUS_NAME).returncode == 0
    with Client(bus) as root:
        manager = root.properties(names.ROOT, names.MANAGER)
    assert manager["Ready"] is True
    assert manager["Resources"] == {}
    assert len(agent.notify.lines("READY=1")) == 1


def test_status_counts(agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add("npu-0", "npu-1")
    vendor.wait_idle()
    status = wait_until(
        lambda: [line for line in agent.notify.lines("STATUS=") if "2 devices" in line],
        what="a STATUS with counts",
    )
    assert status[-1].isascii()


def test_watchdog_is_fed(bus: PrivateBus) -> None:
    agent = AgentProcess(bus, watchdog=2)
    try:
        agent.start()

        def gaps() -> list[float]:
            times = [at for at, text in list(agent.notify.messages) if "WATCHDOG=1" in text]
            return [after - before for before, after in itertools.pairwise(times)]

        # one or the other may be late on a machine that is busy with other things
        wait_until(lambda: any(max(two) < 2 for two in itertools.pairwise(gaps())), what="signs of life")
    finally:
        agent.close()


def test_stop_is_no_release(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add("npu-0", "npu-1")
    vendor.wait_idle()
    with HoldingProcess(vendor.file("npu-0"), later=True) as process, Client(bus) as root:
        first = root.reply(
            names.ROOT,
            names.MANAGER,
            "Allocate",
            "ssua{sv}",
            "r1",
            RESOURCE,
            1,
            {"confirm": V("b", True), "pid": V("u", process.pid), "devices": V("as", ["npu-0"])},
        )
        process.open()
        epoch = root.properties(names.ROOT, names.MANAGER)["Epoch"]
        assert agent.terminate() == 0, agent.log
        assert agent.notify.lines("STOPPING=1") == ["STOPPING=1"]
        assert process.running()
        agent.start()
        assert root.properties(names.ROOT, names.MANAGER)["Epoch"] != epoch
        assert root.device("npu-0")["State"] == "in-use"
        again = root.reply(
            names.ROOT,
            names.MANAGER,
            "Allocate",
            "ssua{sv}",
            "r1",
            RESOURCE,
            1,
            {"confirm": V("b", True), "pid": V("u", process.pid), "devices": V("as", ["npu-0"])},
        )
        assert again.bytes == first.bytes
        vendor.register()
        vendor.report()
        vendor.wait_idle(["npu-1"])
        process.kill()
        root.wait_for_device("npu-0", State="idle")


def test_owner_that_ends_while_the_agent_is_down(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add("npu-0")
    vendor.wait_idle()
    with HoldingProcess(vendor.file("npu-0"), later=True) as process, Client(bus) as root:
        root.allocate("r1", RESOURCE, 1, {"confirm": V("b", True), "pid": V("u", process.pid)})
        process.open()
        agent.terminate()
        process.kill()
        agent.start()
        vendor.register()
        vendor.report()
        root.wait_for_device("npu-0", State="idle")
        assert root.properties(names.ROOT, names.MANAGER)["Leases"] == 0


def test_generation_grows_over_a_restart(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add("npu-0")
    vendor.wait_idle()
    with Client(bus) as root:
        before = root.properties(names.ROOT, names.MANAGER)["Generation"]
        agent.kill9()
        agent.start()
        assert root.properties(names.ROOT, names.MANAGER)["Generation"] > before


def test_first_report_after_a_start_is_empty_and_incomplete(bus: PrivateBus, agent: AgentProcess) -> None:
    with Client(bus) as watcher:
        agent.restart()
        wait_until(lambda: len(watcher.signals(names.MANAGER, "Report")) >= 2, what="two reports")
        first, second = (one.body for one in watcher.signals(names.MANAGER, "Report")[:2])
    assert (first[3], first[4]) == (False, {})
    assert second[3] is True
    assert first[1] == second[1]
    assert first[2] <= second[2]


def test_reload_takes_a_good_config_and_keeps_the_old_for_a_bad_one(
    bus: PrivateBus, agent: AgentProcess
) -> None:
    with Client(bus) as root:
        agent.write_config(CONFIG + "\n[limits]\nleases = 17\n")
        agent.reload()
        assert root.properties(names.ROOT, names.MANAGER)["MaxLeases"] == 17
        agent.write_config("[limits]\nleases = 'many'\n")
        agent.reload()
        assert root.properties(names.ROOT, names.MANAGER)["MaxLeases"] == 17
        wait_until(lambda: "leases: expected a number" in agent.log, what="the audit of the bad configuration")
        agent.config_path.unlink()
        agent.reload()
        assert root.properties(names.ROOT, names.MANAGER)["MaxLeases"] == 17
        wait_until(lambda: "there is no such file" in agent.log, what="the audit of the missing configuration")
        with pytest.raises(CallError) as caught:
            root.allocate("r1", "example.com/none")
        assert caught.value.name == "NotFound"


def test_a_reload_that_is_asked_for_during_another_is_made(bus: PrivateBus, agent: AgentProcess) -> None:
    """What the first has read may be older than what the second was asked for."""
    fifo = agent.directory / "fifo"
    os.mkfifo(fifo)
    fifo.rename(agent.config_path)
    with Client(bus) as root:
        agent.signal(signal.SIGHUP)
        writer: list[int] = []

        def read() -> bool:
            try:
                writer.append(os.open(agent.config_path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                return False
            return True

        wait_until(read, what="the first reload")
        agent.signal(signal.SIGHUP)
        # two turns of the loop later it knows of the second
        for _ in range(2):
            assert root.properties(names.ROOT, names.MANAGER)["MaxLeases"] != 17
        new = agent.directory / "new"
        new.write_text("[limits]\nleases = 17\n")
        new.rename(agent.config_path)
        os.write(writer[0], b"[limits]\nleases = 16\n")
        os.close(writer[0])
        wait_until(
            lambda: root.properties(names.ROOT, names.MANAGER)["MaxLeases"] == 17, what="the second reload"
        )


def test_lost_bus_ends_the_agent_with_an_error(bus: PrivateBus, agent: AgentProcess) -> None:
    bus.stop()
    assert agent.wait(30) != 0


def test_second_agent_does_not_take_the_name(bus: PrivateBus, agent: AgentProcess) -> None:
    second = AgentProcess(bus)
    try:
        second.spawn()
        assert second.wait(60) != 0
        assert names.BUS_NAME in second.log
    finally:
        second.close()
    assert agent.running()


def test_bad_config_at_start_names_the_key(bus: PrivateBus) -> None:
    agent = AgentProcess(bus, config="[grant]\nconfirm-within = 31\n")
    try:
        agent.spawn()
        assert agent.wait(60) != 0
        assert "confirm-within" in agent.log
        assert "Traceback" not in agent.log
    finally:
        agent.close()


def test_a_config_that_was_named_must_be_there(bus: PrivateBus) -> None:
    agent = AgentProcess(bus)
    try:
        agent.config_path.unlink()
        agent.spawn()
        assert agent.wait(60) == 2
        assert agent.log == f"hetero-agent: {agent.config_path}: there is no such file\n"
    finally:
        agent.close()


def test_interrupt_stops_like_terminate(agent: AgentProcess) -> None:
    agent.signal(signal.SIGINT)
    assert agent.wait() == 0
    assert agent.notify.lines("STOPPING=1") == ["STOPPING=1"]
