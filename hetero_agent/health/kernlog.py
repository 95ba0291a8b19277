"""The kernel's messages, as far as they fit a rule: keeps the log worker that reads them running."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetero_agent.core.symptoms import MessageRule
from hetero_agent.core.verdict import Fault
from hetero_agent.text import printable
from hetero_agent.workers.process import WorkerProcess, Yard, command

log = logging.getLogger("hetero_agent.health")

#: How to start a log worker.
COMMAND = command("hetero_agent.health.log_worker")

#: Seconds before now from which on messages are read if nobody knows where an earlier life stopped.
BACK: Final = 600.0
#: Seconds until a worker that ended is replaced: the first time, and at most.
_FIRST_PAUSE: Final = 1.0
_LAST_PAUSE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Said:
    """One message that fits RULE, the number of which `KernelLog` was given.

    ADDRESS, NAME and CODE are what the rule's pattern found, DEVICE is the kernel's own word
    (``+pci:0000:3b:00.0``), AGE how many seconds ago it was said; REPEATED messages like it were
    left out before.
    """

    rule: int
    address: str
    name: str
    code: str
    line: str
    device: str
    age: float
    repeated: int


class KernelLog:
    """Hands over what fits: HEARD gets messages and where they stand, LOST how many nobody read."""

    def __init__(
        self,
        heard: Callable[[Sequence[Said], str], None],
        lost: Callable[[int], None],
        start: Sequence[str] = COMMAND,
    ) -> None:
        self._heard = heard
        self._lost = lost
        self._start = start
        self._rules: tuple[MessageRule, ...] = ()
        self._wanted = "off"
        self._cursor = ""
        self._task: asyncio.Task[None] | None = None
        self._worker: WorkerProcess | None = None
        self._yard = Yard(4)
        self.source = ""
        self.problem = ""

    @property
    def pids(self) -> set[int]:
        """The workers."""
        return self._yard.pids | ({self._worker.pid} if self._worker else set())

    def listen(self, rules: Sequence[MessageRule], source: str, cursor: str) -> None:
        """Read SOURCE (``auto``, ``journal``, ``kmsg``; ``off``: nothing) by RULES from now on, and
        after CURSOR if nothing was read yet."""
        if self._task is not None and (tuple(rules), source) == (self._rules, self._wanted):
            return
        self._rules, self._wanted = tuple(rules), source
        self._cursor = self._cursor or cursor
        self._cancel()
        self.source = self.problem = ""
        if source != "off" and self._rules:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kernel-log")

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            begun = time.monotonic()
            try:
                await self._read()
            except (OSError, EOFError, ValueError) as error:
                # a worker that told why before it ended is believed
                self.problem = self.problem or f"its reader ended: {printable(error)}"
            finally:
                self._give_up()
            if time.monotonic() - begun > _LAST_PAUSE:
                pause = _FIRST_PAUSE
            log.warning("kernel messages are not heard: %s", self.problem)
            self.source = ""
            await asyncio.sleep(pause)
            pause = min(_LAST_PAUSE, 2 * pause)

    async def _read(self) -> None:
        """Have a worker read until it ends.  Raises OSError, EOFError or ValueError then."""
        if self._yard.full:
            raise OSError("its readers are blocked in the kernel")
        worker = self._worker = WorkerProcess(self._start)
        await worker.send(
            {
                "rules": [
                    [rule.pattern, list(rule.codes), rule.fault is Fault.RECOVERED] for rule in self._rules
                ],
                "source": self._wanted,
                "cursor": self._cursor,
                "back": BACK,
                "libraries": _libraries(),
            }
        )
        while True:
            self._take(await worker.receive())

    def _take(self, message: dict[str, Any]) -> None:
        if "source" in message:
            self.source, self.problem = message["source"], printable(message["doubt"])
            log.info("kernel messages are read from %s", self.source)
        elif "problem" in message:
            self.problem = printable(message["problem"])
        elif "lost" in message:
            self._lost(int(message["lost"]))
        else:
            self._cursor = message["cursor"]
            self._heard([Said(*one) for one in message["said"]], self._cursor)

    def _give_up(self) -> None:
        if self._worker is not None:
            self._yard.take(self._worker)
            self._worker = None

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def stop(self) -> None:
        """Read no more."""
        task = self._task
        self._cancel()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        await self._yard.empty(1.0)


def _libraries() -> str:
    """Return the directory that systemd-python lies in, which an isolated worker doesn't know."""
    found = importlib.util.find_spec("systemd")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return str(Path(places[0]).parent) if places else ""
