"""The installed product and podman: specifications in /run/cdi, the package's heteroctl as the hook."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import PYTHON, ROOT
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import Agent
from tests.system.machine import Machine
from tests.system.podman import IMAGE, MADE_WITH, with_podman

SCRIPT = "/run/probe/podman.sh"

_LOOK = """
import os, sys, time
print(os.getuid(), sorted(os.listdir("/dev/accel")), os.environ["HETERO_DEVICES"], flush=True)
held = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def machine(layers: list[Path], base: Path) -> Iterator[Machine]:
    with with_podman(layers, base) as one:
        one.write(SCRIPT, (ROOT / "examples/podman.sh").read_text(), mode=0o755)
        yield one


def program(node: str, seconds: int) -> list[str]:
    return [IMAGE, PYTHON, "-ISc", _LOOK, node, str(seconds)]


@pytest.mark.parametrize("user", ["0", "1000"])
def test_the_example_to_its_end(machine: Machine, agent: Agent, hardware: Accelerators, user: str) -> None:
    one, other = hardware.plug(2)
    agent.wait_states({one.id: "idle", other.id: "idle"})
    done = machine.run(
        *(SCRIPT, f"{RESOURCE}", "2", "--rm", f"--user={user}", *MADE_WITH, *program(one.node, 0)), timeout=90
    )
    nodes = sorted(f"accel{each.number}" for each in (one, other))
    uid, rest = done.stdout.split(" ", 1)
    assert uid == user
    assert rest.startswith(f"{nodes} ")
    assert set(rest.split()[-1].split(",")) == {one.id, other.id}
    agent.wait_states({one.id: "idle", other.id: "idle"})
    assert machine.run("ls", "/run/cdi").stdout == ""


def test_the_specification_of_the_installed_product(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    (one,) = hardware.plug(1)
    agent.wait_states({one.id: "idle"})
    options = ("--detach", "--rm", "--name=train", *MADE_WITH)
    machine.run(SCRIPT, RESOURCE, "1", *options, *program(one.node, 3600), timeout=90)
    try:
        agent.wait_states({one.id: "in-use"})
        [lease] = agent.leases()
        identifier = lease.rpartition("/l")[2]
        path = f"/run/cdi/heteroagent.org-lease_{identifier}.json"
        found = machine.path(path).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o644, 0)
        [device] = json.loads(machine.read(path))["devices"]
        [hook] = device["containerEdits"]["hooks"]
        assert (hook["path"], hook["args"]) == ("/usr/bin/heteroctl", ["heteroctl", "oci-hook", identifier])
        # neither the agent's end nor a kill of its helper is the container's
        before = agent.pid
        machine.run("systemctl", "kill", "--signal=KILL", "hetero-agent.service", "hetero-agent-access.service")
        machine.wait(lambda: agent.restarted_since(before), 30, "the agent's restart")
        agent.wait_states({one.id: "in-use"})
        assert machine.run("test", "-e", path).returncode == 0
    finally:
        machine.run("podman", "rm", "--force", "--time=0", "train")
    agent.wait_states({one.id: "idle"})
    assert machine.run("ls", "/run/cdi").stdout == ""
