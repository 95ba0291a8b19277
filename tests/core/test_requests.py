"""Request ids: the same call twice has the same answer, a spent id grants nothing."""

from __future__ import annotations

import pytest

from hetero_agent.core import requests
from hetero_agent.core.effects import ErrorKind, PrepareAccess, Reply, Terminate
from hetero_agent.core.events import AccessFailed, Confirm, OwnerGone, Release
from hetero_agent.core.model import Actor, AuditKind, Binding, ProcessRef, RequestKey
from tests.core.host import HOUR, SECOND, Host, card, holder


@pytest.fixture
def host() -> Host:
    """Three idle devices."""
    one = Host()
    one.ready(*(card(f"d{index}", index) for index in range(3)))
    return one


def key(request_id: str, method: str = "Allocate", uid: int = 1000, client: str = "") -> RequestKey:
    return RequestKey(uid, client, method, request_id)


def test_the_same_id_has_the_same_bytes(host: Host) -> None:
    first = host.ask(request_id="a", fingerprint="f")
    host.prepared(host.preparing().id)
    again = host.ask(request_id="a", fingerprint="f")
    assert host.of(PrepareAccess) == []
    assert host.body(again) == host.body(first)
    assert len(host.governor.leases) == 1


def test_a_hundred_at_once_are_one_grant(host: Host) -> None:
    tokens = [host.ask(request_id="a", fingerprint="f") for _ in range(100)]
    assert [one for one in host.answers if one in tokens] == []
    host.prepared(next(iter(host.governor.leases)))
    assert len({host.body(token) for token in tokens}) == 1
    assert len(host.governor.leases) == 1


def test_the_answer_is_the_same_across_a_restart(host: Host) -> None:
    first = host.ask(request_id="a", fingerprint="f", confirm=True)
    host.prepared(host.preparing().id)
    host.restart()
    host.observe(*(card(f"d{index}", index) for index in range(3)), complete=True)
    again = host.ask(request_id="a", fingerprint="f", confirm=True)
    assert host.body(again) == host.body(first)


def test_other_arguments_conflict(host: Host) -> None:
    host.ask(request_id="a", fingerprint="f")
    while_preparing = host.ask(request_id="a", fingerprint="g")
    assert host.error(while_preparing) is ErrorKind.REQUEST_CONFLICT
    host.prepared(next(iter(host.governor.leases)))
    assert host.error(host.ask(request_id="a", fingerprint="g")) is ErrorKind.REQUEST_CONFLICT


def test_each_uid_client_and_method_has_its_own_ids(host: Host) -> None:
    lease = host.grant(request_id="a")
    assert host.grant(request_id="a", uid=1001).id != lease.id
    assert host.grant(request_id="a", client="k").id != lease.id
    assert host.body(host.confirm(lease.id, request_id="a")) == "{}"
    assert host.body(host.release(lease.id, request_id="a")) == '{"changed": true}'


@pytest.mark.parametrize("gone", [False, True], ids=["ending", "gone"])
def test_an_id_is_spent_when_its_lease_has_ended(host: Host, gone: bool) -> None:
    lease = host.use(request_id="a", fingerprint="f")
    confirmed = host.confirm(lease.id, request_id="c")
    host.release(lease.id)
    if gone:
        host.scan()
        assert lease.id not in host.governor.leases
    assert host.error(host.ask(request_id="a", fingerprint="f")) is ErrorKind.REQUEST_SPENT
    # spent comes before conflict: with whatever arguments, it never grants
    assert host.error(host.ask(request_id="a", fingerprint="g")) is ErrorKind.REQUEST_SPENT
    assert host.body(confirmed) == "{}"
    assert host.error(host.confirm(lease.id, request_id="c")) is ErrorKind.REQUEST_SPENT
    assert host.error(host.confirm(lease.id, request_id="d")) is ErrorKind.LEASE_ENDED


