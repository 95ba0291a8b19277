"""What leases give: kept up while they live, and no device is returned before it is taken back."""

from __future__ import annotations

import pytest

from hetero_agent.core.effects import RenewAccess, RequestScan, RevokeAccess
from hetero_agent.core.events import AccessFailed, AccessRenewed, AccessRevoked, NodesTouched
from hetero_agent.core.model import AuditKind, Lease
from tests.core.host import MS, SECOND, Host, card, holder


def host_with() -> Host:
    """One clean device; whoever took back what a lease gives, has to be told so."""
    host = Host()
    host.ready(card("d"))
    host.revokes = False
    return host


def ended(host: Host) -> Lease:
    """A lease that was released."""
    lease = host.use()
    host.release(lease.id)
    assert host.of(RevokeAccess) == [RevokeAccess(lease.id)]
    return lease


def test_a_clean_scan_alone_does_not_return_a_device() -> None:
    host = host_with()
    lease = ended(host)
    host.scan()
    assert (host.state("d"), host.device("d").reason) == ("reclaiming", "access-not-revoked")
    assert host.governor.leases[lease.id].returned == ()
    host.do(AccessRevoked(host.later(), lease.id))
    assert host.scans() == ["d"]
    host.scan()
    assert host.state("d") == "idle"
    assert host.ended() == {lease.id: "released"}


def test_taken_back_before_the_scan_ends_needs_no_other_scan() -> None:
    host = host_with()
    lease = ended(host)
    host.do(AccessRevoked(host.later(), lease.id))
    assert host.of(RequestScan) == []
    host.scan()
    assert host.state("d") == "idle"


def test_what_can_not_be_taken_back_is_tried_again_and_told_once() -> None:
    host = host_with()
    lease = ended(host)
    host.do(AccessRevoked(host.later(), lease.id, "read-only"))
    [told] = host.audits(AuditKind.ACCESS)
    assert (told.priority, told.lease, told.reason) == (4, lease.id, "read-only")
    host.scan()
    assert host.state("d") == "reclaiming"
    host.tick(SECOND)
    assert host.of(RevokeAccess) == [RevokeAccess(lease.id)]
    host.do(AccessRevoked(host.later(), lease.id, "read-only"))
    assert host.audits(AuditKind.ACCESS) == []
    host.tick(SECOND)
    host.do(AccessRevoked(host.later(), lease.id, "no space"))
    assert [one.reason for one in host.audits(AuditKind.ACCESS)] == ["no space"]
    host.tick(SECOND)
    host.do(AccessRevoked(host.later(), lease.id))
    host.scan()
    assert host.state("d") == "idle"
    host.tick(5 * SECOND)
    assert host.of(RevokeAccess) == []


def test_past_its_deadline_the_device_is_faulty_and_says_why() -> None:
    host = host_with()
    lease = ended(host)
    host.do(AccessRevoked(host.later(), lease.id, "read-only"))
    host.scan()
    host.tick(61 * SECOND)
    assert (host.state("d"), host.device("d").reason) == ("faulty", "access-not-revoked")
    [told] = [one for one in host.audits(AuditKind.HEALTH) if one.device == "d"]
    assert told.message == "d did not come back in time; what its lease gave could not be taken back: read-only"
    host.do(AccessRevoked(host.later(), lease.id))
    host.scan()
    assert host.state("d") == "idle"


def test_a_holder_counts_more_than_what_was_given() -> None:
    host = host_with()
    lease = ended(host)
    host.do(AccessRevoked(host.later(), lease.id, "read-only"))
    host.scan({"d": [holder(42)]})
    assert host.device("d").reason == "held by 1 process"
    host.tick(61 * SECOND)
    assert (host.state("d"), host.device("d").reason) == ("faulty", "reclaim-timeout")


def test_the_request_id_of_a_grant_that_failed_is_free_while_that_is_undone() -> None:
    host = host_with()
    host.ask(request_id="a")
    lease = host.preparing().id
    host.do(AccessFailed(host.later(), lease, "no space"))
    assert RevokeAccess(lease) in host.outcome.effects
    host.scan()
    assert host.state("d") == "reclaiming"
    host.do(AccessRevoked(host.later(), lease))
    host.scan()
    host.grant(request_id="a")


def test_after_a_start_what_ended_leases_gave_is_taken_back_again() -> None:
    host = host_with()
    lease = ended(host)
    host.restart()
    assert RevokeAccess(lease.id) in host.outcome.effects
    host.observe(card("d"), complete=True)
    host.scan()
    assert host.state("d") == "reclaiming"
    host.do(AccessRevoked(host.later(), lease.id))
    host.scan()
    assert host.state("d") == "idle"


def test_after_a_start_live_leases_give_what_they_should() -> None:
    host = host_with()
    lease = host.use()
    host.restart()
    assert RenewAccess(lease) in host.outcome.effects


