"""The objects as the bus was last told of them: what changed, and ready-made pieces of the big
replies, so that 4,096 devices cost little more than copying bytes."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hetero_agent import names
from hetero_agent.bus import codec, contract, values
from hetero_agent.bus.codec import V
from hetero_agent.core.model import Device, Lease
from hetero_agent.core.ports import View

log = logging.getLogger("hetero_agent.bus")

#: Devices on one page of GetSnapshot.
PAGE = 256

_UNREADABLE = object()


class Shown:
    """One object: its path, the last values of its properties in the order of the interface
    file, and encoded pieces that hold them (made when needed)."""

    __slots__ = ("path", "piece", "row", "values")

    def __init__(self, path: str, current: tuple[Any, ...]) -> None:
        self.path = path
        self.values = current
        self.piece: bytes | None = None
        self.row: bytes | None = None


class Kind:
    """One kind of object: its interface and how to read each property of it."""

    def __init__(self, interface: str, getters: Mapping[str, Callable[..., Any]]) -> None:
        self.name = interface
        properties = contract.load()[interface].properties
        self._readers = tuple(
            (name, prop.signature, prop.emits == "true", getters[name]) for name, prop in properties.items()
        )
        self._reported: set[str] = set()

    def read(self, *source: Any) -> tuple[Any, ...]:
        """Read all properties; one that fails is left out, and logged once."""
        try:
            return tuple([getter(*source) for _, _, _, getter in self._readers])
        except Exception:
            return tuple(self._one(name, getter, source) for name, _, _, getter in self._readers)

    def _one(self, name: str, getter: Callable[..., Any], source: tuple[Any, ...]) -> Any:
        try:
            return getter(*source)
        except Exception:
            if name not in self._reported:
                self._reported.add(name)
                log.exception("property %s.%s can't be read", self.name, name)
            return _UNREADABLE

    def properties(self, current: Iterable[Any]) -> dict[str, V]:
        """The values as a{sv}."""
        return {
            name: V(signature, value)
            for (name, signature, _, _), value in zip(self._readers, current, strict=True)
            if value is not _UNREADABLE
        }

    def changed(self, old: tuple[Any, ...], new: tuple[Any, ...]) -> dict[str, V]:
        """What is to be announced of the way from OLD to NEW."""
        return {
            name: V(signature, value)
            for (name, signature, emits, _), before, value in zip(self._readers, old, new, strict=True)
            if emits and value != before and value is not _UNREADABLE
        }

    def piece(self, shown: Shown) -> bytes:
        """The object with its interface and properties, as InterfacesAdded and
        GetManagedObjects have it."""
        if shown.piece is None:
            whole = {self.name: self.properties(shown.values)}
            shown.piece = codec.encode("oa{sa{sv}}", (shown.path, whole))
        return shown.piece


class Mirror:
    """All device and lease objects.  VIEW is what they are read from."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.device = Kind(names.DEVICE, values.DEVICE)
        self.lease = Kind(names.LEASE, values.LEASE)
        self.devices: dict[str, Shown] = {}
        self.leases: dict[str, Shown] = {}
        self._order: list[str] = []

    # -- reading the view -----------------------------------------------------------------------
    def read_device(self, device: Device) -> tuple[Any, ...]:
        """The properties of a device now."""
        return self.device.read(device, self._view.blocked_by(device.id))

    def read_lease(self, lease: Lease) -> tuple[Any, ...]:
        """The properties of a lease now."""
        return self.lease.read(lease)

    # -- keeping up -----------------------------------------------------------------------------
    def fill(self) -> None:
        """Take over all that the view has."""
        for device_id in self._view.devices:
            self.add_device(device_id)
        for lease_id in self._view.leases:
            self.add_lease(lease_id)

    def add_device(self, device_id: str) -> Shown | None:
        """A device appeared; None if it is gone again, or was there already."""
        device = self._view.devices.get(device_id)
        if device is None or device_id in self.devices:
            return None
        shown = self.devices[device_id] = Shown(values.device_path(device_id), self.read_device(device))
        insort(self._order, device_id)
        return shown

    def drop_device(self, device_id: str) -> Shown | None:
        """A device is gone; None if it was not there."""
        shown = self.devices.pop(device_id, None)
        if shown is not None:
            del self._order[bisect_left(self._order, device_id)]
        return shown

    def add_lease(self, lease_id: str) -> Shown | None:
        """A lease appeared; None if it is gone again, not granted yet, or was there already."""
        lease = self._view.leases.get(lease_id)
        if lease is None or not lease.granted or lease_id in self.leases:
            return None
        shown = self.leases[lease_id] = Shown(names.lease_path(lease_id), self.read_lease(lease))
        return shown

    def drop_lease(self, lease_id: str) -> Shown | None:
        """A lease is gone; None if it was not there."""
        return self.leases.pop(lease_id, None)

    def update_device(self, device_id: str) -> tuple[Shown, dict[str, V]] | None:
        """Read a device again; return what is to be announced."""
        device, shown = self._view.devices.get(device_id), self.devices.get(device_id)
        if device is None or shown is None:
            return None
        return shown, self._renew(self.device, shown, self.read_device(device))

    def update_lease(self, lease_id: str) -> tuple[Shown, dict[str, V]] | None:
        """Read a lease again; return what is to be announced."""
        lease, shown = self._view.leases.get(lease_id), self.leases.get(lease_id)
        if lease is None or shown is None:
            return None
        return shown, self._renew(self.lease, shown, self.read_lease(lease))

    @staticmethod
    def _renew(kind: Kind, shown: Shown, current: tuple[Any, ...]) -> dict[str, V]:
        if current == shown.values:
            return {}
        changed = kind.changed(shown.values, current)
        shown.values = current
        shown.piece = shown.row = None
        return changed

    def warm(self, most: int) -> bool:
        """Encode the pieces of at most so many devices that have none; return whether there
        were as many."""
        cold = [shown for shown in self.devices.values() if shown.piece is None][:most]
        for shown in cold:
            self.device.piece(shown)
        return len(cold) == most

    # -- big replies ----------------------------------------------------------------------------
    def managed_objects(self) -> bytes:
        """The body of GetManagedObjects."""
        return codec.joined(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        for shown in self.devices.values():
            yield self.device.piece(shown)
        for shown in self.leases.values():
            yield self.lease.piece(shown)

    def pages(self) -> int:
        """How many pages GetSnapshot has: one at least."""
        return max(1, -(-len(self._order) // PAGE))

    def page(self, number: int) -> Iterator[bytes]:
        """The encoded rows of one page of GetSnapshot."""
        for device_id in self._order[number * PAGE : (number + 1) * PAGE]:
            shown = self.devices[device_id]
            device = self._view.devices.get(device_id)
            if shown.row is None and device is not None:
                shown.row = codec.encode("(osssssbota{sv})", (self._row(shown.path, device),))
            if shown.row is not None:
                yield shown.row

    def _row(self, path: str, device: Device) -> tuple[Any, ...]:
        record = device.record
        more = {
            "vendor": V("s", record.vendor),
            "model": V("s", record.model),
            "driver": V("s", record.driver),
            "numa-nodes": V("au", list(record.numa_nodes)),
            "blocked-by": V("as", list(self._view.blocked_by(device.id)[: values.MAX_BLOCKERS])),
            "allocation-count": V("u", values.u32(device.count)),
            "aliases": V("as", values.texts(record.aliases)),
        }
        return (
            path,
            record.id,
            record.resource,
            str(device.state),
            str(device.health),
            values.reason_of(device),
            device.cordon is not None,
            names.lease_path(device.lease),
            values.u64(device.since.real),
            more,
        )
