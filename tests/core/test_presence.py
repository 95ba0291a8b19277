"""What is there and how it is: hotplug, drivers, providers, cordons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_agent.core import world
from hetero_agent.core.effects import (
    DeviceAdded,
    DeviceRemoved,
    ErrorKind,
    HealthChanged,
    LeaseChanged,
    RenewAccess,
    StoreCordon,
    UnwatchOwner,
    WatchNodes,
)
from hetero_agent.core.events import CordonStored, ProviderGone
from hetero_agent.core.model import (
    AuditKind,
    Binding,
    Cordon,
    DeviceRecord,
    Health,
    Node,
    Obstacle,
    OnFault,
    ProcessRef,
    Result,
    Role,
)
from tests.core.host import GPU, SECOND, Host, card, holder, own


def host_with(*records: DeviceRecord) -> Host:
    host = Host()
    host.ready(*records)
    return host


def virt(**more: Any) -> DeviceRecord:
    node = Node("/run/sim/v", Role.OWN, "file", fsdev=1, inode=2)
    return DeviceRecord("v", "sim/virt", source="sim", nodes=(node,), **more)


# -- coming and going ------------------------------------------------------------------------------
def test_a_device_comes_and_goes() -> None:
    host = Host()
    host.observe(card("d", 1), complete=True)
    assert host.of(DeviceAdded) == [DeviceAdded("d")]
    assert host.of(WatchNodes) == [WatchNodes("d", card("d", 1))]
    assert host.scans() == ["d"]
    assert [one.message for one in host.audits(AuditKind.APPEARED)] == ["d appeared as v/gpu:  "]
    host.observe(gone=("d",))
    assert host.of(DeviceRemoved) == [DeviceRemoved("d")]
    assert host.of(WatchNodes) == [WatchNodes("d", None)]
    assert host.moves() == [("d", "probing", "gone")]
    assert dict(host.governor.resources()) == {}


def test_only_its_source_may_speak_of_a_device() -> None:
    host = host_with(card("d", 1))
    host.observe(DeviceRecord("d", "sim/virt", source="sim"), source="sim")
    assert host.device("d").record == card("d", 1)
    assert len(host.audits(AuditKind.PROVIDER)) == 1
    host.observe(gone=("d",), source="sim")
    assert host.state("d") == "idle"
    host.health("d", Health.UNHEALTHY, "lies", source="sim")
    assert host.state("d") == "idle"


def test_unplugged_while_leased_and_back() -> None:
    host = host_with(card("d", 1), card("e", 2))
    lease = host.use(count=2)
    host.observe(gone=("d",))
    assert (host.state("d"), host.state("e")) == ("lost", "in-use")
    assert host.governor.leases[lease.id].lost == ("d",)
    assert LeaseChanged(lease.id) in host.outcome.effects
    assert host.of(DeviceRemoved) == []
    host.observe(card("d", 1))
    assert host.state("d") == "reclaiming"
    assert host.governor.leases[lease.id].alive
    host.scan()
    assert (host.state("d"), host.device("d").lease) == ("idle", "")
    assert host.governor.leases[lease.id].returned == ("d",)
    # it is another's now; the first lease's end does not touch it
    other = host.use(uid=1001)
    assert other.devices == ("d",)
    host.release(lease.id)
    assert (host.state("d"), host.state("e")) == ("in-use", "reclaiming")
    host.scan()
    assert host.ended() == {lease.id: "released"}
    assert set(host.store.records) == {"d"}


def test_a_lease_that_ends_while_its_device_comes_back_waits_for_the_proof() -> None:
    host = host_with(card("d", 1))
    lease = host.use()
    host.observe(gone=("d",))
    host.observe(card("d", 1))
    host.release(lease.id)
    assert host.ended() == {}
    assert lease.id in host.governor.leases
    host.scan()
    assert host.ended() == {lease.id: "released"}


def test_unplugged_with_kill_ends_the_lease() -> None:
    host = host_with(card("d", 1), card("e", 2))
    lease = host.use(count=2, on_fault=OnFault.KILL)
    host.observe(gone=("d",))
    assert host.states() == {"e": "reclaiming"}
    assert host.of(DeviceRemoved) == [DeviceRemoved("d")]
    assert host.governor.leases[lease.id].result is Result.UNPLUGGED
    assert UnwatchOwner(lease.id) in host.outcome.effects
    host.observe(gone=("e",))
    assert host.ended() == {lease.id: "unplugged"}


def test_unplugged_while_preparing_fails_the_grant() -> None:
    host = host_with(card("d", 1))
    token = host.ask()
    host.observe(gone=("d",))
    assert host.error(token) is ErrorKind.UNAVAILABLE
    assert host.states() == {}
    assert not host.governor.leases
    assert not host.governor.world.requests


def test_a_lost_device_that_never_comes_back_is_gone_with_its_lease() -> None:
    host = host_with(card("d", 1))
    lease = host.use()
    host.observe(gone=("d",))
    host.release(lease.id)
    assert host.states() == {}
    assert host.of(DeviceRemoved) == [DeviceRemoved("d")]
    assert host.of(WatchNodes) == [WatchNodes("d", None)]
    assert len(host.audits(AuditKind.GONE)) == 1


def test_unplugged_while_owed_or_occupied_or_ill() -> None:
    host = host_with(card("d", 1))
    lease = host.use()
    host.release(lease.id)
    host.scan({"d": [holder(42)]})
    host.observe(gone=("d",))
    assert host.ended() == {lease.id: "released"}
    assert not host.governor.world.debts
    assert not host.store.debts


# -- drivers and nodes -----------------------------------------------------------------------------
BARE: dict[str, Any] = {"nodes": (), "driver": ""}


@pytest.mark.parametrize("obstacle", [Obstacle.NO_DRIVER, Obstacle.NO_NODE, Obstacle.VFIO])
def test_a_device_without_driver_or_node_is_offline_until_it_has_one(obstacle: Obstacle) -> None:
    host = host_with(card("d", 1))
    host.observe(card("d", obstacle=obstacle, **BARE))
    assert (host.state("d"), host.device("d").reason) == ("offline", str(obstacle))
    assert [one.priority for one in host.audits(AuditKind.TRANSITION)] == [6]
    host.observe(card("d", 1))
    assert host.state("d") == "probing"
    host.scan()
    assert host.state("d") == "idle"


def test_the_driver_goes_while_leased() -> None:
    host = host_with(card("d", 1))
    lease = host.use()
    host.observe(card("d", obstacle=Obstacle.VFIO, **BARE))
    assert (host.state("d"), host.device("d").reason) == ("lost", "vfio")
    assert host.governor.leases[lease.id].lost == ("d",)
    host.observe(gone=("d",))
    assert host.state("d") == "lost"
    host.observe(card("d", obstacle=Obstacle.VFIO, **BARE))
    assert host.state("d") == "lost"
    host.observe(card("d", 1))
    assert host.state("d") == "reclaiming"


def test_a_node_under_another_number_is_looked_at_before_it_is_granted() -> None:
    host = host_with(card("d", 1))
    host.observe(card("d", 7))
    assert host.state("d") == "probing"
    assert host.scans() == ["d"]
    assert host.of(WatchNodes) == [WatchNodes("d", card("d", 7))]
    host.scan()
    assert host.state("d") == "idle"


@pytest.mark.parametrize("confirm", [False, True])
def test_a_node_that_changes_while_leased(confirm: bool) -> None:
    host = host_with(card("d", 1))
    lease = host.grant(confirm=confirm)
    host.observe(card("d", 7))
    assert host.state("d") == ("in-use" if confirm else "reclaiming")
    assert host.governor.leases[lease.id].result is (Result.NONE if confirm else Result.FAILED)


@pytest.mark.parametrize("confirm", [False, True])
def test_another_mode_of_a_node_is_no_other_node(confirm: bool) -> None:
    host = host_with(card("d", 1), card("e", 2))
    lease = host.grant(confirm=confirm)
    (leased,) = lease.devices
    state = host.state(leased)
    free = "e" if leased == "d" else "d"
    for name, number in (("d", 1), ("e", 2)):
        # what udev's rules and an ACL's mask do
        host.observe(card(name, nodes=(replace(own(number), mode=0o600, gid=7),)))
    assert host.state(leased) == state
    assert host.state(free) == "idle"
    assert host.scans() == []
    assert host.governor.leases[lease.id].result is Result.NONE


# -- identity --------------------------------------------------------------------------------------
def test_a_serial_stays_known_while_no_driver_is_bound() -> None:
    host = host_with(card("d", 1, serial="A"))
    host.release(host.use().id)
    host.scan()
    host.observe(card("d", obstacle=Obstacle.NO_DRIVER, **BARE))
    assert host.device("d").record.serial == "A"
    assert len(host.governor.history("d", 20)) == 5
    host.observe(card("d", 1, serial="A"))
    assert host.audits(AuditKind.REPLACED) == []
    assert host.device("d").count == 1


def test_another_device_in_the_place_of_a_free_one() -> None:
    host = host_with(card("d", 1, serial="A"))
    host.release(host.use().id)
    host.scan()
    host.health("d", Health.UNHEALTHY, "xid 79")
    host.observe(card("d", 1, serial="B"))
    assert [one.priority for one in host.audits(AuditKind.REPLACED)] == [5]
    assert (host.of(DeviceRemoved), host.of(DeviceAdded)) == ([DeviceRemoved("d")], [DeviceAdded("d")])
    assert (host.state("d"), host.device("d").health, host.device("d").count) == ("probing", Health.HEALTHY, 0)
    host.scan()
    assert host.state("d") == "idle"
    assert [one.serial for one in host.governor.history("d", 20)] == ["B"]


def test_replaced_although_the_driver_was_away_in_between() -> None:
    host = host_with(card("d", 1, serial="A"))
    host.observe(card("d", obstacle=Obstacle.NO_DRIVER, **BARE))
    host.observe(card("d", 1, serial="B"))
    assert len(host.audits(AuditKind.REPLACED)) == 1


def test_another_device_in_the_place_of_a_leased_one() -> None:
    host = host_with(card("d", 1, serial="A"))
    lease = host.use()
    host.observe(card("d", 1, serial="B"))
    assert host.moves() == [("d", "in-use", "lost"), ("d", "lost", "reclaiming")]
    assert host.governor.leases[lease.id].lost == ("d",)
    host.scan()
    assert (host.state("d"), host.device("d").count) == ("idle", 0)
    assert host.governor.leases[lease.id].alive


def test_history_goes_along_with_the_serial() -> None:
    host = Host()
    host.observe(card("d", obstacle=Obstacle.NO_DRIVER, **BARE), complete=True)
    host.observe(card("d", 1, serial="A"))
    host.scan()
    assert [(one.from_state, one.to_state) for one in host.governor.history("d", 20)] == [
        ("probing", "offline"),
        ("offline", "probing"),
        ("probing", "idle"),
    ]
    host.observe(gone=("d",))
    host.observe(card("e", 2, serial="A"))
    host.scan()
    places = [(one.device, one.to_state) for one in host.governor.history("e", 20)]
    assert places == [("d", "probing"), ("d", "idle"), ("d", "gone"), ("e", "idle")]
    assert [one.to_state for one in host.governor.history("e", 2)] == ["gone", "idle"]
    assert host.governor.history("none", 5) == []


def test_devices_with_one_serial_among_them_go_by_place() -> None:
    host = host_with(card("d", 1, serial="0"), card("e", 2, serial="0"))
    host.use(devices=("d",))
    assert (host.device("d").count, host.device("e").count) == (1, 0)
    assert {one.device for one in host.governor.history("d", 20)} == {"d"}
    assert host.store.counts == {"d": 1}


def test_the_last_twenty_transitions() -> None:
    host = host_with(card("d", 1))
    for _ in range(15):
        host.release(host.use().id)
        host.scan()
    assert len(host.governor.history("d", 99)) == 20
    assert [one.to_state for one in host.governor.history("d", 3)] == ["in-use", "reclaiming", "idle"]


def test_histories_of_gone_devices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "HISTORIES", 4)
    host = host_with(card("d", 1), card("e", 2))
    for index in range(20):
        host.observe(card(f"x{index}", 10 + index))
        host.scan()
        host.observe(gone=(f"x{index}",))
    assert len(host.governor.world.histories) == 4
    assert {"d", "e", "x19"} <= set(host.governor.world.histories)


# -- health ----------------------------------------------------------------------------------------
def test_a_fault_and_its_recovery() -> None:
    host = host_with(card("d", 1))
    host.health("d", Health.UNHEALTHY, "xid 79")
    assert (host.state("d"), host.device("d").reason) == ("faulty", "xid 79")
    assert host.of(HealthChanged) == [HealthChanged("d", "unhealthy", "xid 79", "", {"xid": "79"})]
    [record] = host.audits(AuditKind.HEALTH)
    assert (record.priority, record.extra) == (3, {"EVIDENCE_xid": "79"})
    host.health("d", Health.HEALTHY, "")
    assert host.state("d") == "idle"
    assert [one.health for one in host.of(HealthChanged)] == ["healthy"]


def test_suspect_is_idle_and_not_granted() -> None:
    host = host_with(card("d", 1))
    host.health("d", Health.SUSPECT, "link is narrow")
    assert host.state("d") == "idle"
    assert host.error(host.ask()) is ErrorKind.UNAVAILABLE
    host.health("d", Health.HEALTHY)
    host.grant()


def test_health_in_a_record_moves_once() -> None:
    host = host_with(virt())
    sick = virt(health=Health.UNHEALTHY, health_reason="hot")
    host.observe(sick, source="sim")
    assert host.moves() == [("v", "idle", "faulty")]
    host.observe(sick, source="sim")
    assert host.of(HealthChanged) == []
    host.observe(virt(), source="sim")
    assert host.moves() == [("v", "faulty", "idle")]


def test_a_sick_device_that_is_owed_is_not_laundered() -> None:
    host = host_with(card("d", 1))
    host.release(host.use().id)
    host.scan({"d": [holder(42)]})
    host.health("d", Health.UNHEALTHY, "xid 79")
    host.ticks(61 * SECOND)
    host.health("d", Health.HEALTHY)
    assert (host.state("d"), host.device("d").reason) == ("faulty", "reclaim-timeout")


# -- providers -------------------------------------------------------------------------------------
def gone(host: Host, back: bool = False) -> None:
    host.do(ProviderGone(host.later(), "sim", back=back))


def test_a_provider_goes_and_comes_back() -> None:
    host = host_with(virt())
    gone(host)
    assert (host.state("v"), host.device("v").reason) == ("faulty", "provider-gone")
    assert host.device("v").health is Health.UNKNOWN
    gone(host)
    assert host.moves() == []
    gone(host, back=True)
    assert (host.state("v"), host.device("v").health) == ("idle", Health.HEALTHY)


def test_a_fault_is_not_forgotten_over_a_providers_absence() -> None:
    host = host_with(virt())
    host.health("v", Health.UNHEALTHY, "hot", source="sim")
    gone(host)
    assert host.state("v") == "faulty"
    gone(host, back=True)
    assert host.moves() == []
    assert (host.state("v"), host.device("v").health) == ("faulty", Health.UNHEALTHY)


def test_a_providers_list_is_its_word_too() -> None:
    host = host_with(virt())
    gone(host)
    host.observe(virt(health=Health.UNHEALTHY, health_reason="hot"), source="sim")
    assert (host.state("v"), host.device("v").reason) == ("faulty", "hot")
    gone(host)
    host.observe(virt(), source="sim")
    assert (host.state("v"), host.device("v").health) == ("idle", Health.HEALTHY)


def test_a_provider_goes_while_its_device_is_leased() -> None:
    host = host_with(virt())
    lease = host.use("sim/virt")
    gone(host)
    assert (host.state("v"), host.device("v").health) == ("in-use", Health.UNKNOWN)
    host.release(lease.id)
    host.scan()
    assert (host.state("v"), host.device("v").reason) == ("faulty", "provider-gone")
    gone(host, back=True)
    assert host.state("v") == "idle"


# -- nodes that change hands -----------------------------------------------------------------------
@pytest.mark.parametrize("first", ["d", "e"])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_leased_device_whose_node_is_anothers_now_was_away(first: str, at_once: bool) -> None:
    """Both drivers were bound anew, and nobody saw it: what the lease gives is the other device."""
    d, e = card("d", 1), card("e", 2)
    host = host_with(d, e)
    lease = host.use(devices=("d",))
    changed = [replace(d, nodes=e.nodes), replace(e, nodes=d.nodes)]
    if first == "e":
        changed.reverse()
    if at_once:
        host.observe(*changed)
    else:
        for one in changed:
            host.observe(one)
    assert host.state("d") == "reclaiming"
    assert host.governor.leases[lease.id].lost == ("d",)
    [renewal] = host.of(RenewAccess)
    assert renewal.lease.lost == ("d",)
    host.scan()
    assert host.states() == {"d": "idle", "e": "idle"}
    assert host.governor.presence._renumbered == {"d": None}
    host.observe(d)
    assert host.governor.presence._renumbered == {}


def test_a_lease_that_goes_with_its_device_ends_when_that_was_away() -> None:
    d, e = card("d", 1), card("e", 2)
    host = host_with(d, e)
    lease = host.use(devices=("d",), on_fault=OnFault.KILL)
    host.observe(replace(d, nodes=e.nodes), replace(e, nodes=d.nodes))
    assert host.governor.leases[lease.id].result is Result.UNPLUGGED
    host.scan()
    assert host.states() == {"d": "idle", "e": "idle"}


def test_shares_that_get_another_node_together_were_not_away() -> None:
    shared, other = own(50), own(51)
    shares = [card(f"s-{index}", resource="v/share", parent="s", nodes=(shared,)) for index in (1, 2)]
    host = host_with(card("s", 5), *shares)
    host.use("v/share", binding=Binding(pid=ProcessRef(42, 1)))
    for one in shares:
        host.observe(replace(one, nodes=(other,)))
    assert host.state("s-1") == "in-use"


# -- cordons ---------------------------------------------------------------------------------------
def test_a_cordon_holds_once_it_is_stored() -> None:
    host = host_with(card("d", 1, serial="A"))
    token = host.cordon("d", error=None)
    assert host.of(StoreCordon) == [
        StoreCordon(token, "serial:A", Cordon("d", "A", "broken fan", 0, host.now().real))
    ]
    assert host.state("d") == "idle"
    assert token not in host.answers
    host.do(CordonStored(host.later(), token))
    assert (host.state("d"), host.device("d").reason) == ("offline", "cordoned")
    assert host.body(token) == "{}"


def test_a_cordon_that_cannot_be_stored_changes_nothing() -> None:
    host = host_with(card("d", 1))
    token = host.cordon("d", error="read-only file system")
    assert host.error(token) is ErrorKind.STORE_FAILED
    assert host.state("d") == "idle"
    host.grant()


def test_a_cordon_that_is_lifted_while_it_is_being_stored_is_lifted() -> None:
    """Two administrators: both are answered, in the order in which the disk has them."""
    host = host_with(card("d", 1))
    cordon, uncordon = host.cordon("d", error=None), host.cordon("d", None, error=None)
    host.do_pending_cordon(cordon)
    assert host.state("d") == "offline"
    host.do_pending_cordon(uncordon)
    assert (host.body(cordon), host.body(uncordon)) == ("{}", "{}")
    assert host.state("d") == "idle"
    assert host.governor.world.cordons == {}


def test_a_cordon_that_follows_the_serial_while_it_is_being_lifted_is_lifted() -> None:
    host = host_with(card("d", 1))
    host.cordon("d")
    token = host.cordon("d", None, error=None)
    host.observe(card("d", 1, serial="A"))
    host.do_pending_cordon(token)
    assert host.state("d") == "idle"
    assert StoreCordon(-1, "serial:A", None) in host.outcome.effects


def test_unplug_and_replug_does_not_launder_a_cordon() -> None:
    host = host_with(card("d", 1))
    host.cordon("d")
    host.observe(gone=("d",))
    host.observe(card("d", 1))
    host.scan()
    assert host.state("d") == "offline"


@pytest.mark.parametrize("serial", ["", "A"])
def test_a_cordon_of_what_is_not_there_is_lifted_by_its_place(serial: str) -> None:
    host = host_with(card("d", 1, serial=serial))
    host.cordon("d")
    host.observe(gone=("d",))
    assert host.error(host.cordon("e", None)) is ErrorKind.NOT_FOUND
    assert host.error(host.cordon("d")) is ErrorKind.NOT_FOUND
    assert host.error(host.cordon("d", None, error="no space")) is ErrorKind.STORE_FAILED
    assert len(host.store.cordons) == 1
    token = host.cordon("d", None, request_id="lift")
    assert host.body(token) == "{}"
    assert host.store.cordons == {}
    # told once more, with the same answer; another one finds nothing
    assert host.body(host.cordon("d", None, request_id="lift")) == "{}"
    assert host.error(host.cordon("d", None)) is ErrorKind.NOT_FOUND
    host.observe(card("d", 1, serial=serial))
    host.scan()
    assert host.state("d") == "idle"


def test_a_cordon_is_not_lifted_by_a_place_that_its_device_has_left() -> None:
    host = host_with(card("d", 1, serial="A"))
    host.cordon("d")
    host.observe(gone=("d",))
    host.observe(card("e", 2, serial="A"))
    assert host.error(host.cordon("d", None)) is ErrorKind.NOT_FOUND
    assert host.state("e") == "offline"


def test_a_cordon_follows_the_serial() -> None:
    host = host_with(card("d", 1, serial="A"))
    host.cordon("d")
    host.observe(gone=("d",))
    host.observe(card("e", 2, serial="A"), card("d", 1, serial="B"))
    host.scan()
    assert host.states() == {"e": "offline", "d": "idle"}
    host.observe(gone=("d",))
    host.observe(card("d", 1))
    host.scan()
    assert host.state("d") == "offline"


def test_a_cordon_of_a_place_follows_the_serial_once_it_is_known() -> None:
    host = host_with(card("d", nodes=(), obstacle=Obstacle.NO_DRIVER))
    host.cordon("d")
    assert set(host.store.cordons) == {"d"}
    host.observe(card("d", 1, serial="A"))
    host.stored()
    assert set(host.store.cordons) == {"serial:A"}
    host.observe(gone=("d",))
    host.observe(card("e", 2, serial="A"))
    host.scan()
    assert host.state("e") == "offline"
    host.cordon("e", None)
    assert host.state("e") == "idle"
    assert host.store.cordons == {}


def test_two_cordons_in_one_place_are_two() -> None:
    host = host_with(card("d", 1, serial="A"))
    host.cordon("d", "first")
    host.observe(gone=("d",))
    host.observe(card("d", 1, serial="B"))
    host.scan()
    assert host.state("d") == "idle"
    host.cordon("d", "second")
    host.observe(gone=("d",))
    host.observe(card("e", 2, serial="A"), card("f", 3, serial="B"))
    assert [host.device(one).cordon.reason for one in ("e", "f")] == ["first", "second"]  # type: ignore[union-attr]
    host.cordon("f", None)
    host.scan()
    assert (host.state("e"), host.state("f")) == ("offline", "idle")
    assert set(host.store.cordons) == {"serial:A"}


def test_a_copied_serial_does_not_launder_a_cordon() -> None:
    host = host_with(card("d", 1, serial="A"))
    host.cordon("d")
    host.observe(gone=("d",))
    host.observe(card("e", 2, serial="A"))
    host.observe(card("copy", 3, serial="A"))
    host.observe(card("e", 2, serial="A", attributes={"memory": 1}))
    host.scan()
    assert host.state("e") == "offline"


def test_a_cordon_of_one_part_is_not_the_cards() -> None:
    host = host_with(card("c", 1, serial="A"), card("p", 2, serial="A", parent="c"))
    host.cordon("p")
    assert (host.state("c"), host.state("p")) == ("idle", "offline")


def test_a_cordon_of_a_card_is_its_units_too() -> None:
    host = host_with(card("c", 1), card("c-p0", 2, parent="c"), card("c-p1", 3, parent="c"), card("d", 4))
    lease = host.use(devices=("c-p1",))
    host.cordon("c", "fan")
    assert [host.state(one) for one in ("c", "c-p0", "c-p1", "d")] == ["offline", "offline", "in-use", "idle"]
    assert host.device("c-p0").cordon.reason == "fan"  # type: ignore[union-attr]
    # the unit's own is another one; without it that of the card holds
    host.cordon("c-p0", "ECC")
    assert host.device("c-p0").cordon.reason == "ECC"  # type: ignore[union-attr]
    host.cordon("c-p0", None)
    assert (host.state("c-p0"), host.device("c-p0").cordon.reason) == ("offline", "fan")  # type: ignore[union-attr]
    # units that come later are under it, those in use once they are back
    host.observe(card("c-p2", 5, parent="c"))
    host.release(lease.id)
    host.scan()
    assert [host.state(one) for one in ("c-p1", "c-p2")] == ["offline", "offline"]
    host.restart()
    host.observe(card("c-p0", 2, parent="c"), card("c", 1), complete=True)
    host.scan()
    assert host.state("c-p0") == "offline"
    host.cordon("c", None)
    assert [host.state(one) for one in ("c", "c-p0")] == ["idle", "idle"]
    assert host.store.cordons == {}


def test_a_cordon_of_a_physical_function_is_that_of_its_virtual_ones() -> None:
    host = host_with(card("pf", 1))
    host.cordon("pf")
    # while it has virtual functions it is no device itself
    host.observe(card("vf", 2, parent="pf"), gone=("pf",))
    host.scan()
    assert (host.state("vf"), host.device("vf").reason) == ("offline", "cordoned")
    host.cordon("vf", None)
    assert host.state("vf") == "offline"
    host.body(host.cordon("pf", None))
    assert host.state("vf") == "idle"
    assert host.store.cordons == {}


def test_a_card_that_is_another_one_takes_its_cordon_from_its_units() -> None:
    host = host_with(card("c", 1, serial="A"), card("c-p0", 2, parent="c"))
    host.cordon("c")
    host.observe(card("c", 1, serial="B"))
    host.scan()
    assert [host.state(one) for one in ("c", "c-p0")] == ["idle", "idle"]
    host.observe(card("c", 1, serial="A"))
    assert [host.state(one) for one in ("c", "c-p0")] == ["offline", "offline"]


def test_cordon_and_uncordon_while_leased() -> None:
    host = host_with(card("d", 1))
    lease = host.use()
    host.cordon("d")
    assert host.state("d") == "in-use"
    host.cordon("d", None)
    host.release(lease.id)
    host.scan()
    assert host.state("d") == "idle"
    lease = host.use()
    host.cordon("d")
    host.observe(gone=("d",))
    host.observe(card("d", 1))
    host.scan()
    assert (host.state("d"), host.device("d").reason) == ("offline", "cordoned")
    assert host.governor.leases[lease.id].alive


def test_uncordon_settles_by_what_else_is_wrong() -> None:
    host = host_with(card("d", 1))
    host.cordon("d")
    host.health("d", Health.UNHEALTHY, "xid 79")
    assert host.state("d") == "offline"
    host.cordon("d", None)
    assert host.state("d") == "faulty"
    assert host.body(host.cordon("d", None)) == "{}"
    assert host.error(host.cordon("none")) is ErrorKind.NOT_FOUND


def test_the_report_counts_each_state() -> None:
    host = host_with(*(card(f"d{index}", index) for index in range(4)))
    host.use()
    host.cordon("d1")
    host.health("d2", Health.UNHEALTHY)
    counts = host.governor.resources()[GPU]
    assert {name: number for name, number in counts.items() if number} == {
        "in-use": 1,
        "offline": 1,
        "faulty": 1,
        "idle": 1,
        "total": 4,
        "allocatable": 1,
    }
