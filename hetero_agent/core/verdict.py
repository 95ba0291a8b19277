"""What probes, kernel messages and sources amount to: verdicts on a device's health.  Pure.

`combine` makes one health of what several origins say: the worst wins.  A `Standing` is what the
probes and the kernel have said of one device so far, and the functions below say what the next
word changes:

- a failed or doubtful probe makes it suspect and asks for a confirmation; some in a row confirm it;
- some good ones in a row bring it back, and more of them the more often it came and went (flapping);
- what could not be probed, or is not supported, is no failure;
- a fault that the kernel told of latches: a milder one never takes its place, and a good probe
  clears it only once the device was reset or plugged in anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from hetero_agent.core.model import Health, Opinion

#: From best to worst.
_ORDER: Final = (Health.HEALTHY, Health.UNKNOWN, Health.SUSPECT, Health.UNHEALTHY)
SEVERITY: Final[Mapping[Health, int]] = {health: number for number, health in enumerate(_ORDER)}

#: Reasons that one combined reason names.
_REASONS: Final = 4


def combine(opinions: Iterable[Opinion]) -> Opinion:
    """Return the worst of OPINIONS with the reasons and the evidence of all that are as bad.

    It is being confirmed only if each of those is.
    """
    listed = list(opinions)
    worst = max((one.health for one in listed), key=SEVERITY.__getitem__, default=Health.UNKNOWN)
    same = [one for one in listed if one.health is worst]
    if len(same) == 1:
        return same[0]
    told = dict.fromkeys(one.reason for one in same if one.reason)
    # a card's reason is often its unit's own too
    reasons = [one for one in told if not any(other.endswith(f": {one}") for other in told)]
    evidence: dict[str, str] = {}
    for one in reversed(same):
        evidence |= one.evidence
    confirming = bool(same) and all(one.confirming for one in same)
    return Opinion(worst, "; ".join(reasons[:_REASONS]), evidence, confirming)


class Grade(StrEnum):
    """What one probe found.

    `DEGRADED`: it works, but not as it should.  `FAILED`: it does not, as far as this probe can
    tell.  `BROKEN`: that is certain, without a second look.  `UNKNOWN`: it could not be probed.
    """

    GOOD = "good"
    UNKNOWN = "unknown"
    DEGRADED = "degraded"
    FAILED = "failed"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one probe of one device."""

    grade: Grade
    reason: str = ""
    evidence: Mapping[str, str] = field(default_factory=dict)


class Fault(StrEnum):
    """The classes of what the kernel tells, from mild to severe, and the end of one.

    `APPLICATION` is the user's own fault and says nothing of the device.  `DEGRADED` is a doubt,
    `NEEDS_RESET` and `FATAL` are certain.  `RECOVERED` says that the device was reset.
    """

    APPLICATION = "application"
    DEGRADED = "degraded"
    NEEDS_RESET = "needs-reset"
    FATAL = "fatal"
    RECOVERED = "recovered"


_WORSE: Final = (Fault.APPLICATION, Fault.DEGRADED, Fault.NEEDS_RESET, Fault.FATAL)


@dataclass(frozen=True, slots=True)
class Rules:
    """How often is enough.

    FAILURES in a row confirm a failure, RECOVERIES good probes in a row end it.  Who left health
    more than FLAPS times within WINDOW (µs) needs twice as many for each time beyond, PATIENCE at
    most.
    """

    failures: int = 3
    recoveries: int = 3
    flaps: int = 3
    window: int = 600_000_000
    patience: int = 48


