"""Whom to ask for a password: who sits at the terminal, by polkit's textual agent."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from types import TracebackType
from typing import Final, Self

#: polkit's own (pkttyagent(1)).  It registers for this process, and not with --fallback: polkit passes
#: such agents over where the process is in no session, and it was asked before whether it has another.
AGENT: Final = "/usr/bin/pkttyagent"

#: Seconds for it to register, and to go.
_REGISTERS_WITHIN: Final = 5.0
_GOES_WITHIN: Final = 1.0


def person(args: argparse.Namespace) -> Person | None:
    """Return whom to ask, None if nobody is to be asked: with --no-ask-password, without a terminal, in
    the background, and as root, who may everything."""
    if not getattr(args, "ask_password", True) or os.geteuid() == 0:
        return None
    try:
        if not os.isatty(0) or os.tcgetpgrp(0) != os.getpgrp():
            return None
    except OSError:
        return None
    return Person(getattr(args, "bus", None))


class Person:
    """Brings the agent when it is called, once; a context manager that takes it away again.

    What else uses the terminal must wait until then.  BUS is the address of a bus other than the
    system bus.
    """

    def __init__(self, bus: str | None) -> None:
        self._bus = bus
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    async def __call__(self) -> bool:
        """Start the agent and wait until it has registered; False if there is none, or was one."""
        if self._pid or not os.access(AGENT, os.X_OK):
            return False
        told, telling = os.pipe()
        try:
            self._pid = self._start(telling)
        except OSError:
            return False
        finally:
            os.close(telling)
            reader = os.fdopen(told, "rb", buffering=0)
        with reader:
            await _end_of(reader.fileno())
        return True

    def _start(self, telling: int) -> int:
        from hetero_agent.names import BUS_ADDRESS_VARIABLE  # noqa: PLC0415

        os.set_inheritable(telling, True)
        environment = {**os.environ, **({BUS_ADDRESS_VARIABLE: self._bus} if self._bus else {})}
        options = [f"--process={os.getpid()},{_start_time()}", f"--notify-fd={telling}"]
        # it must not stay at the terminal when heteroctl is killed; what `run` blocks, and Python
        # ignores, must reach it
        return os.posix_spawnp(
            "setpriv",
            ["setpriv", "--pdeathsig=TERM", AGENT, *options],
            environment,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )

    def leave(self) -> None:
        """End the agent."""
        pid, self._pid = self._pid, 0
        if not pid:
            return
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
            end = time.monotonic() + _GOES_WITHIN
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() >= end:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)


async def _end_of(pipe: int) -> None:
    """Wait until nobody can write into PIPE any more, but not for ever."""
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    loop.add_reader(pipe, closed.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REGISTERS_WITHIN):
                await closed.wait()
    finally:
        loop.remove_reader(pipe)


def _start_time() -> int:
    """This process's start time in clock ticks since boot (proc(5), field 22 of stat)."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:  # noqa: PTH123
        return int(stat.read().rpartition(")")[2].split()[19])
