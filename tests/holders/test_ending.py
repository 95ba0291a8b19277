"""The last look before a signal: real processes that may, and may not, be ended."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent.core.effects import Terminate
from hetero_agent.core.events import Signalled
from hetero_agent.core.model import Holder, Node, ProcessRef, Role
from tests.holders.holding import (
    STRANGER,
    Child,
    Rig,
    alive,
    as_user,
    file_node,
    holding,
    loop_node,
    with_rig,
)


@pytest.fixture
def node() -> Iterator[Node]:
    """A file that every user can open."""
    path = Path(f"/tmp/hetero-agent-ending-{os.getpid()}")
    yield file_node(path)
    path.unlink()


def order(pid: int, start: int, uid: int | None, name: str = "KILL") -> Terminate:
    """An order to end one process."""
    return Terminate("a", "lease", Holder(pid, start), name, uid)


async def outcome(rig: Rig, wanted: Terminate, node: Node) -> tuple[bool, str]:
    """Carry out WANTED; return whether it was sent, and the reason."""
    count = len(rig.of(Signalled)) + 1
    rig.edge.terminate(wanted, (node,))
    answer = await rig.next(Signalled, count)
    assert (answer.device, answer.signal) == ("a", wanted.signal)
    assert answer.holder == ProcessRef(wanted.holder.pid, wanted.holder.start)
    return answer.sent, answer.reason


@pytest.mark.parametrize(("name", "number"), [("TERM", signal.SIGTERM), ("KILL", signal.SIGKILL)])
@pytest.mark.parametrize("uid", [STRANGER, None])
def test_a_holder_of_the_uid_is_signalled(node: Node, name: str, number: int, uid: int | None) -> None:
    async def test(rig: Rig) -> None:
        with holding(node.path, "open", as_user(STRANGER)) as child:
            assert await outcome(rig, order(child.pid, child.start, uid, name), node) == (True, "")
            assert child.process.wait(30) == -number

    with_rig(test)


def test_a_holder_by_mapping_of_a_copy_is_signalled(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    os.mknod(copy, stat.S_IFBLK | 0o600, os.makedev(7, 6))

    async def test(rig: Rig) -> None:
        with holding(copy, "map") as child:
            assert await outcome(rig, order(child.pid, child.start, 0), loop_node(6)) == (True, "")
            assert child.process.wait(30) == -signal.SIGKILL

    with_rig(test)


async def refused(rig: Rig, wanted: Terminate, node: Node, child: Child) -> str:
    """Carry out WANTED, which must not be sent; return the reason."""
    sent, reason = await outcome(rig, wanted, node)
    assert sent is False
    # a signal would have come before this answer
    assert alive(child.pid)
    return reason


def test_a_process_of_another_uid_is_not(node: Node) -> None:
    async def test(rig: Rig) -> None:
        with holding(node.path) as child:
            reason = await refused(rig, order(child.pid, child.start, STRANGER), node, child)
            assert reason == f"it does not run as uid {STRANGER} alone"
        with holding(node.path, "open", as_user(STRANGER)) as child:
            reason = await refused(rig, order(child.pid, child.start, STRANGER + 1), node, child)
            assert reason == f"it does not run as uid {STRANGER + 1} alone"

    with_rig(test)


@pytest.mark.parametrize("options", [["--ruid"], ["--euid"]])
def test_one_uid_of_four_is_not_enough(node: Node, options: list[str]) -> None:
    before = ["setpriv", *(f"{option}={STRANGER}" for option in options), "--clear-groups"]

    async def test(rig: Rig) -> None:
        with holding(node.path, "open", before) as child:
            reason = await refused(rig, order(child.pid, child.start, STRANGER), node, child)
            assert reason == f"it does not run as uid {STRANGER} alone"

    with_rig(test)


@pytest.mark.parametrize("way", ["none", "path"])
def test_a_process_that_does_not_hold_the_device_is_not(node: Node, way: str) -> None:
    async def test(rig: Rig) -> None:
        with holding(node.path, way) as child:
            reason = await refused(rig, order(child.pid, child.start, 0), node, child)
            assert reason == "it does not hold the device any more"

    with_rig(test)


def test_a_process_that_holds_only_a_control_node_is_not(node: Node) -> None:
    control = Node(node.path, Role.CONTROL, "file", fsdev=node.fsdev, inode=node.inode)

    async def test(rig: Rig) -> None:
        with holding(node.path) as child:
            reason = await refused(rig, order(child.pid, child.start, 0), control, child)
            assert reason == "it does not hold the device any more"

    with_rig(test)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_later_process_with_the_same_pid_is_not(node: Node, difference: int) -> None:
    async def test(rig: Rig) -> None:
        with holding(node.path) as child:
            wanted = order(child.pid, child.start + difference, 0)
            assert await refused(rig, wanted, node, child) == "the process has ended"

    with_rig(test)


def test_a_process_that_has_ended_is_not(node: Node) -> None:
    async def test(rig: Rig) -> None:
        with holding(node.path) as child:
            wanted = order(child.pid, child.start, 0)
        assert await outcome(rig, wanted, node) == (False, "the process has ended")

    with_rig(test)


@pytest.mark.parametrize("pid", [1, 0, -1])
def test_the_first_process_and_groups_are_never(node: Node, pid: int) -> None:
    async def test(rig: Rig) -> None:
        start = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
        assert await outcome(rig, order(pid, start, None), node) == (
            False,
            "this process is never signalled",
        )

    with_rig(test)


def test_the_agent_its_worker_and_its_bus_are_never(node: Node) -> None:
    async def test(rig: Rig) -> None:
        with holding(node.path) as bus, open(node.path):
            rig.protected.add(bus.pid)
            for pid in (os.getpid(), rig.worker, bus.pid):
                start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
                answer = await outcome(rig, order(pid, start, None), node)
                assert answer == (False, "this process is never signalled")
                assert alive(pid)

    with_rig(test)


def test_a_kernel_thread_is_never(node: Node) -> None:
    async def test(rig: Rig) -> None:
        start = int(Path("/proc/2/stat").read_text().rpartition(")")[2].split()[19])
        sent, reason = await outcome(rig, order(2, start, None), node)
        assert sent is False
        assert reason == "it is a kernel thread"

    with_rig(test)


def test_no_other_signal_is_sent(node: Node) -> None:
    async def test(rig: Rig) -> None:
        with holding(node.path) as child:
            reason = await refused(rig, order(child.pid, child.start, 0, "STOP"), node, child)
            assert reason == "only TERM and KILL are sent"

    with_rig(test)


def test_without_a_worker_nobody_is_signalled(node: Node) -> None:
    async def test(rig: Rig) -> None:
        with holding(node.path) as child:
            reason = await refused(rig, order(child.pid, child.start, 0), node, child)
            assert reason == "it can't be told whether it holds the device: the scan worker died"

    with_rig(test, command=("/bin/false",))
