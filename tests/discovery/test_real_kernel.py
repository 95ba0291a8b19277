"""The kernel of the machine that the tests run on: its /sys, and uevents that it sends."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from pathlib import Path

from hetero_agent.config import DiscoveryTable
from hetero_agent.core.model import Obstacle
from hetero_agent.discovery import sysfs
from hetero_agent.discovery.monitor import BUDGET, BUFFER_SIZES, Uevent, choose_source
from tests.discovery.observe import Watched, enumerate_once, watching
from tests.support.timing import Stalls
from tests.support.uevents import inject
from tests.support.under import run_under
from tests.support.wait import wait_until_async

# without the initial network namespace no other test's events are seen, and no other test sees these
own_network = run_under("unshare", "--net")

CONSOLE = (
    'schema = 1\nresource = "example.org/console"\n[[match]]\nsubsystem = "tty"\nnames = ["tty60"]\n'
    '[[nodes]]\nsubsystem = "tty"\npattern = "tty60"\nrole = "own"\nrequired = true\n'
)
TTY60 = "/sys/devices/virtual/tty/tty60"
KERNEL = DiscoveryTable(udev_source="kernel")


def with_console(directory: Path) -> Path:
    (directory / "console.toml").write_text(CONSOLE)
    return directory


def test_the_whole_of_sys_is_read_without_opening_a_node(tmp_path: Path) -> None:
    opened: list[str] = []
    watch = [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watch and event == "open":
            opened.append(os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else "")

    sys.addaudithook(hook)
    try:
        records = enumerate_once(with_console(tmp_path))
    finally:
        watch.clear()
    assert any(name.startswith("/sys/bus/pci/devices") or name.startswith("/sys/devices") for name in opened)
    assert [name for name in opened if name.startswith("/dev")] == []
    console = records["tty-tty60"]
    assert console.path == TTY60
    assert console.attributes == {"kernel-names": "tty60"}
    assert (console.source, console.profile, console.stable_id) == ("kernel", "console", False)


def test_a_spare_console_is_a_device(tmp_path: Path) -> None:
    node = Path("/dev/tty60")
    made = not node.exists()
    if made:
        os.mknod(node, 0o020620, os.makedev(4, 60))
    try:
        record = enumerate_once(with_console(tmp_path))["tty-tty60"]
    finally:
        if made:
            node.unlink()
    assert [(one.path, one.kind, one.major, one.minor) for one in record.own_nodes] == [
        ("/dev/tty60", "char", 4, 60)
    ]
    assert record.obstacle is Obstacle.NONE


def test_a_loop_device_is_a_device(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").write_text(
        'schema = 1\nresource = "example.org/loop"\n[[match]]\nsubsystem = "block"\nnames = ["loop7"]\n'
        '[[nodes]]\nsubsystem = "block"\npattern = "loop7"\nrole = "own"\n'
    )
    record = enumerate_once(tmp_path)["block-loop7"]
    assert [(one.path, one.kind, one.major, one.minor) for one in record.own_nodes] == [
        ("/dev/loop7", "block", 7, 7)
    ]


def listen(seen: Watched) -> list[str]:
    """The paths of all events that are heard from now on."""
    heard: list[str] = []
    monitor = seen.source._monitor
    hand_over = monitor._events

    def take(events: list[Uevent]) -> None:
        heard.extend(event.path for event in events)
        hand_over(events)

    monitor._events = take
    return heard


@own_network
def test_uevents_of_the_kernel_reach_the_reader(tmp_path: Path) -> None:
    async def body() -> None:
        async with watching(with_console(tmp_path), table=KERNEL) as seen:
            reads: list[float] = []
            original = sysfs.read_device

            def counted(path: str, profiles: object) -> object:
                reads.append(time.monotonic())
                return original(path, profiles)  # type: ignore[arg-type]

            sysfs.read_device = counted  # type: ignore[assignment]
            try:
                took = []
                for _ in range(20):
                    before, began = len(reads), time.monotonic()
                    inject("change", TTY60, "tty")
                    await wait_until_async(lambda: len(reads) > before, what="the read")  # noqa: B023
                    took.append(reads[before] - began)
            finally:
                sysfs.read_device = original
            # some of them come while the machine is busy with other things
            assert sorted(took)[4] < 0.010
            # nothing had changed, so nothing was said
            assert len(seen.events) == 1

    asyncio.run(body())


@own_network
def test_real_uevents_by_writing_to_sysfs(tmp_path: Path) -> None:
    async def body() -> None:
        async with watching(with_console(tmp_path), table=KERNEL) as seen:
            heard = listen(seen)
            Path(TTY60, "uevent").write_text("change")
            await wait_until_async(lambda: TTY60 in heard, what="the event")

    asyncio.run(body())


@own_network
def test_progress_is_proven_when_it_is_asked_for(tmp_path: Path) -> None:
    async def body() -> None:
        async with watching(with_console(tmp_path), table=KERNEL) as seen:
            # more often than the heartbeat, as by a watchdog with a short interval
            asked = time.monotonic()
            assert seen.source.progress() >= asked
            seen.source._monitor._monitor = None  # it could not be made anew
            before = seen.source.progress()
            await asyncio.sleep(0.01)
            assert seen.source.progress() == before

    asyncio.run(body())


@own_network
def test_lost_events_make_a_new_monitor_and_a_comparison(tmp_path: Path) -> None:
    async def body() -> None:
        async with watching(with_console(tmp_path), table=KERNEL, buffer_sizes=(4096,)) as seen:
            deaf = seen.source._monitor._monitor
            # the loop doesn't run meanwhile: the socket overflows and the kernel says ENOBUFS
            for _ in range(200):
                inject("change", TTY60, "tty")
            await wait_until_async(lambda: [one.resync for one in seen.events if one.resync], what="the resync")
            assert {one.resync for one in seen.events if one.resync} == {"events-lost"}
            assert seen.source._monitor._monitor is not deaf
            # the new one hears
            heard = listen(seen)
            inject("change", TTY60, "tty")
            await wait_until_async(lambda: TTY60 in heard, what="the next event")

    asyncio.run(body())


@own_network
def test_a_flood_of_events_leaves_the_loop_its_turns(tmp_path: Path) -> None:
    async def body() -> None:
        async with watching(with_console(tmp_path), table=KERNEL, buffer_sizes=BUFFER_SIZES) as seen:
            listening = seen.source._monitor
            hand_over = listening._events
            turns: list[int] = []
            listening._events = lambda events: (turns.append(len(events)), hand_over(events))
            for _ in range(1000):
                inject("change", TTY60, "tty")
            async with Stalls() as stalls:
                await wait_until_async(lambda: sum(turns) >= 1000, what="all events")
            assert max(turns) == BUDGET
            assert stalls.longest < 0.2
            assert [one.resync for one in seen.events] == [""]

    asyncio.run(body())


@own_network
def test_want_of_descriptors_unplugs_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        async with watching(with_console(tmp_path), table=KERNEL) as seen:
            before = dict(seen.records)
            assert "tty-tty60" in before

            def lacking() -> bool:
                return "devices can't be read: Too many open files; their last known state is kept" in (
                    seen.source.problems()
                )

            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            for cause in (lambda: inject("change", TTY60, "tty"), lambda: seen.source.resync("test")):
                cause()
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                try:
                    await wait_until_async(lacking, what="the complaint")
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                await wait_until_async(lambda: not lacking(), what="another try")
            assert seen.records == before
            assert [event.gone for event in seen.events if event.gone] == []

    asyncio.run(body())


def test_missing_udev_is_said() -> None:
    there = Path("/run/udev/control").exists()
    assert choose_source("kernel") == ("kernel", "")
    source, problem = choose_source("auto")
    assert (source, bool(problem)) == (("udev", False) if there else ("kernel", True))
    source, problem = choose_source("udev")
    assert (source, bool(problem)) == ("udev", not there)
