"""The hands in another process: the agent's privileged helper, asked over a socket.

One connection, one request at a time, answered in order.  All requests may be repeated, so one that
the helper's end cut off is simply sent again; one that took too long takes its connection with it, so
that a late answer is never taken for the next request's.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

from hetero_agent.access.grant import Grant
from hetero_agent.access.grantfile import GrantFiles
from hetero_agent.access.manifest import AccessError, UnansweredError
from hetero_agent.access.namespaces import Process
from hetero_agent.access.protocol import ANSWER_MAX, VERSION
from hetero_agent.text import printable

_START: Final = "systemctl enable --now hetero-agent-access.socket"
_RESTART: Final = "systemctl restart hetero-agent-access.socket"


class Remote:
    """Asks the helper behind SOCKET, and tells it what leases give by files in GRANTS.

    DEADLINE is the seconds that a request may take.  Without the socket nothing is made, and
    `problem` says so; nor is it if it is not WANTED, but what was made before is undone.
    """

    def __init__(self, path: Path, grants: Path, deadline: float, *, wanted: bool = True) -> None:
        self._path = path
        self._wanted = wanted
        self._files = GrantFiles(grants)
        self.deadline = deadline
        self._connection: socket.socket | None = None
        self._closed = False
        self._unreachable = ""
        self._turn = asyncio.Lock()
        self._renewals = asyncio.Lock()

    @property
    def problem(self) -> str:
        """What an administrator should know, "" if all is well."""
        if self._wanted and not self._path.exists():
            return f"no access helper ({self._path}), so leases give no ACLs and no CDI files: {_START}"
        return self._unreachable

    async def prepare(self, grant: Grant) -> None:
        """Have the helper make what GRANT gives.  Raises AccessError; `revoke` undoes what may be
        there then."""
        if not self._wanted or not self._path.exists():
            return
        try:
            self._files.write(grant)
        except OSError as error:
            raise AccessError(f"the grant can't be written down: {printable(error)}") from error
        await self._ask("prepare", grant.lease)

    async def renew(self, grant: Grant) -> None:
        """Have the helper make what is missing of GRANT.  After a start all leases are renewed: only
        one of them at a time is in the way of others' requests.  Raises AccessError."""
        async with self._renewals:
            await self.prepare(grant)

    async def attach(self, grant: Grant, process: Process | None) -> None:
        """Have the helper move the network interfaces of GRANT, which it was told of.  Raises
        AccessError."""
        if not self._wanted or not self._path.exists():
            raise AccessError(f"network interfaces can't be moved without the access helper: {_START}")
        pid, start = process or (0, 0)
        await self._ask("attach", grant.lease, pid=pid, start=start)

    async def revoke(self, lease: str) -> None:
        """Have the helper undo LEASE, if it was ever told of it.  Raises AccessError."""
        if self._files.exists(lease):
            await self._ask("revoke", lease)
            try:
                self._files.remove(lease)
            except OSError as error:
                raise AccessError(f"the grant file can't be removed: {printable(error)}") from error

    async def sweep(self, live: Collection[str]) -> None:
        """Have the helper undo all that is not of a lease in LIVE.  Raises AccessError."""
        try:
            self._files.keep(live)
        except OSError as error:
            raise AccessError(f"old grant files can't be removed: {printable(error)}") from error
        if self._path.exists():
            await self._ask("sweep")

    def close(self) -> None:
        """Close the connection, after the request that is being answered."""
        self._closed = True
        if not self._turn.locked():
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _ask(self, what: str, lease: str = "", **more: int) -> None:
        request = {"version": VERSION, "do": what} | ({"lease": lease} if lease else {}) | more
        data = json.dumps(request).encode()
        try:
            async with asyncio.timeout(self.deadline), self._turn:
                answer = await self._exchange(data)
        except TimeoutError as error:
            self._unreachable = f"the access helper does not answer within {self.deadline:g} s: {_RESTART}"
            raise UnansweredError(self._unreachable) from error
        except OSError as error:
            self._unreachable = f"the access helper can't be reached ({error.strerror}): {_RESTART}"
            raise UnansweredError(self._unreachable) from error
        self._unreachable = ""
        try:
            result = json.loads(answer)
            if result["ok"] is True:
                return
            text = printable(result["error"], 512)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise AccessError("the access helper's answer makes no sense") from error
        raise AccessError(text)

    async def _exchange(self, data: bytes) -> bytes:
        """Send DATA and return the answer; once more from the start if the helper ended meanwhile,
        as it does when it has been idle."""
        answered = False
        try:
            try:
                answer = await self._once(data)
            except ConnectionError:
                self._disconnect()
                answer = await self._once(data)
            answered = True
            return answer
        finally:
            if self._closed or not answered:
                self._disconnect()

    async def _once(self, data: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        if self._connection is None:
            self._connection = socket.socket(
                socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            )
            await loop.sock_connect(self._connection, str(self._path))
        await loop.sock_sendall(self._connection, data)
        answer = await loop.sock_recv(self._connection, ANSWER_MAX)
        if not answer:
            raise ConnectionResetError(errno.ECONNRESET, "it ended")
        return answer
