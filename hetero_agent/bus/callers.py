"""Whose connection it is: credentials from the bus, kept as long as the connection lives.

A unique name is never given out twice in one life of a bus, so what the bus once said of it
stays true; it is dropped when the bus itself (and nobody else) says that the name is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from hetero_agent.bus.transport import BUS_DRIVER, BUS_DRIVER_PATH, CallFailed, Connection, Incoming
from hetero_agent.bus.whomay import Caller
from hetero_agent.core.ports import ProcessFacts

log = logging.getLogger("hetero_agent.bus")

#: Connections whose credentials are kept.
KEPT = 8192
#: Seconds for the bus to name a caller, and for /proc to name its unit.
DEADLINE = 5.0

#: The rule for news of names; the bus fills in the sender, so its own word can be told.
MATCH_NAMES = (
    f"type='signal',sender='{BUS_DRIVER}',path='{BUS_DRIVER_PATH}',"
    f"interface='{BUS_DRIVER}',member='NameOwnerChanged'"
)

T = TypeVar("T")
Identify = Callable[[int], ProcessFacts | None]


def name_owner_changed(message: Incoming) -> tuple[str, str, str] | None:
    """Return (name, old owner, new owner) if this is the bus's own news, else None.

    Anyone may send a signal with the same interface and member to us; believing it would let
    anyone end anyone's lease.
    """
    if (
        message.sender != BUS_DRIVER
        or message.path != BUS_DRIVER_PATH
        or message.interface != BUS_DRIVER
        or message.member != "NameOwnerChanged"
        or message.signature != "sss"
    ):
        return None
    name, old, new = message.arguments()
    return name, old, new


class Callers:
    """Credentials by unique name.

    IDENTIFY reads /proc in a worker thread, because that can block on a stuck process.
    """

    def __init__(self, connection: Connection, identify: Identify) -> None:
        self._connection = connection
        self._identify = identify
        self._known: OrderedDict[str, Caller] = OrderedDict()
        self._asking: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers = ThreadPoolExecutor(4, "bus-callers")

    def get(self, bus_name: str) -> Caller | None:
        """The caller, if it is known already."""
        return self._known.get(bus_name)

    def forget(self, bus_name: str) -> None:
        """The connection is gone."""
        self._known.pop(bus_name, None)
        self._asking.discard(bus_name)

    def ask(self, bus_name: str, done: Callable[[Caller | None], None]) -> None:
        """Find out who it is and call DONE on the loop; None if the bus does not say, or it has left."""
        self._asking.add(bus_name)
        task = asyncio.get_running_loop().create_task(self._ask(bus_name, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def facts(self, pid: int) -> ProcessFacts | None:
        """What /proc says of a process, from a worker thread; None if there is no such one.
        Raises TimeoutError, or another OSError if that can't be told."""
        loop = asyncio.get_running_loop()
        return await deadline(loop.run_in_executor(self._workers, self._identify, pid), DEADLINE)

    async def _ask(self, bus_name: str, done: Callable[[Caller | None], None]) -> None:
        caller = None
        try:
            caller = await self._fetch(bus_name)
        except (CallFailed, KeyError, TypeError, ValueError) as error:
            log.info("no credentials of %s: %s", bus_name, error)
        if bus_name not in self._asking:
            # it has left meanwhile, and nobody will say so again: its calls must not be acted on
            caller = None
        elif caller is not None:
            self._known[bus_name] = caller
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._asking.discard(bus_name)
        done(caller)

    async def _fetch(self, bus_name: str) -> Caller:
        reply = await self._connection.call(
            BUS_DRIVER,
            BUS_DRIVER_PATH,
            BUS_DRIVER,
            "GetConnectionCredentials",
            "s",
            (bus_name,),
            timeout=DEADLINE,
        )
        given = {key: value.value for key, value in reply[0].items()}
        uid = int(given["UnixUserID"])
        pid = int(given.get("ProcessID", 0))
        loop = asyncio.get_running_loop()
        groups = given.get("UnixGroupIDs")
        unit = ""
        try:
            if groups is None:
                groups = await deadline(loop.run_in_executor(self._workers, groups_of, pid, uid), DEADLINE)
            facts = await self.facts(pid) if pid else None
            # the connection may have outlived the process that made it, and the pid be another's by now
            if facts is not None and uid in (0, *facts.uids):
                unit = facts.unit
        except TimeoutError:
            log.warning("/proc of process %d does not answer; its unit and groups stay unknown", pid)
        except OSError as error:
            log.warning("process %d can't be looked at, its unit stays unknown: %s", pid, error)
        return Caller(bus_name, uid, pid, frozenset(groups or ()), unit)


def groups_of(pid: int, uid: int) -> tuple[int, ...]:
    """The groups of a process of UID by proc(5), ``Gid`` and ``Groups`` in status; none if it is gone, or
    the pid is another uid's.  For a bus that does not tell them (dbus-daemon before 1.13.10)."""
    found: set[int] = set()
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        if line.startswith("Uid:") and str(uid) not in line.split():
            return ()
        if line.startswith(("Gid:", "Groups:")):
            found.update(int(word) for word in line.split()[1:])
    return tuple(sorted(found))


async def deadline(future: asyncio.Future[T], seconds: float) -> T:
    """Wait for FUTURE at most so long.  Raises TimeoutError; a thread's work goes on unheard."""
    timer = asyncio.get_running_loop().call_later(seconds, future.cancel)
    try:
        return await future
    except asyncio.CancelledError:
        if timer.when() <= asyncio.get_running_loop().time():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
