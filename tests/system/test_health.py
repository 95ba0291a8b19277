"""Sick devices as the operators of a host hear of them: journal, alerts, and what systemd makes of those."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hetero_agent import names
from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.support.process import ROOT
from tests.system.accelerators import RESOURCE, Accelerator, Accelerators
from tests.system.agent import UNIT, Agent, Refused
from tests.system.conftest import CONFIG
from tests.system.machine import Machine

_ALERTS = "/run/hetero-agent/alerts"
_EXAMPLE = ("hetero-agent-alert.path", "hetero-agent-alert.service")

#: Rounds that a test can wait for.
_CONFIG = CONFIG + "[health]\ninterval = 1\nconfirm = 0.3\n"


@pytest.fixture
def one(machine: Machine, agent: Agent, hardware: Accelerators) -> Accelerator:
    """An idle accelerator with a configuration space, of an agent that looks often."""
    machine.write("/etc/hetero-agent/hetero-agent.conf", _CONFIG)
    agent.systemctl("reload", UNIT)
    found, other = hardware.plug(2)
    _config(machine, found, well=True)
    agent.wait_states({found.id: "idle", other.id: "idle"})
    return found


@pytest.fixture
def example(machine: Machine) -> Iterator[str]:
    """The units of the documentation, enabled as it says."""
    for name in _EXAMPLE:
        machine.write(f"/etc/systemd/system/{name}", (ROOT / "examples" / name).read_text())
    machine.shell(f"systemctl daemon-reload; systemctl enable --now {_EXAMPLE[0]}")
    yield _EXAMPLE[1]
    machine.shell(f"systemctl disable --now {_EXAMPLE[0]}; rm /etc/systemd/system/hetero-agent-alert.*")
    machine.run("systemctl", "daemon-reload")


def _config(machine: Machine, device: Accelerator, *, well: bool) -> None:
    """Have the device's configuration space read as of a card that answers, or of one off the bus."""
    path = machine.path(f"/sys{device.directory}/config")
    path.write_bytes(b"\x52\x1e\x01\x00" if well else b"\xff\xff\xff\xff")


def test_a_sick_device_is_told_everywhere(
    machine: Machine, agent: Agent, one: Accelerator, example: str
) -> None:
    (other,) = set(agent.devices()) - {one.id}
    alert = machine.path(f"{_ALERTS}/{one.id}.json")
    assert not alert.exists()
    _config(machine, one, well=False)
    agent.wait_states({one.id: "faulty", other: "idle"}, 30)
    device = agent.devices()[one.id]
    why = "off the bus: its config space reads 0xffff"
    assert (device["Health"], device["Reason"]) == ("unhealthy", why)
    # out of the count, and given to nobody, while the other one is
    assert agent.manager()["Resources"][RESOURCE]["allocatable"] == 1
    with pytest.raises(Refused, match="1 faulty"):
        agent.allocate(RESOURCE, 2)
    agent.release(agent.allocate(RESOURCE))
    # the journal has an alert with what there is to do
    said = agent.audit(f"MESSAGE_ID={MESSAGE_IDS[AuditKind.HEALTH]}", f"HETERO_DEVICE={one.id}")[-1]
    assert (said["PRIORITY"], said["MESSAGE"]) == ("3", f"{one.id} is unhealthy (was suspect): {why}")
    shown = machine.run(
        "journalctl", "--catalog", "--priority=err", "--identifier=hetero-agent", f"HETERO_DEVICE={one.id}"
    ).stdout
    assert "Subject: " in shown
    assert "Defined-By: hetero-agent" in shown
    machine.wait(lambda: "1 faulty" in agent.unit("StatusText"), 30, "the fault in the status line")
    listed = {row["id"]: row for row in agent.heteroctl("list")["devices"]}
    assert (listed[one.id]["state"], listed[one.id]["health"]) == ("faulty", "unhealthy")
    # and a file, whose coming and going systemd acts upon
    machine.wait(alert.exists, 30, "the alert")
    assert json.loads(alert.read_text())["health-reason"] == why
    told = ("journalctl", "--output=cat", f"--unit={example}")
    machine.wait(lambda: why in machine.run(*told).stdout, 30, "the operators' unit")
    _config(machine, one, well=True)
    agent.wait_states({one.id: "idle", other: "idle"}, 30)
    machine.wait(lambda: not alert.exists(), 30, "the end of the alert")
    history = agent.call(names.device_path(one.id), names.DEVICE, "GetHistory", "u", "20")
    assert [row["trigger"]["data"] for row in history][-2:] == ["unhealthy", "healthy"]


def test_a_lost_device_is_an_alert_until_its_lease_ends(
    machine: Machine, agent: Agent, hardware: Accelerators, one: Accelerator
) -> None:
    lease = agent.allocate(RESOURCE, devices=[one.id])
    hardware.unplug(one)
    machine.wait(lambda: agent.states().get(one.id) == "lost", 30, "the loss")
    file = machine.path(f"{_ALERTS}/{one.id}.json")
    machine.wait(file.exists, 30, "the alert")
    alert = json.loads(file.read_text())
    assert (alert["state"], alert["lease"]) == ("lost", lease.rpartition("/l")[2])
    assert agent.release(lease) is True
    machine.wait(lambda: not file.exists(), 30, "the end of the alert")
