"""Who can open nodes without a lease: what is told, once, and what a file system that hangs costs."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import posix1e
import pytest

from hetero_agent.access import acl, door, seats, survey
from hetero_agent.access.manifest import AccessError
from hetero_agent.access.survey import NOTE, WRONG, Survey
from hetero_agent.core.events import NodesTouched, Note, Observed, Opened
from hetero_agent.core.model import AuditKind, DeviceRecord, Instant, Node, Role
from tests.access.test_acl import mode
from tests.support.console import CONSOLE
from tests.support.timing import Stalls
from tests.support.wait import wait_until_async


@pytest.fixture(autouse=True)
def console(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The console 0660 with a group; a settling that is quick."""
    before = CONSOLE.stat()
    os.chown(CONSOLE, 0, 7777)
    CONSOLE.chmod(0o660)
    monkeypatch.setattr(survey, "SETTLE", 0.01)
    monkeypatch.setattr(seats, "active", dict)
    yield
    if os.listxattr(CONSOLE):
        os.removexattr(CONSOLE, "system.posix_acl_access")
    os.chown(CONSOLE, before.st_uid, before.st_gid)
    CONSOLE.chmod(before.st_mode & 0o777)


def node(path: Path = CONSOLE, role: Role = Role.OWN) -> Node:
    found = path.stat()
    if path == CONSOLE:
        return Node(str(path), role, "char", os.major(found.st_rdev), os.minor(found.st_rdev))
    return Node(str(path), role, "file", fsdev=found.st_dev, inode=found.st_ino)


