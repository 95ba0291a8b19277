"""Units of systemd as owners of leases."""

from __future__ import annotations

import os

import pytest

from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent
from tests.system.machine import Machine


def _end(agent: Agent, lease: str) -> tuple[str, str]:
    """Return the trigger of the end of LEASE (a path), and the reason."""
    (entry,) = agent.audit("HETERO_KIND=lease-ended", f"HETERO_LEASE={lease.rsplit('/l', 1)[1]}")
    return str(entry["HETERO_TRIGGER"]), str(entry["HETERO_REASON"])


def test_stop_gives_back(agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job("job-one", one.node)
    lease = agent.allocate(RESOURCE, unit=job)
    agent.open_in(job)
    assert agent.states() == {one.id: "in-use"}
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle"})
    assert _end(agent, lease) == ("owner-gone", "its unit ended")


def test_a_restarted_unit_is_another_owner(agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job("job-two", one.node)
    lease = agent.allocate(RESOURCE, unit=job)
    binding = agent.call(lease, "org.heteroagent.Agent1.Lease", "GetBinding")
    invocation = agent.unit("InvocationID", job)
    assert binding["invocation"]["data"] == invocation
    agent.systemctl("restart", job)
    assert agent.unit("InvocationID", job) != invocation
    agent.wait_states({one.id: "idle"})
    assert _end(agent, lease) == ("owner-gone", "its unit ended")
    # the new one may have it, too
    other = agent.allocate(RESOURCE, unit=job)
    assert agent.states() == {one.id: "in-use"}
    assert list(agent.leases()) == [other]


def test_a_unit_that_fails_gives_back(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job("job-fails", one.node)
    lease = agent.allocate(RESOURCE, unit=job)
    machine.run("kill", "-KILL", str(agent.open_in(job)))
    agent.wait_states({one.id: "idle"})
    assert agent.unit("Result", job) in ("signal", "success")
    assert _end(agent, lease) == ("owner-gone", "its unit ended")


def test_a_child_that_stays_keeps_the_device(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    script = f"setsid sleep 3600 <{one.node} & echo $! >/run/job-child.pid; exec sleep 3600"
    lease = None
    machine.run(
        "systemd-run", "--quiet", "--unit=job-child", "--property=KillMode=process", "--service-type=exec",
        "sh", "-c", "while ! test -e /run/job-child.go; do sleep 0.02; done; " + script,
    )  # fmt: skip
    lease = agent.allocate(RESOURCE, unit="job-child.service")
    machine.write("/run/job-child.go", "")
    pid = machine.wait(
        lambda: machine.shell("cat /run/job-child.pid 2>/dev/null || true").strip(), 30, "the child"
    )
    # written before the child has opened it
    held = machine.path(f"/proc/{pid}/fd/0")
    machine.wait(lambda: os.readlink(held) == one.node, 30, "the node in the child's hands")
    agent.systemctl("stop", "job-child.service")
    agent.wait_states({one.id: "reclaiming"})
    machine.run("sleep", "1")
    assert agent.states() == {one.id: "reclaiming"}
    assert lease in agent.leases()
    machine.run("kill", str(pid))
    agent.wait_states({one.id: "idle"})
    assert agent.leases() == {}


@pytest.mark.parametrize("verb", ["daemon-reload", "daemon-reexec"])
def test_systemd_itself_anew(agent: Agent, hardware: Accelerators, verb: str) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job(f"job-{verb}", one.node)
    lease = agent.allocate(RESOURCE, unit=job)
    agent.open_in(job)
    pid = agent.pid
    agent.systemctl(verb)
    assert agent.unit("ActiveState", job) == "active"
    assert agent.states() == {one.id: "in-use"}
    assert list(agent.leases()) == [lease]
    assert agent.pid == pid
    # the watchdog and READY's state are systemd's still
    assert agent.unit("ActiveState", UNIT) == "active"
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle"})
    assert _end(agent, lease) == ("owner-gone", "its unit ended")


def test_run_in_a_unit(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    one, two = hardware.plug(2)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    done = machine.run(
        "systemd-run", "--quiet", "--wait", "--pipe", "--unit=job-run",
        "heteroctl", "run", "-r", RESOURCE, "-n", "2", "--", "sh", "-c", 'echo "$HETERO_DEVICES"; exit 7',
        check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert sorted(done.stdout.strip().split(",")) == sorted([one.id, two.id])
    agent.wait_states({one.id: "idle", two.id: "idle"})
    granted = agent.audit("HETERO_KIND=lease-granted")[-1]
    assert granted["HETERO_ACTOR_UNIT"] == "job-run.service"
