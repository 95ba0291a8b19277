"""A card and its parts: none is granted while another is busy."""

from __future__ import annotations

import pytest

from hetero_agent.core.effects import DeviceChanged, ErrorKind
from hetero_agent.core.model import Health, Options, Policy
from tests.core.host import GPU, PART, SECOND, Host, card, holder


@pytest.fixture
def host() -> Host:
    """Card c with parts c-p1 and c-p2, the second with a part of its own; and a plain card d."""
    one = Host()
    one.ready(
        card("c", 0),
        card("c-p1", 1, resource=PART, parent="c"),
        card("c-p2", 2, resource=PART, parent="c"),
        card("c-p2-s", 3, resource="v/share", parent="c-p2"),
        card("d", 4),
    )
    return one


def allocatable(host: Host) -> dict[str, int]:
    return {resource: counts["allocatable"] for resource, counts in host.governor.resources().items()}


def test_all_are_allocatable_while_none_is_busy(host: Host) -> None:
    assert allocatable(host) == {GPU: 2, PART: 2, "v/share": 1}


def test_a_part_in_use_blocks_its_card_and_not_its_sibling(host: Host) -> None:
    host.use(PART, devices=("c-p1",))
    assert DeviceChanged("c") in host.effects
    assert host.governor.blocked_by("c") == ("c-p1",)
    assert host.governor.blocked_by("c-p2") == ()
    assert allocatable(host) == {GPU: 1, PART: 1, "v/share": 1}
    assert host.error(host.ask(devices=("c",))) is ErrorKind.UNAVAILABLE
    assert host.grant().devices == ("d",)


def test_a_card_in_use_blocks_all_below(host: Host) -> None:
    host.use(devices=("c",))
    assert allocatable(host) == {GPU: 1, PART: 0, "v/share": 0}
    assert host.governor.blocked_by("c-p2-s") == ("c",)
    assert host.error(host.ask(PART)) is ErrorKind.UNAVAILABLE


def test_a_share_blocks_up_to_the_card(host: Host) -> None:
    host.use("v/share")
    assert [host.governor.blocked_by(one) for one in ("c", "c-p2")] == [("c-p2-s",)] * 2
    assert allocatable(host) == {GPU: 1, PART: 1, "v/share": 0}


def test_every_busy_state_blocks(host: Host) -> None:
    lease = host.ask(PART, devices=("c-p1",))
    assert (host.state("c-p1"), host.governor.blocked_by("c")) == ("allocating", ("c-p1",))
    made = host.preparing().id
    host.prepared(made)
    host.body(lease)
    host.confirm(made)
    assert (host.state("c-p1"), host.governor.blocked_by("c")) == ("in-use", ("c-p1",))
    host.observe(gone=("c-p1",))
    assert (host.state("c-p1"), host.governor.blocked_by("c")) == ("lost", ("c-p1",))
    host.observe(card("c-p1", 1, resource=PART, parent="c"))
    assert (host.state("c-p1"), host.governor.blocked_by("c")) == ("reclaiming", ("c-p1",))
    stray = {"c-p1": [holder(9)]}
    host.scan(stray)
    host.ticks(61 * SECOND)
    # stuck: its return is still owed
    assert (host.state("c-p1"), host.governor.blocked_by("c")) == ("faulty", ("c-p1",))
    host.scan()
    assert (host.state("c-p1"), host.governor.blocked_by("c")) == ("idle", ())
    host.scan(stray)
    host.later(3 * SECOND)
    host.scan(stray)
    assert (host.state("c-p1"), host.governor.blocked_by("c")) == ("occupied", ("c-p1",))
    assert allocatable(host)[GPU] == 1


def test_what_is_only_ill_or_offline_does_not_block(host: Host) -> None:
    host.health("c-p1", Health.UNHEALTHY, "xid 48")
    host.cordon("c-p2")
    assert (host.state("c-p1"), host.state("c-p2")) == ("faulty", "offline")
    assert host.governor.blocked_by("c") == ()
    assert allocatable(host)[GPU] == 2


@pytest.mark.parametrize("policy", list(Policy))
def test_two_relatives_are_never_in_one_lease(policy: Policy) -> None:
    host = Host()
    host.ready(card("c", 0), card("c-p1", 1, parent="c"), card("c-p2", 2, parent="c"))
    assert host.governor.resources()[GPU]["allocatable"] == 3
    assert host.error(host.ask(count=3, policy=policy)) is ErrorKind.UNAVAILABLE
    lease = host.use(devices=("c-p1", "c-p2"), count=2, policy=policy)
    assert lease.devices == ("c-p1", "c-p2")


