"""Which devices a request gets: policies, requirements, named devices, and what Explain says."""

from __future__ import annotations

import random

import pytest

from hetero_agent.core.effects import ErrorKind
from hetero_agent.core.model import Health, Options, Policy
from hetero_agent.core.selection import mismatch
from tests.core.host import GPU, HOUR, SECOND, Host, card, order

PACKED, MEMORY = Policy.PACKED, Policy.MOST_FREE_MEMORY


def host_of(*records: object) -> Host:
    host = Host()
    host.ready(*records)  # type: ignore[arg-type]
    return host


def chosen(host: Host, count: int = 1, **options: object) -> tuple[str, ...]:
    """What a grant would take now."""
    return host.governor.explain(GPU, count, Options(**options)).chosen  # type: ignore[arg-type]


# -- least-allocated -------------------------------------------------------------------------------
def test_least_often_granted_first_then_longest_idle() -> None:
    host = host_of(*(card(f"d{index}", index) for index in range(3)))
    assert host.use(count=2).devices == ("d0", "d1")
    for lease in list(host.governor.leases):
        host.release(lease)
    host.scan(devices=["d1"])
    host.scan(devices=["d0"])
    assert order(host.governor, GPU) == ["d2", "d1", "d0"]
    assert host.use(count=2).devices == ("d2", "d1")


def test_the_order_is_right_after_many_grants_and_undone_events() -> None:
    chance = random.Random(7)
    host = host_of(*(card(f"d{index}", index) for index in range(6)))
    for _ in range(300):
        if chance.random() < 0.3:
            host.governor.handle(host.scan_event({}))
            host.governor.undo()
        if chance.random() < 0.5 and host.governor.world.allocatable:
            free = order(host.governor, GPU)
            key = {one: (host.device(one).count, host.device(one).since.boot, one) for one in free}
            assert free == sorted(free, key=key.__getitem__)
            assert host.use().devices == (free[0],)
        elif host.governor.leases:
            host.release(chance.choice(list(host.governor.leases)))
            host.scan()
    heap = host.governor.world.pool(GPU)._heap  # type: ignore[union-attr]
    assert len(heap) <= 4 * 6 + 65


def test_counts_follow_the_serial_to_another_place() -> None:
    host = host_of(card("d0", 0, serial="A"), card("d1", 1, serial="B"))
    host.release(host.use().id)
    host.scan()
    host.observe(gone=("d0",))
    host.observe(card("d7", 7, serial="A"))
    host.scan()
    assert (host.device("d7").count, host.device("d1").count) == (1, 0)
    assert chosen(host, 2) == ("d1", "d7")


# -- packed ----------------------------------------------------------------------------------------
def at(name: str, number: int, root: str, numa: int) -> object:
    return card(name, number, attributes={"pcie-root": root}, numa_nodes=(numa,))


def test_packed_takes_the_smallest_root_that_has_enough() -> None:
    host = host_of(
        *(at(f"a{index}", index, "a", 0) for index in range(3)),
        *(at(f"b{index}", 10 + index, "b", 1) for index in range(2)),
    )
    assert chosen(host, 2, policy=PACKED) == ("b0", "b1")
    assert chosen(host, 3, policy=PACKED) == ("a0", "a1", "a2")
    assert host.governor.explain(GPU, 2, Options(policy=PACKED)).note == "all on one PCIe root"


def test_packed_falls_back_to_a_numa_node_then_to_the_largest_roots() -> None:
    host = host_of(
        at("a0", 0, "a", 0), at("b0", 1, "b", 1), at("c0", 2, "c", 1), at("d0", 3, "d", 2), at("d1", 4, "d", 2)
    )
    host.use(devices=("d0",))
    one = host.governor.explain(GPU, 2, Options(policy=PACKED))
    assert (one.chosen, one.note) == (("b0", "c0"), "all on one NUMA node")
    three = host.governor.explain(GPU, 3, Options(policy=PACKED))
    assert len(three.chosen) == 3
    assert three.note == "no PCIe root or NUMA node has that many free"


# -- most-free-memory ------------------------------------------------------------------------------
def test_most_free_memory_first_and_unknown_last() -> None:
    host = host_of(
        card("d0", 0, attributes={"memory-free": 5}),
        card("d1", 1),
        card("d2", 2, attributes={"memory-free": 9}),
        card("d3", 3, attributes={"memory-free": 9}),
    )
    assert chosen(host, 4, policy=MEMORY) == ("d2", "d3", "d0", "d1")


def test_no_memory_known_is_said() -> None:
    host = host_of(card("d0", 0), card("d1", 1))
    found = host.governor.explain(GPU, 1, Options(policy=MEMORY))
    assert found.chosen == ("d0",)
    assert found.note == "no device tells its free memory; chosen by least-allocated"


# -- require and devices ---------------------------------------------------------------------------
CARD = card(
    "d0",
    0,
    vendor="acme",
    model="x1",
    driver="acme_drv",
    serial="S",
    numa_nodes=(1,),
    attributes={"memory": 80, "firmware": "7.1", "boot-vga": False, "ecc": True},
)