class Rig:
    """A survey of DEVICES (id -> nodes), with LEASES (uid -> devices)."""

    def __init__(self, **devices: tuple[Node, ...]) -> None:
        self.devices = {
            name: SimpleNamespace(record=DeviceRecord(name, "example.com/npu", nodes=nodes), present=True)
            for name, nodes in devices.items()
        }
        self.leases: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.open_to_all: set[str] = set()
        self.gives = True

    def lease(self, uid: int, *devices: str) -> None:
        self.leases[f"{uid}"] = SimpleNamespace(uid=uid, devices=devices)

    def touch(self, device: str) -> None:
        self.survey.tell(NodesTouched(Instant(1, 1), device))

    @property
    def told(self) -> list[tuple[int, str, str]]:
        return [(note.priority, note.device, note.text) for note in self.notes]

    async def wait(self, number: int) -> tuple[int, str, str]:
        """The last of NUMBER notes."""
        await wait_until_async(lambda: len(self.notes) >= number, what=f"{number} notes")
        await asyncio.sleep(0)
        assert len(self.notes) == number
        return self.told[-1]

    async def rest(self) -> None:
        """Wait until all that was told of has been looked at."""
        await wait_until_async(
            lambda: not self.survey._due and not self.survey._wake.is_set(), what="the round"
        )
        async with self.survey._one:
            pass

    def run(self, body: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            self.survey = Survey(
                self,  # type: ignore[arg-type]
                self.notes.append,  # type: ignore[arg-type]
                lambda: Instant(1, 1),
                lambda: self.open_to_all,
                lambda: self.gives,
            )
            self.survey.start()
            try:
                await asyncio.wait_for(body(self), 60)
            finally:
                await self.survey.stop()

        asyncio.run(whole())


def entries(text: str) -> None:
    posix1e.ACL(text=text).applyto(str(CONSOLE))


def test_each_change_is_told_once() -> None:
    async def body(rig: Rig) -> None:
        await rig.rest()
        assert rig.notes == []
        entries("u::rw,u:1000:rw,u:1001:r,u:1002:-,g::rw,m::rw,o::-")
        rig.touch("a")
        priority, device, text = await rig.wait(1)
        assert (priority, device) == (4, "a")
        assert "user 1000 (rw-) that no lease gives" in text
        assert "user 1001 (r--)" in text
        assert "1002" not in text
        assert rig.notes[0].kind is AuditKind.EXPOSURE
        for _ in range(3):
            rig.touch("a")
            await rig.rest()
        assert len(rig.notes) == 1
        assert len(rig.survey.problems()) == 2
        # only what is new
        CONSOLE.chmod(0o664)
        rig.touch("a")
        _, _, text = await rig.wait(2)
        assert text.startswith(f"{CONSOLE} is open to every user (0664)")
        assert "1000" not in text
        entries("u::rw,g::rw,o::-")
        rig.touch("a")
        assert await rig.wait(3) == (
            5,
            "a",
            "the nodes of a are closed again to all but their group and the owner of a lease",
        )
        assert rig.survey.problems() == []

    Rig(a=(node(),)).run(body)


def test_a_leases_uid_is_no_stranger_on_any_node_of_its_devices(tmp_path: Path) -> None:
    """Also one that has ended, as long as its device has not settled; and on nodes that are shared."""

    async def body(rig: Rig) -> None:
        rig.lease(1000, "a")
        entries("u::rw,u:1000:rw,g::rw,m::rw,o::-")
        rig.touch("a")
        rig.touch("b")
        await rig.rest()
        assert rig.notes == []
        rig.leases.clear()
        rig.touch("a")
        rig.touch("b")
        await rig.wait(2)
        # the parts of a card share it: one problem
        assert len(rig.survey.problems()) == 1

    Rig(a=(node(),), b=(node(role=Role.CONTROL),)).run(body)


def test_what_the_profile_and_the_role_say_of_a_mode(tmp_path: Path) -> None:
    file = tmp_path / "npu0"
    file.touch(mode=0o666)
    CONSOLE.chmod(0o666)

    async def body(rig: Rig) -> None:
        await rig.rest()
        assert [(device, text.split(":")[0]) for _, device, text in rig.told] == [
            ("own", f"{CONSOLE} is open to every user (0666)"),
            ("parent", f"{CONSOLE} is open to every user (0666)"),
        ]
        rig.open_to_all.add(str(CONSOLE))
        rig.touch("own")
        rig.touch("parent")
        await rig.wait(4)
        assert rig.survey.problems() == []

    Rig(
        own=(node(),),
        parent=(node(role=Role.PARENT),),
        control=(node(role=Role.CONTROL),),
        provider=(node(file),),
    ).run(body)


def test_the_group_bits_of_an_acl_are_not_the_groups() -> None:
    os.chown(CONSOLE, 0, 0)
    entries("u::rw,u:1000:rw,g::-,m::rw,o::-")
    assert mode(CONSOLE) == 0o660

    async def body(rig: Rig) -> None:
        rig.lease(1000, "a")
        (found,) = await rig.survey.look("a")
        assert (found.mode, found.entries) == (0o600, {1000: "rw-"})
        ((level, text),) = found.remarks
        assert level == NOTE
        assert text.startswith(f"{CONSOLE} is root:root 0600: only root and the owner of a lease can use it;")
        rig.gives = False
        (found,) = await rig.survey.look("a")
        ((level, text),) = found.remarks
        assert level == WRONG
        assert ": only root can use it;" in text

    Rig(a=(node(),)).run(body)


def test_a_node_that_belongs_to_a_user() -> None:
    os.chown(CONSOLE, 1000, 7777)

    async def body(rig: Rig) -> None:
        rig.lease(1000, "a")
        await rig.rest()
        assert rig.notes == []
        rig.leases.clear()
        rig.survey.again()
        assert (await rig.wait(1))[2] == (
            f"{CONSOLE} belongs to user 1000, who can use it without a lease; look for a stray udev rule"
            " with OWNER="
        )

    Rig(a=(node(),)).run(body)


def test_who_sits_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "active", lambda: {1000: "seat0"})
    entries("u::rw,u:1000:rw,g::rw,m::rw,o::-")

    async def body(rig: Rig) -> None:
        assert (await rig.wait(1))[0] == 5
        assert "user 1000, who sits at seat0" in rig.told[0][2]
        assert rig.survey.problems() == []

    Rig(a=(node(),)).run(body)


def test_a_new_device_is_looked_at_and_one_that_is_gone_forgotten() -> None:
    CONSOLE.chmod(0o666)

    async def body(rig: Rig) -> None:
        await rig.rest()
        found = DeviceRecord("a", "example.com/npu", nodes=(node(),))
        rig.devices["a"] = SimpleNamespace(record=found, present=True)
        rig.survey.tell(Opened(Instant(1, 1), "a"))
        await rig.rest()
        assert rig.notes == []
        rig.survey.tell(Observed(Instant(1, 1), "kernel", (rig.devices["a"].record,)))
        await rig.wait(1)
        del rig.devices["a"]
        rig.survey.tell(Observed(Instant(1, 1), "kernel", gone=("a",)))
        await rig.rest()
        await wait_until_async(lambda: rig.survey.problems() == [], what="the end of the problem")
        assert len(rig.notes) == 1
        assert await rig.survey.look("a") == ()

    Rig().run(body)


