"""What looking after devices costs: rounds of probes, and from the kernel's message to the bus."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dbus_next import Message
from dbus_next.aio import MessageBus

from hetero_agent import names
from hetero_agent.config import HealthTable
from hetero_agent.core.events import Event, HealthJudged
from hetero_agent.core.model import DeviceRecord
from hetero_agent.core.symptoms import Symptoms
from hetero_agent.engine import instant
from hetero_agent.health.edge import HealthEdge
from tests.support import kmsg
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE

#: What sysfs has of a card, as far as the probes that every profile has read it.
_FILES = {
    "power/runtime_status": "active",
    "power/control": "on",
    "power_state": "D0",
    "config": "x",
    "current_link_width": "16",
    "max_link_width": "16",
    "aer_dev_correctable": "RxErr 0\nTOTAL_ERR_COR 0",
    "aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 0",
    "aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0",
    "hwmon/hwmon0/temp1_input": "41000",
    "hwmon/hwmon0/temp1_crit": "95000",
}


def _card(top: Path, number: int) -> DeviceRecord:
    path = top / f"0000:{number // 32:02x}:{number % 32:02x}.0"
    for name, text in _FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text + "\n")
    return DeviceRecord(path.name, "example.com/npu", path=str(path), profile="bench")


def round_of(count: int) -> float:
    """Milliseconds for one probe of each of COUNT devices by a worker that runs already: the median
    of five rounds."""

    async def run(top: Path) -> float:
        seen: set[str] = set()
        done = asyncio.Event()

        def take(event: Event) -> None:
            if isinstance(event, HealthJudged):
                seen.update(event.opinions)
            if len(seen) == count:
                done.set()

        table = HealthTable(interval=600, kernel_log="off")
        edge = HealthEdge(table, top, take, instant, lambda _: None)
        edge.listen({"bench": Symptoms()})
        cards = [_card(top, number) for number in range(count)]
        took = []
        for _ in range(6):
            for card in cards:
                edge.watch(card.id, None, False)
            seen.clear()
            done.clear()
            begun = time.perf_counter()
            for card in cards:
                edge.watch(card.id, card, False)
            await asyncio.wait_for(done.wait(), 60)
            took.append((time.perf_counter() - begun) * 1000)
        await edge.stop()
        return statistics.median(took[1:])  # the first one starts the worker

    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(run(Path(directory)))


def line_to_bus(times: int = 20) -> Sequence[float]:
    """Milliseconds from a line in the real /dev/kmsg to the StateChanged of a console that becomes
    faulty by it; none where no line can be written there."""
    if not kmsg.real_is_writable():
        return ()
    word = f"hetero-agent bench {time.time_ns()}"
    rules = "".join(
        f"\n[[kernel-log]]\npattern = '{word}: (?P<name>tty\\d+): {text}'\nclass = \"{fault}\"\n"
        for text, fault in (("error", "fatal"), ("well", "recovered"))
    )
    bus = PrivateBus()
    config = CONFIG.replace('log-level = "debug"', 'log-level = "info"') + "\n[health]\nconfirm = 0.05\n"
    agent = AgentProcess(bus, config=config, profiles={"console.toml": PROFILE + rules}, sources="kernel")
    try:
        agent.start()
        with Client(bus) as client:
            client.wait_for_device(DEVICE_ID, State="idle")
            agent.wait_for_log("kernel messages are read from")
            return asyncio.run(_line_to_bus(bus, client, word, times))
    finally:
        agent.close()
        bus.close()


async def _line_to_bus(bus: PrivateBus, client: Client, word: str, times: int) -> list[float]:
    came = asyncio.Event()
    listener = await MessageBus(bus_address=bus.address).connect()
    path = names.device_path(DEVICE_ID)

    def hear(message: object) -> None:
        if getattr(message, "member", "") == "StateChanged" and getattr(message, "body", [""])[1] == "faulty":
            came.set()

    listener.add_message_handler(hear)
    await listener.call(_match(path))
    took = []
    for _ in range(times):
        came.clear()
        begun = time.perf_counter()
        kmsg.say_real(f"{word}: {CONSOLE.name}: error")
        await asyncio.wait_for(came.wait(), 20)
        took.append((time.perf_counter() - begun) * 1000)
        kmsg.say_real(f"{word}: {CONSOLE.name}: well")
        await asyncio.to_thread(client.wait_for_device, DEVICE_ID, 60, State="idle")
    listener.disconnect()
    return took


def _match(path: str) -> Message:
    rule = f"type='signal',sender='{names.BUS_NAME}',path='{path}',member='StateChanged'"
    bus = "org.freedesktop.DBus"
    return Message(bus, "/org/freedesktop/DBus", bus, "AddMatch", signature="s", body=[rule])
