"""The agent's bus side in this process: the real service, engine and governor on a private bus,
with devices that a test makes up and nobody looking for holders."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hetero_agent.bus.service import BusService
from hetero_agent.config import AgentTable, Config, ControlPlanesTable, LimitsTable, ProviderTable
from hetero_agent.core.effects import Changes, Restored, Terminate
from hetero_agent.core.events import DeviceScan, Event, Observed, Scanned
from hetero_agent.core.governor import Governor
from hetero_agent.core.model import Binding, Cordon, DeviceRecord, Holder, Node
from hetero_agent.core.ports import NodeAccess
from hetero_agent.core.settings import Settings
from hetero_agent.engine import Engine, instant
from hetero_agent.holders.process import identify
from hetero_agent.providers.registry import Registry
from hetero_agent.store.ledger import SqliteLedger
from tests.support.agent import GROUP
from tests.support.bus import PrivateBus

T = TypeVar("T")

#: The uid of the control plane and of the provider in `CONFIG`.
CONTROL_PLANE = 13
PROVIDER = 10

CONFIG = Config(
    agent=AgentTable(group=GROUP),
    control_planes=ControlPlanesTable(uids=(CONTROL_PLANE,)),
    providers={"sim": ProviderTable(uid=PROVIDER, resources=("example.com/npu",))},
)

RESOURCE = "example.com/gpu"


def record(number: int, **more: Any) -> DeviceRecord:
    """A device without nodes, which therefore nobody can hold."""
    return DeviceRecord(id=f"0000:{number >> 8:02x}:{number & 0xFF:02x}.0", resource=RESOURCE, **more)


class _Lasting:
    def store_cordon(self, device: str, cordon: Cordon | None, done: Callable[[str], None]) -> None:
        asyncio.get_running_loop().call_soon(done, "")

    def note(self, changes: Changes) -> None:
        pass

    def close(self) -> None:
        pass


class _Health:
    def watch(self, device: str, record: DeviceRecord | None, repaired: bool) -> None:
        return None


class _Exposure:
    async def look(self, device: str) -> list[NodeAccess]:
        return [NodeAccess("/dev/null", "own", 0o640, 0, 44, {1000: "rw-"}, (("wrong", "user 1000"),))]


class _Access:
    async def prepare(self, lease: Any, records: Sequence[DeviceRecord]) -> dict[str, object]:
        return {
            "version": 1,
            "lease": lease.id,
            "resource": lease.resource,
            "devices": list(lease.devices),
            "nodes": [[lease.devices[0], "/dev/null", "own", "char", 1, 3]],
            "mounts": [["/usr/lib/x", "/usr/lib/x", "ro"]],
            "env": {"VISIBLE": ",".join(lease.devices)},
            "groups": [44],
        }

    async def revoke(self, lease: str) -> None:
        pass


class _Holders:
    def __init__(self, service: Service) -> None:
        self._service = service
        self.held: dict[str, tuple[Holder, ...]] = {}

    def request_scan(self, targets: dict[str, tuple[Node, ...]]) -> None:
        now = instant()
        found = {device: DeviceScan(self.held.get(device, ())) for device in targets}
        asyncio.get_running_loop().call_soon(self._service.engine.submit, Scanned(now, now.boot, found))

    def watch_nodes(self, device: str, record: DeviceRecord | None) -> None:
        pass

    def watch_process(self, lease: str, binding: Binding) -> None:
        pass

    def unwatch_process(self, lease: str) -> None:
        pass

    def terminate(self, order: Terminate, nodes: tuple[Node, ...]) -> None:
        pass


class Service:
    """The service on BUS, in a thread with a loop of its own; `run` and `do` reach into it."""

    def __init__(self, bus: PrivateBus, config: Config = CONFIG, devices: Sequence[DeviceRecord] = ()) -> None:
        self.bus = bus
        self.config = config
        self.levels: list[str] = []
        self.events: list[Event] = []
        self.engine: Engine
        self.service: BusService
        self.holders: _Holders
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.run(self._start(devices))
        except BaseException:
            self._end()
            raise

    async def _start(self, devices: Sequence[DeviceRecord]) -> None:
        limits = self.config.limits
        settings = Settings(leases=limits.leases, confirm_within=30_000_000)
        ledger = SqliteLedger(self.bus.directory / f"ledger-{id(self)}.sqlite", instant)
        ledger.load(instant())
        self.engine = Engine(Governor(settings, "e1"), ledger, _Lasting())
        self.holders = _Holders(self)
        submit = self.engine.submit

        def spy(event: Event) -> None:
            self.events.append(event)
            submit(event)

        self.engine.submit = spy  # type: ignore[method-assign]
        registry = Registry(
            self.config.providers,
            limits,
            self.engine.submit,
            instant,
            "e1",
            self._source,
        )
        self.service = BusService(self.config, self.engine, identify, registry, _Exposure(), self.levels.append)
        await self.service.connect(self.bus.address)
        self.engine.attach(
            access=_Access(),
            holders=self.holders,
            health=_Health(),
            owners=self.service.owners,
            publisher=self.service.publisher,
            effects_timeout=10,
            scan_interval=3600,
        )
        self.engine.start(Restored())
        if devices:
            self.observe(*devices)
        await self.service.request_name()
        self.service.publisher.start()

    def _source(self, device: str) -> str:
        found = self.engine.view.find_device(device)
        return found.record.source if found is not None else ""

    def observe(self, *records: DeviceRecord, gone: Sequence[str] = (), source: str = "kernel") -> None:
        """Hand the engine what a source sees, and that nobody holds it (on the loop)."""
        self.engine.submit(Observed(instant(), source, records, tuple(gone), complete=True))
        now = instant()
        scans = {one.id: DeviceScan(self.holders.held.get(one.id, ())) for one in records}
        self.engine.submit(Scanned(now, now.boot, scans))

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 30) -> T:
        """Run a coroutine on the service's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def do(self, function: Callable[..., T], *arguments: Any, **more: Any) -> T:
        """Call a function on the service's loop and return its result."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            try:
                done.set_result(function(*arguments, **more))
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(work)
        return done.result(30)

    def hold(self, device: str, *holders: Holder) -> None:
        """Have a device's record say that these processes hold it (on no node: for reading only)."""

        def put() -> None:
            world = self.engine.governor.world
            world.devices[device] = replace(world.devices[device], holders=holders)

        self.do(put)

    def close(self) -> None:
        """Leave the bus and end the thread."""

        async def stop() -> None:
            self.service.close()
            await self.engine.stop()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.engine.ledger.close()

        self.run(stop())
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def with_limits(**limits: int) -> Config:
    """The configuration with other limits."""
    return replace(CONFIG, limits=replace(LimitsTable(), **limits))
