"""org.heteroagent.Agent1.Device: nodes, history, holders, cordon."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_agent import names
from hetero_agent.bus import decode, values
from hetero_agent.bus.calls import Call, Entry, Result, Table, ask
from hetero_agent.bus.whomay import HISTORY_ACTORS, Guard
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.events import SetCordon
from hetero_agent.core.model import Device
from hetero_agent.core.ports import Engine, Exposure


class Devices:
    """Handlers of the Device interface; the dispatcher has made sure that the device exists, but for
    Uncordon."""

    def __init__(self, engine: Engine, guard: Guard, exposure: Exposure) -> None:
        self._engine = engine
        self._guard = guard
        self._exposure = exposure

    def table(self) -> Table:
        """The rows of the dispatcher."""
        return {
            f"{names.DEVICE}.GetNodes": Entry(self._nodes),
            f"{names.DEVICE}.GetAccess": Entry(self._access),
            f"{names.DEVICE}.GetHistory": Entry(self._history),
            f"{names.DEVICE}.GetHolders": Entry(self._holders, subject=self._device, about=self._about),
            f"{names.DEVICE}.Cordon": Entry(self._cordon, _cordon_arguments, about=self._about),
            f"{names.DEVICE}.Uncordon": Entry(
                self._cordon, _uncordon_arguments, about=self._about, absent=True
            ),
        }

    def _device(self, call: Call) -> Device:
        return self._engine.view.devices[names.device_id_of(call.path)]

    def _about(self, call: Call) -> Mapping[str, str]:
        device_id = names.device_id_of(call.path)
        device = self._engine.view.devices.get(device_id)
        return {"device": device_id} if device is None else values.about_device(device)

    def _nodes(self, call: Call) -> Result:
        nodes = self._device(call).record.nodes
        return ([(one.path, str(one.role), one.kind, one.major, one.minor) for one in nodes],)

    async def _access(self, call: Call) -> Result:
        try:
            nodes = await self._exposure.look(self._device(call).id)
        except ValueError as error:
            raise Refusal(ErrorKind.TIMEOUT, f"who may open the nodes can't be told: {error}") from error
        return ([values.access(one) for one in nodes],)

    def _history(self, call: Call) -> Result:
        most = min(call.arguments[0], 20)
        with_actor = True
        try:
            self._guard.check(HISTORY_ACTORS, call.caller, call.member)
        except Refusal:
            with_actor = False
        records = self._engine.view.history(self._device(call).id, most) if most else ()
        return ([values.history(one, with_actor) for one in records],)

    def _holders(self, call: Call) -> Result:
        device = self._device(call)
        all_of_them = bool(call.authority) or self._guard.in_group(call.caller)
        now = self._engine.now()
        return (
            [
                values.holder(one, self._engine.view.role_of(device, one), device.lease, now)
                for one in (*device.holders, *device.system)
                if all_of_them or call.caller.uid in one.uids
            ],
        )

    async def _cordon(self, call: Call) -> Result:
        reason: str | None = call.request
        device = names.device_id_of(call.path)
        fingerprint = decode.fingerprint(call.member, device, reason)
        await ask(
            self._engine,
            lambda token: SetCordon(
                self._engine.now(), token, call.actor(), call.request_id, fingerprint, device, reason
            ),
        )
        return ()


def _cordon_arguments(call: Call) -> str:
    identifier, reason = call.arguments
    call.request_id = decode.request_id(identifier)
    return decode.cordon_reason(reason)


def _uncordon_arguments(call: Call) -> None:
    call.request_id = decode.request_id(call.arguments[0])
