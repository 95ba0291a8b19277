"""Signals: from the right paths, once per turn, seen by GLib's object manager client and busctl."""

from __future__ import annotations

import itertools
import subprocess
import threading
from dataclasses import replace
from typing import Any

import pytest
from gi.repository import Gio, GLib

from hetero_agent import names
from hetero_agent.bus import codec, publisher
from hetero_agent.core.effects import (
    ConflictSeen,
    DeviceChanged,
    HealthChanged,
    OrphanFound,
    StateChanged,
)
from hetero_agent.core.events import HealthSeen
from hetero_agent.core.model import Health
from hetero_agent.engine import instant
from tests.support.bus import PrivateBus
from tests.support.bus_service import RESOURCE, Service, record
from tests.support.calls import Client, V
from tests.support.wait import wait_until

PROPERTIES = "org.freedesktop.DBus.Properties"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"
PATH = names.device_path("0000:00:00.0")
ID = "0000:00:00.0"


def _settled(client: Client) -> None:
    """Everything that was queued before has arrived: the bus keeps order."""
    client.call(names.ROOT, "org.freedesktop.DBus.Peer", "Ping")


def test_glib_sees_a_hotplug(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service:
        context = GLib.MainContext()
        context.push_thread_default()
        try:
            connection = Gio.DBusConnection.new_for_address_sync(
                bus.address,
                Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION,
                None,
                None,
            )
            manager = Gio.DBusObjectManagerClient.new_sync(
                connection,
                Gio.DBusObjectManagerClientFlags.NONE,
                names.BUS_NAME,
                names.ROOT,
                None,
                None,
                None,
            )

            def paths() -> set[str]:
                while context.iteration(False):
                    pass
                return {one.get_object_path() for one in manager.get_objects()}

            assert paths() == {PATH}
            added = record(7)
            service.do(lambda: service.observe(added))
            path = names.device_path(added.id)
            wait_until(lambda: path in paths(), what="the new device in GLib's object manager")
            proxy = manager.get_interface(path, names.DEVICE)
            assert proxy.get_cached_property("Resource").unpack() == RESOURCE
            wait_until(
                lambda: paths() and proxy.get_cached_property("State").unpack() == "idle",
                what="PropertiesChanged reaching the proxy",
            )
            service.do(lambda: service.observe(gone=[added.id]))
            wait_until(lambda: paths() == {PATH}, what="the device gone from GLib's object manager")
            connection.close_sync(None)
        finally:
            context.pop_thread_default()


def test_busctl_monitor_sees_a_hotplug(bus: PrivateBus) -> None:
    with Service(bus) as service:
        command = ["busctl", f"--address={bus.address}", "monitor", names.BUS_NAME]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as monitor:
            assert monitor.stdout is not None
            seen: list[str] = []
            # a thread, since a line comes only with a message, and those before its beginning it does not see
            reader = threading.Thread(target=seen.extend, args=(monitor.stdout,))
            reader.start()
            numbers = itertools.count(1)

            def look() -> bool:
                service.do(lambda: service.observe(record(next(numbers))))
                return any("Member=InterfacesAdded" in line for line in list(seen))

            try:
                wait_until(look, what="InterfacesAdded in busctl monitor")
            finally:
                monitor.terminate()
                reader.join()


def test_added_and_removed_come_from_the_root(bus: PrivateBus) -> None:
    with Service(bus) as service, Client(bus) as client:
        service.do(lambda: service.observe(record(0, vendor="V", attributes={"memory": 7})))
        added = client.wait_for_signal(OBJECT_MANAGER, "InterfacesAdded")
        assert added.path == names.ROOT
        path, interfaces = added.body
        assert path == PATH
        assert interfaces.keys() == {names.DEVICE}
        assert interfaces[names.DEVICE]["Vendor"] == "V"
        assert interfaces[names.DEVICE]["Attributes"] == {"memory": 7}
        _settled(client)
        assert client.device(ID) == {**interfaces[names.DEVICE], **_changed(client, PATH)}
        service.do(lambda: service.observe(gone=[ID]))
        removed = client.wait_for_signal(OBJECT_MANAGER, "InterfacesRemoved")
        assert (removed.path, removed.body) == (names.ROOT, (PATH, [names.DEVICE]))
        assert client.devices() == {}


def _changed(client: Client, path: str) -> dict[str, Any]:
    """All changes announced for the object so far, later ones winning."""
    merged: dict[str, Any] = {}
    for one in client.signals(PROPERTIES, "PropertiesChanged", path):
        assert one.body[2] == []
        merged.update(one.body[1])
    return merged


def test_a_lease_from_birth_to_end(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, Client(bus) as client:
        lease, _ = client.allocate("r", RESOURCE)
        _settled(client)
        changes = client.signals(names.DEVICE, "StateChanged")
        assert [(one.path, *one.body[:3]) for one in changes] == [(PATH, "idle", "allocating", "")]
        assert changes[0].body[3]["trigger"] == "granted"
        added = client.signals(OBJECT_MANAGER, "InterfacesAdded")
        assert [(one.path, one.body[0], list(one.body[1])) for one in added] == [
            (names.ROOT, lease, [names.LEASE])
        ]
        assert _changed(client, PATH)["Lease"] == lease
        assert "AllocationCount" not in _changed(client, PATH)
        assert client.device(ID)["AllocationCount"] == 1

        # the news is there when the answer is
        client.confirm("c", lease)
        assert _changed(client, lease)["State"] == "active"
        assert _changed(client, PATH)["State"] == "in-use"

        client.release("x", lease)
        ended = client.wait_for_signal(names.MANAGER, "LeaseEnded")
        assert (ended.path, ended.body) == (names.ROOT, (lease, "released"))
        removed = client.wait_for_signal(OBJECT_MANAGER, "InterfacesRemoved")
        assert (removed.path, removed.body) == (names.ROOT, (lease, [names.LEASE]))
        wait_until(lambda: _changed(client, PATH)["Lease"] == "/", what="the device without lease")
        members = [one.member for one in client.signals() if one.path in (names.ROOT, lease)]
        assert members.index("LeaseEnded") < members.index("InterfacesRemoved")
        assert service.do(lambda: dict(service.engine.view.leases)) == {}


def test_properties_changed_goes_once_per_turn(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0), record(1)]) as service, Client(bus) as client:

        def churn() -> None:
            for number in range(50):
                service.observe(record(0, driver=f"d{number}", model="m"))

        service.do(churn)
        _settled(client)
        changed = client.signals(PROPERTIES, "PropertiesChanged", PATH)
        assert [one.body[1] for one in changed] == [{"Driver": "d49", "Model": "m"}]
        # marked as changed, but the same: nothing to say
        service.do(lambda: service.service.publisher.publish([DeviceChanged(ID), DeviceChanged("gone")]))
        _settled(client)
        assert len(client.signals(PROPERTIES, "PropertiesChanged")) == 1


