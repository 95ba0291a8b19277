"""Taking devices back: proof, freshness, strangers, and who may be signalled."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_agent.core.effects import (
    ConflictSeen,
    ErrorKind,
    OrphanFound,
    PrepareAccess,
    Refuse,
    Terminate,
)
from hetero_agent.core.events import AccessRevoked, Closed, OwnerGone
from hetero_agent.core.model import AuditKind, Binding, Holder, Node, OnEnd, Options, ProcessRef, Role, UnitRef
from tests.core.host import SECOND, Host, card, holder, own

OWNER = ProcessRef(42, 1)


def host_with(*records: Any, **settings: Any) -> Host:
    host = Host(**settings)
    host.ready(*(records or (card("d", 1),)))
    return host


def terms(host: Host) -> list[tuple[int, str, int | None]]:
    """(pid, signal, uid) of the signals that the last outcome wants."""
    return [(one.holder.pid, one.signal, one.uid) for one in host.of(Terminate)]


# -- proof -----------------------------------------------------------------------------------------
def test_both_signals_are_needed() -> None:
    host = host_with()
    lease = host.use()
    host.scan()
    assert host.state("d") == "in-use"
    host.release(lease.id)
    assert host.state("d") == "reclaiming"
    assert host.scans() == ["d"]
    host.scan({"d": [holder(42)]})
    assert (host.state("d"), host.device("d").reason) == ("reclaiming", "held by 1 process")
    host.scan()
    assert host.state("d") == "idle"
    assert host.ended() == {lease.id: "released"}


def test_a_scan_that_began_before_the_end_proves_nothing() -> None:
    host = host_with()
    lease = host.use()
    started = host.later().boot
    host.release(lease.id)
    host.scan(started=started)
    assert host.state("d") == "reclaiming"
    assert host.scans() == ["d"]
    host.scan(started=host.governor.world.debts["d"].since)
    assert host.state("d") == "reclaiming"
    host.scan()
    assert host.state("d") == "idle"


def test_a_scan_that_began_before_an_open_proves_nothing() -> None:
    host = host_with()
    host.release(host.use().id)
    started = host.later().boot
    host.opened("d")
    host.scan(started=started)
    assert host.state("d") == "reclaiming"
    # looked at again soon, not in a spin: somebody may open it all the time
    assert host.scans() == []
    host.ticks(SECOND // 4)
    assert host.scans() == ["d"]
    host.scan()
    assert host.state("d") == "idle"


def test_the_deadline_makes_it_faulty_and_names_the_holders_once() -> None:
    host = host_with()
    lease = host.use()
    host.release(lease.id)
    host.scan({"d": [holder(42)]})
    host.ticks(60 * SECOND)
    assert (host.state("d"), host.device("d").reason) == ("faulty", "reclaim-timeout")
    alerts = [
        one for one in host.store.audits if one.trigger == "return-overdue" and one.kind is AuditKind.HEALTH
    ]
    assert [(one.priority, one.reason) for one in alerts] == [(3, "pid 42 (/bin/p42, uid 1000)")]
    host.ticks(300 * SECOND)
    host.scan({"d": [holder(42)]})
    assert host.state("d") == "faulty"
    assert len([one for one in host.store.audits if one.trigger == "return-overdue"]) == 2
    assert lease.id in host.governor.leases
    host.scan()
    assert host.state("d") == "idle"
    assert host.ended() == {lease.id: "released"}


def test_it_is_looked_at_every_second_while_owed() -> None:
    host = host_with()
    host.release(host.use().id)
    for _ in range(3):
        host.scan({"d": [holder(42)]})
        host.ticks(SECOND)
        assert host.scans() == ["d"]


def test_it_is_looked_at_less_often_once_it_is_overdue() -> None:
    """A holder in the kernel's hands may stay for days."""
    host = host_with()
    host.release(host.use().id)
    host.scan({"d": [holder(42)]})
    host.ticks(60 * SECOND)
    host.scan({"d": [holder(42)]})
    host.outcome.effects.clear()
    host.ticks(4 * SECOND)
    assert host.scans() == []
    host.ticks(SECOND)
    assert host.scans() == ["d"]


def test_a_close_has_it_looked_at() -> None:
    host = host_with()
    host.release(host.use().id)
    host.scan({"d": [holder(42)]})
    host.do(Closed(host.later(), "d"))
    assert host.scans() == ["d"]


