"""Leases: granting N devices, all or none, confirming, ending, and the limits on them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hetero_agent.core import requests
from hetero_agent.core.attachments import Attachments
from hetero_agent.core.effects import (
    Effect,
    ErrorKind,
    LeaseAdded,
    LeaseChanged,
    LeaseRemoved,
    PrepareAccess,
    Refusal,
    Refuse,
    Reply,
    RequestScan,
    UnwatchOwner,
    WatchOwner,
)
from hetero_agent.core.events import (
    AccessAttached,
    AccessFailed,
    AccessPrepared,
    Allocate,
    Confirm,
    OwnerGone,
    Release,
    Token,
)
from hetero_agent.core.lifecycle import Trigger, row
from hetero_agent.core.model import (
    AGENT,
    Actor,
    AuditKind,
    Binding,
    Device,
    Instant,
    Lease,
    LeaseState,
    OnEnd,
    OnFault,
    Options,
    RequestKey,
    RequestRecord,
    Result,
    State,
)
from hetero_agent.core.ports import Explanation
from hetero_agent.core.returns import Returns
from hetero_agent.core.selection import Choice, choose, mismatch
from hetero_agent.core.world import World, in_hands
from hetero_agent.text import printable

_ENDING = {
    Trigger.RELEASE: Result.RELEASED,
    Trigger.OWNER_GONE: Result.OWNER_GONE,
    Trigger.DEADLINE: Result.EXPIRED,
    Trigger.TTL_OVER: Result.EXPIRED,
    Trigger.EFFECT_FAILED: Result.FAILED,
    Trigger.SIBLING_FAILED: Result.FAILED,
    Trigger.UNHEALTHY: Result.FAILED,
    Trigger.UNHEALTHY_KILL: Result.FAILED,
    Trigger.UNPLUGGED: Result.UNPLUGGED,
}


@dataclass(frozen=True, slots=True)
class _Parked:
    """A request that waits for a scan which is under way, until DEADLINE (boot); they are served
    by NUMBER."""

    event: Allocate
    deadline: int
    number: int
    tokens: tuple[Token, ...]


class Grants:
    """See the module's text."""

    def __init__(self, world: World, returns: Returns) -> None:
        self.world = world
        self.returns = returns
        self.attachments = Attachments(world)
        self._tokens: dict[str, tuple[Token, ...]] = {}
        self._news: dict[str, list[Effect]] = {}
        self._within: dict[str, int] = {}
        self._parked: dict[RequestKey, _Parked] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait for a scan."""
        return len(self._parked)

    # -- Allocate --------------------------------------------------------------------------------
    def allocate(self, event: Allocate) -> None:
        """Grant, park, or refuse.  Raises Refusal."""
        world = self.world
        key = RequestKey(event.actor.uid, event.options.client, "Allocate", event.request_id)
        if self._again(key, event):
            return
        if not world.ready:
            raise Refusal(
                ErrorKind.NOT_READY, "the first look at this host's devices is not complete; try again"
            )
        self._limits(event)
        ahead = any(one.event.resource == event.resource for one in self._parked.values())
        choice = Choice(()) if ahead else self._choose(event.resource, event.count, event.options)
        if event.options.confirm:
            self._bound_enough(choice.devices, event.options.binding)
            self.attachments.check(event.options.netdev, event.options.binding)
        if len(choice.devices) == event.count:
            self._prepare(event, key, choice.devices, (event.token,))
            return
        passing = self._passing(event)
        if not ahead and len(choice.devices) + len(passing) < event.count:
            raise self._shortage(event.resource, event.count, event.options, choice)
        if len(self._parked) >= world.settings.waiting:
            raise Refusal(
                ErrorKind.LIMIT_EXCEEDED, f"{world.settings.waiting} requests wait already; try again later"
            )
        deadline = event.at.boot + world.settings.park
        number = max((one.number for one in self._parked.values()), default=0) + 1
        world.assign(self._parked, key, _Parked(event, deadline, number, (event.token,)))
        world.alarm(deadline, "parked", "")
        if passing:
            world.effect(RequestScan(tuple(passing)))

    def _again(self, key: RequestKey, event: Allocate) -> bool:
        """Answer a repeated call: the stored body, or along with the first when that is."""
        earlier = requests.replay(self.world, key, event.fingerprint)
        if earlier is not None:
            if earlier.body:
                self.world.effect(Reply(event.token, earlier.body))
            else:
                tokens = (*self._tokens.get(earlier.lease, ()), event.token)
                self.world.assign(self._tokens, earlier.lease, tokens)
            return True
        parked = self._parked.get(key)
        if parked is None:
            return False
        requests.same(key, parked.event.fingerprint, event.fingerprint)
        self.world.assign(self._parked, key, replace(parked, tokens=(*parked.tokens, event.token)))
        return True

    def serve_parked(self, at: Instant) -> None:
        """See whether scans have made room for those who wait, first come first served."""
        held_back: set[str] = set()
        for key, parked in sorted(self._parked.items(), key=lambda one: one[1].number):
            event = parked.event
            if event.resource in held_back:
                continue
            try:
                self._limits(event)
                choice = self._choose(event.resource, event.count, event.options)
                if event.options.confirm:
                    self._bound_enough(choice.devices, event.options.binding)
                short = event.count - len(choice.devices)
                if short and len(self._passing(event)) >= short and at.boot < parked.deadline:
                    held_back.add(event.resource)
                    continue
                if short:
                    raise self._shortage(event.resource, event.count, event.options, choice)
            except Refusal as refusal:
                self.world.discard(self._parked, key)
                self.world.audit(
                    AuditKind.REFUSED,
                    at,
                    f"Allocate of uid {key.uid} refused: {refusal.kind}: {printable(refusal.text)}",
                    priority=5,
                    reason=str(refusal.kind),
                    actor=event.actor,
                    request_id=event.request_id,
                )
                self.refuse(parked.tokens, refusal)
                continue
            self.world.discard(self._parked, key)
            self._prepare(replace(event, at=at), key, choice.devices, parked.tokens)
        if self._parked:
            self.world.alarm(min(one.deadline for one in self._parked.values()), "parked", "")

    def refuse(self, tokens: Iterable[Token], refusal: Refusal) -> None:
        """Answer all TOKENS with the same refusal."""
        for token in tokens:
            self.world.effect(Refuse(token, refusal.kind, refusal.text))

    def _passing(self, event: Allocate) -> list[str]:
        """Devices that fit and that a scan under way may make grantable."""
        return [
            device.id
            for device in self.world.members(event.resource)
            if self.world.passing(device) and not self._unfit(device, event.options)
        ]

    def _limits(self, event: Allocate) -> None:
        """Raises Refusal if the grant would be over a limit."""
        world, limits = self.world, self.world.settings
        options = event.options
        uid = event.actor.uid if options.owner_uid is None else options.owner_uid
        if event.count < 1:
            raise Refusal(ErrorKind.INVALID_ARGUMENT, "count must be 1 or more")
        if options.devices and len(options.devices) != event.count:
            raise Refusal(
                ErrorKind.INVALID_ARGUMENT,
                f"count is {event.count}, but {len(options.devices)} devices are named",
            )
        for what, have, limit in (
            ("devices in one lease", event.count, limits.devices_per_lease),
            ("leases in all", len(world.leases) + 1, limits.leases),
            (f"leases of uid {uid}", world.load_of_uid[uid] + 1, limits.leases_per_uid),
            (
                f"leases of this client of uid {uid}",
                world.load[uid, options.client] + 1,
                limits.leases_per_client,
            ),
            (
                f"devices of this client of uid {uid}",
                world.held[uid, options.client] + event.count,
                limits.devices_per_client,
            ),
        ):
            if have > limit:
                raise Refusal(ErrorKind.LIMIT_EXCEEDED, f"{have} {what} would be over the limit of {limit}")
        requests.room(world, event.actor.uid)

    def _choose(self, resource: str, count: int, options: Options) -> Choice:
        world = self.world

        def fits(device_id: str) -> bool:
            return not self._unfit(world.devices[device_id], options)

        if options.devices:
            named = []
            for name in options.devices:
                device = world.find(name)
                if device is None or device.record.resource != resource or device.id in named:
                    continue
                if device.id in world.allocatable and fits(device.id):
                    named.append(device.id)
            kin = {one for device_id in named for one in world.rivals(device_id)}
            return Choice(() if kin.intersection(named) else tuple(named))
        return choose(
            world.pool(resource),
            count,
            options,
            candidates=lambda: (one for one in world.members(resource) if one.id in world.allocatable),
            fits=fits,
            kin=lambda device_id: tuple(world.rivals(device_id)),
        )

    @staticmethod
    def _unfit(device: Device, options: Options) -> str:
        if options.devices and not {device.id, *device.record.aliases}.intersection(options.devices):
            return "not among the named devices"
        return mismatch(device, options.require)

    def _shortage(self, resource: str, count: int, options: Options, choice: Choice) -> Refusal:
        """Say how many are short and why, by the same code as Explain."""
        explained = self.explain(resource, count, options, choice)
        kind = ErrorKind.UNAVAILABLE if self.world.tally.get(resource) else ErrorKind.NOT_FOUND
        return Refusal(kind, explained.text)

    def explain(self, resource: str, count: int, options: Options, choice: Choice | None = None) -> Explanation:
        """What Allocate would do now; grants nothing."""
        world = self.world
        if choice is None:
            choice = self._choose(resource, count, options)
        members = world.members(resource)
        if not members:
            known = ", ".join(sorted(world.tally)[:16]) or "none at all"
            text = f"this host has no {printable(resource)}; it has {known}"
            return Explanation("never", text)
        strangers: list[str] = []
        if options.devices:
            called = {name: one for one in members for name in (one.id, *one.record.aliases)}
            strangers = [name for name in options.devices if name not in called]
            members = list(
                {called[name].id: called[name] for name in options.devices if name in called}.values()
            )
        rows, fitting, reasons = [], 0, dict[str, int]()
        for device in members:
            why = self._unfit(device, options)
            fitting += not why
            why = why or world.why_not(device)
            rows.append((device.id, str(device.state), not why, why))
            if why:
                reasons[why] = reasons.get(why, 0) + 1
        if len(choice.devices) == count:
            text = f"{count} of {len(members)} {resource} would be granted"
            return Explanation("now", text, choice.devices, choice.note, tuple(rows))
        counted = "; ".join(
            f"{number} {why}" for why, number in sorted(reasons.items(), key=lambda one: -one[1])[:8]
        )
        text = f"{count} {resource} wanted, {len(choice.devices)} can be granted of {len(members)}"
        if options.devices:
            text += " named"
        if counted:
            text += f": {counted}"
        if strangers:
            text += f"; there is no {resource} {', '.join(printable(name, 64) for name in strangers[:8])}"
        verdict = "later" if fitting >= count and count <= world.settings.devices_per_lease else "never"
        if verdict == "never":
            text += "; this host can't satisfy it as it is"
        return Explanation(verdict, text, (), choice.note, tuple(rows))

    def _prepare(
        self, event: Allocate, key: RequestKey, chosen: tuple[str, ...], tokens: tuple[Token, ...]
    ) -> None:
        """The row ``prepared``: the devices are taken, the effects begin."""
        world, options = self.world, event.options
        before = len(world.outcome.effects)
        uid = event.actor.uid if options.owner_uid is None else options.owner_uid
        lease = Lease(
            id=event.lease,
            key=key,
            resource=event.resource,
            devices=chosen,
            uid=uid,
            client=options.client,
            label=options.label,
            state=LeaseState.ACTIVE if options.confirm else LeaseState.PENDING,
            created=event.at,
            confirmed=options.confirm,
            binding=options.binding,
            on_fault=options.on_fault,
            on_end=options.on_end,
            creator=event.actor,
            request=event.request,
            netdev=options.netdev,
        )
        world.put_lease(lease)
        world.put_request(RequestRecord(key, event.fingerprint, "", lease.id, boot=event.at.boot, owner=uid))
        trigger = Trigger.GRANTED_CONFIRMED if options.confirm else Trigger.GRANTED
        for device_id in chosen:
            device = world.devices[device_id]
            counted = world.key(device.record)
            self._bump(counted, device.count + 1)
            device = replace(device, count=device.count + 1, holders=())
            world.keep_record(device)
            world.move(
                device, trigger, event.at, actor=event.actor, request_id=event.request_id, lease=lease.id
            )
        world.assign(self._tokens, lease.id, tokens)
        world.assign(self._within, lease.id, options.confirm_within or world.settings.confirm_within)
        world.assign(self._news, lease.id, world.outcome.effects[before:])
        del world.outcome.effects[before:]
        world.effect(PrepareAccess(lease, tuple(world.devices[one].record for one in chosen)))

    def _bump(self, counted: str, count: int) -> None:
        self.world.assign(self.world.counts, counted, count)
        self.world.outcome.changes.counts[counted] = count

    def _preparation_over(self, lease_id: str) -> tuple[Token, ...]:
        """Bus signals come after the row ``granted``: those of the preparation go out now.
        Returns who waits for the grant."""
        world = self.world
        world.outcome.effects.extend(self._news.get(lease_id, ()))
        tokens = self._tokens.get(lease_id, ())
        world.discard(self._news, lease_id)
        world.discard(self._tokens, lease_id)
        world.discard(self._within, lease_id)
        return tokens

    def prepared(self, event: AccessPrepared) -> None:
        """The effects are in place: the row ``granted`` with the stored reply."""
        world = self.world
        lease = world.leases.get(event.lease)
        if lease is None or not lease.alive:
            world.revoke(event.lease)
            return
        if lease.granted:
            return
        gone = [one for one in lease.devices if not self._has(one, lease)]
        if gone:
            self.failed(AccessFailed(event.at, lease.id, f"{gone[0]} went away meanwhile"))
            return
        ttl = lease.binding.ttl
        within = self._within.get(lease.id, world.settings.confirm_within)
        deadline = (event.at.boot + ttl if ttl else 0) if lease.confirmed else event.at.boot + within
        manifest = dict(event.manifest)
        manifest["confirm-by"] = 0 if lease.confirmed else event.at.real + within
        manifest["confirm-by-boottime"] = 0 if lease.confirmed else deadline
        lease = replace(lease, granted=True, deadline=deadline, manifest=manifest)
        world.put_lease(lease)
        body = json.dumps({"lease": lease.id, "manifest": manifest}, separators=(",", ":"), sort_keys=True)
        earlier = world.requests[lease.key]
        world.put_request(replace(earlier, body=body))
        world.audit(
            AuditKind.GRANTED,
            event.at,
            f"lease {lease.id}: {len(lease.devices)} {lease.resource} granted to uid {lease.uid}: "
            + ", ".join(lease.devices[:8]),
            lease=lease.id,
            actor=lease.creator,
            request_id=lease.key.request_id,
            took=max(0, event.at.boot - lease.created.boot),
        )
        if deadline:
            world.alarm(deadline, "lease", lease.id)
        tokens = self._preparation_over(lease.id)
        world.effect(LeaseAdded(lease.id))
        if lease.binding:
            world.effect(WatchOwner(lease.id, lease.binding))
        for token in tokens:
            world.effect(Reply(token, body))

    def _has(self, device_id: str, lease: Lease) -> bool:
        device = self.world.devices.get(device_id)
        return (
            device is not None and device.lease == lease.id and device.state in (State.ALLOCATING, State.IN_USE)
        )

    def failed(self, event: AccessFailed) -> None:
        """The effects could not be made: all is undone, nothing is remembered."""
        world = self.world
        lease = world.leases.get(event.lease)
        if lease is None or not lease.alive or lease.granted:
            return
        refusal = Refusal(
            ErrorKind.STORE_FAILED if event.store else ErrorKind.UNAVAILABLE,
            f"the devices can't be given: {printable(event.reason)}; nothing was granted",
        )
        self.end(lease, Trigger.EFFECT_FAILED, event.at, reason=event.reason, refusal=refusal)

    def _bound_enough(self, devices: Iterable[str], binding: Binding) -> None:
        """Raises Refusal if a device shares its node with others, and BINDING does not say which
        processes are the lease's."""
        if binding.pid is not None or binding.unit is not None:
            return
        for one in devices:
            device = self.world.devices.get(one)
            if device is not None and self.returns.sharers(device):
                raise Refusal(
                    ErrorKind.INVALID_ARGUMENT,
                    f"{one} shares its node with other devices, so whoever has that open must be told "
                    "apart: bind a pid or a unit",
                )

    # -- Confirm and Release -------------------------------------------------------------------------
    def _owned(self, lease_id: str, actor: Actor, authority: str = "") -> Lease | None:
        """The lease, None for one that is over but remembered.  An administrator's AUTHORITY stands
        in for ownership.  Raises Refusal."""
        lease = self.world.leases.get(lease_id)
        uid = lease.uid if lease is not None else self.world.remembered_leases.get(lease_id)
        if uid is None or (lease is not None and not lease.granted):
            raise Refusal(ErrorKind.NOT_FOUND, "no such lease; see the list of leases")
        if actor.uid not in (uid, 0) and not authority:
            raise Refusal(ErrorKind.NOT_OWNER, f"the lease is uid {uid}'s; only that uid or root may do this")
        return lease

    def confirm(self, event: Confirm) -> None:
        """Take the lease into use, rebind it or renew it.  Raises Refusal."""
        world = self.world
        lease = self._owned(event.lease, event.actor)
        key = RequestKey(event.actor.uid, "", "Confirm", event.request_id)
        if requests.repeated(world, key, event.fingerprint, event.token):
            return
        if lease is None or not lease.alive:
            result = f" ({lease.result})" if lease is not None else ""
            raise Refusal(ErrorKind.LEASE_ENDED, f"the lease has ended{result}; allocate anew")
        if self.attachments.joins(event, key):
            return
        binding = event.binding or lease.binding
        self._bound_enough(lease.devices, binding)
        self.attachments.check(lease.netdev, binding)
        if not self.attachments.begins(event, key, lease, binding):
            self._confirmed(event, key, lease, (event.token,))

    def attached(self, event: AccessAttached) -> None:
        """The interfaces of a lease have followed its process: the Confirm that waits for it is done."""
        waiting = self.attachments.attached(event)
        if waiting is not None:
            confirm = replace(waiting.event, at=event.at)
            self._confirmed(confirm, waiting.key, self.world.leases[event.lease], waiting.tokens)

    def _confirmed(self, event: Confirm, key: RequestKey, lease: Lease, tokens: Iterable[Token]) -> None:
        world = self.world
        before, binding = lease.binding, event.binding or lease.binding
        deadline = event.at.boot + binding.ttl if binding.ttl else 0
        lease = replace(lease, state=LeaseState.ACTIVE, confirmed=True, binding=binding, deadline=deadline)
        world.put_lease(lease)
        for device_id in lease.devices:
            if self._has(device_id, lease):
                world.move(
                    world.devices[device_id],
                    Trigger.CONFIRM,
                    event.at,
                    actor=event.actor,
                    request_id=event.request_id,
                )
        bound = ", ".join(_bound_to(lease)) or "nothing"
        world.audit(
            AuditKind.CONFIRMED,
            event.at,
            f"lease {lease.id} confirmed, bound to {bound}",
            lease=lease.id,
            actor=event.actor,
            request_id=event.request_id,
        )
        if deadline:
            world.alarm(deadline, "lease", lease.id)
        if event.binding:
            if before.pid is None:
                # who was taken for the lease's by its uid alone is looked at anew
                self.returns.forget_lease(lease)
            world.effect(UnwatchOwner(lease.id))
            world.effect(WatchOwner(lease.id, binding))
        world.effect(LeaseChanged(lease.id))
        requests.remember(world, key, event.fingerprint, "{}", event.at, lease.id)
        for token in tokens:
            world.effect(Reply(token, "{}"))

    def release(self, event: Release) -> None:
        """Give the lease back; true if that changed anything.  Raises Refusal."""
        world = self.world
        key = RequestKey(event.actor.uid, "", "Release", event.request_id)
        # an answer that was given once needs no right anew: an administrator's was for one call
        if requests.repeated(world, key, event.fingerprint, event.token):
            return
        lease = self._owned(event.lease, event.actor, event.actor.authority)
        changed = lease is not None and lease.alive
        if not changed:
            requests.room(world, event.actor.uid)
        body = json.dumps({"changed": changed})
        requests.remember(world, key, event.fingerprint, body, event.at, event.lease, ended=lease is None)
        if lease is not None and changed:
            self.end(lease, Trigger.RELEASE, event.at, actor=event.actor, request_id=event.request_id)
        world.effect(Reply(event.token, body))

    # -- the end ------------------------------------------------------------------------------------
    def owner_gone(self, event: OwnerGone) -> None:
        """What the lease was bound to has ended."""
        lease = self.world.leases.get(event.lease)
        if lease is not None and lease.alive:
            self.end(lease, Trigger.OWNER_GONE, event.at, reason=f"its {event.how} ended")

    def deadline(self, lease_id: str, at: Instant) -> None:
        """The deadline of a lease may be over."""
        lease = self.world.leases.get(lease_id)
        if lease is None or not lease.alive or not lease.deadline:
            return
        if lease.deadline > at.boot:
            self.world.alarm(lease.deadline, "lease", lease_id)
            return
        self.end(lease, Trigger.TTL_OVER if lease.confirmed else Trigger.DEADLINE, at)

    def end(
        self,
        lease: Lease,
        trigger: Trigger,
        at: Instant,
        *,
        cause: str = "",
        reason: str = "",
        actor: Actor = AGENT,
        request_id: str = "",
        refusal: Refusal | None = None,
    ) -> None:
        """End a live lease: its devices are reclaimed; CAUSE names the one that failed it."""
        world = self.world
        result = _ENDING[trigger]
        fault = trigger in (Trigger.UNHEALTHY_KILL, Trigger.UNPLUGGED)
        kill = lease.on_end is OnEnd.KILL or fault
        tokens = self._preparation_over(lease.id)
        lease = replace(lease, state=LeaseState.ENDING, result=result, ended=at, deadline=0)
        world.put_lease(lease)
        kind = AuditKind.EXPIRED if result is Result.EXPIRED else AuditKind.ENDED
        world.audit(
            kind,
            at,
            f"lease {lease.id} of uid {lease.uid} ends: {result}" + (f" ({reason})" if reason else ""),
            priority=5 if result in (Result.RELEASED, Result.OWNER_GONE) else 4,
            lease=lease.id,
            trigger=trigger,
            reason=reason or str(result),
            actor=actor,
            request_id=request_id,
            took=max(0, at.boot - lease.created.boot),
            extra={"RESULT": str(result)},
        )
        if lease.granted:
            world.effect(LeaseChanged(lease.id))
        else:
            # a refusal is not remembered: the request id may be used again at once
            world.drop_request(lease.key)
        self.attachments.ended(lease)
        world.effect(UnwatchOwner(lease.id))
        world.revoke(lease.id)
        returned = []
        for device_id in lease.devices:
            device = world.devices.get(device_id)
            owed = world.debts.get(device_id)
            if owed is not None and owed.lease == lease.id:
                continue
            if device is None or device.lease != lease.id or not in_hands(device):
                returned.append(device_id)
                continue
            if device.state is State.LOST and not device.present:
                world.left(lease.id, device_id)
                world.move(device, Trigger.LEASE_ENDED, at, reason=str(result), lease="")
                returned.append(device_id)
                continue
            mine = trigger
            if device.state is State.LOST:
                mine = Trigger.LEASE_ENDED
            elif (cause and device_id != cause) or trigger is Trigger.UNPLUGGED:
                mine = Trigger.SIBLING_FAILED
            if row(device.state, mine) is None:
                mine = Trigger.SIBLING_FAILED
            self.returns.owe(
                device,
                lease,
                mine,
                at,
                reason=reason or str(result),
                actor=actor,
                request_id=request_id,
                kill=kill,
            )
        if tokens:
            self.refuse(
                tokens,
                refusal or Refusal(ErrorKind.UNAVAILABLE, f"the grant failed: {printable(reason or result)}"),
            )
        self.returned(lease.id, returned, at)

    def returned(self, lease_id: str, devices: Iterable[str], at: Instant) -> None:
        """Devices of a lease that has ended have settled; with the last one it is over."""
        world = self.world
        lease = world.leases.get(lease_id)
        if lease is None:
            return
        left = set(lease.devices) - set(lease.returned) - set(devices)
        lease = replace(lease, returned=tuple(one for one in lease.devices if one not in left))
        if left or lease.alive:
            world.put_lease(lease)
            return
        world.drop_lease(lease_id)
        self.returns.forget_lease(lease)
        for device_id in lease.devices:
            device = world.devices.get(device_id)
            if device_id not in world.debts and (device is None or not in_hands(device)):
                world.outcome.changes.records[device_id] = None
        if lease.granted:
            requests.spend(world, lease_id, at)
            world.effect(LeaseRemoved(lease_id, str(lease.result)))

    def lost(self, lease: Lease, device_id: str, at: Instant) -> None:
        """A leased device went away: the lease is kept and flagged, or ends if it asked so."""
        if device_id not in lease.lost:
            lease = replace(lease, lost=(*lease.lost, device_id))
            self.world.put_lease(lease)
            if lease.granted:
                self.world.effect(LeaseChanged(lease.id))
        if not lease.granted:
            self.end(lease, Trigger.EFFECT_FAILED, at, cause=device_id, reason=f"{device_id} went away")
        elif lease.on_fault is OnFault.KILL:
            self.end(lease, Trigger.UNPLUGGED, at, cause=device_id, reason=f"{device_id} went away")
        else:
            # it may come back at the same node, and be another's then
            self.world.retract(lease)


def _bound_to(lease: Lease) -> Iterable[str]:
    binding = lease.binding
    if binding.pid:
        yield f"process {binding.pid.pid}"
    if binding.unit:
        yield f"unit {printable(binding.unit.name, 80)}"
    if binding.connection:
        yield "its connection"
    if binding.ttl:
        yield f"a ttl of {binding.ttl // 1_000_000} s"
