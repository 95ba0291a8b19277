"""The health edge: what the daemon builds, and the engine knows as `core.ports.HealthWatch`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hetero_agent.config import HealthTable
from hetero_agent.core import verdict
from hetero_agent.core.events import Happened, HealthJudged, Note
from hetero_agent.core.model import AuditKind, DeviceRecord, Health, Instant, Opinion, Origin
from hetero_agent.core.ports import Submit
from hetero_agent.core.symptoms import MessageRule, Symptoms
from hetero_agent.core.verdict import Fault, Finding, Grade, Standing
from hetero_agent.health import counters, kernlog, rounds
from hetero_agent.health.kernlog import KernelLog, Said
from hetero_agent.health.memory import FILE, Memory
from hetero_agent.health.roster import Patient, Roster, spec_of
from hetero_agent.health.rounds import Result, Rounds
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.health")

#: Devices that went and may come back with a fault, at most.
_DEPARTED: Final = 1024
#: A message of a doubt that is older (seconds) says nothing of today.
_STALE: Final = kernlog.BACK
#: Seconds within which the same fault of a user on one device is noted once.
_NOTE_EVERY: Final = 60.0
#: Reasons that one verdict names.
_REASONS: Final = 3
#: Seconds after which a sleep that nobody ended is taken for over.
_SLEEP_MOST: Final = 120.0

_GRADES: Final = (Grade.GOOD, Grade.UNKNOWN, Grade.DEGRADED, Grade.FAILED, Grade.BROKEN)
_NOT_PROBED: Final = Opinion(Health.HEALTHY)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule of PROFILE, "" for one that all profiles have."""

    rule: MessageRule
    profiles: frozenset[str]


def _looks(record: DeviceRecord) -> tuple[object, ...]:
    """What discovery sees of a device that makes a probe worth while when it changes."""
    seen = (record.attributes.get(name) for name in ("port-state", "net-state"))
    return record.path, record.nodes, record.driver, *seen


