"""heteroctl release --all: one's own leases, and as root everybody's."""

from __future__ import annotations

from tests.cli.conftest import Station
from tests.support.agent import GROUP_GID, MEMBER, OTHER_MEMBER
from tests.support.ctl import Ctl
from tests.support.wait import wait_until

SCENARIO = """
[[device]]
id = "npu"
resource = "example.com/npu"
count = 4
"""

DEVICES = {"npu-0", "npu-1", "npu-2", "npu-3"}


def lease(ctl: Ctl) -> str:
    return str(ctl.json("allocate", "-r", "example.com/npu", "--confirm")["lease"])


def test_a_user_releases_its_own_and_root_the_rest(ctl: Ctl, station: Station) -> None:
    mine = Ctl(station.agent.bus.address, MEMBER, [GROUP_GID])
    others = Ctl(station.agent.bus.address, OTHER_MEMBER, [GROUP_GID])
    first, second, third = lease(mine), lease(mine), lease(others)
    assert mine.json("release", "--all") == [
        {"lease": first, "changed": True},
        {"lease": second, "changed": True},
    ]
    assert [one["id"] for one in ctl.json("leases") if one["state"] == "active"] == [third]
    assert mine("release", "--all").out == "no leases to release\n"
    assert ctl.json("release", "--all") == [{"lease": third, "changed": True}]
    wait_until(lambda: set(station.states().values()) == {"idle"}, what="all devices idle")


def test_all_is_instead_of_names(ctl: Ctl) -> None:
    assert "not both" in ctl("release", "--all", "abcd", code=2).err
    assert "no lease to release" in ctl("release", code=2).err
