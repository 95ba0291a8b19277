"""Carries out what leases give on the host, each job within the time that effects have.

The engine starts the jobs; how each ended comes back to it as an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from hetero_agent.core.effects import AttachAccess, PrepareAccess, RenewAccess, RevokeAccess
from hetero_agent.core.events import (
    AccessAttached,
    AccessFailed,
    AccessPrepared,
    AccessRenewed,
    AccessRevoked,
    Note,
)
from hetero_agent.core.model import AuditKind, Instant, Lease
from hetero_agent.core.ports import Access, Submit
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.engine")

#: Seconds until what leases of an earlier life left is swept again after a failure, at first and at most.
SWEEP_AGAIN = 2.0
SWEEP_AGAIN_MOST = 60.0

T = TypeVar("T")


class AccessJobs:
    """See the module's text.  LEASES are those that the engine knows, NOW its clock."""

    def __init__(
        self, access: Access, leases: Mapping[str, Lease], submit: Submit, now: Callable[[], Instant]
    ) -> None:
        #: Seconds that one job may take.
        self.timeout = 10.0
        self._access = access
        self._leases = leases
        self._submit = submit
        self._now = now
        self._tasks: set[asyncio.Task[None]] = set()
        #: Leases whose turn to be renewed has not come, as they are to be.
        self._renewals: dict[str, Lease] = {}
        self._renewing = asyncio.Lock()

    def start(self, effect: PrepareAccess | RevokeAccess | RenewAccess | AttachAccess) -> None:
        """Begin what EFFECT says."""
        match effect:
            case PrepareAccess():
                self._spawn(self._prepare(effect))
            case RevokeAccess(lease):
                self._spawn(self._revoke(lease))
            case RenewAccess(leased):
                waiting = leased.id in self._renewals
                self._renewals[leased.id] = leased
                if not waiting:
                    self._spawn(self._renew(leased.id))
            case AttachAccess():
                self._spawn(self._attach(effect))

    def sweep(self) -> None:
        """Begin to undo what leases left that are not known any more, until it is done."""
        self._spawn(self._sweep())

    async def stop(self) -> None:
        """Give up what is under way; what it made or left is swept at the next start."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an effect failed", exc_info=task.exception())

    async def _prepare(self, effect: PrepareAccess) -> None:
        lease = effect.lease
        manifest, error = await self._attempt(
            self._access.prepare(lease, effect.records), f"preparing lease {lease.id}"
        )
        if manifest is None:
            self._submit(AccessFailed(self._now(), lease.id, error))
        else:
            self._submit(AccessPrepared(self._now(), lease.id, manifest))

    async def _revoke(self, lease: str) -> None:
        _, error = await self._attempt(self._access.revoke(lease), f"revoking lease {lease}")
        self._submit(AccessRevoked(self._now(), lease, error))

    async def _renew(self, name: str) -> None:
        """Renew a lease when its turn has come.  One at a time, each waiting once: whoever may write a
        node can touch it as often as he likes, and all leases that share the node are renewed then."""
        async with self._renewing:
            lease = self._renewals.pop(name)
            known = self._leases.get(name)
            if known is None or not known.alive:
                return  # nobody would take back what was made for it now
            _, error = await self._attempt(self._access.renew(lease), f"renewing lease {name}")
        self._submit(AccessRenewed(self._now(), name, error, lease.lost))

    async def _attach(self, effect: AttachAccess) -> None:
        lease, process = effect.lease, effect.process
        _, error = await self._attempt(self._access.attach(lease, process), f"attaching lease {lease.id}")
        self._submit(AccessAttached(self._now(), lease.id, process, error))

    async def _sweep(self) -> None:
        """Again after each failure: the helper may be late at a boot."""
        pause = SWEEP_AGAIN
        while True:
            work = self._access.sweep(frozenset(self._leases))
            _, error = await self._attempt(work, "sweeping what unknown leases left")
            if not error:
                return
            if pause == SWEEP_AGAIN:
                text = f"what leases gave that are not known any more can't be taken back yet: {error}"
                self._submit(Note(self._now(), AuditKind.ACCESS, text, 4))
            await asyncio.sleep(pause)
            pause = min(2 * pause, SWEEP_AGAIN_MOST)

    async def _attempt(self, work: Coroutine[Any, Any, T], what: str) -> tuple[T | None, str]:
        """Do WORK within the time that jobs have; returns its result and "", or None and why not."""
        try:
            async with asyncio.timeout(self.timeout):
                return await work, ""
        except (ValueError, OSError, TimeoutError) as error:
            return None, printable(error) or f"it took over {self.timeout:g} s"
        except Exception:
            log.exception("%s failed", what)
            return None, "the agent failed; its log says how"
