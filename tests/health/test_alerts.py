"""Alert files: there while the alert is, whole, readable, without anything private."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hetero_agent.core.events import HealthJudged
from hetero_agent.core.model import Health, Opinion, Origin
from hetero_agent.health.alerts import Alerts
from tests.core.host import SECOND, Host, card, holder


class Rig:
    """A governor whose news go to the alerts in DIRECTORY."""

    def __init__(self, directory: Path) -> None:
        self.host = Host(reclaim_deadline=SECOND)
        self.host.ready(card("a", serial="S1"), card("b"))
        self.alerts = Alerts(directory, self.host.governor.devices)
        self.directory = directory / "alerts"

    def tell(self) -> None:
        self.alerts.publish(self.host.effects)
        self.host.effects.clear()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def content(self, device: str = "a") -> dict[str, object]:
        return dict(json.loads((self.directory / f"{device}.json").read_text()))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    one = Rig(tmp_path)
    one.alerts.start()
    one.tell()
    return one


def test_a_fault_has_a_file_until_it_is_over(rig: Rig) -> None:
    assert rig.names() == []
    rig.host.health("a", Health.UNHEALTHY, "Xid 79")
    rig.tell()
    assert rig.names() == ["a.json"]
    device = rig.host.device("a")
    assert rig.content() == {
        "device": "a",
        "serial": "S1",
        "resource": "v/gpu",
        "state": "faulty",
        "reason": "Xid 79",
        "health": "unhealthy",
        "health-reason": "Xid 79",
        "since": device.since.real,
        "lease": "",
        "evidence": {"xid": "79"},
    }
    rig.host.health("a", Health.SUSPECT, "hot")
    rig.tell()
    assert rig.names() == []
    rig.host.health("a", Health.UNHEALTHY, "Xid 48")
    rig.tell()
    assert rig.content()["reason"] == "Xid 48"
    rig.host.observe(gone=["a"])
    rig.tell()
    assert rig.names() == []


def test_everybody_can_read_it_and_nobody_write(rig: Rig) -> None:
    old = os.umask(0o077)
    try:
        rig.host.health("a", Health.UNHEALTHY)
        rig.tell()
    finally:
        os.umask(old)
    assert (rig.directory / "a.json").stat().st_mode & 0o7777 == 0o644
    assert rig.directory.stat().st_mode & 0o7777 == 0o755


def test_a_leased_device_that_fails_names_its_lease(rig: Rig) -> None:
    lease = rig.host.use(devices=("b",))
    rig.host.health("b", Health.UNHEALTHY, "Xid 79")
    rig.tell()
    content = rig.content("b")
    assert (content["state"], content["lease"]) == ("in-use", lease.id)


def test_a_lost_device_and_one_that_does_not_come_back_are_alerts_without_pids(rig: Rig) -> None:
    lease = rig.host.use(devices=("b",))
    rig.host.release(lease.id)
    for _ in range(3):
        rig.host.scan({"b": [holder(424242)]})
        rig.host.ticks(SECOND)
    rig.tell()
    assert rig.content("b")["reason"] == "reclaim-timeout"
    assert "424242" not in (rig.directory / "b.json").read_text()
    rig.host.scan()
    rig.tell()
    assert rig.names() == []
    rig.host.use(devices=("a",))
    rig.host.observe(gone=["a"])
    rig.tell()
    assert rig.content("a")["state"] == "lost"


def test_a_file_is_replaced_whole_when_its_words_change(rig: Rig) -> None:
    rig.host.health("a", Health.UNHEALTHY, "one")
    rig.tell()
    before = (rig.directory / "a.json").stat().st_ino
    rig.tell()
    assert (rig.directory / "a.json").stat().st_ino == before
    rig.host.health("a", Health.UNHEALTHY, "two")
    rig.tell()
    assert (rig.directory / "a.json").stat().st_ino != before
    assert rig.names() == ["a.json"]


def test_after_a_restart_files_are_as_the_devices_are(tmp_path: Path) -> None:
    (tmp_path / "alerts").mkdir()
    for name in ("a.json", "b.json", "unplugged.json", ".a.json.4242"):
        (tmp_path / "alerts" / name).write_text("{}")
    rig = Rig(tmp_path)
    said = Opinion(Health.UNHEALTHY, "still sick")
    rig.host.do(HealthJudged(rig.host.now(), Origin.KERNEL, {"a": said}))
    rig.tell()
    assert rig.content("b") == {}, "nothing is touched before the devices are known"
    rig.alerts.start()
    assert rig.names() == ["a.json"]
    assert rig.content("a")["reason"] == "still sick"


def test_a_directory_that_can_not_be_written_is_a_problem_and_no_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    (tmp_path / "alerts").write_text("a file")
    rig.alerts.start()
    rig.host.health("a", Health.UNHEALTHY)
    rig.tell()
    assert rig.alerts.problem.startswith(f"alerts can't be written to {tmp_path}/alerts: ")
    (tmp_path / "alerts").unlink()
    (tmp_path / "alerts").mkdir()
    rig.host.health("a", Health.UNHEALTHY, "again")
    rig.tell()
    assert (rig.names(), rig.alerts.problem) == (["a.json"], "")


def test_a_file_that_could_not_be_written_or_removed_is_so_with_the_next_news(rig: Rig) -> None:
    aside = rig.directory.with_name("aside")
    rig.directory.rename(aside)
    rig.directory.touch()
    for device in ("a", "b"):
        rig.host.health(device, Health.UNHEALTHY, "Xid 79")
        rig.tell()
    assert rig.alerts.problem
    rig.directory.unlink()
    aside.rename(rig.directory)
    rig.host.health("b", Health.UNHEALTHY, "Xid 48")
    rig.tell()
    assert (rig.names(), rig.alerts.problem) == (["a.json", "b.json"], "")
    rig.directory.rename(aside)
    rig.directory.touch()
    rig.host.observe(gone=["a"])
    rig.tell()
    assert rig.alerts.problem
    rig.directory.unlink()
    aside.rename(rig.directory)
    rig.host.health("b", Health.UNHEALTHY, "Xid 62")
    rig.tell()
    assert (rig.names(), rig.alerts.problem) == (["b.json"], "")
