"""A real kernel device, made one by a profile: found, granted, held by a real process, returned."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import pytest

from hetero_agent import names
from tests.support.agent import AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE, RESOURCE, SYSFS
from tests.support.hold import HoldingProcess
from tests.support.wait import wait_until


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, profiles={"console.toml": PROFILE}, sources="kernel")
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def root(bus: PrivateBus, agent: AgentProcess) -> Iterator[Client]:
    with Client(bus) as client:
        yield client


def test_console_is_found_and_described(root: Client) -> None:
    device = root.wait_for_device(DEVICE_ID, State="idle")
    assert device["Resource"] == RESOURCE
    assert device["Source"] == "kernel"
    assert device["NumaNodes"] == []
    number = CONSOLE.stat().st_rdev
    nodes = root.call(names.device_path(DEVICE_ID), names.DEVICE, "GetNodes")
    assert nodes == [[str(CONSOLE), "own", "char", os.major(number), os.minor(number)]]


def test_console_is_granted_held_and_returned(root: Client) -> None:
    root.wait_for_device(DEVICE_ID, State="idle")
    lease, manifest = root.allocate("r1", RESOURCE)
    path, mode = manifest["nodes"][0][1], CONSOLE.stat().st_mode
    assert stat.S_ISCHR(mode)
    assert path == str(CONSOLE)
    assert manifest["env"]["CONSOLE"] == str(CONSOLE)
    with HoldingProcess(path, later=True) as process:
        root.confirm("r2", lease, {"pid": V("u", process.pid)})
        process.open()
        root.wait_for_device(DEVICE_ID, State="in-use")
        wait_until(
            lambda: (
                [one["pid"] for one in root.call(names.device_path(DEVICE_ID), names.DEVICE, "GetHolders")]
                == [process.pid]
            ),
            what="the process among the holders",
        )
        process.kill()
        root.wait_for_device(DEVICE_ID, State="idle")
    assert root.wait_for_signal(names.MANAGER, "LeaseEnded").body == (lease, "owner-gone")


def test_console_opened_by_a_stranger_is_occupied(root: Client) -> None:
    root.wait_for_device(DEVICE_ID, State="idle")
    with HoldingProcess(CONSOLE):
        root.wait_for_device(DEVICE_ID, State="occupied")
    root.wait_for_device(DEVICE_ID, State="idle")


def test_uevent_reaches_the_bus(root: Client) -> None:
    policy = SYSFS / "power" / "control"
    before = policy.read_text().strip()
    other = "on" if before == "auto" else "auto"
    assert root.wait_for_device(DEVICE_ID, State="idle")["Attributes"]["power-policy"] == before
    try:
        policy.write_text(other)
        (SYSFS / "uevent").write_text("change")
        wait_until(
            lambda: root.device(DEVICE_ID)["Attributes"]["power-policy"] == other, what="the changed attribute"
        )
        assert root.signals("org.freedesktop.DBus.Properties", path=names.device_path(DEVICE_ID))
    finally:
        policy.write_text(before)
