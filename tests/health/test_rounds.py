"""Rounds with real workers: what hangs, what dies, and that nobody else suffers from it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_agent.core.model import Health
from hetero_agent.core.symptoms import Symptoms
from tests.health.rig import FAST, SHORT, Rig, bind, device_directory, fifo, file_node, kernel_record, with_rig
from tests.support.freezer import Freezer, freezing
from tests.support.timing import Stalls
from tests.support.wait import wait_until_async

H = Health


def many(top: Path, count: int, **files: str) -> list[Path]:
    return [device_directory(top, f"0000:{number:02x}:00.0", **files) for number in range(count)]


def watch(rig: Rig, *paths: Path) -> None:
    for path in paths:
        rig.edge.watch(path.name, kernel_record(path), False)


def test_a_good_device_is_healthy_soon_and_said_once(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        assert (await rig.until(path.name, H.HEALTHY)).reason == ""
        await wait_until_async(lambda: rig.edge.stats()["rounds"] >= 4, what="more rounds")
        assert len(rig.events) == 1

    with_rig(test, tmp_path)


def test_a_failure_is_a_doubt_first_then_a_fault_then_over(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")
    table = replace(FAST, interval=1.0)

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        (path / "config").write_bytes(b"\xff\xff")
        doubt = await rig.until(path.name, H.SUSPECT)
        first = rig.times[-1]
        assert doubt.confirming
        fault = await rig.until(path.name, H.UNHEALTHY)
        # two confirmations, which don't wait for the next rounds
        assert 2 * table.confirm * 0.7 <= rig.times[-1] - first < 2 * table.interval
        assert (fault.reason, fault.evidence) == (
            "off the bus: its config space reads 0xffff",
            {"config": "0xffff"},
        )
        (path / "config").write_bytes(b"\xde\x10")
        mended = time.monotonic()
        await rig.until(path.name, H.HEALTHY)
        assert time.monotonic() - mended >= 2 * table.interval * 0.7
        assert [one.health for one in rig.said(path.name)] == [H.HEALTHY, H.SUSPECT, H.UNHEALTHY, H.HEALTHY]
        assert rig.looks == [str(path)] * len(rig.looks)
        assert len(rig.looks) >= 3

    with_rig(test, tmp_path, table=table)


def test_what_a_probe_finds_otherwise_than_before_is_read_again(tmp_path: Path) -> None:
    """The kernel tells nobody of an InfiniBand port: what a probe finds has to reach its attributes."""
    path = device_directory(tmp_path, infiniband__mlx5_0__ports__1__state="4: ACTIVE")
    state = path / "infiniband/mlx5_0/ports/1/state"

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        await wait_until_async(lambda: rig.edge.stats()["rounds"] >= 3, what="more rounds")
        assert rig.looks == []
        state.write_text("1: DOWN\n")
        await rig.until(path.name, H.SUSPECT)
        assert rig.looks == [str(path)]
        before = rig.edge.stats()["rounds"]
        await wait_until_async(lambda: rig.edge.stats()["rounds"] >= before + 3, what="more rounds")
        assert rig.looks == [str(path)]
        state.write_text("4: ACTIVE\n")
        await wait_until_async(lambda: len(rig.looks) == 2, what="another look")
        await rig.until(path.name, H.HEALTHY)
        assert len(rig.looks) == 2

    with_rig(test, tmp_path, symptoms={"test": Symptoms(probes=("rdma-port",))})


def test_a_device_that_goes_while_it_waits_for_a_probe_is_probed_when_it_is_back(tmp_path: Path) -> None:
    slow, other = many(tmp_path, 2, config="de10")
    fifo(slow / "config")

    async def test(rig: Rig) -> None:
        watch(rig, slow)
        lanes = rig.edge._rounds
        await wait_until_async(lambda: lanes._lane is not None, what="a round that waits for the first")
        watch(rig, other)
        await wait_until_async(lambda: other.name in lanes._queue, what="the second in the queue")
        rig.edge.watch(other.name, None, False)
        await wait_until_async(lambda: lanes._lane is None, what="the end of the round")
        watch(rig, other)
        await rig.until(other.name, H.HEALTHY)
        with open(slow / "config", "wb"):
            rig.edge.watch(slow.name, None, False)

    with_rig(test, tmp_path)


def test_an_answer_about_what_was_there_before_does_not_count(tmp_path: Path) -> None:
    """A device is replaced by another while it is being probed."""
    path = device_directory(tmp_path, infiniband__mlx5_0__ports__1__state="4: ACTIVE")
    state = path / "infiniband/mlx5_0/ports/1/state"
    fifo(state)
    os.link(state, tmp_path / "old")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        writer: list[int] = []

        def read() -> bool:
            with contextlib.suppress(OSError):
                writer.append(os.open(tmp_path / "old", os.O_WRONLY | os.O_NONBLOCK))
            return bool(writer)

        await wait_until_async(read, what="the probe of the first")
        rig.edge.watch(path.name, None, False)
        state.unlink()
        state.write_text("4: ACTIVE\n")
        watch(rig, path)
        os.write(writer[0], b"1: DOWN\n")
        os.close(writer[0])
        await rig.until(path.name, H.HEALTHY)
        assert [one.health for one in rig.said(path.name)] == [H.HEALTHY]

    with_rig(test, tmp_path, symptoms={"test": Symptoms(probes=("rdma-port",))})


def test_a_blip_is_over_with_the_first_good_probe(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")
    table = replace(FAST, interval=5.0, confirm=1.5)

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        (path / "config").write_bytes(b"\xff\xff")
        await rig.until(path.name, H.SUSPECT)
        (path / "config").write_bytes(b"\xde\x10")
        since = rig.times[-1]
        await rig.until(path.name, H.HEALTHY)
        assert rig.times[-1] - since < table.interval

    with_rig(test, tmp_path, table=table)


def test_a_probe_that_never_returns_makes_the_device_unresponsive(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        fifo(path / "config")
        doubt = await rig.until(path.name, H.SUSPECT)
        assert doubt.reason == "unresponsive: a probe did not return within 0.4 s"
        await rig.until(path.name, H.UNHEALTHY)
        (path / "config").unlink()
        await rig.until(path.name, H.HEALTHY)

    with_rig(test, tmp_path, table=SHORT)


def test_ten_of_256_hang_and_the_others_are_on_time(tmp_path: Path) -> None:
    """Each of the others is looked at within every one and a half intervals, hanging ones or not."""
    table = replace(FAST, interval=2.0, confirm=0.5, deadline=1.0)
    paths = many(tmp_path, 256, config="de10")
    sick, well = paths[::26], [path for path in paths if path not in paths[::26]]
    assert len(sick) == 10

    async def test(rig: Rig) -> None:
        watch(rig, *paths)
        for path in paths:
            await rig.until(path.name, H.HEALTHY)
        looked: dict[str, list[float]] = {path.name: [] for path in well}
        real = rig.edge._finding

        def spy(patient, answer, at):  # type: ignore[no-untyped-def]
            looked.setdefault(patient.id, []).append(time.monotonic())
            return real(patient, answer, at)

        rig.edge._finding = spy  # type: ignore[method-assign]
        begun = time.monotonic()
        for path in sick:
            fifo(path / "config")
        for path in sick:
            await rig.until(path.name, H.UNHEALTHY)
        await asyncio.sleep(2 * table.interval)
        ended = time.monotonic()
        late = 0.0
        for path in well:
            assert rig.health(path.name) is H.HEALTHY
            times = [begun, *looked[path.name], ended]
            late = max(late, *(b - a for a, b in itertools.pairwise(times)))
        # each that hangs takes the others' worker half a second, once (more if the processors are
        # others'), and nobody waits until it is a fault, which takes each three deadlines and two pauses
        assert late < table.interval + 10 * (0.5 + 1)
        steady = [
            one for path in well for one in zip(looked[path.name][-3:], looked[path.name][-2:], strict=False)
        ]
        # the processors may be others' once in a while
        gaps = sorted(b - a for a, b in steady)
        assert gaps[len(gaps) * 9 // 10] < 1.5 * table.interval
        assert gaps[-1] < 2.5 * table.interval

    with_rig(test, tmp_path, table=table)


def test_the_loop_never_waits(tmp_path: Path) -> None:
    paths = many(tmp_path, 64, config="de10")

    async def test(rig: Rig) -> None:
        for path in paths[:12]:
            fifo(path / "config")
        watch(rig, *paths)
        async with Stalls() as stalls:
            await asyncio.sleep(3)
        assert stalls.longest < 0.2

    with_rig(test, tmp_path)


def test_4096_devices_are_all_probed_and_again(tmp_path: Path) -> None:
    nodes = [file_node(tmp_path / f"n{number}") for number in range(4096)]
    table = replace(FAST, interval=3.0)

    async def test(rig: Rig) -> None:
        for number, node in enumerate(nodes):
            rig.edge.watch(
                f"npu-{number}", kernel_record("", f"npu-{number}", source="vendor", nodes=(node,)), False
            )
        await wait_until_async(lambda: sum(len(one.opinions) for one in rig.events) == 4096, what="all of them")  # type: ignore[union-attr]
        assert len(rig.events) <= 4096 / 256 + 4
        (tmp_path / "n77").unlink()
        await rig.until("npu-77", H.UNHEALTHY)
        assert len([one for one in range(4096) if rig.health(f"npu-{one}") is H.HEALTHY]) == 4095

    with_rig(test, tmp_path, table=table)


@pytest.mark.parametrize(("count", "fewest", "most"), [(8, 2, 5), (256, 7, 12)])
def test_many_devices_are_spread_over_the_interval_and_few_share_a_request(
    tmp_path: Path, count: int, fewest: int, most: int
) -> None:
    paths = many(tmp_path, count, config="de10")
    table = replace(FAST, interval=2.0)

    async def test(rig: Rig) -> None:
        watch(rig, *paths)
        await wait_until_async(lambda: all(rig.health(one.name) for one in paths), what="the first probes")
        await asyncio.sleep(2.5)
        counts: list[int] = []
        while len(counts) < 4:
            before, begun = rig.edge.stats()["rounds"], time.monotonic()
            await asyncio.sleep(2.0)
            counts.append(rig.edge.stats()["rounds"] - before)
            assert counts[-1] <= most * (time.monotonic() - begun) / 2.0
            if counts[-1] >= fewest:  # on a busy machine some are late
                return
        pytest.fail(f"rounds in each interval: {counts}")

    with_rig(test, tmp_path, table=table)


def test_a_worker_that_dies_is_replaced_and_nobody_is_blamed(tmp_path: Path) -> None:
    paths = many(tmp_path, 4, config="de10")

    async def test(rig: Rig) -> None:
        watch(rig, *paths)
        for path in paths:
            await rig.until(path.name, H.HEALTHY)
        for _ in range(3):
            workers, rounds = set(rig.edge.stats()["workers"]), rig.edge.stats()["rounds"]
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
            await wait_until_async(lambda seen=rounds: rig.edge.stats()["rounds"] > seen, what="a round")
            await wait_until_async(
                lambda gone=workers: (
                    rig.edge.stats()["workers"] and not gone & set(rig.edge.stats()["workers"])
                ),
                what="another worker",
            )
        for path in paths:
            assert [one.health for one in rig.said(path.name)] == [H.HEALTHY]
        await wait_until_async(lambda: rig.edge.problems() == [], what="the end of the problem")

    with_rig(test, tmp_path)


def test_without_a_worker_nothing_is_known_and_it_is_told(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        watch(rig, path)
        said = await rig.until(path.name, H.UNKNOWN)
        assert said.reason.startswith("not probed: no probe worker can be started")
        assert rig.edge.problems()[0].startswith("devices can't be probed: no probe worker can be started")

    with_rig(test, tmp_path, probe_command=("/no/such/python",))


def test_a_stopped_worker_blames_nobody(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        [worker] = rig.edge.stats()["workers"]
        os.kill(worker, signal.SIGSTOP)
        await wait_until_async(lambda: rig.edge.stats()["workers"] not in ([worker], []), what="another worker")
        await asyncio.sleep(2 * FAST.interval)
        assert {one.health for one in rig.said(path.name)} <= {H.HEALTHY, H.UNKNOWN}

    with_rig(test, tmp_path, table=SHORT)


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    with freezing() as one:
        yield one


def waiting_in_a_fifo(rig: Rig) -> int:
    """The worker that waits for the other end of a FIFO, 0 for none."""
    for worker in rig.edge.stats()["workers"]:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{worker}/wchan").read_text() == "wait_for_partner":
                return int(worker)
    return 0


def test_what_the_kernel_does_not_let_go_is_not_probed_twice(tmp_path: Path, freezer: Freezer) -> None:
    """A worker that not even a kill ends: its device has no second probe until it is gone."""
    path = device_directory(tmp_path, config="de10")
    other = device_directory(tmp_path, "0000:3c:00.0", config="de10")

    async def test(rig: Rig) -> None:
        watch(rig, path, other)
        await rig.until(path.name, H.HEALTHY)
        await rig.until(other.name, H.HEALTHY)
        fifo(path / "config")
        frozen = await wait_until_async(lambda: waiting_in_a_fifo(rig), what="a worker that hangs")
        freezer.freeze(frozen)
        await rig.until(path.name, H.UNHEALTHY)
        assert rig.edge.stats()["blocked"] == [path.name]
        assert path.name in rig.edge.problems()[0]
        (path / "config").unlink()
        await asyncio.sleep(4 * FAST.interval)
        # nobody looked again, though a look would find it well
        assert rig.health(path.name) is H.UNHEALTHY
        assert frozen in rig.edge.stats()["workers"]
        assert rig.health(other.name) is H.HEALTHY
        freezer.thaw()
        await rig.until(path.name, H.HEALTHY)
        assert rig.edge.stats()["blocked"] == []

    with_rig(test, tmp_path, table=SHORT)


def test_a_slow_device_gets_its_time_alone_and_its_place_back(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")
    others = many(tmp_path / "others", 3, config="de10")
    table = replace(FAST, deadline=3.0)

    async def test(rig: Rig) -> None:
        fifo(path / "config")
        watch(rig, path, *others)
        for other in others:
            await rig.until(other.name, H.HEALTHY)
        # it answers after longer than the others may wait, and before its own deadline
        assert not rig.said(path.name)
        await wait_until_async(lambda: len(rig.edge.stats()["workers"]) >= 2, what="a worker of its own")
        await asyncio.sleep(0.7)
        writer = os.open(path / "config", os.O_WRONLY)
        os.write(writer, b"\xde\x10")
        os.close(writer)
        await rig.until(path.name, H.HEALTHY)
        (path / "config").unlink()
        patient = rig.edge._roster.get(path.name)
        assert patient is not None
        await wait_until_async(lambda: not patient.alone, what="its place among the others")

    with_rig(test, tmp_path, table=table)


def test_a_device_that_is_gone_is_not_probed_and_one_that_is_back_is(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        rig.edge.watch(path.name, None, False)
        (path / "config").write_bytes(b"\xff\xff")
        await asyncio.sleep(3 * FAST.interval)
        assert len(rig.said(path.name)) == 1
        watch(rig, path)
        await rig.until(path.name, H.UNHEALTHY)

    with_rig(test, tmp_path)


def test_a_changed_record_is_probed_at_once(tmp_path: Path) -> None:
    path = device_directory(tmp_path)
    table = replace(FAST, interval=60)

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        await asyncio.sleep(0.2)
        rig.edge.watch(path.name, kernel_record(path, driver="nvidia"), False)
        assert (await rig.until(path.name, H.SUSPECT)).reason == "its driver nvidia is not bound any more"
        bind(path)
        await rig.until(path.name, H.HEALTHY)

    with_rig(test, tmp_path, table=table)


def test_another_configuration_counts_from_now_on(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        rig.edge.configure(replace(FAST, failures=1, recoveries=1))
        (path / "config").write_bytes(b"\xff\xff")
        await rig.until(path.name, H.UNHEALTHY)
        (path / "config").write_bytes(b"\xde\x10")
        await rig.until(path.name, H.HEALTHY)
        assert H.SUSPECT not in [one.health for one in rig.said(path.name)]

    with_rig(test, tmp_path)


def test_a_shorter_interval_does_not_wait_for_the_end_of_the_longer_one(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="de10")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        rig.edge.configure(FAST)
        (path / "config").write_bytes(b"\xff\xff")
        await rig.until(path.name, H.UNHEALTHY, timeout=20)

    with_rig(test, tmp_path, table=replace(FAST, interval=600))


def test_error_counters_that_grow_are_a_fault_at_once_and_over_when_they_rest(tmp_path: Path) -> None:
    path = device_directory(tmp_path, aer_dev_fatal="TOTAL_ERR_FATAL 7")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        (path / "aer_dev_fatal").write_text("TOTAL_ERR_FATAL 8\n")
        fault = await rig.until(path.name, H.UNHEALTHY)
        assert (fault.reason, fault.evidence["aer-fatal"]) == ("1 fatal PCIe errors", "8")
        assert [one.health for one in rig.said(path.name)] == [H.HEALTHY, H.UNHEALTHY]
        await rig.until(path.name, H.HEALTHY)

    with_rig(test, tmp_path)


def test_a_storm_of_correctable_errors_is_a_doubt(tmp_path: Path) -> None:
    path = device_directory(tmp_path, aer_dev_correctable="TOTAL_ERR_COR 0")

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        total = 0
        while rig.health(path.name) is not H.SUSPECT or rig.said(path.name)[-1].confirming:
            total += 50
            (path / "aer_dev_correctable").write_text(f"TOTAL_ERR_COR {total}\n")
            await asyncio.sleep(0.05)
            assert total < 30_000
        assert "correctable PCIe errors per minute" in rig.said(path.name)[-1].reason
        assert rig.health(path.name) is H.SUSPECT
        await rig.until(path.name, H.HEALTHY)
        assert H.UNHEALTHY not in [one.health for one in rig.said(path.name)]

    with_rig(test, tmp_path, symptoms={"test": Symptoms(correctable=1)})


def test_nothing_is_submitted_after_the_stop_and_no_worker_stays(tmp_path: Path) -> None:
    path = fifo(device_directory(tmp_path) / "config").parent

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await wait_until_async(lambda: rig.edge.stats()["workers"], what="a worker")
        workers = rig.edge.stats()["workers"]
        await rig.edge.stop()
        count = len(rig.events)
        for worker in workers:
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)
        await asyncio.sleep(0.5)
        assert len(rig.events) == count

    with_rig(test, tmp_path)


def test_the_probe_worker_is_small(tmp_path: Path) -> None:
    path = device_directory(tmp_path)

    async def test(rig: Rig) -> None:
        watch(rig, path)
        await rig.until(path.name, H.HEALTHY)
        [worker] = rig.edge.stats()["workers"]
        status = Path(f"/proc/{worker}/status").read_text()
        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        assert int(anonymous.split()[1]) < 10_000

    with_rig(test, tmp_path)
