"""The life of a device: the two tables of the design, as data.

The governor interprets them, the tests walk them, and `docs/lifecycle.md` is made from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hetero_agent.core.model import Health, Obstacle, Result, State


class Trigger(StrEnum):
    """What can move a device."""

    GRANTED = "granted"
    GRANTED_CONFIRMED = "granted-confirmed"
    CONFIRM = "confirm"
    DEADLINE = "deadline"
    EFFECT_FAILED = "effect-failed"
    RELEASE = "release"
    OWNER_GONE = "owner-gone"
    TTL_OVER = "ttl-over"
    SIBLING_FAILED = "sibling-failed"
    UNHEALTHY = "unhealthy"
    UNHEALTHY_KILL = "unhealthy-kill"
    HEALTHY = "healthy"
    INTRUDER = "intruder"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    PROVIDER_GONE = "provider-gone"
    PROVIDER_BACK = "provider-back"
    UNPLUGGED = "unplugged"
    RETURNED = "returned"
    LEASE_ENDED = "lease-ended"
    REAP = "reap"
    OBSERVED = "observed"
    SCANNED = "scanned"
    RETURN_PROVEN = "return-proven"
    RETURN_OVERDUE = "return-overdue"


class To(StrEnum):
    """Where a row leads when it is not to a fixed state."""

    SETTLE = "settle"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the next state (or `To`), what the lease ends with, and what else happens."""

    to: State | To
    result: Result = Result.NONE
    also: str = ""


S, T = State, Trigger
_FREE = (S.PROBING, S.IDLE, S.RECLAIMING, S.OCCUPIED, S.FAULTY, S.OFFLINE)
_HELD = (S.ALLOCATING, S.IN_USE)

#: What moves a device that no lease has: each leads to `settle`.
SETTLING = (
    T.OBSERVED,
    T.UNPLUGGED,
    T.RETURNED,
    T.CORDON,
    T.UNCORDON,
    T.UNHEALTHY,
    T.HEALTHY,
    T.PROVIDER_GONE,
    T.PROVIDER_BACK,
    T.SCANNED,
    T.RETURN_PROVEN,
    T.RETURN_OVERDUE,
)

TABLE: dict[tuple[State, Trigger], Row] = {
    **{(state, trigger): Row(To.SETTLE) for state in _FREE for trigger in SETTLING},
    (S.IDLE, T.GRANTED): Row(S.ALLOCATING, also="the deadline confirm-within starts"),
    (S.IDLE, T.GRANTED_CONFIRMED): Row(S.IN_USE, also="confirm=true: no deadline"),
    (S.ALLOCATING, T.CONFIRM): Row(S.IN_USE, also="binding recorded"),
    (S.IN_USE, T.CONFIRM): Row(To.SAME, also="rebinds or renews"),
    (S.ALLOCATING, T.DEADLINE): Row(S.RECLAIMING, Result.EXPIRED, "effects undone"),
    **{
        (state, T.EFFECT_FAILED): Row(S.RECLAIMING, Result.FAILED, "effects undone")
        for state in _HELD
    },
    **{(state, T.RELEASE): Row(S.RECLAIMING, Result.RELEASED) for state in _HELD},
    **{(state, T.OWNER_GONE): Row(S.RECLAIMING, Result.OWNER_GONE) for state in _HELD},
    **{(state, T.TTL_OVER): Row(S.RECLAIMING, Result.EXPIRED) for state in _HELD},
    **{(state, T.SIBLING_FAILED): Row(S.RECLAIMING, Result.FAILED) for state in _HELD},
    (S.ALLOCATING, T.UNHEALTHY): Row(S.RECLAIMING, Result.FAILED),
    (S.ALLOCATING, T.UNHEALTHY_KILL): Row(S.RECLAIMING, Result.FAILED),
    (S.IN_USE, T.UNHEALTHY): Row(To.SAME, also="Health, HealthEvent, alert"),
    (S.IN_USE, T.UNHEALTHY_KILL): Row(
        S.RECLAIMING, Result.FAILED, "the lease's own processes are ended"
    ),
    **{(state, T.HEALTHY): Row(To.SAME, also="Health, HealthEvent") for state in _HELD},
    **{(state, T.INTRUDER): Row(To.SAME, also="alert intruder, Conflict") for state in _HELD},
    **{(state, T.CORDON): Row(To.SAME, also="drain: settles to offline") for state in _HELD},
    **{(state, T.UNCORDON): Row(To.SAME) for state in _HELD},
    **{(state, T.PROVIDER_GONE): Row(To.SAME, also="Health unknown") for state in _HELD},
    **{(state, T.PROVIDER_BACK): Row(To.SAME) for state in _HELD},
    **{(state, T.UNPLUGGED): Row(S.LOST, also="lease kept and flagged, owner told") for state in _HELD},
    (S.LOST, T.LEASE_ENDED): Row(To.SETTLE),
    (S.LOST, T.RETURNED): Row(S.RECLAIMING, also="detached from the lease; owner side counts as done"),
    **{(state, T.REAP): Row(S.RECLAIMING, also="named holders are ended")
       for state in (S.RECLAIMING, S.FAULTY, S.OCCUPIED)},
}  # fmt: skip

