"""What is there and how it is: observations, health, providers and cordons."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_agent.core import requests
from hetero_agent.core.effects import (
    DeviceAdded,
    ErrorKind,
    HealthChanged,
    Refusal,
    Refuse,
    Reply,
    RequestScan,
    StoreCordon,
    WatchNodes,
)
from hetero_agent.core.events import CordonStored, HealthSeen, Observed, ProviderGone, SetCordon, Token
from hetero_agent.core.grants import Grants
from hetero_agent.core.lifecycle import Trigger, row
from hetero_agent.core.model import (
    AuditKind,
    Cordon,
    Device,
    DeviceRecord,
    Health,
    Instant,
    Obstacle,
    OnFault,
    RequestKey,
    State,
)
from hetero_agent.core.returns import Returns
from hetero_agent.core.world import World, in_hands
from hetero_agent.text import printable


@dataclass(frozen=True, slots=True)
class _CordonWait:
    """A Cordon or Uncordon that waits for the state directory: PLACE is where the cordon goes,
    OLD are the places of those that go."""

    event: SetCordon
    cordon: Cordon | None
    place: str
    old: tuple[str, ...]
    tokens: tuple[Token, ...]


class Presence:
    """See the module's text."""

    def __init__(self, world: World, grants: Grants, returns: Returns) -> None:
        self.world = world
        self.grants = grants
        self.returns = returns
        self._cordons: dict[RequestKey, _CordonWait] = {}
        self._unseen: dict[str, None] = {}

    def expect(self, device_id: str) -> None:
        """A device known only from the ledger: gone if its source's first word lacks it."""
        self.world.assign(self._unseen, device_id, None)

    # -- observations ------------------------------------------------------------------------------
    def observed(self, event: Observed) -> None:
        """Take a source's news: new and changed records, then what is gone."""
        world = self.world
        if event.resync:
            world.audit(
                AuditKind.RESYNC,
                event.at,
                f"{event.source} compared whole ({event.resync}): {len(event.records)} new or changed, "
                f"{len(event.gone)} gone",
                priority=5 if event.records or event.gone else 6,
                reason=event.resync,
            )
        for record in event.records:
            self._record(record, event.at)
        for device_id in event.gone:
            device = world.devices.get(device_id)
            if device is not None and device.record.source == event.source:
                self._gone(device, event.at)
        if event.complete:
            for device_id in sorted(self._unseen):
                device = world.devices.get(device_id)
                if device is not None and device.record.source == event.source:
                    self._gone(device, event.at)

    def _record(self, record: DeviceRecord, at: Instant) -> None:
        world = self.world
        device = world.devices.get(record.id)
        if device is not None and device.record.source not in ("", record.source):
            world.audit(
                AuditKind.PROVIDER,
                at,
                f"{record.source} reports {record.id}, which is {device.record.source}'s; ignored",
                priority=4,
                device=device.record,
            )
            return
        fresh = self._replaced(device, record, at) if device is not None else True
        device = world.devices.get(record.id)
        if device is None:
            self._appear(record, at)
            return
        old = device.record
        if not record.serial and not fresh:
            # it can be read only while a driver is bound; the device is still that one
            record = replace(record, serial=old.serial)
        first = fresh or device.provider_gone or record.id in self._unseen
        said = (record.health, record.health_reason)
        news = None
        if (first or said != (old.health, old.health_reason)) and said != (device.health, device.health_reason):
            news = HealthSeen(at, record.source, record.id, *said)
        world.discard(self._unseen, record.id)
        world.put_device(replace(device, record=record, present=True))
        device = world.devices[record.id]
        device = replace(
            device,
            cordon=self._cordon(record),
            count=world.counts.get(world.key(record), 0 if fresh else device.count),
            provider_gone=False,
        )
        if record.own_nodes != old.own_nodes:
            world.effect(WatchNodes(record.id, record))
            # a node under a new number: nobody has looked at it yet
            device = replace(device, scanned=False, appeared=at.boot, last_open=at.boot)
            world.effect(RequestScan((record.id,)))
        if in_hands(device):
            world.put_device(device)
            self._leased_record(device, old, at)
            if news is not None:
                self.health(news)
        else:
            if news is not None:
                device = self._heard(device, news)
            world.move(device, Trigger.OBSERVED, at)

    def _replaced(self, device: Device, record: DeviceRecord, at: Instant) -> bool:
        """If there is another device in the place now, the one before is gone."""
        old = device.record.serial
        if not old or not record.serial or old == record.serial:
            return False
        self.world.audit(
            AuditKind.REPLACED,
            at,
            f"{record.id}: another device is in this place, serial {printable(record.serial, 64)} "
            f"after {printable(old, 64)}",
            priority=5,
            device=record,
        )
        self._gone(device, at, "replaced")
        return True

    def _cordon(self, record: DeviceRecord) -> Cordon | None:
        """The cordon of a device; one of its place follows the serial as soon as it has one."""
        world = self.world
        cordon = world.cordon_of(record)
        serial = world.serial(record)
        if cordon is not None and not cordon.serial and serial:
            place, cordon = cordon.device, replace(cordon, serial=serial)
            world.put_cordon(place, None)
            world.put_cordon(f"serial:{serial}", cordon)
            world.effect(StoreCordon(-1, f"serial:{serial}", cordon))
            world.effect(StoreCordon(-1, place, None))
        return cordon

    def _leased_record(self, device: Device, old: DeviceRecord, at: Instant) -> None:
        """News of a device that a lease has: it may be lost by it, or be back."""
        world = self.world
        lease = world.leases.get(device.lease)
        usable = device.record.obstacle is Obstacle.NONE
        if device.state is State.LOST:
            if usable:
                self.returns.owe(device, lease, Trigger.RETURNED, at, reason="back")
        elif not usable:
            reason = str(device.record.obstacle)
            world.move(device, Trigger.UNPLUGGED, at, reason=reason)
            if lease is not None:
                self.grants.lost(lease, device.id, at)
        elif (
            device.record.own_nodes != old.own_nodes
            and old.source
            and device.state is State.ALLOCATING
            and lease is not None
        ):
            self.grants.end(
                lease, Trigger.EFFECT_FAILED, at, cause=device.id, reason=f"nodes of {device.id} changed"
            )

    def _appear(self, record: DeviceRecord, at: Instant) -> None:
        world = self.world
        health = record.health
        device = Device(
            record=record,
            present=True,
            state=State.PROBING,
            reason="not scanned",
            since=at,
            health=health,
            health_reason=record.health_reason,
            appeared=at.boot,
        )
        world.put_device(device)
        device = replace(device, cordon=self._cordon(record), count=world.counts.get(world.key(record), 0))
        world.audit(
            AuditKind.APPEARED,
            at,
            f"{record.id} appeared as {record.resource}: "
            f"{printable(record.vendor, 64)} {printable(record.model, 64)}",
            device=record,
        )
        world.effect(DeviceAdded(record.id))
        world.effect(WatchNodes(record.id, record))
        world.effect(RequestScan((record.id,)))
        world.move(device, Trigger.OBSERVED, at)

    def _gone(self, device: Device, at: Instant, reason: str = "unplugged") -> None:
        world = self.world
        world.discard(self._unseen, device.id)
        device = replace(device, present=False)
        if in_hands(device):
            if device.state is not State.LOST:
                lease = world.leases.get(device.lease)
                world.move(device, Trigger.UNPLUGGED, at, reason=reason)
                if lease is not None:
                    self.grants.lost(lease, device.id, at)
            else:
                world.put_device(device)
            return
        debt = world.debts.get(device.id)
        world.drop_debt(device.id)
        self.returns.forget_device(device.id)
        world.move(device, Trigger.UNPLUGGED, at)
        if debt is not None and debt.lease:
            self.grants.returned(debt.lease, (device.id,), at)

    # -- health ----------------------------------------------------------------------------------------
    def health(self, event: HealthSeen) -> None:
        """A confirmed statement about a device."""
        world = self.world
        device = world.devices.get(event.device)
        if device is None or device.record.source != event.source:
            return
        if (device.health, device.health_reason) == (event.health, printable(event.reason)):
            return
        device = self._heard(device, event)
        bad = device.health is Health.UNHEALTHY
        trigger = Trigger.UNHEALTHY if bad else Trigger.HEALTHY
        lease = world.leases.get(device.lease) if in_hands(device) else None
        if lease is None:
            world.move(device, trigger, event.at)
            return
        world.put_device(device)
        if not bad or device.state is State.LOST:
            return
        if device.state is State.IN_USE and lease.on_fault is OnFault.KILL:
            trigger = Trigger.UNHEALTHY_KILL
        found = row(device.state, trigger)
        if found is not None and found.to is State.RECLAIMING:
            why = f"{device.id} is unhealthy: {event.reason}"
            self.grants.end(lease, trigger, event.at, cause=device.id, reason=why)

    def _heard(self, device: Device, event: HealthSeen) -> Device:
        """Tell what is new about the health of a device; returns it with that."""
        world = self.world
        was, now = device.health, event.health
        bad = now is Health.UNHEALTHY
        if was is not now:
            world.audit(
                AuditKind.HEALTH,
                event.at,
                f"{device.id} is {now} (was {was}){': ' + event.reason if event.reason else ''}",
                priority=3 if bad else 5,
                device=device.record,
                lease=device.lease,
                trigger=Trigger.UNHEALTHY if bad else Trigger.HEALTHY,
                reason=event.reason,
                extra={f"EVIDENCE_{key}": value for key, value in event.evidence.items()},
            )
        if bad or (was is Health.UNHEALTHY and now is Health.HEALTHY):
            world.effect(HealthChanged(device.id, str(now), event.reason, device.lease, event.evidence))
        return replace(device, health=now, health_reason=printable(event.reason))

    # -- providers --------------------------------------------------------------------------------------
    def provider_gone(self, event: ProviderGone) -> None:
        """A provider's grace time is over, or it came back."""
        world = self.world
        world.audit(
            AuditKind.PROVIDER,
            event.at,
            f"provider {printable(event.name, 64)} is {'back' if event.back else 'gone'}",
            priority=6 if event.back else 4,
            reason=event.name,
        )
        trigger = Trigger.PROVIDER_BACK if event.back else Trigger.PROVIDER_GONE
        for known in list(world.devices.values()):
            if known.record.source != event.name or known.provider_gone is not event.back:
                continue
            device = replace(
                known,
                provider_gone=not event.back,
                health=known.health_before if event.back else Health.UNKNOWN,
                health_before=known.health,
            )
            if in_hands(device):
                world.put_device(device)
            else:
                world.move(device, trigger, event.at)

    # -- cordons ----------------------------------------------------------------------------------------
    def set_cordon(self, event: SetCordon) -> None:
        """Have a cordon, or its removal, stored where it outlives a reboot.  Raises Refusal."""
        world = self.world
        method = "Uncordon" if event.reason is None else "Cordon"
        key = RequestKey(event.actor.uid, "", method, event.request_id)
        earlier = requests.replay(world, key, event.fingerprint)
        if earlier is not None:
            world.effect(Reply(event.token, earlier.body))
            return
        waiting = self._cordons.get(key)
        if waiting is not None:
            requests.same(key, waiting.event.fingerprint, event.fingerprint)
            world.assign(self._cordons, key, replace(waiting, tokens=(*waiting.tokens, event.token)))
            return
        requests.room(world, event.actor.uid)
        device = world.devices.get(event.device)
        if device is None:
            raise Refusal(ErrorKind.NOT_FOUND, f"no device {printable(event.device)}; see the list of devices")
        old = world.cordons_of(device.record)
        cordon, place = None, old[0] if old else world.key(device.record)
        if event.reason is not None:
            serial = world.serial(device.record)
            cordon = Cordon(device.id, serial, event.reason, event.actor.uid, event.at.real)
            place = f"serial:{serial}" if serial else device.id
        world.assign(self._cordons, key, _CordonWait(event, cordon, place, tuple(old), (event.token,)))
        world.effect(StoreCordon(event.token, place, cordon))

    def cordon_stored(self, event: CordonStored) -> None:
        """The state directory answered: only now the cordon holds."""
        key = next((one for one, wait in self._cordons.items() if wait.event.token == event.token), None)
        if key is None:
            return
        world = self.world
        wait = self._cordons[key]
        world.discard(self._cordons, key)
        call = wait.event
        if event.error:
            text = f"the cordon could not be stored ({printable(event.error)}); nothing was changed"
            for token in wait.tokens:
                world.effect(Refuse(token, ErrorKind.STORE_FAILED, text))
            return
        for one in wait.old:
            world.put_cordon(one, None)
            if one != wait.place:
                world.effect(StoreCordon(-1, one, None))
        if wait.cordon is not None:
            world.put_cordon(wait.place, wait.cordon)
        device = world.devices.get(call.device)
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
        trigger = Trigger.UNCORDON if wait.cordon is None else Trigger.CORDON
        for known in list(world.devices.values()):
            cordon = world.cordon_of(known.record)
            if cordon == known.cordon:
                continue
            changed = replace(known, cordon=cordon)
            if in_hands(changed):
                world.put_device(changed)
            else:
                world.move(changed, trigger, event.at, actor=call.actor, request_id=call.request_id)
        requests.remember(world, key, call.fingerprint, "{}", event.at)
        for token in wait.tokens:
            world.effect(Reply(token, "{}"))