@pytest.mark.parametrize("method", ["GetManagedObjects", "GetSnapshot"])
def test_a_reply_is_never_older_than_the_news_that_went_before_it(bus: PrivateBus, method: str) -> None:
    """Whoever takes the reply as the state of things would keep what the news had overtaken."""
    with Service(bus, devices=[record(0)]) as service, Client(bus) as client:
        # the caller is known, so that its next call is dispatched at once, and what it reads is at hand
        client.devices()
        client.manager("GetSnapshot", "u", 0)
        turns = service.service._turns
        run = turns.run

        def change_first() -> None:
            # a change in the same turn of the loop, before the call is dispatched
            if turns._ready:
                service.observe(record(0, driver="new"))
            run()

        service.service._connection.on_turn = change_first
        if method == "GetManagedObjects":
            seen = client.devices()[ID]["Driver"]
        else:
            _, rows = client.manager(method, "u", 0)
            seen = rows[0][9]["driver"]
        assert _changed(client, PATH)["Driver"] == "new"
        assert seen == "new"


def test_reports(bus: PrivateBus, monkeypatch: Any) -> None:
    monkeypatch.setattr(publisher, "REPORT_EVERY", 0.5)
    with Client(bus) as client, Service(bus, devices=[record(0)]) as service:
        first = client.wait_for_signal(names.MANAGER, "Report")
        assert first.path == names.ROOT
        version, epoch, _, complete, resources = first.body
        assert (version, epoch, complete, resources) == (1, "e1", False, {})
        wait_until(lambda: len(client.signals(names.MANAGER, "Report")) >= 2, what="the full report")
        _, _, generation, complete, resources = client.signals(names.MANAGER, "Report")[1].body
        assert complete is True
        assert resources[RESOURCE]["idle"] == 1
        assert resources[RESOURCE]["total"] == 1
        assert resources[RESOURCE]["allocatable"] == 1

        def several() -> None:
            for number in range(1, 20):
                service.observe(record(number))

        service.do(several)
        wait_until(
            lambda: client.signals(names.MANAGER, "Report")[-1].body[4][RESOURCE]["total"] == 20,
            what="the report of 20",
        )
        totals = [one.body[4][RESOURCE]["total"] for one in client.signals(names.MANAGER, "Report")[1:]]
        assert sorted(set(totals)) in ([1, 20], [1, 2, 20])
        generations = [one.body[2] for one in client.signals(names.MANAGER, "Report")]
        assert generations == sorted(generations)
        assert generations[-1] > generation
        count = len(totals)
        wait_until(lambda: len(client.signals(names.MANAGER, "Report")) > count + 2, what="reports anyhow")


