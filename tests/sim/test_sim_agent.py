"""The simulator as a provider of the real agent."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hetero_agent import names
from tests.support.agent import GROUP_GID, OUTSIDER, AgentProcess, SimProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.hold import HoldingProcess
from tests.support.sim import ask, tell
from tests.support.wait import wait_until

NPU = "example.com/npu"


def config(**more: str) -> str:
    """A configuration in which the simulator may report any resource, unless MORE says otherwise."""
    lines = [f"{key} = {value}" for key, value in more.items()]
    return "\n".join(
        [
            '[agent]\ngroup = "games"',
            "[reclaim]\noccupied-after = 0.3",
            '[providers.sim]\ndirectory = "{directory}/sim"',
            *lines,
            "",
        ]
    )


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, config())
    try:
        yield one.start()
    finally:
        one.close()


def test_devices_come_fail_recover_and_go(agent: AgentProcess, sim: SimProcess) -> None:
    with Client(agent.bus) as root:
        reply = tell(
            sim.socket, "add", id="npu", resource=NPU, count=2, model="N1", memory=1 << 34, numa=1, serial="S"
        )
        assert reply == {"ok": True, "devices": ["npu-0", "npu-1"], "reported": True}
        found = root.wait_for_device("npu-1", State="idle", Health="healthy")
        assert found["Resource"] == NPU
        assert found["Source"] == "sim"
        assert (found["Vendor"], found["Model"], found["Driver"]) == ("Virtual", "N1", "sim")
        assert found["NumaNodes"] == [1]
        assert found["Aliases"] == ["S-1"]
        assert found["Attributes"]["memory-total"] == 1 << 34
        path = names.device_path("npu-1")
        nodes = root.call(path, names.DEVICE, "GetNodes")
        assert [tuple(node) for node in nodes] == [(str(agent.sim_directory / "npu-1"), "own", "file", 0, 0)]
        assert tell(sim.socket, "fail", id="npu-1", reason="overheated")["reported"] is True
        assert root.wait_for_device("npu-1", State="faulty")["Reason"] == "overheated"
        tell(sim.socket, "recover", id="npu-1")
        root.wait_for_device("npu-1", State="idle", Health="healthy")
        tell(sim.socket, "remove", id="npu-1")
        wait_until(lambda: sorted(root.devices()) == ["npu-0"], what="the end of npu-1")
        assert tell(sim.socket, "list")["reported"] is True


def test_parts_have_parents(agent: AgentProcess, sim: SimProcess) -> None:
    with Client(agent.bus) as root:
        tell(sim.socket, "add", id="card", resource=NPU)
        tell(sim.socket, "add", id="part", resource=NPU + ".part", count=2, parent="card")
        root.wait_for_device("part-0", State="idle", Parent="card")
        root.wait_for_device("card", State="idle")
        root.allocate("r", NPU + ".part", 1, {"confirm": V("b", True)})
        wait_until(lambda: root.device("card")["BlockedBy"], what="the card blocked by its part")


def test_a_lease_of_virtual_devices(agent: AgentProcess, sim: SimProcess) -> None:
    with Client(agent.bus) as root, Client(agent.bus, uid=OUTSIDER, groups=[GROUP_GID]) as user:
        tell(sim.socket, "add", id="npu", resource=NPU)
        root.wait_for_device("npu", State="idle")
        lease, manifest = user.allocate("r", NPU, 1, {"confirm": V("b", True)})
        path = str(agent.sim_directory / "npu")
        assert [tuple(node) for node in manifest["nodes"]] == [("npu", path, "own", "file", 0, 0)]
        with HoldingProcess(path) as holder:
            user.release("r2", lease)
            root.wait_for_device("npu", State="reclaiming")
            holder.kill()
        root.wait_for_device("npu", State="idle")


def test_a_stranger_is_seen_by_the_inode(agent: AgentProcess, sim: SimProcess) -> None:
    with Client(agent.bus) as root:
        tell(sim.socket, "add", id="npu", resource=NPU)
        root.wait_for_device("npu", State="idle")
        with HoldingProcess(agent.sim_directory / "npu"):
            root.wait_for_device("npu", State="occupied")
        root.wait_for_device("npu", State="idle")


def test_what_the_agent_refuses_is_taken_back(bus: PrivateBus) -> None:
    agent = AgentProcess(bus, config(resources=f'["{NPU}"]'))
    sim = SimProcess(agent)
    try:
        agent.start()
        sim.start()
        tell(sim.socket, "add", id="good", resource=NPU)
        reply = ask(sim.socket, "add", id="bad", resource="example.com/gpu")
        assert reply["ok"] is False
        assert (
            "the agent refuses the device: device bad: resource example.com/gpu is not one of" in reply["error"]
        )
        assert [one["id"] for one in tell(sim.socket, "list")["devices"]] == ["good"]
        assert not (agent.sim_directory / "bad").exists()
        assert tell(sim.socket, "add", id="better", resource=NPU)["reported"] is True
        with Client(bus) as root:
            assert sorted(root.devices()) == ["better", "good"]
    finally:
        sim.close()
        agent.close()


def test_a_hang_reports_nothing_until_it_ends(agent: AgentProcess, sim: SimProcess) -> None:
    with Client(agent.bus) as root:
        tell(sim.socket, "add", id="npu", resource=NPU, count=2)
        root.wait_for_device("npu-1", State="idle")
        tell(sim.socket, "hang", id="npu-0")
        tell(sim.socket, "fail", id="npu-0")
        # the other one goes on, and its news prove that the first one's were held back
        tell(sim.socket, "fail", id="npu-1")
        root.wait_for_device("npu-1", State="faulty")
        assert root.device("npu-0")["State"] == "idle"
        tell(sim.socket, "recover", id="npu-1")
        root.wait_for_device("npu-1", State="idle")
        # the whole provider, for a while
        beginning = time.monotonic()
        tell(sim.socket, "hang", seconds=2)
        tell(sim.socket, "fail", id="npu-1")
        root.wait_for_device("npu-1", State="faulty")
        assert time.monotonic() - beginning >= 2
        # and until it is told to go on
        tell(sim.socket, "hang")
        assert tell(sim.socket, "remove", id="npu-1")["reported"] is False
        assert "npu-1" in root.devices()
        assert tell(sim.socket, "recover")["reported"] is True
        assert "npu-1" not in root.devices()


def test_it_registers_again_with_a_new_agent(agent: AgentProcess, sim: SimProcess) -> None:
    tell(sim.socket, "add", id="npu", resource=NPU)
    agent.restart()
    with Client(agent.bus) as root:
        root.wait_for_device("npu", State="idle")
        wait_until(lambda: tell(sim.socket, "list")["reported"], what="the list at the new agent")
    agent.kill9()
    agent.start()
    with Client(agent.bus) as root:
        root.wait_for_device("npu", State="idle")
        assert tell(sim.socket, "add", id="more", resource=NPU)["reported"] is True


def test_it_registers_again_on_a_new_bus(agent: AgentProcess, sim: SimProcess) -> None:
    tell(sim.socket, "add", id="npu", resource=NPU)
    agent.bus.restart()
    agent.wait()
    agent.start()
    with Client(agent.bus) as root:
        root.wait_for_device("npu", State="idle")


def test_grace_and_return(bus: PrivateBus) -> None:
    agent = AgentProcess(bus, config(grace="0.3"))
    sim = SimProcess(agent, f'[[device]]\nid = "npu"\nresource = "{NPU}"\n')
    try:
        agent.start()
        sim.start()
        with Client(bus) as root:
            root.wait_for_device("npu", State="idle")
            inode = (agent.sim_directory / "npu").stat().st_ino
            sim.kill9()
            root.wait_for_device("npu", State="faulty", Reason="provider-gone")
            sim.spawn()
            root.wait_for_device("npu", State="idle", Health="healthy")
            assert (agent.sim_directory / "npu").stat().st_ino == inode
    finally:
        sim.close()
        agent.close()


def test_four_thousand_devices_in_pages(agent: AgentProcess, sim: SimProcess) -> None:
    with Client(agent.bus, listen=False) as root:
        # on a busy machine the answer does not wait for the last page
        tell(sim.socket, "add", id="npu", resource=NPU, count=4096)
        wait_until(lambda: tell(sim.socket, "list")["reported"] is True, 60, "4096 reported devices")
        wait_until(
            lambda: root.properties(names.ROOT, names.MANAGER)["Resources"].get(NPU, {}).get("idle") == 4096,
            60,
            "4096 idle devices",
        )


def test_a_session_that_the_agent_has_forgotten_is_begun_anew(agent: AgentProcess, sim: SimProcess) -> None:
    with Client(agent.bus) as root:
        tell(sim.socket, "add", id="npu-0", resource=NPU)
        root.wait_for_device("npu-0", State="idle")
        agent.write_config('[agent]\ngroup = "games"\n')
        agent.reload()
        wait_until(lambda: "npu-0" not in root.devices(), what="the end of a provider without a table")
        agent.write_config(config())
        agent.reload()
        root.wait_for_device("npu-0", State="idle")
