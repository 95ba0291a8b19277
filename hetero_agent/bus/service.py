"""The agent on the bus, put together: what daemon.py makes, connects, and watches."""

from __future__ import annotations

import asyncio
import grp
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from hetero_agent import names
from hetero_agent.bus import errors
from hetero_agent.bus.authorize import Authorizer
from hetero_agent.bus.callers import MATCH_NAMES, Callers, Identify, deadline, name_owner_changed
from hetero_agent.bus.device import Devices
from hetero_agent.bus.dispatcher import Dispatcher, Refusals
from hetero_agent.bus.hostnews import HostNews
from hetero_agent.bus.lease import Leases
from hetero_agent.bus.logcontrol import LogControl
from hetero_agent.bus.manager import Manager
from hetero_agent.bus.mirror import Mirror
from hetero_agent.bus.objects import Objects
from hetero_agent.bus.owners import Binder, BusOwners
from hetero_agent.bus.polkit import Polkit
from hetero_agent.bus.providers import Providers, Registry
from hetero_agent.bus.publisher import Publisher
from hetero_agent.bus.transport import (
    BUS_DRIVER,
    BUS_DRIVER_PATH,
    CallFailed,
    Connection,
    Incoming,
    TransportError,
)
from hetero_agent.bus.turns import Turns
from hetero_agent.bus.units import SYSTEMD
from hetero_agent.bus.whomay import Guard
from hetero_agent.config import Config
from hetero_agent.core.effects import ErrorKind
from hetero_agent.core.ports import Engine, Exposure

log = logging.getLogger("hetero_agent.bus")

T = TypeVar("T")

#: machine-id(5)
_MACHINE_ID = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
#: org.freedesktop.DBus.RequestName: neither replace an owner, nor be replaced, nor queue.
_DO_NOT_QUEUE = 4
_PRIMARY_OWNER = 1
#: Seconds for the name service to say which gid the group has.
_GROUP_DEADLINE = 5.0


