"""Bindings: who may bind what, and the end of connections and units."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_agent import names
from hetero_agent.bus import codec, units
from hetero_agent.bus import owners as owners_module
from hetero_agent.bus.callers import groups_of
from hetero_agent.bus.transport import SIGNAL, CallFailed, Incoming
from hetero_agent.core.events import OwnerGone
from hetero_agent.core.model import Binding, ConnectionRef, ProcessRef, UnitRef
from hetero_agent.core.ports import ProcessFacts
from tests.support.agent import GROUP_GID, MEMBER, OTHER_MEMBER
from tests.support.bus import PrivateBus
from tests.support.bus_service import RESOURCE, Service, record
from tests.support.calls import CallError, Client, V
from tests.support.systemd import POLICY, FakeSystemd
from tests.support.wait import wait_until

RUN = "0" * 31 + "1"
NEXT_RUN = "0" * 31 + "2"
UNIT = "job.service"


@pytest.fixture
def unit_bus() -> Iterator[PrivateBus]:
    private = PrivateBus(extra=POLICY)
    yield private
    private.close()


def _gone(service: Service) -> list[tuple[str, str]]:
    return [(one.lease, one.how) for one in service.events if isinstance(one, OwnerGone)]


def _state(client: Client, lease: str) -> str:
    return str(client.properties(lease, names.LEASE)["State"])


def test_a_connection_that_ends(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, Client(bus) as observer:
        with Client(bus, MEMBER, [GROUP_GID], listen=False) as client:
            lease, _ = client.allocate("r", RESOURCE, 1, {"connection": V("b", True)})
            assert client.call(lease, names.LEASE, "GetBinding") == {"connection": client.unique_name}
            client.confirm("c", lease)
            assert client.call(lease, names.LEASE, "GetBinding") == {"connection": client.unique_name}
            client.kill()
            ended = observer.wait_for_signal(names.MANAGER, "LeaseEnded")
            assert ended.body == (lease, "owner-gone")
        assert _gone(service) == [(names.lease_id_of(lease), "connection")]


def test_connections_of_the_past(bus: PrivateBus) -> None:
    with Service(bus) as service, Client(bus) as client:
        owners, guid = service.service.owners, bus.guid
        service.do(owners.watch, "lives", Binding(connection=ConnectionRef(client.unique_name, guid)))
        service.do(owners.watch, "never", Binding(connection=ConnectionRef(":1.99999", guid)))
        service.do(owners.watch, "other bus", Binding(connection=ConnectionRef(client.unique_name, "0" * 32)))
        wait_until(lambda: len(_gone(service)) == 2, what="two ends")
        assert sorted(_gone(service)) == [("never", "connection"), ("other bus", "connection")]
        service.do(owners.watch, "forgotten", Binding(connection=ConnectionRef(client.unique_name, guid)))
        service.do(owners.unwatch, "forgotten")
        client.kill()
        wait_until(lambda: len(_gone(service)) == 3, what="the third end")
        assert _gone(service)[2] == ("lives", "connection")
        assert service.do(lambda: (dict(owners._bound), dict(owners._leases))) == ({}, {})


def test_a_connection_of_the_past_that_the_bus_does_not_tell_of_at_once(
    bus: PrivateBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners_module, "_RETRY", 0.05)
    with Service(bus) as service:
        owners = service.service.owners
        call, asked = owners._connection.call, []

        async def busy(*arguments: Any, **more: Any) -> list[Any]:
            asked.append(arguments)
            if len(asked) < 3:
                raise CallFailed("org.freedesktop.DBus.Error.Timeout", "no reply")
            return await call(*arguments, **more)

        monkeypatch.setattr(owners._connection, "call", busy)
        service.do(owners.watch, "never", Binding(connection=ConnectionRef(":1.99999", bus.guid)))
        wait_until(lambda: _gone(service), what="its end")
        assert len(asked) == 3


def test_which_processes_may_be_bound(bus: PrivateBus) -> None:
    with (
        Service(bus, devices=[record(0), record(1)]),
        Client(bus, MEMBER, [GROUP_GID], listen=False) as client,
        Client(bus, OTHER_MEMBER, [GROUP_GID], listen=False) as other,
        Client(bus, listen=False) as root,
    ):
        for pid, error in ((other.pid, "NotAuthorized"), (1, "NotAuthorized"), (2**31 - 1, "InvalidArgument")):
            with pytest.raises(CallError) as caught:
                client.allocate("r", RESOURCE, 1, {"pid": V("u", pid)})
            assert caught.value.name == error
        lease, _ = client.allocate("r", RESOURCE, 1, {"pid": V("u", client.pid)})
        bound = client.call(lease, names.LEASE, "GetBinding")
        start = int(Path(f"/proc/{client.pid}/stat").read_text().rpartition(")")[2].split()[19])
        assert bound == {"pid": client.pid, "start": start}
        with pytest.raises(CallError) as caught:
            client.confirm("c", lease, {"pid": V("u", other.pid)})
        assert caught.value.name == "NotAuthorized"
        assert client.call(lease, names.LEASE, "GetBinding") == bound
        root.confirm("c", lease, {"pid": V("u", other.pid), "ttl": V("t", 60_000_000)})
        bound = client.call(lease, names.LEASE, "GetBinding")
        assert (bound["pid"], bound["ttl"]) == (other.pid, 60_000_000)
        assert client.properties(lease, names.LEASE)["Deadline"] > 0


def test_units_without_systemd(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]), Client(bus, listen=False) as root:
        with pytest.raises(CallError) as caught:
            root.allocate("r", RESOURCE, 1, {"unit": V("s", UNIT)})
        assert caught.value.name == "NotSupported"
        assert "systemd is not on this bus" in caught.value.text


def test_units_of_others(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]), Client(bus, MEMBER, [GROUP_GID], listen=False) as client:
        with pytest.raises(CallError) as caught:
            client.allocate("r", RESOURCE, 1, {"unit": V("s", "sshd.service")})
        assert caught.value.name == "NotAuthorized"


def test_a_unit_that_is_not_running(unit_bus: PrivateBus) -> None:
    with (
        FakeSystemd(unit_bus) as systemd,
        Service(unit_bus, devices=[record(0)]),
        Client(unit_bus, listen=False) as root,
    ):
        systemd.units["dead.service"] = ("inactive", RUN)
        for unit, says in (("dead.service", "is inactive; start it first"), ("no.service", "is not running")):
            with pytest.raises(CallError) as caught:
                root.allocate("r", RESOURCE, 1, {"unit": V("s", unit)})
            assert caught.value.name == "InvalidArgument"
            assert says in caught.value.text


@pytest.mark.parametrize("end", ["inactive", "failed", "waits to restart", "started anew", "removed"])
def test_the_end_of_a_unit(unit_bus: PrivateBus, end: str) -> None:
    with (
        FakeSystemd(unit_bus) as systemd,
        Service(unit_bus, devices=[record(0)]) as service,
        Client(unit_bus) as root,
    ):
        systemd.units[UNIT] = ("active", RUN)
        options = {"unit": V("s", UNIT), "confirm": V("b", True)}
        lease, _ = root.allocate("r", RESOURCE, 1, options)
        assert root.call(lease, names.LEASE, "GetBinding") == {"unit": UNIT, "invocation": RUN}
        wait_until(lambda: systemd.subscribed == 1, what="the subscription")
        for state in ("reloading", "activating", "active"):
            systemd.set(UNIT, state, RUN)
        wait_until(
            lambda: service.do(lambda: not service.service.owners.units._tasks), what="the checks to end"
        )
        assert _state(root, lease) == "active"
        if end == "removed":
            systemd.remove(UNIT)
        elif end == "started anew":
            systemd.set(UNIT, "active", NEXT_RUN)
        elif end == "waits to restart":
            systemd.sub_states[UNIT] = "auto-restart"
            systemd.set(UNIT, "activating", RUN)
        else:
            systemd.set(UNIT, end, RUN)
        ended = root.wait_for_signal(names.MANAGER, "LeaseEnded")
        assert ended.body == (lease, "owner-gone")
        assert _gone(service) == [(names.lease_id_of(lease), "unit")]


def test_a_unit_that_ended_before_it_was_watched(unit_bus: PrivateBus) -> None:
    with FakeSystemd(unit_bus) as systemd, Service(unit_bus) as service:
        systemd.units[UNIT] = ("active", NEXT_RUN)
        service.do(service.service.owners.watch, "past", Binding(unit=UnitRef(UNIT, RUN)))
        service.do(service.service.owners.watch, "never", Binding(unit=UnitRef("no.service", RUN)))
        service.do(service.service.owners.watch, "now", Binding(unit=UnitRef(UNIT, NEXT_RUN)))
        wait_until(lambda: len(_gone(service)) == 2, what="two ends")
        assert sorted(_gone(service)) == [("never", "unit"), ("past", "unit")]


def test_systemd_that_does_not_answer_ends_nothing(
    unit_bus: PrivateBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_TIMEOUT", 0.1)
    monkeypatch.setattr(units, "_RETRY", 0.1)
    with Service(unit_bus) as service:
        with FakeSystemd(unit_bus) as systemd:
            systemd.units[UNIT] = ("active", RUN)
            systemd.mute = True
            service.do(service.service.owners.watch, "l", Binding(unit=UnitRef(UNIT, RUN)))
            wait_until(lambda: service.do(lambda: len(service.service._connection._pending)) > 0, what="a call")
        # a systemd that has gone (daemon-reexec) and come back is asked again
        with FakeSystemd(unit_bus, {UNIT: ("active", RUN)}) as systemd:
            wait_until(lambda: systemd.subscribed > 0, what="the new subscription")
            assert _gone(service) == []
            systemd.set(UNIT, "failed", RUN)
            wait_until(lambda: _gone(service) == [("l", "unit")], what="the end")


def test_no_rule_of_the_bus_stays_behind(unit_bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus allows 512 rules; with those of ended leases left, no unit's end would be heard of."""
    with Service(unit_bus, devices=[record(0)]) as service, Client(unit_bus) as root:
        owners = service.service.owners
        call, rules = owners._connection.call, Counter[str]()

        async def counted(*arguments: Any, **more: Any) -> list[Any]:
            if arguments[3] in ("AddMatch", "RemoveMatch"):
                rules[arguments[5][0]] += 1 if arguments[3] == "AddMatch" else -1
            return await call(*arguments, **more)

        def idle() -> bool:
            return service.do(lambda: not owners.units._tasks)

        monkeypatch.setattr(owners._connection, "call", counted)
        for _ in range(3):  # daemon-reexec
            with FakeSystemd(unit_bus, {UNIT: ("active", RUN)}) as systemd:
                wait_until(lambda one=systemd: one.subscribed > 0, what="the subscription")
                for lease in ("one", "two", "three"):
                    service.do(owners.watch, lease, Binding(unit=UnitRef(UNIT, RUN)))
                wait_until(idle, what="the checks to end")
                assert sum("path=" in rule and count == 1 for rule, count in rules.items()) == 1
        for lease in ("one", "two", "three"):
            service.do(owners.unwatch, lease)
        wait_until(idle, what="the rules to go")
        assert {rule: count for rule, count in rules.items() if count and "path=" in rule} == {}
        assert all(count <= 1 for count in rules.values())
        # who gets no lease leaves nothing either
        with FakeSystemd(unit_bus, {UNIT: ("active", RUN)}), pytest.raises(CallError, match="can't satisfy"):
            root.allocate("r", RESOURCE, 2, {"unit": V("s", UNIT)})
        assert service.do(lambda: dict(owners.units._paths)) == {}