#: Pairs that can meet and change nothing, and pairs that can't meet; a test holds that each
#: (state, trigger) is here or above, never both.
IGNORED: dict[tuple[State, Trigger], str] = {
    **{(state, trigger): "only idle can be granted"
       for state in State if state is not S.IDLE for trigger in (T.GRANTED, T.GRANTED_CONFIRMED)},
    **{(state, trigger): "not in a lease's hands"
       for state in _FREE
       for trigger in (T.CONFIRM, T.DEADLINE, T.EFFECT_FAILED, T.RELEASE, T.OWNER_GONE, T.TTL_OVER,
                       T.SIBLING_FAILED, T.UNHEALTHY_KILL, T.INTRUDER, T.LEASE_ENDED)},
    **{(state, T.REAP): "nothing to end there" for state in (S.PROBING, S.IDLE, S.OFFLINE)},
    **{(state, T.REAP): "the lease has it; release that" for state in (*_HELD, S.LOST)},
    **{(state, trigger): "nothing is owed while a lease has it"
       for state in (*_HELD, S.LOST) for trigger in (T.RETURN_PROVEN, T.RETURN_OVERDUE)},
    **{(state, trigger): "facts of a leased device, its state stays"
       for state in _HELD for trigger in (T.OBSERVED, T.SCANNED, T.RETURNED)},
    **{(state, T.LEASE_ENDED): "the ending itself moves it" for state in _HELD},
    (S.IN_USE, T.DEADLINE): "confirmed: no deadline",
    **{(S.LOST, trigger): "the device is away; the lease's end settles it"
       for trigger in (T.CONFIRM, T.DEADLINE, T.EFFECT_FAILED, T.RELEASE, T.OWNER_GONE, T.TTL_OVER,
                       T.SIBLING_FAILED, T.UNHEALTHY, T.UNHEALTHY_KILL, T.HEALTHY, T.INTRUDER,
                       T.CORDON, T.UNCORDON, T.PROVIDER_GONE, T.PROVIDER_BACK, T.UNPLUGGED,
                       T.OBSERVED, T.SCANNED)},
}  # fmt: skip


class Facts(NamedTuple):
    """All that `settle` rests on."""

    present: bool
    unproven: bool
    overdue: bool
    incomplete: bool
    unrevoked: bool
    cordoned: bool
    obstacle: Obstacle
    health: Health
    evidence: str
    provider_gone: bool
    probed: bool
    scanned: bool
    occupied: bool
    held_by: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of `settle`: when it fits, the state and the reason."""

    says: str
    fits: Callable[[Facts], bool]
    state: State | None
    reason: str | Callable[[Facts], str] = ""


def _overdue(facts: Facts) -> str:
    if facts.incomplete:
        return "scan-incomplete"
    return "access-not-revoked" if facts.unrevoked and not facts.held_by else "reclaim-timeout"


#: The first rule that fits gives the state; None means the object is removed.
SETTLE: tuple[Rule, ...] = (
    Rule("absent", lambda f: not f.present, None, "absent"),
    Rule(
        "return unproven past its deadline",
        lambda f: f.unproven and f.overdue,
        S.FAULTY,
        _overdue,
    ),
    Rule(
        "return unproven",
        lambda f: f.unproven,
        S.RECLAIMING,
        lambda f: f.held_by or ("access-not-revoked" if f.unrevoked else ""),
    ),
    Rule("cordoned", lambda f: f.cordoned, S.OFFLINE, "cordoned"),
    Rule(
        "no driver, no node, or bound to vfio-pci",
        lambda f: f.obstacle is not Obstacle.NONE,
        S.OFFLINE,
        lambda f: f.obstacle.value,
    ),
    Rule("unhealthy", lambda f: f.health is Health.UNHEALTHY, S.FAULTY, lambda f: f.evidence or "unhealthy"),
    Rule("its provider is gone", lambda f: f.provider_gone, S.FAULTY, "provider-gone"),
    Rule(
        "no probe or no complete scan yet",
        lambda f: not (f.probed and f.scanned),
        S.PROBING,
        lambda f: "not probed" if not f.probed else "not scanned",
    ),
    Rule("a holder outside any lease", lambda f: f.occupied, S.OCCUPIED, lambda f: f.held_by),
    Rule("else", lambda _: True, S.IDLE),
)


def settle(facts: Facts) -> tuple[State | None, str]:
    """Return the state of a device that no lease has, and why; None: it is gone."""
    for rule in SETTLE:
        if rule.fits(facts):
            reason = rule.reason
            return rule.state, reason if isinstance(reason, str) else reason(facts)
    raise AssertionError("the last rule fits always")


def row(state: State, trigger: Trigger) -> Row | None:
    """Return the row for a pair, None if it is ignored.  Raises KeyError if it is neither."""
    found = TABLE.get((state, trigger))
    if found is None and (state, trigger) not in IGNORED:
        raise KeyError((state, trigger))
    return found


def as_markdown() -> str:
    """Return both tables as the text of `docs/lifecycle.md`."""
    lines = ["# Device lifecycle", "", "Made from `hetero_agent/core/lifecycle.py`; a test keeps it equal.", ""]
    lines += ["## settle: a device that no lease has", "", "| first match | state |", "|---|---|"]
    lines += [f"| {rule.says} | {rule.state or 'gone'} |" for rule in SETTLE]
    lines += ["", "## Rows", "", "| from | trigger | to | lease ends | and |", "|---|---|---|---|---|"]
    lines += [
        f"| {state} | {trigger} | {found.to} | {found.result} | {found.also} |"
        for (state, trigger), found in TABLE.items()
    ]
    lines += ["", "## Ignored", "", "| state | trigger | why |", "|---|---|---|"]
    lines += [f"| {state} | {trigger} | {why} |" for (state, trigger), why in IGNORED.items()]
    return "\n".join(lines) + "\n"
