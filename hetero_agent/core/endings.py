"""Ending the processes that hold a device: one signal after the other, and what became of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero_agent.core.effects import Terminate
from hetero_agent.core.events import Signalled
from hetero_agent.core.model import AuditKind, Device, Holder, Instant, ProcessRef
from hetero_agent.core.world import World
from hetero_agent.text import printable


@dataclass(frozen=True, slots=True)
class _Step:
    """What was done last to end a holder, at boot time AT: ``TERM``, ``KILL``, or ``refused``.  FAILURE
    is why the signal was not sent: then the step is made again."""

    at: int
    what: str
    failure: str = ""


class Endings:
    """See the module's text.  Whether a process may be ended is decided before (core/rights.py)."""

    def __init__(self, world: World) -> None:
        self.world = world
        #: By device: what was done to end which holders.
        self._steps: dict[str, Mapping[ProcessRef, _Step]] = {}

    def forget(self, device_id: str) -> None:
        """Nobody holds the device any more: what was done to end its holders is of no account."""
        self.world.discard(self._steps, device_id)

    def begin(self, device: Device, lease: str, holder: Holder, at: Instant) -> None:
        """TERM, whatever was done before: an operator asks for it."""
        self._note(device.id, holder.ref, _Step(at.boot, "TERM"))
        self.world.effect(Terminate(device.id, lease, holder, "TERM", None))

    def step(
        self, device: Device, lease: str, holder: Holder, refused: str, uid: int | None, at: Instant
    ) -> None:
        """TERM, later KILL, then no more; or say once why not (REFUSED).  UID is whose process it must be
        still when the signal is sent, None for anybody's."""
        last = self._steps.get(device.id, {}).get(holder.ref)
        if refused:
            if last is None or last.what != "refused":
                self._note(device.id, holder.ref, _Step(at.boot, "refused"))
                self._audit(device, holder, at, f"not ended: {refused}")
            return
        after = self.world.settings.kill_after
        if last is None or last.what == "refused":
            step = _Step(at.boot, "TERM")
            self.world.alarm(at.boot + after, "check", device.id)
        elif last.at + after > at.boot or (last.what == "KILL" and not last.failure):
            return
        elif last.failure:
            step = replace(last, at=at.boot)
        else:
            step = _Step(at.boot, "KILL")
        self._note(device.id, holder.ref, step)
        self.world.effect(Terminate(device.id, lease, holder, step.what, uid))

    def _note(self, device_id: str, ref: ProcessRef, step: _Step) -> None:
        device = self.world.devices[device_id]
        here = {holder.ref for holder in device.holders}
        before = self._steps.get(device_id, {})
        kept = {one: was for one, was in before.items() if one in here}
        self.world.assign(self._steps, device_id, {**kept, ref: step})

    def _audit(self, device: Device, holder: Holder, at: Instant, what: str) -> None:
        self.world.audit(
            AuditKind.SIGNALLED,
            at,
            f"{device.id}: {process_name(holder)} {what}",
            priority=5,
            device=device.record,
            lease=device.lease,
            reason=what,
            extra={"PID": str(holder.pid)},
        )

    def signalled(self, event: Signalled) -> None:
        """A signal was sent, or could not be."""
        device = self.world.devices.get(event.device)
        if device is not None:
            holder = next(
                (one for one in device.holders if one.ref == event.holder),
                Holder(event.holder.pid, event.holder.start),
            )
            done = f"got SIG{event.signal}" if event.sent else f"was not signalled: {event.reason}"
            step = self._steps.get(device.id, {}).get(holder.ref)
            if event.sent or step is None or step.failure != event.reason:
                self._audit(device, holder, event.at, done)
            if step is not None and step.what == event.signal:
                failure = "" if event.sent else event.reason
                self._note(device.id, holder.ref, replace(step, failure=failure))


def process_name(holder: Holder) -> str:
    """Name a process for the journal."""
    what = printable(holder.exe or holder.comm or "?", 80)
    unit = f", {printable(holder.unit, 64)}" if holder.unit else ""
    return f"pid {holder.pid} ({what}, uid {holder.uids[0]}{unit})"