def test_a_node_renumbered_while_owed_is_looked_for_under_both_numbers() -> None:
    host = host_with(card("d", nodes=(own(3),)), card("e", nodes=(own(4),)))
    lease = host.use(devices=("d",))
    host.release(lease.id)
    returns = host.governor.returns
    host.observe(card("d", nodes=(own(5),)))
    assert returns.nodes_of(host.device("d")) == (own(5), own(3))
    # another device has the old number now: who holds that one holds this one no more
    host.observe(card("e", nodes=(own(3),)))
    assert returns.nodes_of(host.device("d")) == (own(5),)


def test_a_device_that_nothing_can_hold_comes_back_by_an_empty_scan() -> None:
    host = host_with(card("d", nodes=(own(3, Role.CONTROL),)))
    assert host.state("d") == "idle"
    host.release(host.use().id)
    assert host.scans() == ["d"]
    host.scan()
    assert host.state("d") == "idle"


def test_a_device_without_own_nodes_is_looked_at_when_it_appears() -> None:
    host = Host()
    host.observe(card("d", nodes=()), complete=True)
    assert host.state("d") == "probing"
    assert host.scans() == ["d"]
    host.scan()
    assert host.state("d") == "idle"


def test_old_scans_do_not_undo_newer_ones() -> None:
    host = host_with()
    old = host.scan_event({"d": [holder(9)]})
    host.scan()
    clean = host.device("d").last_clean
    host.do(old)
    assert host.device("d").suspected == ()
    host.scan(started=old.started)
    assert host.device("d").last_clean == clean


# -- incomplete ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("unread", "proven"),
    [
        ([(42, 1000)], False),  # was seen on it
        ([(50, 1000)], False),  # has the lease's uid
        ([(50, 1001)], True),  # is somebody else's and was never seen on it
        ([(1, 0)], True),
    ],
)
def test_a_process_that_cannot_be_read(unread: list[tuple[int, int]], proven: bool) -> None:
    host = host_with()
    lease = host.use()
    host.scan({"d": [holder(42)]})
    host.release(lease.id)
    host.scan(unread=unread)
    assert host.state("d") == ("idle" if proven else "reclaiming")
    if not proven:
        assert host.device("d").uninspected
        host.ticks(60 * SECOND)
        assert (host.state("d"), host.device("d").reason) == ("faulty", "scan-incomplete")
        host.scan()
        assert host.state("d") == "idle"


def test_the_bound_process_counts_when_it_cannot_be_read() -> None:
    host = host_with()
    lease = host.use(binding=Binding(pid=OWNER))
    host.release(lease.id)
    host.scan(unread=[(42, 1001)])
    assert host.state("d") == "reclaiming"


def test_unreadable_roots_spoil_roots_leases_but_not_pid_1() -> None:
    host = host_with()
    host.release(host.use(uid=0).id, uid=0)
    host.scan(unread=[(7, 0)])
    assert host.state("d") == "reclaiming"
    host.scan(unread=[(1, 0)])
    assert host.state("d") == "idle"


def test_a_scan_that_fails_is_incomplete() -> None:
    host = host_with()
    host.release(host.use().id)
    host.scan(failed="worker died")
    assert host.governor.world.debts["d"].incomplete
    host.ticks(60 * SECOND)
    assert host.device("d").reason == "scan-incomplete"
    host.scan({"d": [holder(42)]})
    assert host.device("d").reason == "reclaim-timeout"


def test_what_was_never_scanned_whole_is_not_idle() -> None:
    host = Host()
    host.observe(card("d", 1), complete=True)
    host.scan(failed="worker died")
    assert host.state("d") == "probing"
    host.scan(started=host.device("d").appeared)
    assert host.state("d") == "probing"
    assert host.scans() == ["d"]


def test_nothing_is_granted_on_the_strength_of_a_scan_before_one_that_failed() -> None:
    """A copy of a node is opened without any news of it: only scans tell."""
    host = host_with()
    host.scan(failed="worker died")
    assert host.state("d") == "idle"
    token = host.ask()
    assert token not in host.answers
    host.ticks(SECOND)
    assert host.scans() == ["d"]
    host.scan({"d": [holder(9, uid=1001)]})
    assert not host.of(PrepareAccess)
    host.scan()
    assert host.preparing().devices == ("d",)


