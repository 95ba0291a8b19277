"""The audit trail in the real journal, whatever journald does."""

from __future__ import annotations

import time

from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent, gaps, jumps
from tests.system.machine import Machine

TRANSITION = MESSAGE_IDS[AuditKind.TRANSITION]

_JOURNALD = (
    "systemd-journald.socket",
    "systemd-journald-dev-log.socket",
    "systemd-journald.service",
)


def _stop_journald(agent: Agent) -> None:
    """Stop journald and its sockets, once it has read what was sent: the rest would go with them."""
    agent.audit()
    agent.systemctl("stop", *_JOURNALD)
    assert agent.unit("ActiveState", "systemd-journald.service") == "inactive"


def test_a_device_tells_its_whole_story(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job("job-story", one.node)
    lease = agent.allocate(RESOURCE, unit=job, client="story")
    agent.open_in(job)
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle"})
    agent.systemctl("restart", UNIT)
    agent.wait_states({one.id: "idle"})
    hardware.unplug(one)
    agent.wait_states({})

    entries = agent.audit(f"MESSAGE_ID={TRANSITION}", f"HETERO_DEVICE={one.id}", "--catalog")
    steps = [(entry["HETERO_FROM"], entry["HETERO_TO"]) for entry in entries]
    assert jumps(agent.audit(f"HETERO_DEVICE={one.id}")) == []
    assert steps == [
        ("probing", "idle"),
        ("idle", "in-use"),
        ("in-use", "reclaiming"),
        ("reclaiming", "idle"),
        # the agent of after the restart has to look first
        ("probing", "idle"),
        ("idle", "gone"),
    ]
    # each says who and why
    triggers = [entry["HETERO_TRIGGER"] for entry in entries]
    # whether the first scan or the first probe came last is chance
    assert {triggers[0], triggers[4]} <= {"scanned", "healthy"}
    assert triggers[1:4] == ["granted-confirmed", "owner-gone", "return-proven"]
    assert triggers[5] == "unplugged"
    assert {entry["HETERO_LEASE"] for entry in entries[1:3]} == {lease.rsplit("/l", 1)[1]}
    assert entries[1]["HETERO_ACTOR_UID"] == "0"
    assert entries[1]["HETERO_ACTOR_CLIENT"] == "story"
    assert entries[1]["HETERO_ACTOR_BUS_NAME"].startswith(":1.")
    numbers = [int(entry["HETERO_SEQUENCE"]) for entry in entries]
    assert numbers == sorted(numbers)
    times = [int(entry["HETERO_TIME_BOOTTIME"]) for entry in entries]
    assert times == sorted(times)
    assert {entry["SYSLOG_IDENTIFIER"] for entry in entries} == {"hetero-agent"}
    assert {entry["_SYSTEMD_UNIT"] for entry in entries} == {UNIT}
    # nothing of the whole trail is missing, over the restart too
    trail = agent.audit()
    assert gaps(trail) == []
    kinds = [entry["HETERO_KIND"] for entry in trail if entry["HETERO_DEVICE"] == one.id]
    assert (kinds[0], kinds[-1]) == ("device-appeared", "device-gone")


def test_the_catalog_explains_each_line(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    agent.audit()
    matches = [f"MESSAGE_ID={TRANSITION}", f"HETERO_DEVICE={one.id}", "--lines=1"]
    shown = machine.run("journalctl", "--catalog", "--output=short", *matches).stdout
    assert f"{one.id}: probing -> idle (" in shown
    assert f"Subject: Device {one.id} went from probing to idle" in shown
    assert "Defined-By: hetero-agent" in shown
    for number in MESSAGE_IDS.values():
        assert "Defined-By: hetero-agent" in machine.run("journalctl", "--dump-catalog", number).stdout


def test_a_burst_loses_no_line(agent: Agent, hardware: Accelerators, machine: Machine) -> None:
    devices = hardware.plug(20)
    idle = {one.id: "idle" for one in devices}
    agent.wait_states(idle)
    before = len(agent.audit())
    for number in range(10):
        lease = agent.allocate(RESOURCE, len(devices))
        agent.release(lease)
        machine.wait(lambda: agent.states() == idle, 30, f"the devices back after round {number}")
    trail = agent.audit()
    # per round and device: granted, released, proven; per round: granted, ended
    assert len(trail) - before == 10 * (3 * len(devices) + 2)
    assert gaps(trail) == []


def test_journald_that_does_not_drain_holds_up_nobody(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    devices = hardware.plug(20)
    idle = {one.id: "idle" for one in devices}
    agent.wait_states(idle)
    pid = agent.pid
    journald = agent.unit("MainPID", "systemd-journald.service")
    machine.run("kill", "-STOP", journald)
    try:
        took = []
        for _ in range(8):
            start = time.monotonic()
            lease = agent.allocate(RESOURCE, len(devices))
            agent.release(lease)
            took.append(time.monotonic() - start)
            machine.wait(lambda: agent.states() == idle, 30, "the devices back")
        # each has two processes in the machine, which may have to wait; none waits for journald
        assert sorted(took)[len(took) // 2] < 5
        assert max(took) < 10
        machine.wait(lambda: "journald does not drain" in agent.unit("StatusText"), 30, "a STATUS that says so")
        assert agent.pid == pid
    finally:
        machine.run("kill", "-CONT", journald)
    machine.wait(lambda: "audit" not in agent.unit("StatusText"), 30, "a STATUS without complaint")
    trail = agent.audit()
    assert gaps(trail) == []
    assert [entry["HETERO_KIND"] for entry in trail].count("lease-ended") >= 8


def test_restart_while_journald_does_not_drain(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    lease = agent.allocate(RESOURCE)
    journald = agent.unit("MainPID", "systemd-journald.service")
    machine.run("kill", "-STOP", journald)
    try:
        start = time.monotonic()
        agent.systemctl("restart", UNIT)
        assert time.monotonic() - start < 30
        assert list(agent.leases()) == [lease]
        assert agent.states() == {one.id: "in-use"}
        assert agent.release(lease) is True
    finally:
        machine.run("kill", "-CONT", journald)
    agent.wait_states({one.id: "idle"})
    assert gaps(agent.audit()) == []
    assert jumps(agent.audit(f"HETERO_DEVICE={one.id}")) == []


def test_stopped_journald_holds_up_nobody(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    pid = agent.pid
    _stop_journald(agent)
    try:
        lease = agent.allocate(RESOURCE, client="no-journal")
        assert agent.states() == {one.id: "in-use"}
        agent.release(lease)
        agent.wait_states({one.id: "idle"})
        machine.wait(
            lambda: "journald does not listen" in agent.unit("StatusText"), 30, "a STATUS that says so"
        )
    finally:
        agent.systemctl("start", *_JOURNALD)
    machine.wait(lambda: "audit" not in agent.unit("StatusText"), 30, "a STATUS without complaint")
    assert agent.pid == pid
    name = lease.rsplit("/l", 1)[1]
    kinds = [entry["HETERO_KIND"] for entry in agent.audit(f"HETERO_LEASE={name}")]
    assert kinds.count("lease-granted") == 1
    assert kinds.count("lease-ended") == 1
    assert gaps(agent.audit()) == []


def test_a_restart_while_journald_is_away_loses_no_line(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    _stop_journald(agent)
    try:
        lease = agent.allocate(RESOURCE)
        pid = agent.pid
        agent.systemctl("kill", "--signal=KILL", "--kill-who=main", UNIT)
        machine.wait(lambda: agent.restarted_since(pid), 30, "another process")
        assert list(agent.leases()) == [lease]
    finally:
        agent.systemctl("start", *_JOURNALD)
    name = lease.rsplit("/l", 1)[1]
    machine.wait(
        lambda: agent.audit(f"HETERO_LEASE={name}", "HETERO_KIND=lease-granted"), 30, "the grant's line"
    )
    trail = agent.audit()
    assert gaps(trail) == [], [(one["HETERO_SEQUENCE"], one["MESSAGE"]) for one in trail]