def test_the_end_of_another_unit_is_no_reason_to_look(
    unit_bus: PrivateBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host starts and ends units all the time, and each look at one is some calls."""
    unbound, ended = "unbound.service", "ended.service"
    running = dict.fromkeys((UNIT, unbound, ended), ("active", RUN))
    with FakeSystemd(unit_bus, running) as systemd, Service(unit_bus) as service:
        owners = service.service.owners
        service.do(owners.watch, "l", Binding(unit=UnitRef(UNIT, RUN)))
        service.do(owners.watch, "other", Binding(unit=UnitRef(ended, RUN)))
        wait_until(lambda: service.do(lambda: not owners.units._tasks), what="the checks to end")
        looked: list[str] = []
        look = owners.units._look

        async def noted(name: str) -> tuple[str, str]:
            looked.append(name)
            return await look(name)

        monkeypatch.setattr(owners.units, "_look", noted)
        forged = Incoming(SIGNAL, 0, 1, True)
        forged.interface, forged.member = "org.freedesktop.systemd1.Manager", "UnitRemoved"
        forged.path, forged.sender = "/org/freedesktop/systemd1", ":1.666"
        for forged.signature, forged.body in (("s", codec.encode("s", (UNIT,))), ("so", b"\xff" * 7)):
            service.do(owners.units.signal, forged)
        systemd.remove(unbound)
        systemd.remove(ended)
        wait_until(lambda: _gone(service) == [("other", "unit")], what="the end")
        assert looked == [ended]


def test_a_unit_that_the_bus_takes_no_rule_for(unit_bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_RETRY", 0.05)
    with FakeSystemd(unit_bus, {UNIT: ("active", RUN)}) as systemd, Service(unit_bus) as service:
        owners = service.service.owners
        call, refused = owners._connection.call, []

        async def full(*arguments: Any, **more: Any) -> list[Any]:
            if arguments[3] == "AddMatch" and "path=" in arguments[5][0]:
                refused.append(arguments[5])
                raise CallFailed("org.freedesktop.DBus.Error.LimitsExceeded", "too many rules")
            return await call(*arguments, **more)

        monkeypatch.setattr(owners._connection, "call", full)
        service.do(owners.watch, "l", Binding(unit=UnitRef(UNIT, RUN)))
        wait_until(lambda: len(refused) > 1, what="a second try")
        assert _gone(service) == []
        systemd.set(UNIT, "failed", RUN)
        wait_until(lambda: _gone(service) == [("l", "unit")], what="the end")
        wait_until(lambda: service.do(lambda: not owners.units._tasks), what="the looking to end")


def test_the_main_process_of_a_service(unit_bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is no process: whatever keeps systemd from telling, nobody is taken for the service's."""
    with Service(unit_bus) as service:
        main_pid = service.service.owners.units.main_pid
        assert service.run(main_pid(UNIT)) == 0  # no systemd
        with FakeSystemd(unit_bus, {UNIT: ("active", RUN)}) as systemd:
            assert service.run(main_pid(UNIT)) == 0  # none runs
            systemd.main_pids[UNIT] = 4242
            assert service.run(main_pid(UNIT)) == 4242
            assert service.run(main_pid("no.service")) == 0
            systemd.mute = True
            monkeypatch.setattr(units, "_TIMEOUT", 0.1)
            assert service.run(main_pid(UNIT)) == 0


def test_a_signal_that_is_not_systemds_is_only_a_hint(unit_bus: PrivateBus) -> None:
    with FakeSystemd(unit_bus) as systemd, Service(unit_bus, devices=[record(0)]) as service:
        systemd.units[UNIT] = ("active", RUN)
        service.do(service.service.owners.watch, "l", Binding(unit=UnitRef(UNIT, RUN)))
        wait_until(lambda: systemd.subscribed == 1, what="the subscription")
        forged = Incoming(SIGNAL, 0, 1, True)
        forged.interface, forged.member = "org.freedesktop.DBus.Properties", "PropertiesChanged"
        forged.path, forged.sender = FakeSystemd.path(UNIT), ":1.666"
        service.do(service.service.owners.units.signal, forged)
        wait_until(
            lambda: service.do(lambda: not service.service.owners.units._tasks), what="the checks to end"
        )
        assert _gone(service) == []


def test_the_caller_is_known_by_uid_pid_and_groups(bus: PrivateBus) -> None:
    with Service(bus) as service, Client(bus, MEMBER, [GROUP_GID, 44], listen=False) as client:
        client.manager("GetSnapshot", "u", 0)
        caller = service.service._callers.get(client.unique_name)
        assert caller is not None
        assert (caller.uid, caller.pid) == (MEMBER, client.pid)
        assert {GROUP_GID, 44} <= caller.groups
        assert os.getgid() not in caller.groups


@pytest.mark.parametrize(("uid", "unit"), [(MEMBER, UNIT), (OTHER_MEMBER, "")])
def test_a_pid_that_is_anothers_by_now(
    bus: PrivateBus, monkeypatch: pytest.MonkeyPatch, uid: int, unit: str
) -> None:
    """A connection may outlive the process that made it: whoever has its pid then lends it no unit."""
    with Service(bus) as service, Client(bus, MEMBER, [GROUP_GID], listen=False) as client:
        facts = ProcessFacts(ProcessRef(client.pid, 1), (uid, uid, uid, uid), UNIT)
        callers = service.service._callers
        monkeypatch.setattr(callers, "_identify", lambda _: facts)
        client.manager("GetSnapshot", "u", 0)
        caller = callers.get(client.unique_name)
        assert caller is not None
        assert caller.unit == unit


def test_groups_from_proc_where_the_bus_does_not_tell_them() -> None:
    uid = os.getuid()
    assert set(groups_of(os.getpid(), uid)) == {*os.getresgid(), os.getgid(), *os.getgroups()}
    assert groups_of(2**30, uid) == ()
    assert groups_of(os.getpid(), uid + 1) == ()