@pytest.mark.parametrize("lost", [False, True])
def test_unplug_and_replug_does_not_launder_what_a_lease_still_gives(lost: bool) -> None:
    """A node that a driver's tools made outlives its device, and so does an ACL entry on it."""
    host = host_with()
    lease = host.use()
    host.revokes = False
    if lost:
        host.observe(gone=("d",))
        host.release(lease.id)
    else:
        host.release(lease.id)
        host.observe(gone=("d",))
    host.do(AccessRevoked(host.later(), lease.id, "the helper does not answer"))
    assert host.governor.leases == {}
    host.observe(card("d", 1))
    host.scan()
    assert (host.state("d"), host.device("d").reason) == ("reclaiming", "access-not-revoked")
    host.do(AccessRevoked(host.later(), lease.id))
    assert host.scans() == ["d"]
    host.scan()
    assert host.state("d") == "idle"
    assert (host.store.debts, host.store.records, host.governor.world.revoking) == ({}, {}, {})


# -- strangers -------------------------------------------------------------------------------------
def test_occupied_after_two_sightings_two_seconds_apart() -> None:
    host = host_with()
    stray = holder(9, uid=1001)
    host.opened("d")
    assert host.scans() == ["d"]
    host.scan({"d": [stray]})
    assert host.state("d") == "idle"
    assert host.governor.resources()["v/gpu"]["allocatable"] == 0
    host.ticks(SECOND)
    host.scan({"d": [stray]})
    assert host.state("d") == "idle"
    host.ticks(SECOND)
    assert host.scans() == ["d"]
    host.scan({"d": [stray]})
    assert (host.state("d"), host.device("d").reason) == ("occupied", "held by 1 process")
    assert host.of(OrphanFound) == [OrphanFound("d", 1)]
    [record] = host.audits(AuditKind.ORPHAN)
    assert record.reason == "pid 9 (/bin/p9, uid 1001)"
    host.scan({"d": [stray]})
    assert host.of(OrphanFound) == []
    host.scan()
    assert host.state("d") == "idle"


def test_a_device_with_a_stranger_on_it_is_not_granted_meanwhile() -> None:
    host = host_with()
    host.scan({"d": [holder(9)]})
    assert (host.state("d"), host.governor.resources()["v/gpu"]["allocatable"]) == ("idle", 0)
    [row] = host.governor.explain("v/gpu", 1, Options()).devices
    assert row == ("d", "idle", False, "somebody has it open; looking again")
    token = host.ask()
    assert token not in host.answers
    host.scan()
    host.prepared(host.preparing().id)
    host.body(token)


def test_two_passers_by_do_not_occupy() -> None:
    host = host_with()
    host.scan({"d": [holder(9)]})
    host.ticks(3 * SECOND)
    host.scan({"d": [holder(10)]})
    assert host.state("d") == "idle"
    host.scan()
    host.grant()


def test_a_stranger_at_first_sight_keeps_it_probing() -> None:
    host = Host()
    host.observe(card("d", 1), complete=True)
    stray = {"d": [holder(9)]}
    host.scan(stray)
    assert host.state("d") == "probing"
    host.ticks(3 * SECOND)
    host.scan(stray)
    assert host.state("d") == "occupied"
    host.opened("d")
    host.scan(started=host.boot - 500)
    assert host.state("d") == "occupied"
    host.scan()
    assert host.state("d") == "idle"


def test_a_since_of_a_stranger_is_when_it_was_first_seen() -> None:
    host = host_with()
    host.scan({"d": [holder(9)]})
    first = host.boot
    host.ticks(5 * SECOND)
    host.scan({"d": [holder(9)]})
    assert [one.since for one in host.device("d").holders] == [first]


def test_what_the_system_keeps_is_known_by_its_unit() -> None:
    unit = "nvidia-persistenced.service"
    host = host_with(system_holders=(unit,))
    system = holder(9, uid=0, unit=unit, cgroup=f"/system.slice/{unit}")
    host.release(host.use().id)
    host.scan({"d": [system]})
    assert host.state("d") == "idle"
    assert (host.device("d").holders, host.device("d").system) == ((), (system,))
    assert host.governor.returns.role_of(host.device("d"), system) == "system"
    forged = holder(10, unit=unit, cgroup=f"/user.slice/user-1000.slice/{unit}")
    host.scan({"d": [forged]})
    host.ticks(3 * SECOND)
    host.scan({"d": [forged]})
    assert host.state("d") == "occupied"


@pytest.mark.parametrize(
    ("uid", "service_uid", "free"), [(999, 999, True), (1000, 999, False), (999, -1, False)]
)
def test_what_a_system_unit_runs_for_others_is_not_the_systems(uid: int, service_uid: int, free: bool) -> None:
    """The uid is root's or that of the unit's main process: cron's jobs are their users'."""
    unit = "nvidia-persistenced.service"
    host = host_with(system_holders=(unit,))
    one = holder(9, uid=uid, unit=unit, cgroup=f"/system.slice/{unit}", service_uid=service_uid)
    for _ in range(2):
        host.scan({"d": [one]})
        host.ticks(3 * SECOND)
    assert host.state("d") == ("idle" if free else "occupied")


