"""Confirms that wait until the network interfaces of their lease have followed its process.

Such a Confirm changes nothing before that: it is answered, and recorded, once they are where they
should be; if they can't be moved it is refused, and they are where the lease's state says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_agent.core import requests
from hetero_agent.core.effects import AttachAccess, ErrorKind, Refusal, Refuse
from hetero_agent.core.events import AccessAttached, Confirm, Token
from hetero_agent.core.model import AuditKind, Binding, Lease, Netdev, RequestKey
from hetero_agent.core.world import World
from hetero_agent.text import printable


@dataclass(frozen=True, slots=True)
class Waiting:
    """A Confirm that was found right, and whoever waits for its answer."""

    event: Confirm
    key: RequestKey
    tokens: tuple[Token, ...]


class Attachments:
    """See the module's text."""

    def __init__(self, world: World) -> None:
        self.world = world
        #: By lease.
        self._waiting: dict[str, Waiting] = {}

    @staticmethod
    def check(netdev: Netdev, binding: Binding) -> None:
        """Raises Refusal if interfaces are to move, and BINDING does not say where."""
        if netdev is Netdev.MOVE and binding.pid is None:
            raise Refusal(
                ErrorKind.INVALID_ARGUMENT,
                "with netdev=move the network interfaces go where a process is: bind a pid",
            )

    def joins(self, event: Confirm, key: RequestKey) -> bool:
        """Whether the same call waits already: then it is answered along with that.  Raises Refusal
        for another call about a lease of which one waits."""
        waiting = self._waiting.get(event.lease)
        if waiting is None:
            return False
        if waiting.key != key:
            raise Refusal(
                ErrorKind.UNAVAILABLE, "another Confirm of this lease is being carried out; try again"
            )
        requests.same(key, waiting.event.fingerprint, event.fingerprint)
        joined = replace(waiting, tokens=(*waiting.tokens, event.token))
        self.world.assign(self._waiting, event.lease, joined)
        return True

    def begins(self, event: Confirm, key: RequestKey, lease: Lease, binding: Binding) -> bool:
        """Have the interfaces of LEASE follow BINDING; False if they are where they should be."""
        if lease.netdev is not Netdev.MOVE or binding.pid == lease.binding.pid:
            return False
        self.world.assign(self._waiting, lease.id, Waiting(event, key, (event.token,)))
        self.world.effect(AttachAccess(lease, binding.pid))
        return True

    def restore(self, lease: Lease) -> None:
        """Have the interfaces of LEASE where its state says, whatever was under way."""
        if lease.netdev is Netdev.MOVE:
            self.world.effect(AttachAccess(lease, lease.binding.pid))

    def attached(self, event: AccessAttached) -> Waiting | None:
        """Returns the Confirm that can be recorded now, if there is one; one that failed is refused."""
        world = self.world
        lease = world.leases.get(event.lease)
        if lease is None or not lease.alive:
            return None
        waiting = self._waiting.get(event.lease)
        if waiting is None or waiting.event.binding.pid != event.process:
            if event.error:
                text = "its network interfaces are not where they should be"
                self.world.access_failed(lease.id, event.at, text, event.error)
            return None
        world.discard(self._waiting, event.lease)
        if not event.error:
            return waiting
        refusal = Refusal(
            ErrorKind.STORE_FAILED if event.store else ErrorKind.UNAVAILABLE,
            f"{printable(event.error)}; the lease is as it was",
        )
        world.audit(
            AuditKind.REFUSED,
            event.at,
            f"Confirm of uid {waiting.event.actor.uid} refused: {refusal.kind}: {refusal.text}",
            priority=5,
            reason=str(refusal.kind),
            actor=waiting.event.actor,
            request_id=waiting.event.request_id,
        )
        self._refuse(waiting, refusal)
        self.restore(lease)
        return None

    def ended(self, lease: Lease) -> None:
        """LEASE has ended: what waits for it is refused."""
        waiting = self._waiting.get(lease.id)
        if waiting is not None:
            self.world.discard(self._waiting, lease.id)
            self._refuse(
                waiting, Refusal(ErrorKind.LEASE_ENDED, f"the lease has ended ({lease.result}); allocate anew")
            )

    def _refuse(self, waiting: Waiting, refusal: Refusal) -> None:
        for token in waiting.tokens:
            self.world.effect(Refuse(token, refusal.kind, refusal.text))
