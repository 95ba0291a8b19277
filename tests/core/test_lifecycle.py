"""The tables: complete, in order, the same in the documentation, and each row walked for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_agent.core import lifecycle
from hetero_agent.core.effects import (
    ConflictSeen,
    ErrorKind,
    HealthChanged,
    LeaseChanged,
    RevokeAccess,
    Terminate,
)
from hetero_agent.core.events import OwnerGone, ProviderGone
from hetero_agent.core.lifecycle import IGNORED, SETTLE, TABLE, Facts, To, Trigger, row, settle
from hetero_agent.core.model import (
    AuditKind,
    Binding,
    DeviceRecord,
    Health,
    LeaseState,
    Node,
    Obstacle,
    OnFault,
    ProcessRef,
    Result,
    Role,
    State,
)
from tests.core.host import SECOND, Host, card, holder

S, T = State, Trigger
DOC = Path(__file__).resolve().parents[2] / "docs" / "lifecycle.md"


# -- the tables as data ----------------------------------------------------------------------------
def test_each_pair_is_a_row_or_ignored() -> None:
    pairs = {(state, trigger) for state in State for trigger in Trigger}
    assert set(TABLE) | set(IGNORED) == pairs
    assert set(TABLE) & set(IGNORED) == set()
    assert all(IGNORED.values())


def test_row_tells_rows_from_ignored_and_from_nonsense() -> None:
    assert row(S.IDLE, T.GRANTED) is TABLE[S.IDLE, T.GRANTED]
    assert row(S.OCCUPIED, T.GRANTED) is None
    with pytest.raises(KeyError):
        row(S.IDLE, "no such trigger")  # type: ignore[arg-type]


def test_only_idle_is_granted() -> None:
    assert [state for state, trigger in TABLE if trigger in (T.GRANTED, T.GRANTED_CONFIRMED)] == [S.IDLE] * 2


def test_the_documentation_is_the_table() -> None:
    assert DOC.read_text(encoding="utf-8") == lifecycle.as_markdown()


# -- settle ----------------------------------------------------------------------------------------
GOOD = Facts(
    present=True,
    unproven=False,
    overdue=False,
    incomplete=False,
    unrevoked=False,
    cordoned=False,
    obstacle=Obstacle.NONE,
    health=Health.HEALTHY,
    evidence="",
    provider_gone=False,
    probed=True,
    scanned=True,
    occupied=False,
    held_by="",
)
#: Per rule, facts that make it and all rules after it fit; the rules before it do not.
WORST = GOOD._replace(
    present=False,
    unproven=True,
    overdue=True,
    cordoned=True,
    obstacle=Obstacle.VFIO,
    health=Health.UNHEALTHY,
    evidence="xid 79",
    provider_gone=True,
    probed=False,
    scanned=False,
    occupied=True,
    held_by="held by 1 process",
)
FIRST: list[tuple[str, Facts, tuple[State | None, str]]] = []
_facts = WORST
for _says, _answer, _next in (
    ("absent", (None, "absent"), {"present": True}),
    ("return unproven past its deadline", (S.FAULTY, "reclaim-timeout"), {"overdue": False}),
    ("return unproven", (S.RECLAIMING, "held by 1 process"), {"unproven": False}),
    ("cordoned", (S.OFFLINE, "cordoned"), {"cordoned": False}),
    ("no driver, no node, or bound to vfio-pci", (S.OFFLINE, "vfio"), {"obstacle": Obstacle.NONE}),
    ("unhealthy", (S.FAULTY, "xid 79"), {"health": Health.SUSPECT}),
    ("its provider is gone", (S.FAULTY, "provider-gone"), {"provider_gone": False}),
    ("no probe or no complete scan yet", (S.PROBING, "not probed"), {"probed": True, "scanned": True}),
    ("a holder outside any lease", (S.OCCUPIED, "held by 1 process"), {"occupied": False}),
    ("else", (S.IDLE, ""), {}),
):
    FIRST.append((_says, _facts, _answer))
    _facts = _facts._replace(**_next)


@pytest.mark.parametrize(("says", "facts", "answer"), FIRST, ids=[one[0] for one in FIRST])
def test_the_first_rule_that_fits_settles(says: str, facts: Facts, answer: tuple[State | None, str]) -> None:
    fitting = [rule.says for rule in SETTLE if rule.fits(facts)]
    assert fitting[0] == says
    assert settle(facts) == answer


def test_the_rules_are_these_in_this_order() -> None:
    assert [rule.says for rule in SETTLE] == [one[0] for one in FIRST]


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        (GOOD, (S.IDLE, "")),
        (GOOD._replace(unproven=True, overdue=True, incomplete=True), (S.FAULTY, "scan-incomplete")),
        (GOOD._replace(unproven=True, incomplete=True), (S.RECLAIMING, "")),
        (GOOD._replace(obstacle=Obstacle.NO_DRIVER), (S.OFFLINE, "no-driver")),
        (GOOD._replace(obstacle=Obstacle.NO_NODE), (S.OFFLINE, "no-node")),
        (GOOD._replace(health=Health.UNHEALTHY), (S.FAULTY, "unhealthy")),
        (GOOD._replace(scanned=False), (S.PROBING, "not scanned")),
        (GOOD._replace(health=Health.UNKNOWN), (S.IDLE, "")),
        (GOOD._replace(health=Health.SUSPECT), (S.IDLE, "")),
    ],
)
def test_settle(facts: Facts, answer: tuple[State, str]) -> None:
    assert settle(facts) == answer


# -- the rows through the governor -----------------------------------------------------------------
VIRT = DeviceRecord("d", "v/gpu", source="sim", nodes=(Node("/run/sim/d", Role.OWN, "file", fsdev=1, inode=2),))
PLAIN = card("d", 1)
OTHER = card("e", 2)
STRANGER = holder(77, uid=1001)
OWNER = ProcessRef(42, 1)


def fresh(record: DeviceRecord = PLAIN) -> Host:
    """A host with device d, not looked at yet."""
    host = Host()
    host.observe(complete=True)
    host.observe(record, source=record.source)
    return host


def probing(record: DeviceRecord = PLAIN) -> Host:
    return fresh(record)


def idle(record: DeviceRecord = PLAIN) -> Host:
    host = fresh(record)
    host.scan()
    return host


def reclaiming(record: DeviceRecord = PLAIN) -> Host:
    host = idle(record)
    host.release(host.use().id)
    host.scan({"d": [STRANGER]})
    return host


def occupied(record: DeviceRecord = PLAIN) -> Host:
    host = idle(record)
    host.scan({"d": [STRANGER]})
    host.later(3 * SECOND)
    host.scan({"d": [STRANGER]})
    return host


def faulty(record: DeviceRecord = PLAIN) -> Host:
    host = idle(record)
    host.health("d", Health.UNHEALTHY, "xid 79", source=record.source)
    return host


def overdue(record: DeviceRecord = PLAIN) -> Host:
    host = reclaiming(record)
    host.ticks(61 * SECOND)
    return host


def offline(record: DeviceRecord = PLAIN) -> Host:
    host = idle(record)
    host.cordon("d")
    return host


def allocating(record: DeviceRecord = PLAIN) -> Host:
    host = idle(record)
    host.grant(binding=Binding(pid=OWNER))
    return host


def in_use(record: DeviceRecord = PLAIN) -> Host:
    host = idle(record)
    host.use(binding=Binding(pid=OWNER))
    return host


def lost(record: DeviceRecord = PLAIN) -> Host:
    host = in_use(record)
    host.observe(gone=("d",), source=record.source)
    return host


REACH: dict[State, Callable[..., Host]] = {
    S.PROBING: probing,
    S.IDLE: idle,
    S.ALLOCATING: allocating,
    S.IN_USE: in_use,
    S.RECLAIMING: reclaiming,
    S.OCCUPIED: occupied,
    S.FAULTY: faulty,
    S.OFFLINE: offline,
    S.LOST: lost,
}
LEASE = f"{1:032x}"


def pull_trigger(host: Host, trigger: Trigger) -> None:
    """Make the thing happen that TRIGGER names, to device d."""
    source = host.device("d").record.source
    record = host.device("d").record
    match trigger:
        case T.GRANTED:
            host.grant()
        case T.GRANTED_CONFIRMED:
            host.use()
        case T.CONFIRM:
            host.confirm(LEASE, Binding(pid=OWNER))
        case T.DEADLINE:
            host.tick(31 * SECOND)
        case T.EFFECT_FAILED:
            host.observe(card("d", 9), source=source)
        case T.RELEASE:
            host.release(LEASE)
        case T.OWNER_GONE:
            host.do(OwnerGone(host.later(), LEASE, "pid"))
        case T.TTL_OVER:
            host.confirm(LEASE, Binding(ttl=SECOND))
            host.tick(2 * SECOND)
        case T.UNHEALTHY | T.UNHEALTHY_KILL:
            host.health("d", Health.UNHEALTHY, "xid 48", source=source)
        case T.HEALTHY:
            host.health("d", Health.HEALTHY, "fine now", source=source)
        case T.INTRUDER:
            host.scan({"d": [STRANGER]})
        case T.CORDON:
            host.cordon("d")
        case T.UNCORDON:
            host.cordon("d", None)
        case T.PROVIDER_GONE | T.PROVIDER_BACK:
            host.do(ProviderGone(host.later(), "sim", back=trigger is T.PROVIDER_BACK))
        case T.UNPLUGGED:
            host.observe(gone=("d",), source=source)
        case T.RETURNED | T.OBSERVED:
            host.observe(record, source=source)
        case T.REAP:
            host.reap("d", STRANGER.ref)
        case T.SCANNED | T.RETURN_PROVEN:
            host.scan()
        case T.RETURN_OVERDUE:
            host.ticks(61 * SECOND)
        case _:
            raise AssertionError(trigger)


FREE = (S.PROBING, S.IDLE, S.RECLAIMING, S.OCCUPIED, S.FAULTY, S.OFFLINE)

#: (state, trigger) -> where a device in that state, brought there as above, is afterwards, for
#: triggers of devices that no lease has.
SETTLED: dict[tuple[State, Trigger], str] = {
    **{(state, T.UNPLUGGED): "gone" for state in FREE},
    **{(state, T.OBSERVED): str(state) for state in FREE},
    **{(state, T.CORDON): "offline" for state in (S.PROBING, S.IDLE, S.OCCUPIED, S.FAULTY, S.OFFLINE)},
    (S.RECLAIMING, T.CORDON): "reclaiming",
    (S.OFFLINE, T.UNCORDON): "idle",
    **{(state, T.UNHEALTHY): "faulty" for state in (S.PROBING, S.IDLE, S.OCCUPIED, S.FAULTY)},
    (S.RECLAIMING, T.UNHEALTHY): "reclaiming",
    (S.OFFLINE, T.UNHEALTHY): "offline",
    (S.FAULTY, T.HEALTHY): "idle",
    **{(state, T.PROVIDER_GONE): "faulty" for state in (S.PROBING, S.IDLE, S.OCCUPIED, S.FAULTY)},
    (S.RECLAIMING, T.PROVIDER_GONE): "reclaiming",
    (S.OFFLINE, T.PROVIDER_GONE): "offline",
    **{(state, T.SCANNED): "idle" for state in (S.PROBING, S.IDLE, S.OCCUPIED)},
    (S.FAULTY, T.SCANNED): "faulty",
    (S.OFFLINE, T.SCANNED): "offline",
    (S.RECLAIMING, T.RETURN_PROVEN): "idle",
    (S.RECLAIMING, T.RETURN_OVERDUE): "faulty",
}  # fmt: skip


@pytest.mark.parametrize(("state", "trigger"), SETTLED, ids=str)
def test_a_free_device_settles(state: State, trigger: Trigger) -> None:
    host = REACH[state](VIRT if trigger in (T.PROVIDER_GONE, T.PROVIDER_BACK) else PLAIN)
    assert host.state("d") == state
    pull_trigger(host, trigger)
    assert host.state("d") == SETTLED[state, trigger]
    assert TABLE[state, trigger].to is To.SETTLE


def test_a_provider_comes_back() -> None:
    host = idle(VIRT)
    pull_trigger(host, T.PROVIDER_GONE)
    assert (host.state("d"), host.device("d").reason) == ("faulty", "provider-gone")
    pull_trigger(host, T.PROVIDER_BACK)
    assert host.state("d") == "idle"


def test_a_reclaim_that_timed_out_is_proven() -> None:
    host = overdue()
    assert (host.state("d"), host.device("d").reason) == ("faulty", "reclaim-timeout")
    pull_trigger(host, T.RETURN_PROVEN)
    assert host.state("d") == "idle"


#: The rows of devices in a lease's hands: (from, trigger) -> (to, the lease's result, its state).
HANDS: dict[tuple[State, Trigger], tuple[State, Result, LeaseState]] = {
    (S.ALLOCATING, T.CONFIRM): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.IN_USE, T.CONFIRM): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.ALLOCATING, T.DEADLINE): (S.RECLAIMING, Result.EXPIRED, LeaseState.ENDING),
    (S.ALLOCATING, T.EFFECT_FAILED): (S.RECLAIMING, Result.FAILED, LeaseState.ENDING),
    (S.ALLOCATING, T.RELEASE): (S.RECLAIMING, Result.RELEASED, LeaseState.ENDING),
    (S.IN_USE, T.RELEASE): (S.RECLAIMING, Result.RELEASED, LeaseState.ENDING),
    (S.ALLOCATING, T.OWNER_GONE): (S.RECLAIMING, Result.OWNER_GONE, LeaseState.ENDING),
    (S.IN_USE, T.OWNER_GONE): (S.RECLAIMING, Result.OWNER_GONE, LeaseState.ENDING),
    (S.IN_USE, T.TTL_OVER): (S.RECLAIMING, Result.EXPIRED, LeaseState.ENDING),
    (S.ALLOCATING, T.UNHEALTHY): (S.RECLAIMING, Result.FAILED, LeaseState.ENDING),
    (S.IN_USE, T.UNHEALTHY): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.ALLOCATING, T.HEALTHY): (S.ALLOCATING, Result.NONE, LeaseState.PENDING),
    (S.IN_USE, T.HEALTHY): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.ALLOCATING, T.INTRUDER): (S.ALLOCATING, Result.NONE, LeaseState.PENDING),
    (S.IN_USE, T.INTRUDER): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.ALLOCATING, T.CORDON): (S.ALLOCATING, Result.NONE, LeaseState.PENDING),
    (S.IN_USE, T.CORDON): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.ALLOCATING, T.UNCORDON): (S.ALLOCATING, Result.NONE, LeaseState.PENDING),
    (S.IN_USE, T.UNCORDON): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.ALLOCATING, T.PROVIDER_GONE): (S.ALLOCATING, Result.NONE, LeaseState.PENDING),
    (S.IN_USE, T.PROVIDER_GONE): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.ALLOCATING, T.PROVIDER_BACK): (S.ALLOCATING, Result.NONE, LeaseState.PENDING),
    (S.IN_USE, T.PROVIDER_BACK): (S.IN_USE, Result.NONE, LeaseState.ACTIVE),
    (S.ALLOCATING, T.UNPLUGGED): (S.LOST, Result.NONE, LeaseState.PENDING),
    (S.IN_USE, T.UNPLUGGED): (S.LOST, Result.NONE, LeaseState.ACTIVE),
    (S.LOST, T.RETURNED): (S.RECLAIMING, Result.NONE, LeaseState.ACTIVE),
}  # fmt: skip


@pytest.mark.parametrize(("state", "trigger"), HANDS, ids=str)
def test_a_device_in_a_leases_hands(state: State, trigger: Trigger) -> None:
    host = REACH[state](VIRT if trigger in (T.PROVIDER_GONE, T.PROVIDER_BACK) else PLAIN)
    if trigger is T.UNCORDON:
        host.cordon("d")
    if trigger is T.PROVIDER_BACK:
        pull_trigger(host, T.PROVIDER_GONE)
        assert host.device("d").health is Health.UNKNOWN
    if trigger is T.HEALTHY:
        # unknown on the way, since unhealthy would end a lease that is not confirmed
        host.health("d", Health.UNKNOWN if state is S.ALLOCATING else Health.UNHEALTHY, "?")
    assert host.state("d") == state
    pull_trigger(host, trigger)
    to, result, after = HANDS[state, trigger]
    lease = host.governor.leases[LEASE]
    assert (host.state("d"), lease.result, lease.state) == (to, result, after)
    found = TABLE[state, trigger]
    assert found.to is (To.SAME if to is state else to)
    assert found.result is result
    if result:
        assert RevokeAccess(LEASE) in host.outcome.effects
    if trigger is T.INTRUDER:
        assert [one.kind for one in host.of(ConflictSeen)] == ["intruder"]
        assert [one.priority for one in host.audits(AuditKind.INTRUDER)] == [4]
    if (state, trigger) == (S.IN_USE, T.UNHEALTHY):
        assert host.of(HealthChanged) == [HealthChanged("d", "unhealthy", "xid 48", LEASE, {"xid": "79"})]
        assert host.device("d").health is Health.UNHEALTHY
    if (state, trigger) == (S.IN_USE, T.HEALTHY):
        assert host.of(HealthChanged) == [HealthChanged("d", "healthy", "fine now", LEASE, {"xid": "79"})]
    if trigger is T.CORDON:
        assert host.device("d").cordon is not None
        host.release(LEASE)
        host.scan()
        assert (host.state("d"), host.device("d").reason) == ("offline", "cordoned")
    if to is S.LOST:
        assert lease.lost == ("d",)
        assert LeaseChanged(LEASE) in host.outcome.effects
        assert (host.state("d"), host.device("d").lease) == ("lost", LEASE)


@pytest.mark.parametrize("confirm", [False, True])
def test_effects_that_fail_reclaim(confirm: bool) -> None:
    """(allocating | in-use, effect-failed), in-use by confirm=true."""
    host = idle()
    host.ask(confirm=confirm)
    assert host.state("d") == ("in-use" if confirm else "allocating")
    host.failed(LEASE)
    assert host.state("d") == "reclaiming"
    assert host.governor.leases[LEASE].result is Result.FAILED


@pytest.mark.parametrize("confirm", [False, True])
def test_nodes_that_change_while_a_grant_is_made_reclaim(confirm: bool) -> None:
    """Its manifest would name nodes that may be another device's by now."""
    host = idle()
    token = host.ask(confirm=confirm)
    lease = host.preparing().id
    host.observe(card("d", 9))
    assert host.state("d") == "reclaiming"
    host.prepared(lease)
    assert host.error(token) is ErrorKind.UNAVAILABLE