def test_the_system_is_neither_intruder_nor_ended() -> None:
    unit = "nvidia-persistenced.service"
    host = host_with(system_holders=(unit,))
    system = holder(9, uid=0, unit=unit, cgroup=f"/system.slice/{unit}")
    lease = host.use(uid=0, on_end=OnEnd.KILL, binding=Binding(pid=OWNER))
    host.scan({"d": [system, holder(42, uid=0)]})
    assert host.of(ConflictSeen) == []
    host.release(lease.id, uid=0)
    host.scan({"d": [system]})
    assert terms(host) == []
    assert host.state("d") == "idle"


def test_what_a_holder_counts_as() -> None:
    host = host_with()
    role = host.governor.returns.role_of
    assert role(host.device("d"), holder(9)) == "outsider"
    lease = host.use(binding=Binding(pid=OWNER))
    assert role(host.device("d"), holder(42)) == "lease"
    assert role(host.device("d"), holder(9)) == "intruder"
    host.release(lease.id)
    assert role(host.device("d"), holder(42)) == "leftover"


def test_an_intruder_is_told_once_while_it_stays() -> None:
    host = host_with()
    lease = host.use(binding=Binding(pid=OWNER))
    mine, child, other = holder(42), holder(43, start=2, ancestors=(42,)), holder(44, uid=1001, start=3)
    host.scan({"d": [mine, child]})
    assert host.of(ConflictSeen) == []
    host.scan({"d": [mine, child, other]})
    assert host.of(ConflictSeen) == [
        ConflictSeen("intruder", lease.id, "d", "a process of uid 1001", "uid 1000")
    ]
    host.scan({"d": [mine, child, other]})
    assert host.of(ConflictSeen) == []
    host.scan({"d": [mine, child]})
    host.scan({"d": [mine, child, other]})
    assert len(host.of(ConflictSeen)) == 1
    assert host.state("d") == "in-use"


def test_a_daemon_of_the_lease_whose_parent_has_gone_is_no_intruder() -> None:
    host = host_with()
    host.use(binding=Binding(pid=OWNER))
    host.scan({"d": [holder(43, ancestors=(42,))]})
    host.scan({"d": [holder(43, ancestors=(1,)), holder(45, start=9, ancestors=(43, 1))]})
    assert host.of(ConflictSeen) == []


def test_a_child_of_a_recycled_pid_is_no_child_of_the_owners() -> None:
    host = host_with()
    lease = host.use(uid=0, on_end=OnEnd.KILL, binding=Binding(pid=OWNER))
    host.do(OwnerGone(host.later(), lease.id, "pid"))
    host.scan({"d": [holder(50, uid=0, start=9, ancestors=(ProcessRef(42, 8), ProcessRef(1, 1)))]})
    assert host.state("d") == "reclaiming"
    assert terms(host) == []


# -- shared nodes ----------------------------------------------------------------------------------
SHARED = own(50)


def shares() -> Host:
    return host_with(
        card("c", 1),
        card("s1", resource="v/s", parent="c", nodes=(SHARED,)),
        card("s2", resource="v/s", parent="c", nodes=(SHARED,)),
    )


def test_a_holder_on_a_shared_node_is_the_live_leases() -> None:
    host = shares()
    first = host.use("v/s", binding=Binding(pid=ProcessRef(10, 1)), devices=("s1",))
    host.use("v/s", binding=Binding(pid=ProcessRef(20, 1)), devices=("s2",))
    host.release(first.id)
    both = [holder(10), holder(20)]
    host.scan({"s1": both, "s2": both})
    assert host.states() == {"c": "idle", "s1": "reclaiming", "s2": "in-use"}
    host.scan({"s1": [holder(20)], "s2": [holder(20)]})
    assert host.state("s1") == "idle"