@dataclass(frozen=True, slots=True)
class Latch:
    """The worst fault that the kernel told of.  RESET: the device was reset, or plugged in anew,
    since; GOOD counts the good probes in a row since then."""

    fault: Fault
    reason: str
    evidence: Mapping[str, str] = field(default_factory=dict)
    reset: bool = False
    good: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one device.

    HEALTH, REASON and EVIDENCE are the probes' verdict; FAILED, DOUBTFUL, PASSED (not failed)
    and GOOD count the last probes in a row that were so.  CONFIRMING: suspect by a first sign
    only.  LATCH is the kernel's verdict.  LEFT are the boot times (µs) at which the device left
    health, the latest last.
    """

    health: Health = Health.UNKNOWN
    reason: str = ""
    evidence: Mapping[str, str] = field(default_factory=dict)
    confirming: bool = False
    failed: int = 0
    doubtful: int = 0
    passed: int = 0
    good: int = 0
    latch: Latch | None = None
    left: tuple[int, ...] = ()

    @property
    def probes(self) -> Opinion:
        """The probes' verdict."""
        return Opinion(self.health, self.reason, self.evidence, self.confirming)

    @property
    def kernel(self) -> Opinion:
        """The verdict of what the kernel told."""
        if self.latch is None:
            return Opinion(Health.HEALTHY)
        health = Health.SUSPECT if self.latch.fault is Fault.DEGRADED else Health.UNHEALTHY
        return Opinion(health, self.latch.reason, self.latch.evidence)

    @property
    def well(self) -> bool:
        """Whether nobody has anything against it."""
        return self.latch is None and self.health in (Health.HEALTHY, Health.UNKNOWN)

    def urgent(self, rules: Rules) -> bool:
        """Whether the next probe should come soon: to confirm, or to end, what is known now."""
        if self.latch is not None and self.latch.reset:
            return True
        return 0 < self.failed < rules.failures or 0 < self.doubtful < rules.failures or self.confirming


def needed(standing: Standing, rules: Rules) -> int:
    """Return how many good probes in a row bring the device back."""
    beyond = max(0, len(standing.left) - rules.flaps)
    return min(rules.patience, rules.recoveries << min(beyond, 16)) if beyond else rules.recoveries


def probed(standing: Standing, finding: Finding, at: int, rules: Rules) -> Standing:
    """Return what STANDING is after one more probe, at boot time AT."""
    standing = _recent(standing, at, rules)
    match finding.grade:
        case Grade.GOOD:
            after = _good(standing, rules)
        case Grade.DEGRADED:
            after = _degraded(standing, finding, at, rules)
        case Grade.UNKNOWN:
            if standing.health not in (Health.HEALTHY, Health.UNKNOWN):
                return standing
            return replace(standing, health=Health.UNKNOWN, reason=finding.reason, evidence=finding.evidence)
        case _:
            after = _failed(standing, finding, at, rules)
    return _latch_after(after, finding.grade, rules)


def _recent(standing: Standing, at: int, rules: Rules) -> Standing:
    """Forget the times that are longer ago than the window."""
    if standing.left and standing.left[0] + rules.window < at:
        return replace(standing, left=tuple(one for one in standing.left if one + rules.window >= at))
    return standing


def _leave(standing: Standing, at: int) -> Standing:
    """Note that it leaves health, if it does."""
    if standing.health is Health.HEALTHY and standing.latch is None:
        return replace(standing, left=(*standing.left, at)[-32:])
    return standing


def _flapping(standing: Standing, rules: Rules) -> bool:
    return len(standing.left) > rules.flaps


def _words(standing: Standing, reason: str, rules: Rules) -> str:
    """REASON, with what keeps a flapping device away beside it."""
    if not _flapping(standing, rules):
        return reason
    return (
        f"{reason}; flapping: {len(standing.left)} times within {rules.window // 60_000_000} min, "
        f"so {needed(standing, rules)} good probes in a row are needed"
    )


def _plain(reason: str) -> str:
    return reason.partition("; flapping:")[0]


def _good(standing: Standing, rules: Rules) -> Standing:
    standing = replace(standing, failed=0, doubtful=0, passed=standing.passed + 1, good=standing.good + 1)
    blip = standing.confirming and not _flapping(standing, rules)
    if standing.health in (Health.HEALTHY, Health.UNKNOWN) or blip or standing.good >= needed(standing, rules):
        return replace(standing, health=Health.HEALTHY, reason="", evidence={}, confirming=False)
    return _better(standing, rules)