def test_in_use_unhealthy_with_kill() -> None:
    host = idle()
    host.use(on_fault=OnFault.KILL, binding=Binding(pid=OWNER))
    mine = holder(42)
    host.scan({"d": [mine]})
    host.health("d", Health.UNHEALTHY, "xid 79")
    lease = host.governor.leases[LEASE]
    assert (host.state("d"), lease.result) == ("reclaiming", Result.FAILED)
    host.scan({"d": [mine]})
    assert [(one.holder.pid, one.signal, one.uid) for one in host.of(Terminate)] == [(42, "TERM", 1000)]


def test_allocating_unhealthy_with_kill_fails_the_lease() -> None:
    host = idle()
    host.grant(on_fault=OnFault.KILL)
    pull_trigger(host, T.UNHEALTHY_KILL)
    assert (host.state("d"), host.governor.leases[LEASE].result) == ("reclaiming", Result.FAILED)


@pytest.mark.parametrize("confirm", [False, True])
def test_a_sibling_fails_the_whole_lease(confirm: bool) -> None:
    host = Host()
    host.ready(PLAIN, OTHER)
    lease = host.grant(count=2, confirm=confirm, on_fault=OnFault.KILL)
    host.health("d", Health.UNHEALTHY, "xid 79")
    assert host.states() == {"d": "reclaiming", "e": "reclaiming"}
    triggers = {one.device: one.trigger for one in host.audits(AuditKind.TRANSITION)}
    assert triggers == {"d": "unhealthy-kill" if confirm else "unhealthy", "e": "sibling-failed"}
    assert host.governor.leases[lease.id].result is Result.FAILED


