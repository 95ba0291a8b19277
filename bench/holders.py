"""What looking for holders takes, and how soon a device is free after its last close."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from dbus_next import Message
from dbus_next.aio import MessageBus

from hetero_agent import names
from hetero_agent.core.events import Event, Scanned
from hetero_agent.core.model import Node, Role
from hetero_agent.engine import instant
from hetero_agent.holders.edge import HolderEdge
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.crowd import Crowd
from tests.support.process import PYTHON
from tests.support.vendor import RESOURCE, Vendor

# Opens argv[1]; at a line it closes it and says when (CLOCK_MONOTONIC, ns).
_HOLD = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
print("open", flush=True)
sys.stdin.readline()
now = time.monotonic_ns()
os.close(fd)
print(now, flush=True)
sys.stdin.readline()
"""


def scan_of(processes: int, descriptors: int, devices: int) -> float:
    """Milliseconds from the request of a scan for DEVICES to its result, with PROCESSES more on the
    host, each with DESCRIPTORS open files; the median of five."""

    async def run() -> float:
        events: list[Event] = []
        edge = HolderEdge(events.append, instant, set, _no_service)
        await edge.start()
        try:
            with tempfile.TemporaryDirectory() as directory:
                targets = {str(one): (_node(Path(directory, str(one))),) for one in range(devices)}
                took = []
                for _ in range(5):
                    before, start = len(events), time.perf_counter()
                    edge.request_scan(targets)
                    while not any(isinstance(one, Scanned) for one in events[before:]):
                        await asyncio.sleep(0.001)
                    took.append((time.perf_counter() - start) * 1000)
        finally:
            await edge.stop()
        return statistics.median(took)

    with Crowd(processes, descriptors):
        return asyncio.run(run())


async def _no_service(_: str) -> int:
    return 0


def _node(path: Path) -> Node:
    path.touch()
    found = path.stat()
    return Node(str(path), Role.OWN, "file", fsdev=found.st_dev, inode=found.st_ino)


def last_close_to_idle(rounds: int = 30) -> list[float]:
    """Milliseconds from the last close of a released device to the arrival of its StateChanged to
    idle at a client."""
    bus = PrivateBus()
    config = CONFIG.replace('log-level = "debug"', 'log-level = "info"')
    agent = AgentProcess(bus, config=config)
    try:
        agent.start()
        with Vendor(agent) as vendor, Client(bus, listen=False) as client:
            vendor.add(*(f"npu-{number}" for number in range(8)))
            vendor.wait_idle()
            return asyncio.run(_last_closes(bus, vendor, client, rounds))
    finally:
        agent.close()
        bus.close()


async def _last_closes(bus: PrivateBus, vendor: Vendor, client: Client, rounds: int) -> list[float]:
    listener = await MessageBus(bus_address=bus.address).connect()
    path = names.device_path("npu-0")
    arrived: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    def handle(message: Message) -> None:
        if message.path == path and message.member == "StateChanged":
            arrived.put_nowait((message.body[1], time.monotonic_ns()))

    listener.add_message_handler(handle)
    rule = f"type='signal',sender='{names.BUS_NAME}',path='{path}',interface='{names.DEVICE}'"
    driver = "org.freedesktop.DBus"
    await listener.call(
        Message(
            destination=driver,
            path="/org/freedesktop/DBus",
            interface=driver,
            member="AddMatch",
            signature="s",
            body=[rule],
        )
    )
    took = []
    try:
        for number in range(rounds):
            options = {"confirm": V("b", True), "devices": V("as", ["npu-0"])}
            lease, _ = client.allocate(f"a{number}", RESOURCE, 1, options)
            with subprocess.Popen(
                [PYTHON, "-ISc", _HOLD, str(vendor.file("npu-0"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as holder:
                assert holder.stdin is not None
                assert holder.stdout is not None
                holder.stdout.readline()
                client.release(f"r{number}", lease)
                await _until(arrived, "reclaiming")
                await asyncio.sleep(0.3)  # seen by the first look, so that only the close has it looked at
                holder.stdin.write("close\n")
                holder.stdin.flush()
                closed = int(holder.stdout.readline())
                took.append((await _until(arrived, "idle") - closed) / 1e6)
                holder.stdin.close()
    finally:
        listener.disconnect()
    return took


async def _until(arrived: asyncio.Queue[tuple[str, int]], state: str) -> int:
    while True:
        came, at = await asyncio.wait_for(arrived.get(), 10)
        if came == state:
            return at
