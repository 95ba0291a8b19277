"""Something on the bus that has the agent's name and answers as the test says.

For what the real agent does not do on demand: go away in mid-call, answer each error by name, send
signals of any shape.  It is a real peer on a real bus, in a thread of the test.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from dbus_next import Variant
from dbus_next.aio import MessageBus
from dbus_next.constants import MessageType, RequestNameReply
from dbus_next.message import Message

from hetero_agent import names

#: A handler gets the message and returns (signature, body), a `Problem`, or None for no answer.
Handler = Callable[[Any], Any]

MANAGER_PROPERTIES: dict[str, Variant] = {
    "AgentVersion": Variant("s", "9.9"),
    "ProtocolVersions": Variant("au", [1]),
    "Epoch": Variant("s", "epoch-1"),
    "Generation": Variant("t", 7),
    "Ready": Variant("b", True),
    "Resources": Variant("a{sa{su}}", {}),
    "MaxLeases": Variant("u", 4096),
    "Leases": Variant("u", 1),
    "MaxLeasesPerUid": Variant("u", 1024),
}


class Problem:
    """An error reply: NAME is ours without the prefix, or a full one."""

    def __init__(self, name: str, text: str = "as the test says") -> None:
        self.name = name if "." in name else names.ERROR_PREFIX + name
        self.text = text


def device_row(device_id: str, state: str = "idle", **more: Any) -> list[Any]:
    """Return a row of GetSnapshot; MORE are lease (id), reason, health, resource, aliases."""
    return [
        names.device_path(device_id),
        device_id,
        more.get("resource", "example.com/npu"),
        state,
        more.get("health", "healthy"),
        more.get("reason", ""),
        more.get("cordoned", False),
        names.lease_path(more.get("lease", "")),
        1_700_000_000_000_000,
        {"aliases": Variant("as", more.get("aliases", [])), "model": Variant("s", more.get("model", ""))},
    ]


def snapshot(*rows: list[Any], complete: bool = True, pages: int = 1, generation: int = 7) -> Any:
    """Return the answer of GetSnapshot for one page with ROWS."""
    header = {
        "page": Variant("u", 0),
        "pages": Variant("u", pages),
        "total": Variant("u", len(rows)),
        "epoch": Variant("s", "epoch-1"),
        "generation": Variant("t", generation),
        "complete": Variant("b", complete),
    }
    return "a{sv}a(osssssbota{sv})", [header, list(rows)]


def lease_properties(lease_id: str, **more: Any) -> dict[str, Variant]:
    """Return the properties of a lease object."""
    return {
        "Id": Variant("s", lease_id),
        "Resource": Variant("s", more.get("resource", "example.com/npu")),
        "Devices": Variant("ao", [names.device_path(one) for one in more.get("devices", ["npu-0"])]),
        "State": Variant("s", more.get("state", "active")),
        "Result": Variant("s", more.get("result", "")),
        "OwnerUid": Variant("u", more.get("uid", 0)),
        "Client": Variant("s", more.get("client", "")),
        "Created": Variant("t", 1_700_000_000_000_000),
        "CreatedBoottime": Variant("t", 1),
        "Deadline": Variant("t", more.get("deadline", 0)),
        "DeadlineBoottime": Variant("t", 0),
        "Lost": Variant("ao", [names.device_path(one) for one in more.get("lost", [])]),
    }


class StandIn:
    """Owns the agent's name on the bus at ADDRESS.  ANSWERS maps a member, or (path, member), to
    an answer or to a handler that makes it; CALLS are the messages so far."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: dict[Any, Any] = {
            "GetAll": lambda message: ("a{sv}", [MANAGER_PROPERTIES]),
            "GetSnapshot": snapshot(),
            "GetManagedObjects": ("a{oa{sa{sv}}}", [{}]),
            **dict.fromkeys(("CanAllocate", "CanReleaseOthers", "CanCordon", "CanReap"), ("s", ["yes"])),
        }
        self.calls: list[Any] = []
        self.unique_name = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._bus: Any = None

    def start(self) -> StandIn:
        """Connect and take the name."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    async def _start(self) -> None:
        self._bus = await MessageBus(self.address).connect()
        # nobody waits for the end of the connection; the loop would complain of that
        self._bus._disconnect_future.add_done_callback(lambda ended: ended.exception())
        self._bus.add_message_handler(self._handle)
        assert await self._bus.request_name(names.BUS_NAME) is RequestNameReply.PRIMARY_OWNER
        self.unique_name = self._bus.unique_name

    def leave(self) -> None:
        """Drop the connection, with whatever is unanswered."""
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result(10)

    async def _leave(self) -> None:
        if self._bus is not None:
            self._bus.disconnect()
            self._bus = None
        await asyncio.sleep(0)

    def close(self) -> None:
        self.leave()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def members(self) -> list[str]:
        """The members called so far."""
        return [message.member for message in self.calls]

    def emit(self, path: str, interface: str, member: str, signature: str, *body: Any) -> None:
        """Send a signal."""
        message = Message.new_signal(path, interface, member, signature, list(body))
        self._loop.call_soon_threadsafe(self._bus.send, message)

    def _handle(self, message: Any) -> Any:
        if message.message_type is not MessageType.METHOD_CALL:
            return None
        self.calls.append(message)
        answer = self.answers.get((message.path, message.member), self.answers.get(message.member))
        if callable(answer):
            answer = answer(message)
        if answer is None and message.member not in self.answers:
            answer = Problem("org.freedesktop.DBus.Error.UnknownMethod", message.member)
        if answer is None:
            return True
        if isinstance(answer, Problem):
            return Message.new_error(message, answer.name, answer.text)
        signature, body = answer
        return Message.new_method_return(message, signature, body)
