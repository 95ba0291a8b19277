"""News of network interfaces, as the kernel tells them in a network namespace of the test's own."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

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
    assert list(names_in(message(16, (3, b"\xc3\xa9th0\0")) + message(16, (3, b"\xe9th0\0")))) == [
        "éth0",
        "\udce9th0",
    ]


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


@in_umockdev("unshare", "--net")
def test_news_begin_with_the_profile_that_wants_them(tmp_path: Path) -> None:
    card = "0000:3b:00.0"
    ip("link add hca0 type veth peer name wire0")
    override = tmp_path / "rdma.toml"
    override.write_text("enabled = false\n" + Path("hetero_agent/profiles/rdma.toml").read_text())

    async def body() -> None:
        with bed() as mock:
            path = mock.pci(card, "15b3:101d", "020000", "mlx5_core")
            mock.child(path, "infiniband", "mlx5_0")
            link = mock.child(path, "net", "hca0")
            mock.file(f"{link}/operstate", "up\n")
            async with watching(tmp_path) as seen:
                assert seen.records == {}
                override.unlink()
                await seen.source.reload()
                await seen.until(lambda all: card in all, "the adapter")
                mock.file(f"{link}/operstate", "down\n")
                ip("link set hca0 up")
                await seen.until(lambda all: all[card].attributes["net-state"] == "down", "the link's state")

    asyncio.run(body())
