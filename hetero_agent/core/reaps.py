"""Reap: operators end the named holders of a device, and hear how many were."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from hetero_agent.core import requests
from hetero_agent.core.effects import ErrorKind, Refusal, Reply
from hetero_agent.core.endings import Endings
from hetero_agent.core.events import Reap, Signalled, Token
from hetero_agent.core.lifecycle import Trigger
from hetero_agent.core.model import ProcessRef, RequestKey, State
from hetero_agent.core.returns import Returns
from hetero_agent.core.rights import may_reap
from hetero_agent.core.world import World, in_hands
from hetero_agent.text import printable


@dataclass(frozen=True, slots=True)
class _Wait:
    """A Reap that waits for what became of its signals."""

    device: str
    fingerprint: str
    tokens: tuple[Token, ...]
    left: frozenset[ProcessRef]
    sent: int = 0


class Reaps:
    """See the module's text."""

    def __init__(self, world: World, returns: Returns, endings: Endings) -> None:
        self.world = world
        self.returns = returns
        self.endings = endings
        self._waiting: dict[RequestKey, _Wait] = {}

    def asked(self, event: Reap) -> None:
        """End the named holders of a device that is owed or occupied.  Raises Refusal."""
        world = self.world
        key = RequestKey(event.actor.uid, "", "Reap", event.request_id)
        if requests.repeated(world, key, event.fingerprint, event.token):
            return
        waiting = self._waiting.get(key)
        if waiting is not None:
            requests.same(key, waiting.fingerprint, event.fingerprint)
            world.assign(self._waiting, key, replace(waiting, tokens=(*waiting.tokens, event.token)))
            return
        requests.room(world, event.actor.uid)
        device = world.devices.get(event.device)
        if device is None:
            raise Refusal(ErrorKind.NOT_FOUND, f"no device {printable(event.device)}; see the list of devices")
        debt = world.debts.get(device.id)
        if in_hands(device) or (debt is None and device.state is not State.OCCUPIED):
            raise Refusal(
                ErrorKind.UNAVAILABLE,
                f"{device.id} is {device.state}: only a device that is reclaiming, faulty for want of its "
                "return, or occupied has holders to end",
            )
        here = {holder.ref: holder for holder in device.holders}
        missing = [target.pid for target in event.targets if target not in here]
        if missing or not event.targets:
            raise Refusal(
                ErrorKind.NOT_FOUND,
                f"process {missing[0] if missing else '(none named)'} with that start time does not hold "
                f"{device.id}; GetHolders tells who does",
            )
        lease_uid = debt.uid if debt is not None and debt.lease else None
        for target in event.targets:
            refused = may_reap(here[target], lease_uid)
            if refused:
                raise Refusal(ErrorKind.NOT_AUTHORIZED, f"{refused}; nothing was ended")
        wait = _Wait(device.id, event.fingerprint, (event.token,), frozenset(event.targets))
        world.assign(self._waiting, key, wait)
        if debt is None:
            self.returns.owe(
                device, None, Trigger.REAP, event.at, actor=event.actor, request_id=event.request_id
            )
        else:
            deadline = event.at.boot + world.settings.reclaim_deadline
            world.put_debt(replace(debt, overdue=False, deadline=deadline))
            world.move(
                device,
                Trigger.REAP,
                event.at,
                reason=device.reason if device.state is State.RECLAIMING else "reap",
                actor=event.actor,
                request_id=event.request_id,
            )
        debt = world.debts[device.id]
        world.put_debt(replace(debt, targets=tuple(dict.fromkeys((*debt.targets, *event.targets)))))
        for target in dict.fromkeys(event.targets):
            self.endings.begin(device, debt.lease, here[target], event.at)
        world.alarm(event.at.boot + world.settings.kill_after, "check", device.id)

    def signalled(self, event: Signalled) -> None:
        """Tell the Reap that waits for it."""
        for key, wait in sorted(self._waiting.items(), key=lambda one: one[1].tokens):
            if wait.device != event.device or event.holder not in wait.left:
                continue
            left = wait.left - {event.holder}
            wait = replace(wait, left=left, sent=wait.sent + event.sent)  # noqa: PLW2901
            if left:
                self.world.assign(self._waiting, key, wait)
                continue
            self.world.discard(self._waiting, key)
            body = json.dumps({"ended": wait.sent})
            requests.remember(self.world, key, wait.fingerprint, body, event.at)
            for token in wait.tokens:
                self.world.effect(Reply(token, body))
