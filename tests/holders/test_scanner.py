"""The scan worker behind the edge: results, freshness, blocked and dying workers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent.core.events import Opened, Scanned
from hetero_agent.core.model import Node, Role
from hetero_agent.holders import scanner
from hetero_agent.holders.scan import boottime
from hetero_agent.workers import host, process
from tests.holders.holding import (
    STRANGER,
    Rig,
    alive,
    as_user,
    console,
    file_node,
    holding,
    record,
    with_rig,
)
from tests.support.cgroup import control_group
from tests.support.freezer import Freezer, freezing
from tests.support.process import scratch
from tests.support.wait import wait_until, wait_until_async

_HOOKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hetero_agent.holders import evidence, scan, worker
def block(pid):
    # as if reading this process blocked: no real one can be made to, from outside the kernel
    if pid == int(open(sys.argv[2]).read()):
        os.open(sys.argv[3], os.O_RDONLY)
if WHAT == "process":
    real = scan.Walk.inspect_open
    def inspect(walk, pid, base):
        block(pid)
        return real(walk, pid, base)
    scan.Walk.inspect_open = inspect
else:
    def of_descriptors(base, names):
        block(int(os.readlink(f"/proc/self/fd/{base}").rpartition("/")[2]))
        return {"drm-driver": "lab"}
    evidence.of_descriptors = of_descriptors
worker.main(int(sys.argv[4]))
"""


def hooked(tmp_path: Path, what: str = "process") -> tuple[str, ...]:
    """A worker that blocks, in an open of a FIFO, at the pid in the file ``who``: when it reads the
    process, or its evidence."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "who").write_text("0")
    hook = _HOOKED.replace("WHAT", repr(what))
    command = (sys.executable, "-I", "-S", "-c", hook, process.PACKAGES)
    return (*command, str(tmp_path / "who"), str(tmp_path / "fifo"))


async def quick_scan(rig: Rig, node: Node, bound: int = 200_000) -> Scanned:
    """A scan that took less than BOUND µs; one of a few, since others may have kept a processor busy."""
    for _ in range(5):
        scanned = await rig.scan(a=(node,))
        if scanned.at.boot - scanned.started < bound:
            return scanned
    raise AssertionError(f"every scan takes more than {bound} µs")


def test_a_scan_tells_who_holds_what(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")

    async def test(rig: Rig) -> None:
        with holding(node.path) as child:
            before = boottime()
            first = await rig.scan(a=(node,), b=(console(52),))
            assert first.failed == ""
            assert before <= first.started <= first.at.boot
            assert first.devices["b"].holders == ()
            (holder,) = first.devices["a"].holders
            assert (holder.pid, holder.start, holder.uids) == (child.pid, child.start, (0, 0, 0, 0))
            assert (holder.comm, holder.mapped) == ("python3", False)
            assert holder.ancestors[0].pid == os.getpid()
            assert first.started <= holder.since <= first.at.boot
            # the sighting is the first one's, however often it is seen again
            second = await rig.scan(a=(node,))
            assert second.started > first.at.boot
            assert second.devices["a"].holders == (holder,)
        third = await rig.scan(a=(node,))
        assert third.devices["a"].holders == ()
        with holding(node.path):
            fourth = await rig.scan(a=(node,))
            assert fourth.devices["a"].holders[0].since >= fourth.started

    with_rig(test)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users can enter."""
    path = scratch("holders")
    yield path
    shutil.rmtree(path)


def test_the_uid_of_a_service_is_that_of_its_main_process(public: Path) -> None:
    """What cron runs for others lies in cron's control group, and has their uids."""
    node = file_node(public / "a")
    unit = "hetero-agent-test.service"

    async def test(rig: Rig) -> None:
        with (
            control_group(f"/system.slice/{unit}", "/user.slice") as (service, user),
            holding(node.path, before=as_user(STRANGER)) as main,
            holding(node.path, before=as_user(STRANGER + 1)) as other,
            holding(node.path, before=as_user(STRANGER)) as outside,
        ):
            for child in (main, other):
                service.add(child.pid)
            user.add(outside.pid)
            for known, uid in ((0, -1), (outside.pid, -1), (main.pid, STRANGER)):
                rig.main_pids[unit] = known
                scanned = await rig.scan(a=(node,))
                shown = {one.pid: (one.cgroup, one.service_uid) for one in scanned.devices["a"].holders}
                assert shown == {
                    main.pid: (service.path, uid),
                    other.pid: (service.path, uid),
                    outside.pid: (user.path, -1),
                }
            rig.main_pids.clear()  # systemd need not be asked again
            scanned = await rig.scan(a=(node,))
            assert {one.service_uid for one in scanned.devices["a"].holders} == {STRANGER, -1}

    with_rig(test)