def test_a_resource_without_devices_leaves_the_report(bus: PrivateBus) -> None:
    devices = [record(0), replace(record(1), resource="a.b/c")]
    with Service(bus, devices=devices) as service, Client(bus) as client:
        service.do(lambda: service.observe(gone=[record(1).id]))
        wait_until(
            lambda: (
                client.signals(names.MANAGER, "Report")
                and client.signals(names.MANAGER, "Report")[-1].body[4].keys() == {RESOURCE}
            ),
            what="a report without it",
        )


def test_health_event(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, Client(bus) as client:
        lease, _ = client.allocate("r", RESOURCE, 1, {"confirm": V("b", True)})
        seen = HealthSeen(instant(), "kernel", ID, Health.UNHEALTHY, "fell off the bus", {"xid": "79"})
        service.do(service.engine.submit, seen)
        event = client.wait_for_signal(names.MANAGER, "HealthEvent")
        assert event.path == names.ROOT
        assert event.body == (PATH, "unhealthy", "fell off the bus", lease, {"xid": "79"})
        wait_until(lambda: _changed(client, PATH).get("Health") == "unhealthy", what="the property")
        assert _changed(client, PATH)["Reason"] == "fell off the bus"


def test_the_other_signals(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, Client(bus) as client:
        lease = "ab" * 16
        service.do(
            service.service.publisher.publish,
            [
                ConflictSeen("intruder", lease, ID, "pid 7", "uid 0"),
                OrphanFound(ID, 3),
                HealthChanged(ID, "suspect", "hot", ""),
                StateChanged(ID, "idle", "occupied", "held", {"generation": 5, "trigger": "t"}),
            ],
        )
        conflict = client.wait_for_signal(names.MANAGER, "Conflict")
        assert (conflict.path, conflict.body) == (
            names.ROOT,
            ("intruder", names.lease_path(lease), PATH, "pid 7", "uid 0"),
        )
        orphan = client.wait_for_signal(names.MANAGER, "OrphanFound")
        assert (orphan.path, orphan.body) == (names.ROOT, (PATH, 3))
        health = client.wait_for_signal(names.MANAGER, "HealthEvent")
        assert health.body == (PATH, "suspect", "hot", "/", {})
        changed = client.wait_for_signal(names.DEVICE, "StateChanged")
        assert (changed.path, changed.body) == (
            PATH,
            ("idle", "occupied", "held", {"generation": 5, "trigger": "t"}),
        )


class _Full:
    """A socket that is full until told otherwise."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def send(self, data: Any) -> int:
        if self.full:
            raise BlockingIOError
        return int(self.real.send(data))


def test_when_much_waits_signals_are_merged_then_dropped(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, Client(bus) as client:
        connection = service.service._connection
        socket = _Full(connection._sock)

        def jam() -> None:
            connection._sock = socket
            body = codec.encode("sssa{sv}", ("", "", "x" * 100_000, {}))
            while connection.signal(PATH, names.DEVICE, "StateChanged", "sssa{sv}", body):
                assert connection._out_bytes < 17 * 1024 * 1024

        service.do(jam)
        assert connection.counters["signals_dropped"] == 1
        for number in range(20):
            service.do(lambda number=number: service.observe(record(0, driver=f"d{number}")))
        socket.full = False
        service.do(connection._flush)
        wait_until(lambda: _changed(client, PATH).get("Driver"), what="the change held back")
        changed = client.signals(PROPERTIES, "PropertiesChanged", PATH)
        assert [one.body[1] for one in changed] == [{"Driver": "d19"}]
        assert not service.service.lost.done()
