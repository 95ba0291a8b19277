"""What is there and how it is: observations, health and providers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetero_agent.core.cordons import Cordons
from hetero_agent.core.effects import (
    DeviceAdded,
    HealthChanged,
    RequestScan,
    WatchHealth,
    WatchNodes,
)
from hetero_agent.core.events import (
    Happened,
    HealthJudged,
    HealthSeen,
    Observed,
    ProviderGone,
)
from hetero_agent.core.grants import Grants
from hetero_agent.core.lifecycle import Trigger, row
from hetero_agent.core.model import (
    AuditKind,
    Device,
    DeviceRecord,
    Health,
    Instant,
    Node,
    Obstacle,
    OnFault,
    Opinion,
    Origin,
    State,
)
from hetero_agent.core.returns import Returns
from hetero_agent.core.verdict import SEVERITY, combine
from hetero_agent.core.world import World, in_hands
from hetero_agent.text import printable

#: Own nodes of a device under other numbers that are still looked for.
_MOST_FORMER = 64


class Presence:
    """See the module's text."""

    def __init__(self, world: World, grants: Grants, returns: Returns, cordons: Cordons) -> None:
        self.world = world
        self.grants = grants
        self.returns = returns
        self.cordons = cordons
        self._unseen: dict[str, None] = {}
        #: Devices that got other nodes while a lease has them.
        self._renumbered: dict[str, None] = {}

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
        self._overtaken(event.at)

    def _overtaken(self, at: Instant) -> None:
        """A device whose former node is another's by now was away, though nobody saw it go: what its
        lease gives is the other's."""
        world = self.world
        for device_id in list(self._renumbered):
            device = world.devices.get(device_id)
            if device is None or not in_hands(device) or not device.former:
                world.discard(self._renumbered, device_id)
            elif device.state is not State.LOST and self.returns.overtaken(device):
                lease = world.leases.get(device.lease)
                world.move(device, Trigger.UNPLUGGED, at, reason="another device has its node")
                if lease is not None:
                    self.grants.lost(lease, device_id, at)
                device = world.devices[device_id]
                if device.state is State.LOST:
                    lease = world.leases.get(device.lease)
                    self.returns.owe(device, lease, Trigger.RETURNED, at, reason="back")

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
        said = Opinion(record.health, record.health_reason)
        news = None
        if (first or said[:2] != (old.health, old.health_reason)) and said != device.opinions[Origin.SOURCE]:
            news = said
        if first or record != old or not device.present:
            world.effect(WatchHealth(record.id, record))
        if record.driver != old.driver and not fresh and old.source:
            world.correlate(device, "driver-change", at, f"{old.driver or 'none'} -> {record.driver or 'none'}")
        world.discard(self._unseen, record.id)
        world.put_device(replace(device, record=record, present=True))
        device = world.devices[record.id]
        device = replace(
            device,
            cordon=self.cordons.of(record),
            count=world.counts.get(world.key(record), 0 if fresh else device.count),
            provider_gone=False,
        )
        if _other_nodes(record, old):
            world.effect(WatchNodes(record.id, record))
            # a node under a new number: nobody has looked at it yet
            device = replace(
                device,
                scanned=False,
                appeared=at.boot,
                last_open=at.boot,
                former=_former(device, device.former, old) if in_hands(device) else (),
            )
            debt = world.debts.get(record.id)
            if debt is not None:
                world.put_debt(replace(debt, nodes=_former(device, debt.nodes, old)))
            world.effect(RequestScan((record.id,)))
        if in_hands(device):
            world.put_device(device)
            if device.former:
                world.assign(self._renumbered, device.id, None)
            self.cordons.hold(world.units_of(record.id), at)
            self._leased_record(device, old, at)
            if news is not None:
                self._opine(record.id, Origin.SOURCE, news, at)
        else:
            if news is not None:
                device = self._heard(device, Origin.SOURCE, news, at)
            world.move(device, Trigger.OBSERVED, at)
            self._pass_down(record.id, at)
        if record.parent != old.parent:
            self._opine(record.id, Origin.PARENT, self._of_parent(record.parent), at)

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
            _other_nodes(device.record, old)
            and old.source
            and lease is not None
            and (device.state is State.ALLOCATING or not lease.granted)
        ):
            # the nodes that its manifest has, or is about to have, may be another device's by now
            self.grants.end(
                lease, Trigger.EFFECT_FAILED, at, cause=device.id, reason=f"nodes of {device.id} changed"
            )

    def _appear(self, record: DeviceRecord, at: Instant) -> None:
        world = self.world
        opinions = {Origin.SOURCE: Opinion(record.health, record.health_reason)}
        if record.parent:
            opinions[Origin.PARENT] = self._of_parent(record.parent)
        health = combine(opinions.values())
        device = Device(
            record=record,
            present=True,
            state=State.PROBING,
            reason="not scanned",
            since=at,
            health=health.health,
            health_reason=health.reason,
            opinions=opinions,
            confirming=health.confirming,
            told=health.health is Health.UNHEALTHY,
            probed=not world.settings.probes,
            appeared=at.boot,
        )
        world.put_device(device)
        device = replace(device, cordon=self.cordons.of(record), count=world.counts.get(world.key(record), 0))
        self.returns.owe_again(device, at)
        world.audit(
            AuditKind.APPEARED,
            at,
            f"{record.id} appeared as {record.resource}: "
            f"{printable(record.vendor, 64)} {printable(record.model, 64)}",
            device=record,
        )
        world.effect(DeviceAdded(record.id))
        world.effect(WatchNodes(record.id, record))
        world.effect(WatchHealth(record.id, record))
        world.effect(RequestScan((record.id,)))
        world.move(device, Trigger.OBSERVED, at)
        self._pass_down(record.id, at)

    def _gone(self, device: Device, at: Instant, reason: str = "unplugged") -> None:
        world = self.world
        world.discard(self._unseen, device.id)
        device = replace(device, present=False)
        if in_hands(device):
            world.effect(WatchHealth(device.id, None))
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
        self.returns.endings.forget(device.id)
        world.move(device, Trigger.UNPLUGGED, at)
        if debt is not None and debt.lease:
            world.left(debt.lease, device.id)
            self.grants.returned(debt.lease, (device.id,), at)

    # -- health ----------------------------------------------------------------------------------------
    def health(self, event: HealthSeen) -> None:
        """The source of a device states its health."""
        device = self.world.devices.get(event.device)
        if device is not None and device.record.source == event.source:
            said = Opinion(event.health, event.reason, event.evidence)
            self._opine(event.device, Origin.SOURCE, said, event.at)

    def judged(self, event: HealthJudged) -> None:
        """Probes, or the kernel's messages, say something of devices."""
        world = self.world
        for device_id, opinion in event.opinions.items():
            device = world.devices.get(device_id)
            if device is not None:
                first = event.origin is Origin.PROBE and not device.probed
                self._opine(device_id, event.origin, opinion, event.at, first_probe=first)

    def _opine(
        self, device_id: str, origin: Origin, opinion: Opinion, at: Instant, first_probe: bool = False
    ) -> None:
        """Take what ORIGIN says now, and do what follows for the device and its units."""
        world = self.world
        before = world.devices[device_id]
        opinion = opinion._replace(reason=printable(opinion.reason))
        if opinion == before.opinions.get(origin, Opinion(Health.HEALTHY)) and not first_probe:
            return
        device = self._heard(replace(before, probed=before.probed or first_probe), origin, opinion, at)
        if in_hands(device):
            world.put_device(device)
            if (device.health, device.health_reason) != (before.health, before.health_reason):
                self._leased_health(device, at)
        else:
            world.move(device, _trigger(device), at)
        self._pass_down(device_id, at)

    def _leased_health(self, device: Device, at: Instant) -> None:
        """A fault of a device that a lease has may end the lease."""
        lease = self.world.leases.get(device.lease)
        if lease is None or device.health is not Health.UNHEALTHY or device.state is State.LOST:
            return
        kill = device.state is State.IN_USE and lease.on_fault is OnFault.KILL
        trigger = Trigger.UNHEALTHY_KILL if kill else Trigger.UNHEALTHY
        found = row(device.state, trigger)
        if found is not None and found.to is State.RECLAIMING:
            why = f"{device.id} is unhealthy: {device.health_reason}"
            self.grants.end(lease, trigger, at, cause=device.id, reason=why)

    def _heard(self, device: Device, origin: Origin, opinion: Opinion, at: Instant) -> Device:
        """Tell what is new about the health of a device; returns it with that."""
        world = self.world
        opinions = {**device.opinions, origin: opinion}
        now = combine(opinions.values())
        was, reason = device.health, printable(now.reason)
        old = (was, device.health_reason, device.confirming)
        device = replace(
            device, opinions=opinions, health=now.health, health_reason=reason, confirming=now.confirming
        )
        if old[:2] == (now.health, reason):
            return device
        bad = now.health is Health.UNHEALTHY
        if was is not now.health:
            world.audit(
                AuditKind.HEALTH,
                at,
                f"{device.id} is {now.health} (was {was}){': ' + reason if reason else ''}",
                priority=3 if bad else 5,
                device=device.record,
                lease=device.lease,
                trigger=_trigger(device),
                reason=reason,
                extra=evidence_fields(now.evidence),
            )
        if bad or (device.told and now.health is Health.HEALTHY):
            world.effect(HealthChanged(device.id, str(now.health), reason, device.lease, now.evidence))
            device = replace(device, told=bad)
        return device

    # -- cards and their units -----------------------------------------------------------------------
    def _of_parent(self, parent: str) -> Opinion:
        """What the health of a card says of its units: its faults and doubts are theirs too."""
        card = self.world.devices.get(parent)
        if card is None or SEVERITY[card.health] < SEVERITY[Health.SUSPECT]:
            return Opinion(Health.HEALTHY)
        return Opinion(card.health, f"its card {card.id}: {card.health_reason}", {}, card.confirming)

    def _pass_down(self, device_id: str, at: Instant) -> None:
        units = self.world.units_of(device_id)
        if units:
            opinion = self._of_parent(device_id)
            for unit in units:
                if unit in self.world.devices:
                    self._opine(unit, Origin.PARENT, opinion, at)
            self.cordons.hold(units, at)

    def cards_gone(self, at: Instant) -> None:
        """The units of what is gone since the event began no longer suffer from it."""
        for device_id in self.world.gone:
            self._pass_down(device_id, at)

    def happened(self, event: Happened) -> None:
        """Something befell the host: it goes into the histories of the devices it concerns."""
        for device in list(self.world.devices.values()):
            if in_hands(device) or not event.leased:
                self.world.correlate(device, event.what, event.at, event.text)

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
        for device_id in list(world.devices):
            known = world.devices[device_id]
            if known.record.source != event.name or known.provider_gone is not event.back:
                continue
            own = known.opinions[Origin.SOURCE]
            said = own._replace(health=known.health_before if event.back else Health.UNKNOWN)
            opinions = {**known.opinions, Origin.SOURCE: said}
            health = combine(opinions.values())
            device = replace(
                known,
                provider_gone=not event.back,
                opinions=opinions,
                health=health.health,
                health_reason=health.reason,
                confirming=health.confirming,
                health_before=own.health,
            )
            if in_hands(device):
                world.put_device(device)
                world.correlate(device, trigger, event.at, f"provider {printable(event.name, 64)}")
            else:
                world.move(device, trigger, event.at)
            self._pass_down(known.id, event.at)


