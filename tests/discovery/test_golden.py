"""What the hosts of each vendor are discovered as, and the manifests of leases there, word for word.

``HETERO_GOLDEN=update`` writes the files anew; read the difference before it is committed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hetero_agent.access import door as module
from hetero_agent.access.door import Door
from hetero_agent.core.model import DeviceRecord, Instant, Lease, LeaseState, RequestKey
from tests.discovery.hosts import HOSTS
from tests.discovery.observe import enumerate_once, watching
from tests.support.umock import bed, in_umockdev

GOLDEN = Path(__file__).parent / "golden"

#: Groups have other numbers elsewhere.
GIDS = {"render": 9101, "video": 9102}


def lease(devices: Sequence[DeviceRecord]) -> Lease:
    return Lease(
        id="0123456789abcdef" * 2,
        key=RequestKey(1000, "", "Allocate", "r"),
        resource=devices[0].resource,
        devices=tuple(record.id for record in devices),
        uid=1000,
        client="",
        label="",
        state=LeaseState.ACTIVE,
        created=Instant(5_000_000, 1_700_000_000_000_000),
        confirmed=True,
    )


def plain(record: DeviceRecord) -> dict[str, Any]:
    """What a record says beyond the defaults."""
    default = DeviceRecord("", "")
    whole = dataclasses.asdict(record)
    return {
        field.name: whole[field.name]
        for field in dataclasses.fields(record)
        if getattr(record, field.name) != getattr(default, field.name)
        # the mounts that exist on this host are in the manifests; which others there could be, in the profile
        and field.name != "optional_mounts"
    }


def grantable(records: Mapping[str, DeviceRecord]) -> list[DeviceRecord]:
    """The devices of the resource that has most of them, in the order in which they were found."""
    free = [record for record in records.values() if not record.obstacle]
    most = max((record.resource for record in free), key=[one.resource for one in free].count)
    return [record for record in free if record.resource == most]


@pytest.mark.parametrize("name", list(HOSTS))
@in_umockdev()
def test_records_and_manifests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_gid", GIDS.get)
    # what is installed on the host that runs the test is none of the mocked host's
    monkeypatch.setattr(module, "_existing", lambda mount: [] if "*" in mount[0] else [mount])

    async def manifests(found: list[DeviceRecord]) -> list[dict[str, Any]]:
        door = Door()
        # the last first: the order of a lease is not that of the bus
        leases = [lease(found[-1:]), lease(found[:2][::-1])] if len(found) > 1 else [lease(found)]
        return [await door.prepare(one, found) for one in leases]

    with bed() as mock:
        HOSTS[name](mock)
        records = enumerate_once()
        got = {
            "records": [plain(record) for record in records.values()],
            "manifests": asyncio.run(manifests(grantable(records))),
        }
    text = json.dumps(got, indent=1, sort_keys=True) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("HETERO_GOLDEN") == "update":
        path.write_text(text)
    assert json.loads(text) == json.loads(path.read_text())


def test_every_golden_file_has_its_host() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(HOSTS)


@in_umockdev()
def test_nodes_that_are_meant_to_be_everybodys() -> None:
    """NVIDIA's and those of its MIG instances, by the profile; those of DRM are none of them."""

    async def body() -> frozenset[str]:
        async with watching() as seen:
            return seen.source.open_to_all

    with bed() as mock:
        HOSTS["nvidia-mig"](mock)
        found = asyncio.run(body())
        records = enumerate_once()
    instances = {node.path for one in records.values() for node in one.own_nodes if one.parent}
    assert instances
    assert instances <= found
    assert any(path.startswith("/dev/nvidia") and path[-1].isdecimal() for path in found - instances)
    assert not any("/dri/" in path for path in found - instances)