def test_a_node_that_is_gone_or_another_is_left_to_others(tmp_path: Path) -> None:
    gone = Node(str(tmp_path / "gone"), Role.OWN, "char", 4, 1)
    other = Node(str(CONSOLE), Role.OWN, "char", 4, 1)

    async def body(rig: Rig) -> None:
        assert await rig.survey.look("a") == []
        await rig.rest()
        assert rig.notes == []

    Rig(a=(gone, other)).run(body)


def test_what_is_left_of_an_unplugged_device_says_nothing() -> None:
    """A driver may leave its nodes behind, as NVIDIA's does, and no profile speaks for them any more."""
    CONSOLE.chmod(0o666)

    async def body(rig: Rig) -> None:
        await rig.rest()
        rig.open_to_all.clear()
        # a lease still has it
        rig.devices["a"].present = False
        rig.survey.tell(Observed(Instant(1, 1), "kernel", (), ("a",)))
        await rig.rest()
        assert rig.notes == []
        assert rig.survey.problems() == []
        rig.devices["a"].present = True
        rig.touch("a")
        await rig.wait(1)

    one = Rig(a=(node(),))
    one.open_to_all.add(str(CONSOLE))
    one.run(body)


def test_all_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that was there before a lease is told of after it, though nothing touched the node."""
    monkeypatch.setattr(survey, "INTERVAL", 0.05)
    entries("u::rw,u:1000:rw,g::rw,m::rw,o::-")

    async def body(rig: Rig) -> None:
        rig.lease(1000, "a")
        await rig.rest()
        assert rig.notes == []
        rig.leases.clear()
        await rig.wait(1)

    Rig(a=(node(),)).run(body)


def test_a_file_system_that_hangs_costs_one_thread_and_no_call_waits_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    looks: list[str] = []
    real = acl.look

    def stuck(node: Any) -> acl.Rights:
        looks.append(node.path)
        release.wait(60)
        return real(node)

    monkeypatch.setattr(acl, "look", stuck)
    monkeypatch.setattr(door, "DEADLINE", 0.1)

    async def body(rig: Rig) -> None:
        try:
            await wait_until_async(lambda: caplog.messages, what="the complaint")
            for _ in range(3):
                with pytest.raises(AccessError, match="hangs"):
                    await rig.survey.look("a")
                rig.touch("a")
            await wait_until_async(lambda: not rig.survey._wake.is_set(), what="the round")
            assert len(looks) == 1
            assert len(caplog.messages) == 1
            assert "can't be told" in caplog.messages[0]
        finally:
            release.set()

    Rig(a=(node(),)).run(body)


def test_a_process_without_descriptors_says_nothing_of_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    CONSOLE.chmod(0o666)
    real, lacking = acl._walk, False

    def walk(path: str) -> int:
        if lacking:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path)

    monkeypatch.setattr(acl, "_walk", walk)

    async def body(rig: Rig) -> None:
        nonlocal lacking
        await rig.wait(1)
        lacking = True
        rig.touch("a")
        await wait_until_async(lambda: caplog.messages, what="the complaint")
        assert "Too many open files" in caplog.messages[0]
        assert len(rig.survey.problems()) == 1
        lacking = False
        CONSOLE.chmod(0o660)
        # what was not looked at is looked at with the next news of anything
        rig.touch("b")
        assert (await rig.wait(2))[0] == 5

    Rig(a=(node(),)).run(body)


def test_calls_outside_a_task_have_their_deadline() -> None:
    """The dispatcher of the bus runs a call up to its first wait without a task."""

    async def body(rig: Rig) -> None:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def begin() -> None:
            work = rig.survey.look("a")
            pending = work.send(None)
            pending.add_done_callback(lambda _: done.set_result(True))

        asyncio.get_running_loop().call_soon(begin)
        assert await done

    Rig(a=(node(),)).run(body)


def test_many_devices_are_looked_at_off_the_loop() -> None:
    """4,096 devices with two nodes: the loop is free meanwhile."""
    nodes = (node(), node(role=Role.CONTROL))

    async def body(rig: Rig) -> None:
        async with Stalls() as stalls:
            while rig.survey._due or rig.survey._wake.is_set() or rig.survey._one.locked():
                await asyncio.sleep(0.001)
        assert stalls.longest < 2

    Rig(**{f"d{number}": nodes for number in range(4096)}).run(body)
