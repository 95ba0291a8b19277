"""A watch over a lease while what it was obtained for runs: tells what befalls it, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import short
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client import Client, Manifest
    from hetero_agent.client.events import Event
    from hetero_agent.client.results import Lease

#: Seconds for the question, after the command, whether the lease still lived.
_LAST_QUESTION: Final = 2.0

#: The end of a lease that follows from the end of its owner.
_OWN_END: Final = "owner-gone"


class Vigil:
    """Watches over the lease of MANIFEST; a context manager around what it was obtained for.

    STATUS gives the command's exit code, None while it runs.  OURS says that the lease ends with the
    command; it does not where another process has it.
    """

    def __init__(
        self, client: Client, manifest: Manifest, status: Callable[[], int | None], *, ours: bool = True
    ) -> None:
        self._client = client
        self._manifest = manifest
        self._status = status
        self._ours = ours
        #: How the lease ended before its command, "" while it lives.
        self.result = ""
        #: Set when it has ended so.
        self.ended = asyncio.Event()
        self._lost: set[str] = set()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.wait({self._watching})
        if not self._watching.cancelled() and (error := self._watching.exception()) is not None:
            say(f"lost sight of the lease while the command ran: {error}")
        if kind is None:
            await self._last_look()

    def code(self, status: int) -> int:
        """Return the exit code of all, the command's own being STATUS."""
        if self.result or (self._lost and status):
            what = f"the lease ended ({self.result})" if self.result else "the lease lost devices"
            say(f"{what} while the command ran; it ended with {status}")
            return exitcodes.LEASE_LOST
        return status

    async def _watch(self) -> None:
        from hetero_agent import names  # noqa: PLC0415
        from hetero_agent.client import HeteroError, events  # noqa: PLC0415

        client = self._client
        path = names.lease_path(self._manifest.lease)
        async with (
            client.watch(events.PropertiesChanged, path=path) as own,
            client.watch(events.LeaseEnded, events.HealthEvent, path=names.ROOT) as all_leases,
        ):
            try:
                self._judge(await client.lease(path))
            except HeteroError as error:
                self._not_there(error)

            async def follow(watch: Any) -> None:
                async for event in watch:
                    if isinstance(event, (events.AgentChanged, events.Missed)):
                        with contextlib.suppress(HeteroError):
                            await self._ask(path)
                    else:
                        self._hear(event)

            async with asyncio.TaskGroup() as group:
                group.create_task(follow(own))
                group.create_task(follow(all_leases))

    def _hear(self, event: Event) -> None:
        from hetero_agent.client import events  # noqa: PLC0415
        from hetero_agent.client.results import device_of  # noqa: PLC0415

        match event:
            case events.PropertiesChanged(changed=changed):
                self._lose(device_of(one) for one in changed.get("Lost", ()))
                if changed.get("Result"):
                    self._end(changed["Result"])
            case events.LeaseEnded(lease=lease, result=result):
                if lease == self._manifest.lease:
                    self._end(result)
            case events.HealthEvent() if event.device in self._manifest.devices:
                why = f": {event.reason}" if event.reason else ""
                say(f"device {event.device} is {event.health}{why}")

    async def _ask(self, path: str) -> None:
        from hetero_agent.client.errors import NotFound  # noqa: PLC0415

        try:
            self._judge(await self._client.lease(path))
        except NotFound as error:
            self._not_there(error)

    def _judge(self, lease: Lease) -> None:
        self._lose(lease.lost)
        if not lease.alive:
            self._end(lease.result or lease.state)

    def _not_there(self, error: Exception) -> None:
        from hetero_agent.client.errors import NotFound  # noqa: PLC0415

        if isinstance(error, NotFound):
            self._end("gone")

    def _lose(self, devices: Any) -> None:
        for device in devices:
            if device not in self._lost:
                self._lost.add(device)
                say(f"device {device} was unplugged or lost its driver")

    def _end(self, result: str) -> None:
        """The lease has ended.  If that follows from the command's own end, it is as it should be."""
        status = self._status()
        follows = result in (_OWN_END, "gone") if status is not None else result == _OWN_END
        if self.result or (follows and (self._ours or status is not None)):
            return
        self.result = result
        self.ended.set()
        say(f"the lease {short(self._manifest.lease)} ended: {result}")

    async def _last_look(self) -> None:
        """The command may have ended because the lease did, and been faster than the news."""
        from hetero_agent import names  # noqa: PLC0415
        from hetero_agent.client import HeteroError  # noqa: PLC0415

        if self.result or not self._client.agent_present:
            return
        with contextlib.suppress(HeteroError, TimeoutError):
            async with asyncio.timeout(_LAST_QUESTION):
                lease = await self._client.lease(names.lease_path(self._manifest.lease))
                self._lose(lease.lost)
                if not lease.alive:
                    self._end(lease.result)


def say(text: str) -> None:
    """Tell the person who runs heteroctl, on stderr; who does not listen is no reason to fail."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"heteroctl: {printable(text, 400)}\n")
        sys.stderr.flush()
