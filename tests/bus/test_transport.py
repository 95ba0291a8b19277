"""The connection itself, against a bus that sends anything."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from hetero_agent.bus import codec, transport
from hetero_agent.bus.codec import V
from hetero_agent.bus.transport import CallFailed, Connection, Incoming, TransportError
from tests.bus.fakebus import FakeBus, call, frame
from tests.support.bus import PrivateBus
from tests.support.wait import wait_until_async


def _with_bus(
    tmp_path: Path, test: Callable[[FakeBus, Connection, list[Incoming]], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        bus = FakeBus(tmp_path / "bus")
        connection = Connection(bus.address)
        seen: list[Incoming] = []
        connection.on_call = seen.append
        connection.on_signal = seen.append
        try:
            await connection.open()
            assert connection.unique_name == ":1.1"
            await test(bus, connection, seen)
            assert not connection.lost.done()
        finally:
            connection.close()
            bus.close()

    asyncio.run(run())


def test_odd_frames_cost_only_themselves(tmp_path: Path) -> None:
    odd = {
        "an unknown header field": call("Good", extra=[(10, V("a{sv}", {"x": V("u", 1)}))]),
        "another one": call("Good", extra=[(200, V("(sas)", ["a", ["b"]]))]),
        "a field of a wrong type": call("Bad", extra=[(9, V("s", "x")), (5, V("s", "x"))]),
        "an unknown message type": frame(9, [(1, V("o", "/")), (7, V("s", ":1.7"))]),
        "fields that end nowhere": call("Bad")[:12] + struct.pack("<I", 13) + call("Bad")[16:32],
        "an answer to nothing": frame(2, [(5, V("u", 4711)), (7, V("s", ":1.7"))]),
    }

    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        for what, data in odd.items():
            seen.clear()
            bus.send(data + call("After", serial=99))
            await wait_until_async(
                lambda: any(one.member == "After" for one in seen), what=f"life after {what}"
            )
            good = [one.member for one in seen if one.member != "After"]
            assert good == (["Good"] if b"Good" in data else []), what
        assert connection.counters["unparsable"] == 3

    _with_bus(tmp_path, test)


def test_a_call_that_can_not_be_read_gets_an_error(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        bus.send(call("Bad", extra=[(5, V("s", "x"))], serial=41))
        await wait_until_async(lambda: b"InvalidArgs" in bus.received, what="the error")
        assert seen == []

    _with_bus(tmp_path, test)


def test_bodies_are_decoded_only_when_asked_for(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        bus.send(call("Text", b"\xff\xff\xff\xff\0", "s") + call("Bool", struct.pack("<I", 7), "b"))
        bus.send(call("Good", codec.encode("su", ("x", 5)), "su"))
        await wait_until_async(lambda: len(seen) == 3, what="the calls")
        for bad in seen[:2]:
            with pytest.raises(codec.CodecError):
                bad.arguments()
        assert seen[2].arguments() == ["x", 5]

    _with_bus(tmp_path, test)


def test_an_oversized_body_is_thrown_away_unread(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        big = call("Big", b"\0" * (8 * 1024 * 1024), "ay", serial=77)
        sender = asyncio.get_running_loop().run_in_executor(None, bus.send, big + call("After"))
        await wait_until_async(lambda: [one.member for one in seen] == ["After"], what="the call after it")
        await sender
        await wait_until_async(lambda: b"LimitsExceeded" in bus.received, what="the error")
        assert connection.counters["oversized"] == 1
        assert len(connection._received) == 0
        just_fits = call("Fits", b"\0" * transport.MAX_BODY, "ay")
        bus.send(just_fits)
        await wait_until_async(lambda: seen[-1].member == "Fits", what="the call that fits")

    _with_bus(tmp_path, test)


def test_big_headers_are_thrown_away(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        bus.send(call("Bad", extra=[(50, V("ay", b"x" * 20_000))]) + call("After"))
        await wait_until_async(lambda: [one.member for one in seen] == ["After"], what="the call after it")

    _with_bus(tmp_path, test)


def test_big_endian_calls(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        fields = b""
        for code, kind, text in ((1, b"o", b"/x"), (3, b"s", b"Big"), (7, b"s", b":1.9")):
            fields += b"\0" * (-len(fields) % 8)
            fields += bytes((code, 1)) + kind + b"\0" + struct.pack(">I", len(text)) + text + b"\0"
        fields += b"\0" * (-len(fields) % 8) + b"\x08\x01g\0\x01u\0"
        head = b"B\x01\0\x01" + struct.pack(">III", 4, 5, len(fields)) + fields
        bus.send(head + b"\0" * (-len(head) % 8) + struct.pack(">I", 258))
        await wait_until_async(lambda: len(seen) == 1, what="the call")
        assert (seen[0].member, seen[0].sender, seen[0].serial) == ("Big", ":1.9", 5)
        assert seen[0].arguments() == [258]

    _with_bus(tmp_path, test)


def test_a_call_byte_by_byte(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        for byte in call("Slow", codec.encode("s", ("x",)), "s"):
            bus.send(bytes((byte,)))
            await asyncio.sleep(0)
        await wait_until_async(lambda: len(seen) == 1, what="the call")
        assert seen[0].arguments() == ["x"]

    _with_bus(tmp_path, test)


def test_many_calls_at_once_keep_their_order(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1

        connection.on_turn = turn
        data = b"".join(call("M", serial=number) for number in range(1, 3001))
        sender = asyncio.get_running_loop().run_in_executor(None, bus.send, data)
        await wait_until_async(lambda: len(seen) == 3000, what="all calls")
        await sender
        assert [one.serial for one in seen] == list(range(1, 3001))
        assert turns >= 3000 / transport.MESSAGES_PER_TURN

    _with_bus(tmp_path, test)


def test_a_failing_handler_is_no_reason_to_leave(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        def broken(message: Incoming) -> None:
            seen.append(message)
            raise ValueError("x")

        connection.on_call = broken
        bus.send(call("One") + call("Two"))
        await wait_until_async(lambda: len(seen) == 2, what="both calls")

    _with_bus(tmp_path, test)


def test_no_answer_in_time(tmp_path: Path) -> None:
    async def test(bus: FakeBus, connection: Connection, seen: list[Incoming]) -> None:
        with pytest.raises(CallFailed, match=r"did not answer Ping within 0\.1 s"):
            await connection.call("a.b", "/", "a.b", "Ping", timeout=0.1)
        assert connection._pending == {}

    _with_bus(tmp_path, test)


def test_serials_wrap(bus: PrivateBus) -> None:
    async def run() -> None:
        connection = Connection(bus.address)
        await connection.open()
        connection._serial = 0xFFFFFFFE
        for expected in (0xFFFFFFFF, 1, 2):
            await connection.call("org.freedesktop.DBus", "/", "org.freedesktop.DBus.Peer", "Ping")
            assert connection._serial == expected
        connection.close()

    asyncio.run(run())


def test_no_descriptors_are_taken(bus: PrivateBus) -> None:
    async def run() -> None:
        connection = Connection(bus.address)
        assert connection._negotiate_unix_fd is False
        connection.close()

    asyncio.run(run())


def test_errors_of_others_and_the_end(bus: PrivateBus) -> None:
    async def run() -> None:
        connection = Connection(bus.address)
        await connection.open()
        with pytest.raises(CallFailed) as caught:
            await connection.call("no.such.name", "/", "a.b", "C")
        # the private bus starts nobody, and lets nobody call whom no policy names
        assert caught.value.name.startswith("org.freedesktop.DBus.Error.")
        bus.stop()
        assert await asyncio.wait_for(connection.lost, 30) == "the bus closed the connection"
        with pytest.raises(CallFailed, match="the bus is gone"):
            await connection.call("org.freedesktop.DBus", "/", "org.freedesktop.DBus.Peer", "Ping")

    asyncio.run(run())


@pytest.mark.parametrize(
    "address", ["unix:path=/no/such/bus", "nonsense", "unix:abstract", "tcp:host=x,port=y"]
)
def test_bad_addresses(address: str) -> None:
    async def run() -> None:
        with pytest.raises(TransportError, match="bus"):
            await Connection(address).open()

    asyncio.run(run())


def test_a_bus_that_hangs_up_during_authentication(tmp_path: Path) -> None:

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "bus"))
    listener.listen(1)

    def hang_up() -> None:
        listener.accept()[0].close()

    thread = threading.Thread(target=hang_up)
    thread.start()

    async def run() -> None:
        with pytest.raises(TransportError, match="did not take the connection"):
            await asyncio.wait_for(Connection(f"unix:path={tmp_path / 'bus'}").open(), 30)

    asyncio.run(run())
    thread.join()
    listener.close()


def test_the_library_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    transport.check_version()
    monkeypatch.setattr(transport.library_version, "__version__", "0.3.0")
    with pytest.raises(TransportError, match=r"dbus-next 0\.2\.3 is needed, 0\.3\.0 is installed"):
        transport.check_version()
