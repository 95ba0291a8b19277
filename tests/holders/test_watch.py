"""inotify on nodes: opens and closes are told, replaced nodes are watched again."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import posix1e
import pytest

from hetero_agent.core.events import Closed, NodesTouched, Opened, Scanned
from hetero_agent.core.model import Node, Role
from hetero_agent.holders import watch
from tests.holders.holding import (
    Rig,
    as_user,
    console,
    file_node,
    holding,
    loop_node,
    now,
    record,
    with_rig,
)
from tests.support.wait import wait_until_async


async def settled(rig: Rig) -> None:
    """Wait until the watches asked for are in place."""
    await wait_until_async(lambda: not rig.edge.stats()["watching-blocked"], what="the watches")


@pytest.mark.parametrize("node", [console(53), loop_node(6)], ids=["char", "block"])
def test_open_and_close_of_a_device_are_told(node: Node) -> None:
    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await settled(rig)
        before = now().boot
        with holding(node.path):
            opened = await rig.next(Opened)
            assert opened.device == "a"
            assert before <= opened.at.boot <= now().boot
            assert rig.of(Closed) == []
        assert (await rig.next(Closed)).device == "a"

    with_rig(test)


def test_open_by_another_user_and_through_another_path(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    os.link(node.path, tmp_path / "link")
    bind = ["unshare", "-m", "sh", "-c", f'mount --bind {tmp_path}/link /mnt && exec "$@"', "sh"]
    (tmp_path / "mnt").touch()
    bind[-2] = bind[-2].replace("/mnt", f"{tmp_path}/mnt")

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await settled(rig)
        with holding(tmp_path / "mnt", "open", bind):
            await rig.next(Opened)
        await rig.next(Closed)
        fd = os.open(node.path, os.O_RDONLY)
        try:
            rig.events.clear()
            with holding(f"/proc/{os.getpid()}/fd/{fd}", "open", as_user(0)):
                await rig.next(Opened)
        finally:
            os.close(fd)

    with_rig(test)


def test_only_own_nodes_are_watched(tmp_path: Path) -> None:
    own, control = file_node(tmp_path / "own"), file_node(tmp_path / "control", Role.CONTROL)

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", own, control))
        await settled(rig)
        assert rig.edge.stats()["watched-nodes"] == 1
        with holding(control.path), holding(own.path):
            await rig.next(Opened)
            await rig.scan(a=(own,))
            assert len(rig.of(Opened)) == 1

    with_rig(test)


@pytest.mark.parametrize("role", [Role.OWN, Role.PARENT, Role.CONTROL])
def test_a_change_of_mode_owner_or_acl_is_told(tmp_path: Path, role: Role) -> None:
    node = file_node(tmp_path / "a", role)
    entry = posix1e.ACL(text="u::rw,u:1000:rw,g::-,m::rw,o::-")

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await settled(rig)
        for change in (
            lambda: os.chmod(node.path, 0o640),
            lambda: os.chown(node.path, 0, 7777),
            lambda: entry.applyto(node.path),
            lambda: os.removexattr(node.path, "system.posix_acl_access"),
        ):
            rig.events.clear()
            before = now().boot
            change()
            told = await rig.next(NodesTouched)
            assert told.device == "a"
            assert before <= told.at.boot <= now().boot
            await settled(rig)
        # neither a look at it nor an open is a change
        rig.events.clear()
        assert os.listxattr(node.path) is not None
        with holding(node.path):
            await rig.scan(a=(node,))
        assert rig.of(NodesTouched) == []

    with_rig(test)


def test_a_change_of_a_shared_node_is_told_for_each_device(tmp_path: Path) -> None:
    """One watch, an own node for the one and a control node for the other, whoever came first."""
    path = tmp_path / "a"
    own, control = file_node(path), replace(file_node(path), role=Role.CONTROL)

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("one", record("one", own))
        rig.edge.watch_nodes("two", record("two", control))
        await settled(rig)
        path.chmod(0o640)
        await rig.next(NodesTouched, 2)
        assert {event.device for event in rig.of(NodesTouched)} == {"one", "two"}
        await settled(rig)
        with holding(path):
            await rig.next(Opened)
        await rig.next(Closed)
        assert [event.device for event in rig.of(Opened)] == ["one"]
        rig.edge.watch_nodes("one", None)
        await settled(rig)
        rig.events.clear()
        with holding(path):
            await rig.scan(two=(own,))
        path.chmod(0o600)
        assert (await rig.next(NodesTouched)).device == "two"
        assert rig.of(Opened) == []

    with_rig(test)


def test_watching_is_no_holding() -> None:
    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", console(53)))
        scanned = await rig.scan(a=(console(53),))
        assert scanned.devices["a"].holders == ()
        assert rig.of(Opened) == []

    with_rig(test)


def test_one_node_of_two_devices(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")

    async def test(rig: Rig) -> None:
        for device in ("one", "two"):
            rig.edge.watch_nodes(device, record(device, node))
        await settled(rig)
        assert rig.edge.stats()["watched-nodes"] == 1
        with holding(node.path):
            await rig.next(Opened, 2)
            assert [event.device for event in rig.of(Opened)] == ["one", "two"]
        await rig.next(Closed, 2)
        # without the one the other is still watched
        rig.edge.watch_nodes("one", None)
        await settled(rig)
        rig.events.clear()
        with holding(node.path):
            assert (await rig.next(Opened)).device == "two"
        await rig.next(Closed)
        assert len(rig.events) == 2
        rig.edge.watch_nodes("two", None)
        await settled(rig)
        assert rig.edge.stats()["watched-nodes"] == 0

    with_rig(test)


def test_a_replaced_node_is_watched_and_counts_as_opened(tmp_path: Path) -> None:
    path = tmp_path / "a"
    node = file_node(path)

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await settled(rig)
        # kept, so that the new file can't get the old one's number
        path.rename(tmp_path / "old")
        file_node(path)
        await rig.next(Opened)
        await rig.next(NodesTouched)
        await settled(rig)
        rig.events.clear()
        with holding(path):
            await rig.next(Opened)
        await rig.next(Closed)

    with_rig(test)


def test_a_deleted_node_that_comes_back_is_watched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_FIRST_RETRY", 0.02)
    monkeypatch.setattr(watch, "_LAST_RETRY", 0.02)
    path = tmp_path / "a"
    node = file_node(path)

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await settled(rig)
        path.unlink()
        await wait_until_async(
            lambda: rig.edge.stats()["unwatched-nodes"] == {str(path): "No such file or directory"},
            what="the loss being noticed",
        )
        rig.events.clear()
        file_node(path)
        await rig.next(Opened)
        assert rig.edge.stats()["unwatched-nodes"] == {}
        await rig.next(NodesTouched)
        rig.events.clear()
        with holding(path):
            await rig.next(Opened)

    with_rig(test)


def test_a_deleted_node_tells_of_its_last_close(tmp_path: Path) -> None:
    path = tmp_path / "a"
    node = file_node(path)

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await settled(rig)
        with holding(path):
            await rig.next(Opened)
            path.unlink()
            await wait_until_async(lambda: rig.edge.stats()["unwatched-nodes"] != {}, what="the loss")
            assert rig.of(Closed) == []
        await rig.next(Closed)

    with_rig(test)


def test_a_record_with_other_nodes_moves_the_watch(tmp_path: Path) -> None:
    one, two = file_node(tmp_path / "1"), file_node(tmp_path / "2")

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", one))
        rig.edge.watch_nodes("a", record("a", two))
        await settled(rig)
        assert rig.edge.stats()["watched-nodes"] == 1
        with holding(one.path), holding(two.path):
            await rig.next(Opened)
        await rig.next(Closed)
        await rig.scan(a=(one, two))
        assert len(rig.of(Opened)) == 1

    with_rig(test)


def test_nodes_asked_for_before_the_start(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    rig = Rig()

    async def run() -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await rig.edge.start()
        await settled(rig)
        with holding(node.path):
            await rig.next(Opened)
        await rig.edge.stop()

    asyncio.run(run())


def test_bursts_become_few_events(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await settled(rig)
        done = threading.Event()

        def burst() -> None:
            for _ in range(20_000):
                os.close(os.open(node.path, os.O_RDONLY))
            done.set()

        begun = now().boot
        thread = threading.Thread(target=burst)
        thread.start()
        await wait_until_async(done.is_set, what="the burst")
        thread.join()
        took = (now().boot - begun) / 1e6
        await rig.scan(a=(node,))
        assert 1 <= len(rig.of(Opened)) <= took / watch._REST + 2
        assert 1 <= len(rig.of(Closed)) <= took / watch._REST + 2

    with_rig(test)


def test_after_an_overflow_every_device_counts_as_opened(tmp_path: Path) -> None:
    busy, quiet = file_node(tmp_path / "busy"), file_node(tmp_path / "quiet")

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("busy", record("busy", busy))
        rig.edge.watch_nodes("quiet", record("quiet", quiet))
        await settled(rig)
        most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
        # the loop stands still meanwhile, so nobody reads
        for _ in range(most // 2 + 10):
            os.close(os.open(busy.path, os.O_RDONLY))
        await rig.next(Opened, 2)
        assert {event.device for event in rig.of(Opened)} == {"busy", "quiet"}
        assert rig.edge.stats()["overflows"] == 1

    with_rig(test)


def test_a_node_that_is_replaced_during_an_overflow_is_watched_again(tmp_path: Path) -> None:
    busy, quiet = file_node(tmp_path / "busy"), file_node(tmp_path / "quiet")

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("busy", record("busy", busy))
        rig.edge.watch_nodes("quiet", record("quiet", quiet))
        await settled(rig)
        most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
        for _ in range(most // 2 + 10):
            os.close(os.open(busy.path, os.O_RDONLY))
        Path(quiet.path).unlink()
        file_node(tmp_path / "quiet")
        await rig.next(Opened, 2)
        await settled(rig)
        rig.events.clear()
        with holding(quiet.path):
            assert (await rig.next(Opened)).device == "quiet"

    with_rig(test)


def test_nothing_is_kept_of_nodes_that_come_and_go(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        nodes = rig.edge._nodes
        for _ in range(20):
            node = file_node(tmp_path / "a")
            rig.edge.watch_nodes("a", record("a", node))
            await settled(rig)
            Path(node.path).unlink()
            await wait_until_async(lambda: rig.edge.stats()["unwatched-nodes"], what="the end of the node")
            rig.edge.watch_nodes("a", None)
            await settled(rig)
        assert len(nodes._dead) <= 2
        assert (nodes._devices, nodes._placed) == ({}, {})

    with_rig(test)


def test_a_path_that_blocks_holds_up_neither_loop_nor_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = file_node(tmp_path / "a")
    release = threading.Event()
    real = watch._libc.inotify_add_watch

    class Slow:
        """The C library with a path walk that blocks, as on a dead file server."""

        def __getattr__(self, name: str) -> object:
            return getattr(real_libc, name)

        def inotify_add_watch(self, *args: object) -> int:
            release.wait(30)
            return int(real(*args))

    real_libc = watch._libc
    monkeypatch.setattr(watch, "_libc", Slow())
    monkeypatch.setattr(watch, "_SETTLE", 0.1)

    async def test(rig: Rig) -> None:
        try:
            rig.edge.watch_nodes("a", record("a", node))
            scanned = await rig.scan(a=(node,))
            assert scanned.failed == ""
            assert rig.edge.stats()["watching-blocked"] is True
            assert rig.of(Opened) == []
        finally:
            release.set()
        # opens were missed, perhaps, so there is news when the watch is there at last
        await rig.next(Opened)
        assert rig.edge.stats()["watching-blocked"] is False

    with_rig(test)


def test_without_inotify_scans_go_on(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")

    class NoInotify(watch.NodeWatch):
        def start(self) -> None:
            raise OSError(24, "inotify: Too many open files")

    async def test() -> None:
        rig = Rig()
        rig.edge._nodes.__class__ = NoInotify
        await rig.edge.start()
        try:
            rig.edge.watch_nodes("a", record("a", node))
            with holding(node.path) as child:
                scanned = await rig.scan(a=(node,))
            assert [holder.pid for holder in scanned.devices["a"].holders] == [child.pid]
            assert rig.edge.stats()["deaf"] == "[Errno 24] inotify: Too many open files"
            assert [type(event) for event in rig.events] == [Scanned]
        finally:
            await rig.edge.stop()

    asyncio.run(test())


def test_an_unreadable_node_is_named(tmp_path: Path) -> None:
    missing = Node(str(tmp_path / "missing"), Role.OWN, "file", fsdev=1, inode=1)

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", missing))
        await settled(rig)
        await wait_until_async(
            lambda: rig.edge.stats()["unwatched-nodes"] == {missing.path: "No such file or directory"},
            what="the reason",
        )
        # the device goes, and with it the complaint
        rig.edge.watch_nodes("a", None)
        await settled(rig)
        await wait_until_async(lambda: rig.edge.stats()["unwatched-nodes"] == {}, what="silence")

    with_rig(test)
