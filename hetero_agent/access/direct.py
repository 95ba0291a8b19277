"""The hands in this process: an agent that is root and has no helper."""

from __future__ import annotations

from collections.abc import Collection

from hetero_agent.access.grant import Grant
from hetero_agent.access.hands import Hands


class Direct:
    """Has HANDS do it at once, on the loop: all of it is a few calls on file systems of the kernel's
    (tmpfs, devtmpfs) that ask no server and no user, and so take microseconds."""

    problem = ""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands

    async def prepare(self, grant: Grant) -> None:
        """See `Hands.prepare`."""
        self._hands.prepare(grant)

    async def renew(self, grant: Grant) -> None:
        """See `Hands.prepare`."""
        self._hands.prepare(grant)

    async def revoke(self, lease: str) -> None:
        """See `Hands.revoke`."""
        self._hands.revoke(lease)

    async def sweep(self, live: Collection[str]) -> None:
        """See `Hands.sweep`."""
        self._hands.sweep(live)

    def close(self) -> None:
        """Nothing to close."""
