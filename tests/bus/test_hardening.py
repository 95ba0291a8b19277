"""Clients that mean harm: the agent stays on the bus, small, and answers the others in time."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dbus_next import MessageFlag, MessageType, Variant

from hetero_agent import names
from hetero_agent.bus import codec
from hetero_agent.bus.transport import Incoming
from hetero_agent.core.events import OwnerGone
from tests.support.agent import GROUP_GID, MEMBER
from tests.support.bus import PrivateBus
from tests.support.bus_service import RESOURCE, Service, record, with_limits
from tests.support.calls import CallError, Client, V, receive_all
from tests.support.raw import RawClient
from tests.support.timing import Stalls
from tests.support.wait import wait_until

INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"
PEER = "org.freedesktop.DBus.Peer"

#: Lets signals reach the agent, which its policy does not.
OPEN = f"""
<policy context="default"><allow send_destination="{names.BUS_NAME}" send_type="signal"/></policy>
"""


def _rss() -> int:
    """Resident memory of this process, in which the service runs, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 // (1024 * 1024)


@contextmanager
def _bystander(bus: PrivateBus) -> Iterator[list[float]]:
    """A client that pings all the while; yields how long it had to wait each time, in seconds."""
    times: list[float] = []
    stop = threading.Event()

    def ping(client: RawClient) -> None:
        while not stop.is_set():
            begin = time.monotonic()
            reply = client.call(names.ROOT, PEER, "Ping")
            assert reply.message_type is MessageType.METHOD_RETURN
            times.append(time.monotonic() - begin)
            time.sleep(0.01)

    with RawClient(bus) as client:
        client.call(names.ROOT, PEER, "Ping")
        thread = threading.Thread(target=ping, args=(client,))
        thread.start()
        try:
            yield times
        finally:
            stop.set()
            thread.join(30)
    assert times, "the bystander was never answered"