def _better(standing: Standing, rules: Rules) -> Standing:
    """It does not fail any more, but is not well yet: unhealthy becomes suspect."""
    if standing.health is Health.UNHEALTHY and standing.passed >= rules.recoveries:
        reason = _words(standing, f"was unhealthy ({_plain(standing.reason)})", rules)
        return replace(standing, health=Health.SUSPECT, reason=reason, confirming=False)
    return standing


def _degraded(standing: Standing, finding: Finding, at: int, rules: Rules) -> Standing:
    first = standing.health in (Health.HEALTHY, Health.UNKNOWN)
    standing = replace(
        _leave(standing, at),
        failed=0,
        good=0,
        passed=standing.passed + 1,
        doubtful=standing.doubtful + 1,
    )
    if standing.health is Health.UNHEALTHY and standing.passed < rules.recoveries:
        return standing
    passing = (first or standing.confirming) and standing.doubtful < rules.failures
    return replace(
        standing,
        health=Health.SUSPECT,
        reason=_words(standing, finding.reason, rules),
        evidence=finding.evidence,
        confirming=passing and not _flapping(standing, rules),
    )


def _failed(standing: Standing, finding: Finding, at: int, rules: Rules) -> Standing:
    first = standing.health in (Health.HEALTHY, Health.UNKNOWN)
    failed = standing.failed + 1 if finding.grade is Grade.FAILED else max(standing.failed + 1, rules.failures)
    standing = replace(_leave(standing, at), failed=failed, doubtful=0, passed=0, good=0)
    sure = failed >= rules.failures or standing.health is Health.UNHEALTHY
    return replace(
        standing,
        health=Health.UNHEALTHY if sure else Health.SUSPECT,
        reason=_words(standing, finding.reason, rules),
        evidence=finding.evidence,
        confirming=not sure and (first or standing.confirming) and not _flapping(standing, rules),
    )


def _latch_after(standing: Standing, grade: Grade, rules: Rules) -> Standing:
    latch = standing.latch
    if latch is None:
        return standing
    if grade is not Grade.GOOD:
        return replace(standing, latch=replace(latch, good=0)) if latch.good else standing
    if latch.fault is not Fault.DEGRADED and not latch.reset:
        return standing
    good = latch.good + 1
    return replace(standing, latch=None if good >= needed(standing, rules) else replace(latch, good=good))


def doubted(standing: Standing, reason: str) -> Standing:
    """Return STANDING of a device that is to be probed before anybody believes in it again, as
    after the machine slept: suspect, still counted, until the next good probe."""
    standing = replace(standing, good=0, passed=0)
    if standing.health in (Health.HEALTHY, Health.UNKNOWN):
        return replace(standing, health=Health.SUSPECT, reason=reason, evidence={}, confirming=True)
    return standing


def told(
    standing: Standing, fault: Fault, reason: str, evidence: Mapping[str, str], at: int, rules: Rules
) -> Standing:
    """Return STANDING after the kernel told of FAULT at boot time AT."""
    if fault is Fault.APPLICATION:
        return standing
    if fault is Fault.RECOVERED:
        return reset(standing)
    standing = _recent(standing, at, rules)
    latch = standing.latch
    if latch is not None and _WORSE.index(fault) < _WORSE.index(latch.fault):
        # the worse one stands; but what goes on telling of faults is not coming back
        worse = fault is not Fault.DEGRADED
        return replace(standing, latch=replace(latch, good=0, reset=latch.reset and not worse))
    standing = _leave(standing, at)
    return replace(standing, latch=Latch(fault, _words(standing, reason, rules), dict(evidence)))


def reset(standing: Standing) -> Standing:
    """Return STANDING of a device that was reset or plugged in anew: good probes count now."""
    if standing.latch is None:
        return standing
    return replace(standing, latch=replace(standing.latch, reset=True, good=0))
