"""Devices go and come while they are being given out."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest

from hetero_agent import names
from tests.drills.endstate import all_free, leases, nothing_twice
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V, receive_all
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

IDS = [f"npu-{number}" for number in range(8)]


@pytest.mark.parametrize("count", [1, 3])
def test_unplugged_while_they_are_given_out(
    bus: PrivateBus, agent: AgentProcess, vendor: Vendor, count: int
) -> None:
    """What was answered with a lease is one, over devices that are there or flagged lost; what was
    refused is none; nothing is in two."""
    vendor.add(*IDS)
    vendor.wait_idle()
    known = dict(vendor.devices)
    chance = random.Random(count)
    with Client(bus) as client:
        granted: dict[str, list[str]] = {}
        for turn in range(12):
            numbers = [
                client.send(
                    names.ROOT,
                    names.MANAGER,
                    "Allocate",
                    "ssua{sv}",
                    f"{turn}-{one}",
                    RESOURCE,
                    count,
                    {"confirm": V("b", True)},
                )
                for one in range(4)
            ]
            # some go while these are on their way, and are back at the next turn
            gone = chance.sample(IDS, 3)
            vendor.devices = {one: known[one] for one in IDS if one not in gone}
            vendor.report()
            replies, errors = receive_all(client, numbers)
            assert {error.name for error in errors} <= {"Unavailable", "NotFound"}
            for reply in replies:
                lease, manifest = reply.value
                granted[lease] = manifest["devices"]
            nothing_twice(client)
            now = leases(client)
            for lease, devices in granted.items():
                assert now[lease] == devices
            present = client.devices()
            for lease, devices in granted.items():
                lost = {names.device_id_of(one) for one in client.properties(lease, names.LEASE)["Lost"]}
                assert lost >= set(devices).intersection(gone)
                for device in set(devices) - lost:
                    assert (present[device]["State"], present[device]["Lease"]) == ("in-use", lease)
            for number, lease in enumerate(list(granted)):
                if chance.random() < 0.6:
                    assert client.release(f"r{turn}-{number}", lease) is True
                    del granted[lease]
            vendor.devices = dict(known)
            vendor.report()
            wait_until(lambda: set(client.devices()) == set(IDS), what="all devices again")
        for number, lease in enumerate(granted):
            client.release(f"last-{number}", lease)
        all_free(client, agent, IDS)


def test_node_that_goes_away_while_it_is_given_out(
    bus: PrivateBus, agent: AgentProcess, vendor: Vendor
) -> None:
    """The source has not heard of it yet: the check of the nodes against the kernel has."""
    vendor.add("npu-0", "npu-1")
    vendor.wait_idle()
    path = vendor.file("npu-0")
    with Client(bus) as client:
        only = {"confirm": V("b", True), "devices": V("as", ["npu-0"])}
        for turn in range(5):
            path.unlink()
            numbers = [
                client.send(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", f"{turn}", RESOURCE, 1, only)
            ]
            replies, errors = receive_all(client, numbers)
            assert (len(replies), [error.name for error in errors]) == (0, ["Unavailable"])
            assert leases(client) == {}
            path.touch()
            path.chmod(0o666)
            vendor.report()
            client.wait_for_device("npu-0", State="idle")
            # the refused id is free to be used again
            lease, manifest = client.allocate(f"{turn}", RESOURCE, 1, only)
            (node,) = manifest["nodes"]
            assert stat.S_ISREG(Path(node[1]).stat().st_mode)
            client.release(f"r{turn}", lease)
            client.wait_for_device("npu-0", State="idle")
        all_free(client, agent, ["npu-0", "npu-1"])


def test_provider_dies_while_its_devices_are_given_out(bus: PrivateBus) -> None:
    """Answered leases live on; the devices come back with the provider."""
    agent = AgentProcess(
        bus, config=CONFIG.replace("[providers.vendor]\n", "[providers.vendor]\ngrace = 0.5\n")
    )
    try:
        agent.start()
        with Client(bus) as client:
            vendor = Vendor(agent)
            vendor.add(*IDS)
            vendor.wait_idle()
            numbers = [
                client.send(
                    names.ROOT,
                    names.MANAGER,
                    "Allocate",
                    "ssua{sv}",
                    f"{one}",
                    RESOURCE,
                    1,
                    {"confirm": V("b", True)},
                )
                for one in range(12)
            ]
            vendor.client.kill()
            replies, errors = receive_all(client, numbers)
            assert {error.name for error in errors} <= {"Unavailable"}
            granted = {reply.value[0]: reply.value[1]["devices"] for reply in replies}
            assert leases(client) == granted
            free = sorted(set(IDS) - {device for devices in granted.values() for device in devices})
            for device in free:
                client.wait_for_device(device, State="faulty", Reason="provider-gone")
            for devices in granted.values():
                assert client.device(devices[0])["State"] == "in-use"
                client.wait_for_device(devices[0], Health="unknown")
            vendor.close()
            with Vendor(agent) as again:
                again.add(*IDS)
                for number, lease in enumerate(granted):
                    assert client.release(f"r{number}", lease) is True
                all_free(client, agent, IDS)
    finally:
        agent.close()
