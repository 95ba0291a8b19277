"""Which object has which interfaces, and the standard interfaces that all of them share."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_agent import names
from hetero_agent.bus import contract
from hetero_agent.bus.calls import Call, Entry, Result, Table
from hetero_agent.bus.codec import V
from hetero_agent.bus.errors import StandardError
from hetero_agent.bus.logcontrol import LogControl
from hetero_agent.bus.manager import Manager
from hetero_agent.bus.mirror import Mirror
from hetero_agent.bus.values import device_path
from hetero_agent.core.ports import View
from hetero_agent.text import printable

_BARE = (contract.PEER, contract.INTROSPECTABLE)
_STANDARD = (*_BARE, contract.PROPERTIES)

#: Interfaces by kind of path, in the order in which introspection shows them.
_ROOT = (*_STANDARD, contract.OBJECT_MANAGER, names.MANAGER, names.PROVIDERS)
_DEVICE = (*_STANDARD, names.DEVICE)
_LEASE = (*_STANDARD, names.LEASE)
_LOG = (*_STANDARD, names.LOG_CONTROL)


def _ancestors() -> dict[str, tuple[str, ...]]:
    """The paths above and between our objects, with their fixed children."""
    children: dict[str, set[str]] = {}
    for path in (names.DEVICES, names.LEASES, names.LOG_CONTROL_PATH):
        parts = path.strip("/").split("/")
        for index, part in enumerate(parts):
            children.setdefault("/" + "/".join(parts[:index]), set()).add(part)
    fixed = {path: tuple(sorted(below)) for path, below in children.items()}
    return {names.DEVICES: (), names.LEASES: (), **fixed}


_FIXED_CHILDREN = _ancestors()


class Objects:
    """The tree of objects: what is where, and its standard interfaces."""

    def __init__(
        self, view: View, mirror: Mirror, manager: Manager, log_control: LogControl, machine_id: str
    ) -> None:
        self._view = view
        self._mirror = mirror
        self._manager = manager
        self._log_control = log_control
        self._machine_id = machine_id
        self._contract = contract.load()
        self._sections: dict[tuple[str, ...], str] = {
            kind: "".join(self._contract[name].xml for name in kind)
            for kind in (_BARE, _ROOT, _DEVICE, _LEASE, _LOG)
        }

    def table(self) -> Table:
        """The rows of the dispatcher."""
        return {
            f"{contract.PEER}.Ping": Entry(lambda _: ()),
            f"{contract.PEER}.GetMachineId": Entry(lambda _: (self._machine_id,)),
            f"{contract.INTROSPECTABLE}.Introspect": Entry(self._introspect),
            f"{contract.PROPERTIES}.Get": Entry(self._get),
            f"{contract.PROPERTIES}.GetAll": Entry(self._get_all),
            f"{contract.PROPERTIES}.Set": Entry(self._set, self._writable),
            f"{contract.OBJECT_MANAGER}.GetManagedObjects": Entry(lambda _: self._mirror.managed_objects()),
        }

    def interfaces(self, path: str) -> tuple[str, ...]:
        """The interfaces at PATH; none if there is nothing."""
        if path == names.ROOT:
            return _ROOT
        if path.startswith(names.DEVICES + "/"):
            return _DEVICE if self._device_id(path) in self._view.devices else ()
        if path.startswith(names.LEASES + "/"):
            lease = self._view.leases.get(self._lease_id(path))
            return _LEASE if lease is not None and lease.granted else ()
        if path == names.LOG_CONTROL_PATH:
            return _LOG
        return _BARE if path in _FIXED_CHILDREN else ()

    def is_of_a_device(self, path: str) -> bool:
        """Whether PATH is that of a device, be it there or not."""
        return path.startswith(names.DEVICES + "/") and bool(self._device_id(path))

    @staticmethod
    def _device_id(path: str) -> str:
        try:
            found = names.device_id_of(path)
        except ValueError:
            return ""
        # one object, one path: an id can be escaped in more ways than the one that we use
        return found if device_path(found) == path else ""

    @staticmethod
    def _lease_id(path: str) -> str:
        try:
            return names.lease_id_of(path)
        except ValueError:
            return ""

    # -- Introspectable -------------------------------------------------------------------------
    def _introspect(self, call: Call) -> Result:
        path = call.path
        kind = self.interfaces(path)
        children: list[str] = list(_FIXED_CHILDREN.get(path, ()))
        if path == names.DEVICES:
            children = [shown.path.rpartition("/")[2] for shown in self._mirror.devices.values()]
        elif path == names.LEASES:
            children = [shown.path.rpartition("/")[2] for shown in self._mirror.leases.values()]
        # elements of object paths: letters, digits and underscores, which need no quoting
        nodes = "".join(f'  <node name="{child}"/>\n' for child in children)
        return (f"{contract.HEADER}<node>\n{self._sections[kind]}{nodes}</node>\n",)

    # -- Properties -----------------------------------------------------------------------------
    def _values(self, path: str, interface: str) -> Mapping[str, V]:
        """All readable properties of one interface; one that fails is left out."""
        if interface == names.DEVICE:
            device = self._view.devices[names.device_id_of(path)]
            return self._mirror.device.properties(self._mirror.read_device(device))
        if interface == names.LEASE:
            lease = self._view.leases[names.lease_id_of(path)]
            return self._mirror.lease.properties(self._mirror.read_lease(lease))
        if interface == names.MANAGER:
            return self._manager.properties()
        if interface == names.LOG_CONTROL:
            known = self._contract[interface].properties
            return {name: self._log_control.property(name) for name in known}
        return {}

    def _property(self, path: str, interface: str, name: str) -> contract.Property:
        """The property's line in its interface; Get and Set may leave the interface empty."""
        for one in self._candidates(path, interface):
            found = self._contract[one].properties.get(name)
            if found is not None:
                return found
        raise StandardError("UnknownProperty", f"no property {printable(name, 64)} at {printable(path, 96)}")

    def _candidates(self, path: str, interface: str) -> tuple[str, ...]:
        here = self.interfaces(path)
        if not interface:
            return here
        if interface not in here:
            raise StandardError(
                "UnknownInterface", f"no interface {printable(interface, 96)} at {printable(path, 96)}"
            )
        return (interface,)

    def _get(self, call: Call) -> Result:
        interface, name = call.arguments
        self._property(call.path, interface, name)
        for one in self._candidates(call.path, interface):
            if name in self._contract[one].properties:
                if one == names.MANAGER:
                    return (self._manager.property(name),)
                found = self._values(call.path, one)
                if name in found:
                    return (found[name],)
        raise RuntimeError(f"property {name} can't be read")

    def _get_all(self, call: Call) -> Result:
        found: dict[str, V] = {}
        for one in self._candidates(call.path, call.arguments[0]):
            found.update(self._values(call.path, one))
        return (found,)

    def _writable(self, call: Call) -> tuple[str, str]:
        interface, name, value = call.arguments
        found = self._property(call.path, interface, name)
        if not found.writable:
            raise StandardError("PropertyReadOnly", f"property {name} can't be written")
        if value.signature != found.signature:
            raise StandardError("InvalidArgs", f"property {name} has type {found.signature}")
        return name, value.value

    def _set(self, call: Call) -> Result:
        self._log_control.set(*call.request)
        return ()
