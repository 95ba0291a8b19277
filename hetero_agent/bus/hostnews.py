"""What befalls the whole host, as systemd and logind tell it: units read again, sleep, waking up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from hetero_agent.bus import codec
from hetero_agent.bus.transport import BUS_DRIVER, BUS_DRIVER_PATH, CallFailed, Connection, Incoming
from hetero_agent.bus.units import SYSTEMD, Units

log = logging.getLogger("hetero_agent.bus")

#: org.freedesktop.login1(5)
LOGIND: Final = "org.freedesktop.login1"

#: (interface, member) -> who sends it and what it is called here; each has one truth value.
_SIGNALS: Final = {
    (SYSTEMD + ".Manager", "Reloading"): (SYSTEMD, "reload"),
    (LOGIND + ".Manager", "PrepareForSleep"): (LOGIND, "sleep"),
}
_TIMEOUT: Final = 5.0


class HostNews:
    """Calls TELL(what, begins) for ``reload`` and ``sleep``.

    Anybody may send a signal that looks like these: only those of the names' owners count.
    """

    def __init__(self, connection: Connection, units: Units, tell: Callable[[str, bool], None]) -> None:
        self._connection = connection
        self._units = units
        self._tell = tell
        self._owners: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen; who isn't on the bus may come later."""
        self._task = asyncio.get_running_loop().create_task(self._listen())

    def close(self) -> None:
        """Listen no more."""
        if self._task is not None:
            self._task.cancel()

    def owner_changed(self, name: str, owner: str) -> None:
        """NAME belongs to OWNER now, "" for nobody."""
        if name in (SYSTEMD, LOGIND):
            self._owners[name] = owner

    def signal(self, message: Incoming) -> None:
        """Take a signal that may be one of these."""
        known = _SIGNALS.get((message.interface or "", message.member or ""))
        if known is None or not message.sender or self._owners.get(known[0]) != message.sender:
            return
        try:
            arguments = message.arguments()
        except codec.CodecError:
            return
        if len(arguments) == 1 and isinstance(arguments[0], bool):
            self._tell(known[1], arguments[0])

    async def _listen(self) -> None:
        for (interface, member), (name, _) in _SIGNALS.items():
            rule = f"type='signal',sender='{name}',interface='{interface}',member='{member}'"
            try:
                await self._ask("AddMatch", rule)
                owner = str((await self._ask("GetNameOwner", name))[0])
            except CallFailed as error:
                log.debug("%s: %s", name, error)
            else:
                self._owners.setdefault(name, owner)
        # systemd tells only those who have asked it to
        await self._units.subscribe()

    async def _ask(self, member: str, argument: str) -> list[object]:
        return await self._connection.call(
            BUS_DRIVER, BUS_DRIVER_PATH, BUS_DRIVER, member, "s", (argument,), timeout=_TIMEOUT
        )