def test_a_retry_of_release_gets_the_stored_answer(host: Host) -> None:
    lease = host.use()
    first = host.release(lease.id, request_id="x")
    assert host.body(host.release(lease.id, request_id="x")) == host.body(first) == '{"changed": true}'
    host.scan()
    assert host.body(host.release(lease.id, request_id="x")) == '{"changed": true}'
    # another id finds the lease gone but remembered
    assert host.body(host.release(lease.id, request_id="y")) == '{"changed": false}'
    assert host.error(host.release("f" * 32)) is ErrorKind.NOT_FOUND


def test_release_of_a_lease_that_is_over_does_not_lengthen_its_memory(host: Host) -> None:
    lease = host.use(request_id="a")
    host.release(lease.id)
    host.scan()
    before = host.governor.world.requests[key("a")].boot
    host.later(HOUR)
    host.release(lease.id, request_id="late")
    assert host.governor.world.requests[key("a")].boot == before
    assert set(host.outcome.changes.requests) == {key("late", "Release")}
    assert host.governor.world.requests[key("late", "Release")].ended


def test_the_owner_of_a_lease_that_root_made_may_still_ask_after_it(host: Host) -> None:
    lease = host.grant(uid=0, owner_uid=1000)
    assert lease.uid == 1000
    host.body(host.release(lease.id, uid=1000))
    host.scan()
    assert host.body(host.release(lease.id, uid=1000)) == '{"changed": false}'
    assert host.body(host.release(lease.id, uid=0)) == '{"changed": false}'
    assert host.error(host.release(lease.id, uid=1001)) is ErrorKind.NOT_OWNER


def test_only_owner_and_root(host: Host) -> None:
    lease = host.grant()
    assert host.error(host.confirm(lease.id, uid=1001)) is ErrorKind.NOT_OWNER
    assert host.error(host.release(lease.id, uid=1001)) is ErrorKind.NOT_OWNER
    assert host.body(host.confirm(lease.id, uid=0)) == "{}"
    assert host.body(host.release(lease.id, uid=0)) == '{"changed": true}'


def _release_by(host: Host, actor: Actor, lease: str, request_id: str) -> int:
    token = host.token()
    host.do(Release(host.later(), token, actor, request_id, lease, lease))
    return token


def test_an_administrators_authority_releases_what_is_anothers(host: Host) -> None:
    lease, kept = host.grant(), host.grant()
    administrator = Actor(1001, authority="a.right")
    assert host.body(_release_by(host, administrator, lease.id, "x")) == '{"changed": true}'
    (ended,) = host.audits(AuditKind.ENDED)
    assert (ended.actor.uid, ended.actor.authority) == (1001, "a.right")
    # the authority was for that call: without it there is the answer of then, and nothing new
    host.scan()
    assert host.body(_release_by(host, Actor(1001), lease.id, "x")) == '{"changed": true}'
    assert host.error(_release_by(host, Actor(1001), lease.id, "y")) is ErrorKind.NOT_OWNER
    assert host.error(_release_by(host, Actor(1001), kept.id, "z")) is ErrorKind.NOT_OWNER
    assert kept.id in host.governor.leases


def test_the_authority_to_release_is_none_to_confirm(host: Host) -> None:
    lease = host.grant()
    token = host.token()
    host.do(Confirm(host.later(), token, Actor(1001, authority="a.right"), "x", "f", lease.id, Binding()))
    assert host.error(token) is ErrorKind.NOT_OWNER


def test_after_a_failed_grant_the_id_is_usable_at_once(host: Host) -> None:
    first = host.ask(request_id="a", fingerprint="f")
    failing = host.preparing()
    host.failed(failing.id)
    assert host.error(first) is ErrorKind.UNAVAILABLE
    assert host.state(failing.devices[0]) == "reclaiming"
    second = host.ask(request_id="a", fingerprint="g")
    lease = host.preparing()
    assert lease.id != failing.id
    host.prepared(lease.id)
    body = host.body(second)
    host.scan()
    assert failing.id not in host.governor.leases
    # the end of the failed one did not take the id from its successor
    assert host.body(host.ask(request_id="a", fingerprint="g")) == body


