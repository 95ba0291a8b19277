"""Calls from outside: what is answered, retries, standard errors, what fails alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from hetero_agent import __version__, names
from hetero_agent.bus import dispatcher
from hetero_agent.core.effects import ErrorKind, Refusal
from tests.support.agent import GROUP_GID, MEMBER
from tests.support.bus import PrivateBus
from tests.support.bus_service import RESOURCE, Service, record, with_limits
from tests.support.calls import CallError, Client, V, busctl, receive_all
from tests.support.wait import wait_until

DEVICE = names.device_path("0000:00:03.0")
PROPERTIES = "org.freedesktop.DBus.Properties"


@pytest.fixture(scope="module")
def client(service: Service) -> Any:
    with Client(service.bus, MEMBER, [GROUP_GID]) as one:
        yield one


def _error(client: Client, *call: Any) -> str:
    with pytest.raises(CallError) as caught:
        client.call(*call)
    return caught.value.name


@pytest.mark.parametrize(
    ("path", "interface", "member", "signature", "values", "error"),
    [
        ("/nowhere", names.MANAGER, "GetSnapshot", "u", [0], "UnknownObject"),
        (names.device_path("nope"), names.DEVICE, "GetNodes", "", [], "UnknownObject"),
        (names.lease_path("ab" * 16), names.LEASE, "GetManifest", "", [], "UnknownObject"),
        (names.DEVICES + "/_zz", names.DEVICE, "GetNodes", "", [], "UnknownObject"),
        (DEVICE.replace("_3a", "_3A", 1), names.DEVICE, "GetNodes", "", [], "UnknownObject"),
        (names.ROOT, names.DEVICE, "GetNodes", "", [], "UnknownInterface"),
        (DEVICE, names.MANAGER, "GetSnapshot", "u", [0], "UnknownInterface"),
        (DEVICE, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", "", [], "UnknownInterface"),
        (names.ROOT, names.MANAGER, "GetSnapshot", "", [], "InvalidArgs"),
        (names.ROOT, names.MANAGER, "GetSnapshot", "s", ["0"], "InvalidArgs"),
        (names.ROOT, names.MANAGER, "Allocate", "ssu", ["r", RESOURCE, 1], "InvalidArgs"),
        (names.ROOT, PROPERTIES, "Get", "ss", [names.MANAGER, "Nope"], "UnknownProperty"),
        (names.ROOT, PROPERTIES, "Get", "ss", ["no.such", "Epoch"], "UnknownInterface"),
        (names.ROOT, PROPERTIES, "GetAll", "s", ["no.such"], "UnknownInterface"),
        (names.ROOT, PROPERTIES, "Set", "ssv", [names.MANAGER, "Epoch", V("s", "x")], "PropertyReadOnly"),
        (names.LOG_CONTROL_PATH, PROPERTIES, "Set", "ssv", [names.LOG_CONTROL, "LogLevel", V("u", 1)],
         "InvalidArgs"),
    ],
)  # fmt: skip
def test_standard_errors(
    client: Client, path: str, interface: str, member: str, signature: str, values: list[Any], error: str
) -> None:
    assert _error(client, path, interface, member, signature, *values) == "org.freedesktop.DBus.Error." + error


def test_a_member_outside_the_policy_does_not_arrive(service: Service, client: Client) -> None:
    assert _error(client, names.ROOT, names.MANAGER, "Nope", "") == "org.freedesktop.DBus.Error.AccessDenied"
    # what the policy would let through and nobody has
    methods = service.service._dispatcher._methods
    kept = methods.pop((names.MANAGER, "GetConflicts"))
    try:
        assert _error(client, names.ROOT, names.MANAGER, "GetConflicts", "").endswith("UnknownMethod")
    finally:
        methods[names.MANAGER, "GetConflicts"] = kept


def test_validation_comes_before_authorization(service: Service) -> None:
    with Client(service.bus, 65534, listen=False) as outsider:
        assert _error(outsider, names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", "", RESOURCE, 1, {}) == (
            "InvalidArgument"
        )
        assert _error(outsider, names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", "r", RESOURCE, 1, {}) == (
            "NotAuthorized"
        )


def test_the_same_call_twice_gets_the_same_bytes(client: Client) -> None:
    arguments = ("ssua{sv}", "twice", RESOURCE, 2, {"label": V("s", "x"), "confirm": V("b", True)})
    first = client.reply(names.ROOT, names.MANAGER, "Allocate", *arguments)
    again = client.reply(names.ROOT, names.MANAGER, "Allocate", *arguments)
    assert first.type == "(oa{sv})"
    assert first.bytes == again.bytes
    other = ("ssua{sv}", "twice", RESOURCE, 2, {"label": V("s", "y")})
    assert _error(client, names.ROOT, names.MANAGER, "Allocate", *other) == "RequestConflict"
    lease = first.value[0]
    assert client.call(lease, names.LEASE, "GetRequest") == {
        "request-id": "twice",
        "resource": RESOURCE,
        "count": 2,
        "label": "x",
        "confirm": True,
    }
    manifest = client.call(lease, names.LEASE, "GetManifest")
    assert manifest == first.value[1]
    assert manifest["confirm-by"] == 0
    properties = client.properties(lease, names.LEASE)
    assert properties["State"] == "active"
    assert properties["OwnerUid"] == MEMBER
    assert properties["Devices"] == [names.device_path(one) for one in manifest["devices"]]
    assert client.release("twice", lease) is True
    assert client.release("twice", lease) is True
    assert client.release("again", lease) is False
    assert _error(client, names.ROOT, names.MANAGER, "Allocate", *arguments) == "RequestSpent"


def test_a_hundred_at_once_get_eight_devices(bus: PrivateBus) -> None:
    with (
        Service(bus, with_limits(calls_per_caller=128), [record(n) for n in range(8)]) as service,
        Client(bus, MEMBER, [GROUP_GID]) as client,
    ):
        arguments = (names.ROOT, names.MANAGER, "Allocate", "ssua{sv}")
        numbers = [client.send(*arguments, f"r{n}", RESOURCE, 1, {}) for n in range(100)]
        good, bad = receive_all(client, numbers)
        assert len(good) == 8
        assert {one.name for one in bad} == {"Unavailable"}
        devices = {one.value[1]["devices"][0] for one in good}
        assert devices == {record(n).id for n in range(8)}
        for number, one in enumerate(good):
            client.release(f"x{number}", one.value[0])
        wait_until(lambda: service.do(lambda: not service.engine.view.leases), what="devices back")
        numbers = [client.send(*arguments, "same", RESOURCE, 1, {}) for _ in range(100)]
        good, bad = receive_all(client, numbers)
        assert bad == []
        assert len({one.bytes for one in good}) == 1
        assert len(good) == 100


def test_explain_grants_nothing(client: Client) -> None:
    summary, devices = client.manager("Explain", "sua{sv}", RESOURCE, 1, {})
    assert summary["verdict"] == "now"
    assert len(summary["chosen"]) == 1
    assert len(devices) == 16
    assert [device[1] for device in devices if device[0] == summary["chosen"][0]] == ["idle"]
    summary, _ = client.manager("Explain", "sua{sv}", RESOURCE, 17, {})
    assert summary["verdict"] == "never"


def test_cordon_and_uncordon(service: Service, client: Client) -> None:
    with Client(service.bus) as root:
        root.call(DEVICE, names.DEVICE, "Cordon", "ss", "c1", "broken fan")
        assert client.device("0000:00:03.0")["Cordoned"] is True
        assert client.device("0000:00:03.0")["State"] == "offline"
        assert _error(root, DEVICE, names.DEVICE, "Cordon", "ss", "c2", "") == "InvalidArgument"
        root.call(DEVICE, names.DEVICE, "Uncordon", "s", "c3")
        assert client.device("0000:00:03.0")["Cordoned"] is False
        changed = [one.body[1] for one in root.signals(PROPERTIES, "PropertiesChanged", DEVICE)]
        assert [one["Cordoned"] for one in changed if "Cordoned" in one] == [True, False]
        words = [one["Cordon"] for one in changed if "Cordon" in one]
        assert [(one.get("reason"), one.get("uid")) for one in words] == [("broken fan", 0), (None, None)]
        assert abs(words[0]["since"] / 1e6 - time.time()) < 100


def test_uncordon_of_a_device_that_is_not_there(service: Service, client: Client) -> None:
    away = record(77)
    path = names.device_path(away.id)
    with Client(service.bus) as root:
        service.do(lambda: service.observe(away))
        root.call(path, names.DEVICE, "Cordon", "ss", "a1", "in the post")
        service.do(lambda: service.observe(gone=[away.id]))
        assert _error(root, path, names.DEVICE, "GetNodes", "").endswith("UnknownObject")
        assert _error(client, path, names.DEVICE, "Uncordon", "s", "a2") == "NotAuthorized"
        for _ in range(2):
            assert root.call(path, names.DEVICE, "Uncordon", "s", "a3") is None
        assert _error(root, path, names.DEVICE, "Uncordon", "s", "a4") == "NotFound"
        assert _error(root, names.DEVICES + "/_zz", names.DEVICE, "Uncordon", "s", "a5").endswith(
            "UnknownObject"
        )
        service.do(lambda: service.observe(away))
        assert root.device(away.id)["Cordon"] == {}
        service.do(lambda: service.observe(gone=[away.id]))


def test_reap_of_nothing(service: Service, client: Client) -> None:
    with Client(service.bus) as root:
        assert (
            _error(root, names.ROOT, names.MANAGER, "Reap", "soa(ut)", "r", names.device_path("nope"), [(1, 1)])
            == "NotFound"
        )
        with pytest.raises(CallError) as caught:
            root.manager("Reap", "soa(ut)", "r", "/", [(1, 1)])
        assert caught.value.name == "InvalidArgument"


def test_what_comes_later_says_so(service: Service) -> None:
    with Client(service.bus, listen=False) as root:
        for call in (
            ("Register", "susa{sv}", "r", 1, "k", {}),
            ("Reconcile", "suua{oao}", "r", 0, 1, {}),
            ("GetConflicts", ""),
            ("Allocate", "ssua{sv}", "w", RESOURCE, 1, {"wait": V("u", 5)}),
        ):
            assert _error(root, names.ROOT, names.MANAGER, *call) == "NotSupported"


def test_snapshot_pages(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(n) for n in range(300)]), Client(bus, 65534, listen=False) as client:
        header, first = client.manager("GetSnapshot", "u", 0)
        assert {key: header[key] for key in ("page", "pages", "total", "epoch", "complete")} == {
            "page": 0,
            "pages": 2,
            "total": 300,
            "epoch": "e1",
            "complete": True,
        }
        _, second = client.manager("GetSnapshot", "u", 1)
        ids = [row[1] for row in first + second]
        assert (len(first), len(second)) == (256, 44)
        assert ids == sorted(record(n).id for n in range(300))
        with pytest.raises(CallError) as caught:
            client.manager("GetSnapshot", "u", 2)
        assert caught.value.name == "InvalidArgument"
        assert "2 pages" in caught.value.text
        assert len(client.devices()) == 300


def test_manager_properties(service: Service, client: Client) -> None:
    found = client.properties(names.ROOT, names.MANAGER)
    assert found["AgentVersion"] == __version__
    assert found["ProtocolVersions"] == [1]
    assert found["Epoch"] == "e1"
    assert found["Ready"] is True
    assert found["Devices"] == 16
    assert found["Resources"][RESOURCE]["total"] == 16
    limits = service.config.limits
    assert found["MaxLeases"] == limits.leases
    assert found["MaxCallsPerCaller"] == limits.calls_per_caller
    assert found["ConfirmWithin"] == 30_000_000
    assert client.call(names.ROOT, PROPERTIES, "Get", "ss", "", "Epoch") == "e1"
    assert client.call(names.ROOT, PROPERTIES, "GetAll", "s", "") == {
        **found,
        "Generation": found["Generation"],
    }


def test_one_unreadable_property_does_not_spoil_the_others(service: Service, client: Client) -> None:
    kind = service.service._manager._mirror.device
    readers = kind._readers

    def broken(*_: Any) -> str:
        raise OSError("sick")

    kind._readers = tuple(
        (name, signature, emits, broken if name == "Model" else getter)
        for name, signature, emits, getter in readers
    )
    try:
        found = client.device("0000:00:03.0")
        assert "Model" not in found
        assert found["Id"] == "0000:00:03.0"
        assert _error(client, DEVICE, PROPERTIES, "Get", "ss", names.DEVICE, "Model") == "Internal"
        service.do(lambda: service.observe(record(99)))
        assert "Model" not in client.devices()[record(99).id]
    finally:
        kind._readers = readers
        service.do(lambda: service.observe(gone=[record(99).id]))
    assert client.device("0000:00:03.0")["Model"] == ""


def test_a_handler_that_fails_shows_no_traceback(service: Service, client: Client) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    view = type(service.engine.view)
    kept = view.explain
    view.explain = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(CallError) as caught:
            client.manager("Explain", "sua{sv}", RESOURCE, 1, {})
    finally:
        view.explain = kept  # type: ignore[method-assign]
    assert caught.value.name == "Internal"
    assert "secret" not in caught.value.text
    assert "Traceback" not in caught.value.text
    assert client.manager("Explain", "sua{sv}", RESOURCE, 1, {})


def test_calls_under_way_are_answered_when_the_agent_stops(bus: PrivateBus) -> None:
    service = Service(bus, devices=[record(0)])
    with Client(bus) as client:

        async def never(_: Any) -> str:
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        service.engine.call = never  # type: ignore[method-assign,assignment]
        number = client.send(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", "r", RESOURCE, 1, {})
        wait_until(lambda: service.do(lambda: bool(service.service._dispatcher._tasks)), what="the call")
        service.close()
        with pytest.raises(CallError) as caught:
            client.receive(number)
        assert caught.value.name == "Internal"
        assert "stops" in caught.value.text


def test_no_call_waits_for_ever(bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "CALL_DEADLINE", 0.2)
    with Service(bus, devices=[record(0)]) as service, Client(bus) as client:
        release = service.do(asyncio.Event)

        async def slow(_: Any) -> str:
            await release.wait()
            raise Refusal(ErrorKind.UNAVAILABLE, "too late to be heard")

        service.engine.call = slow  # type: ignore[method-assign,assignment]
        number = client.send(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", "r", RESOURCE, 1, {})
        with pytest.raises(CallError) as caught:
            client.receive(number)
        assert caught.value.name == "Timeout"
        service.do(release.set)
        wait_until(lambda: service.do(lambda: not service.service._turns._clients), what="all calls done")


def test_calls_before_the_name_is_owned(bus: PrivateBus) -> None:
    with Service(bus) as service, Client(bus) as client:
        service.do(lambda: setattr(service.service._connection, "on_call", service.service._too_early))
        assert _error(client, names.ROOT, names.MANAGER, "GetSnapshot", "u", 0) == "NotReady"


def test_log_level(service: Service) -> None:
    path, interface = names.LOG_CONTROL_PATH, names.LOG_CONTROL
    service.levels.clear()
    done = busctl(service.bus, "set-property", names.BUS_NAME, path, interface, "LogLevel", "s", "debug")
    assert done.returncode == 0, done.stderr
    assert service.levels == ["debug"]
    with Client(service.bus) as root:
        assert root.properties(path, interface) == {
            "LogLevel": "debug",
            "LogTarget": "journal",
            "SyslogIdentifier": "hetero-agent",
        }
        for name, value in (("LogLevel", "loud"), ("LogTarget", "console")):
            assert (
                _error(root, path, PROPERTIES, "Set", "ssv", interface, name, V("s", value))
                == "InvalidArgument"
            )


def test_reload_changes_limits_and_group(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, Client(bus, MEMBER, [GROUP_GID]) as client:
        config = with_limits(leases=7, calls_per_caller=3)
        service.run(service.service.reload(config))
        changed = client.wait_for_signal(PROPERTIES, "PropertiesChanged", names.ROOT)
        assert changed.body == (names.MANAGER, {"MaxLeases": 7, "MaxCallsPerCaller": 3}, [])
        service.run(
            service.service.reload(
                dataclasses.replace(config, agent=dataclasses.replace(config.agent, group="no-such-group"))
            )
        )
        with pytest.raises(CallError) as caught:
            client.allocate("r", RESOURCE)
        assert caught.value.name == "NotAuthorized"
        assert "group no-such-group does not exist" in caught.value.text


def test_ping_goes_through_the_bus(service: Service) -> None:
    service.run(service.service.ping())


def test_the_name_is_not_shared(service: Service) -> None:
    with pytest.raises(OSError, match="has an owner already"):
        Service(service.bus)


def test_loss_of_the_bus_is_told(bus: PrivateBus) -> None:
    service = Service(bus)
    lost = service.service.lost
    assert not lost.done()
    bus.stop()
    wait_until(lost.done, what="the loss")
    assert lost.result() == "the bus closed the connection"
    service.close()
