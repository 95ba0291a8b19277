"""sd_notify(3): what arrives, in which form, and that nothing waits for a full or missing socket."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent.supervision import Notifier, interval_from_env
from tests.support.wait import wait_until_async


class Manager:
    """systemd's end of the notification socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + path[1:] if path.startswith("@") else path)
        self.socket.setblocking(False)

    def messages(self) -> list[str]:
        found = []
        try:
            while True:
                found.append(self.socket.recv(65536).decode("ascii"))
        except BlockingIOError:
            return found

    def fill(self) -> int:
        """Fill its queue from outside; return how many datagrams fit."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            other.connect("\0" + self.path[1:] if self.path.startswith("@") else self.path)
            count = 0
            try:
                while True:
                    other.send(b"X=1")
                    count += 1
            except BlockingIOError:
                return count

    def close(self) -> None:
        self.socket.close()
        if not self.path.startswith("@"):
            Path(self.path).unlink()


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Manager]:
    path = str(tmp_path / "notify") if request.param == "path" else f"@hetero-agent-test-{os.getpid()}"
    one = Manager(path)
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    yield one
    one.close()


def test_states(manager: Manager) -> None:
    notifier = Notifier()
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.ready()
    notifier.status("8 devices")
    notifier.reloading()
    notifier.watchdog()
    notifier.stopping()
    ready, status, reloading, watchdog, stopping = manager.messages()
    assert ready == "READY=1"
    assert status == "STATUS=8 devices"
    word, _, rest = reloading.partition("\n")
    assert word == "RELOADING=1"
    name, _, usec = rest.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(usec) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert watchdog == "WATCHDOG=1"
    assert stopping == "STOPPING=1"
    assert notifier.dropped == 0
    notifier.close()


def test_only_printable_ascii_is_sent_and_no_second_state(manager: Manager) -> None:
    notifier = Notifier()
    notifier.status("Gerät „grün“ \U0001f525\nREADY=1\x1b[2J" + "x" * 1000)
    (message,) = manager.messages()
    assert message.startswith("STATUS=Ger\\xe4t \\u201egr\\xfcn\\u201c \\U0001f525\\x0aREADY=1\\x1b[2Jxxx")
    assert len(message) == len("STATUS=") + 256
    assert message.isascii()
    assert message.isprintable()
    notifier.close()


def test_the_same_status_is_sent_once(manager: Manager) -> None:
    notifier = Notifier()
    for text in ("a", "a", "b", "a"):
        notifier.status(text)
    assert manager.messages() == ["STATUS=a", "STATUS=b", "STATUS=a"]
    notifier.close()


def test_a_full_socket_keeps_nobody_waiting_and_no_state_is_lost(manager: Manager) -> None:
    async def run() -> None:
        notifier = Notifier()
        assert manager.fill() > 0
        start = time.monotonic()
        notifier.ready()
        for number in range(100):
            notifier.status(f"{number} devices")
            notifier.watchdog()
        notifier.reloading()
        notifier.ready()
        assert time.monotonic() - start < 10
        assert notifier.dropped == 100  # the feeds
        received: list[str] = []

        def arrived() -> bool:
            received.extend(one for one in manager.messages() if one != "X=1")
            return len(received) == 4

        await wait_until_async(arrived, what="the states that waited")
        assert [one.partition("\n")[0] for one in received] == [
            "READY=1",
            "RELOADING=1",
            "READY=1",
            "STATUS=99 devices",
        ]
        notifier.watchdog()
        assert manager.messages() == ["WATCHDOG=1"]
        assert notifier.dropped == 100
        notifier.close()

    asyncio.run(run())


def test_a_socket_that_is_made_anew_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)

    async def run() -> None:
        notifier = Notifier()
        notifier.ready()
        first = Manager(path)
        await wait_until_async(lambda: first.messages() == ["READY=1"], what="READY=1")
        first.close()
        notifier.stopping()
        second = Manager(path)
        await wait_until_async(lambda: second.messages() == ["STOPPING=1"], what="STOPPING=1")
        second.close()
        notifier.close()

    asyncio.run(run())


def test_without_a_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notifier = Notifier()
    assert not notifier.enabled
    notifier.ready()
    notifier.reloading()
    notifier.status("x")
    notifier.watchdog()
    notifier.stopping()
    assert notifier.dropped == 0
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "me"}, None),
    ],
)
def test_the_watchdogs_interval(environ: dict[str, str], interval: float | None) -> None:
    assert interval_from_env(environ) == interval