def _in_time(times: list[float]) -> None:
    """A bystander was answered as if nobody else were there; once or twice the machine was busy."""
    assert sorted(times)[len(times) // 2] < 0.25
    assert sorted(times)[-3:][0] < 1
    assert max(times) < 10


@contextmanager
def _stalls(service: Service) -> Iterator[Stalls]:
    """Yields how long the agent's loop stands still."""
    stalls = Stalls()
    service.run(stalls.__aenter__())
    yield stalls
    service.run(stalls.__aexit__(None, None, None))


def _alive(service: Service) -> None:
    assert not service.service.lost.done(), service.service.lost.result()
    service.run(service.service.ping())


def _big(client: RawClient, size: int, member: str = "Explain") -> tuple[int, bytes]:
    """A call with SIZE bytes of variants, the dearest thing to decode."""
    serial, data = client.frame(names.ROOT, names.MANAGER, member, "av", [[]])
    body = struct.pack("<I", size) + b"\x01y\0\x07" * (size // 4)
    return serial, data[:4] + struct.pack("<I", len(body)) + data[8:-4] + body


def test_29_mib_are_refused_without_decoding(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, RawClient(bus) as attacker:
        messages = [_big(attacker, 29 * 1024 * 1024, member) for member in ("Explain", "GetConflicts")]
        before = _rss()
        # the bus itself checks every value of the message, which takes it a second
        with _stalls(service) as stalls:
            for serial, data in messages:
                attacker.socket.sendall(data)
                reply = attacker.receive(serial)
                assert reply.error_name == "org.freedesktop.DBus.Error.LimitsExceeded"
                assert "65536" in reply.body[0]
        assert stalls.longest < 0.5
        assert _rss() - before < 20
        assert service.service.stats()["oversized"] == 2
        _alive(service)


def test_unread_answers_do_not_stop_the_agent(bus: PrivateBus) -> None:
    """Twelve connections with 110 calls each whose answers nobody reads: the socket is full."""
    devices = [record(number) for number in range(64)]
    with Service(bus, with_limits(calls_per_caller=128), devices) as service, _bystander(bus) as times:
        attackers = [RawClient(bus) for _ in range(12)]
        for attacker in attackers:
            calls = [attacker.frame(names.ROOT, INTROSPECTABLE, "Introspect")[1] for _ in range(110)]
            attacker.socket.sendall(b"".join(calls))
        wait_until(
            lambda: service.do(
                lambda: not service.service._turns._ready and not service.service._turns._clients
            ),
            what="all calls handled",
        )
        time.sleep(0.1)
        _alive(service)
        for attacker in attackers:
            reply = attacker.receive(attacker._serial)
            assert names.MANAGER in reply.body[0]
            attacker.close()
    _in_time(times)


def test_a_flooding_client_keeps_nobody_waiting(bus: PrivateBus) -> None:
    devices = [record(number) for number in range(64)]
    with Service(bus, devices=devices) as service, _bystander(bus) as times:
        stop = threading.Event()

        def flood(expecting: bool) -> None:
            with RawClient(bus) as attacker:
                _, data = attacker.frame(names.ROOT, "org.freedesktop.DBus.Properties", "GetAll", "s", [""])
                if not expecting:
                    data = data[:2] + bytes((MessageFlag.NO_REPLY_EXPECTED.value,)) + data[3:]
                attacker.socket.settimeout(0.2)
                while not stop.is_set():
                    try:
                        attacker.socket.sendall(data * 64)
                        if expecting:
                            attacker.socket.recv(1 << 20)
                    except TimeoutError:
                        return

        threads = [threading.Thread(target=flood, args=(one,)) for one in (True, False)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        wait_until(lambda: service.service.stats()["calls_refused"] > 0, what="a refusal")
        stop.set()
        for thread in threads:
            thread.join()
        _alive(service)
    _in_time(times)


def test_calls_without_answer_are_limited(bus: PrivateBus) -> None:
    with (
        Service(bus, with_limits(calls_per_caller=3), [record(0)]) as service,
        Client(bus, MEMBER, [GROUP_GID]) as client,
    ):
        go = service.do(asyncio.Event)
        kept = service.engine.call

        async def slow(make: Any) -> str:
            await go.wait()
            return await kept(make)

        service.engine.call = slow  # type: ignore[method-assign]
        call = (names.ROOT, names.MANAGER, "Allocate", "ssua{sv}")
        numbers = [client.send(*call, f"r{n}", RESOURCE, 1, {}) for n in range(5)]
        for number in numbers[3:]:
            with pytest.raises(CallError) as caught:
                client.receive(number)
            assert caught.value.name == "LimitExceeded"
        service.do(go.set)
        good, bad = receive_all(client, numbers[:3])
        assert len(good) == 1
        assert [one.name for one in bad] == ["Unavailable"] * 2
        service.engine.call = kept  # type: ignore[method-assign]
        assert client.manager("Explain", "sua{sv}", RESOURCE, 1, {})


def test_distinct_signatures_do_not_grow_anything(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, RawClient(bus) as attacker:
        for number in range(600):
            kind = "".join("ybnqiuxtds"[int(digit)] for digit in str(number))
            options = {"x": Variant(f"a({kind})", [])}
            reply = attacker.call(names.ROOT, names.MANAGER, "Explain", "sua{sv}", ["a/b", 1, options])
            assert reply.error_name == names.ERROR_PREFIX + "InvalidArgument"
            reply = attacker.call(names.ROOT, names.MANAGER, "Explain", f"({kind})", [[*_zeroes(kind)]])
            assert reply.error_name == "org.freedesktop.DBus.Error.InvalidArgs"
        for cache in (codec.split, codec._reader, codec._readers):
            assert cache.cache_info().currsize <= 512
        _alive(service)


def _zeroes(kind: str) -> Iterator[Any]:
    for letter in kind:
        yield {"s": "", "b": False, "d": 0.0}.get(letter, 0)


def test_too_many_values_in_one_call(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, RawClient(bus) as attacker:
        options = {"devices": Variant("ab", [False] * 16_000)}
        reply = attacker.call(names.ROOT, names.MANAGER, "Explain", "sua{sv}", ["a/b", 1, options])
        assert reply.error_name == names.ERROR_PREFIX + "InvalidArgument"
        serial, data = attacker.frame(names.ROOT, names.MANAGER, "Reap", "soa(ut)", ["r", "/", []])
        body = data[-len(codec.encode("soa(ut)", ("r", "/", []))) :]
        pairs = codec.encode("soa(ut)", ("r", "/", [(1, 1)] * 4000))
        assert len(pairs) < 65536
        head = data[: len(data) - len(body)]
        attacker.socket.sendall(head[:4] + struct.pack("<I", len(pairs)) + head[8:] + pairs)
        reply = attacker.receive(serial)
        assert reply.error_name == names.ERROR_PREFIX + "InvalidArgument"
        _alive(service)


@pytest.mark.parametrize("policy", ["", OPEN], ids=["as shipped", "signals let through"])
def test_a_forged_name_owner_changed_does_nothing(policy: str) -> None:
    bus = PrivateBus(extra=policy)
    try:
        with (
            Service(bus, devices=[record(0)]) as service,
            Client(bus, MEMBER, [GROUP_GID]) as victim,
            RawClient(bus) as attacker,
        ):
            options = {"connection": V("b", True), "confirm": V("b", True)}
            lease, _ = victim.allocate("r", RESOURCE, 1, options)
            connection = service.service._connection
            own, handle = connection.unique_name, connection.on_signal
            senders: list[str] = []

            def spy(message: Incoming) -> None:
                senders.append(message.sender)
                handle(message)

            connection.on_signal = spy
            for destination in (own, names.BUS_NAME):
                for path in ("/org/freedesktop/DBus", "/x"):
                    attacker.send(
                        path,
                        "org.freedesktop.DBus",
                        "NameOwnerChanged",
                        "sss",
                        [victim.unique_name, victim.unique_name, ""],
                        destination=destination,
                        kind=MessageType.SIGNAL,
                    )
                    attacker.send(
                        path,
                        "org.freedesktop.DBus",
                        "NameLost",
                        "s",
                        [names.BUS_NAME],
                        destination=destination,
                        kind=MessageType.SIGNAL,
                    )
            attacker.call(names.ROOT, PEER, "Ping")
            assert senders.count(attacker.unique_name) == (8 if policy else 0)
            assert victim.properties(lease, names.LEASE)["State"] == "active"
            assert service.service._callers.get(victim.unique_name) is not None
            _alive(service)
            # the bus's own word counts
            victim.kill()
            wait_until(
                lambda: any(isinstance(one, OwnerGone) for one in service.events), what="the owner's end"
            )
    finally:
        bus.close()


def test_an_8_mib_signal_is_thrown_away(bus: PrivateBus) -> None:
    open_bus = PrivateBus(extra=OPEN)
    try:
        with Service(open_bus) as service, RawClient(open_bus) as attacker, _stalls(service) as stalls:
            serial, data = attacker.frame("/x", "a.b", "S", "av", [[]], kind=MessageType.SIGNAL)
            del serial
            size = 8 * 1024 * 1024
            body = struct.pack("<I", size) + b"\x01y\0\x07" * (size // 4)
            attacker.socket.sendall(data[:4] + struct.pack("<I", len(body)) + data[8:-4] + body)
            wait_until(lambda: service.service.stats()["oversized"] == 1, what="the signal dropped")
            _alive(service)
        assert stalls.longest < 0.5
    finally:
        open_bus.close()


def test_a_subscriber_that_does_not_read(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service, RawClient(bus) as deaf:
        deaf.call(
            "/org/freedesktop/DBus",
            "org.freedesktop.DBus",
            "AddMatch",
            "s",
            [f"type='signal',sender='{names.BUS_NAME}'"],
            destination="org.freedesktop.DBus",
        )
        with _bystander(bus) as times:
            for turn in range(40):
                service.do(
                    lambda turn=turn: [service.observe(record(0, driver=f"d{turn}-{n}")) for n in range(50)]
                )
                service.do(
                    lambda: [
                        service.service._connection.signal(
                            names.device_path("0000:00:00.0"),
                            names.DEVICE,
                            "StateChanged",
                            "sssa{sv}",
                            codec.encode("sssa{sv}", ("a", "b", "x" * 500, {})),
                        )
                        for _ in range(500)
                    ]
                )
            _alive(service)
        _in_time(times)


def test_a_caller_that_leaves_at_once(bus: PrivateBus) -> None:
    with Service(bus, devices=[record(0)]) as service:
        for _ in range(30):
            with RawClient(bus) as fleeting:
                for _ in range(5):
                    fleeting.send(names.ROOT, names.MANAGER, "GetSnapshot", "u", [0])
        wait_until(lambda: service.do(lambda: not service.service._turns._clients), what="no calls left")
        wait_until(
            lambda: len(service.do(lambda: dict(service.service._callers._known))) <= 1,
            what="callers forgotten",
        )
        _alive(service)


def test_a_provider_that_leaves_before_it_is_known(bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session would never end, since the news that it left had come before."""
    register = (names.ROOT, names.PROVIDERS, "RegisterProvider", "susa{sv}")
    with Service(bus) as service, Client(bus, listen=False) as next_one:
        callers = service.service._callers
        looking, seen, identify = threading.Event(), threading.Event(), callers._identify

        def slow(pid: int) -> Any:
            looking.set()
            assert seen.wait(30)
            return identify(pid)

        _alive(service)
        monkeypatch.setattr(callers, "_identify", slow)
        with RawClient(bus) as fleeting:
            fleeting.send(*register, ["r", 1, "sim", {}])
            assert looking.wait(30)
        wait_until(lambda: not callers._asking, what="the news that it has left")
        seen.set()
        wait_until(lambda: service.do(lambda: not service.service._turns._clients), what="no calls left")
        assert service.service._registry.usage() == {"providers": 0}
        assert next_one.call(*register, "r", 1, "sim", {})["protocol-version"] == 1


def test_an_answer_that_the_bus_does_not_take(bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus disconnects who sends more than 32 MiB, whoever has asked for it."""
    with Service(bus) as service, Client(bus) as client:
        mirror = service.service.publisher._mirror
        big = codec.encode("ay", (bytes(33 * 1024 * 1024),))
        monkeypatch.setattr(mirror, "managed_objects", lambda: big)
        with pytest.raises(CallError) as caught:
            client.devices()
        assert caught.value.name == "org.freedesktop.DBus.Error.LimitsExceeded"
        assert "the bus takes 33488896 at most" in caught.value.text
        _alive(service)
        assert not service.do(lambda: service.service._connection.signal("/x", "a.b", "C", "ay", big))
        _alive(service)