class BusService:
    """The D-Bus boundary.

    Create it inside the running loop, then `connect` (``owners`` and ``publisher`` exist from
    then on, for the engine), `request_name` once there is something to show, and
    ``publisher.start()`` after READY=1.  ``lost`` is done with the reason when the bus or the
    name is gone; there is no way back from that but a restart.
    """

    owners: BusOwners
    publisher: Publisher
    #: The bus daemon's process, which is never to be signalled; 0 before `connect`.
    bus_pid = 0
    #: What befalls the host (``reload``, ``sleep``), and whether it begins or ends.
    host_news: Callable[[str, bool], None] | None = None

    def __init__(
        self,
        config: Config,
        engine: Engine,
        identify: Identify,
        registry: Registry,
        exposure: Exposure,
        set_log_level: Callable[[str], None],
        log_target: str = "journal",
    ) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._config = config
        self._engine = engine
        self._identify = identify
        self._registry = registry
        self._exposure = exposure
        self._log_control = LogControl(config.agent.log_level, log_target, set_log_level)
        self._guard = Guard(registry.may_provide)
        self._connection: Connection
        self._host_news: HostNews
        self._callers: Callers
        self._polkit: Polkit
        self._turns: Turns
        self._dispatcher: Dispatcher
        self._manager: Manager

    # -- life -----------------------------------------------------------------------------------
    async def connect(self, address: str) -> None:
        """Connect to the bus and put all parts together.  Raises TransportError."""
        connection = self._connection = Connection(address)
        connection.lost.add_done_callback(lambda done: self._lose(done.result()))
        await connection.open()
        try:
            await self._ask_bus("AddMatch", MATCH_NAMES)
            guid = str((await self._ask_bus("GetId"))[0])
            self.bus_pid = int(str((await self._ask_bus("GetConnectionUnixProcessID", BUS_DRIVER))[0]))
        except CallFailed as error:
            connection.close()
            raise TransportError(f"the bus did not answer: {error}") from error
        await self._apply(self._config)
        self._build(connection, guid, await _in_thread(_machine_id))

    def _build(self, connection: Connection, guid: str, machine_id: str) -> None:
        engine = self._engine
        callers = self._callers = Callers(connection, self._identify)
        self.owners = BusOwners(connection, guid, engine.submit, engine.now)
        self._host_news = HostNews(connection, self.owners.units, self._tell)
        mirror = Mirror(engine.view)
        binder = Binder(callers, self.owners.units, guid)
        self._manager = Manager(self._config, engine, self._guard, mirror, binder, self._registry.usage)
        self._polkit = Polkit(connection)
        authorizer = Authorizer(self._guard, self._polkit)
        objects = Objects(engine.view, mirror, self._manager, self._log_control, machine_id)
        self.publisher = Publisher(connection, engine.view, mirror, self._manager.announced)
        self._dispatcher = Dispatcher(
            connection,
            objects,
            {
                **objects.table(),
                **self._manager.table(),
                **Devices(engine, self._guard, self._exposure).table(),
                **Leases(engine).table(),
                **Providers(self._registry).table(),
                **authorizer.table(),
            },
            authorizer,
            Refusals(engine.submit, engine.now),
            self.publisher.settle,
        )
        self._turns = Turns(
            callers,
            self._dispatcher.dispatch,
            self._dispatcher.too_many,
            self._dispatcher.nameless,
            lambda: connection.congested,
            self._config.limits.calls_per_caller,
        )
        self._dispatcher.done = self._turns.done
        connection.on_call = self._too_early
        connection.on_signal = self._signal
        connection.on_turn = self._turns.run
        connection.on_drain = self._drained
        self._host_news.start()

    async def request_name(self) -> None:
        """Show the objects and own the name.  Raises TransportError, also if it is taken."""
        self.publisher.activate()
        self._connection.on_call = self._turns.offer
        try:
            reply = await self._connection.call(
                BUS_DRIVER,
                BUS_DRIVER_PATH,
                BUS_DRIVER,
                "RequestName",
                "su",
                (names.BUS_NAME, _DO_NOT_QUEUE),
            )
        except CallFailed as error:
            raise TransportError(
                f"the bus does not let this process own {names.BUS_NAME}: {error.text}; "
                f"is {names.BUS_NAME}.conf in /usr/share/dbus-1/system.d, and was the agent started by its "
                "unit or by root?"
            ) from error
        if reply[0] != _PRIMARY_OWNER:
            raise TransportError(f"{names.BUS_NAME} has an owner already: another agent runs on this bus")

    async def reload(self, config: Config) -> None:
        """Use another configuration: group, limits, durations, control planes, log level."""
        await self._apply(config)
        self._manager.config = config
        self._turns.limit = config.limits.calls_per_caller
        self._log_control.level_changed(config.agent.log_level)
        self.publisher.manager_changed()

    def close(self) -> None:
        """Answer what is under way with an error, and leave the bus."""
        if hasattr(self, "_dispatcher"):
            self.publisher.stop()
            self._dispatcher.close()
            self._host_news.close()
            self.owners.close()
            self._callers.close()
        if hasattr(self, "_connection"):
            # cancelled calls send their replies in the next turn of the loop
            asyncio.get_running_loop().call_soon(self._connection.close)

    async def ping(self) -> None:
        """Call the agent through the bus and back: proof that bus, reader and dispatcher live.
        Raises CallFailed, also when no answer comes in time."""
        connection = self._connection
        await connection.call(
            str(connection.unique_name), names.ROOT, "org.freedesktop.DBus.Peer", "Ping", timeout=5.0
        )

    def stats(self) -> Mapping[str, int]:
        """Counters of what had to be thrown away or refused."""
        return {**self._connection.counters, "calls_refused": self._turns.refused}

    # -- news from the bus ----------------------------------------------------------------------
    def _signal(self, message: Incoming) -> None:
        changed = name_owner_changed(message)
        if changed is not None:
            name, old, new = changed
            self._host_news.owner_changed(name, new)
            if name == SYSTEMD and new:
                self.owners.units.owner_changed()
            elif name == old and not new:
                self._turns.gone(name)
                self._callers.forget(name)
                self._polkit.caller_gone(name)
                self.owners.connection_gone(name)
                self._registry.connection_lost(name)
        elif message.sender == BUS_DRIVER:
            if message.member == "NameLost" and message.arguments()[:1] == [names.BUS_NAME]:
                self._lose(f"the bus took the name {names.BUS_NAME} away")
        else:
            self._host_news.signal(message)
            self.owners.units.signal(message)

    def _tell(self, what: str, begins: bool) -> None:
        if self.host_news is not None:
            self.host_news(what, begins)

    def _drained(self) -> None:
        self._turns.run()
        self.publisher.drained()

    def _too_early(self, message: Incoming) -> None:
        self._connection.error(
            message, errors.name_of(ErrorKind.NOT_READY), "the agent is starting; ask again in a moment"
        )

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    # -- helpers --------------------------------------------------------------------------------
    async def _apply(self, config: Config) -> None:
        """Put who may what of CONFIG in force; the group's gid is looked up in a thread."""
        gid = self._guard.group_gid if config.agent.group == self._guard.group else None
        try:
            gid = await _in_thread(_gid, config.agent.group)
        except TimeoutError:
            log.warning("the name service does not answer for group %s", config.agent.group)
        if gid is None:
            log.warning("group %s does not exist: only root may allocate", config.agent.group)
        self._config = config
        self._guard.group = config.agent.group
        self._guard.group_gid = gid
        self._guard.control_planes = config.control_planes.uids

    async def _ask_bus(self, member: str, *arguments: str) -> list[object]:
        return await self._connection.call(
            BUS_DRIVER, BUS_DRIVER_PATH, BUS_DRIVER, member, "s" * len(arguments), arguments
        )


def _machine_id() -> str:
    for path in _MACHINE_ID:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) == 32:
            return text
    return "0" * 32


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


async def _in_thread(work: Callable[..., T], *arguments: object) -> T:
    return await deadline(asyncio.get_running_loop().run_in_executor(None, work, *arguments), _GROUP_DEADLINE)
