"""First figures: what the agent costs, against what its library and bus cost without it.

Starts a private bus, an agent with file-backed devices, and the yardstick (bench/echo.py), measures,
prints one table, and ends with status 0 whatever the verdicts: docs/bench.md says how to read them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dbus_next import Message, MessageType, Variant
from dbus_next.aio import MessageBus
from gi.repository import Gio

from bench import echo, health, holders, start
from hetero_agent import names
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.console import DEVICE_ID, PROFILE, SYSFS
from tests.support.process import PYTHON, ROOT
from tests.support.vendor import RESOURCE, Vendor

PROPERTIES = "org.freedesktop.DBus.Properties"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"

FEW = 8


@dataclass
class Row:
    """One line of the table; AIM is the most that VALUE may be."""

    what: str
    value: float
    aim: float
    unit: str
    remark: str = ""

    @property
    def verdict(self) -> str:
        return "ok" if self.value <= self.aim else "OVER"


@dataclass
class Figures:
    """What one agent with COUNT devices showed.  Times in milliseconds, memory in MiB."""

    count: int
    calls: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    signal: list[float] = field(default_factory=list)
    memory: float = 0
    helpers: float = 0
    idle: float = 0
    objects: float = 0
    marshalling: float = 0
    run: float = 0


class BenchClient:
    """The one client of both services: dbus-next, as bare as it goes."""

    def __init__(self, bus: MessageBus) -> None:
        self.bus = bus

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, address: str) -> AsyncIterator[BenchClient]:
        bus = await MessageBus(bus_address=address).connect()
        try:
            yield cls(bus)
        finally:
            bus.disconnect()

    async def call(  # the same code for the agent and for the yardstick
        self, to: tuple[str, str, str], member: str, signature: str = "", *body: Any
    ) -> Message:
        reply = await self.bus.call(
            Message(
                destination=to[0],
                path=to[1],
                interface=to[2],
                member=member,
                signature=signature,
                body=list(body),
            )
        )
        if reply.message_type is MessageType.ERROR:
            raise RuntimeError(f"{member}: {reply.error_name}: {reply.body}")
        return reply

    async def state(self, path: str) -> str:
        reply = await self.call((names.BUS_NAME, path, PROPERTIES), "Get", "ss", names.DEVICE, "State")
        return str(reply.body[0].value)

    async def wait_state(self, path: str, state: str, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while await self.state(path) != state:
            if time.monotonic() > end:
                raise RuntimeError(f"{path} did not become {state}")
            await asyncio.sleep(0.01)


MANAGER = (names.BUS_NAME, names.ROOT, names.MANAGER)
ECHO = (echo.NAME, echo.PATH, echo.NAME)


async def triple(
    client: BenchClient, to: tuple[str, str, str], tag: str, lease: str = ""
) -> tuple[float, list[Message]]:
    """Allocate, Confirm, Release; return the milliseconds and the replies."""
    start = time.perf_counter()
    first = await client.call(to, "Allocate", "ssua{sv}", tag, RESOURCE, 1, {"client": Variant("s", "bench")})
    path = lease or first.body[0]
    second = await client.call(to, "Confirm", "soa{sv}", tag, path, {"ttl": Variant("t", 60_000_000)})
    third = await client.call(to, "Release", "so", tag, path)
    return (time.perf_counter() - start) * 1000, [first, second, third]


async def latency(client: BenchClient, figures: Figures, rounds: int) -> None:
    """Measure the three calls and the bare ones, in turns, each once the agent is at rest."""
    for number in range(rounds + 5):
        took, replies = await triple(client, MANAGER, f"bench-{number}")
        device = names.device_path(replies[0].body[1]["devices"].value[0])
        await client.wait_state(device, "idle")
        if number == 0:
            for member, reply in zip(("Allocate", "Confirm", "Release"), replies, strict=True):
                if reply.body:
                    body = Variant(f"({reply.signature})", reply.body)
                    await client.call(ECHO, "Teach", "ssv", member, reply.signature, body)
        bare, _ = await triple(client, ECHO, f"bench-{number}", replies[0].body[0])
        if number >= 5:  # the first warm caches on both sides
            figures.calls.append(took)
            figures.bare.append(bare)


async def uevent_to_signal(client: BenchClient, figures: Figures, rounds: int) -> None:
    """Change a real device in sysfs, have the kernel send the uevent, wait for PropertiesChanged."""
    path = names.device_path(DEVICE_ID)
    await client.wait_state(path, "idle")
    await client.call(
        ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus"),
        "AddMatch",
        "s",
        f"type='signal',sender='{names.BUS_NAME}',path='{path}',interface='{PROPERTIES}'",
    )
    came = asyncio.Event()

    def handle(message: Message) -> None:
        if message.path == path and message.member == "PropertiesChanged" and "Attributes" in message.body[1]:
            came.set()

    client.bus.add_message_handler(handle)
    policy = SYSFS / "power" / "control"
    before = policy.read_text().strip()
    value = before
    try:
        for _ in range(rounds):
            await asyncio.sleep(0.05)
            came.clear()
            value = "on" if value == "auto" else "auto"
            policy.write_text(value)
            start = time.perf_counter()
            (SYSFS / "uevent").write_text("change")
            await asyncio.wait_for(came.wait(), 10)
            figures.signal.append((time.perf_counter() - start) * 1000)
    finally:
        policy.write_text(before)
        client.bus.remove_message_handler(handle)


async def objects(client: BenchClient, address: str, figures: Figures) -> None:
    """GetManagedObjects as a client in C sees it, against marshalling the same body once."""
    connection = Gio.DBusConnection.new_for_address_sync(
        address,
        Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION,
        None,
        None,
    )
    took = []
    for _ in range(3):
        start = time.perf_counter()
        connection.call_sync(
            names.BUS_NAME, names.ROOT, OBJECT_MANAGER, "GetManagedObjects", None, None, 0, 60_000, None
        )
        took.append((time.perf_counter() - start) * 1000)
    connection.close_sync(None)
    figures.objects = min(took)
    reply = await client.call((names.BUS_NAME, names.ROOT, OBJECT_MANAGER), "GetManagedObjects")
    marshalled = []
    for _ in range(3):
        again = Message(
            destination=":1.1",
            message_type=MessageType.METHOD_RETURN,
            reply_serial=1,
            signature=reply.signature,
            body=reply.body,
        )
        start = time.perf_counter()
        again._marshall()
        marshalled.append((time.perf_counter() - start) * 1000)
    figures.marshalling = min(marshalled)


def tree(pid: int) -> list[int]:
    """PID and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def memory(pids: list[int]) -> float:
    """Resident memory of the processes, added up, in MiB."""
    total = 0
    for one in pids:
        for line in Path(f"/proc/{one}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return total / 1024


def cpu(pid: int) -> float:
    """CPU seconds of the process, its ended and its living children so far."""
    ticks = 0
    for one in tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_overhead(bus: PrivateBus) -> float:
    """What ``heteroctl run`` adds to the bare command, in milliseconds (medians of 7)."""
    env = {**os.environ, names.BUS_ADDRESS_VARIABLE: bus.address}

    def median(command: list[str]) -> float:
        took = []
        for _ in range(7):
            start = time.perf_counter()
            subprocess.run(command, env=env, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
            took.append((time.perf_counter() - start) * 1000)
            time.sleep(0.3)
        return statistics.median(took)

    ours = [PYTHON, "-m", "hetero_agent.cli.main", "run", "-r", RESOURCE, "--", "/bin/true"]
    return median(ours) - median(["/bin/true"])


@contextlib.contextmanager
def yardstick(bus: PrivateBus) -> Iterator[None]:
    with subprocess.Popen(
        [PYTHON, str(ROOT / "bench" / "echo.py"), bus.address], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the yardstick did not start")
            yield
        finally:
            process.terminate()


def measure(count: int, rounds: int, idle: float) -> Figures:
    """Start everything anew with COUNT virtual devices and measure."""
    figures = Figures(count)
    bus = PrivateBus(extra=echo.POLICY)
    config = CONFIG.replace('log-level = "debug"', 'log-level = "info"').replace("occupied-after = 0.3", "")
    agent = AgentProcess(bus, config=config, profiles={"console.toml": PROFILE}, sources="kernel", watchdog=60)
    try:
        agent.start()
        with Vendor(agent) as vendor, yardstick(bus):
            vendor.add(*(f"npu-{number:04}" for number in range(count)))
            vendor.client.wait_for_device(f"npu-{count - 1:04}", timeout=120, State="idle")
            vendor.client.wait_for_device("npu-0000", timeout=120, State="idle")

            async def calls() -> None:
                async with BenchClient.connected(bus.address) as client:
                    await latency(client, figures, rounds)
                    if count == FEW:
                        await uevent_to_signal(client, figures, 50)
                    await objects(client, bus.address, figures)

            asyncio.run(calls())
            figures.memory = memory([agent.pid])
            figures.helpers = memory(tree(agent.pid)[1:])
            if idle:
                figures.run = run_overhead(bus)
                time.sleep(3)  # let what the measurements set off come to rest
                before, start = cpu(agent.pid), time.monotonic()
                time.sleep(idle)
                figures.idle = (cpu(agent.pid) - before) / (time.monotonic() - start) * 100
    finally:
        agent.close()
        bus.close()
    return figures


def table(few: Figures, many: Figures, idle: float) -> list[Row]:
    median = statistics.median
    ours, bare = median(few.calls), median(few.bare)
    marshalling = f"{many.objects:.0f} ms against {many.marshalling:.0f} ms"
    helpers = "and {:.0f} MiB in its scan worker"
    growth = f"{median(many.calls):.2f} ms against {ours:.2f} ms"
    return [
        Row(
            "Allocate+Confirm+Release / three bare echoes",
            ours / bare,
            2.0,
            "x",
            f"{ours:.2f} ms against {bare:.2f} ms",
        ),
        Row(f"the same calls, {FEW} -> {many.count} devices", median(many.calls) / ours, 1.3, "x", growth),
        Row(
            f"GetManagedObjects of {many.count} / marshalling it",
            many.objects / many.marshalling,
            1.5,
            "x",
            marshalling,
        ),
        Row(
            "uevent -> PropertiesChanged, p50",
            median(few.signal),
            10,
            "ms",
            f"worst of 50: {max(few.signal):.1f} ms",
        ),
        Row(f"memory (RSS), {FEW} devices", few.memory, 40, "MiB", helpers.format(few.helpers)),
        Row(f"memory (RSS), {many.count} devices", many.memory, 90, "MiB", helpers.format(many.helpers)),
        Row(f"idle CPU, {FEW} devices", few.idle, 0.2, "%", f"of one core over {idle:.0f} s"),
        Row("heteroctl run / the bare command", few.run, 150, "ms", "added, median"),
    ]


def health_rows(many: int) -> list[Row]:
    """What looking after devices takes; within how much of the interval all of them are probed."""
    rows = []
    for count, aim in ((FEW, 20), (256, 500), (many, 5000)):
        took = health.round_of(count)
        rows.append(Row(f"health round, {count} devices", took, aim, "ms", f"{took / count:.2f} ms a device"))
    lines = health.line_to_bus()
    if lines:
        remark = f"worst of {len(lines)}: {max(lines):.0f} ms"
        rows.append(
            Row("kernel message -> faulty on the bus, p50", statistics.median(lines), 100, "ms", remark)
        )
    return rows


def holder_rows(crowd: int) -> list[Row]:
    """What looking for holders takes among up to CROWD processes, and how soon a device is free."""
    rows = []
    for processes, files, devices, aim in (
        (crowd // 10, 0, FEW, 250),
        (crowd // 10, 0, 4096, 300),
        (crowd // 2, 26, FEW, 2000),
        (crowd, 0, FEW, 2000),
    ):
        took = holders.scan_of(processes, files, devices)
        each = f" of {files} files" if files else ""
        what = f"holder scan, {processes} processes{each}, {devices} devices"
        rows.append(Row(what, took, aim, "ms", f"{took / processes * 1000:.0f} us a process"))
    closes = holders.last_close_to_idle()
    remark = f"worst of {len(closes)}: {max(closes):.0f} ms"
    return [*rows, Row("last close -> idle on the bus, p50", statistics.median(closes), 100, "ms", remark)]


def start_rows(many: int) -> list[Row]:
    """How soon the agent is there again over what it left."""
    took = start.ready(many)
    return [Row(f"start -> READY, {many} devices, full history", took, 2000, "ms", "median of 3")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the agent against its aims.")
    parser.add_argument("--rounds", type=int, default=100, help="grants to time at each size (100)")
    parser.add_argument("--idle", type=float, default=60, help="seconds of rest for idle CPU (60)")
    parser.add_argument("--many", type=int, default=4096, help="devices of the large size (4096)")
    parser.add_argument("--crowd", type=int, default=10_000, help="processes among which is looked (10000)")
    given = parser.parse_args()
    print(f"Linux {platform.release()}, Python {platform.python_version()}, {os.cpu_count()} CPUs", flush=True)
    few = measure(FEW, given.rounds, given.idle)
    many = measure(given.many, given.rounds, 0)
    print(f"\n{'what':<56} {'measured':>12} {'aim':>10}  verdict")
    rows = [*table(few, many, given.idle), *start_rows(given.many)]
    for row in (*rows, *health_rows(given.many), *holder_rows(given.crowd)):
        value, aim = f"{row.value:.2f} {row.unit}", f"<= {row.aim:g} {row.unit}"
        print(f"{row.what:<56} {value:>12} {aim:>10}  {row.verdict:<7} {row.remark}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
