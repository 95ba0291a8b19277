"""The little of org.freedesktop.systemd1(5) and org.freedesktop.login1(5) that the agent listens to,
on a private bus: this machine's PID 1 is no systemd."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dbus_next import Message, MessageType, Variant
from dbus_next.aio import MessageBus

from tests.support.bus import PrivateBus

NAME = "org.freedesktop.systemd1"
PATH = "/org/freedesktop/systemd1"
LOGIND = "org.freedesktop.login1"
PROPERTIES = "org.freedesktop.DBus.Properties"

#: What the bus must allow for it.
POLICY = f"""
<policy user="root"><allow own="{NAME}"/><allow own="{LOGIND}"/></policy>
<policy context="default"><allow send_destination="{NAME}"/></policy>
"""


class FakeSystemd:
    """Owns systemd's name on BUS; UNITS maps unit names to (ActiveState, InvocationID in hex),
    MAIN_PIDS those of services to their main process, SUB_STATES to their SubState."""

    def __init__(self, bus: PrivateBus, units: Mapping[str, tuple[str, str]] | None = None) -> None:
        self.units: dict[str, tuple[str, str]] = dict(units or {})
        self.main_pids: dict[str, int] = {}
        self.sub_states: dict[str, str] = {}
        self.subscribed = 0
        self.mute = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._bus: MessageBus
        asyncio.run_coroutine_threadsafe(self._start(bus), self._loop).result(10)

    async def _start(self, bus: PrivateBus) -> None:
        self._bus = await MessageBus(bus_address=bus.address).connect()
        self._bus.add_message_handler(self._handle)
        await self._bus.request_name(LOGIND)
        await self._bus.request_name(NAME)

    def _handle(self, message: Message) -> Message | bool:
        if message.message_type is not MessageType.METHOD_CALL or self.mute:
            return self.mute
        if message.member == "Subscribe":
            self.subscribed += 1
            return Message.new_method_return(message)
        if message.member == "GetUnit":
            name = message.body[0]
            if name not in self.units:
                return Message.new_error(message, NAME + ".NoSuchUnit", f"Unit {name} not loaded.")
            return Message.new_method_return(message, "o", [self.path(name)])
        if message.member == "Get":
            name, (state, invocation) = next(
                one for one in self.units.items() if self.path(one[0]) == message.path
            )
            values = {
                "ActiveState": Variant("s", state),
                "InvocationID": Variant("ay", bytes.fromhex(invocation)),
                "SubState": Variant("s", self.sub_states.get(name, "running")),
                "MainPID": Variant("u", self.main_pids.get(name, 0)),
            }
            return Message.new_method_return(message, "v", [values[message.body[1]]])
        return Message.new_error(message, "org.freedesktop.DBus.Error.UnknownMethod", "no")

    @staticmethod
    def path(name: str) -> str:
        """The unit's object path."""
        return PATH + "/unit/" + "".join(one if one.isalnum() else f"_{ord(one):02x}" for one in name)

    def set(self, name: str, state: str, invocation: str) -> None:
        """Put a unit into another state and tell subscribers."""
        self.units[name] = (state, invocation)
        changed = {"ActiveState": Variant("s", state)}
        body = [NAME + ".Unit", changed, []]
        self.send(Message.new_signal(self.path(name), PROPERTIES, "PropertiesChanged", "sa{sv}as", body))

    def remove(self, name: str) -> None:
        """Unload a unit, with UnitRemoved only."""
        del self.units[name]
        self.send(Message.new_signal(PATH, NAME + ".Manager", "UnitRemoved", "so", [name, self.path(name)]))

    def reloading(self, begins: bool) -> None:
        """Read all units again (daemon-reload): told when it begins and when it ends."""
        self.send(Message.new_signal(PATH, NAME + ".Manager", "Reloading", "b", [begins]))

    def prepare_for_sleep(self, begins: bool) -> None:
        """As logind: the machine is about to sleep, or woke up."""
        interface = LOGIND + ".Manager"
        path = "/org/freedesktop/login1"
        self.send(Message.new_signal(path, interface, "PrepareForSleep", "b", [begins]))

    def send(self, message: Message) -> None:
        """Send any message."""
        self._do(lambda: self._bus.send(message))

    def _do(self, what: Callable[[], Any]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (what(), done.set()))
        assert done.wait(30)

    def close(self) -> None:
        self._do(self._bus.disconnect)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def __enter__(self) -> FakeSystemd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
