"""Several origins say something of one device's health; units suffer what their card has."""

from __future__ import annotations

import pytest

from hetero_agent.core.effects import HealthChanged, PrepareAccess, WatchHealth
from hetero_agent.core.events import Happened, HealthJudged, Note, ProviderGone
from hetero_agent.core.model import AuditKind, Health, OnFault, Opinion, Origin
from hetero_agent.core.settings import Settings
from tests.core.host import GPU, PART, SECOND, Host, card

H = Health


@pytest.fixture
def host() -> Host:
    """Two cards, one of them with two parts."""
    one = Host()
    parts = [card(f"c-p{number}", resource=PART, parent="c") for number in (0, 1)]
    one.ready(card("a"), card("c"), *parts)
    return one


def judge(host: Host, device: str, origin: Origin, health: Health, reason: str = "", **more: bool) -> None:
    said = Opinion(health, reason, {"by": str(origin)} if reason else {}, **more)
    host.do(HealthJudged(host.later(), origin, {device: said}))


def allocatable(host: Host, resource: str = GPU) -> int:
    return host.governor.resources()[resource]["allocatable"]


def test_the_worst_of_all_counts_each_with_its_own_reason(host: Host) -> None:
    judge(host, "a", Origin.PROBE, H.SUSPECT, "link is narrow")
    assert (host.device("a").health, host.device("a").health_reason) == (H.SUSPECT, "link is narrow")
    judge(host, "a", Origin.KERNEL, H.UNHEALTHY, "Xid 79")
    assert (host.state("a"), host.device("a").reason) == ("faulty", "Xid 79")
    host.health("a", H.UNHEALTHY, "the vendor says so")
    assert host.device("a").reason == "the vendor says so; Xid 79"
    judge(host, "a", Origin.KERNEL, H.HEALTHY)
    assert (host.state("a"), host.device("a").reason) == ("faulty", "the vendor says so")
    host.health("a", H.HEALTHY)
    assert (host.state("a"), host.device("a").health_reason) == ("idle", "link is narrow")
    judge(host, "a", Origin.PROBE, H.HEALTHY)
    assert (host.device("a").health, host.device("a").health_reason) == (H.HEALTHY, "")


def test_users_hear_of_a_fault_and_of_its_end_whatever_lies_between(host: Host) -> None:
    lease = host.use(devices=("a",))
    judge(host, "a", Origin.KERNEL, H.UNHEALTHY, "Xid 79")
    assert host.of(HealthChanged) == [HealthChanged("a", "unhealthy", "Xid 79", lease.id, {"by": "kernel"})]
    judge(host, "a", Origin.PROBE, H.SUSPECT, "hot")
    judge(host, "a", Origin.KERNEL, H.HEALTHY)
    assert host.device("a").health is H.SUSPECT
    assert host.of(HealthChanged) == []
    judge(host, "a", Origin.PROBE, H.HEALTHY)
    assert [one.health for one in host.of(HealthChanged)] == ["healthy"]


def test_a_doubt_is_told_to_nobody_and_frees_nothing(host: Host) -> None:
    host.use(devices=("a",), on_fault=OnFault.KILL)
    judge(host, "a", Origin.PROBE, H.SUSPECT, "no answer", confirming=True)
    assert (host.state("a"), host.of(HealthChanged)) == ("in-use", [])


def test_a_fault_ends_a_lease_that_asked_for_it_whoever_tells(host: Host) -> None:
    lease = host.use(devices=("a",), on_fault=OnFault.KILL)
    judge(host, "a", Origin.PROBE, H.UNHEALTHY, "unresponsive")
    assert (host.state("a"), host.governor.leases[lease.id].result) == ("reclaiming", "failed")


def test_a_first_sign_is_counted_but_not_granted_until_it_is_confirmed(host: Host) -> None:
    host.observe(gone=["c", "c-p0", "c-p1"])
    assert allocatable(host) == 1
    judge(host, "a", Origin.PROBE, H.SUSPECT, "no answer", confirming=True)
    assert (host.state("a"), allocatable(host)) == ("idle", 1)
    token = host.ask()
    assert token not in host.answers  # it waits for the confirmation, like for a scan
    judge(host, "a", Origin.PROBE, H.HEALTHY)
    assert len(host.of(PrepareAccess)) == 1


def test_a_confirmed_suspicion_is_neither_granted_nor_counted(host: Host) -> None:
    judge(host, "a", Origin.PROBE, H.SUSPECT, "link is narrow")
    assert (host.state("a"), allocatable(host)) == ("idle", 1)
    host.observe(gone=["c", "c-p0", "c-p1"])
    assert allocatable(host) == 0
    token = host.ask()
    assert str(host.error(token)) == "Unavailable"


def test_a_cards_fault_takes_its_units_and_a_units_fault_only_itself(host: Host) -> None:
    judge(host, "c", Origin.KERNEL, H.UNHEALTHY, "Xid 79")
    assert host.states() == {"a": "idle", "c": "faulty", "c-p0": "faulty", "c-p1": "faulty"}
    assert host.device("c-p0").reason == "its card c: Xid 79"
    judge(host, "c", Origin.KERNEL, H.HEALTHY)
    assert set(host.states().values()) == {"idle"}
    judge(host, "c-p1", Origin.KERNEL, H.UNHEALTHY, "Xid 79")
    assert host.states() == {"a": "idle", "c": "idle", "c-p0": "idle", "c-p1": "faulty"}


