"""Whose process it is, and the news of its end, with real processes."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent.core.events import OwnerGone
from hetero_agent.core.model import Binding, ProcessRef
from hetero_agent.core.ports import ProcessFacts
from hetero_agent.holders import process
from hetero_agent.holders.process import identify
from tests.holders.holding import NOWHERE, STRANGER, Child, Rig, as_user, holding, now, with_rig
from tests.support.timing import within
from tests.support.wait import wait_until


def bound(child: Child) -> Binding:
    """A binding to the child."""
    return Binding(pid=ProcessRef(child.pid, child.start))


def test_facts_of_a_process() -> None:
    with holding(NOWHERE, "none", as_user(STRANGER)) as child:
        found = identify(child.pid)
        assert found is not None
        assert Path(f"/proc/{child.pid}/cgroup").read_text().splitlines()[-1].endswith(found.cgroup)
        ref = ProcessRef(child.pid, child.start)
        assert found == ProcessFacts(ref, (STRANGER,) * 4, "", found.cgroup, owner=0)


def test_whose_user_namespace_a_process_is_in() -> None:
    inside = [*as_user(STRANGER), "unshare", "--user", "--map-root-user"]
    with holding(NOWHERE, "none", inside) as child:
        found = identify(child.pid)
        assert found is not None
        assert found.owner == STRANGER


def test_all_four_uids_are_told() -> None:
    changed = ["setpriv", f"--ruid={STRANGER}", "--clear-groups"]
    with holding(NOWHERE, "none", changed) as child:
        facts = identify(child.pid)
        assert facts is not None
        assert facts.uids == (STRANGER, 0, 0, 0)


def test_no_process_has_no_facts() -> None:
    with holding(NOWHERE, "none") as child:
        pass
    assert identify(child.pid) is None
    assert identify(0) is None
    assert identify(-1) is None
    assert identify(2**31 - 1) is None


def test_a_zombie_has_no_facts() -> None:
    with holding(NOWHERE, "zombie") as child:
        zombie = int(child.said)
        assert Path(f"/proc/{zombie}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        assert identify(zombie) is None


def test_threads_alone_are_a_process_still_but_no_thread_is_one() -> None:
    with holding(NOWHERE, "leaderless") as child:
        facts = identify(child.pid)
        assert facts is not None
        assert facts.ref == ProcessRef(child.pid, child.start)
        (thread,) = (int(name) for name in os.listdir(f"/proc/{child.pid}/task") if name != str(child.pid))
        assert identify(thread) is None


def test_a_kernel_thread_has_no_facts() -> None:
    assert Path("/proc/2/comm").read_text() == "kthreadd\n"
    assert identify(2) is None


def test_the_end_of_a_killed_process_is_told_at_once() -> None:
    took: list[float] = []

    async def test(rig: Rig) -> None:
        with holding(NOWHERE, "none") as child:
            rig.edge.watch_process("lease", bound(child))
            assert rig.edge.stats()["watched-processes"] == 1
            await rig.scan(a=())
            assert rig.of(OwnerGone) == []
            before = now().boot
            os.kill(child.pid, signal.SIGKILL)
            gone = await rig.next(OwnerGone)
            # not reaped yet: a zombie has ended
            assert os.path.exists(f"/proc/{child.pid}")
            assert (gone.lease, gone.how) == ("lease", "pid")
            assert before <= gone.at.boot
            took.append((gone.at.boot - before) / 1e6)
        assert rig.edge.stats()["watched-processes"] == 0

    def attempt() -> float:
        with_rig(test)
        return took[-1]

    within(0.5, attempt)


@pytest.mark.parametrize("difference", [-1, 1])
def test_another_process_with_the_same_pid_is_not_the_owner(difference: int) -> None:
    async def test(rig: Rig) -> None:
        with holding(NOWHERE, "none") as child:
            rig.edge.watch_process("lease", Binding(pid=ProcessRef(child.pid, child.start + difference)))
            assert rig.events == [], "never within the call"
            assert (await rig.next(OwnerGone)).lease == "lease"

    with_rig(test)


def test_an_owner_that_has_ended_already() -> None:
    async def test(rig: Rig) -> None:
        with holding(NOWHERE, "none") as child:
            binding = bound(child)
        rig.edge.watch_process("lease", binding)
        assert (await rig.next(OwnerGone)).lease == "lease"

    with_rig(test)


def test_an_owner_that_is_a_zombie_already() -> None:
    async def test(rig: Rig) -> None:
        with holding(NOWHERE, "zombie") as child:
            zombie = int(child.said)
            start = int(Path(f"/proc/{zombie}/stat").read_text().rpartition(")")[2].split()[19])
            rig.edge.watch_process("lease", Binding(pid=ProcessRef(zombie, start)))
            await rig.next(OwnerGone)

    with_rig(test)


def test_an_owner_whose_main_thread_ended_lives() -> None:
    async def test(rig: Rig) -> None:
        with holding(NOWHERE, "leaderless") as child:
            state = Path(f"/proc/{child.pid}/stat")
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", what="a zombie")
            rig.edge.watch_process("lease", bound(child))
            await rig.scan(a=())
            assert rig.of(OwnerGone) == []
        await rig.next(OwnerGone)

    with_rig(test)


def test_leases_of_one_process_end_together_and_rebound_ones_do_not() -> None:
    async def test(rig: Rig) -> None:
        with holding(NOWHERE, "none") as first, holding(NOWHERE, "none") as second:
            for lease in "abcd":
                rig.edge.watch_process(lease, bound(first))
            assert rig.edge.stats()["watched-processes"] == 1
            rig.edge.watch_process("b", bound(second))
            rig.edge.watch_process("c", Binding(ttl=1))
            rig.edge.unwatch_process("d")
            rig.edge.unwatch_process("never heard of")
            first.kill()
            await rig.next(OwnerGone)
            await rig.scan(a=())
            assert [event.lease for event in rig.of(OwnerGone)] == ["a"]
            second.kill()
            assert (await rig.next(OwnerGone, 2)).lease == "b"

    with_rig(test)


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """A process that has no number left for another descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_out_of_descriptors_the_end_is_told_a_little_later(
    no_descriptors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK_EVERY", 0.05)

    async def test(rig: Rig) -> None:
        with holding(NOWHERE, "none") as child:
            binding = bound(child)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            rig.edge.watch_process("lease", binding)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert rig.edge.stats()["polled-processes"] == 1
            await rig.scan(a=())
            await rig.scan(a=())
            assert rig.of(OwnerGone) == []
            os.kill(child.pid, signal.SIGKILL)
            await rig.next(OwnerGone)
            assert rig.edge.stats()["polled-processes"] == 0

    with_rig(test)


def _lowest_free() -> int:
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    return next(number for number in range(len(used) + 1) if number not in used)


def test_for_want_of_descriptors_a_process_is_not_said_to_be_none(no_descriptors: None) -> None:
    with holding(NOWHERE, "none") as child:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(OSError, match="Too many open files"):
            identify(child.pid)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest.mark.parametrize("left", [0, 1])
def test_for_want_of_descriptors_nobody_is_taken_for_dead(
    no_descriptors: None, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Not even if one is left, for the process, and none to read whose it is."""
    monkeypatch.setattr(process, "_LOOK_EVERY", 0.02)

    async def test(rig: Rig) -> None:
        with holding(NOWHERE, "none") as child:
            binding = bound(child)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (_lowest_free() + left, hard))
            rig.edge.watch_process("lease", binding)
            assert rig.edge.stats()["polled-processes"] == 1
            await asyncio.sleep(0.2)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert rig.of(OwnerGone) == []
            assert rig.edge.stats()["watched-processes"] == 1
            os.kill(child.pid, signal.SIGKILL)
            await rig.next(OwnerGone)

    with_rig(test)
