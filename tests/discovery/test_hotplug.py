"""Uevents into changed records: plug, unplug, bind, unbind, renumbered nodes, loss, hangs."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any

from hetero_agent.config import DiscoveryTable
from hetero_agent.core.model import Obstacle
from hetero_agent.discovery.facts import DeviceFacts
from hetero_agent.discovery.profiles import Identity
from tests.discovery.observe import watching
from tests.discovery.test_topologies import amd_card, kfd_node
from tests.support.umock import Bed, bed, in_umockdev
from tests.support.wait import wait_until_async

CARD = "0000:03:00.0"
SHIPPED = Path("hetero_agent/profiles/amd.toml").read_text()


def announce(mock: Bed, path: str, action: str = "add") -> None:
    """Send the uevents of a device and of the class devices on it."""
    mock.uevent(path, action)
    for child in sorted(mock.real(path).glob("*/*/uevent")):
        mock.uevent("/" + str(child.parent.relative_to(mock.root)), action)


@in_umockdev()
def test_start_without_devices_then_plug_and_unplug() -> None:
    async def body(mock: Bed) -> None:
        async with watching() as seen:
            first = seen.events[0]
            assert (first.complete, first.records, first.gone) == (True, (), ())
            assert len(seen.events) == 1
            assert any(
                "no device: 0 PCI devices" in one or "lists nothing" in one for one in seen.source.problems()
            )
            path = amd_card(mock, CARD, 0)
            announce(mock, path)
            await seen.until(lambda records: CARD in records and records[CARD].nodes, "the card")
            assert seen.records[CARD].obstacle is Obstacle.NONE
            assert not any("no device" in one for one in seen.source.problems())
            mock.remove(path)
            await seen.until(lambda records: CARD not in records, "the removal")
            assert not any(event.complete or event.resync for event in seen.events[1:])

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_an_event_is_answered_in_milliseconds_with_that_device_only() -> None:
    async def body(mock: Bed) -> None:
        paths = [amd_card(mock, f"0000:{bus:02x}:00.0", bus) for bus in range(1, 9)]
        async with watching() as seen:
            assert len(seen.events[0].records) == 8
            took = []
            for turn in range(20):
                mock.file(f"{paths[3]}/vbios_version", f"turn {turn}\n")
                before, began = len(seen.events), time.monotonic()
                mock.uevent(paths[3], "change")
                await wait_until_async(lambda: len(seen.events) > before, what="the change")  # noqa: B023
                took.append(time.monotonic() - began)
                assert [record.id for record in seen.events[-1].records] == ["0000:04:00.0"]
                assert seen.records["0000:04:00.0"].attributes["firmware"] == f"turn {turn}"
            # waiting itself looks every 5 ms; some come while the machine is busy with other things
            assert sorted(took)[4] < 0.025
            # an event that changes nothing is no news
            before = len(seen.events)
            mock.uevent(paths[0], "change")
            mock.file(f"{paths[1]}/vbios_version", "last\n")
            mock.uevent(paths[1], "move")
            await wait_until_async(lambda: len(seen.events) > before, what="the last change")
            assert [record.id for event in seen.events[before:] for record in event.records] == ["0000:02:00.0"]

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_driver_bind_unbind_and_vfio() -> None:
    async def body(mock: Bed) -> None:
        path = mock.pci(CARD, "1002:744c", "030000")
        async with watching() as seen:
            assert seen.records[CARD].obstacle is Obstacle.NO_DRIVER
            mock.bind(path, "amdgpu")
            mock.uevent(path, "bind")
            await seen.until(lambda records: records[CARD].obstacle is Obstacle.NO_NODE, "no-node")
            assert seen.records[CARD].driver == "amdgpu"
            # the node comes after the driver
            render = mock.child(path, "drm", "renderD128", "dri/renderD128", "226:128")
            mock.uevent(render, "add")
            await seen.until(lambda records: records[CARD].obstacle is Obstacle.NONE, "the node")
            mock.remove(render)
            mock.real("/dev/dri/renderD128").unlink(missing_ok=True)
            mock.unbind(path)
            mock.uevent(path, "unbind")
            await seen.until(lambda records: records[CARD].obstacle is Obstacle.NO_DRIVER, "unbind")
            assert seen.records[CARD].nodes == ()
            mock.bind(path, "vfio-pci")
            mock.uevent(path, "bind")
            await seen.until(lambda records: records[CARD].obstacle is Obstacle.VFIO, "vfio")
            mock.unbind(path)
            mock.uevent(path, "an-action-of-the-future")
            await seen.until(lambda records: records[CARD].obstacle is Obstacle.NO_DRIVER, "an unknown action")

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_render_nodes_that_swap_while_running() -> None:
    async def body(mock: Bed) -> None:
        paths = [mock.pci(f"0000:0{bus}:00.0", "1002:744c", "030000", "amdgpu") for bus in (3, 4)]
        nodes = [
            mock.child(path, "drm", f"renderD{number}", f"dri/renderD{number}", f"226:{number}")
            for path, number in zip(paths, (128, 129), strict=True)
        ]
        async with watching() as seen:
            own = {key: record.own_nodes[0].path for key, record in seen.records.items()}
            assert own == {"0000:03:00.0": "/dev/dri/renderD128", "0000:04:00.0": "/dev/dri/renderD129"}
            for node in nodes:
                mock.remove(node)
            for path, number in zip(paths, (129, 128), strict=True):
                fresh = mock.child(path, "drm", f"renderD{number}", f"dri/renderD{number}", f"226:{number}")
                mock.uevent(fresh, "add")
            swapped = {"0000:03:00.0": ("renderD129", 129), "0000:04:00.0": ("renderD128", 128)}
            await seen.until(
                lambda records: (
                    {
                        key: (record.own_nodes[0].path.rsplit("/", 1)[1], record.own_nodes[0].minor)
                        for key, record in records.items()
                        if record.own_nodes
                    }
                    == swapped
                ),
                "the swap",
            )

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_index_follows_when_a_card_leaves() -> None:
    async def body(mock: Bed) -> None:
        mock.file("/proc/devices", "Character devices:\n195 nvidia\n")
        paths = []
        for index in range(3):
            address = f"0000:0{3 + index}:00.0"
            paths.append(mock.pci(address, "10de:2330", "030200", "nvidia"))
            mock.nvidia(address, index)
        async with watching() as seen:
            assert seen.records["0000:05:00.0"].env["CUDA_VISIBLE_DEVICES"] == "2"
            mock.remove(paths[0])
            await seen.until(lambda records: len(records) == 2, "the removal")
            assert seen.events[-1].gone == ("0000:03:00.0",)
            assert {key: record.env["CUDA_VISIBLE_DEVICES"] for key, record in seen.records.items()} == {
                "0000:04:00.0": "0",
                "0000:05:00.0": "1",
            }

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_a_node_made_without_a_uevent_is_noticed() -> None:
    async def body(mock: Bed) -> None:
        mock.file("/proc/devices", "Character devices:\n195 nvidia\n")
        mock.pci(CARD, "10de:2330", "030200", "nvidia")
        mock.nvidia(CARD, 0)
        mock.real("/dev/nvidia0").unlink()
        async with watching() as seen:
            assert seen.records[CARD].obstacle is Obstacle.NO_NODE
            mock.node("nvidia0", "195:0", 0o666)
            await seen.until(lambda records: records[CARD].obstacle is Obstacle.NONE, "the node")
            # one with the number of a driver that is gone doesn't count
        mock.node("nvidia0", "194:0", 0o666)
        async with watching() as seen:
            assert seen.records[CARD].obstacle is Obstacle.NO_NODE
            assert any("major 194, which is not the driver's" in one for one in seen.source.problems())

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_partitions_that_appear_while_running() -> None:
    async def body(mock: Bed) -> None:
        amd_card(mock, CARD, 0)
        kfd_node(mock, 1, 4001, 3 << 8, 128)
        async with watching() as seen:
            assert list(seen.records) == [CARD]
            platform = mock.child(None, "platform", "amdgpu_xcp_1")
            node = mock.child(platform, "drm", "renderD129", "dri/renderD129", "226:129")
            kfd_node(mock, 2, 4002, 1 << 28 | 3 << 8, 129)
            mock.uevent(platform, "add")
            mock.uevent(node, "add")
            await seen.until(lambda records: f"{CARD}-p1" in records, "the partition")
            assert seen.records[CARD].obstacle is Obstacle.NO_NODE
            assert seen.records[f"{CARD}-p1"].parent == CARD
            mock.remove(platform)
            kfd_node(mock, 2, 0, 0, 0)
            mock.uevent(
                "/sys" + str(mock.real(f"/sys/bus/pci/devices/{CARD}").resolve()).split("/sys", 1)[1], "change"
            )
            await seen.until(lambda records: list(records) == [CARD], "the card whole again")
            assert seen.records[CARD].obstacle is Obstacle.NONE

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_another_partition_mode_comes_without_a_uevent() -> None:
    """amdgpu has the render nodes of all partitions from the start; only the topology tells the mode."""

    async def body(mock: Bed) -> None:
        card = amd_card(mock, CARD, 0, current_compute_partition="SPX\n")
        for part in (1, 2):
            platform = mock.child(None, "platform", f"amdgpu_xcp_{part}")
            mock.child(platform, "drm", f"renderD{128 + part}", f"dri/renderD{128 + part}", f"226:{128 + part}")
        kfd_node(mock, 1, 4001, 3 << 8, 128)
        generation = "/sys/class/kfd/kfd/topology/generation_id"
        mock.file(generation, "2\n")
        async with watching() as seen:
            assert list(seen.records) == [CARD]
            for part in (1, 2):
                kfd_node(mock, 1 + part, 4001 + part, part << 28 | 3 << 8, 128 + part)
            mock.file(f"{card}/current_compute_partition", "CPX\n")
            mock.file(generation, "5\n")
            await seen.until(lambda records: f"{CARD}-p2" in records, "the partitions")
            assert seen.records[CARD].obstacle is Obstacle.NO_NODE
            assert seen.records[f"{CARD}-p2"].resource == "amd.com/gpu.cpx"
            for part in (1, 2):
                kfd_node(mock, 1 + part, 0, 0, 0)
            mock.file(f"{card}/current_compute_partition", "SPX\n")
            mock.file(generation, "7\n")
            await seen.until(lambda records: list(records) == [CARD], "the card whole again")
            assert seen.records[CARD].obstacle is Obstacle.NONE
            assert seen.records[CARD].attributes["compute-partition"] == "SPX"

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_what_a_sleeping_device_told_before_is_kept() -> None:
    async def body(mock: Bed) -> None:
        path = amd_card(
            mock, CARD, 0, mem_info_vram_total="1000\n", unique_id="feed\n", power__runtime_status="active\n"
        )
        async with watching() as seen:
            mock.file(f"{path}/power/runtime_status", "suspended\n")
            mock.real(f"{path}/mem_info_vram_total").unlink()
            mock.uevent(path, "change")
            await seen.until(
                lambda records: records[CARD].attributes["runtime-status"] == "suspended", "suspend"
            )
            assert seen.records[CARD].attributes["memory-total"] == 1000
            assert seen.records[CARD].serial == "feed"

    with bed() as mock:
        asyncio.run(body(mock))


def test_what_another_device_told_in_the_same_place_is_not_taken_over() -> None:
    def facts(device: str, driver: str, **more: Any) -> DeviceFacts:
        return DeviceFacts("/sys/x", Identity("pci", CARD, "1002", device, driver=driver), "amd", **more)

    before = facts("744c", "amdgpu", serial="feed", extra={"memory-total": "1000"})
    asleep = facts("744c", "amdgpu", asleep=True)
    assert (asleep.with_memory_of(before).serial, asleep.with_memory_of(before).extra) == ("feed", before.extra)
    for other in (facts("7480", "amdgpu", asleep=True), facts("744c", "vfio-pci", asleep=True)):
        assert other.with_memory_of(before) == other


@in_umockdev()
def test_a_card_plugged_in_behind_a_known_device_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "switch.toml").write_text(
        'schema = 1\nresource = "example.org/switch"\n[[match]]\nvendors = ["1e52"]\n'
        '[[nodes]]\nsubsystem = "misc"\npattern = "*"\nrole = "own"\n'
    )

    async def body(mock: Bed) -> None:
        port = mock.pci("0000:02:00.0", "1e52:0001", "060400", "pcieport")
        async with watching(tmp_path) as seen:
            assert list(seen.records) == ["0000:02:00.0"]
            path = mock.pci(CARD, "1002:744c", "030000", "amdgpu", parent=port)
            mock.uevent(path, "add")
            await seen.until(lambda records: CARD in records, "the card")

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_a_read_that_hangs_costs_only_its_device() -> None:
    async def body(mock: Bed) -> None:
        sick = amd_card(mock, CARD, 0, vbios_version="good\n")
        well = amd_card(mock, "0000:04:00.0", 1)
        async with watching(read_deadline=5.0) as seen:
            # a FIFO whose writer says nothing: read(2) doesn't return
            pipe = mock.real(f"{sick}/vbios_version")
            pipe.unlink()
            os.mkfifo(pipe)
            writer = os.open(pipe, os.O_RDWR)
            mock.uevent(sick, "change")
            await wait_until_async(lambda: seen.source._reading, what="the read")
            mock.file(f"{well}/vbios_version", "news\n")
            mock.uevent(well, "change")
            await seen.until(
                lambda records: records["0000:04:00.0"].attributes.get("firmware") == "news", "the other"
            )
            assert not any("does not return" in one for one in seen.source.problems()), "it is waited for yet"
            await wait_until_async(
                lambda: any("does not return" in one for one in seen.source.problems()), what="the problem"
            )
            assert seen.records[CARD].attributes["firmware"] == "good"
            # more events don't take more threads
            for _ in range(20):
                mock.uevent(sick, "change")
                await asyncio.sleep(0.002)
            seen.source.resync("test")
            await wait_until_async(lambda: seen.events[-1].resync == "test", what="the resync")
            assert seen.source._readers.stuck == 1
            assert CARD in seen.records
            # it comes back: whoever opens the other end lets the read return
            pipe.unlink()
            mock.file(f"{sick}/vbios_version", "better\n")
            os.write(writer, b"late\n")
            os.close(writer)
            await seen.until(lambda records: records[CARD].attributes["firmware"] == "better", "the recovery")
            assert seen.source._readers.stuck == 0
            assert not any("does not return" in one for one in seen.source.problems())

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_periodic_resync_finds_what_no_event_told() -> None:
    async def body(mock: Bed) -> None:
        table = DiscoveryTable(resync_interval=1.0)
        path = amd_card(mock, CARD, 0)
        async with watching(table=table) as seen:
            mock.file(f"{path}/vbios_version", "silent\n")
            await seen.until(lambda records: "firmware" in records[CARD].attributes, "the silent change")
            assert [event.resync for event in seen.events if event.records] == ["", "periodic"]
            # and that a device went without a word
            shutil.rmtree(mock.real(path))
            mock.real(f"/sys/bus/pci/devices/{CARD}").unlink()
            await seen.until(lambda records: not records, "the silent removal")
            assert (seen.events[-1].gone, seen.events[-1].resync) == ((CARD,), "periodic")

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_reload_takes_new_profiles_and_keeps_shipped_ones_for_bad(tmp_path: Path) -> None:
    async def body(mock: Bed) -> None:
        mock.pci(CARD, "1002:744c", "030000", "amdgpu")
        mock.child(None, "tty", "tty60", "tty60", "4:60")
        async with watching(tmp_path) as seen:
            assert list(seen.records) == [CARD]
            (tmp_path / "amd.toml").write_text(SHIPPED.replace('resource = "amd.com/gpu"\n', "resource = 5\n"))
            (tmp_path / "console.toml").write_text(
                'schema = 1\nresource = "example.org/console"\n'
                '[[match]]\nsubsystem = "tty"\nnames = ["tty60"]\n'
                '[[nodes]]\nsubsystem = "tty"\npattern = "tty60"\nrole = "own"\n'
            )
            await seen.source.reload()
            await seen.until(lambda records: "tty-tty60" in records, "the console")
            assert seen.records[CARD].resource == "amd.com/gpu"
            assert [one for one in seen.source.problems() if "amd.toml" in one] == [
                f"{tmp_path}/amd.toml: resource: expected vendor/class, as in nvidia.com/gpu, got 5;"
                " the shipped profile stays in force"
            ]
            # the new subsystem is listened to as well
            mock.remove("/sys/devices/tty60")
            await seen.until(lambda records: list(records) == [CARD], "the console's removal")
            (tmp_path / "amd.toml").write_text("enabled = false\n" + SHIPPED)
            await seen.source.reload()
            await seen.until(lambda records: not records, "the end of a profile")

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_virtual_functions_that_appear_take_the_place_of_the_physical_one() -> None:
    async def body(mock: Bed) -> None:
        physical = amd_card(mock, CARD, 0)
        async with watching() as seen:
            assert list(seen.records) == [CARD]
            for number in (0, 1):
                # the function and the links to and from it are there before its event
                path = amd_card(mock, f"0000:03:02.{number}", 1 + number)
                mock.link(f"{path}/physfn", f"../{CARD}")
                mock.link(f"{physical}/virtfn{number}", f"../0000:03:02.{number}")
                for one in ("", f"/drm/card{1 + number}", f"/drm/renderD{129 + number}"):
                    mock.uevent(path + one, "add")
                await seen.until(lambda records: f"0000:03:02.{number}" in records, "the function")  # noqa: B023
            # the kernel ends with this (drivers/pci/iov.c, sriov_enable)
            mock.uevent(physical, "change")
            wanted = ["0000:03:02.0", "0000:03:02.1"]
            await seen.until(lambda records: sorted(records) == wanted, "two functions instead of one")
            assert {seen.records[one].parent for one in wanted} == {CARD}
            assert {seen.records[one].obstacle for one in wanted} == {Obstacle.NONE}
            assert not any(event.resync for event in seen.events)

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_the_physical_function_is_back_when_its_virtual_ones_are_gone() -> None:
    async def body(mock: Bed) -> None:
        physical = amd_card(mock, CARD, 0)
        virtual = [amd_card(mock, f"0000:03:02.{number}", 1 + number) for number in (0, 1)]
        for number, path in enumerate(virtual):
            mock.link(f"{path}/physfn", f"../{CARD}")
            mock.link(f"{physical}/virtfn{number}", f"../0000:03:02.{number}")
        async with watching() as seen:
            assert list(seen.records) == ["0000:03:02.0", "0000:03:02.1"]
            for number, path in enumerate(virtual):
                # as the kernel does it: the link, then the function with its event; none for the physical one
                mock.real(f"{physical}/virtfn{number}").unlink()
                mock.remove(path)
                await seen.until(lambda records: f"0000:03:02.{number}" not in records, "the removal")  # noqa: B023
                assert number == 1 or CARD not in seen.records
            await seen.until(lambda records: list(records) == [CARD], "the physical function")
            assert not any(event.resync for event in seen.events)

    with bed() as mock:
        asyncio.run(body(mock))
