"""Whatever discovery finds on a vendor's host, the helper lets a lease give; without profiles, nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from hetero_agent import access_helper, config
from hetero_agent.access import door as module
from hetero_agent.access import verify
from hetero_agent.access.door import Door
from hetero_agent.access.grant import Grant
from hetero_agent.access.manifest import AccessError
from hetero_agent.core.model import DeviceRecord
from hetero_agent.discovery import profiles
from tests.discovery.hosts import HOSTS
from tests.discovery.observe import enumerate_once
from tests.discovery.test_golden import GIDS, lease
from tests.support.umock import bed, in_umockdev


def granted(devices: list[DeviceRecord]) -> Iterator[Grant]:
    """The grant of each device alone, as the helper reads it from the agent's file."""
    door = Door()
    for device in devices:
        leased = lease([device])
        manifest = asyncio.run(door.prepare(leased, devices))
        yield Grant(leased.id, leased.uid, json.loads(json.dumps(manifest)))


@pytest.mark.parametrize("name", list(HOSTS))
@in_umockdev()
def test_every_device_of_a_host_may_be_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_gid", GIDS.get)
    monkeypatch.setattr(access_helper, "_gids", lambda wanted: {GIDS[one] for one in wanted if one in GIDS})
    # every mount that a profile could have, as if it existed here
    monkeypatch.setattr(
        module,
        "_existing",
        lambda mount: [
            (mount[0].replace("*", "x"), mount[0].replace("*", "x") if "*" in mount[0] else mount[1], mount[2])
        ],
    )
    known = profiles.load(None)
    rules = access_helper.rules_of(known, config.Config())
    with bed() as mock:
        HOSTS[name](mock)
        devices = [record for record in enumerate_once().values() if not record.obstacle]
        assert devices
        grants = list(granted(devices))
        for one in grants:
            assert one.nodes
            assert verify.check(one, rules) == one
        # none of it is the agent's own word
        none = access_helper.rules_of(profiles.ProfileSet(), config.Config())
        for one in grants:
            with pytest.raises(AccessError, match="not by root's profiles"):
                verify.check(one, none)