def test_nobody_is_an_intruder_on_a_node_by_another_share() -> None:
    host = shares()
    first = host.use("v/s", binding=Binding(pid=ProcessRef(10, 1)), devices=("s1",))
    second = host.use("v/s", binding=Binding(pid=ProcessRef(20, 1)), devices=("s2",))
    both = [holder(10), holder(20), holder(11, ancestors=(10,))]
    host.scan({"s1": both, "s2": both})
    assert host.of(ConflictSeen) == []
    assert [one.pid for one in host.device("s2").holders] == [20]
    stranger = [*both, holder(30)]
    host.scan({"s1": stranger, "s2": stranger})
    assert [(one.kind, one.lease) for one in host.of(ConflictSeen)] == [
        ("intruder", first.id),
        ("intruder", second.id),
    ]
    # what is left of one is the other's no more than before
    host.do(OwnerGone(host.later(), first.id, "pid"))
    left = [holder(20), holder(11, ancestors=(1,))]
    host.scan({"s1": left, "s2": left})
    assert host.of(ConflictSeen) == []
    assert [one.pid for one in host.device("s1").holders] == [11]
    assert [one.pid for one in host.device("s2").holders] == [20]


def test_a_share_that_is_not_bound_yet_has_nobody_elses_processes() -> None:
    host = shares()
    host.ask("v/s", devices=("s1",), on_end=OnEnd.KILL)
    early = host.preparing().id
    host.prepared(early)
    other = host.use("v/s", binding=Binding(pid=ProcessRef(20, 1)), devices=("s2",))
    host.scan({"s1": [holder(20)], "s2": [holder(20)]})
    # of one uid, but by its binding the process is the other lease's
    assert [one.pid for one in host.device("s1").holders] == []
    assert [one.pid for one in host.device("s2").holders] == [20]
    assert host.of(ConflictSeen) == []
    host.release(other.id)
    host.scan({"s1": [holder(20)], "s2": [holder(20)]})
    assert (host.state("s1"), host.state("s2")) == ("allocating", "reclaiming")
    host.confirm(early, Binding(pid=ProcessRef(10, 1)))
    both = [holder(10), holder(20)]
    host.scan({"s1": both, "s2": both})
    # nor is it once the lease is bound: its end must neither wait for it nor end it
    assert (host.state("s1"), host.state("s2")) == ("in-use", "reclaiming")
    assert [one.pid for one in host.device("s1").holders] == [10]
    host.release(early)
    host.scan({"s1": [holder(20)], "s2": [holder(20)]})
    host.scan()
    assert host.states() == {"c": "idle", "s1": "idle", "s2": "idle"}
    assert host.of(Terminate) == []


def test_who_opens_a_share_before_it_is_bound_is_no_intruder() -> None:
    host = shares()
    host.ask("v/s", devices=("s1",))
    early = host.preparing().id
    host.prepared(early)
    host.scan({"s1": [holder(10), holder(30)], "s2": [holder(10), holder(30)]})
    assert host.of(ConflictSeen) == []
    assert host.state("s2") == "idle"
    host.confirm(early, Binding(pid=ProcessRef(10, 1)))
    host.scan({"s1": [holder(10), holder(30)], "s2": [holder(10), holder(30)]})
    # only the bound one is known as its own from then on
    assert [(one.kind, one.lease) for one in host.of(ConflictSeen)] == [("intruder", early)]


@pytest.mark.parametrize("confirm", [True, False])
def test_shares_of_a_node_need_to_know_whose_processes_are_whose(confirm: bool) -> None:
    host = shares()
    token = host.ask("v/s", confirm=confirm)
    if not confirm:
        lease = host.preparing().id
        host.prepared(lease)
        token = host.confirm(lease)
    answer = host.answer(token)
    assert isinstance(answer, Refuse)
    assert answer.error is ErrorKind.INVALID_ARGUMENT
    assert "bind a pid or a unit" in answer.text
    assert host.state("s1") == ("idle" if confirm else "allocating")


def test_a_holder_of_no_live_lease_keeps_the_one_that_ended_last() -> None:
    host = shares()
    first = host.use("v/s", binding=Binding(pid=ProcessRef(10, 1)), devices=("s1",))
    second = host.use("v/s", binding=Binding(pid=ProcessRef(20, 1)), devices=("s2",))
    host.release(first.id)
    host.release(second.id)
    stray = [holder(30)]
    host.scan({"s1": stray, "s2": stray})
    assert (host.state("s1"), host.state("s2")) == ("idle", "reclaiming")
    host.scan({"s1": stray, "s2": stray})
    assert (host.state("s1"), host.device("s1").suspected) == ("idle", ())
    host.scan()
    assert host.state("s2") == "idle"


def test_a_lease_bound_to_a_unit_has_what_runs_in_it() -> None:
    host = shares()
    host.use("v/s", binding=Binding(unit=UnitRef("job.service", "a" * 32)), devices=("s1",))
    inside = holder(10, unit="job.service")
    host.scan({"s1": [inside], "s2": [inside]})
    assert host.of(ConflictSeen) == []
    assert host.device("s2").suspected == ()