def test_all_who_wait_hear_of_a_failure(host: Host) -> None:
    tokens = [host.ask(request_id="a", fingerprint="f") for _ in range(3)]
    host.do(AccessFailed(host.later(), next(iter(host.governor.leases)), "disk full", store=True))
    assert [host.error(token) for token in tokens] == [ErrorKind.STORE_FAILED] * 3


def test_a_lease_that_is_being_prepared_is_nobodys_yet(host: Host) -> None:
    host.ask()
    lease = host.preparing().id
    assert host.error(host.confirm(lease)) is ErrorKind.NOT_FOUND
    assert host.error(host.release(lease)) is ErrorKind.NOT_FOUND
    host.prepared(lease)
    assert host.body(host.confirm(lease)) == "{}"


def test_effects_that_come_twice_or_late_change_nothing(host: Host) -> None:
    lease = host.grant()
    body = host.governor.world.requests[lease.key].body
    host.prepared(lease.id)
    assert not host.outcome.changes
    host.failed(lease.id)
    assert not host.outcome.changes
    assert host.governor.world.requests[lease.key].body == body


def test_refusals_are_not_remembered(host: Host) -> None:
    token = host.ask(count=4, request_id="a", fingerprint="f")
    assert host.error(token) is ErrorKind.UNAVAILABLE
    assert not host.governor.world.requests
    assert [one.reason for one in host.audits(AuditKind.REFUSED)] == ["Unavailable"]
    host.grant(count=3, request_id="a", fingerprint="g")


def test_not_ready_before_the_first_enumeration() -> None:
    host = Host()
    host.observe(card("d0", 0))
    host.scan()
    token = host.ask()
    assert host.error(token) is ErrorKind.NOT_READY
    host.observe(complete=True, source="sim")
    assert host.error(host.ask()) is ErrorKind.NOT_READY
    host.observe(complete=True)
    host.grant()


def test_a_purge_after_a_day(host: Host) -> None:
    lease = host.use(request_id="a", fingerprint="f")
    other = host.use(request_id="b")
    host.release(lease.id, request_id="x")
    host.scan()
    host.ticks(24 * HOUR - SECOND)
    assert host.error(host.ask(request_id="a", fingerprint="f")) is ErrorKind.REQUEST_SPENT
    host.ticks(120 * SECOND)
    assert set(host.governor.world.requests) == {key("b")}
    assert other.id in host.governor.leases
    assert host.error(host.release(lease.id)) is ErrorKind.NOT_FOUND
    host.grant(request_id="a", fingerprint="f")


def test_there_is_one_purge_for_many_leases(host: Host) -> None:
    for _ in range(20):
        lease = host.use()
        host.release(lease.id)
        host.scan()
    assert [name for name in host.governor.world._due if name[0] == "purge"] == [("purge", "")]
    host.ticks(25 * HOUR)
    assert not host.governor.world.requests
    assert host.governor.next_deadline() is None


def test_tombstones_are_bounded_per_uid() -> None:
    host = Host(requests_per_uid=4)
    host.ready(card("d0", 0))
    for index in range(2):
        lease = host.use(request_id=f"r{index}")
        host.release(lease.id, request_id=f"x{index}")
        host.scan()
    assert host.error(host.ask(request_id="r9")) is ErrorKind.LIMIT_EXCEEDED
    # the young ones are still known, and others may go on
    assert host.error(host.ask(request_id="r0")) is ErrorKind.REQUEST_SPENT
    other = host.use(uid=1001)
    assert host.body(host.release(other.id, uid=1001)) == '{"changed": true}'
    # Release of what is over is bounded too
    assert host.error(host.release(lease.id, request_id="x9")) is ErrorKind.LIMIT_EXCEEDED


def test_what_is_held_can_be_released_whatever_is_remembered() -> None:
    host = Host(requests_per_uid=1)
    host.ready(card("d0", 0))
    lease = host.use()
    assert host.body(host.release(lease.id)) == '{"changed": true}'


