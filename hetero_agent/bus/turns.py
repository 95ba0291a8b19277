"""Whose call is next: one of each uid in turn, and of its connections in turn, so that no caller can
keep another waiting, however many connections it has.

A connection has a queue of its own, bounded; the loop gives other work a chance after each slice.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from hetero_agent.bus.callers import Callers
from hetero_agent.bus.transport import Incoming
from hetero_agent.bus.whomay import Caller

#: Seconds of calls in one turn of the loop.
SLICE = 0.01
#: Bytes of arguments that may wait in all queues together.
MAX_QUEUED_BYTES = 32 * 1024 * 1024


class _Client:
    __slots__ = ("caller", "name", "open", "queue", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Incoming] = deque()
        self.open = 0
        self.caller: Caller | None = None
        self.waiting = False


class Turns:
    """Queues calls by sender and hands them to DISPATCH(message, caller), which calls `done` with
    the sender once the call is answered.

    REFUSE(message, caller or None) answers a call beyond the LIMIT of unanswered ones;
    NAMELESS(message) one whose sender the bus does not name.  While BUSY() is true (much waits
    to be written) nothing is dispatched; call `run` when that is over.
    """

    def __init__(
        self,
        callers: Callers,
        dispatch: Callable[[Incoming, Caller], None],
        refuse: Callable[[Incoming, Caller | None], None],
        nameless: Callable[[Incoming], None],
        busy: Callable[[], bool],
        limit: int,
    ) -> None:
        self.limit = limit
        self.refused = 0
        self._callers = callers
        self._dispatch = dispatch
        self._refuse = refuse
        self._nameless = nameless
        self._busy = busy
        self._clients: dict[str, _Client] = {}
        self._ready: OrderedDict[int, deque[_Client]] = OrderedDict()
        self._bytes = 0
        self._due = False

    def offer(self, message: Incoming) -> None:
        """Take a call; it is dispatched by `run`."""
        client = self._clients.get(message.sender)
        if client is None:
            client = self._clients[message.sender] = _Client(message.sender)
            client.caller = self._callers.get(message.sender)
        if client.open >= self.limit or self._bytes + len(message.body) > MAX_QUEUED_BYTES:
            self.refused += 1
            self._refuse(message, client.caller)
            self._tidy(client)
            return
        client.open += 1
        client.queue.append(message)
        self._bytes += len(message.body)
        if client.waiting:
            return
        client.waiting = True
        if client.caller is not None:
            self._line_up(client, client.caller.uid)
        else:
            self._callers.ask(message.sender, lambda caller: self._named(client, caller))

    def _named(self, client: _Client, caller: Caller | None) -> None:
        client.caller = caller
        if caller is not None:
            self._line_up(client, caller.uid)
        else:
            while client.queue:
                self._nameless(self._next(client))
                client.open -= 1
            client.waiting = False
            self._tidy(client)
        self.run()

    def run(self) -> None:
        """Dispatch for a slice of time; what is left comes in the next turns of the loop."""
        end = time.monotonic() + SLICE
        while self._ready and not self._busy():
            uid, clients = self._ready.popitem(last=False)
            client = clients.popleft()
            if clients:
                self._ready[uid] = clients
            if client.queue and client.caller is not None:
                self._dispatch(self._next(client), client.caller)
            if client.queue:
                self._line_up(client, uid)
            else:
                client.waiting = False
                self._tidy(client)
            if time.monotonic() >= end:
                if self._ready and not self._due:
                    self._due = True
                    asyncio.get_running_loop().call_soon(self._again)
                return

    def done(self, bus_name: str) -> None:
        """A call of this sender is answered."""
        client = self._clients.get(bus_name)
        if client is not None:
            client.open -= 1
            self._tidy(client)

    def gone(self, bus_name: str) -> None:
        """The connection has left: nobody waits for what it still has in the queue."""
        client = self._clients.get(bus_name)
        if client is not None and client.caller is not None:
            client.open -= len(client.queue)
            while client.queue:
                self._next(client)
            self._tidy(client)

    def _again(self) -> None:
        self._due = False
        self.run()

    def _line_up(self, client: _Client, uid: int) -> None:
        self._ready.setdefault(uid, deque()).append(client)

    def _next(self, client: _Client) -> Incoming:
        message = client.queue.popleft()
        self._bytes -= len(message.body)
        return message

    def _tidy(self, client: _Client) -> None:
        if not client.open and not client.waiting:
            self._clients.pop(client.name, None)