@pytest.mark.parametrize(
    ("require", "lacks"),
    [
        ({}, ""),
        ({"vendor": "acme", "model": "x1", "driver": "acme_drv", "serial": "S", "numa-node": 1}, ""),
        ({"memory": 80}, ""),
        ({"memory": 40}, ""),
        ({"memory": 81}, "memory is 80"),
        ({"memory": "80"}, "memory is 80, not a text"),
        ({"memory": True}, "memory is 80, not a truth value"),
        ({"firmware": "7.1"}, ""),
        ({"firmware": "7"}, "firmware is 7.1"),
        ({"ecc": True, "boot-vga": False}, ""),
        ({"ecc": False}, "ecc is true"),
        ({"ecc": 1}, "ecc is true, not a number"),
        ({"numa-node": 0}, "not on NUMA node 0"),
        ({"nvlink": 4}, "has no attribute nvlink"),
        ({"vendor": "other"}, "vendor is acme"),
    ],
)
def test_require(require: dict[str, str | int | bool], lacks: str) -> None:
    host = host_of(CARD)
    assert mismatch(host.device("d0"), require) == lacks
    found = host.governor.explain(GPU, 1, Options(require=require))
    assert found.verdict == ("never" if lacks else "now")
    assert found.devices == (("d0", "idle", not lacks, lacks),)


@pytest.mark.parametrize("policy", list(Policy))
def test_require_holds_under_each_policy(policy: Policy) -> None:
    host = host_of(card("d0", 0, attributes={"memory": 10}), card("d1", 1, attributes={"memory": 20}))
    assert chosen(host, 1, policy=policy, require={"memory": 15}) == ("d1",)
    assert chosen(host, 2, policy=policy, require={"memory": 15}) == ()


def test_named_devices_by_id_or_alias_exactly_these_or_none() -> None:
    host = host_of(card("d0", 0, aliases=("gpu-a",)), card("d1", 1), card("d2", 2))
    assert chosen(host, 2, devices=("d2", "gpu-a")) == ("d2", "d0")
    assert chosen(host, 2, devices=("d0", "gpu-a")) == ()
    assert chosen(host, 1, devices=("nobody",)) == ()
    host.use(devices=("gpu-a",))
    token = host.ask(count=2, devices=("d0", "d1"))
    assert host.error(token) is ErrorKind.UNAVAILABLE
    assert host.state("d1") == "idle"


def test_an_alias_of_two_devices_is_nobodys() -> None:
    host = host_of(card("d0", 0, aliases=("same",)), card("d1", 1, aliases=("same",)))
    assert host.governor.find_device("same") is None
    host.observe(gone=("d0",))
    assert host.governor.find_device("same") is host.device("d1")


# -- what is not grantable, and Explain ------------------------------------------------------------
def test_why_not() -> None:
    host = host_of(*(card(f"d{index}", index) for index in range(6)))
    host.use(devices=("d0",))
    host.cordon("d1")
    host.health("d2", Health.SUSPECT, "link is narrow")
    host.health("d3", Health.UNHEALTHY, "xid 79")
    host.opened("d4")
    found = host.governor.explain(GPU, 2, Options())
    assert {one[0]: one[3] for one in found.devices} == {
        "d0": "in-use",
        "d1": "offline (cordoned)",
        "d2": "suspect (link is narrow)",
        "d3": "faulty (xid 79)",
        "d4": "no clean scan since it was opened, or a scan failed; scanning",
        "d5": "",
    }
    assert found.verdict == "later"
    assert found.text.startswith("2 v/gpu wanted, 1 can be granted of 6: ")
    assert host.governor.explain(GPU, 1, Options()).chosen == ("d5",)
    assert host.governor.explain(GPU, 7, Options()).verdict == "never"
    assert host.governor.resources()[GPU]["allocatable"] == 1


def test_named_devices_are_explained_alone() -> None:
    host = host_of(card("d0", 0), card("d1", 1, aliases=("serial",)), card("d2", 2))
    host.use(devices=("d1",))
    found = host.governor.explain(GPU, 1, Options(devices=("serial",)))
    assert [(one[0], one[3]) for one in found.devices] == [("d1", "in-use")]
    assert (found.verdict, found.text) == ("later", "1 v/gpu wanted, 0 can be granted of 1 named: 1 in-use")
    found = host.governor.explain(GPU, 2, Options(devices=("d0", "nope")))
    assert [one[0] for one in found.devices] == ["d0"]
    assert found.verdict == "never"
    assert found.text.startswith("2 v/gpu wanted, 1 can be granted of 1 named; there is no v/gpu nope; ")


def test_a_resource_that_is_not_here() -> None:
    host = host_of(card("d0", 0))
    assert host.governor.explain("v/none", 1, Options()).verdict == "never"
    assert host.error(host.ask("v/none")) is ErrorKind.NOT_FOUND
    host.observe(gone=("d0",))
    assert dict(host.governor.resources()) == {}


def test_explain_changes_nothing() -> None:
    host = host_of(card("d0", 0))
    before = (host.governor.world.sequence, host.device("d0"))
    host.governor.explain(GPU, 1, Options())
    assert (host.governor.world.sequence, host.device("d0")) == before
    assert host.grant().devices == ("d0",)


def test_a_choice_among_thousands_looks_at_few() -> None:
    host = Host(devices_per_client=10_000)
    host.ready(*(card(f"d{index:04}", index) for index in range(3000)))
    looked = 0
    world = host.governor.world
    real = world.relatives

    def counted(*args: object) -> object:
        nonlocal looked
        looked += 1
        return real(*args)  # type: ignore[arg-type]

    world.relatives = counted  # type: ignore[assignment,method-assign]
    host.grant(count=8)
    assert looked < 200


def test_time_does_not_wear_out_the_order() -> None:
    host = host_of(card("d0", 0), card("d1", 1))
    for _ in range(50):
        host.ticks(HOUR)
        lease = host.use()
        host.release(lease.id)
        host.later(SECOND)
        host.scan()
    assert sorted(host.device(one).count for one in ("d0", "d1")) == [25, 25]
