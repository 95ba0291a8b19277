"""A new life: what each kind of row becomes, and what a damaged or foreign one does."""

from __future__ import annotations

import json

import pytest

from hetero_agent.core.effects import ErrorKind, RevokeAccess, Terminate, WatchNodes, WatchOwner
from hetero_agent.core.events import AccessRevoked, ProviderGone
from hetero_agent.core.model import (
    AuditKind,
    Binding,
    DeviceRecord,
    Health,
    LeaseState,
    Node,
    Obstacle,
    OnEnd,
    ProcessRef,
    Result,
    Role,
    State,
)
from tests.core.host import GPU, SECOND, Host, card, holder, rebooted

OWNER = ProcessRef(42, 1)
VIRT = DeviceRecord(
    "v", "sim/virt", source="sim", nodes=(Node("/run/sim/v", Role.OWN, "file", fsdev=1, inode=2),)
)


def two() -> tuple[DeviceRecord, DeviceRecord]:
    return card("d", 1, serial="A"), card("e", 2)


def host_with(*records: DeviceRecord) -> Host:
    host = Host()
    host.ready(*(records or two()))
    return host


def seen(host: Host, *records: DeviceRecord) -> None:
    """The first enumeration of this life."""
    host.observe(*(records or two()), complete=True)


# -- whole rows ------------------------------------------------------------------------------------
def test_nothing_was_kept() -> None:
    host = host_with()
    sequence, generation = host.store.sequence, host.governor.generation
    host.restart()
    assert host.governor.devices == {}
    assert not host.governor.ready
    assert [one.message for one in host.audits(AuditKind.STARTED)] == ["started, epoch epoch2"]
    assert host.store.sequence == sequence + 1
    assert host.governor.generation > generation
    seen(host)
    assert set(host.states().values()) == {"probing"}


def test_a_prepared_grant_is_rolled_back() -> None:
    host = host_with()
    host.ask(request_id="a", fingerprint="f")
    lease = host.preparing().id
    host.revokes = False
    host.restart()
    assert RevokeAccess(lease) in host.outcome.effects
    why = "it was being prepared when the agent died"
    assert [one.reason for one in host.audits(AuditKind.ENDED)] == [why]
    assert host.store.requests == {}
    seen(host)
    # its process may have got at the node already: only a clean scan makes it idle, and only once
    # nothing is given any more
    host.scan()
    assert host.states() == {"d": "reclaiming", "e": "idle"}
    host.do(AccessRevoked(host.later(), lease))
    host.scan()
    assert host.states() == {"d": "idle", "e": "idle"}
    for table in (host.store.leases, host.store.records, host.store.requests, host.store.debts):
        assert table == {}
    host.grant(request_id="a", fingerprint="f", devices=("d",))


def test_a_granted_lease_lives_on_and_ends_at_its_deadline() -> None:
    host = host_with()
    lease = host.grant(binding=Binding(pid=OWNER))
    host.restart()
    assert host.governor.leases == {lease.id: lease}
    assert host.states() == {"d": "allocating"}
    assert WatchOwner(lease.id, lease.binding) in host.outcome.effects
    assert WatchNodes("d", two()[0]) in host.outcome.effects
    assert host.scans() == ["d"]
    seen(host)
    assert host.states() == {"d": "allocating", "e": "probing"}
    host.ticks(31 * SECOND)
    assert host.governor.leases[lease.id].result is Result.EXPIRED
    host.scan()
    assert host.ended() == {lease.id: "expired"}


def test_a_confirmed_lease_lives_on() -> None:
    host = host_with()
    lease = host.use(count=2, uid=1001, client="k")
    host.restart()
    seen(host)
    host.scan()
    assert host.states() == {"d": "in-use", "e": "in-use"}
    assert host.governor.world.load == {(1001, "k"): 1}
    assert host.body(host.release(lease.id, uid=1001)) == '{"changed": true}'
    host.scan()
    assert host.states() == {"d": "idle", "e": "idle"}


def test_the_policy_goes_on_from_the_counts() -> None:
    host = host_with()
    host.release(host.use(devices=("d",)).id)
    host.scan()
    assert host.store.counts == {"serial:A": 1}
    host.restart()
    seen(host)
    host.scan()
    assert (host.device("d").count, host.device("e").count) == (1, 0)
    assert host.use().devices == ("e",)


