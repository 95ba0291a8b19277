"""Directories that are full or read-only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent, Refused
from tests.system.machine import CommandFailed, Machine

STATE = "/var/lib/hetero-agent"
RUNTIME = "/run/hetero-agent"


_TMPFS = "mount -t tmpfs -o size=1M,mode=0755 lab {path}"

#: A disk of its own, on a loop device.
_DISK = """
test -e /dev/loop-control || mknod /dev/loop-control c 10 237
for number in $(seq 0 63); do test -e /dev/loop$number || mknod /dev/loop$number b 7 $number; done
truncate -s 8M /root/lab.disk
mkfs.ext4 -q -F /root/lab.disk
mount -o loop /root/lab.disk {path}
"""


@pytest.fixture
def small_state(machine: Machine, agent: Agent) -> Iterator[str]:
    """A small file system of its own for the state directory; the agent runs on it."""
    yield from _other(machine, agent, STATE, _TMPFS)


@pytest.fixture
def small_runtime(machine: Machine, agent: Agent) -> Iterator[str]:
    """The same for the runtime directory."""
    yield from _other(machine, agent, RUNTIME, _TMPFS)


@pytest.fixture
def state_disk(machine: Machine, agent: Agent) -> Iterator[str]:
    """A disk of its own for the state directory; the agent runs on it."""
    yield from _other(machine, agent, STATE, _DISK)


def _other(machine: Machine, agent: Agent, path: str, mount: str) -> Iterator[str]:
    agent.systemctl("stop", UNIT)
    machine.shell(f"owner=$(stat -c %u:%g {path})\n{mount.format(path=path)}\nchown $owner {path}")
    agent.systemctl("start", UNIT)
    yield path
    agent.systemctl("stop", UNIT)
    # umount also wants to free the loop device, which has freed itself
    machine.shell(f"umount {path} 2>/dev/null || ! mountpoint -q {path}")
    agent.systemctl("start", UNIT)


def _fill(machine: Machine, path: str) -> None:
    """Leave no room in PATH."""
    machine.run("dd", "if=/dev/zero", f"of={path}/ballast", "bs=4k", check=False)
    assert machine.shell(f"df --output=avail {path} | tail -1").strip() == "0"


def test_full_state_directory_refuses_cordons_only(
    machine: Machine, agent: Agent, hardware: Accelerators, small_state: str
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    _fill(machine, small_state)

    def cordon_often() -> None:
        # as many as it takes until the file would have to grow
        for number in range(400):
            agent.heteroctl("cordon", one.id, "--reason", f"{number} " + "x" * 100)
            agent.heteroctl("uncordon", one.id)

    with pytest.raises(CommandFailed, match="StoreFailed"):
        cordon_often()
    if agent.devices()[one.id]["Cordoned"]:
        machine.run("rm", f"{small_state}/ballast")
        agent.heteroctl("uncordon", one.id)
        _fill(machine, small_state)
    agent.wait_states({one.id: "idle"})
    lease = agent.allocate(RESOURCE)
    assert agent.release(lease) is True
    agent.wait_states({one.id: "idle"})
    machine.run("rm", f"{small_state}/ballast")
    agent.heteroctl("cordon", one.id, "--reason", "room again")
    assert agent.states() == {one.id: "offline"}
    agent.systemctl("restart", UNIT)
    agent.wait_states({one.id: "offline"})
    agent.heteroctl("uncordon", one.id)


def test_read_only_state_directory_refuses_cordons_only(
    machine: Machine, agent: Agent, hardware: Accelerators, state_disk: str
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    agent.heteroctl("cordon", one.id, "--reason", "before")
    agent.heteroctl("uncordon", one.id)
    # what the kernel does after an error of the disk
    machine.run("mount", "-o", "remount,abort", state_disk, check=False)
    assert "ro" in machine.shell(f"findmnt -n -o FS-OPTIONS {state_disk}").strip()
    with pytest.raises(CommandFailed, match="StoreFailed"):
        agent.heteroctl("cordon", one.id, "--reason", "no room")
    assert agent.devices()[one.id]["Cordoned"] is False
    lease = agent.allocate(RESOURCE)
    assert agent.states() == {one.id: "in-use"}
    machine.wait(lambda: STATE in agent.unit("StatusText"), 30, "a STATUS that says so")
    # it starts on it as well, and the lease is still there
    agent.systemctl("restart", UNIT)
    assert list(agent.leases()) == [lease]
    agent.wait_states({one.id: "in-use"})
    with pytest.raises(CommandFailed, match="StoreFailed"):
        agent.heteroctl("cordon", one.id, "--reason", "no room")
    assert agent.release(lease) is True
    agent.wait_states({one.id: "idle"})
    agent.release(agent.allocate(RESOURCE))


def test_full_runtime_directory_grants_nothing_and_loses_nothing(
    machine: Machine, agent: Agent, hardware: Accelerators, small_runtime: str
) -> None:
    one, two = hardware.plug(2)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    kept = agent.allocate(RESOURCE, devices=[one.id])
    _fill(machine, small_runtime)

    def grant_often() -> None:
        for _ in range(100):
            agent.release(agent.allocate(RESOURCE, devices=[two.id]))
            machine.wait(lambda: agent.states()[two.id] == "idle", 30, "the device back")

    refusals = []

    def told() -> bool:
        """Which of its files has no room first is chance, and whether that is a grant's or a release's."""
        with pytest.raises(Refused) as caught:
            grant_often()
        refusals.append(str(caught.value))
        return "ledger" in agent.unit("StatusText")

    machine.wait(told, 60, "a STATUS that says so")
    assert "can't be written" in refusals[0]
    assert kept in agent.leases()
    machine.run("rm", f"{small_runtime}/ballast")
    for lease in agent.leases():
        if lease != kept:
            agent.release(lease)
    machine.wait(lambda: agent.states()[two.id] == "idle", 30, "the device back")
    other = agent.allocate(RESOURCE, devices=[two.id])
    assert {kept, other} <= set(agent.leases())