def test_a_unit_that_comes_to_a_sick_card_is_sick_and_one_whose_card_goes_is_not(host: Host) -> None:
    judge(host, "c", Origin.PROBE, H.UNHEALTHY, "off the bus")
    host.observe(card("c-p2", resource=PART, parent="c"))
    host.scan()
    assert host.state("c-p2") == "faulty"
    host.observe(gone=["c"])
    assert host.states() == {"a": "idle", "c-p0": "idle", "c-p1": "idle", "c-p2": "idle"}


def test_a_fault_of_the_card_is_told_to_the_unit_lease(host: Host) -> None:
    lease = host.use(PART, devices=("c-p0",))
    judge(host, "c", Origin.KERNEL, H.UNHEALTHY, "Xid 79")
    told = {one.device: one.lease for one in host.of(HealthChanged)}
    assert told == {"c": "", "c-p0": lease.id, "c-p1": ""}


def test_a_device_waits_for_its_first_probe_if_there_are_probes() -> None:
    host = Host(Settings(probes=True))
    host.ready(card("a"))
    assert (host.state("a"), host.device("a").reason) == ("probing", "not probed")
    judge(host, "a", Origin.KERNEL, H.HEALTHY)
    assert host.state("a") == "probing"
    judge(host, "a", Origin.PROBE, H.HEALTHY)
    assert host.state("a") == "idle"


def test_a_first_probe_that_fails_or_is_impossible_ends_the_wait_too() -> None:
    host = Host(Settings(probes=True))
    host.ready(card("a"), card("b"))
    judge(host, "a", Origin.PROBE, H.UNKNOWN, "no worker")
    judge(host, "b", Origin.PROBE, H.SUSPECT, "no answer", confirming=True)
    assert host.states() == {"a": "idle", "b": "idle"}
    assert host.device("a").health is H.UNKNOWN


def test_what_is_to_be_probed_is_told() -> None:
    host = Host()
    record = card("a")
    host.ready(record)
    assert [one for one in host.effects if isinstance(one, WatchHealth)] == [WatchHealth("a", record)]
    host.observe(record)
    assert host.of(WatchHealth) == []
    changed = card("a", driver="nvidia")
    host.observe(changed)
    assert host.of(WatchHealth) == [WatchHealth("a", changed)]
    host.cordon("a")
    host.cordon("a", None)
    assert host.of(WatchHealth) == [WatchHealth("a", changed, repaired=True)]
    host.use(devices=("a",))
    host.observe(gone=["a"])
    assert (host.state("a"), host.of(WatchHealth)) == ("lost", [WatchHealth("a", None)])
    host.observe(changed)
    assert host.of(WatchHealth) == [WatchHealth("a", changed)]
    host.observe(gone=["a"])
    assert host.of(WatchHealth) == [WatchHealth("a", None)]


def history(host: Host, device: str) -> list[tuple[str, str]]:
    return [(one.trigger, one.reason) for one in host.governor.history(device, 20)]


def test_what_befell_the_host_is_in_the_histories_it_concerns(host: Host) -> None:
    host.use(devices=("a",))
    host.do(Happened(host.later(), "daemon-reload", "systemd read its units again", leased=True))
    assert history(host, "a")[-1] == ("daemon-reload", "systemd read its units again")
    assert "daemon-reload" not in dict(history(host, "c"))
    host.do(Happened(host.later(), "resume", "the machine slept"))
    assert all(history(host, one)[-1] == ("resume", "the machine slept") for one in host.governor.devices)
    [record] = [one for one in host.audits(AuditKind.CORRELATION) if one.device == "a"]
    assert (record.from_state, record.to_state, record.lease != "") == ("in-use", "in-use", True)


def test_a_change_of_driver_is_in_the_history() -> None:
    host = Host()
    host.ready(card("a", driver="nouveau"))
    host.observe(card("a", driver="nvidia"))
    assert history(host, "a")[-1] == ("driver-change", "nouveau -> nvidia")
    host.observe(card("a", driver=""))
    assert history(host, "a")[-1] == ("driver-change", "nvidia -> none")


def test_a_provider_that_goes_is_in_the_history_of_leased_devices_too() -> None:
    host = Host()
    host.ready()
    host.observe(card("v", source="sim", health=H.HEALTHY), complete=True, source="sim")
    host.scan()
    host.use()
    host.do(ProviderGone(host.later(), "sim"))
    assert history(host, "v")[-1] == ("provider-gone", "provider sim")
    judge(host, "v", Origin.PROBE, H.SUSPECT, "node is gone")
    host.do(ProviderGone(host.later(SECOND), "sim", back=True))
    assert history(host, "v")[-1] == ("provider-back", "provider sim")
    assert (host.device("v").health, host.device("v").health_reason) == (H.SUSPECT, "node is gone")


def test_the_histories_survive_a_restart(host: Host) -> None:
    host.do(Happened(host.later(), "resume", "the machine slept"))
    host.restart()
    host.observe(card("a"), complete=True)
    assert ("resume", "the machine slept") in history(host, "a")


def test_a_note_about_a_device_has_its_lease(host: Host) -> None:
    lease = host.use(devices=("a",))
    host.do(Note(host.later(), AuditKind.APPLICATION_FAULT, "Xid 31", 5, "a", {"code": "31"}))
    [record] = host.audits(AuditKind.APPLICATION_FAULT)
    assert (record.device, record.lease, record.reason) == ("a", lease.id, "Xid 31")
    assert record.extra == {"EVIDENCE_code": "31"}
    assert host.device("a").health is H.HEALTHY