@pytest.mark.parametrize("many", [1, 50])
def test_touches_of_a_leased_node_are_looked_at_together(many: int) -> None:
    host = host_with()
    lease = host.use()
    for _ in range(many):
        host.do(NodesTouched(host.later(MS), "d"))
        assert host.of(RenewAccess) == []
    host.tick(100 * MS)
    assert host.of(RenewAccess) == [RenewAccess(lease)]
    host.tick(SECOND)
    assert host.of(RenewAccess) == []


def test_a_node_that_is_touched_all_the_time_costs_a_renewal_a_second() -> None:
    host = host_with()
    lease = host.use()
    renewed = 0
    for _ in range(300):
        host.do(NodesTouched(host.later(10 * MS), "d"))
        host.tick(0)
        renewed += len(host.of(RenewAccess))
    assert renewed == 3
    host.tick(SECOND)
    assert host.of(RenewAccess) == [RenewAccess(lease)]
    # and the last touch was not forgotten, while a first one after a quiet time is answered soon
    host.tick(SECOND)
    host.do(NodesTouched(host.later(), "d"))
    host.tick(100 * MS)
    assert host.of(RenewAccess) == [RenewAccess(lease)]


def test_touches_of_other_nodes_mean_nothing() -> None:
    host = host_with()
    host.do(NodesTouched(host.later(), "d"))
    host.do(NodesTouched(host.later(), "no-such-device"))
    host.tick(SECOND)
    assert host.of(RenewAccess) == []
    lease = host.use()
    host.do(NodesTouched(host.later(), "d"))
    host.release(lease.id)
    host.tick(SECOND)
    assert host.of(RenewAccess) == []


def test_what_can_not_be_made_again_is_told_once_it_failed_twice() -> None:
    host = host_with()
    lease = host.use()

    def told() -> list[tuple[str, str]]:
        return [(one.lease, one.reason) for one in host.store.audits if one.kind is AuditKind.ACCESS]

    host.do(AccessRenewed(host.later(), lease.id, "no such node"))
    assert told() == []
    host.tick(SECOND)
    assert host.of(RenewAccess) == [RenewAccess(lease)]
    for _ in range(2):
        host.do(AccessRenewed(host.later(), lease.id, "no such node"))
    assert told() == [(lease.id, "no such node")]
    assert host.governor.upkeep._lacking.get(lease.id, "") == "no such node"
    host.do(AccessRenewed(host.later(), lease.id))
    assert host.governor.upkeep._lacking.get(lease.id, "") == ""
    for _ in range(2):
        host.do(AccessRenewed(host.later(), lease.id, "no such node"))
    assert len(told()) == 2
    host.release(lease.id)
    host.do(AccessRevoked(host.later(), lease.id))
    assert host.governor.upkeep._lacking.get(lease.id, "") == ""


def test_an_unplugged_device_is_no_problem_of_its_lease() -> None:
    """Its nodes go before the news of it comes."""
    host = host_with()
    lease = host.use()
    host.do(NodesTouched(host.later(), "d"))
    host.tick(100 * MS)
    assert host.of(RenewAccess) == [RenewAccess(lease)]
    host.do(AccessRenewed(host.later(), lease.id, "no such node"))
    host.observe(gone=("d",))
    [effect] = host.of(RenewAccess)
    host.do(AccessRenewed(host.later(), lease.id, "", effect.lease.lost))
    host.tick(2 * SECOND)
    assert [one for one in host.store.audits if one.kind is AuditKind.ACCESS] == []


def test_a_device_that_comes_back_to_a_live_lease_waits_for_what_that_gave() -> None:
    host = host_with()
    lease = host.use()
    host.observe(gone=("d",))
    lost = host.governor.leases[lease.id]
    assert (lost.lost, host.of(RenewAccess)) == (("d",), [RenewAccess(lost)])
    host.observe(card("d"))
    host.scan()
    assert (host.state("d"), host.device("d").reason) == ("reclaiming", "access-not-revoked")
    # one that was asked for before the device went says nothing of it
    host.do(AccessRenewed(host.later(), lease.id))
    host.scan()
    assert host.state("d") == "reclaiming"
    host.do(AccessRenewed(host.later(), lease.id, "read-only", ("d",)))
    host.tick(SECOND)
    assert host.of(RenewAccess) == [RenewAccess(lost)]
    host.do(AccessRenewed(host.later(), lease.id, "", ("d",)))
    assert host.scans() == ["d"]
    host.scan()
    assert host.state("d") == "idle"
    assert host.governor.leases[lease.id].alive


def test_what_a_live_lease_lost_is_still_owed_after_a_start_and_after_its_end() -> None:
    host = host_with()
    lease = host.use()
    host.observe(gone=("d",))
    host.observe(card("d"))
    host.restart()
    assert [one.lease.lost for one in host.of(RenewAccess)] == [("d",)]
    host.observe(card("d"), complete=True)
    host.scan()
    assert host.state("d") == "reclaiming"
    host.release(lease.id)
    host.do(AccessRenewed(host.later(), lease.id, "", ("d",)))
    host.scan()
    assert host.state("d") == "reclaiming"
    host.do(AccessRevoked(host.later(), lease.id))
    host.scan()
    assert host.state("d") == "idle"