def test_other_roles_prove_nothing(tmp_path: Path) -> None:
    own, parent, control = (file_node(tmp_path / role, Role(role)) for role in ("own", "parent", "control"))

    async def test(rig: Rig) -> None:
        with holding(parent.path), holding(control.path):
            scanned = await rig.scan(a=(own, parent, control))
            assert scanned.devices["a"].holders == ()

    with_rig(test)


def test_device_without_nodes_is_answered(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.scan(a=())).devices["a"].holders == ()

    with_rig(test)


def test_requests_during_a_scan_make_one_more(tmp_path: Path) -> None:
    nodes = {name: file_node(tmp_path / name) for name in "abc"}

    async def test(rig: Rig) -> None:
        rig.edge.request_scan({"a": (nodes["a"],)})
        await asyncio.sleep(0)  # it has been taken up
        asked = boottime()
        rig.edge.request_scan({"b": (nodes["b"],)})
        rig.edge.request_scan({"c": (nodes["c"],), "b": (nodes["b"],)})
        await rig.next(Scanned, 2)
        one, two = rig.of(Scanned)
        assert list(one.devices) == ["a"]
        assert sorted(two.devices) == ["b", "c"]
        assert two.started > max(asked, one.at.boot)
        # and then there is rest
        await rig.scan(a=(nodes["a"],))
        assert len(rig.of(Scanned)) == 3

    with_rig(test)


def test_an_open_is_told_before_the_scan_that_it_may_spoil(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")

    async def test(rig: Rig) -> None:
        rig.edge.watch_nodes("a", record("a", node))
        await rig.scan(a=(node,))
        # no turn of the loop lies between this open and the request
        with holding(node.path):
            rig.events.clear()
            await rig.scan(a=(node,))
            assert [type(event) for event in rig.events] == [Opened, Scanned]

    with_rig(test)


def test_a_stopped_worker_is_replaced_and_nobody_blamed(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")

    async def test(rig: Rig) -> None:
        await rig.scan(a=(node,))
        stopped = rig.worker
        os.kill(stopped, signal.SIGSTOP)
        with holding(node.path) as child:
            scanned = await rig.scan(a=(node,))
        assert scanned.failed == ""
        assert [holder.pid for holder in scanned.devices["a"].holders] == [child.pid]
        assert rig.edge.stats()["blocked"] == {}
        await wait_until_async(lambda: not alive(stopped), what="the end of the stopped worker")
        await wait_until_async(lambda: rig.edge.stats()["abandoned"] == 0, what="it being reaped")
        assert rig.worker != stopped

    with_rig(test, deadline=0.2)


def test_a_process_that_blocks_the_reader_is_left_out(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    command = hooked(tmp_path)

    async def test(rig: Rig) -> None:
        with holding(node.path, "none") as blocking, holding(node.path) as child:
            (tmp_path / "who").write_text(str(blocking.pid))
            begun = boottime()
            scanned = await rig.scan(a=(node,))
            assert scanned.failed == ""
            assert (blocking.pid, 0) in scanned.devices["a"].uninspected
            assert [holder.pid for holder in scanned.devices["a"].holders] == [child.pid]
            assert scanned.started > begun + 200_000, "the scan that was spoiled doesn't count"
            assert rig.edge.stats()["blocked"] == {blocking.pid: 0}
            # the next one doesn't wait for it again
            again = await quick_scan(rig, node)
            assert (blocking.pid, 0) in again.devices["a"].uninspected
            worker = rig.worker
        gone = await rig.scan(a=(node,))
        assert blocking.pid not in [pid for pid, _ in gone.devices["a"].uninspected]
        assert rig.edge.stats()["blocked"] == {}
        assert rig.worker == worker

    with_rig(test, deadline=0.2, command=command)


def test_evidence_that_blocks_the_reader_is_done_without(tmp_path: Path) -> None:
    """A GPU that hangs may never answer what a process has of it: the process holds it all the same."""
    node = file_node(tmp_path / "a")
    command = hooked(tmp_path, "evidence")

    async def test(rig: Rig) -> None:
        with holding(node.path) as child, holding(node.path) as other:
            (tmp_path / "who").write_text(str(child.pid))
            scanned = await rig.scan(a=(node,))
            assert scanned.failed == ""
            assert not {child.pid, other.pid} & {pid for pid, _ in scanned.devices["a"].uninspected}
            shown = {holder.pid: dict(holder.evidence) for holder in scanned.devices["a"].holders}
            plain = {"descriptors": "1", "path": node.path}
            assert shown == {child.pid: plain, other.pid: {**plain, "drm-driver": "lab"}}
            assert rig.edge.stats()["blocked"] == {}
            # the next one doesn't wait for it again
            again = await quick_scan(rig, node)
            assert {holder.pid for holder in again.devices["a"].holders} == {child.pid, other.pid}

    with_rig(test, deadline=0.2, command=command)


def test_a_process_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "_FIRST_PAUSE", 0.1)
    node = file_node(tmp_path / "a")
    command = hooked(tmp_path)

    async def test(rig: Rig) -> None:
        with holding(node.path) as blocking:
            (tmp_path / "who").write_text(str(blocking.pid))
            await rig.scan(a=(node,))
            assert rig.edge.stats()["blocked"] == {blocking.pid: 0}
            (tmp_path / "who").write_text("0")

            async def read() -> bool:
                scanned = await rig.scan(a=(node,))
                return [holder.pid for holder in scanned.devices["a"].holders] == [blocking.pid]

            async with asyncio.timeout(30):
                while not await read():
                    pass
            assert rig.edge.stats()["blocked"] == {}

    with_rig(test, deadline=0.2, command=command)


def test_a_scan_that_blocks_again_and_again_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "_BUDGET", 0.1)
    node = file_node(tmp_path / "a")
    command = hooked(tmp_path)

    async def test(rig: Rig) -> None:
        with holding(node.path) as blocking:
            (tmp_path / "who").write_text(str(blocking.pid))
            scanned = await rig.scan(a=(node,))
            assert scanned.failed == "reading /proc blocks again and again"
            assert list(scanned.devices) == ["a"]
            assert rig.edge.stats()["last-scan"]["failed"] == scanned.failed

    with_rig(test, deadline=0.2, command=command)


def test_a_worker_killed_between_scans_is_replaced(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")

    async def test(rig: Rig) -> None:
        await rig.scan(a=(node,))
        killed = rig.worker
        os.kill(killed, signal.SIGKILL)
        assert (await rig.scan(a=(node,))).failed == ""
        await wait_until_async(lambda: rig.edge.stats()["abandoned"] == 0, what="it being reaped")
        assert rig.worker != killed

    with_rig(test)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("/bin/false",), "the scan worker died"),
        (
            ("/dev/null/worker",),
            "no scan worker can be started: [Errno 20] Not a directory: '/dev/null/worker'",
        ),
    ],
)
def test_without_a_worker_the_scan_is_said_to_have_failed(
    tmp_path: Path, command: tuple[str, ...], reason: str
) -> None:
    node = file_node(tmp_path / "a")

    async def test(rig: Rig) -> None:
        with holding(node.path):
            scanned = await rig.scan(a=(node,))
        assert scanned.failed == reason
        assert list(scanned.devices) == ["a"]

    with_rig(test, command=command)


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    with freezing() as one:
        yield one


