"""A device that several leases share, in slots."""

from __future__ import annotations

from pathlib import Path

from hetero_agent.core.effects import ErrorKind
from hetero_agent.core.model import Binding, DeviceRecord, Obstacle, ProcessRef, Role
from tests.core.host import Host, holder
from tests.discovery.hosts import nvidia
from tests.discovery.observe import enumerate_once
from tests.support.umock import bed, in_umockdev

WHOLE, SHARED = "0000:17:00.0", "0000:65:00.0"
SLOTS = [f"{SHARED}-s{number}" for number in range(3)]


def found(directory: Path) -> dict[str, DeviceRecord]:
    """Two cards, the second of which the site shares."""
    text = Path("hetero_agent/profiles/nvidia.toml").read_text()
    text = text.replace('resource = "nvidia.com/gpu"', 'resource = "nvidia.com/gpu"\npriority = 60')
    text = text.replace("[[match]]", f'[[match]]\nnames = ["{SHARED}"]')
    text = text.replace("[device]", '[shared]\nslots = 3\n\n[device]\ncounted-with = "nvidia"')
    (directory / "nvidia-shared.toml").write_text(text)
    with bed() as mock:
        nvidia(mock)
        return enumerate_once(directory)


@in_umockdev()
def test_slots_of_one_card_and_another_whole(tmp_path: Path) -> None:
    records = found(tmp_path)
    assert list(records) == [WHOLE, SHARED, *SLOTS]
    assert records[WHOLE].env["CUDA_VISIBLE_DEVICES"] == "0"
    assert (records[SHARED].obstacle, records[SHARED].own_nodes) == (Obstacle.NO_NODE, ())
    for number, one in enumerate(SLOTS):
        slot = records[one]
        assert (slot.resource, slot.parent, slot.obstacle) == ("nvidia.com/gpu.shared", SHARED, Obstacle.NONE)
        # the number is the card's, among all cards
        assert slot.env["CUDA_VISIBLE_DEVICES"] == "1"
        assert slot.attributes["slot"] == number
        assert [node.path for node in slot.own_nodes] == [
            "/dev/nvidia0", "/dev/dri/renderD129", "/dev/dri/card1",
        ]  # fmt: skip
        assert next(node.path for node in slot.nodes if node.role is Role.CONTROL) == "/dev/nvidiactl"


@in_umockdev()
def test_slots_are_leased_one_by_one_and_their_users_told_apart(tmp_path: Path) -> None:
    host = Host()
    host.ready(*found(tmp_path).values())
    assert host.error(host.ask("nvidia.com/gpu.shared", confirm=True)) is ErrorKind.INVALID_ARGUMENT
    leases = [
        host.use("nvidia.com/gpu.shared", binding=Binding(pid=ProcessRef(pid, 1))) for pid in (101, 102, 103)
    ]
    assert sorted(one for lease in leases for one in lease.devices) == SLOTS
    assert host.error(host.ask("nvidia.com/gpu.shared", binding=Binding(pid=ProcessRef(104, 1)))) is (
        ErrorKind.UNAVAILABLE
    )
    # the first one's process stays on the card, and so do the others'
    (first,) = leases[0].devices
    host.release(leases[0].id)
    host.scan({one: [holder(101), holder(102), holder(103)] for one in SLOTS})
    assert host.state(first) == "reclaiming"
    host.scan({one: [holder(102), holder(103)] for one in SLOTS})
    assert host.state(first) == "idle"
    assert {host.state(one) for one in SLOTS if one != first} == {"in-use"}
