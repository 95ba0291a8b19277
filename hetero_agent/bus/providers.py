"""org.heteroagent.Agent1.Providers: hands vendors' reports to the registry of providers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hetero_agent import names
from hetero_agent.bus import decode, values
from hetero_agent.bus.calls import Call, Entry, Result, Table
from hetero_agent.bus.codec import plain
from hetero_agent.core.model import Actor


class Registry(Protocol):
    """What the bus needs of the registry of providers.  The async ones raise Refusal."""

    async def register(
        self, actor: Actor, bus_name: str, name: str, protocol_version: int, options: Mapping[str, object]
    ) -> Mapping[str, Any]:
        """RegisterProvider."""

    async def report_devices(
        self,
        actor: Actor,
        bus_name: str,
        request_id: str,
        version: int,
        page: int,
        pages: int,
        devices: object,
    ) -> Mapping[str, Any]:
        """ReportDevices."""

    async def report_health(
        self,
        actor: Actor,
        bus_name: str,
        request_id: str,
        device: str,
        health: str,
        reason: str,
        evidence: Mapping[str, object],
    ) -> None:
        """ReportHealth."""

    def connection_lost(self, bus_name: str) -> None:
        """A connection has left the bus."""

    def may_provide(self, uid: int, name: str) -> bool:
        """Whether UID may report as NAME."""

    def usage(self) -> Mapping[str, int]:
        """``providers``: how many are connected."""


class Providers:
    """Handlers of the Providers interface."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def table(self) -> Table:
        """The rows of the dispatcher."""
        return {
            f"{names.PROVIDERS}.RegisterProvider": Entry(
                self._register, _identified, lambda call: call.arguments[2], own_task=True
            ),
            f"{names.PROVIDERS}.ReportDevices": Entry(self._report_devices, _identified, own_task=True),
            f"{names.PROVIDERS}.ReportHealth": Entry(self._report_health, _identified, own_task=True),
        }

    async def _register(self, call: Call) -> Result:
        _, version, name, options = call.arguments
        caller = call.caller
        answer = await self._registry.register(caller.actor(), caller.bus_name, name, version, plain(options))
        return (values.typed(answer, values.SESSION),)

    async def _report_devices(self, call: Call) -> Result:
        _, version, page, pages, devices = call.arguments
        caller = call.caller
        answer = await self._registry.report_devices(
            caller.actor(), caller.bus_name, call.request_id, version, page, pages, plain(devices)
        )
        return (values.typed(answer, values.REPORTED),)

    async def _report_health(self, call: Call) -> Result:
        _, device, health, reason, evidence = call.arguments
        caller = call.caller
        await self._registry.report_health(
            caller.actor(), caller.bus_name, call.request_id, device, health, reason, plain(evidence)
        )
        return ()


def _identified(call: Call) -> None:
    call.request_id = decode.request_id(call.arguments[0])