def test_workers_that_not_even_a_kill_ends_are_bounded(
    tmp_path: Path, freezer: Freezer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MOST_ABANDONED", 2)
    node = file_node(tmp_path / "a")

    async def test(rig: Rig) -> None:
        frozen = []
        for count in (1, 2):
            await rig.scan(a=(node,))
            (worker,) = set(rig.edge.stats()["workers"]) - set(frozen)
            freezer.freeze(worker)
            frozen.append(worker)
            if count == 1:
                assert (await rig.scan(a=(node,))).failed == ""
                assert rig.edge.stats()["abandoned"] == 1
        scanned = await rig.scan(a=(node,))
        assert scanned.failed == "2 scan workers are blocked in the kernel"
        assert rig.edge.stats()["workers"] == sorted(frozen)
        # when the kernel lets go, all is well again
        freezer.thaw()
        await wait_until_async(lambda: rig.edge.stats()["abandoned"] == 0, what="the workers' end")
        assert (await rig.scan(a=(node,))).failed == ""

    with_rig(test, deadline=0.2)


def test_the_worker_dies_with_the_agent(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {process.PACKAGES!r}); import asyncio, time\n"
        "from hetero_agent.workers.host import Host\n"
        "from hetero_agent.workers.process import command\n"
        "async def run():\n"
        "    host = Host(command('hetero_agent.holders.worker')); host.start()\n"
        "    print(*host.pids, flush=True); time.sleep(60)\n"
        "asyncio.run(run())"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    worker = int(agent.stdout.readline())
    assert alive(worker)
    agent.kill()
    agent.wait()
    agent.stdout.close()
    wait_until(lambda: not alive(worker), what="the end of the worker")


def test_the_worker_is_small() -> None:
    async def test(rig: Rig) -> None:
        await rig.scan(a=())
        # the rest is shared with the agent, which is the same interpreter
        status = Path(f"/proc/{rig.worker}/status").read_text()
        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        assert int(anonymous.split()[1]) < 12_000

    with_rig(test)


def test_nothing_is_submitted_after_the_stop(tmp_path: Path) -> None:
    rig = Rig()

    async def run() -> None:
        await rig.edge.start()
        worker = rig.worker
        rig.edge.request_scan({"a": (Node("/dev/tty52", Role.OWN, "char", 4, 52),)})
        await asyncio.sleep(0)
        await rig.edge.stop()
        assert not alive(worker)

    asyncio.run(run())
    assert rig.events == []
