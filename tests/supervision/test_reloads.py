"""Reading the configuration again: none that is asked for is lost, and systemd hears the end of each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hetero_agent.supervision import Notifier, Reloads
from tests.supervision.test_notifier import Manager


@pytest.mark.parametrize("fails", [False, True])
def test_one_at_a_time_and_once_more_if_asked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    manager = Manager(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", manager.path)
    reads = 0

    async def test() -> None:
        go_on = asyncio.Event()

        async def read() -> None:
            nonlocal reads
            reads += 1
            await go_on.wait()
            if fails:
                raise OSError("no descriptor left")

        notifier = Notifier()
        reloads = Reloads(notifier, read)
        reloads.ask()
        await asyncio.sleep(0)
        for _ in range(3):
            reloads.ask()
        assert reads == 1
        go_on.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert reads == 2
        reloads.ask()
        for _ in range(5):
            await asyncio.sleep(0)
        notifier.close()

    try:
        asyncio.run(test())
        assert reads == 3
        assert [one.partition("\n")[0] for one in manager.messages()] == ["RELOADING=1", "READY=1"] * 3
    finally:
        manager.close()
