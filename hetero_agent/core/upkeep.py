"""What leases give on the host: kept up while they live, taken back after they ended."""

from __future__ import annotations

from dataclasses import replace

from hetero_agent.core.effects import RenewAccess, RequestScan
from hetero_agent.core.events import AccessRenewed, AccessRevoked, NodesTouched
from hetero_agent.core.model import Instant
from hetero_agent.core.world import World, in_hands

#: Boot µs until a failed revocation is tried again, in which touches of nodes count as one, and that
#: a lease is renewed apart at the least: whoever may write a node can touch it as often as he likes.
_AGAIN = 1_000_000
_TOUCHES = 100_000
_APART = 1_000_000


class Upkeep:
    """See the module's text."""

    def __init__(self, world: World) -> None:
        self.world = world
        #: Leases of which something could not be made again -> why; "" while that was seen only once:
        #: perhaps a device was just unplugged, and the news is under way.
        self._lacking: dict[str, str] = {}
        #: Leases whose nodes were touched -> when they are, or were, renewed for it.
        self._renewed: dict[str, int] = {}

    # -- while they live -------------------------------------------------------------------------
    def touched(self, event: NodesTouched) -> None:
        """A node's mode or ACL changed: whoever did it may have taken away what a lease gives."""
        device = self.world.devices.get(event.device)
        if device is None or not device.lease or not in_hands(device):
            return
        last = self._renewed.get(device.lease, 0)
        if last < event.at.boot:
            due = max(event.at.boot + _TOUCHES, last + _APART)
            self.world.assign(self._renewed, device.lease, due)
            self.world.alarm(due, "renew", device.lease)

    def renew(self, lease_id: str) -> None:
        """See that a granted lease gives all that it should."""
        lease = self.world.leases.get(lease_id)
        if lease is not None and lease.alive and lease.granted:
            if lease.lost:
                self.world.retract(lease)
            else:
                self.world.effect(RenewAccess(lease))

    def renewed(self, event: AccessRenewed) -> None:
        """It does, or it can't be made so, twice: said once."""
        lease = self.world.leases.get(event.lease)
        if lease is None or not lease.alive:
            return
        if lease.id in self.world.revoking and event.lost == lease.lost:
            self._taken_back(lease.id, event.error, event.at, "renew")
        before = self._lacking.get(event.lease)
        if not event.error:
            self.world.discard(self._lacking, event.lease)
        elif before is None:
            self.world.assign(self._lacking, event.lease, "")
            self.world.alarm(event.at.boot + _AGAIN, "renew", event.lease)
        elif event.error != before:
            self.world.assign(self._lacking, event.lease, event.error)
            self.world.access_failed(lease.id, event.at, "what it gives could not be made whole", event.error)

    # -- after their end -------------------------------------------------------------------------
    def revoked(self, event: AccessRevoked) -> None:
        """What an ended lease gave is taken back, or the attempt failed and is made again."""
        self.world.discard(self._lacking, event.lease)
        self.world.discard(self._renewed, event.lease)
        before = self.world.revoking.get(event.lease)
        if before is not None:
            self._taken_back(event.lease, event.error, event.at, "revoke")
            if event.error and event.error != before.error:
                text = "what it gives could not be taken back"
                self.world.access_failed(event.lease, event.at, text, event.error)

    def _taken_back(self, lease_id: str, error: str, at: Instant, again: str) -> None:
        world = self.world
        before = world.revoking[lease_id]
        if error:
            world.assign(world.revoking, lease_id, replace(before, error=error))
            world.alarm(at.boot + _AGAIN, again, lease_id)
            return
        world.discard(world.revoking, lease_id)
        waiting = tuple(one for one, debt in world.debts.items() if debt.lease == lease_id)
        if before.waiting and waiting:
            world.effect(RequestScan(waiting))

    def again(self, lease_id: str) -> None:
        """Another attempt to take back what a lease gave is due."""
        if lease_id in self.world.revoking:
            self.world.revoke(lease_id)