def test_allocating_ttl_over_is_a_row_that_confirm_precedes() -> None:
    """A ttl runs from Confirm on, so an unconfirmed lease ends by confirm-within."""
    host = idle()
    host.grant(binding=Binding(ttl=SECOND))
    host.tick(2 * SECOND)
    assert host.state("d") == "allocating"
    host.tick(30 * SECOND)
    assert (host.state("d"), host.governor.leases[LEASE].result) == ("reclaiming", Result.EXPIRED)


def test_lost_settles_when_its_lease_ends() -> None:
    host = lost()
    host.release(LEASE)
    assert host.state("d") == "gone"
    assert host.ended() == {LEASE: "released"}


def test_lost_by_its_driver_settles_offline() -> None:
    host = in_use()
    host.observe(card("d", nodes=(), obstacle=Obstacle.NO_DRIVER))
    assert (host.state("d"), host.device("d").reason) == ("lost", "no-driver")
    host.release(LEASE)
    host.scan()
    assert (host.state("d"), host.device("d").reason) == ("offline", "no-driver")
    assert host.ended() == {LEASE: "released"}


@pytest.mark.parametrize("reach", [reclaiming, overdue, occupied])
def test_reap(reach: Callable[[], Host]) -> None:
    host = reach()
    state = State(host.state("d"))
    token = host.reap("d", STRANGER.ref)
    assert host.state("d") == "reclaiming"
    assert TABLE[state, T.REAP].to is S.RECLAIMING
    [order] = host.of(Terminate)
    assert (order.holder.ref, order.signal, order.uid) == (STRANGER.ref, "TERM", None)
    host.signalled(order)
    assert host.body(token) == '{"ended": 1}'
    host.scan()
    assert host.state("d") == "idle"


