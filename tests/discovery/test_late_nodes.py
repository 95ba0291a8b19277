"""Nodes that come, or become others, without a uevent."""

from __future__ import annotations

import asyncio

from hetero_agent.core.model import Obstacle, Role
from tests.discovery.hosts import nvidia_driver
from tests.discovery.observe import watching
from tests.support.umock import Bed, bed, in_umockdev

CARD = "0000:17:00.0"


@in_umockdev()
def test_a_control_node_that_a_driver_makes_at_its_first_use_is_given_from_then_on() -> None:
    """nvidia-uvm's, which no CUDA program can do without, is not there before the first has run."""

    async def body(mock: Bed) -> None:
        nvidia_driver(mock)
        mock.pci(CARD, "10de:2330", "030200", "nvidia")
        mock.nvidia(CARD, 0)
        uvm = mock.real("/dev/nvidia-uvm")
        uvm.unlink()

        async with watching() as seen:

            def numbers() -> list[tuple[Role, int]]:
                nodes = seen.records[CARD].nodes
                return [(one.role, one.major) for one in nodes if one.path == "/dev/nvidia-uvm"]

            assert seen.records[CARD].obstacle is Obstacle.NONE
            assert numbers() == []
            mock.node("nvidia-uvm", "508:0", 0o666)
            await seen.until(lambda _: numbers() == [(Role.CONTROL, 508)], "the node")
            # the module loaded anew: another major
            devices = mock.real("/proc/devices").read_text()
            mock.file("/proc/devices", devices.replace("508 nvidia-uvm", "507 nvidia-uvm"))
            mock.node("nvidia-uvm", "507:0", 0o666)
            await seen.until(lambda _: numbers() == [(Role.CONTROL, 507)], "the node under its new number")
            # who may open it is no news of what it is
            count = len(seen.events)
            uvm.chmod(0o600)
            mock.node("nvidia-uvm-tools", "507:1", 0o666)
            await seen.until(lambda _: len(seen.events) > count, "the other node")
            uvm.unlink()
            await seen.until(lambda _: numbers() == [], "the end of the node")
            assert seen.records[CARD].obstacle is Obstacle.NONE

    with bed() as mock:
        asyncio.run(body(mock))
