"""Threads for reads that may hang."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hetero_agent.discovery.readers import NoReaderError, Readers, ReadTimeoutError
from tests.support.wait import wait_until, wait_until_async


def hanging() -> tuple[Callable[[], bytes], Callable[[], None]]:
    """A read that does not return, and what makes it return."""
    reader, writer = os.pipe()

    def release() -> None:
        os.write(writer, b"x")

    return lambda: os.read(reader, 1), release


def test_results_and_errors_come_back() -> None:
    async def body() -> None:
        readers = Readers()
        assert await readers.call(lambda: 42, 1, lambda: None) == 42
        with pytest.raises(ZeroDivisionError):
            await readers.call(lambda: 1 // 0, 1, lambda: None)
        names = {
            await readers.call(lambda: threading.current_thread().name, 1, lambda: None) for _ in range(50)
        }
        assert names == {"discovery-reader"}
        assert len(readers._workers) == 1
        readers.close()

    asyncio.run(body())


def test_a_long_queue_is_no_sign_that_threads_hang() -> None:
    async def body() -> None:
        readers = Readers(most=1)

        def work(number: int) -> int:
            time.sleep(0.02)
            return number

        calls = (readers.call(lambda number=number: work(number), 0.3, lambda: None) for number in range(40))
        assert await asyncio.gather(*calls) == list(range(40))
        readers.close()

    asyncio.run(body())


def test_stuck_reads_are_bounded_and_come_back() -> None:
    async def body() -> None:
        readers = Readers(most=2)
        returned: list[int] = []
        pairs = [hanging() for _ in range(2)]
        for number, (work, _release) in enumerate(pairs):
            with pytest.raises(ReadTimeoutError):
                await readers.call(work, 0.2, lambda number=number: returned.append(number))
            assert readers.stuck == number + 1
        # none is left: said as such, and the work is not done later behind the caller's back
        ran: list[int] = []
        with pytest.raises(NoReaderError):
            await readers.call(lambda: ran.append(1), 0.2, lambda: None)
        pairs[0][1]()
        assert await readers.call(lambda: "works again", 20, lambda: None) == "works again"
        assert returned == [0]
        assert ran == []
        assert readers.stuck == 1
        pairs[1][1]()
        readers.close()

    asyncio.run(body())


def test_a_read_that_returns_at_its_deadline_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        readers = Readers()
        work, release = hanging()
        abandon = readers._abandon

        def too_late(*arguments: Any) -> bool:
            # it comes back after its deadline was found to be over, and before it is given up
            release()
            wait_until(lambda: all(worker.job is None for worker in readers._workers), what="its return")
            return abandon(*arguments)

        monkeypatch.setattr(readers, "_abandon", too_late)
        returned: list[int] = []
        with pytest.raises(ReadTimeoutError):
            await readers.call(work, 0.2, lambda: returned.append(1))
        await wait_until_async(lambda: returned == [1], what="word of its return")
        assert readers.stuck == 0
        readers.close()

    asyncio.run(body())


def test_one_stuck_read_does_not_delay_the_next() -> None:
    async def body() -> None:
        readers = Readers()
        work, release = hanging()
        stuck = asyncio.create_task(readers.call(work, 30, lambda: None))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(readers.call(lambda: 1, 20, lambda: None), 25) == 1
        release()
        assert await stuck == b"x"
        readers.close()

    asyncio.run(body())