def test_every_row_is_walked() -> None:
    """The rows that the tests above do not name are settle rows, of which no case differs."""
    walked = set(SETTLED) | set(HANDS)
    walked |= {(S.IDLE, T.GRANTED), (S.IDLE, T.GRANTED_CONFIRMED), (S.IN_USE, T.EFFECT_FAILED)}
    walked |= {(state, T.SIBLING_FAILED) for state in (S.ALLOCATING, S.IN_USE)}
    walked |= {(S.ALLOCATING, T.UNHEALTHY_KILL), (S.IN_USE, T.UNHEALTHY_KILL), (S.ALLOCATING, T.TTL_OVER)}
    walked |= {(S.LOST, T.LEASE_ENDED), (S.FAULTY, T.RETURN_PROVEN), (S.FAULTY, T.PROVIDER_BACK)}
    walked |= {(state, T.REAP) for state in (S.RECLAIMING, S.FAULTY, S.OCCUPIED)}
    assert {pair for pair, found in TABLE.items() if found.to is not To.SETTLE} - walked == set()


def test_granted_rows() -> None:
    host = idle()
    host.ask()
    assert host.state("d") == "allocating"
    host.prepared(LEASE)
    assert host.governor.leases[LEASE].deadline == host.boot + 30 * SECOND
    host = idle()
    host.ask(confirm=True)
    assert host.state("d") == "in-use"
    host.prepared(LEASE)
    assert host.governor.leases[LEASE].deadline == 0
