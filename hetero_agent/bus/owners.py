"""Whose life a lease hangs on, as far as the bus knows: units and connections."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

from hetero_agent.bus.callers import Callers
from hetero_agent.bus.decode import Wanted
from hetero_agent.bus.errors import invalid
from hetero_agent.bus.transport import BUS_DRIVER, BUS_DRIVER_PATH, CallFailed, Connection
from hetero_agent.bus.units import Units
from hetero_agent.bus.whomay import Caller
from hetero_agent.core import rights
from hetero_agent.core.containers import container_of
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.events import Event, OwnerGone
from hetero_agent.core.model import Binding, ConnectionRef, Instant, UnitRef
from hetero_agent.core.ports import ProcessFacts

log = logging.getLogger("hetero_agent.bus")

#: Seconds until the bus is asked again for what it did not tell.
_RETRY = 5.0


class BusOwners:
    """Watches the unit and connection parts of bindings and submits OwnerGone when one ends.

    GUID is the bus's: a connection of another life of the bus is gone whatever its name says.
    """

    def __init__(
        self,
        connection: Connection,
        guid: str,
        submit: Callable[[Event], None],
        now: Callable[[], Instant],
    ) -> None:
        self._connection = connection
        self._guid = guid
        self._submit = submit
        self._now = now
        self._bound: dict[str, str] = {}
        self._leases: defaultdict[str, set[str]] = defaultdict(set)
        self._tasks: set[asyncio.Task[None]] = set()
        self.units = Units(connection, lambda lease: self._tell(lease, "unit"))

    def watch(self, lease: str, binding: Binding) -> None:
        """Report the end of what BINDING names, at once if it has ended; replaces an earlier
        watch."""
        self.unwatch(lease)
        if binding.unit is not None:
            self.units.watch(lease, binding.unit)
        if binding.connection is not None:
            self._watch_connection(lease, binding.connection)

    def unwatch(self, lease: str) -> None:
        """Forget it."""
        self.units.unwatch(lease)
        name = self._bound.pop(lease, None)
        if name is not None:
            self._leases[name].discard(lease)
            if not self._leases[name]:
                del self._leases[name]

    def connection_gone(self, bus_name: str) -> None:
        """The bus says that this connection has left."""
        for lease in tuple(self._leases.get(bus_name, ())):
            self._tell(lease, "connection")

    def close(self) -> None:
        """Stop watching."""
        self.units.close()
        for task in self._tasks:
            task.cancel()

    def _watch_connection(self, lease: str, ref: ConnectionRef) -> None:
        self._bound[lease] = ref.name
        self._leases[ref.name].add(lease)
        loop = asyncio.get_running_loop()
        if ref.bus != self._guid:
            loop.call_soon(self._past, lease, ref.name)
            return
        # news of names is subscribed to already; what happened before is asked for
        task = loop.create_task(self._check_connection(lease, ref.name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check_connection(self, lease: str, name: str) -> None:
        while self._bound.get(lease) == name:
            try:
                reply = await self._connection.call(
                    BUS_DRIVER, BUS_DRIVER_PATH, BUS_DRIVER, "NameHasOwner", "s", (name,)
                )
            except CallFailed as error:
                # no news of it will come if it had gone before
                log.warning("whether connection %s lives can't be told: %s", name, error)
                await asyncio.sleep(_RETRY)
                continue
            if not reply[0]:
                self._past(lease, name)
            return

    def _past(self, lease: str, name: str) -> None:
        """The connection was gone before it was watched; the lease may be bound anew meanwhile."""
        if self._bound.get(lease) == name:
            self._tell(lease, "connection")

    def _tell(self, lease: str, how: str) -> None:
        self.unwatch(lease)
        self._submit(OwnerGone(self._now(), lease, how))


class Binder:
    """Finds out what a caller's binding names, and whether the caller may bind it."""

    def __init__(self, callers: Callers, units: Units, guid: str) -> None:
        self._callers = callers
        self._units = units
        self._guid = guid

    async def resolve(self, caller: Caller, wanted: Wanted) -> Binding:
        """Return the binding.  Raises Refusal."""
        process = await self._process(caller, wanted.pid) if wanted.pid else None
        container = container_of(process.cgroup) if process is not None else None
        return Binding(
            pid=process.ref if process is not None else None,
            unit=await self._unit(caller, wanted.unit) if wanted.unit else None,
            connection=ConnectionRef(caller.bus_name, self._guid) if wanted.connection else None,
            ttl=wanted.ttl,
            cgroup=container.path if container is not None else "",
        )

    async def _process(self, caller: Caller, pid: int) -> ProcessFacts:
        try:
            facts = await self._callers.facts(pid)
        except TimeoutError:
            raise Refusal(
                ErrorKind.UNAVAILABLE, f"pid: /proc of process {pid} does not answer; bind another process"
            ) from None
        except OSError as error:
            raise Refusal(
                ErrorKind.UNAVAILABLE,
                f"pid: process {pid} can't be looked at ({error.strerror}); try again later",
            ) from None
        if facts is None:
            raise invalid(f"pid: there is no process {pid}")
        why_not = rights.may_bind_pid(caller.uid, facts)
        if why_not:
            raise Refusal(ErrorKind.NOT_AUTHORIZED, f"pid: {why_not}")
        return facts

    async def _unit(self, caller: Caller, unit: str) -> UnitRef:
        why_not = rights.may_bind_unit(caller.uid, caller.unit, unit)
        if why_not:
            raise Refusal(ErrorKind.NOT_AUTHORIZED, f"unit: {why_not}")
        return await self._units.resolve(unit)
