"""The plugin in docs/providers.md, its lines as they stand, against the real agent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.agent import CONFIG, GROUP_GID, OUTSIDER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.process import PYTHON, ROOT, Program
from tests.support.wait import wait_until

DOCUMENT = ROOT / "docs" / "providers.md"

NPU = """
[providers.npu]
uid = 0
resources = ["example.com/npu"]
directory = "{directory}/npu"
grace = 0.2
"""


def plugin_lines() -> list[str]:
    """The first Python block of the document."""
    return DOCUMENT.read_text().partition("```python\n")[2].partition("```")[0].splitlines()


class Plugin(Program):
    """The document's lines as a process."""

    title = "plugin"

    def __init__(self, agent: AgentProcess) -> None:
        super().__init__()
        self.files = agent.directory / "npu"
        self.files.mkdir(exist_ok=True)
        self.script = self.directory / "plugin.py"
        self.script.write_text("\n".join(plugin_lines()) + "\n")
        self.bus = agent.bus

    def start(self) -> Plugin:
        self.launch(
            [PYTHON, str(self.script)],
            env={
                "NPU_DIRECTORY": str(self.files),
                "DBUS_SYSTEM_BUS_ADDRESS": self.bus.address,
                "PYTHONPATH": str(ROOT),
            },
        )
        return self

    def add(self, name: str) -> None:
        path = self.files / name
        path.touch()
        path.chmod(0o666)


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, CONFIG + NPU)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def plugin(agent: AgentProcess) -> Iterator[Plugin]:
    one = Plugin(agent)
    try:
        yield one.start()
    finally:
        one.close()


def test_it_is_thirty_lines() -> None:
    lines = plugin_lines()
    assert lines[0] == "import asyncio"
    assert len([line for line in lines if line.strip()]) <= 30


def test_its_devices_come_are_granted_fall_ill_and_go(agent: AgentProcess, plugin: Plugin) -> None:
    plugin.add("npu0")
    plugin.add("npu1")
    with Client(agent.bus) as root, Client(agent.bus, uid=OUTSIDER, groups=[GROUP_GID]) as user:
        for name in ("npu0", "npu1"):
            found = root.wait_for_device(name, State="idle", Health="healthy")
            assert found["Resource"] == "example.com/npu"
            assert found["Source"] == "npu"
        path, manifest = user.allocate("r1", "example.com/npu", 2, {"confirm": V("b", True)})
        assert manifest["env"]["HETERO_DEVICES"] in ("npu0,npu1", "npu1,npu0")
        user.release("r2", path)
        root.wait_for_device("npu0", State="idle")
        (plugin.files / "npu1.bad").touch()
        root.wait_for_device("npu1", State="faulty")
        (plugin.files / "npu1.bad").unlink()
        root.wait_for_device("npu1", State="idle")
        (plugin.files / "npu0").unlink()
        wait_until(lambda: "npu0" not in root.devices(), what="the end of npu0")
        plugin.terminate()
        root.wait_for_device("npu1", State="faulty", Reason="provider-gone")
        plugin.start()
        root.wait_for_device("npu1", State="idle")


def test_it_finds_a_restarted_agent(agent: AgentProcess, plugin: Plugin) -> None:
    plugin.add("npu0")
    with Client(agent.bus) as root:
        root.wait_for_device("npu0", State="idle")
    agent.restart()
    with Client(agent.bus) as root:
        root.wait_for_device("npu0", State="idle")
    assert plugin.running()
