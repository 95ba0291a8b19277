"""Leases outlive what happens to the agent and to what it stands on."""

from __future__ import annotations

import json

import pytest

from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent, Refused, gaps
from tests.system.conftest import settings
from tests.system.machine import Machine


def test_stop_is_no_release(agent: Agent, hardware: Accelerators) -> None:
    one, two = hardware.plug(2)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    job = agent.job("job-stop", one.node)
    lease = agent.allocate(RESOURCE, devices=[one.id], unit=job, request="kept")
    holder = agent.open_in(job)
    agent.systemctl("stop", UNIT)
    assert agent.unit("ActiveState", job) == "active"
    agent.systemctl("start", UNIT)
    assert agent.states() == {one.id: "in-use", two.id: "idle"}
    assert list(agent.leases()) == [lease]
    # the same request again is the same lease
    assert agent.allocate(RESOURCE, devices=[one.id], unit=job, request="kept") == lease
    held = agent.heteroctl("holders", one.id)
    assert f'"pid": {holder}' in json.dumps(held)
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    assert agent.leases() == {}


def test_an_owner_that_ends_meanwhile_is_missed_at_the_start(agent: Agent, hardware: Accelerators) -> None:
    one, two = hardware.plug(2)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    ends, restarts = agent.job("job-ends", one.node), agent.job("job-again", two.node)
    leases = [
        agent.allocate(RESOURCE, devices=[one.id], unit=ends),
        agent.allocate(RESOURCE, devices=[two.id], unit=restarts),
    ]
    agent.systemctl("stop", UNIT)
    agent.systemctl("stop", ends)
    agent.systemctl("restart", restarts)
    agent.systemctl("start", UNIT)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    for lease in leases:
        (ended,) = agent.audit("HETERO_KIND=lease-ended", f"HETERO_LEASE={lease.rpartition('/l')[2]}")
        assert "unit" in ended["HETERO_REASON"], ended


def test_what_still_holds_a_device_keeps_it_over_a_restart(agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job("job-holds", one.node)
    lease = agent.allocate(RESOURCE)
    agent.open_in(job)
    assert agent.release(lease) is True
    agent.wait_states({one.id: "reclaiming"})
    agent.systemctl("restart", UNIT)
    agent.wait_states({one.id: "reclaiming"})
    with pytest.raises(Refused, match="reclaiming"):
        agent.allocate(RESOURCE)
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle"})


# Each of $1 callers wants one device of $2 and asks until it is answered, always with the same request id;
# they begin in fours, each four when its file is there.
_CALLERS = """
name=org.heteroagent.Agent1
for number in $(seq "$1"); do
    (
        until test -e /run/storm.$(((number - 1) / 4)); do sleep 0.02; done
        until lease=$(busctl call $name /org/heteroagent/Agent1 $name.Manager Allocate 'ssua{sv}' \
            "storm-$number" "$2" 1 1 confirm b true 2>/dev/null)
        do sleep 0.02; done
        echo "$number $lease" | cut -d' ' -f1,3 | tr -d '"'
    ) &
done
wait
"""


def test_killed_in_the_middle_of_grants_none_is_lost_or_given_twice(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    settings(machine, RestartSec="20ms")
    wanted = 16
    devices = hardware.plug(wanted)
    agent.wait_states({one.id: "idle" for one in devices})
    with machine.start("sh", "-c", _CALLERS, "callers", str(wanted), RESOURCE) as callers:
        for number in range(wanted // 4):
            pid, have = agent.pid, len(agent.leases())
            machine.write(f"/run/storm.{number}", "")
            # when the first of the four was granted, the others' calls are under way
            machine.wait(lambda have=have: len(agent.leases()) > have, 30, "another lease")
            machine.run("kill", "-KILL", str(pid))
            machine.wait(lambda pid=pid: agent.restarted_since(pid), 30, "another process")
        output, _ = callers.communicate(timeout=60)
    answered = dict(line.split() for line in output.splitlines())
    assert len(answered) == wanted, output
    leases = agent.leases()
    # all that was answered is there, nothing else is, and no device was given twice
    assert sorted(leases) == sorted(answered.values())
    granted = [path for lease in leases.values() for path in lease["Devices"]]
    assert len(set(granted)) == wanted
    agent.wait_states({one.id: "in-use" for one in devices})
    again = {number: agent.allocate(RESOURCE, request=f"storm-{number}") for number in answered}
    assert again == answered
    assert gaps(agent.audit()) == []


# A client that keeps its connection: the lease is bound to it.  Says the lease's path.
_CONNECTED = """
import asyncio, sys
from dbus_next import BusType, Message, Variant
from dbus_next.aio import MessageBus
NAME, ROOT = "org.heteroagent.Agent1", "/org/heteroagent/Agent1"

async def main():
    bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
    options = {"confirm": Variant("b", True), "connection": Variant("b", True)}
    reply = await bus.call(Message(NAME, ROOT, NAME + ".Manager", "Allocate", signature="ssua{sv}",
                                   body=[sys.argv[1], sys.argv[2], 1, options]))
    print(reply.body[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""


def test_the_bus_is_restarted(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    settings(machine, RestartSec="100ms")
    one, two, three = hardware.plug(3)
    agent.wait_states({one.id: "idle", two.id: "idle", three.id: "idle"})
    job = agent.job("job-bus", one.node)
    kept = agent.allocate(RESOURCE, devices=[one.id], unit=job)
    agent.open_in(job)
    with machine.start("python3", "-c", _CONNECTED, "bus-restart", RESOURCE) as client:
        assert client.stdout is not None
        bound = client.stdout.readline().strip()
        assert sorted(agent.leases()) == sorted([kept, bound])
        pid = agent.pid
        agent.systemctl("restart", "dbus.service")
        machine.wait(lambda: agent.restarted_since(pid), 30, "another process")
        client.communicate("")
    # a connection of the bus before is no more, whatever has its name now; a unit still is
    machine.wait(lambda: list(agent.leases()) == [kept], 30, "the end of the connection's lease")
    assert sorted(agent.states().values()) == ["idle", "idle", "in-use"]
    assert "the bus is lost" in agent.log()
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle", two.id: "idle", three.id: "idle"})


def test_a_client_that_leaves_the_bus_gives_back(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    with machine.start("python3", "-c", _CONNECTED, "leaves", RESOURCE) as client:
        assert client.stdout is not None
        assert client.stdout.readline().strip() in agent.leases()
        assert agent.states() == {one.id: "in-use"}
        client.communicate("")
    agent.wait_states({one.id: "idle"})
