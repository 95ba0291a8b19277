"""Cordons: put on and taken off by operators, kept where they outlive a reboot, and what they hold for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hetero_agent.core import requests
from hetero_agent.core.effects import ErrorKind, Refusal, Refuse, Reply, StoreCordon, WatchHealth
from hetero_agent.core.events import CordonStored, SetCordon, Token
from hetero_agent.core.lifecycle import Trigger
from hetero_agent.core.model import AGENT, Actor, AuditKind, Cordon, DeviceRecord, Instant, RequestKey
from hetero_agent.core.world import World, in_hands
from hetero_agent.text import printable


@dataclass(frozen=True, slots=True)
class _Wait:
    """A Cordon or Uncordon that waits for the state directory: PLACE is where the cordon goes,
    OLD are the places of those that go."""

    event: SetCordon
    cordon: Cordon | None
    place: str
    old: tuple[str, ...]
    tokens: tuple[Token, ...]


class Cordons:
    """See the module's text."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._waiting: dict[RequestKey, _Wait] = {}

    def of(self, record: DeviceRecord) -> Cordon | None:
        """The cordon of a device; one of its place follows the serial as soon as it has one."""
        world = self.world
        cordon = world.cordon_of(record)
        serial = world.serial(record)
        if cordon is not None and cordon.device == record.id and not cordon.serial and serial:
            place, cordon = cordon.device, replace(cordon, serial=serial)
            world.put_cordon(place, None)
            world.put_cordon(f"serial:{serial}", cordon)
            world.effect(StoreCordon(-1, f"serial:{serial}", cordon))
            world.effect(StoreCordon(-1, place, None))
        return cordon

    def hold(self, device_ids: Iterable[str], at: Instant, actor: Actor = AGENT, request_id: str = "") -> None:
        """Have these devices, and their units, under the cordons that hold for them now."""
        world = self.world
        for device_id in device_ids:
            known = world.devices.get(device_id)
            cordon = world.cordon_of(known.record) if known is not None else None
            if known is None or cordon == known.cordon:
                continue
            changed = replace(known, cordon=cordon)
            if cordon is None and known.present:
                world.effect(WatchHealth(known.id, known.record, repaired=True))
            if in_hands(changed):
                world.put_device(changed)
            else:
                trigger = Trigger.UNCORDON if cordon is None else Trigger.CORDON
                world.move(changed, trigger, at, actor=actor, request_id=request_id)
            self.hold(world.units_of(device_id), at, actor, request_id)

    def asked(self, event: SetCordon) -> None:
        """Have a cordon, or its removal, stored where it outlives a reboot.  Raises Refusal."""
        world = self.world
        method = "Uncordon" if event.reason is None else "Cordon"
        key = RequestKey(event.actor.uid, "", method, event.request_id)
        if requests.repeated(world, key, event.fingerprint, event.token):
            return
        waiting = self._waiting.get(key)
        if waiting is not None:
            requests.same(key, waiting.event.fingerprint, event.fingerprint)
            world.assign(self._waiting, key, replace(waiting, tokens=(*waiting.tokens, event.token)))
            return
        requests.room(world, event.actor.uid)
        device = world.devices.get(event.device)
        if device is not None:
            old = world.cordons_of(device.record)
        elif event.reason is None:
            # one that is away may come back, and is under its cordon then
            old = world.cordons_at(event.device)
        else:
            old = []
        if device is None and not old:
            text = f"no device {printable(event.device)!r}"
            raise Refusal(ErrorKind.NOT_FOUND, f"{text}; see the list of devices")
        cordon, place = None, old[0] if old else event.device
        if device is not None and not old:
            place = world.key(device.record)
        if event.reason is not None and device is not None:
            serial = world.serial(device.record)
            cordon = Cordon(device.id, serial, event.reason, event.actor.uid, event.at.real)
            place = f"serial:{serial}" if serial else device.id
        world.assign(self._waiting, key, _Wait(event, cordon, place, tuple(old), (event.token,)))
        world.effect(StoreCordon(event.token, place, cordon))

    def stored(self, event: CordonStored) -> None:
        """The state directory answered: only now the cordon holds."""
        key = next((one for one, wait in self._waiting.items() if wait.event.token == event.token), None)
        if key is None:
            return
        world = self.world
        wait = self._waiting[key]
        world.discard(self._waiting, key)
        call = wait.event
        if event.error:
            text = f"the cordon could not be stored ({printable(event.error)}); nothing was changed"
            for token in wait.tokens:
                world.effect(Refuse(token, ErrorKind.STORE_FAILED, text))
            return
        device = world.devices.get(call.device)
        # since the call another may have been stored, or one of the place may have followed the serial
        under = world.cordons_of(device.record) if device is not None else []
        later = {one.place for one in self._waiting.values() if one.cordon is not None}
        for one in dict.fromkeys((*wait.old, *under)):
            world.put_cordon(one, None)
            if one not in (wait.place, *later):
                world.effect(StoreCordon(-1, one, None))
        if wait.cordon is not None:
            world.put_cordon(wait.place, wait.cordon)
        word = "uncordoned" if wait.cordon is None else f"cordoned: {printable(call.reason or '')}"
        world.audit(
            AuditKind.CORDON,
            event.at,
            f"{call.device} {word}",
            priority=5,
            device=device.record if device else None,
            reason=call.reason or "",
            actor=call.actor,
            request_id=call.request_id,
        )
        self.hold(list(world.devices), event.at, call.actor, call.request_id)
        requests.remember(world, key, call.fingerprint, "{}", event.at)
        for token in wait.tokens:
            world.effect(Reply(token, "{}"))