def test_confirm_ids_are_bounded_per_lease(host: Host) -> None:
    lease = host.use()
    # all in one microsecond, as a clock of coarse steps would have it
    for index in range(2 * requests.CONFIRMS):
        host.boot -= 1000
        host.confirm(lease.id, request_id=f"c{index:03}")
    kept = sorted(one.request_id for one in host.governor.world.requests if one.method == "Confirm")
    assert len(kept) == requests.CONFIRMS
    last = f"c{2 * requests.CONFIRMS - 1:03}"
    assert last in kept
    # once it has ended, all of them would be refused alike: a day of renewed leases fits into a uid's share
    host.release(lease.id)
    host.scan()
    assert [one.request_id for one in host.governor.world.requests if one.method == "Confirm"] == [last]
    assert host.error(host.confirm(lease.id, request_id=last)) is ErrorKind.REQUEST_SPENT
    assert host.error(host.confirm(lease.id, request_id=kept[0])) is ErrorKind.LEASE_ENDED


def test_renewing_for_years_sets_one_alarm(host: Host) -> None:
    lease = host.use()
    for index in range(500):
        host.confirm(lease.id, Binding(ttl=(index % 7 + 1) * 1000 * HOUR))
    assert len(host.governor.world._alarms) <= 4 * len(host.governor.world._due) + 64
    host.confirm(lease.id, Binding(ttl=10 * SECOND))
    host.ticks(9 * SECOND)
    assert host.governor.leases[lease.id].alive
    host.ticks(2 * SECOND)
    assert host.governor.leases[lease.id].result == "expired"


def test_a_ttl_that_was_renewed_ends_at_the_new_time(host: Host) -> None:
    lease = host.use(binding=Binding(ttl=10 * SECOND))
    host.ticks(8 * SECOND)
    host.confirm(lease.id)
    host.ticks(8 * SECOND)
    assert host.governor.leases[lease.id].alive
    host.ticks(3 * SECOND)
    assert not host.governor.leases[lease.id].alive


def test_confirm_within_is_the_callers(host: Host) -> None:
    lease = host.grant(confirm_within=3 * SECOND)
    assert lease.deadline == host.boot + 3 * SECOND
    assert lease.manifest["confirm-by-boottime"] == lease.deadline
    assert lease.manifest["confirm-by"] == host.now().real + 3 * SECOND


def test_owner_gone_while_preparing_refuses(host: Host) -> None:
    token = host.ask(binding=Binding(pid=ProcessRef(5, 5)))
    lease = host.preparing().id
    host.do(OwnerGone(host.later(), lease, "pid"))
    assert host.error(token) is ErrorKind.UNAVAILABLE
    host.prepared(lease)
    assert [type(one).__name__ for one in host.outcome.effects] == ["RevokeAccess"]


# -- ids of cordons and reaps ----------------------------------------------------------------------
def test_cordon_ids(host: Host) -> None:
    first = host.cordon("d0", request_id="k", error=None)
    again = host.cordon("d0", request_id="k", error=None)
    other = host.cordon("d1", request_id="k", error=None)
    assert host.error(other) is ErrorKind.REQUEST_CONFLICT
    assert host.device("d0").cordon is None
    host.do_pending_cordon(first)
    assert host.body(first) == host.body(again) == "{}"
    assert host.state("d0") == "offline"
    assert host.body(host.cordon("d0", request_id="k", error=None)) == "{}"
    assert host.error(host.cordon("d1", request_id="k", error=None)) is ErrorKind.REQUEST_CONFLICT


def test_reap_ids(host: Host) -> None:
    stranger = holder(9, uid=1001)
    host.scan({"d0": [stranger]})
    host.later(3 * SECOND)
    host.scan({"d0": [stranger]})
    first = host.reap("d0", stranger.ref, request_id="p")
    [order] = host.of(Terminate)
    again = host.reap("d0", stranger.ref, request_id="p")
    assert host.of(Terminate) == []
    host.signalled(order)
    assert host.body(first) == host.body(again) == '{"ended": 1}'
    late = host.reap("d0", stranger.ref, request_id="p")
    assert host.outcome.effects == [Reply(late, '{"ended": 1}')]
