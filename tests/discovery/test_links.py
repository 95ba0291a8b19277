"""News of network interfaces, as the kernel tells them in a network namespace of the test's own."""

from __future__ import annotations

import asyncio
import struct

from hetero_agent.discovery.links import LinkNews, names_in
from tests.discovery.observe import watching
from tests.support.network import in_own_network, ip
from tests.support.umock import bed, in_umockdev
from tests.support.wait import wait_until_async


@in_own_network
def test_an_interface_goes_up_and_down() -> None:
    async def listen() -> None:
        heard: list[str | None] = []
        news = LinkNews(heard.append)
        news.start()
        await asyncio.to_thread(lambda: None)
        for command in ("link add hca0 type veth peer name wire0", "link set hca0 up", "link set hca0 down"):
            heard.clear()
            ip(command)
            await wait_until_async(lambda: "hca0" in heard, what=f"news of {command}")
        news.stop()
        heard.clear()
        ip("link set hca0 up")
        await asyncio.sleep(0)
        assert heard == []

    asyncio.run(listen())


def message(kind: int, *attributes: tuple[int, bytes]) -> bytes:
    body = bytes(16)
    for number, value in attributes:
        body += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def test_what_is_in_a_datagram() -> None:
    up = message(16, (13, b"\1"), (3, b"eth0\0"), (4, b"\0\0\0\0"))
    gone = message(17, (3, b"ib12\0"))
    address = message(20, (3, b"eth9\0"))
    assert list(names_in(up + address + gone)) == ["eth0", "ib12"]


def test_what_is_cut_or_makes_no_sense_ends_it() -> None:
    whole = message(16, (3, b"eth0\0"))
    assert list(names_in(b"")) == []
    for size in range(len(whole)):
        list(names_in(whole[:size]))
    assert list(names_in(struct.pack("=IHHII", 3, 16, 0, 0, 0) + bytes(32))) == []
    assert list(names_in(message(16, (1, b"")) + whole)) == ["eth0"]
    assert list(names_in(struct.pack("=IHHII", 40, 16, 0, 0, 0) + bytes(24))) == []


@in_umockdev("unshare", "--net")
def test_an_adapter_is_read_again_without_a_uevent() -> None:
    card = "0000:3b:00.0"
    ip("link add hca0 type veth peer name wire0")

    async def body() -> None:
        with bed() as mock:
            path = mock.pci(card, "15b3:101d", "020000", "mlx5_core")
            port = mock.child(path, "infiniband", "mlx5_0")
            mock.child(path, "infiniband_verbs", "uverbs0", "infiniband/uverbs0", "231:192")
            link = mock.child(path, "net", "hca0")
            mock.file(f"{link}/operstate", "up\n")
            mock.file(f"{port}/ports/1/state", "4: ACTIVE\n")
            async with watching() as seen:
                assert seen.records[card].attributes["net-state"] == "up"
                mock.file(f"{link}/operstate", "down\n")
                ip("link set hca0 up")
                await seen.until(lambda all: all[card].attributes["net-state"] == "down", "the link's state")
                # the adapter follows a little later
                mock.file(f"{port}/ports/1/state", "1: DOWN\n")
                await seen.until(
                    lambda all: all[card].attributes["port-state"] == "1: DOWN", "the port's state"
                )

    asyncio.run(body())
