"""What leases give on the host: kept up while they live, taken back after they ended."""

from __future__ import annotations

from dataclasses import replace

from hetero_agent.core.effects import RenewAccess, RequestScan
from hetero_agent.core.events import AccessRenewed, AccessRevoked, NodesTouched
from hetero_agent.core.lifecycle import Trigger
from hetero_agent.core.model import AuditKind, Instant
from hetero_agent.core.world import World, in_hands
from hetero_agent.text import printable

#: Boot µs until a failed revocation is tried again, and in which touches of nodes count as one.
_AGAIN = 1_000_000
_TOUCHES = 100_000


class Upkeep:
    """See the module's text."""

    def __init__(self, world: World) -> None:
        self.world = world
        #: Leases of which something could not be made again -> why.
        self._lacking: dict[str, str] = {}

    def lacking(self, lease_id: str) -> str:
        """Why a lease does not give all that it should, "" if it does."""
        return self._lacking.get(lease_id, "")

    # -- while they live -------------------------------------------------------------------------
    def touched(self, event: NodesTouched) -> None:
        """A node's mode or ACL changed: whoever did it may have taken away what a lease gives."""
        device = self.world.devices.get(event.device)
        if device is not None and device.lease and in_hands(device):
            self.world.alarm(event.at.boot + _TOUCHES, "renew", device.lease)

    def renew(self, lease_id: str) -> None:
        """See that a granted lease gives all that it should."""
        lease = self.world.leases.get(lease_id)
        if lease is not None and lease.alive and lease.granted:
            self.world.effect(RenewAccess(lease))

    def renewed(self, event: AccessRenewed) -> None:
        """It does, or it can't be made so: said once."""
        lease = self.world.leases.get(event.lease)
        before = self._lacking.get(event.lease, "")
        if lease is None or not lease.alive or event.error == before:
            return
        if event.error:
            self.world.assign(self._lacking, event.lease, event.error)
            self._problem(lease.id, event.at, "could not be made whole", event.error)
        else:
            self.world.discard(self._lacking, event.lease)

    # -- after their end -------------------------------------------------------------------------
    def revoked(self, event: AccessRevoked) -> None:
        """What an ended lease gave is taken back, or the attempt failed and is made again."""
        world = self.world
        world.discard(self._lacking, event.lease)
        before = world.revoking.get(event.lease)
        if before is None:
            return
        if event.error:
            world.assign(world.revoking, event.lease, replace(before, error=event.error))
            world.alarm(event.at.boot + _AGAIN, "revoke", event.lease)
            if event.error != before.error:
                self._problem(event.lease, event.at, "could not be taken back", event.error)
            return
        world.discard(world.revoking, event.lease)
        waiting = tuple(one for one, debt in world.debts.items() if debt.lease == event.lease)
        if before.waiting and waiting:
            world.effect(RequestScan(waiting))

    def again(self, lease_id: str) -> None:
        """Another attempt to take back what a lease gave is due."""
        if lease_id in self.world.revoking:
            self.world.revoke(lease_id)

    def _problem(self, lease_id: str, at: Instant, what: str, error: str) -> None:
        self.world.audit(
            AuditKind.ACCESS,
            at,
            f"lease {lease_id}: what it gives {what}: {printable(error)}",
            priority=4,
            lease=lease_id,
            trigger=Trigger.EFFECT_FAILED,
            reason=error,
        )