class HealthEdge:
    """Probes devices in rounds and hears what the kernel says of them; loop thread only.

    RUNTIME is the directory for what outlives the agent.  LOOK is told the path of a device of the
    kernel that has changed without an event.
    """

    def __init__(
        self,
        table: HealthTable,
        runtime: Path,
        submit: Submit,
        now: Callable[[], Instant],
        look: Callable[[str], None],
        probe_command: Sequence[str] = rounds.COMMAND,
        log_command: Sequence[str] = kernlog.COMMAND,
    ) -> None:
        self._table = table
        self._submit = submit
        self._now = now
        self._look = look
        self._roster = Roster()
        self._memory = Memory(runtime / FILE)
        self._rounds = Rounds(self._roster, table, self._probed, probe_command)
        self._log = KernelLog(self._heard, self._lost, log_command)
        self._symptoms: Mapping[str, Symptoms] = {}
        self._rules: list[_Rule] = []
        self._departed: dict[str, Patient] = {}
        self._noted: dict[tuple[str, str], tuple[float, int]] = {}
        self._asleep: asyncio.TimerHandle | None = None
        self._slept = _offset()

    # -- life -----------------------------------------------------------------------------------
    def start(self) -> None:
        """Take up what an earlier life kept.  Before any device is watched."""
        self._memory.load()

    def listen(self, symptoms: Mapping[str, Symptoms]) -> None:
        """Go by the SYMPTOMS of these profiles, and hear the kernel's messages from now on."""
        self._symptoms = symptoms
        for patient in self._roster:
            patient.symptoms = symptoms.get(patient.record.profile, patient.symptoms)
            patient.spec = spec_of(patient.record, patient.symptoms)
        owners: defaultdict[MessageRule, set[str]] = defaultdict(set)
        for name, one in symptoms.items():
            for rule in one.messages:
                owners[rule].add(name)
        self._rules = [_Rule(rule, frozenset(names)) for rule, names in owners.items()]
        self._log.listen([one.rule for one in self._rules], self._table.kernel_log, self._memory.cursor)

    def configure(self, table: HealthTable) -> None:
        """Go by another ``[health]`` table; `listen` then reads the kernel's messages by it."""
        self._table = table
        self._rounds.configure(table)

    async def stop(self) -> None:
        """Probe and hear no more; nothing is submitted afterwards."""
        if self._asleep is not None:
            self._asleep.cancel()
        await self._log.stop()
        await self._rounds.stop()
        self._memory.save()

    def problems(self) -> list[str]:
        """What an administrator should know, each with what to do about it."""
        found = []
        if self._rounds.lost:
            found.append(f"devices can't be probed: {self._rounds.lost}")
        blocked = self._rounds.blocked
        if blocked:
            more = f" and {len(blocked) - 4} more" if len(blocked) > 4 else ""
            found.append(f"probes of {', '.join(blocked[:4])}{more} don't return; restart the host in the end")
        if self._log.problem:
            found.append(
                f"kernel messages are not heard ({self._log.problem}): the agent has to be allowed to read "
                "the journal or /dev/kmsg"
            )
        return found

    def stats(self) -> dict[str, Any]:
        """Return figures: ``devices``, ``rounds`` (requests answered), ``blocked`` devices, ``workers``
        (pids), ``kernel-log`` (where messages are read, "" for nowhere)."""
        return {
            "devices": len(self._roster),
            "rounds": self._rounds.rounds,
            "blocked": self._rounds.blocked,
            "workers": sorted(self._rounds.pids | self._log.pids),
            "kernel-log": self._log.source,
        }

    # -- devices --------------------------------------------------------------------------------
    def watch(self, device: str, record: DeviceRecord | None, repaired: bool) -> None:
        """See `core.ports.HealthWatch`."""
        if record is None:
            self._depart(device)
            return
        patient = self._roster.get(device)
        if patient is None:
            self._arrive(record)
            return
        rebound = bool(record.driver) and not patient.record.driver
        other = _looks(record) != _looks(patient.record)
        if record.serial and not patient.record.serial and self._memory.of(device, record.serial) is None:
            # what was kept of an earlier life is the fault of another card that was in this place
            patient.standing = replace(patient.standing, latch=None)
        self._describe(patient, record)
        if rebound or repaired:
            self._stand(patient, verdict.reset(patient.standing))
        if other or repaired:
            self._rounds.soon(patient)

    def _describe(self, patient: Patient, record: DeviceRecord) -> None:
        patient.record = record
        patient.symptoms = self._symptoms.get(record.profile, Symptoms())
        patient.spec = spec_of(record, patient.symptoms)
        self._roster.put(patient)

    def _arrive(self, record: DeviceRecord) -> None:
        patient = self._departed.pop(record.id, None)
        symptoms = self._symptoms.get(record.profile, Symptoms())
        if patient is None:
            patient = Patient(record, {}, symptoms)
            patient.standing = Standing(latch=self._memory.of(record.id, record.serial))
            self._describe(patient, record)
        else:
            replaced = bool(record.serial and patient.record.serial and record.serial != patient.record.serial)
            old = patient.standing
            if not patient.blocked:
                # an answer that is still to come is about what was there before
                patient = Patient(record, {}, symptoms)
            patient.standing = Standing() if replaced else Standing(latch=old.latch, left=old.left)
            patient.said, patient.sample = {}, None
            self._describe(patient, record)
            self._stand(patient, verdict.reset(patient.standing))
        self._say([patient])
        self._rounds.soon(patient)

    def _depart(self, device: str) -> None:
        patient = self._roster.drop(device)
        if patient is None:
            return
        if patient.standing.latch or patient.standing.left or patient.blocked:
            if len(self._departed) >= _DEPARTED:
                del self._departed[next(iter(self._departed))]
            self._departed[device] = patient

    # -- verdicts -------------------------------------------------------------------------------
    def _stand(self, patient: Patient, standing: Standing) -> None:
        """Give a device another standing and remember what is to outlive the agent."""
        latch, patient.standing = patient.standing.latch, standing
        if standing.latch is latch:
            return
        if standing.latch and latch and standing.latch == replace(latch, good=standing.latch.good):
            return
        self._memory.keep(patient.id, patient.record.serial, standing.latch)
        self._memory.save()

    def _probed(self, results: Sequence[Result]) -> None:
        """Judge what probes found."""
        at = self._now()
        changed = []
        for patient, answer in results:
            if self._roster.get(patient.id) is not patient:
                continue
            finding = answer if isinstance(answer, Finding) else self._finding(patient, answer, at.boot)
            # what is otherwise than before may be in what discovery shows of it, too
            news = patient.found is not None and finding.reason != patient.found
            if (finding.grade is Grade.FAILED or news) and patient.spec["path"]:
                self._look(patient.spec["path"])
            patient.found = finding.reason
            self._stand(patient, verdict.probed(patient.standing, finding, at.boot, self._rounds.rules))
            changed.append(patient)
        self._say(changed, probed=True)
        self._check_sleep()

    def _finding(self, patient: Patient, answer: Mapping[str, Any], at: int) -> Finding:
        """Make one finding of what the worker tells of a device."""
        found = [
            Finding(Grade(grade), reason, {str(key): str(value) for key, value in evidence.items()})
            for grade, reason, evidence in answer.get("findings", ())
        ]
        if answer.get("counters"):
            sample = counters.Sample(at, answer["counters"])
            found += counters.judge(patient.sample, sample, patient.symptoms.correctable)
            patient.sample = sample
        if answer.get("asleep") and (patient.standing.health is Health.UNHEALTHY or patient.standing.latch):
            return Finding(Grade.UNKNOWN, "asleep")
        if not found:
            return Finding(Grade.GOOD)
        worst = max((one.grade for one in found), key=_GRADES.index)
        same = [one for one in found if one.grade is worst]
        evidence: dict[str, str] = {}
        for one in same:
            evidence |= one.evidence
        return Finding(worst, "; ".join(one.reason for one in same[:_REASONS]), evidence)

    def _say(self, patients: Sequence[Patient], probed: bool = False) -> None:
        """Submit what is new about these devices; PROBED: they were, so their first word counts even
        if it is a good one."""
        probes: dict[str, Opinion] = {}
        kernel: dict[str, Opinion] = {}
        for patient in patients:
            if probed or Origin.PROBE in patient.said:
                self._if_new(patient, Origin.PROBE, patient.standing.probes, probes, None)
            self._if_new(patient, Origin.KERNEL, patient.standing.kernel, kernel, _NOT_PROBED)
        for origin, opinions in ((Origin.KERNEL, kernel), (Origin.PROBE, probes)):
            if opinions:
                self._submit(HealthJudged(self._now(), origin, opinions))

    @staticmethod
    def _if_new(
        patient: Patient, origin: Origin, opinion: Opinion, into: dict[str, Opinion], before: Opinion | None
    ) -> None:
        known = patient.said.get(origin, before)
        if known is None or (opinion.health, opinion.reason, opinion.confirming) != (
            known.health,
            known.reason,
            known.confirming,
        ):
            patient.said[origin] = into[patient.id] = opinion

    # -- what the kernel says -------------------------------------------------------------------
    def _heard(self, messages: Sequence[Said], cursor: str) -> None:
        self._memory.cursor = cursor
        for message in messages:
            if message.rule >= len(self._rules):
                continue
            rule = self._rules[message.rule]
            for patient in self._whom(message):
                if not patient.record.profile or patient.record.profile in rule.profiles:
                    self._told(patient, rule.rule, message)

    def _whom(self, message: Said) -> list[Patient]:
        """Find the devices that a message is about: by the address in it, the name in it, or the
        kernel's own word."""
        if message.address:
            return self._roster.at(message.address)
        if message.name:
            return self._roster.called(message.name)
        kind, _, name = message.device.partition(":")
        if kind == "+pci":
            return self._roster.at(name)
        return self._roster.called(name) if kind.startswith("+") else []

    def _told(self, patient: Patient, rule: MessageRule, message: Said) -> None:
        """Take one message about one device."""
        line = printable(message.line, 256)
        text = printable(rule.text.replace("{code}", message.code).replace("{line}", line), 256)
        evidence = {"line": line, "class": str(rule.fault)}
        if message.code:
            evidence["code"] = message.code
        if message.repeated:
            evidence["repeated"] = str(message.repeated)
        if rule.fault is Fault.APPLICATION:
            if message.age <= _STALE:
                self._note(patient, text, evidence)
            return
        if rule.fault is Fault.DEGRADED and message.age > _STALE:
            return
        log.info("%s: %s (%s): %s", patient.id, text, rule.fault, line)
        at = self._now().boot
        after = verdict.told(patient.standing, rule.fault, text, evidence, at, self._rounds.rules)
        self._stand(patient, after)
        self._say([patient])
        self._rounds.soon(patient)

    def _note(self, patient: Patient, text: str, evidence: dict[str, str]) -> None:
        """Note what a program did; the same thing once in a while, with how often it was."""
        key, now = (patient.id, text), time.monotonic()
        since, left_out = self._noted.get(key, (0.0, 0))
        if since and now < since + _NOTE_EVERY:
            self._noted[key] = (since, left_out + 1)
            return
        if len(self._noted) >= _DEPARTED:
            del self._noted[next(iter(self._noted))]
        self._noted[key] = (now, 0)
        if left_out:
            evidence["left-out"] = str(left_out)
        more = f" ({left_out} like it before)" if left_out else ""
        self._submit(
            Note(
                self._now(),
                AuditKind.APPLICATION_FAULT,
                f"{patient.id}: {text}{more}, a program's own fault",
                5,
                patient.id,
                evidence,
            )
        )

    def _lost(self, count: int) -> None:
        """Messages were overwritten before they could be read: look at what they may have told of."""
        log.warning("%d kernel messages were lost; all devices are probed now", count)
        self._rounds.all_soon()

    def wedged(self, path: str, how: str) -> None:
        """A driver gave up the DRM device at PATH below /sys; HOW it could be recovered, ``none`` if
        it has been already."""
        shown = printable(how, 64)
        fault = Fault.DEGRADED if how == "none" else Fault.NEEDS_RESET
        for patient in self._roster.under(path):
            evidence = {"wedged": shown, "path": printable(path)}
            at = self._now().boot
            text = f"its driver gave it up (recovery: {shown})"
            self._stand(patient, verdict.told(patient.standing, fault, text, evidence, at, self._rounds.rules))
            self._say([patient])
            self._rounds.soon(patient)

    # -- sleep ----------------------------------------------------------------------------------
    def sleep(self, begins: bool) -> None:
        """The machine is about to sleep, or woke up: no device is believed in until it is probed."""
        reason = "the machine goes to sleep" if begins else "the machine slept; not probed yet"
        if self._asleep is not None:
            self._asleep.cancel()
        loop = asyncio.get_running_loop()
        self._asleep = loop.call_later(_SLEEP_MOST, self.sleep, False) if begins else None
        self._slept = _offset()
        patients = [one for one in self._roster if one.spec["path"]]
        for patient in patients:
            self._stand(patient, verdict.doubted(patient.standing, reason))
        self._say(patients)
        self._rounds.pause(begins)

    def _check_sleep(self) -> None:
        """Notice a sleep that nobody told of."""
        slept, self._slept = self._slept, _offset()
        if self._slept - slept > 2.0 and self._asleep is None:
            self._submit(Happened(self._now(), "resume", "the machine woke up; nobody told of its sleep"))
            self.sleep(False)


def _offset() -> float:
    """How long the machine has slept since its boot, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
