"""systemd units as owners of leases: which run of a unit it is, and when that run ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from hetero_agent.bus import codec, contract
from hetero_agent.bus.errors import invalid
from hetero_agent.bus.transport import BUS_DRIVER, BUS_DRIVER_PATH, CallFailed, Connection, Incoming
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import UnitRef
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.bus")

#: org.freedesktop.systemd1(5)
SYSTEMD = "org.freedesktop.systemd1"
_PATH = "/org/freedesktop/systemd1"
_MANAGER = SYSTEMD + ".Manager"
_UNIT = SYSTEMD + ".Unit"
_SERVICE = SYSTEMD + ".Service"
#: States in which a run of a unit has not ended.
_RUNNING = frozenset({"active", "activating", "reloading", "deactivating", "refreshing"})
#: Sub-states of "activating" in which one run has ended and the next has not begun: for RestartSec=,
#: which may be hours (systemd, src/basic/unit-def.c).
_BETWEEN_RUNS = frozenset(
    {"auto-restart", "auto-restart-queued", "dead-before-auto-restart", "failed-before-auto-restart"}
)
_TIMEOUT = 5.0
#: Seconds until a unit whose state systemd did not tell is looked at again.
_RETRY = 5.0

_ABSENT = frozenset(
    BUS_DRIVER + ".Error." + name
    for name in ("ServiceUnknown", "NameHasNoOwner", "AccessDenied", "Disconnected")
)


class Units:
    """Resolves unit names through the systemd on the same bus, and watches runs of units.

    GONE(lease) is called when the run that a lease is bound to has ended.
    """

    def __init__(self, connection: Connection, gone: Callable[[str], None]) -> None:
        self._connection = connection
        self._gone = gone
        self._watched: dict[str, UnitRef] = {}
        self._paths: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscribed = False
        self._hears_of_removals = False

    async def resolve(self, name: str) -> UnitRef:
        """Return the present run of a unit.  Raises Refusal."""
        try:
            state, invocation = await self._look(name)
        except CallFailed as error:
            if error.name in _ABSENT:
                raise Refusal(
                    ErrorKind.NOT_SUPPORTED,
                    "unit: systemd is not on this bus, so no unit can be bound; bind a pid instead",
                ) from None
            if error.name.endswith(".NoSuchUnit"):
                raise invalid(f"unit: {printable(name, 64)} is not running; start it first") from None
            raise Refusal(
                ErrorKind.UNAVAILABLE, f"unit: systemd did not answer: {printable(error.text)}"
            ) from None
        if state not in _RUNNING or not invocation:
            raise invalid(f"unit: {printable(name, 64)} is {printable(state, 32)}; start it first")
        return UnitRef(name, invocation)

    async def main_pid(self, name: str) -> int:
        """Return the main process of a service, 0 if it has none or systemd doesn't say."""
        try:
            path = str((await self._call(_PATH, _MANAGER, "GetUnit", name))[0])
            value = (await self._call(path, contract.PROPERTIES, "Get", _SERVICE, "MainPID"))[0].value
        except CallFailed as error:
            log.debug("main process of %s: %s", printable(name, 64), error)
            return 0
        return value if isinstance(value, int) else 0

    def watch(self, lease: str, unit: UnitRef) -> None:
        """Call GONE when this run of the unit ends, or if it has already."""
        self._watched[lease] = unit
        self._start(self._subscribe(lease, unit))

    def unwatch(self, lease: str) -> None:
        """Forget the lease's unit."""
        unit = self._watched.pop(lease, None)
        if unit is not None and unit.name not in {one.name for one in self._watched.values()}:
            path = self._paths.pop(unit.name, None)
            if path is not None:
                self._start(self._match("RemoveMatch", path))

    def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()

    def signal(self, message: Incoming) -> None:
        """A signal arrived: if it may be about a watched unit, ask systemd (the signal itself may
        come from anyone)."""
        if message.interface == contract.PROPERTIES:
            self._check_all(message.path)
        elif message.interface == _MANAGER and message.member == "UnitRemoved" and message.path == _PATH:
            try:
                removed = message.arguments()
            except codec.CodecError:
                return
            if message.signature == "so":
                self._check_all(removed[1])

    def owner_changed(self) -> None:
        """systemd came (back) to the bus: subscribe anew and look at all units."""
        self._subscribed = False
        self._start(self.subscribe())
        for lease, unit in list(self._watched.items()):
            self._start(self._subscribe(lease, unit))

    def _check_all(self, path: str) -> None:
        """Look at the units that are systemd's object PATH: a name may be an alias."""
        about = {name for name, one in self._paths.items() if one == path}
        if not about:
            return
        for lease, unit in list(self._watched.items()):
            if unit.name in about:
                self._start(self._check(lease, unit))

    async def _subscribe(self, lease: str, unit: UnitRef) -> None:
        """Subscribe, then check: an end in between is not missed.  If no news will come, look again
        and again."""
        while self._watched.get(lease) == unit:
            try:
                await self.subscribe()
                await self._listen(lease, unit)
            except CallFailed as error:
                log.debug("watching unit %s: %s", printable(unit.name, 64), error)
            await self._check(lease, unit)
            if unit.name in self._paths:
                return
            await asyncio.sleep(_RETRY)

    async def _listen(self, lease: str, unit: UnitRef) -> None:
        """Have the bus pass on news of the unit: by one rule for all leases that are bound to it, since
        the bus allows a connection some hundred rules only.  Raises CallFailed."""
        if unit.name in self._paths:
            return
        path = str((await self._call(_PATH, _MANAGER, "GetUnit", unit.name))[0])
        if unit.name in self._paths or self._watched.get(lease) != unit:
            return
        self._paths[unit.name] = path
        try:
            await self._match("AddMatch", path)
        except CallFailed:
            self._paths.pop(unit.name, None)
            raise

    async def subscribe(self) -> None:
        """Have systemd send its signals, which it does only for those who asked."""
        if self._subscribed:
            return
        self._subscribed = True
        rule = f"type='signal',sender='{SYSTEMD}',interface='{_MANAGER}',member='UnitRemoved'"
        try:
            if not self._hears_of_removals:
                # the rule is about the name, whoever owns it
                await self._add_match("AddMatch", rule)
                self._hears_of_removals = True
            await self._call(_PATH, _MANAGER, "Subscribe")
        except CallFailed as error:
            # no systemd here, or it has this connection on its list already
            log.debug("subscribing to systemd: %s", error)

    async def _check(self, lease: str, unit: UnitRef) -> None:
        while self._watched.get(lease) == unit:
            try:
                state, invocation = await self._look(unit.name)
                over = state not in _RUNNING or invocation != unit.invocation
            except CallFailed as error:
                if not error.name.endswith(".NoSuchUnit"):
                    # not known is not over: systemd may be restarting
                    log.info("unit %s: %s", printable(unit.name, 64), error)
                    await asyncio.sleep(_RETRY)
                    continue
                over = True
            if over and self._watched.get(lease) == unit:
                self._gone(lease)
            return

    async def _look(self, name: str) -> tuple[str, str]:
        """ActiveState and InvocationID (hex) of a loaded unit; between two runs, the sub-state
        instead.  Raises CallFailed."""
        path = str((await self._call(_PATH, _MANAGER, "GetUnit", name))[0])
        state = (await self._call(path, contract.PROPERTIES, "Get", _UNIT, "ActiveState"))[0].value
        if state == "activating":
            detail = (await self._call(path, contract.PROPERTIES, "Get", _UNIT, "SubState"))[0].value
            state = detail if detail in _BETWEEN_RUNS else state
        raw = (await self._call(path, contract.PROPERTIES, "Get", _UNIT, "InvocationID"))[0].value
        invocation = bytes(raw).hex() if isinstance(raw, (bytes, list)) else ""
        return str(state), invocation

    async def _call(self, path: str, interface: str, member: str, *arguments: str) -> list[Any]:
        return await self._connection.call(
            SYSTEMD, path, interface, member, "s" * len(arguments), arguments, timeout=_TIMEOUT
        )

    async def _match(self, member: str, path: str) -> None:
        rule = (
            f"type='signal',sender='{SYSTEMD}',interface='{contract.PROPERTIES}',"
            f"member='PropertiesChanged',path='{path}'"
        )
        await self._add_match(member, rule)

    async def _add_match(self, member: str, rule: str) -> None:
        await self._connection.call(
            BUS_DRIVER, BUS_DRIVER_PATH, BUS_DRIVER, member, "s", (rule,), timeout=_TIMEOUT
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _quietly(work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except CallFailed as error:
            log.info("systemd: %s", error)
