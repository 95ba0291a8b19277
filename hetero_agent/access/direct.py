"""The hands in this process: an agent that is root and has no helper."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from hetero_agent.access.door import in_thread
from hetero_agent.access.grant import Grant
from hetero_agent.access.hands import Hands
from hetero_agent.access.manifest import AccessError, each
from hetero_agent.access.namespaces import Process
from hetero_agent.access.netdev import Netdevs

_NETWORK: Final = "network interfaces"
#: Seconds for them: drivers take their time to switch a card on.
_DEADLINE: Final = 15.0


class Direct:
    """Has HANDS do it at once, on the loop: all of it is a few calls on file systems of the kernel's
    (tmpfs, devtmpfs) that ask no server and no user, and so take microseconds.

    NETDEVS ask the kernel's network, which can take its time: in a thread.
    """

    problem = ""

    def __init__(self, hands: Hands, netdevs: Netdevs) -> None:
        self._hands = hands
        self._netdevs = netdevs

    async def prepare(self, grant: Grant) -> None:
        """See `Hands.prepare`."""
        self._hands.prepare(grant)

    async def renew(self, grant: Grant) -> None:
        """See `Hands.prepare` and `Netdevs.retain`."""
        if grant.lease in self._netdevs:
            await in_thread(lambda: self._netdevs.retain(grant), _NETWORK, _DEADLINE)
        self._hands.prepare(grant)

    async def attach(self, grant: Grant, process: Process | None) -> None:
        """See `Netdevs.attach`."""
        await in_thread(lambda: self._netdevs.attach(grant, process), _NETWORK, _DEADLINE)

    async def revoke(self, lease: str) -> None:
        """See `Hands.revoke` and `Netdevs.detach`."""
        detached = await self._detach([lease])
        each(detached, lambda: self._hands.revoke(lease))

    async def sweep(self, live: Collection[str]) -> None:
        """See `Hands.sweep` and `Netdevs.detach`."""
        detached = await self._detach([one for one in self._netdevs.leases() if one not in live])
        each(detached, lambda: self._hands.sweep(live))

    async def _detach(self, leases: Collection[str]) -> Callable[[], None]:
        """Bring back what LEASES have elsewhere; returns what raises the error of it, if there was one."""
        away = [lease for lease in leases if lease in self._netdevs]
        failure: AccessError | None = None
        if away:
            try:
                await in_thread(lambda: self._netdevs.detach(*away), _NETWORK, _DEADLINE)
            except AccessError as error:
                failure = error

        def outcome() -> None:
            if failure is not None:
                raise failure

        return outcome

    def close(self) -> None:
        """Nothing to close."""
