"""org.heteroagent.Agent1.Manager: allocate, confirm, release, explain, reap, look."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hetero_agent import __version__, names
from hetero_agent.bus import codec, contract, decode, values
from hetero_agent.bus.calls import Call, Entry, Result, Table, ask
from hetero_agent.bus.codec import V
from hetero_agent.bus.errors import invalid
from hetero_agent.bus.mirror import Mirror
from hetero_agent.bus.owners import Binder
from hetero_agent.bus.whomay import OWNER_UID, Guard
from hetero_agent.config import Config
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.events import Allocate, Confirm, Reap, Release
from hetero_agent.core.model import Binding, Device, Lease, ProcessRef, RequestKey
from hetero_agent.core.ports import Engine
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.bus")


class Manager:
    """Handlers and properties of the Manager interface."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        guard: Guard,
        mirror: Mirror,
        binder: Binder,
        registry_usage: Callable[[], Mapping[str, int]],
    ) -> None:
        self.config = config
        self._engine = engine
        self._view = engine.view
        self._guard = guard
        self._mirror = mirror
        self._binder = binder
        self._registry_usage = registry_usage
        interface = contract.load()[names.MANAGER]
        self._signatures = {name: prop.signature for name, prop in interface.properties.items()}
        self._announced = [name for name, prop in interface.properties.items() if prop.emits == "true"]

    def table(self) -> Table:
        """The rows of the dispatcher."""
        later = Entry(_not_supported)
        return {
            f"{names.MANAGER}.Register": later,
            f"{names.MANAGER}.GetSnapshot": Entry(self._snapshot, self._check_page),
            f"{names.MANAGER}.Allocate": Entry(self._allocate, _allocation, about=_wanted),
            f"{names.MANAGER}.Confirm": Entry(self._confirm, _confirmation, self._lease),
            f"{names.MANAGER}.Release": Entry(
                self._release, _lease_argument, self._lease, lambda call: values.about_lease(self._lease(call))
            ),
            f"{names.MANAGER}.Explain": Entry(self._explain, _question, about=_wanted),
            f"{names.MANAGER}.Reconcile": later,
            f"{names.MANAGER}.GetConflicts": later,
            f"{names.MANAGER}.Reap": Entry(
                self._reap, _reap_arguments, self._lease_of_device, self._about_reaping
            ),
        }

    # -- properties -----------------------------------------------------------------------------
    def property(self, name: str) -> V:
        """One property.  Raises KeyError for an unknown one."""
        signature = self._signatures[name]
        return V(signature, self._getters()[name]())

    def properties(self) -> Mapping[str, V]:
        """All properties; one that fails is left out."""
        found = {}
        for name, getter in self._getters().items():
            try:
                found[name] = V(self._signatures[name], getter())
            except Exception:
                log.exception("property %s.%s can't be read", names.MANAGER, name)
        return found

    def announced(self) -> Mapping[str, V]:
        """The properties that announce their changes."""
        getters = self._getters()
        return {name: V(self._signatures[name], getters[name]()) for name in self._announced}

    def _getters(self) -> Mapping[str, Callable[[], Any]]:
        limits, grant, reclaim = self.config.limits, self.config.grant, self.config.reclaim
        return {
            "AgentVersion": lambda: __version__,
            "ProtocolVersions": lambda: list(names.PROTOCOL_VERSIONS),
            "Epoch": lambda: self._view.epoch,
            "Generation": lambda: self._view.generation,
            "Ready": lambda: self._view.ready,
            "Resources": lambda: {name: dict(one) for name, one in self._view.resources().items()},
            "MaxLeases": lambda: limits.leases,
            "MaxLeasesPerUid": lambda: limits.leases_per_uid,
            "MaxLeasesPerClient": lambda: limits.leases_per_client,
            "MaxDevicesPerLease": lambda: limits.devices_per_lease,
            "MaxDevicesPerClient": lambda: limits.devices_per_client,
            "MaxRequestsPerUid": lambda: limits.requests_per_uid,
            "MaxWaiting": lambda: limits.waiting,
            "MaxProviders": lambda: limits.providers,
            "MaxDevicesPerProvider": lambda: limits.devices_per_provider,
            "MaxCallsPerCaller": lambda: limits.calls_per_caller,
            "Leases": lambda: len(self._mirror.leases),
            "Waiting": lambda: self._view.usage().get("waiting", 0),
            "Providers": lambda: self._registry_usage().get("providers", 0),
            "Devices": lambda: len(self._mirror.devices),
            "ConfirmWithin": lambda: round(grant.confirm_within * 1_000_000),
            "ReclaimDeadline": lambda: round(reclaim.deadline * 1_000_000),
            "KillAfter": lambda: round(reclaim.kill_after * 1_000_000),
            "OccupiedAfter": lambda: round(reclaim.occupied_after * 1_000_000),
        }

    # -- subjects -------------------------------------------------------------------------------
    def _lease(self, call: Call) -> Lease | None:
        lease_id = call.request if isinstance(call.request, str) else call.request[0]
        return self._view.leases.get(lease_id)

    def _lease_of_device(self, call: Call) -> Lease | None:
        """The lease that has the device, or that it is being taken back from."""
        holding = [one for one in self._view.leases.values() if call.request[0] in one.devices]
        return holding[-1] if holding else None

    def _about_reaping(self, call: Call) -> Mapping[str, str]:
        device = self._known(call.request[0])
        return {**values.about_device(device), **values.about_lease(self._lease_of_device(call))}

    # -- handlers -------------------------------------------------------------------------------
    def _check_page(self, call: Call) -> int:
        number: int = call.arguments[0]
        pages = self._mirror.pages()
        if number >= pages:
            raise invalid(f"page: there are {pages} pages, counted from 0")
        return number

    def _snapshot(self, call: Call) -> Result:
        number: int = call.request
        header = {
            "page": V("u", number),
            "pages": V("u", self._mirror.pages()),
            "total": V("u", len(self._mirror.devices)),
            "epoch": V("s", self._view.epoch),
            "generation": V("t", self._view.generation),
            "complete": V("b", self._view.ready),
        }
        return codec.append_joined(codec.encode("a{sv}", (header,)), self._mirror.page(number))

    async def _allocate(self, call: Call) -> Result:
        request: decode.Request = call.request
        if request.options.owner_uid is not None:
            self._guard.check(OWNER_UID, call.caller, "Allocate with owner-uid")
        bound = await self._bound(call, request.options.client, "Allocate", request.binding)
        options = replace(request.options, binding=bound)
        fingerprint = decode.fingerprint(*call.arguments[1:])
        lease = secrets.token_hex(16)
        answer = await ask(
            self._engine,
            lambda token: Allocate(
                self._engine.now(),
                token,
                call.actor(options.client),
                call.request_id,
                fingerprint,
                request.resource,
                request.count,
                options,
                lease,
                request.plain,
            ),
        )
        return names.lease_path(answer["lease"]), values.manifest(answer["manifest"])

    async def _bound(self, call: Call, client: str, method: str, wanted: decode.Wanted) -> Binding:
        """Find what the caller wants to bind.  A call that was answered before gets its answer from
        memory, also when what it once bound is gone."""
        key = RequestKey(call.caller.uid, client, method, call.request_id)
        if not wanted or self._view.remembers(key):
            return Binding()
        return await self._binder.resolve(call.caller, wanted)

    async def _confirm(self, call: Call) -> Result:
        lease, wanted = call.request
        bound = await self._bound(call, "", "Confirm", wanted)
        fingerprint = decode.fingerprint(*call.arguments[1:])
        await ask(
            self._engine,
            lambda token: Confirm(
                self._engine.now(), token, call.actor(), call.request_id, fingerprint, lease, bound
            ),
        )
        return ()

    async def _release(self, call: Call) -> Result:
        lease: str = call.request
        fingerprint = decode.fingerprint(*call.arguments[1:])
        answer = await ask(
            self._engine,
            lambda token: Release(self._engine.now(), token, call.actor(), call.request_id, fingerprint, lease),
        )
        return (bool(answer["changed"]),)

    def _explain(self, call: Call) -> Result:
        request: decode.Request = call.request
        found = self._view.explain(request.resource, request.count, request.options)
        summary = {
            "verdict": V("s", found.verdict),
            "text": V("s", found.text),
            "chosen": V("as", list(found.chosen)),
            "note": V("s", found.note),
        }
        return summary, [list(row) for row in found.devices]

    async def _reap(self, call: Call) -> Result:
        device, targets = call.request
        self._known(device)
        fingerprint = decode.fingerprint(*call.arguments[1:])
        answer = await ask(
            self._engine,
            lambda token: Reap(
                self._engine.now(),
                token,
                call.actor(),
                call.request_id,
                fingerprint,
                device,
                targets,
            ),
        )
        return (answer["ended"],)

    def _known(self, device_id: str) -> Device:
        device = self._view.devices.get(device_id)
        if device is None:
            raise Refusal(
                ErrorKind.NOT_FOUND, f"device {printable(device_id, 64)} does not exist; see heteroctl list"
            )
        return device


def _allocation(call: Call) -> decode.Request:
    identifier, resource, count, options = call.arguments
    call.request_id = decode.request_id(identifier)
    return decode.allocation(identifier, resource, count, options)


def _wanted(call: Call) -> Mapping[str, str]:
    return {"resource": call.request.resource, "count": str(call.request.count)}


def _question(call: Call) -> decode.Request:
    resource, count, options = call.arguments
    return decode.allocation("", resource, count, options)


def _confirmation(call: Call) -> tuple[str, decode.Wanted]:
    identifier, path, given = call.arguments
    call.request_id = decode.request_id(identifier)
    return decode.lease_path(path), decode.binding(given)


def _lease_argument(call: Call) -> str:
    identifier, path = call.arguments
    call.request_id = decode.request_id(identifier)
    return decode.lease_path(path)


def _reap_arguments(call: Call) -> tuple[str, tuple[ProcessRef, ...]]:
    identifier, path, pairs = call.arguments
    call.request_id = decode.request_id(identifier)
    return decode.device_path(path), decode.targets(pairs)


def _not_supported(call: Call) -> Result:
    raise Refusal(
        ErrorKind.NOT_SUPPORTED,
        f"{call.member.rpartition('.')[2]} is not supported by this version of the agent",
    )
