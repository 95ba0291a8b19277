"""The link to the agent: addresses, deadlines, retries with the same request id, reconnection, signals."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dbus_next import Variant
from dbus_next.aio import MessageBus
from dbus_next.message import Message

from hetero_agent import names
from hetero_agent.client import CallTimeout, Client, NoAgent, NoBus, errors, events, session
from hetero_agent.client.connection import socket_paths
from hetero_agent.core.effects import ErrorKind
from tests.support.bus import PrivateBus
from tests.support.standin import Problem, StandIn, device_row, snapshot
from tests.support.wait import wait_until, wait_until_async

LEASE = "0123456789abcdef0123456789abcdef"
GRANT = (
    "oa{sv}",
    [
        names.lease_path(LEASE),
        {"version": Variant("u", 1), "lease": Variant("s", LEASE), "devices": Variant("as", ["npu-0"])},
    ],
)


@pytest.fixture
def standin(bus: PrivateBus) -> Iterator[StandIn]:
    one = StandIn(bus.address)
    yield one.start()
    one.close()


def talk(address: str, what: Callable[[Client], Awaitable[Any]]) -> Any:
    """Run WHAT with a connected client."""

    async def go() -> Any:
        async with await Client.connect(address) as client:
            return await what(client)

    return asyncio.run(go())


# -- addresses ------------------------------------------------------------------------------------
def test_addresses_give_socket_paths() -> None:
    assert socket_paths("unix:path=/run/a%20b,guid=12;unix:abstract=/tmp/x") == ["/run/a b", "\0/tmp/x"]


@pytest.mark.parametrize("address", ["", "tcp:host=localhost,port=1", "nonsense", "unix:tmpdir=/tmp"])
def test_an_address_without_a_socket_is_no_bus(address: str) -> None:
    with pytest.raises(NoBus):
        socket_paths(address)


def test_no_bus_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(NoBus, match="No such file"):
        talk(f"unix:path={tmp_path}/none", lambda client: client.status())


def test_the_environment_names_the_bus(bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.BUS_ADDRESS_VARIABLE, bus.address)

    async def go() -> str:
        async with await Client.connect() as client:
            return client.address

    assert asyncio.run(go()) == bus.address


@pytest.mark.parametrize("answer", [b"REJECTED EXTERNAL\r\n", b"HTTP/1.1 400 Bad Request" + b"x" * 5000, b""])
def test_what_is_no_bus_is_said_to_be_none(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            link, _ = server.accept()
            with link:
                link.recv(100)
                link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NoBus):
            talk(f"unix:path={path}", lambda client: client.status())
        thread.join(5)


def test_a_bus_that_never_answers_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        async def go() -> None:
            await Client.connect(f"unix:path={path}", within=0.2)

        began = time.monotonic()
        with pytest.raises(NoBus, match="no answer"):
            asyncio.run(go())
        assert time.monotonic() - began < 10


# -- calls ----------------------------------------------------------------------------------------
def test_an_absent_agent_is_said_at_once(bus: PrivateBus) -> None:
    async def ask(client: Client) -> None:
        assert not client.agent_present
        await client.status()

    began = time.monotonic()
    with pytest.raises(NoAgent, match="not on the bus"):
        talk(bus.address, ask)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_error_name_has_its_exception(standin: StandIn, kind: ErrorKind) -> None:
    standin.answers["Allocate"] = Problem(kind.value, "because\n\x1b[31m")
    with pytest.raises(errors.AgentError) as caught:
        talk(standin.address, lambda client: client.allocate("example.com/npu"))
    assert type(caught.value).__name__ == kind.value
    assert caught.value.short == kind.value
    assert caught.value.name == names.ERROR_PREFIX + kind.value
    assert caught.value.text == "because\\x0a\\x1b[31m"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("org.freedesktop.DBus.Error.AccessDenied", errors.NotAuthorized),
        ("org.freedesktop.DBus.Error.UnknownObject", errors.NotFound),
        ("org.freedesktop.DBus.Error.InvalidArgs", errors.InvalidArgument),
        ("org.freedesktop.DBus.Error.LimitsExceeded", errors.LimitExceeded),
        ("org.freedesktop.DBus.Error.UnknownMethod", errors.NotSupported),
        ("org.freedesktop.DBus.Error.Failed", errors.UnexpectedReply),
        ("com.example.Other", errors.UnexpectedReply),
        (names.ERROR_PREFIX + "Unheard", errors.UnexpectedReply),
    ],
)
def test_other_errors_have_a_meaning_too(standin: StandIn, name: str, kind: type[Exception]) -> None:
    standin.answers["Allocate"] = Problem(name)
    with pytest.raises(kind) as caught:
        talk(standin.address, lambda client: client.allocate("example.com/npu"))
    assert type(caught.value) is kind


def test_a_call_has_a_deadline(standin: StandIn) -> None:
    standin.answers["Allocate"] = None  # taken, never answered
    began = time.monotonic()
    with pytest.raises(CallTimeout, match=r"Allocate was not answered within 0\.3 s"):
        talk(standin.address, lambda client: client.allocate("example.com/npu", within=0.3))
    assert time.monotonic() - began < 10


def test_no_call_waits_longer_than_25_seconds() -> None:
    assert session.CALL_TIMEOUT <= session.LONGEST_CALL == 25


@pytest.mark.parametrize("bad", ["nul\0inside", "half \ud800 a pair"])
def test_what_the_bus_would_drop_us_for_is_never_sent(standin: StandIn, bad: str) -> None:
    async def go(client: Client) -> str:
        with pytest.raises(errors.InvalidArgument):
            await client.cordon(names.device_path("npu-0"), bad)
        with pytest.raises(errors.InvalidArgument):
            await client.allocate("example.com/npu", require={"model": bad})
        return (await client.status()).version

    assert talk(standin.address, go) == "9.9"


@pytest.mark.parametrize(
    "options", [{"unheard_of": 1}, {"pid": "12"}, {"pid": -1}, {"devices": "npu-0"}, {"require": {"a": 1.5}}]
)
def test_options_of_other_names_or_types_are_refused_here(standin: StandIn, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        talk(standin.address, lambda client: client.allocate("example.com/npu", **options))
    assert "Allocate" not in standin.members()


def test_a_count_that_fits_no_u_is_refused_here(standin: StandIn) -> None:
    for count in (-1, 2**32):
        with pytest.raises(errors.InvalidArgument):
            talk(standin.address, lambda client, count=count: client.allocate("example.com/npu", count))


# -- retries --------------------------------------------------------------------------------------
def test_an_agent_that_dies_in_mid_call_is_asked_again_with_the_same_id(bus: PrivateBus) -> None:
    first = StandIn(bus.address).start()
    first.answers["Allocate"] = None
    second = StandIn(bus.address)
    second.answers["Allocate"] = GRANT

    async def go(client: Client) -> Any:
        call = asyncio.create_task(client.allocate("example.com/npu", 1, label="x"))
        await wait_until_async(lambda: "Allocate" in first.members())
        await asyncio.to_thread(first.leave)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(second.start)
        return await call

    try:
        grant = talk(bus.address, go)
        assert grant.lease == LEASE
        sent = [one.body for one in first.calls if one.member == "Allocate"]
        again = [one.body for one in second.calls if one.member == "Allocate"]
        assert len(sent) == len(again) == 1
        assert sent[0][:3] == again[0][:3]
        assert grant.request_id == sent[0][0]
    finally:
        first.close()
        second.close()


def test_a_bus_that_restarts_in_mid_call_is_found_again(bus: PrivateBus) -> None:
    first = StandIn(bus.address).start()
    first.answers["Allocate"] = None
    second = StandIn(bus.address)
    second.answers["Allocate"] = GRANT

    async def go(client: Client) -> Any:
        call = asyncio.create_task(client.allocate("example.com/npu", request_id="mine"))
        await wait_until_async(lambda: "Allocate" in first.members())
        await asyncio.to_thread(bus.restart)
        await asyncio.to_thread(second.start)
        return await call

    try:
        assert talk(bus.address, go).request_id == "mine"
        assert [one.body[0] for one in second.calls if one.member == "Allocate"] == ["mine"]
    finally:
        first.close()
        second.close()


def test_an_agent_that_stays_away_is_given_up(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    # counted from when it went, which is some time before that is seen here
    monkeypatch.setattr(session, "PATIENCE", 2.0)

    async def go(client: Client) -> None:
        await client.status()
        await asyncio.to_thread(standin.leave)
        await wait_until_async(lambda: not client.agent_present)
        began = time.monotonic()
        with pytest.raises(NoAgent):
            await client.status()
        assert 0.1 < time.monotonic() - began < 30
        for _ in range(4):
            began = time.monotonic()
            with pytest.raises(NoAgent):
                await client.status()
            if (took := time.monotonic() - began) < 0.2:
                return
        pytest.fail(f"it is known to be away by now, and took {took} s")

    talk(standin.address, go)


def test_a_closed_client_answers_at_once(standin: StandIn) -> None:
    async def go() -> None:
        client = await Client.connect(standin.address)
        await client.close()
        with pytest.raises(errors.Unreachable):
            await client.status()

    asyncio.run(go())


# -- signals --------------------------------------------------------------------------------------
def test_signals_come_as_types(standin: StandIn) -> None:
    device = names.device_path("0000:3b:00.0")
    lease = names.lease_path(LEASE)
    manager = (names.ROOT, names.MANAGER)
    manager_object = (names.ROOT, events.OBJECT_MANAGER)
    sent = [
        (
            device,
            names.DEVICE,
            "StateChanged",
            "sssa{sv}",
            "idle",
            "in-use",
            "",
            {"by": Variant("s", "x")},
        ),
        (*manager_object, "InterfacesAdded", "oa{sa{sv}}", lease, {names.LEASE: {"Id": Variant("s", LEASE)}}),
        (*manager_object, "InterfacesRemoved", "oas", device, [names.DEVICE]),
        (lease, events.PROPERTIES, "PropertiesChanged", "sa{sv}as", names.LEASE, {}, []),
        (*manager, "Report", "ustba{sa{su}}", 1, "e", 5, True, {"example.com/npu": {"total": 2}}),
        (*manager, "HealthEvent", "ossoa{sv}", device, "unhealthy", "hot", lease, {}),
        (*manager, "Conflict", "sooss", "intruder", "/", device, "theirs", "ours"),
        (*manager, "LeaseEnded", "os", lease, "released"),
        (*manager, "OrphanFound", "ou", device, 3),
    ]
    place = "0000:3b:00.0"

    async def go(client: Client) -> list[events.Event]:
        async with client.watch() as news:
            for one in sent:
                standin.emit(*one)
            return [await asyncio.wait_for(anext(news), 30) for _ in sent]

    assert talk(standin.address, go) == [
        events.StateChanged(place, "idle", "in-use", "", {"by": "x"}),
        events.InterfacesAdded(lease, {names.LEASE: {"Id": LEASE}}),
        events.InterfacesRemoved(device, [names.DEVICE]),
        events.PropertiesChanged(lease, names.LEASE, {}, []),
        events.Report(1, "e", 5, True, {"example.com/npu": {"total": 2}}),
        events.HealthEvent(place, "unhealthy", "hot", LEASE, {}),
        events.Conflict("intruder", "", place, "theirs", "ours"),
        events.LeaseEnded(LEASE, "released"),
        events.OrphanFound(place, 3),
    ]


def test_a_watch_takes_its_kinds_and_its_path_only(standin: StandIn) -> None:
    async def go(client: Client) -> events.Event:
        async with client.watch(events.StateChanged, path=names.device_path("b")) as news:
            standin.emit(names.ROOT, names.MANAGER, "OrphanFound", "ou", names.device_path("b"), 1)
            standin.emit(names.device_path("a"), names.DEVICE, "StateChanged", "sssa{sv}", "x", "y", "", {})
            standin.emit(names.device_path("b"), names.DEVICE, "StateChanged", "sssa{sv}", "v", "w", "", {})
            return await asyncio.wait_for(anext(news), 30)

    assert talk(standin.address, go) == events.StateChanged("b", "v", "w", "", {})


def test_a_signal_of_another_sender_or_shape_is_no_news(bus: PrivateBus, standin: StandIn) -> None:
    """Anyone may send a signal to anyone: only the name's owner is believed."""

    async def go(client: Client) -> events.Event:
        stranger = await MessageBus(bus.address).connect()
        async with client.watch(events.LeaseEnded) as news:
            own = client._session.unique_name
            body = [names.lease_path(LEASE), "forged"]
            forged = Message.new_signal(names.ROOT, names.MANAGER, "LeaseEnded", "os", body)
            forged.destination = own
            await stranger.send(forged)
            owner_forged = Message.new_signal(
                "/org/freedesktop/DBus",
                "org.freedesktop.DBus",
                "NameOwnerChanged",
                "sss",
                [names.BUS_NAME, standin.unique_name, ""],
            )
            owner_forged.destination = own
            await stranger.send(owner_forged)
            await stranger.call(Connection_ping())
            standin.emit(names.ROOT, names.MANAGER, "LeaseEnded", "s", "of another shape")
            standin.emit(names.ROOT, names.MANAGER, "LeaseEnded", "os", names.lease_path(LEASE), "released")
            event = await asyncio.wait_for(anext(news), 30)
            assert client.agent_present
        stranger.disconnect()
        return event

    assert talk(bus.address, go) == events.LeaseEnded(LEASE, "released")