# -- ending processes ------------------------------------------------------------------------------
def test_wait_signals_nobody() -> None:
    host = host_with()
    host.release(host.use().id)
    for _ in range(70):
        host.scan({"d": [holder(42)]})
        host.ticks(SECOND)
    assert not [one for one in host.effects if isinstance(one, Terminate)]


def test_kill_is_term_then_kill_after_ten_seconds_then_no_more() -> None:
    host = host_with()
    host.release(host.use(on_end=OnEnd.KILL).id)
    mine = {"d": [holder(42)]}
    host.scan(mine)
    assert terms(host) == [(42, "TERM", 1000)]
    [order] = host.of(Terminate)
    assert (order.device, order.lease) == ("d", f"{1:032x}")
    host.signalled(order)
    host.ticks(5 * SECOND)
    host.scan(mine)
    assert terms(host) == []
    host.ticks(6 * SECOND)
    host.scan(mine)
    assert terms(host) == [(42, "KILL", 1000)]
    host.ticks(100 * SECOND)
    host.scan(mine)
    assert terms(host) == []
    assert host.state("d") == "faulty"
    host.scan({"d": [holder(42), holder(43)]})
    assert terms(host) == [(43, "TERM", 1000)]


def test_a_signal_that_could_not_be_sent_is_sent_later() -> None:
    """The last look at a process can fail for a while: no worker, no descriptor left."""
    host = host_with()
    host.release(host.use(on_end=OnEnd.KILL).id)
    mine = {"d": [holder(42)]}
    told = []
    for signal in ("TERM", "KILL"):
        host.scan(mine)
        for _ in range(3):
            assert terms(host) == [(42, signal, 1000)]
            host.signalled(*host.of(Terminate), sent=False, reason="Too many open files")
            told += [one.message for one in host.audits(AuditKind.SIGNALLED)]
            host.ticks(5 * SECOND)
            host.scan(mine)
            assert terms(host) == []
            host.ticks(6 * SECOND)
            host.scan(mine)
        host.signalled(*host.of(Terminate))
        host.ticks(11 * SECOND)
    assert told == ["d: pid 42 (/bin/p42, uid 1000) was not signalled: Too many open files"] * 2
    host.ticks(100 * SECOND)
    host.scan(mine)
    assert terms(host) == []


def test_the_owners_end_may_kill_too() -> None:
    host = host_with()
    lease = host.use(on_end=OnEnd.KILL, binding=Binding(pid=OWNER))
    host.do(OwnerGone(host.later(), lease.id, "pid"))
    host.scan({"d": [holder(43)]})
    assert terms(host) == [(43, "TERM", 1000)]


@pytest.mark.parametrize(
    ("one", "refused"),
    [
        (holder(42, uid=1001), "does not run wholly as uid 1000"),
        (Holder(42, 1, (1000, 0, 0, 0)), "has uid 0 among its uids"),
        (Holder(42, 1, (1000, 1001, 1000, 1000)), "does not run wholly as uid 1000"),
        (holder(1, uid=1000), "pid 1 is never ended"),
    ],
)
def test_only_what_is_wholly_the_leases_is_signalled(one: Holder, refused: str) -> None:
    host = host_with()
    host.release(host.use(on_end=OnEnd.KILL).id)
    host.scan({"d": [one]})
    assert terms(host) == []
    assert [refused in record.reason for record in host.audits(AuditKind.SIGNALLED)] == [True]
    host.scan({"d": [one]})
    assert host.audits(AuditKind.SIGNALLED) == []


def test_an_unbound_lease_of_root_ends_nobody() -> None:
    """Nothing tells its processes from root's others."""
    host = host_with()
    host.release(host.use(uid=0, on_end=OnEnd.KILL).id, uid=0)
    host.scan({"d": [holder(7, uid=0)]})
    assert terms(host) == []
    assert ["tree or unit" in one.reason for one in host.audits(AuditKind.SIGNALLED)] == [True]


def test_a_later_binding_is_not_blurred_by_an_earlier_guess() -> None:
    """Unbound, all of its uid are the lease's; once a process is bound, only those in its tree."""
    host = host_with()
    lease = host.use()
    host.scan({"d": [holder(7)]})
    assert host.of(ConflictSeen) == []
    host.confirm(lease.id, Binding(pid=OWNER))
    host.scan({"d": [holder(7), holder(42)]})
    assert [one.kind for one in host.of(ConflictSeen)] == ["intruder"]


