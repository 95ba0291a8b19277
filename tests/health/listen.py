"""A log worker run from a test, and what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from hetero_agent.core.symptoms import MessageRule
from hetero_agent.core.verdict import Fault
from hetero_agent.health.kernlog import COMMAND, KernelLog, Said
from tests.support.wait import wait_until_async

#: What the tests say: ``npu ADDRESS: word``.
RULES = (
    MessageRule(r"npu (?P<address>\S+): error (?P<code>\d+)", Fault.FATAL),
    MessageRule(r"npu (?P<address>\S+): well", Fault.RECOVERED),
    MessageRule(r"npu: nameless", Fault.DEGRADED),
)


class Listener:
    """SAID are the messages, CURSORS where they stand, LOST counts what nobody read."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.said: list[Said] = []
        self.cursors: list[str] = []
        self.lost = 0
        self.log = KernelLog(self._heard, self._lost, command)

    def _heard(self, said: Sequence[Said], cursor: str) -> None:
        self.said += said
        self.cursors.append(cursor)

    def _lost(self, count: int) -> None:
        self.lost += count

    @property
    def codes(self) -> list[str]:
        """The codes heard so far."""
        return [one.code for one in self.said]

    async def until(self, *codes: str, timeout: float = 30) -> None:
        """Wait until exactly these codes were heard."""
        await wait_until_async(
            lambda: self.codes[-len(codes) :] == list(codes), timeout, f"{codes} (heard {self.codes})"
        )

    async def reading(self, source: str) -> None:
        """Wait until it reads from SOURCE."""
        await wait_until_async(lambda: self.log.source == source, what=f"{source} ({self.log.problem})")


def listening(
    test: Callable[[Listener], Awaitable[None]],
    source: str = "auto",
    cursor: str = "",
    rules: Sequence[MessageRule] = RULES,
    command: Sequence[str] = COMMAND,
) -> Listener:
    """Run TEST with a listener to SOURCE after CURSOR."""

    async def run() -> Listener:
        one = Listener(command)
        one.log.listen(rules, source, cursor)
        try:
            await test(one)
        finally:
            await one.log.stop()
        assert one.log.pids == set()
        return one

    return asyncio.run(run())
