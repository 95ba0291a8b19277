"""MIG instances that come and go without a uevent, and who may have the card meanwhile."""

from __future__ import annotations

import asyncio
import errno

import pytest

from hetero_agent.core.effects import ErrorKind
from hetero_agent.core.model import DeviceRecord, Obstacle, Role
from hetero_agent.discovery import vendors
from tests.core.host import Host
from tests.discovery.hosts import mig, nvidia_driver
from tests.discovery.observe import enumerate_once, watching
from tests.support.umock import Bed, bed, in_umockdev

CARD = "0000:17:00.0"
UNIT = "nvidia.com/gpu.mig"
CAPABILITIES = "/proc/driver/nvidia/capabilities/gpu0/mig"


def one_card(mock: Bed) -> None:
    nvidia_driver(mock)
    mock.pci(CARD, "10de:2330", "030200", "nvidia")
    mock.nvidia(CARD, 0, "GPU-00000000-1111-2222-3333-444444444444")


def take_away(mock: Bed, instance: str) -> None:
    """Take an instance out of /proc, as nvidia-smi mig -dci -dgi does."""
    base = mock.real(f"{CAPABILITIES}/{instance}")
    for path in sorted(base.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    base.rmdir()


@in_umockdev()
def test_instances_appear_and_vanish_while_running() -> None:
    async def body(mock: Bed) -> None:
        one_card(mock)
        async with watching() as seen:
            assert list(seen.records) == [CARD]
            assert seen.records[CARD].obstacle is Obstacle.NONE
            # the node comes later than the instance
            mig(mock, 0, 1, 0, 12, nodes=False)
            await seen.until(lambda records: f"{CARD}-p1.0" in records, "the instance")
            assert seen.records[CARD].obstacle is Obstacle.NO_NODE
            assert seen.records[CARD].own_nodes == ()
            assert seen.records[f"{CARD}-p1.0"].obstacle is Obstacle.NO_NODE
            mig(mock, 0, 1, 0, 12)
            await seen.until(lambda records: not records[f"{CARD}-p1.0"].obstacle, "its nodes")
            unit = seen.records[f"{CARD}-p1.0"]
            assert (unit.resource, unit.parent) == (UNIT, CARD)
            assert [(node.path, node.role) for node in unit.nodes[:3]] == [
                ("/dev/nvidia-caps/nvidia-cap13", Role.OWN),
                ("/dev/nvidia-caps/nvidia-cap12", Role.OWN),
                ("/dev/nvidia0", Role.PARENT),
            ]
            take_away(mock, "gi1")
            await seen.until(lambda records: list(records) == [CARD], "the end of the instance")
            assert seen.records[CARD].obstacle is Obstacle.NONE

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_a_moment_without_descriptors_is_not_the_end_of_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_descriptor(minor: str) -> frozenset[tuple[int, int]]:
        asked.append(minor)
        raise OSError(errno.EMFILE, "Too many open files")

    async def body(mock: Bed) -> None:
        one_card(mock)
        async with watching() as seen:
            with monkeypatch.context() as patch:
                patch.setattr(vendors, "mig_names", no_descriptor)
                await seen.until(lambda _: asked, "a look")
            mig(mock, 0, 1, 0, 12)
            await seen.until(lambda records: f"{CARD}-p1.0" in records, "the first instance")
            # by the looks that go on, not by the one at all devices that followed
            mig(mock, 0, 2, 0, 21)
            await seen.until(lambda records: f"{CARD}-p2.0" in records, "the second instance")
            assert not [one for one in seen.source.problems() if "can't be read" in one]

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_a_capability_of_another_driver_or_without_its_file_is_not_given() -> None:
    with bed() as mock:
        one_card(mock)
        mig(mock, 0, 1, 0, 12)
        mig(mock, 0, 2, 0, 21)
        # a node from before the driver got another major; a capability whose file says nothing
        mock.node("nvidia-caps/nvidia-cap13", "511:13", 0o444)
        mock.file(f"{CAPABILITIES}/gi2/ci0/access", "\n")
        records = enumerate_once()
    assert {key: record.obstacle for key, record in records.items()} == {
        CARD: Obstacle.NO_NODE,
        f"{CARD}-p1.0": Obstacle.NO_NODE,
    }
    assert records[f"{CARD}-p1.0"].own_nodes == ()


def found(*instances: int) -> list[DeviceRecord]:
    """What is discovered with these GPU instances, each with one compute instance."""
    with bed() as mock:
        one_card(mock)
        for instance in instances:
            mig(mock, 0, instance, 0, 9 * instance)
        return list(enumerate_once().values())


@in_umockdev()
def test_the_card_and_its_instances_exclude_each_other() -> None:
    whole, split = found(), found(1, 2)
    card = whole[0].resource

    host = Host()
    host.ready(*split)
    assert host.error(host.ask(card)) is ErrorKind.UNAVAILABLE
    first = host.use(UNIT)
    assert host.governor.blocked_by(CARD) == first.devices
    # the other instance is nobody's relative but the card's
    second = host.use(UNIT)
    assert {*first.devices, *second.devices} == {f"{CARD}-p1.0", f"{CARD}-p2.0"}

    host = Host()
    host.ready(*whole)
    lease = host.use(card)
    host.observe(*split)
    # split under its user: nothing of it is given while the lease lives
    assert host.governor.blocked_by(f"{CARD}-p1.0") == (CARD,)
    assert host.error(host.ask(UNIT)) is ErrorKind.UNAVAILABLE
    host.release(lease.id)
    host.scan()
    assert host.use(UNIT).devices[0].startswith(f"{CARD}-p")
