"""The providers' sessions: who may, whole lists in pages, versions, retries, grace."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_agent.config import Config, LimitsTable, ProviderTable
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.events import Event, HealthSeen, Observed, ProviderGone
from hetero_agent.core.model import Actor, DeviceRecord, Health, Instant, Obstacle, Role
from hetero_agent.providers import registry as module
from hetero_agent.providers.registry import Registry
from tests.support.timing import Stalls
from tests.support.wait import wait_until_async

ROOT = Actor(uid=0)
BUS = ":1.5"


class Bench:
    """A registry with provider ``npu`` (uid 990) whose directory is DIRECTORY, and what it submits."""

    def __init__(self, directory: Path, **limits: int) -> None:
        self.directory = directory
        self.events: list[Event] = []
        self.owners: dict[str, str] = {"0000:3b:00.0": "kernel"}
        self.tables = {
            "npu": ProviderTable(
                uid=990,
                resources=("example.com/npu", "example.com/npu.part"),
                directory=str(directory),
                grace=0.05,
            ),
            "other": ProviderTable(uid=991, directory=str(directory), grace=30),
        }
        self.registry = Registry(
            self.tables,
            LimitsTable(**limits),
            self.events.append,
            lambda: Instant(1, 2),
            "epoch-1",
            lambda name: self.owners.get(name, ""),
        )
        self.requests = 0

    def device(self, name: str, **more: Any) -> dict[str, Any]:
        path = self.directory / name
        path.touch()
        return {"id": name, "resource": "example.com/npu", "nodes": [[str(path), "own"]], **more}

    async def report(
        self,
        version: int,
        *devices: dict[str, Any],
        page: int = 0,
        pages: int = 1,
        bus_name: str = BUS,
        request: str = "",
        actor: Actor = ROOT,
    ) -> dict[str, Any]:
        self.requests += 1
        return await self.registry.report_devices(
            actor, bus_name, request or f"r{self.requests}", version, page, pages, list(devices)
        )

    def observed(self) -> list[Observed]:
        return [event for event in self.events if isinstance(event, Observed)]


def run(body: Callable[[Bench], Awaitable[None]], tmp_path: Path, register: bool = True, **limits: int) -> None:
    async def whole() -> None:
        bench = Bench(tmp_path, **limits)
        if register:
            await bench.registry.register(ROOT, BUS, "npu", 1, {})
        try:
            await asyncio.wait_for(body(bench), 60)
        finally:
            bench.registry.close()

    asyncio.run(whole())


async def refused(call: Awaitable[object], kind: ErrorKind, text: str) -> None:
    with pytest.raises(Refusal) as caught:
        await call
    assert caught.value.kind is kind
    assert text in caught.value.text


def test_registering(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        registry = bench.registry
        assert await registry.register(ROOT, BUS, "npu", 1, {}) == {
            "protocol-version": 1,
            "epoch": "epoch-1",
            "page-size": 64,
            "grace": 50_000,
        }
        assert registry.usage() == {"providers": 1}
        await refused(
            registry.register(ROOT, ":1.6", "ghost", 1, {}), ErrorKind.NOT_AUTHORIZED, "[providers.ghost]"
        )
        await refused(
            registry.register(Actor(uid=1000), ":1.6", "other", 1, {}),
            ErrorKind.NOT_AUTHORIZED,
            "provider other is for uid 991 and root, not for uid 1000",
        )
        await refused(
            registry.register(ROOT, ":1.6", "other", 2, {}),
            ErrorKind.PROTOCOL_UNSUPPORTED,
            "protocol version 2 is not spoken here; this agent speaks 1 to 1",
        )
        await refused(
            registry.register(ROOT, ":1.6", "other", 1, {"push": True}),
            ErrorKind.INVALID_ARGUMENT,
            "unknown option push",
        )
        # once more on the same connection is a retry; from another one it is a second provider
        await registry.register(Actor(uid=990), BUS, "npu", 1, {})
        await refused(
            registry.register(ROOT, ":1.6", "npu", 1, {}),
            ErrorKind.LIMIT_EXCEEDED,
            "provider npu is connected already as :1.5",
        )
        await refused(
            registry.register(ROOT, BUS, "other", 1, {}),
            ErrorKind.INVALID_ARGUMENT,
            "this connection is provider npu already",
        )
        registry.connection_lost(BUS)
        assert registry.usage() == {"providers": 0}
        await registry.register(Actor(uid=990), ":1.6", "npu", 1, {})
        assert registry.usage() == {"providers": 1}
        assert bench.events == []

    run(body, tmp_path)


def test_the_number_of_providers_is_limited(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await refused(
            bench.registry.register(ROOT, ":1.6", "other", 1, {}), ErrorKind.LIMIT_EXCEEDED, "the most allowed"
        )

    run(body, tmp_path, providers=1)


def test_who_may_provide(tmp_path: Path) -> None:
    registry = Bench(tmp_path).registry
    assert registry.may_provide(0, "npu")
    assert registry.may_provide(990, "npu")
    assert not registry.may_provide(991, "npu")
    assert not registry.may_provide(0, "ghost")


def test_a_list_becomes_records(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        device = bench.device(
            "n0",
            vendor="Example",
            serial="SN0",
            aliases=["SN0"],
            attributes={"memory-total": 5},
            env={"NPU": "0"},
            health="healthy",
            **{"numa-nodes": [1]},
        )
        assert await bench.report(7, device) == {"accepted": True, "version": 7, "reason": ""}
        (event,) = bench.observed()
        (record,) = event.records
        assert event.source == "npu"
        assert event.complete
        assert event.gone == ()
        (node,) = record.nodes
        assert (node.path, node.role, node.kind) == (str(tmp_path / "n0"), Role.OWN, "file")
        assert node.inode == (tmp_path / "n0").stat().st_ino
        assert record == DeviceRecord(
            id="n0",
            resource="example.com/npu",
            source="npu",
            vendor="Example",
            serial="SN0",
            aliases=("SN0",),
            numa_nodes=(1,),
            nodes=(node,),
            attributes={"memory-total": 5},
            health=Health.HEALTHY,
            env={"NPU": "0"},
        )

    run(body, tmp_path)


def test_a_list_replaces_the_one_before(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        first = [bench.device(name) for name in ("a", "b", "c")]
        await bench.report(1, *first)
        await bench.report(2, first[0], bench.device("b", model="new"), bench.device("d"))
        event = bench.observed()[-1]
        assert [record.id for record in event.records] == ["b", "d"]
        assert event.gone == ("c",)
        assert not event.complete
        count = len(bench.events)
        answer = await bench.report(3, first[0], bench.device("b", model="new"), bench.device("d"))
        assert answer == {"accepted": True, "version": 3, "reason": ""}
        assert len(bench.events) == count
        await bench.report(4)
        assert set(bench.observed()[-1].gone) == {"a", "b", "d"}

    run(body, tmp_path)


def test_the_first_list_is_told_even_if_empty(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.report(1)
        assert bench.observed() == [Observed(Instant(1, 2), "npu", complete=True)]

    run(body, tmp_path)


def test_older_and_equal_versions_are_dropped_and_said_so(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.report(5, bench.device("a"))
        for version in (5, 4, 0):
            assert await bench.report(version) == {
                "accepted": False,
                "version": 5,
                "reason": f"version {version} is dropped: it is not newer than version 5",
            }
        assert len(bench.events) == 1
        # a new session counts anew
        bench.registry.connection_lost(BUS)
        await bench.registry.register(ROOT, ":1.6", "npu", 1, {})
        assert (await bench.report(1, bench.device("a"), bus_name=":1.6"))["accepted"]

    run(body, tmp_path)


def test_pages_are_assembled_in_any_order(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        assert await bench.report(1, bench.device("c"), page=2, pages=3) == {
            "accepted": True,
            "version": 0,
            "reason": "1 of 3 pages of version 1 are here",
        }
        await bench.report(1, bench.device("a"), page=0, pages=3)
        assert bench.events == []
        assert (await bench.report(1, bench.device("b"), page=1, pages=3))["version"] == 1
        assert [record.id for record in bench.observed()[0].records] == ["a", "b", "c"]

    run(body, tmp_path)


def test_a_newer_version_ends_an_unfinished_one(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.report(1, bench.device("a"), page=0, pages=2)
        await bench.report(2, bench.device("b"), page=0, pages=2)
        answer = await bench.report(1, bench.device("c"), page=1, pages=2)
        assert not answer["accepted"]
        await bench.report(2, bench.device("d"), page=1, pages=2)
        assert [record.id for record in bench.observed()[0].records] == ["b", "d"]

    run(body, tmp_path)


def test_a_refused_page_takes_its_version_with_it(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.report(1, bench.device("a"), page=0, pages=2)
        await refused(
            bench.report(1, {"id": "?"}, page=1, pages=2), ErrorKind.INVALID_ARGUMENT, "page 1, entry 0: id ?"
        )
        answer = await bench.report(1, bench.device("b"), page=1, pages=2)
        assert answer["reason"] == "1 of 2 pages of version 1 are here"
        assert bench.events == []
        await bench.report(1, bench.device("a"), page=0, pages=2)
        assert [record.id for record in bench.observed()[0].records] == ["a", "b"]

    run(body, tmp_path)


def test_impossible_pages(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        for page, pages in ((0, 0), (1, 1), (5, 2), (0, 11)):
            await refused(
                bench.report(1, page=page, pages=pages), ErrorKind.INVALID_ARGUMENT, f"page {page} of {pages}"
            )
        await bench.report(1, page=0, pages=2)
        await refused(
            bench.report(1, page=1, pages=3), ErrorKind.INVALID_ARGUMENT, "began with 2 pages and has 3"
        )
        await bench.report(2, *(bench.device(f"a{n}") for n in range(6)), page=0, pages=2)
        await refused(
            bench.report(2, *(bench.device(f"b{n}") for n in range(5)), page=1, pages=2),
            ErrorKind.LIMIT_EXCEEDED,
            "more than 10 devices",
        )
        assert bench.events == []

    run(body, tmp_path, devices_per_provider=10)


def test_lists_that_this_host_contradicts(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.owners |= {"taken": "kernel", "rented": "other"}
        table: list[tuple[dict[str, Any], str]] = [
            (bench.device("a", resource="example.com/gpu"), "resource example.com/gpu is not one of those"),
            (bench.device("taken"), "device taken: taken is a device of kernel already"),
            (bench.device("rented"), "rented is a device of other already"),
            (bench.device("a", aliases=["0000:3b:00.0"]), "0000:3b:00.0 is a device of kernel already"),
            (bench.device("a", parent="rented"), "parent rented is neither in the report nor known"),
            (bench.device("a", nodes=[["/dev/null", "own"]]), "is never a provider's node"),
            (bench.device("a", nodes=[["/etc/passwd", "own"]]), "lies outside"),
        ]
        for device, text in table:
            await refused(bench.report(1, bench.device("good"), device), ErrorKind.INVALID_ARGUMENT, text)
        assert bench.events == []
        part = bench.device("part", resource="example.com/npu.part", parent="0000:3b:00.0")
        assert (await bench.report(1, part))["accepted"]

    run(body, tmp_path)


def test_two_providers_can_not_have_one_device(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.registry.register(Actor(uid=991), ":1.6", "other", 1, {})
        await bench.report(1, bench.device("a"))
        await refused(
            bench.report(1, bench.device("a"), bus_name=":1.6", actor=Actor(uid=991)),
            ErrorKind.INVALID_ARGUMENT,
            "a is a device of npu already",
        )

    run(body, tmp_path)


def test_a_device_without_its_nodes_is_offline_not_refused(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        late = bench.device("late")
        (tmp_path / "late").unlink()
        bare = {"id": "bare", "resource": "example.com/npu"}
        control = bench.device("control")
        control["nodes"][0][1] = "control"
        answer = await bench.report(1, late, bare, control)
        assert answer["accepted"]
        assert answer["reason"].startswith(f"accepted, but 1 nodes do not exist, such as {tmp_path}/late")
        assert [record.obstacle for record in bench.observed()[0].records] == [Obstacle.NO_NODE] * 3
        (tmp_path / "late").touch()
        await bench.report(2, late, bare, control)
        (record,) = bench.observed()[1].records
        assert (record.id, record.obstacle) == ("late", Obstacle.NONE)

    run(body, tmp_path)


def test_health(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        registry = bench.registry
        await bench.report(1, bench.device("a"))
        assert bench.observed()[0].records[0].health is Health.UNKNOWN
        await registry.report_health(ROOT, BUS, "h1", "a", "unhealthy", "hot", {"celsius": 99})
        assert bench.events[-1] == HealthSeen(
            Instant(1, 2), "npu", "a", Health.UNHEALTHY, "hot", {"celsius": "99"}
        )
        # a list that says nothing of health leaves it; one that does changes it
        count = len(bench.events)
        await bench.report(2, bench.device("a"))
        assert len(bench.events) == count
        await bench.report(3, bench.device("a", health="healthy"))
        assert bench.observed()[-1].records[0].health is Health.HEALTHY
        assert bench.events[-1] == HealthSeen(Instant(1, 2), "npu", "a", Health.HEALTHY)
        await refused(
            registry.report_health(ROOT, BUS, "h2", "b", "healthy", "", {}),
            ErrorKind.NOT_FOUND,
            "b is not in the list",
        )
        await refused(
            registry.report_health(ROOT, BUS, "h3", "a", "ill", "", {}),
            ErrorKind.INVALID_ARGUMENT,
            "health: ill is none of",
        )

    run(body, tmp_path)


def test_strangers_report_nothing(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await refused(bench.report(1, bus_name=":1.9"), ErrorKind.NOT_AUTHORIZED, "call RegisterProvider first")
        await refused(
            bench.report(1, actor=Actor(uid=1000)), ErrorKind.NOT_AUTHORIZED, "call RegisterProvider first"
        )
        await refused(
            bench.registry.report_health(ROOT, ":1.9", "h", "a", "healthy", "", {}),
            ErrorKind.NOT_AUTHORIZED,
            "call RegisterProvider first",
        )

    run(body, tmp_path)


def test_retries(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        device = bench.device("a")
        first = await bench.report(1, device, request="same")
        assert await bench.report(1, device, request="same") == first
        assert first["accepted"]
        await refused(
            bench.report(2, device, request="same"), ErrorKind.REQUEST_CONFLICT, "request id same was used"
        )
        # many at once do it once
        answers = await asyncio.gather(*(bench.report(3, device, request="many") for _ in range(20)))
        assert answers == [{"accepted": True, "version": 3, "reason": ""}] * 20
        # a refusal is not remembered
        bad = bench.device("b", resource="example.com/wrong")
        await refused(bench.report(4, bad, request="again"), ErrorKind.INVALID_ARGUMENT, "resource")
        assert (await bench.report(4, bench.device("b"), request="again"))["accepted"]
        # the space of ids is the method's
        await bench.registry.report_health(ROOT, BUS, "same", "b", "healthy", "", {})
        await bench.registry.report_health(ROOT, BUS, "same", "b", "healthy", "", {})
        assert sum(isinstance(event, HealthSeen) for event in bench.events) == 1
        for request in ("", "x" * 129, "a\n"):
            await refused(
                bench.registry.report_health(ROOT, BUS, request, "b", "healthy", "", {}),
                ErrorKind.INVALID_ARGUMENT,
                "request_id: expected 1 to 128",
            )

    run(body, tmp_path)


def test_the_last_64_requests_are_remembered(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.report(1, bench.device("a"), request="r-first")
        for number in range(63):
            await bench.registry.report_health(ROOT, BUS, f"h{number}", "a", "healthy", "", {})
        assert (await bench.report(1, bench.device("a"), request="r-first"))["accepted"]
        await bench.registry.report_health(ROOT, BUS, "one more", "a", "healthy", "", {})
        assert not (await bench.report(1, bench.device("a"), request="r-first"))["accepted"]

    run(body, tmp_path)


def test_a_new_session_remembers_no_requests(tmp_path: Path) -> None:
    """A plugin that counts its requests from 1 starts with the ids of its last life."""

    async def body(bench: Bench) -> None:
        device = bench.device("a")
        await bench.report(1, device, request="1")
        bench.registry.connection_lost(BUS)
        await wait_until_async(
            lambda: bench.events[-1] == ProviderGone(Instant(1, 2), "npu"), what="the end of the grace time"
        )
        await bench.registry.register(ROOT, ":1.6", "npu", 1, {})
        assert (await bench.report(1, device, bus_name=":1.6", request="1"))["accepted"]
        assert ProviderGone(Instant(1, 2), "npu", back=True) in bench.events
        assert bench.observed()[-1].complete

    run(body, tmp_path)


def test_grace(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.report(1, bench.device("a"))
        bench.events.clear()
        bench.registry.connection_lost(":1.77")
        bench.registry.connection_lost(BUS)
        await refused(bench.report(2), ErrorKind.NOT_AUTHORIZED, "call RegisterProvider first")
        await wait_until_async(lambda: bench.events, what="ProviderGone")
        assert bench.events == [ProviderGone(Instant(1, 2), "npu")]
        # it is back with its list, not before; the list is told anew, and what went meanwhile is gone
        await bench.registry.register(ROOT, ":1.6", "npu", 1, {})
        assert bench.events[1:] == []
        await bench.report(1, bench.device("b"), bus_name=":1.6")
        assert bench.events[1] == ProviderGone(Instant(1, 2), "npu", back=True)
        (event,) = bench.events[2:]
        assert isinstance(event, Observed)
        assert ([record.id for record in event.records], event.gone, event.complete) == (["b"], ("a",), True)

    run(body, tmp_path)


def test_back_within_the_grace_time_is_no_news(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        # longer than a busy machine keeps this from the next line
        table = replace(bench.tables["npu"], grace=0.5)
        bench.registry.reload(Config(providers={"npu": table}))
        bench.registry.connection_lost(BUS)
        await bench.registry.register(ROOT, ":1.6", "npu", 1, {})
        await asyncio.sleep(1.0)  # twice the grace time
        assert bench.events == []

    run(body, tmp_path)


def test_devices_from_before_a_restart(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.registry.expect(
            [
                DeviceRecord("kept", "example.com/npu", "npu"),
                DeviceRecord("gone", "example.com/npu", "npu"),
                DeviceRecord("orphan", "example.com/x", "retired"),
                DeviceRecord("0000:3b:00.0", "nvidia.com/gpu", "kernel"),
            ]
        )
        assert bench.events == [Observed(Instant(1, 2), "retired", gone=("orphan",))]
        await wait_until_async(lambda: len(bench.events) > 1, what="ProviderGone")
        assert bench.events[1] == ProviderGone(Instant(1, 2), "npu")
        await bench.registry.register(ROOT, BUS, "npu", 1, {})
        await bench.report(1, bench.device("kept"))
        assert bench.observed()[-1].gone == ("gone",)

    run(body, tmp_path, register=False)


def test_reload(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.report(1, bench.device("a"))
        table = bench.tables["npu"]
        # another resource list counts from the next report on
        narrowed = ProviderTable(
            uid=990, resources=("example.com/else",), directory=table.directory, grace=0.05
        )
        bench.registry.reload(Config(providers={"npu": narrowed}))
        await refused(bench.report(2, bench.device("a")), ErrorKind.INVALID_ARGUMENT, "example.com/else")
        bench.events.clear()
        # a table that went takes its devices along
        bench.registry.reload(Config(providers={}))
        assert bench.events == [Observed(Instant(1, 2), "npu", gone=("a",))]
        assert bench.registry.usage() == {"providers": 0}
        await refused(bench.report(3), ErrorKind.NOT_AUTHORIZED, "call RegisterProvider first")

    run(body, tmp_path)


def test_reload_while_nodes_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking, seen = threading.Event(), threading.Event()
    real = module.nodes.inspect

    def slow(*arguments: Any) -> Any:
        looking.set()
        assert seen.wait(30)
        return real(*arguments)

    monkeypatch.setattr(module.nodes, "inspect", slow)

    async def body(bench: Bench) -> None:
        device = bench.device("a")
        first = asyncio.create_task(bench.report(1, device))
        await wait_until_async(looking.is_set, what="the look at the nodes")
        second = asyncio.create_task(bench.report(2, device))
        await asyncio.sleep(0)  # it waits for the first
        bench.registry.reload(Config(providers={}))
        seen.set()
        for one in (first, second):
            await refused(one, ErrorKind.NOT_AUTHORIZED, "the session ended meanwhile")
        assert bench.events == []

    run(body, tmp_path)


def test_reload_that_changes_the_uid_ends_the_session(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.registry.connection_lost(BUS)
        await bench.registry.register(Actor(uid=990), ":1.6", "npu", 1, {})
        bench.registry.reload(Config(providers={"npu": ProviderTable(uid=5, grace=0)}))
        await wait_until_async(lambda: bench.events, what="ProviderGone")
        assert bench.events == [ProviderGone(Instant(1, 2), "npu")]

    run(body, tmp_path)


def test_a_node_that_hangs_costs_this_provider_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is held in the real inspection by a FIFO: no sick driver is to be had here."""
    os.mkfifo(tmp_path / "fifo")
    real = module.nodes.inspect

    def sick(*arguments: Any) -> Any:
        with open(tmp_path / "fifo"):
            return real(*arguments)

    monkeypatch.setattr(module.nodes, "inspect", sick)
    monkeypatch.setattr(module, "INSPECTION_DEADLINE", 0.2)

    async def body(bench: Bench) -> None:
        device = bench.device("a")
        beginning = time.monotonic()
        await refused(bench.report(1, device), ErrorKind.TIMEOUT, "one of them hangs")
        # the next one waits for the same thread, and starts no second
        await refused(bench.report(1, device), ErrorKind.TIMEOUT, "one of them hangs")
        assert 0.4 <= time.monotonic() - beginning < 20
        assert bench.events == []
        monkeypatch.setattr(module.nodes, "inspect", real)
        monkeypatch.setattr(module, "INSPECTION_DEADLINE", 20)
        with open(tmp_path / "fifo", "w"):
            pass
        assert (await bench.report(1, device))["accepted"]

    run(body, tmp_path)


def test_four_thousand_devices_stay_off_the_loop(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        devices = [bench.device(f"n{number}") for number in range(4096)]
        async with Stalls() as stalls:
            for page in range(64):
                await bench.report(1, *devices[page * 64 : page * 64 + 64], page=page, pages=64)
        assert len(bench.observed()[0].records) == 4096
        assert stalls.longest < 0.5

    run(body, tmp_path)
