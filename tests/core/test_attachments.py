"""A lease's network interfaces follow the process that it is bound to, before its Confirm is answered."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_agent.core.effects import AttachAccess, ErrorKind, Refuse, Reply, RevokeAccess, WatchOwner
from hetero_agent.core.events import AccessAttached
from hetero_agent.core.model import AuditKind, Binding, Lease, Netdev, ProcessRef
from tests.core.host import GPU, SECOND, Host, card

FIRST = ProcessRef(100, 1)
SECOND_ONE = ProcessRef(200, 2)


def host_with(**options: Any) -> tuple[Host, Lease]:
    """A host with a granted lease whose interfaces are to move."""
    host = Host()
    host.ready(card("d"))
    options.setdefault("netdev", Netdev.MOVE)
    lease = host.grant(GPU, **options)
    return host, lease


def attached(
    host: Host, lease: Lease, process: ProcessRef | None = FIRST, error: str = "", **more: Any
) -> None:
    host.do(AccessAttached(host.later(), lease.id, process, error, **more))


def now(host: Host, lease: Lease) -> Lease:
    return host.governor.leases[lease.id]


def test_confirm_is_answered_once_they_are_there() -> None:
    host, lease = host_with()
    token = host.confirm(lease.id, Binding(FIRST))
    assert host.of(AttachAccess) == [AttachAccess(lease, FIRST)]
    assert token not in host.answers
    assert not host.outcome.changes
    assert (host.state("d"), now(host, lease)) == ("allocating", lease)
    attached(host, lease)
    assert host.body(token) == "{}"
    assert host.state("d") == "in-use"
    assert now(host, lease).binding == Binding(FIRST)
    assert host.of(WatchOwner) == [WatchOwner(lease.id, Binding(FIRST))]
    [told] = host.audits(AuditKind.CONFIRMED)
    assert "process 100" in told.message


def test_one_that_can_not_be_moved_changes_nothing() -> None:
    host, lease = host_with()
    token = host.confirm(lease.id, Binding(FIRST))
    attached(host, lease, error="network interface eth3 can't be moved: it is a member of bridge br0")
    answer = host.answer(token)
    assert isinstance(answer, Refuse)
    assert answer.error is ErrorKind.UNAVAILABLE
    assert answer.text.endswith("it is a member of bridge br0; the lease is as it was")
    assert (host.state("d"), now(host, lease)) == ("allocating", lease)
    # whatever was moved half is put where the lease's state says: on the host
    assert host.of(AttachAccess) == [AttachAccess(lease, None)]
    [told] = host.audits(AuditKind.REFUSED)
    assert told.reason == "Unavailable"
    # and the same call may be made again
    again = host.confirm(lease.id, Binding(FIRST), request_id="again")
    attached(host, lease)
    assert host.body(again) == "{}"


def test_its_deadline_goes_on() -> None:
    host, lease = host_with()
    token = host.confirm(lease.id, Binding(FIRST))
    host.tick(31 * SECOND)
    assert host.error(token) is ErrorKind.LEASE_ENDED
    assert host.of(RevokeAccess) == [RevokeAccess(lease.id)]
    attached(host, lease)
    assert not host.outcome.effects
    assert host.state("d") == "reclaiming"


def test_released_meanwhile() -> None:
    host, lease = host_with()
    token = host.confirm(lease.id, Binding(FIRST))
    host.release(lease.id)
    assert host.error(token) is ErrorKind.LEASE_ENDED
    attached(host, lease, error="process 100 has ended")
    assert not host.outcome.effects


def test_a_repeated_call_waits_along() -> None:
    host, lease = host_with()
    first = host.confirm(lease.id, Binding(FIRST), request_id="c")
    second = host.confirm(lease.id, Binding(FIRST), request_id="c")
    assert host.of(AttachAccess) == []
    other = host.confirm(lease.id, Binding(SECOND_ONE), request_id="c")
    assert host.error(other) is ErrorKind.REQUEST_CONFLICT
    another = host.confirm(lease.id, Binding(SECOND_ONE), request_id="d")
    assert host.error(another) is ErrorKind.UNAVAILABLE
    attached(host, lease)
    assert (host.body(first), host.body(second)) == ("{}", "{}")
    third = host.confirm(lease.id, Binding(FIRST), request_id="c")
    assert host.body(third) == "{}"


def test_bound_anew_they_follow_and_else_stay() -> None:
    host, lease = host_with()
    host.confirm(lease.id, Binding(FIRST))
    attached(host, lease)
    token = host.confirm(lease.id, Binding(FIRST, ttl=5 * SECOND))
    assert host.of(AttachAccess) == []
    assert host.body(token) == "{}"
    token = host.confirm(lease.id)
    assert host.of(AttachAccess) == []
    assert host.body(token) == "{}"
    token = host.confirm(lease.id, Binding(SECOND_ONE))
    assert host.of(AttachAccess) == [AttachAccess(now(host, lease), SECOND_ONE)]
    # what was wanted before, and is answered late, is not it
    attached(host, lease, FIRST)
    assert token not in host.answers
    attached(host, lease, SECOND_ONE, "process 200 has ended")
    assert host.error(token) is ErrorKind.UNAVAILABLE
    assert now(host, lease).binding.pid == FIRST
    assert host.of(AttachAccess) == [AttachAccess(now(host, lease), FIRST)]


@pytest.mark.parametrize("binding", [Binding(), Binding(ttl=5 * SECOND)])
def test_without_a_process_there_is_no_place_to_go(binding: Binding) -> None:
    host, lease = host_with()
    token = host.confirm(lease.id, binding)
    answer = host.answer(token)
    assert isinstance(answer, Refuse)
    assert (answer.error, "bind a pid" in answer.text) == (ErrorKind.INVALID_ARGUMENT, True)


def test_confirmed_at_once_needs_a_process_too() -> None:
    host = Host()
    host.ready(card("d"))
    token = host.ask(GPU, netdev=Netdev.MOVE, confirm=True)
    assert host.error(token) is ErrorKind.INVALID_ARGUMENT


def test_bound_in_the_grant_they_are_moved_with_it() -> None:
    host, lease = host_with(binding=Binding(FIRST), confirm=True)
    assert (host.state("d"), lease.binding.pid, lease.netdev) == ("in-use", FIRST, Netdev.MOVE)
    token = host.confirm(lease.id)
    assert host.of(AttachAccess) == []
    assert isinstance(host.answer(token), Reply)


def test_kept_ones_are_nobodys_concern() -> None:
    host, lease = host_with(netdev=Netdev.KEEP)
    host.confirm(lease.id, Binding(FIRST))
    assert host.of(AttachAccess) == []
    host.restart()
    assert host.of(AttachAccess) == []


def test_after_a_start_they_are_put_where_the_lease_says() -> None:
    host, lease = host_with()
    host.confirm(lease.id, Binding(FIRST))
    host.restart()
    assert host.of(AttachAccess) == [AttachAccess(lease, None)]
    attached(host, lease, None)
    assert not host.outcome.effects
    host.confirm(lease.id, Binding(FIRST))
    attached(host, lease)
    host.restart()
    assert host.of(AttachAccess) == [AttachAccess(now(host, lease), FIRST)]
    attached(host, lease, FIRST, "it is a member of bridge br0")
    [told] = host.audits(AuditKind.ACCESS)
    assert (told.lease, told.priority) == (lease.id, 4)
    assert "not where they should be" in told.message


def test_what_can_not_be_stored_is_refused() -> None:
    host, lease = host_with()
    token = host.confirm(lease.id, Binding(FIRST))
    attached(host, lease, error="the ledger can't be written: no space", store=True)
    assert host.error(token) is ErrorKind.STORE_FAILED
