"""The harness itself: the bus is private, real and reachable by other users."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.agent import MEMBER, OUTSIDER
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V, busctl, busctl_json
from tests.support.hold import HoldingProcess

BUS = "org.freedesktop.DBus"
PATH = "/org/freedesktop/DBus"
DBUS = (BUS, PATH, BUS)


def test_bus_is_a_system_bus_with_a_guid_that_changes_on_restart(bus: PrivateBus) -> None:
    first = busctl_json(bus, "call", *DBUS, "GetId")["data"][0]
    assert first == bus.guid
    bus.restart()
    second = busctl_json(bus, "call", *DBUS, "GetId")["data"][0]
    assert second == bus.guid != first


def test_other_users_reach_the_bus_but_own_nothing(bus: PrivateBus) -> None:
    reply = busctl_json(bus, "call", *DBUS, "GetConnectionUnixUser", "s", "org.freedesktop.DBus", uid=OUTSIDER)
    assert reply["type"] == "u"
    with Client(bus, uid=OUTSIDER) as nobody:
        uid = nobody.call(PATH, BUS, "GetConnectionUnixUser", "s", nobody.unique_name, destination=BUS)
        assert uid == OUTSIDER
        with pytest.raises(CallError) as caught:
            nobody.call(PATH, BUS, "RequestName", "su", "org.example.Mine", 4, destination=BUS)
        assert caught.value.name == "org.freedesktop.DBus.Error.AccessDenied"


def test_client_has_exactly_the_groups_asked_for(bus: PrivateBus) -> None:
    with Client(bus, uid=MEMBER, groups=(60, 7)) as one:
        found = one.call(PATH, BUS, "GetConnectionCredentials", "s", one.unique_name, destination=BUS)
    assert found["UnixUserID"] == MEMBER
    assert sorted(found["UnixGroupIDs"]) == sorted([MEMBER, 7, 60])


def test_busctl_reports_an_error(bus: PrivateBus) -> None:
    done = busctl(bus, "call", *DBUS, "NoSuchMethod")
    assert done.returncode == 1
    assert "NoSuchMethod" in done.stderr


def test_variants_travel(bus: PrivateBus) -> None:
    assert V("a{sv}", {"a": V("u", 1)}).print_(True) == "{'a': <uint32 1>}"


def test_holding_process_opens_when_told_and_its_child_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.touch()
    with HoldingProcess(path, child=True, later=True) as process:
        assert not _has_open(process.pid, path)
        process.open()
        assert _has_open(process.pid, path)
        process.kill()
        assert _has_open(process.child, path)
        process.kill_child()


def _has_open(pid: int, path: Path) -> bool:
    fds = Path(f"/proc/{pid}/fd")
    return any(fd.readlink() == path for fd in fds.iterdir())
