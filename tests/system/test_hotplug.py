"""Accelerators that come and go, seen through the machine's own udevd."""

from __future__ import annotations

import os
import selectors
import time

import pytest

from hetero_agent import names
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent, Refused
from tests.system.machine import Machine

_UDEVD = ("systemd-udevd-control.socket", "systemd-udevd-kernel.socket", "systemd-udevd.service")


def test_plugged_in_it_is_found_after_udevs_rules(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    # that udevd has processed it: mode, group, link and database
    assert machine.shell(f"stat -c '%a %U:%G' {one.node}") == "660 root:render\n"
    assert machine.shell(f"readlink -f {one.link}") == f"{one.node}\n"
    assert "E: SUBSYSTEM=accel" in machine.run("udevadm", "info", one.node).stdout
    device = agent.devices()[one.id]
    assert device["Resource"] == RESOURCE
    assert device["Driver"] == "lab"
    assert device["Path"] == f"/sys{one.directory}"
    assert device["NumaNodes"] == [0]
    assert device["StableId"] is True
    nodes = agent.call(names.device_path(one.id), names.DEVICE, "GetNodes")
    assert nodes == [[one.node, "own", "char", *one.device_number]]
    assert (
        machine.shell(f"busctl tree --list {names.BUS_NAME} | grep devices/")
        == f"{names.device_path(one.id)}\n"
    )
    assert "listening to uevents of udev" in agent.log()


def test_its_news_are_signals(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    with machine.start("busctl", "--json=short", "monitor", names.BUS_NAME) as monitor:
        assert monitor.stdout is not None
        # it says that it monitors before it shows anything
        line = monitor.stdout.readline()
        assert "Monitoring bus" in line
        (one,) = hardware.plug()
        agent.wait_states({one.id: "idle"})
        hardware.unplug(one)
        agent.wait_states({})
        # what it shows comes behind: its end would come before the rest of it
        missing = {"InterfacesAdded", "StateChanged", "PropertiesChanged", "InterfacesRemoved"}
        watched = selectors.DefaultSelector()
        watched.register(monitor.stdout, selectors.EVENT_READ)
        shown, end = b"", time.monotonic() + 30
        while missing and watched.select(max(0, end - time.monotonic())):
            shown += os.read(monitor.stdout.fileno(), 65536)
            missing = {member for member in missing if f'"member":"{member}"'.encode() not in shown}
        machine.end(monitor)
    assert missing == set()


def test_unplugged_it_is_gone(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    one, two = hardware.plug(2)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    hardware.unplug(one)
    agent.wait_states({two.id: "idle"})
    assert names.device_path(one.id) not in machine.run("busctl", "tree", "--list", names.BUS_NAME).stdout
    with pytest.raises(Refused):
        agent.allocate(RESOURCE, 2)


def test_unplugged_while_leased_and_held_it_is_lost(agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job("job-lost", one.node)
    lease = agent.allocate(RESOURCE, unit=job)
    agent.open_in(job)
    hardware.unplug(one)
    agent.wait_states({one.id: "lost"})
    assert agent.leases()[lease]["Lost"] == [names.device_path(one.id)]
    # the same place again: it is not the lease's any more, and not free while it is held
    assert hardware.plug() == [one]
    agent.wait_states({one.id: "reclaiming"})
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle"})
    assert agent.leases() == {}


def test_driver_unbound_and_bound(agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    hardware.unbind(one)
    agent.wait_states({one.id: "offline"})
    assert agent.devices()[one.id]["Reason"] == "no-driver"
    with pytest.raises(Refused):
        agent.allocate(RESOURCE)
    hardware.bind(one)
    agent.wait_states({one.id: "idle"})
    agent.release(agent.allocate(RESOURCE))
    agent.wait_states({one.id: "idle"})


def test_changed_attributes_are_read_again(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    hardware.change(one, numa_node="1")
    machine.wait(lambda: agent.devices()[one.id]["NumaNodes"] == [1], 30, "the other NUMA node")


def test_udev_runs_its_rules_again_on_a_leased_one(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    lease = agent.allocate(RESOURCE, confirm=False)
    machine.run("chmod", "0600", one.node)
    hardware.change(one, numa_node="1")
    machine.wait(lambda: agent.devices()[one.id]["NumaNodes"] == [1], 30, "the other NUMA node")
    # its mode is another, it is not
    assert agent.states() == {one.id: "allocating"}
    agent.confirm(lease, ttl=60_000_000)
    assert agent.states() == {one.id: "in-use"}


def test_a_stranger_makes_it_occupied(agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    job = agent.job("job-stranger", one.node)
    pid = agent.open_in(job)
    agent.wait_states({one.id: "occupied"})
    (holder,) = agent.call(names.device_path(one.id), names.DEVICE, "GetHolders")
    assert (holder["pid"]["data"], holder["unit"]["data"]) == (pid, job)
    with pytest.raises(Refused, match="occupied"):
        agent.allocate(RESOURCE)
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle"})


def test_many_at_once_and_again(agent: Agent, hardware: Accelerators) -> None:
    for _ in range(3):
        devices = hardware.plug(20)
        agent.wait_states({one.id: "idle" for one in devices})
        hardware.unplug()
        agent.wait_states({})


def test_udevd_restarted(agent: Agent, hardware: Accelerators) -> None:
    agent.systemctl("restart", "systemd-udevd.service")
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})


def test_udevd_stopped_the_kernels_own_events_do(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    agent.systemctl("stop", *_UDEVD)
    try:
        machine.wait(
            lambda: "/run/udev/control is missing" in agent.unit("StatusText"), 30, "a STATUS that says so"
        )
        (one,) = hardware.plug()
        agent.wait_states({one.id: "idle"})
    finally:
        agent.systemctl("start", *_UDEVD)
    machine.wait(lambda: "/run/udev/control" not in agent.unit("StatusText"), 30, "a STATUS without complaint")
    (two,) = hardware.plug()
    agent.wait_states({one.id: "idle", two.id: "idle"})
    assert machine.shell(f"stat -c '%a %U:%G' {two.node}") == "660 root:render\n"


def test_what_was_plugged_while_it_was_down_is_there_at_ready(agent: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    agent.systemctl("stop", UNIT)
    hardware.unplug(one)
    two, three = hardware.plug(2)
    agent.systemctl("start", UNIT)
    # start has returned: no waiting
    assert agent.states() == {two.id: "idle", three.id: "idle"}