def test_roots_processes_are_known_over_a_restart() -> None:
    host = host_with()
    lease = host.use(uid=0, on_end=OnEnd.KILL, binding=Binding(pid=OWNER))
    host.scan({"d": [holder(44, uid=0, ancestors=(42,))]})
    host.do(OwnerGone(host.later(), lease.id, "pid"))
    host.restart()
    host.observe(card("d", 1), complete=True)
    host.scan({"d": [holder(44, uid=0, ancestors=(1,)), holder(45, uid=0)]})
    assert terms(host) == [(44, "TERM", None)]


@pytest.mark.parametrize(("cgroup", "mine"), [("/docker/c1/deeper", True), ("/docker/c10", False)])
def test_what_runs_in_the_bound_container_is_the_leases(cgroup: str, mine: bool) -> None:
    """What docker exec starts is no child of the container's first process."""
    host = host_with()
    lease = host.use(uid=0, on_end=OnEnd.KILL, binding=Binding(pid=OWNER, cgroup="/docker/c1"))
    other = holder(77, uid=0, cgroup=cgroup, ancestors=(1,))
    host.scan({"d": [other]})
    assert len(host.of(ConflictSeen)) == (not mine)
    host.release(lease.id, uid=0)
    host.scan({"d": [other]})
    assert terms(host) == ([(77, "TERM", None)] if mine else [])


def test_roots_lease_ends_what_is_in_its_tree_only() -> None:
    host = host_with()
    lease = host.use(uid=0, on_end=OnEnd.KILL, binding=Binding(pid=OWNER))
    host.scan({"d": [holder(44, uid=0, ancestors=(42,))]})
    host.release(lease.id, uid=0)
    tree = [holder(43, uid=1000, ancestors=(42,)), holder(44, uid=0, ancestors=(1,)), holder(45, uid=0)]
    host.scan({"d": tree})
    assert terms(host) == [(43, "TERM", None), (44, "TERM", None)]


def test_orphans_are_ended_if_so_configured() -> None:
    host = host_with(orphans_kill=True)
    stray = {"d": [holder(9), holder(10, uid=0), Holder(11, 1, (1000, 1001, 1000, 1000))]}
    host.scan(stray)
    host.ticks(3 * SECOND)
    host.scan(stray)
    assert host.state("d") == "occupied"
    assert terms(host) == [(9, "TERM", 1000)]
    host.ticks(11 * SECOND)
    host.scan(stray)
    assert terms(host) == [(9, "KILL", 1000)]


def test_orphans_are_left_alone_by_default() -> None:
    host = host_with()
    stray = {"d": [holder(9)]}
    for _ in range(20):
        host.scan(stray)
        host.ticks(SECOND)
    assert host.state("d") == "occupied"
    assert not [one for one in host.effects if isinstance(one, Terminate)]


# -- reap ------------------------------------------------------------------------------------------
def reapable() -> Host:
    host = host_with()
    host.release(host.use().id)
    host.scan({"d": [holder(42), holder(43, start=7, uid=0)]})
    return host


def test_reap_ends_the_named_ones_and_says_how_many() -> None:
    host = reapable()
    host.ticks(61 * SECOND)
    assert host.state("d") == "faulty"
    token = host.reap("d", ProcessRef(42, 1))
    assert (host.state("d"), host.device("d").reason) == ("reclaiming", "reap")
    [order] = host.of(Terminate)
    assert terms(host) == [(42, "TERM", None)]
    assert token not in host.answers
    host.signalled(order, sent=False, reason="it has ended")
    assert host.body(token) == '{"ended": 0}'
    host.ticks(11 * SECOND)
    host.scan({"d": [holder(42)]})
    assert terms(host) == [(42, "TERM", None)]
    host.signalled(*host.of(Terminate))
    host.ticks(11 * SECOND)
    host.scan({"d": [holder(42)]})
    assert terms(host) == [(42, "KILL", None)]
    # and a new deadline runs
    host.ticks(61 * SECOND)
    assert host.state("d") == "faulty"


def test_a_reap_waits_for_each_of_its_signals() -> None:
    host = host_with()
    host.release(host.use().id)
    host.scan({"d": [holder(42), holder(43)]})
    token = host.reap("d", ProcessRef(42, 1), ProcessRef(43, 1), ProcessRef(42, 1))
    first, second = host.of(Terminate)
    host.signalled(first)
    assert token not in host.answers
    host.signalled(second)
    assert host.body(token) == '{"ended": 2}'


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        (ProcessRef(42, 2), ErrorKind.NOT_FOUND, "process 42 with that start time does not hold d"),
        (ProcessRef(99, 1), ErrorKind.NOT_FOUND, "process 99"),
        (ProcessRef(43, 7), ErrorKind.NOT_AUTHORIZED, "has uid 0 and the lease had not"),
    ],
)
def test_reap_refuses(target: ProcessRef, kind: ErrorKind, words: str) -> None:
    host = reapable()
    answer = host.answer(host.reap("d", target))
    assert isinstance(answer, Refuse)
    assert answer.error is kind
    assert words in answer.text
    assert terms(host) == []


