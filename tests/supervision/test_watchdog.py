"""The watchdog is fed on proof of progress, and on nothing else."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from hetero_agent.supervision import Notifier, Watchdog
from tests.support.wait import wait_until_async

INTERVAL = 0.3


class Fed:
    """Counts what arrives at the notification socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.times: list[float] = []
        self.status = ""

    def look(self) -> int:
        """Return how many feeds came so far."""
        try:
            while True:
                message = self.socket.recv(4096).decode()
                if message == "WATCHDOG=1":
                    self.times.append(time.monotonic())
                else:
                    self.status = message
        except BlockingIOError:
            return len(self.times)


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fed]:
    path = tmp_path / "notify"
    one = Fed(path)
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    yield one
    one.socket.close()


async def answers() -> None:
    """A bus that answers at once."""


def running(
    checks: dict[str, Callable[[], float]], ping: Callable[[], Awaitable[object]] = answers
) -> tuple[Watchdog, asyncio.Task[None]]:
    dog = Watchdog(Notifier(), INTERVAL, checks, ping)
    return dog, asyncio.get_running_loop().create_task(dog.run())


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_it_is_fed_at_least_twice_per_interval(fed: Fed) -> None:
    async def run() -> None:
        dog, task = running({"engine": time.monotonic})
        await wait_until_async(lambda: fed.look() >= 12, what="feeds")
        # half of the intervals at least; a busy machine may stretch the others
        gaps = sorted(after - before for before, after in itertools.pairwise(fed.times))
        assert gaps[len(gaps) // 2] <= INTERVAL / 2
        assert dog.starving == ""
        await end(task)

    asyncio.run(run())


@pytest.mark.parametrize("part", ["engine", "udev"])
def test_a_part_without_progress_starves_it(fed: Fed, part: str) -> None:
    async def run() -> None:
        moved = {"engine": time.monotonic(), "udev": time.monotonic()}
        stuck = ""

        def progress(name: str) -> Callable[[], float]:
            def look() -> float:
                if name != stuck:
                    moved[name] = time.monotonic()
                return moved[name]

            return look

        dog, task = running({name: progress(name) for name in moved})
        await wait_until_async(lambda: fed.look() >= 3, what="feeds")
        stuck = part
        await wait_until_async(lambda: dog.starving, what="starving")
        assert dog.starving == f"no progress of {part}"
        count = fed.look()
        await asyncio.sleep(2 * INTERVAL)
        assert fed.look() == count
        assert fed.status == f"STATUS=Stuck: no progress of {part}"
        # A part that moves again is fed again: systemd may have more patience.
        stuck = ""
        await wait_until_async(lambda: fed.look() > count, what="feeds again")
        assert dog.starving == ""
        await end(task)

    asyncio.run(run())


async def hangs() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise ConnectionError("the bus is gone")


@pytest.mark.parametrize("ping", [hangs, fails])
def test_three_pings_without_an_answer_starve_it(fed: Fed, ping: Callable[[], Awaitable[object]]) -> None:
    async def run() -> None:
        works = True
        asked = 0

        async def ask() -> None:
            nonlocal asked
            if not dog.starving:
                asked += 1
            if not works:
                await ping()

        dog, task = running({}, ask)
        await wait_until_async(lambda: fed.look() >= 2, what="feeds")
        works = False
        before = asked
        await wait_until_async(lambda: dog.starving, what="starving")
        # One or two missed answers are forgiven; whether the first was already asked is chance.
        assert 3 <= asked - before <= 4
        assert dog.starving == "3 pings over the bus in a row were not answered"
        count = fed.look()
        await asyncio.sleep(2 * INTERVAL)
        assert fed.look() == count
        works = True
        await wait_until_async(lambda: fed.look() > count, what="feeds again")
        await end(task)

    asyncio.run(run())


def test_a_loop_that_stands_still_feeds_nothing(fed: Fed) -> None:
    async def run() -> None:
        _, task = running({})
        await wait_until_async(lambda: fed.look() >= 2, what="feeds")
        count = fed.look()
        time.sleep(2 * INTERVAL)  # the loop is stuck
        assert fed.look() == count
        await end(task)

    asyncio.run(run())
