"""Signals: news from the governor, each from the path it belongs to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero_agent import names
from hetero_agent.bus import codec, contract, values
from hetero_agent.bus.codec import V
from hetero_agent.bus.mirror import Kind, Mirror, Shown
from hetero_agent.bus.transport import Connection
from hetero_agent.core.effects import (
    ConflictSeen,
    DeviceAdded,
    DeviceChanged,
    DeviceRemoved,
    Effect,
    HealthChanged,
    LeaseAdded,
    LeaseChanged,
    LeaseRemoved,
    OrphanFound,
    StateChanged,
)
from hetero_agent.core.ports import View

log = logging.getLogger("hetero_agent.bus")

#: Seconds within which a change is in a Report, and between Reports without change.
REPORT_WITHIN = 0.1
REPORT_EVERY = 30.0
#: Objects whose piece of GetManagedObjects is made in one turn of the loop after the start.
WARMED_PER_TURN = 32


class Publisher:
    """core.ports.Publisher on a connection.

    Nothing is sent before `activate`: until the agent has its name nobody knows these objects.
    MANAGER_PROPERTIES reads the Manager's properties that announce their changes; they are
    compared when Ready changes, and after `manager_changed`.
    """

    def __init__(
        self,
        connection: Connection,
        view: View,
        mirror: Mirror,
        manager_properties: Callable[[], Mapping[str, V]],
    ) -> None:
        self._connection = connection
        self._view = view
        self._mirror = mirror
        self._manager_properties = manager_properties
        self._manager: Mapping[str, V] = {}
        self._manager_dirty = False
        self._was_ready = False
        self._live = False
        self._reporting = False
        self._turn_due = False
        self._dirty_devices: dict[str, None] = {}
        self._dirty_leases: dict[str, None] = {}
        self._reported: object = None
        self._report_timer: asyncio.TimerHandle | None = None
        self._period: asyncio.TimerHandle | None = None
        interfaces = contract.load()
        self._signatures = {
            (interface.name, signal.name): signal.signature
            for interface in interfaces.values()
            for signal in interface.signals.values()
        }
        self._actions: dict[type, Callable[[Any], None]] = {
            DeviceAdded: self._device_added,
            DeviceRemoved: self._device_removed,
            DeviceChanged: lambda news: self._dirty_devices.setdefault(news.device),
            StateChanged: self._state_changed,
            LeaseAdded: self._lease_added,
            LeaseChanged: lambda news: self._dirty_leases.setdefault(news.lease),
            LeaseRemoved: self._lease_removed,
            HealthChanged: self._health_changed,
            ConflictSeen: self._conflict_seen,
            OrphanFound: self._orphan_found,
        }

    # -- life -----------------------------------------------------------------------------------
    def activate(self) -> None:
        """Take over all objects and send signals from now on."""
        self._mirror.fill()
        self._manager = dict(self._manager_properties())
        self._was_ready = self._view.ready
        self._live = True

    def start(self) -> None:
        """The start of reporting: an empty Report that is not complete, then the full one."""
        self._reporting = True
        self._send_report(False, {})
        self._report()
        self._periodic()
        asyncio.get_running_loop().call_soon(self._warm)

    def _warm(self) -> None:
        """Make the pieces of GetManagedObjects ready, a few in each turn of the loop."""
        if self._live and self._mirror.warm(WARMED_PER_TURN):
            asyncio.get_running_loop().call_soon(self._warm)

    def stop(self) -> None:
        """Send nothing more."""
        self._live = self._reporting = False
        for timer in (self._report_timer, self._period):
            if timer is not None:
                timer.cancel()

    # -- news -----------------------------------------------------------------------------------
    def publish(self, effects: Sequence[Effect]) -> None:
        """Update objects and queue signals; PropertiesChanged goes once per object and turn."""
        if not self._live:
            return
        seen = False
        for effect in effects:
            action = self._actions.get(type(effect))
            if action is not None:
                action(effect)
                seen = True
        if seen:
            self.touch()

    def manager_changed(self) -> None:
        """The configuration is another one: limits and durations may be too."""
        self._manager_dirty = True
        self.touch()

    def touch(self) -> None:
        """Look at the end of this loop turn what has changed."""
        if self._live and not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._reporting and self._report_timer is None:
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_later(REPORT_WITHIN, self._report)

    def settle(self) -> None:
        """Send now what the end of this turn would: a reply is about to go out, and the news it
        rests on goes before it."""
        if self._turn_due:
            try:
                self._turn()
            except Exception:
                log.exception("signals before a reply failed")

    def drained(self) -> None:
        """What waited to be written has become little: go on with what was held back."""
        if (self._dirty_devices or self._dirty_leases) and not self._turn_due and self._live:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if not self._live:
            return
        for dirty, kind, update in (
            (self._dirty_devices, self._mirror.device, self._mirror.update_device),
            (self._dirty_leases, self._mirror.lease, self._mirror.update_lease),
        ):
            while dirty:
                if self._connection.congested:
                    # the objects stay marked: later one signal tells the last state only
                    return
                one = next(iter(dirty))
                del dirty[one]
                self._announce(kind, update(one))
        if not self._manager_dirty and self._was_ready == self._view.ready:
            return
        self._manager_dirty, self._was_ready = False, self._view.ready
        now = dict(self._manager_properties())
        changed = {name: value for name, value in now.items() if self._manager.get(name) != value}
        if changed:
            self._manager = now
            self._properties_changed(names.ROOT, names.MANAGER, changed)

    def _announce(self, kind: Kind, update: tuple[Shown, dict[str, V]] | None) -> None:
        if update is not None and update[1]:
            self._properties_changed(update[0].path, kind.name, update[1])

    def _properties_changed(self, path: str, interface: str, changed: Mapping[str, V]) -> None:
        self._send(path, contract.PROPERTIES, "PropertiesChanged", interface, changed, ())

    def _device_added(self, news: DeviceAdded) -> None:
        shown = self._mirror.add_device(news.device)
        if shown is not None:
            self._added(self._mirror.device, shown)

    def _device_removed(self, news: DeviceRemoved) -> None:
        self._dirty_devices.pop(news.device, None)
        shown = self._mirror.drop_device(news.device)
        if shown is not None:
            self._removed(shown, names.DEVICE)

    def _lease_added(self, news: LeaseAdded) -> None:
        shown = self._mirror.add_lease(news.lease)
        if shown is not None:
            self._added(self._mirror.lease, shown)

    def _lease_removed(self, news: LeaseRemoved) -> None:
        self._dirty_leases.pop(news.lease, None)
        self._send(names.ROOT, names.MANAGER, "LeaseEnded", names.lease_path(news.lease), news.result)
        shown = self._mirror.drop_lease(news.lease)
        if shown is not None:
            self._removed(shown, names.LEASE)

    def _added(self, kind: Kind, shown: Shown) -> None:
        self._connection.signal(
            names.ROOT, contract.OBJECT_MANAGER, "InterfacesAdded", "oa{sa{sv}}", kind.piece(shown)
        )

    def _removed(self, shown: Shown, interface: str) -> None:
        self._send(names.ROOT, contract.OBJECT_MANAGER, "InterfacesRemoved", shown.path, [interface])

    def _state_changed(self, news: StateChanged) -> None:
        self._dirty_devices.setdefault(news.device)
        self._send(
            values.device_path(news.device),
            names.DEVICE,
            "StateChanged",
            news.from_state,
            news.to_state,
            news.reason,
            values.details(news.details),
        )

    def _health_changed(self, news: HealthChanged) -> None:
        self._dirty_devices.setdefault(news.device)
        evidence = values.attributes(news.evidence)
        device, lease = values.device_path(news.device), names.lease_path(news.lease)
        self._send(names.ROOT, names.MANAGER, "HealthEvent", device, news.health, news.reason, lease, evidence)

    def _conflict_seen(self, news: ConflictSeen) -> None:
        device, lease = values.device_path(news.device), names.lease_path(news.lease)
        self._send(names.ROOT, names.MANAGER, "Conflict", news.kind, lease, device, news.theirs, news.ours)

    def _orphan_found(self, news: OrphanFound) -> None:
        self._send(names.ROOT, names.MANAGER, "OrphanFound", values.device_path(news.device), news.count)

    # -- reports --------------------------------------------------------------------------------
    def _report(self) -> None:
        """Report now if anything of a report has changed."""
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        if not self._reporting:
            return
        resources = {name: dict(counts) for name, counts in self._view.resources().items()}
        if (self._view.ready, resources) != self._reported:
            self._reported = (self._view.ready, resources)
            self._send_report(self._view.ready, resources)

    def _periodic(self) -> None:
        if not self._reporting:
            return
        self._period = asyncio.get_running_loop().call_later(REPORT_EVERY, self._again)

    def _again(self) -> None:
        self._reported = None
        self._report()
        self._periodic()

    def _send_report(self, complete: bool, resources: Mapping[str, Mapping[str, int]]) -> None:
        version = names.PROTOCOL_VERSIONS[-1]
        view = self._view
        self._send(
            names.ROOT, names.MANAGER, "Report", version, view.epoch, view.generation, complete, resources
        )

    def _send(self, path: str, interface: str, member: str, *arguments: Any) -> None:
        signature = self._signatures[interface, member]
        try:
            body = codec.encode(signature, arguments)
        except codec.CodecError:
            log.exception("signal %s.%s can't be encoded", interface, member)
            return
        self._connection.signal(path, interface, member, signature, body)
