"""What is there and how it is: observations, health, providers and cordons."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_agent.core import requests
from hetero_agent.core.effects import (
    DeviceAdded,
    DeviceRemoved,
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


@dataclass(slots=True)
class _CordonWait:
    """A Cordon or Uncordon that waits for the state directory."""

    event: SetCordon
    cordon: Cordon | None
    key: RequestKey


class Presence:
    """See the module's text."""

    def __init__(self, world: World, grants: Grants, returns: Returns) -> None:
        self.world = world
        self.grants = grants
        self.returns = returns
        self._cordons: dict[Token, _CordonWait] = {}
        self._unseen: set[str] = set()

    def expect(self, device_id: str) -> None:
        """A device known only from the ledger: gone if its source's first word lacks it."""
        self._unseen.add(device_id)

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
            self._unseen.discard(record.id)
            self._record(record, event.at)
        for device_id in event.gone:
            device = world.devices.get(device_id)
            if device is not None and device.record.source == event.source:
                self._gone(device, event.at)
        if event.complete:
            for device_id in sorted(self._unseen):
                device = world.devices.get(device_id)
                if device is not None and device.record.source == event.source:
                    self._unseen.discard(device_id)
                    self._gone(device, event.at)

    def _record(self, record: DeviceRecord, at: Instant) -> None:
        world = self.world
        device = world.devices.get(record.id)
        if device is None:
            self._appear(record, at)
            return
        if device.record.source != record.source:
            world.audit(
                AuditKind.PROVIDER,
                at,
                f"{record.source} reports {record.id}, which is {device.record.source}'s; ignored",
                priority=4,
                device=device.record,
            )
            return
        old = device.record
        if record.serial and old.serial and record.serial != old.serial:
            world.audit(
                AuditKind.REPLACED,
                at,
                f"{record.id}: another device is in this place, serial {printable(record.serial, 64)} "
                f"after {printable(old.serial, 64)}",
                priority=5,
                device=record,
            )
        changed_nodes = record.own_nodes != old.own_nodes
        world.put_device(replace(device, record=record, present=True))
        device = world.devices[record.id]
        key = world.key(record)
        device = replace(
            device,
            cordon=world.cordon_of(record),
            count=world.counts.get(key, device.count),
            provider_gone=False,
        )
        if changed_nodes:
            world.effect(WatchNodes(record.id, record))
            if record.own_nodes:
                # a node under a new number: nobody has looked at it yet
                device = replace(device, scanned=False, appeared=at.boot, last_open=at.boot)
                world.effect(RequestScan((record.id,)))
        if in_hands(device):
            world.put_device(device)
            self._leased_record(device, old, at)
        else:
            world.move(device, Trigger.OBSERVED, at)
        if (record.health, record.health_reason) != (old.health, old.health_reason):
            self.health(HealthSeen(at, record.source, record.id, record.health, record.health_reason))

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
            device.record.own_nodes != old.own_nodes and device.state is State.ALLOCATING and lease is not None
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
        device = replace(device, cordon=world.cordon_of(record), count=world.counts.get(world.key(record), 0))
        world.audit(
            AuditKind.APPEARED,
            at,
            f"{record.id} appeared as {record.resource}: "
            f"{printable(record.vendor, 64)} {printable(record.model, 64)}",
            device=record,
        )
        world.effect(DeviceAdded(record.id))
        world.effect(WatchNodes(record.id, record))
        if record.own_nodes:
            world.effect(RequestScan((record.id,)))
        world.move(device, Trigger.OBSERVED, at)

    def _gone(self, device: Device, at: Instant) -> None:
        world = self.world
        device = replace(device, present=False)
        if in_hands(device):
            if device.state is not State.LOST:
                lease = world.leases.get(device.lease)
                world.move(device, Trigger.UNPLUGGED, at, reason="unplugged")
                if lease is not None:
                    self.grants.lost(lease, device.id, at)
            else:
                world.put_device(device)
        else:
            debt = world.debts.get(device.id)
            world.drop_debt(device.id)
            world.move(device, Trigger.UNPLUGGED, at)
            if debt is not None and debt.lease:
                self.grants.returned(debt.lease, (device.id,), at)
        if device.id not in world.devices:
            self.removed(device, at)

    def removed(self, device: Device, at: Instant) -> None:
        """A device is gone from the table: say so and stop watching it."""
        self.world.audit(AuditKind.GONE, at, f"{device.id} is gone", device=device.record)
        self.world.effect(WatchNodes(device.id, None))
        self.world.effect(DeviceRemoved(device.id))

    # -- health ----------------------------------------------------------------------------------------
    def health(self, event: HealthSeen) -> None:
        """A confirmed statement about a device and, if it is a whole card, its units."""
        device = self.world.devices.get(event.device)
        if device is None or device.record.source != event.source:
            return
        if (device.health, device.health_reason) == (event.health, event.reason):
            return
        world = self.world
        was, now = device.health, event.health
        device = replace(device, health=now, health_reason=printable(event.reason))
        bad = now is Health.UNHEALTHY
        trigger = Trigger.UNHEALTHY if bad else Trigger.HEALTHY
        lease = world.leases.get(device.lease) if in_hands(device) else None
        if was is not now:
            world.audit(
                AuditKind.HEALTH,
                event.at,
                f"{device.id} is {now} (was {was}){': ' + event.reason if event.reason else ''}",
                priority=3 if bad else 5,
                device=device.record,
                lease=device.lease,
                trigger=trigger,
                reason=event.reason,
                extra={f"EVIDENCE_{key}": value for key, value in event.evidence.items()},
            )
        if bad or (was is Health.UNHEALTHY and now is Health.HEALTHY):
            world.effect(HealthChanged(device.id, str(now), event.reason, device.lease, event.evidence))
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
            health = known.record.health if event.back else Health.UNKNOWN
            device = replace(known, provider_gone=not event.back, health=health)
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
        device = world.devices.get(event.device)
        if device is None:
            raise Refusal(ErrorKind.NOT_FOUND, f"no device {printable(event.device)}; see the list of devices")
        cordon = None
        if event.reason is not None:
            cordon = Cordon(device.id, device.record.serial, event.reason, event.actor.uid, event.at.real)
        self._cordons[event.token] = _CordonWait(event, cordon, key)
        world.note(lambda: self._forget(event.token))
        old = device.cordon
        if cordon is None and old is not None and old.device != device.id:
            world.effect(StoreCordon(-1, old.device, None))
        world.effect(StoreCordon(event.token, device.id, cordon))

    def _forget(self, token: Token) -> None:
        self._cordons.pop(token, None)

    def cordon_stored(self, event: CordonStored) -> None:
        """The state directory answered: only now the cordon holds."""
        wait = self._cordons.pop(event.token, None)
        if wait is None:
            return
        world = self.world
        call = wait.event
        if event.error:
            world.effect(
                Refuse(
                    event.token,
                    ErrorKind.STORE_FAILED,
                    f"the cordon could not be stored ({printable(event.error)}); nothing was changed",
                )
            )
            return
        self.place_cordon(call.device, wait.cordon)
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
            one = replace(known, cordon=cordon)
            if in_hands(one):
                world.put_device(one)
            else:
                world.move(one, trigger, event.at, actor=call.actor, request_id=call.request_id)
        requests.remember(world, wait.key, call.fingerprint, "{}", event.at)
        world.effect(Reply(event.token, "{}"))

    def place_cordon(self, device_id: str, cordon: Cordon | None) -> None:
        """Put a cordon into the table, by place and by serial, or take it out."""
        table = self.world.cordons
        before = dict(table)

        def undo() -> None:
            table.clear()
            table.update(before)

        self.world.note(undo)
        device = self.world.devices.get(device_id)
        old = device.cordon if device else table.get(device_id)
        for one in (old, table.get(device_id)):
            if one is not None:
                table.pop(one.device, None)
                table.pop(f"serial:{one.serial}", None)
        if cordon is not None:
            table[cordon.device] = cordon
            if cordon.serial:
                table[f"serial:{cordon.serial}"] = cordon