def test_reap_needs_a_device_with_holders_to_end() -> None:
    host = host_with()
    assert host.error(host.reap("d", ProcessRef(42, 1))) is ErrorKind.UNAVAILABLE
    assert host.error(host.reap("none", ProcessRef(42, 1))) is ErrorKind.NOT_FOUND
    host.use()
    host.scan({"d": [holder(42)]})
    assert host.error(host.reap("d", ProcessRef(42, 1))) is ErrorKind.UNAVAILABLE


def test_reap_of_a_stranger_is_owed_without_a_lease() -> None:
    host = host_with()
    stray = {"d": [holder(9, uid=0)]}
    host.scan(stray)
    host.ticks(3 * SECOND)
    host.scan(stray)
    host.reap("d", ProcessRef(9, 1))
    assert host.state("d") == "reclaiming"
    assert (host.governor.world.debts["d"].lease, host.device("d").lease) == ("", "")
    host.ticks(61 * SECOND)
    assert host.state("d") == "faulty"
    host.scan()
    assert host.state("d") == "idle"


# -- memory ----------------------------------------------------------------------------------------
def test_nothing_is_kept_of_what_is_over() -> None:
    host = host_with(card("d", 1), card("e", 2))
    for round_ in range(30):
        lease = host.use(count=2, on_end=OnEnd.KILL, binding=Binding(pid=OWNER))
        passing = [holder(100 + 10 * round_ + index, uid=1000 + index % 2) for index in range(5)]
        host.scan({"d": passing})
        host.release(lease.id)
        host.scan({"d": passing})
        host.scan()
    governor = host.governor
    assert (governor.returns._known, governor.returns._strangers) == ({}, {})
    assert (governor.endings._steps, governor.reaps._waiting) == ({}, {})
    assert not host.store.leases
    assert not host.store.debts
    assert not host.store.records


def test_a_busy_stranger_does_not_grow_what_is_kept() -> None:
    host = host_with()
    lease = host.use(binding=Binding(pid=OWNER))
    for pid in range(1000, 1200):
        host.scan({"d": [holder(pid, uid=1001), holder(pid + 5000, ancestors=(42,))]})
    assert host.governor.returns._strangers == {(lease.id, "d"): {ProcessRef(1199, 1)}}
    assert host.governor.returns._known == {(lease.id, "d"): {ProcessRef(6199, 1)}}


def test_the_nodes_that_a_leased_device_had_are_looked_for_after_it() -> None:
    """A provider makes the file anew: the lease's process still has the old one."""
    host = host_with()
    lease = host.use()
    host.observe(card("d", 2))
    assert [one.minor for one in host.governor.returns.nodes_of(host.device("d"))] == [2, 1]
    host.release(lease.id)
    assert [one.minor for one in host.governor.returns.nodes_of(host.device("d"))] == [2, 1]
    host.observe(card("d", 3))
    assert [one.minor for one in host.governor.returns.nodes_of(host.device("d"))] == [3, 2, 1]
    host.observe(card("e", 1))
    assert [one.minor for one in host.governor.returns.nodes_of(host.device("d"))] == [3, 2]
    host.scan()
    assert [one.minor for one in host.governor.returns.nodes_of(host.device("d"))] == [3]


def test_the_nodes_of_a_device_that_was_away_are_not() -> None:
    """Who has the old one open has a device that is no more."""
    host = host_with()
    lease = host.use()
    host.observe(gone=("d",))
    host.observe(card("d", 2))
    assert host.state("d") == "reclaiming"
    assert [one.minor for one in host.governor.returns.nodes_of(host.device("d"))] == [2]
    host.scan()
    assert host.state("d") == "idle"
    host.release(lease.id)


def test_the_nodes_of_a_device_that_lost_them_are_still_looked_for() -> None:
    host = host_with()
    host.release(host.use().id)
    node: tuple[Node, ...] = card("d", 1).own_nodes
    host.observe(card("d", nodes=()))
    assert host.governor.returns.nodes_of(host.device("d")) == node