def test_named_relatives_are_refused() -> None:
    host = Host()
    host.ready(card("c", 0), card("c-p1", 1, parent="c"))
    assert host.error(host.ask(count=2, devices=("c", "c-p1"))) is ErrorKind.UNAVAILABLE


def test_a_part_that_comes_or_goes_while_busy() -> None:
    host = Host()
    host.ready(card("c-p1", 1, resource=PART, parent="c"))
    host.use(PART)
    host.observe(card("c", 0))
    host.scan()
    assert (host.state("c"), host.governor.blocked_by("c")) == ("idle", ("c-p1",))
    assert host.governor.resources()[GPU]["allocatable"] == 0
    lease = next(iter(host.governor.leases))
    host.release(lease)
    host.observe(gone=("c-p1",))
    assert host.governor.resources()[GPU]["allocatable"] == 1


def test_a_part_that_changes_its_card_while_busy() -> None:
    host = Host()
    host.ready(card("a", 0), card("b", 1), card("p", 2, resource=PART, parent="a"))
    host.use(PART)
    assert (host.governor.blocked_by("a"), host.governor.blocked_by("b")) == (("p",), ())
    host.observe(card("p", 2, resource=PART, parent="b"))
    assert (host.governor.blocked_by("a"), host.governor.blocked_by("b")) == ((), ("p",))
    assert host.grant().devices == ("a",)
    assert host.error(host.ask()) is ErrorKind.UNAVAILABLE


def test_a_middle_one_that_comes_late_links_its_family() -> None:
    host = Host()
    host.ready(card("c", 0), card("s", 3, resource="v/share", parent="m"))
    host.use("v/share")
    assert host.governor.blocked_by("c") == ()
    host.observe(card("m", 2, resource=PART, parent="c"))
    assert host.governor.blocked_by("c") == ("s",)
    assert host.error(host.ask()) is ErrorKind.UNAVAILABLE
    host.observe(gone=("m",))
    assert host.grant().devices == ("c",)


def twins() -> Host:
    """The kernel's card 0000:01:00.0 and a provider's device npu0: one and the same node."""
    one = Host()
    one.ready(card("0000:01:00.0", 7), card("d", 4))
    one.observe(card("npu0", 7, resource=PART, source="vendor"), source="vendor")
    one.scan()
    return one


def test_of_two_devices_with_one_node_one_is_granted() -> None:
    host = twins()
    assert allocatable(host) == {GPU: 2, PART: 1}
    lease = host.use(PART)
    assert host.governor.blocked_by("0000:01:00.0") == ("npu0",)
    assert DeviceChanged("0000:01:00.0") in host.effects
    assert host.error(host.ask(devices=("0000:01:00.0",))) is ErrorKind.UNAVAILABLE
    assert "its twin npu0 is busy" in str(host.governor.explain(GPU, 2, Options()))
    # nor is its user taken for a stranger
    user = holder(9, uid=lease.uid)
    for _ in range(3):
        host.scan({"npu0": [user], "0000:01:00.0": [user]})
        host.later(3 * SECOND)
    assert host.state("0000:01:00.0") == "idle"
    host.release(lease.id)
    host.scan({"npu0": [user], "0000:01:00.0": [user]})
    assert host.error(host.ask(devices=("0000:01:00.0",))) is ErrorKind.UNAVAILABLE
    host.scan()
    assert host.governor.blocked_by("0000:01:00.0") == ()
    assert host.use(devices=("0000:01:00.0",)).devices == ("0000:01:00.0",)
    assert host.error(host.ask(PART)) is ErrorKind.UNAVAILABLE


def test_twins_of_one_resource_are_not_granted_together() -> None:
    host = Host()
    host.ready(card("a", 7), card("b", 7))
    assert host.error(host.ask(count=2)) is ErrorKind.UNAVAILABLE
    assert host.error(host.ask(count=2, devices=("a", "b"))) is ErrorKind.UNAVAILABLE
    assert host.grant().devices in (("a",), ("b",))


def test_devices_that_get_other_nodes_are_twins_no_more() -> None:
    host = twins()
    host.use(PART)
    host.observe(card("0000:01:00.0", 8))
    host.scan()
    assert host.governor.blocked_by("0000:01:00.0") == ()
    assert allocatable(host) == {GPU: 2, PART: 0}
    host.observe(card("0000:01:00.0", 7))
    host.scan()
    assert allocatable(host) == {GPU: 1, PART: 0}


def test_what_is_away_is_nobodys_twin() -> None:
    """The number of its node may have been given anew."""
    host = twins()
    host.use(PART)
    host.observe(gone=("npu0",), source="vendor")
    host.scan()
    assert host.state("npu0") == "lost"
    assert host.governor.blocked_by("0000:01:00.0") == ()
    assert allocatable(host)[GPU] == 2