def test_an_ending_lease_goes_on_ending() -> None:
    host = host_with()
    lease = host.use(on_end=OnEnd.KILL, binding=Binding(pid=OWNER))
    host.release(lease.id)
    host.scan({"d": [holder(42)]})
    debt = host.governor.world.debts["d"]
    host.restart()
    assert RevokeAccess(lease.id) in host.outcome.effects
    assert host.governor.leases[lease.id].state is LeaseState.ENDING
    assert host.governor.world.debts == {"d": debt}
    assert host.states() == {"d": "reclaiming"}
    assert host.scans() == ["d"]
    seen(host)
    host.scan({"d": [holder(42)]})
    assert [(one.holder.pid, one.signal) for one in host.of(Terminate)] == [(42, "TERM")]
    host.ticks(61 * SECOND)
    assert host.state("d") == "faulty"
    host.restart()
    assert (host.state("d"), host.device("d").reason) == ("faulty", "reclaim-timeout")
    seen(host)
    assert host.state("d") == "faulty"
    host.scan()
    assert host.state("d") == "idle"
    assert host.ended() == {lease.id: "released"}


def test_a_failed_grant_that_is_still_owed_goes_on() -> None:
    host = host_with()
    host.ask(request_id="a", fingerprint="f")
    failed = host.preparing().id
    host.failed(failed)
    again = host.ask(request_id="a", fingerprint="f")
    lease = host.preparing()
    host.prepared(lease.id)
    body = host.body(again)
    host.restart()
    seen(host)
    assert (host.state("d"), host.state("e")) == ("reclaiming", "allocating")
    # the failed one has not taken its successor's id along
    assert host.body(host.ask(request_id="a", fingerprint="f")) == body
    host.scan()
    assert set(host.governor.leases) == {lease.id}


def test_a_lost_device_stays_lost_and_comes_back() -> None:
    host = host_with()
    lease = host.use()
    host.observe(gone=("d",))
    host.restart()
    assert host.states() == {"d": "lost"}
    seen(host, two()[1])
    assert host.state("d") == "lost"
    assert host.governor.leases[lease.id].alive
    host.observe(two()[0])
    assert host.state("d") == "reclaiming"
    host.restart()
    assert host.states() == {"d": "reclaiming"}
    seen(host)
    host.scan()
    assert (host.state("d"), host.governor.leases[lease.id].returned) == ("idle", ("d",))
    other = host.use(uid=1001, devices=("d",))
    host.restart()
    seen(host)
    assert (host.state("d"), host.device("d").lease) == ("in-use", other.id)
    assert set(host.governor.leases) == {lease.id, other.id}
    host.release(lease.id)
    assert host.ended() == {lease.id: "released"}
    assert host.state("d") == "in-use"


def test_a_leased_device_that_went_while_the_agent_was_away() -> None:
    host = host_with()
    lease = host.use()
    host.restart()
    seen(host, two()[1])
    assert host.state("d") == "lost"
    assert host.governor.leases[lease.id].lost == ("d",)


def test_an_owed_device_that_went_while_the_agent_was_away() -> None:
    host = host_with()
    lease = host.use()
    host.release(lease.id)
    host.restart()
    seen(host, two()[1])
    assert host.states() == {"e": "probing"}
    assert host.ended() == {lease.id: "released"}
    assert host.store.records == {}


def test_a_node_that_changed_while_the_agent_was_away() -> None:
    host = host_with()
    lease = host.grant()
    host.restart()
    seen(host, card("d", 9, serial="A"), two()[1])
    assert (host.state("d"), host.governor.leases[lease.id].result) == ("reclaiming", Result.FAILED)


def test_the_debt_of_a_stranger_goes_on() -> None:
    host = host_with()
    stray = {"d": [holder(9)]}
    host.scan(stray)
    host.ticks(3 * SECOND)
    host.scan(stray)
    host.reap("d", holder(9).ref)
    host.restart()
    assert host.states() == {"d": "reclaiming"}
    seen(host)
    host.scan(stray)
    host.ticks(61 * SECOND)
    assert host.state("d") == "faulty"
    host.scan()
    assert host.state("d") == "idle"