def Connection_ping() -> Message:
    """A call to the bus: when it is answered, what was sent before has been delivered."""
    return Message(
        destination="org.freedesktop.DBus",
        path="/org/freedesktop/DBus",
        interface="org.freedesktop.DBus.Peer",
        member="Ping",
    )


def test_watches_live_through_a_restart_of_bus_and_agent(bus: PrivateBus) -> None:
    first = StandIn(bus.address).start()
    second = StandIn(bus.address)

    async def go(client: Client) -> list[events.Event]:
        seen = []
        async with client.watch(events.LeaseEnded) as news:
            await asyncio.to_thread(bus.restart)
            await asyncio.to_thread(second.start)
            seen.append(await asyncio.wait_for(anext(news), 30))
            seen.append(await asyncio.wait_for(anext(news), 30))
            second.emit(names.ROOT, names.MANAGER, "LeaseEnded", "os", names.lease_path(LEASE), "reboot")
            seen.append(await asyncio.wait_for(anext(news), 30))
        return seen

    try:
        gone, back, ended = talk(bus.address, go)
        assert gone == events.AgentChanged("")
        assert back == events.AgentChanged(second.unique_name)
        assert ended == events.LeaseEnded(LEASE, "reboot")
    finally:
        first.close()
        second.close()


def test_a_slow_reader_is_told_what_it_missed(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_QUEUE", 5)

    async def go(client: Client) -> list[events.Event]:
        async with client.watch(events.OrphanFound, events.LeaseEnded) as news:
            async with client.watch(events.LeaseEnded) as last:
                for number in range(8):
                    standin.emit(names.ROOT, names.MANAGER, "OrphanFound", "ou", names.device_path("a"), number)
                standin.emit(names.ROOT, names.MANAGER, "LeaseEnded", "os", names.lease_path(LEASE), "released")
                await asyncio.wait_for(anext(last), 30)
            return [await anext(news) for _ in range(6)]

    seen = talk(standin.address, go)
    assert seen[0] == events.Missed(4)
    assert [one.count for one in seen[1:5]] == [4, 5, 6, 7]
    assert seen[5] == events.LeaseEnded(LEASE, "released")


def test_match_rules_go_with_the_last_watch(standin: StandIn) -> None:
    async def go(client: Client) -> None:
        async with client.watch(events.LeaseEnded):
            async with client.watch(events.LeaseEnded):
                pass
            assert len(client._session._rules) == 1
        assert client._session._rules == {}

    talk(standin.address, go)


# -- reading --------------------------------------------------------------------------------------
def test_a_snapshot_is_read_page_by_page_and_anew_if_it_moved(standin: StandIn) -> None:
    asked: list[int] = []

    def answer(message: Any) -> Any:
        asked.append(message.body[0])
        moved = len(asked) == 2  # the second page of the first attempt
        row = device_row("a" if message.body[0] == 0 else "b")
        return snapshot(row, pages=2, generation=8 if moved or len(asked) > 2 else 7)

    standin.answers["GetSnapshot"] = answer
    found = talk(standin.address, lambda client: client.snapshot())
    assert asked == [0, 1, 0, 1]
    assert ([one.id for one in found.devices], found.generation) == (["a", "b"], 8)


def test_an_agent_of_another_shape_is_an_error_not_a_fault(standin: StandIn) -> None:
    standin.answers["GetSnapshot"] = ("s", ["what?"])
    with pytest.raises(errors.UnexpectedReply):
        talk(standin.address, lambda client: client.snapshot())
    standin.answers["Release"] = ("", [])
    with pytest.raises(errors.UnexpectedReply):
        talk(standin.address, lambda client: client.release(LEASE))


def test_a_device_is_found_by_id_alias_and_path(standin: StandIn) -> None:
    standin.answers["Get"] = Problem("org.freedesktop.DBus.Error.UnknownObject")
    standin.answers["GetSnapshot"] = snapshot(
        device_row("0000:3b:00.0", aliases=["GPU-abc"]), device_row("npu-1")
    )

    async def go(client: Client) -> list[str]:
        names_ = ["GPU-abc", "gpu-ABC", "0000:3B:00.0", names.device_path("npu-1")]
        return [await client.device_path(one) for one in names_]

    place = names.device_path("0000:3b:00.0")
    assert talk(standin.address, go) == [place, place, place, names.device_path("npu-1")]
    with pytest.raises(errors.NotFound, match="no device 'npu-9'"):
        talk(standin.address, lambda client: client.device_path("npu-9"))


def test_a_reading_thread_of_the_bus_is_not_needed(standin: StandIn) -> None:
    """Many calls at once over one connection, each with its own answer."""

    def answer(message: Any) -> Any:
        return "b", [message.body[0].endswith("7")]

    standin.answers["Release"] = answer

    async def go(client: Client) -> list[bool]:
        calls = [client.release(names.lease_path(LEASE), request_id=f"r-{number}") for number in range(50)]
        return list(await asyncio.gather(*calls))

    assert talk(standin.address, go) == [str(number).endswith("7") for number in range(50)]
    wait_until(lambda: standin.members().count("Release") == 50)