def evidence_fields(evidence: Mapping[str, str]) -> dict[str, str]:
    """Return EVIDENCE as extra fields of an audit record."""
    return {f"EVIDENCE_{key}": value for key, value in evidence.items()}


def _trigger(device: Device) -> Trigger:
    return Trigger.UNHEALTHY if device.health is Health.UNHEALTHY else Trigger.HEALTHY


def _former(device: Device, before: tuple[Node, ...], old: DeviceRecord) -> tuple[Node, ...]:
    """The nodes of a device, BEFORE and of the OLD record, that somebody may still have open though
    it has others now.  If a lease has it, nothing of it was left in between: what was open before
    that is not this device any more."""
    if device.state is State.LOST or (in_hands(device) and device.record.obstacle is not Obstacle.NONE):
        return ()
    here = {node.key for node in device.record.own_nodes}
    known = {node.key: node for node in (*before, *old.own_nodes)}
    return tuple(node for key, node in known.items() if key not in here)[-_MOST_FORMER:]


def _other_nodes(record: DeviceRecord, old: DeviceRecord) -> bool:
    """Tell whether the own nodes are others; another mode or group makes no other node."""

    def places(one: DeviceRecord) -> list[Node]:
        return [replace(node, mode=0, gid=0) for node in one.own_nodes]

    return places(record) != places(old)