def test_cordons_and_history_come_back() -> None:
    host = host_with()
    host.cordon("d")
    host.cordon("e", "place")
    host.restart()
    host.observe(card("f", 1, serial="A"), two()[1], complete=True)
    assert host.states() == {"f": "offline", "e": "offline"}
    assert [one.to_state for one in host.governor.history("f", 20)] == ["idle", "offline", "offline"]
    assert [one.reason for one in host.governor.history("e", 1)] == ["cordoned"]


def test_a_cordon_of_a_leased_device_comes_back() -> None:
    host = host_with()
    lease = host.use()
    host.cordon("d")
    host.restart()
    assert host.device("d").cordon is not None
    seen(host)
    host.release(lease.id)
    host.scan()
    assert host.state("d") == "offline"


def test_spent_ids_stay_spent() -> None:
    host = host_with()
    lease = host.use(request_id="a", fingerprint="f")
    released = host.release(lease.id, request_id="x")
    host.scan()
    host.restart()
    seen(host)
    host.scan()
    assert host.error(host.ask(request_id="a", fingerprint="f")) is ErrorKind.REQUEST_SPENT
    assert host.body(host.release(lease.id, request_id="x")) == host.body(released)
    assert host.body(host.release(lease.id, request_id="y")) == '{"changed": false}'
    host.ticks(25 * 3600 * SECOND)
    assert host.store.requests == {}


# -- providers -------------------------------------------------------------------------------------
def test_a_providers_device_waits_for_its_word() -> None:
    host = host_with(VIRT)
    lease = host.use("sim/virt")
    host.restart()
    assert (host.state("v"), host.device("v").health) == ("in-use", Health.UNKNOWN)
    seen(host)
    assert host.state("v") == "in-use"
    host.observe(VIRT, source="sim", complete=True)
    assert host.device("v").health is Health.HEALTHY
    host.release(lease.id)
    host.scan()
    assert host.state("v") == "idle"


def test_a_providers_word_of_a_sick_device_counts() -> None:
    host = host_with(VIRT)
    host.use("sim/virt")
    host.restart()
    sick = DeviceRecord("v", "sim/virt", source="sim", nodes=VIRT.nodes, health=Health.UNHEALTHY)
    host.observe(sick, source="sim", complete=True)
    assert (host.state("v"), host.device("v").health) == ("in-use", Health.UNHEALTHY)


def test_a_provider_that_does_not_name_it_any_more() -> None:
    host = host_with(VIRT)
    lease = host.use("sim/virt")
    host.restart()
    host.observe(source="sim", complete=True)
    assert host.state("v") == "lost"
    assert host.governor.leases[lease.id].lost == ("v",)


def test_a_provider_that_does_not_come_back() -> None:
    host = host_with(VIRT)
    lease = host.use("sim/virt")
    host.restart()
    seen(host)
    host.do(ProviderGone(host.later(), "sim"))
    host.release(lease.id)
    host.scan()
    assert (host.state("v"), host.device("v").reason) == ("faulty", "provider-gone")


# -- another boot ----------------------------------------------------------------------------------
def reboot(host: Host) -> None:
    before = host.now()
    host.boot, host.offset = 5 * SECOND, before.real + 60 * SECOND
    found = rebooted(host.store, before, host.now())
    host.restart(other_boot=found.other_boot, other_boot_debts=found.other_boot_debts, requests=found.requests)


def test_leases_of_another_boot_are_closed() -> None:
    host = host_with()
    lease = host.use(request_id="a", fingerprint="f")
    host.release(host.use(uid=1001).id, uid=1001)
    assert "e" in host.governor.world.debts
    reboot(host)
    assert (host.governor.leases, host.governor.world.debts, host.governor.devices) == ({}, {}, {})
    ended = {one.lease: one.extra["RESULT"] for one in host.audits(AuditKind.ENDED)}
    assert set(ended.values()) == {"reboot"}
    assert lease.id in ended
    for table in (host.store.leases, host.store.debts, host.store.records):
        assert table == {}
    seen(host)
    host.scan()
    assert host.states() == {"d": "idle", "e": "idle"}
    assert host.error(host.ask(request_id="a", fingerprint="f")) is ErrorKind.REQUEST_SPENT
    assert host.body(host.release(lease.id)) == '{"changed": false}'


