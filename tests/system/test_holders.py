"""Holders by their units: the system's own and strangers, with the real systemd to ask."""

from __future__ import annotations

from typing import Any

from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import Agent
from tests.system.machine import Machine

PERSISTENCED = "nvidia-persistenced"


def _holders(agent: Agent, device: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = agent.heteroctl("holders", device)
    return found


def _wait_for(machine: Machine, agent: Agent, device: str, wanted: tuple[str, str, str]) -> None:
    """Wait until the device's only holder has this role, unit and user."""

    def look() -> bool:
        return [(row["role"], row["unit"], row["user"]) for row in _holders(agent, device)] == [wanted]

    machine.wait(look, 30, f"{wanted} alone")


def test_daemon_of_the_system_is_no_obstacle(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    """As root, and as the user of its unit; what somebody else runs in it is a stranger."""
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    machine.run("chmod", "0666", one.node)
    for user in ("root", "daemon"):
        job = agent.job(PERSISTENCED, one.node, f"User={user}")
        pid = agent.open_in(job)
        _wait_for(machine, agent, one.id, ("system", job, user))
        machine.run("sleep", "0.6")
        assert agent.states() == {one.id: "idle"}
        lease = agent.allocate(RESOURCE)
        assert agent.release(lease) is True
        agent.wait_states({one.id: "idle"})
        assert agent.unit("MainPID", job) == str(pid)
        agent.systemctl("stop", job)
    # a job of another user in a listed unit, as cron has them; it opens the node itself, or a scan might
    # see it while it is still root's
    open_it = f"exec sleep 3600 <{one.node}"
    script = f"setpriv --reuid=games --clear-groups sh -c '{open_it}' & exec sleep 3600"
    machine.run("systemd-run", "--quiet", f"--unit={PERSISTENCED}", "sh", "-c", script)
    agent.wait_states({one.id: "occupied"})
    (row,) = _holders(agent, one.id)
    assert (row["role"], row["unit"], row["user"]) == ("outsider", f"{PERSISTENCED}.service", "games")
    agent.systemctl("stop", PERSISTENCED)
    agent.wait_states({one.id: "idle"})


def test_stranger_is_told_with_its_unit_and_reaped(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job("stray-train", one.node, "Restart=no")
    pid = agent.open_in(job)
    agent.wait_states({one.id: "occupied"})
    (row,) = _holders(agent, one.id)
    assert (row["pid"], row["role"], row["unit"], row["user"]) == (pid, "outsider", job, "root")
    told = agent.audit("HETERO_KIND=orphan")[-1]
    assert job in told["MESSAGE"]
    assert agent.heteroctl("reap", one.id, "--pid", str(pid))["ended"] == 1
    machine.wait(lambda: agent.unit("ActiveState", job) in ("inactive", "failed"), 30, "the end of the job")
    agent.wait_states({one.id: "idle"})
    (signalled,) = agent.audit("HETERO_KIND=process-signalled", f"HETERO_PID={pid}")
    assert signalled["HETERO_REASON"] == "got SIGTERM"