def test_the_debt_of_a_stranger_in_another_boot_is_dropped() -> None:
    host = host_with()
    stray = {"d": [holder(9)]}
    host.scan(stray)
    host.ticks(3 * SECOND)
    host.scan(stray)
    host.reap("d", holder(9).ref)
    reboot(host)
    assert host.governor.world.debts == {}
    assert (host.store.debts, host.store.records) == ({}, {})


def test_cordons_outlive_a_reboot() -> None:
    host = host_with()
    host.cordon("d")
    reboot(host)
    seen(host)
    host.scan()
    assert host.states() == {"d": "offline", "e": "idle"}


# -- damaged rows ----------------------------------------------------------------------------------
@pytest.mark.parametrize("confirm", [False, True])
def test_a_lease_whose_devices_record_is_lost_keeps_the_device(confirm: bool) -> None:
    host = host_with()
    lease = host.grant(confirm=confirm)
    state = "in-use" if confirm else "allocating"
    host.restart(records=[], notes=["a damaged row of records"])
    assert [one.message for one in host.audits(AuditKind.STORE)] == ["a damaged row of records"]
    assert (host.state("d"), host.device("d").lease) == (state, lease.id)
    assert host.device("d").record.obstacle is Obstacle.NO_NODE
    seen(host)
    assert host.state("d") == state
    assert host.device("d").record == two()[0]
    host.scan()
    assert host.use(uid=1001).devices == ("e",)
    assert host.error(host.ask(uid=1001)) is ErrorKind.UNAVAILABLE
    host.release(lease.id)
    host.scan()
    assert host.state("d") == "idle"


def test_a_debt_whose_devices_record_is_lost_is_owed_all_the_same() -> None:
    host = host_with()
    lease = host.use()
    host.release(lease.id)
    host.restart(records=[])
    assert host.state("d") == "reclaiming"
    assert host.governor.returns.nodes_of(host.device("d")) == two()[0].own_nodes
    seen(host)
    assert host.state("d") == "reclaiming"
    host.scan()
    assert host.ended() == {lease.id: "released"}


def test_a_lease_row_that_is_lost() -> None:
    host = host_with()
    lease = host.use(request_id="a", fingerprint="f")
    host.restart(leases=[])
    assert host.store.records == {}
    seen(host)
    host.scan({"d": [holder(42)]})
    host.ticks(3 * SECOND)
    host.scan({"d": [holder(42)]})
    assert host.state("d") == "occupied"
    # what was answered once does not grant again
    assert host.error(host.ask(request_id="a", fingerprint="f")) is ErrorKind.REQUEST_SPENT
    assert host.body(host.release(lease.id)) == '{"changed": false}'


def test_a_lost_lease_row_of_a_debt() -> None:
    host = host_with()
    host.release(host.use().id)
    host.restart(leases=[])
    assert host.state("d") == "reclaiming"
    seen(host)
    host.scan()
    assert host.state("d") == "idle"


def test_a_lost_row_of_a_debt_ends_its_lease() -> None:
    host = host_with()
    lease = host.use()
    host.release(lease.id)
    host.restart(debts=[])
    assert host.ended() == {lease.id: "released"}
    seen(host)
    assert host.state("d") == "probing"


def test_a_lost_row_of_a_request_keeps_the_lease() -> None:
    host = host_with()
    lease = host.use()
    host.restart(requests=[])
    seen(host)
    assert host.governor.leases == {lease.id: lease}
    assert host.body(host.release(lease.id)) == '{"changed": true}'


def test_two_restarts_are_as_one() -> None:
    host = host_with()
    lease = host.use()
    host.ask()
    host.restart()
    first = (host.governor.leases, host.states(), dict(host.store.records))
    host.restart()
    assert (host.governor.leases, host.states(), dict(host.store.records)) == first
    assert host.store.sequence == host.store.audits[-1].sequence == len(host.store.audits)
    seen(host)
    assert host.state("d") == State.IN_USE
    assert json.loads(host.governor.world.requests[lease.key].body)["lease"] == lease.id
    assert host.governor.resources()[GPU]["total"] == 2
