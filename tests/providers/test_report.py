"""Reports as they come from the bus: each refusal with its text, and nothing but refusals."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import Health, Role
from hetero_agent.providers import report

GOOD: dict[str, Any] = {"id": "sim-0", "resource": "example.com/npu"}


def entry(**changes: Any) -> report.Entry:
    return report.decode_entry(
        {**GOOD, **{k.replace("_", "-"): v for k, v in changes.items()}}, "page 0, entry 0"
    )


def test_a_whole_entry_is_decoded() -> None:
    got = entry(
        nodes=[["/dev/npu0", "own"], ("/dev/npu-manager", "control")],
        vendor="Example",
        model="N1",
        driver="npu",
        serial="SN-1",
        parent="sim-9",
        aliases=["SN-1"],
        numa_nodes=[1, 0],
        attributes={"memory-total": 1 << 34, "firmware": "1.2", "integrated": False},
        health="suspect",
        reason="slow link",
        env={"NPU_VISIBLE_DEVICES": "0"},
    )
    assert got.nodes == (
        report.NodeClaim("/dev/npu0", Role.OWN),
        report.NodeClaim("/dev/npu-manager", Role.CONTROL),
    )
    assert (got.vendor, got.model, got.driver, got.serial, got.parent) == (
        "Example",
        "N1",
        "npu",
        "SN-1",
        "sim-9",
    )
    assert got.aliases == ("SN-1",)
    assert got.numa_nodes == (1, 0)
    assert got.attributes == {"memory-total": 1 << 34, "firmware": "1.2", "integrated": False}
    assert got.health is Health.SUSPECT
    assert got.reason == "slow link"
    assert got.env == {"NPU_VISIBLE_DEVICES": "0"}


def test_what_is_not_said_is_not_made_up() -> None:
    got = entry()
    assert got.health is None
    assert got.nodes == ()
    assert got.numa_nodes == ()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"id": "Upper"}, "page 0, entry 0: id Upper does not match"),
    ({"id": ""}, "does not match"),
    ({"id": 7}, "does not match"),
    ({"id": "a" * 64}, "does not match"),
    ({"id": "a/../b"}, "does not match"),
    ({"id": "a\n"}, r"id a\x0a does not match"),
    ({"resource": "npu"}, "device sim-0: resource: npu does not match"),
    ({"resource": None}, "does not match"),
    ({"colour": "red"}, "device sim-0: unknown key colour; the keys are id, resource, nodes"),
    ({"mounts": []}, "unknown key mounts"),
    ({"groups": []}, "unknown key groups"),
    ({"nodes": "x"}, "device sim-0: nodes: expected a list"),
    ({"nodes": [["/dev/a"]]}, "expected pairs of path and role"),
    ({"nodes": [["dev/a", "own"]]}, "is not an absolute path"),
    ({"nodes": [["/dev/../etc/shadow", "own"]]}, "without '.', '..' and empty parts"),
    ({"nodes": [["/dev//a", "own"]]}, "without '.', '..' and empty parts"),
    ({"nodes": [["/dev/./a", "own"]]}, "without '.', '..' and empty parts"),
    ({"nodes": [["/dev/a/", "own"]]}, "without '.', '..' and empty parts"),
    ({"nodes": [["/dev/a\x1b[2J", "own"]]}, r"\x1b[2J"),
    ({"nodes": [["/dev/" + "a" * 300, "own"]]}, "at most 255 printable characters"),
    ({"nodes": [["/dev/a", "owner"]]}, "role owner of /dev/a is none of own, parent, control"),
    ({"nodes": [["/dev/a", "own"], ["/dev/a", "own"]]}, "one is given twice"),
    ({"nodes": [["/dev/a", "own"], ["/dev/a", "control"]]}, "one path is given with two roles"),
    ({"nodes": [[f"/dev/a{n}", "own"] for n in range(17)]}, "17 given; the most is 16"),
    ({"vendor": "x" * 129}, "vendor: expected at most 128 printable characters"),
    ({"model": "a\u202eb"}, r"a\u202eb"),
    ({"driver": 3}, "driver: expected at most 128 printable characters, got 3"),
    ({"serial": "has space"}, "serial: has space does not match"),
    ({"parent": "sim-0"}, "device sim-0: parent is the device itself"),
    ({"parent": "A"}, "parent: A does not match"),
    ({"aliases": [f"a{n}" for n in range(9)]}, "aliases: 9 given; the most is 8"),
    ({"aliases": ["a", "a"]}, "aliases: one is given twice"),
    ({"aliases": [""]}, "does not match"),
    ({"numa-nodes": [-1]}, "numa-nodes: expected a number from 0"),
    ({"numa-nodes": [True]}, "expected a number from 0"),
    ({"numa-nodes": [70_000]}, "70000 is no NUMA node"),
    ({"attributes": {"Memory": 1}}, "attributes: Memory does not match"),
    ({"attributes": {"memory": -1}}, "attributes: memory: expected a number from 0"),
    ({"attributes": {"memory": 2**63}}, "expected a number from 0"),
    ({"attributes": {"memory": 1.5}}, "expected text, a number or a truth value, got 1.5"),
    ({"attributes": {"memory": [1]}}, "expected text, a number or a truth value"),
    ({"attributes": {f"a{n}": 1 for n in range(33)}}, "33 given; the most is 32"),
    ({"attributes": {f"a{n}": "x" * 128 for n in range(8)}}, "1232 bytes together; the most is 1000"),
    ({"attributes": []}, "expected a dictionary"),
    ({"health": "fine"}, "health: fine is none of healthy, suspect, unhealthy, unknown"),
    ({"reason": "x" * 257}, "reason: expected at most 256"),
    ({"env": {"LD_PRELOAD": "/tmp/x.so"}}, "env: LD_PRELOAD is not a provider's to set"),
    ({"env": {"PATH": "/tmp"}}, "PATH is not a provider's to set"),
    ({"env": {"HETERO_LEASE_ID": "0"}}, "HETERO_LEASE_ID is not a provider's to set"),
    ({"env": {"PYTHONPATH": "/tmp"}}, "PYTHONPATH is not a provider's to set"),
    ({"env": {"BASH_ENV": "/tmp/x"}}, "BASH_ENV is not a provider's to set"),
    ({"env": {"lower": "x"}}, "env: lower does not match"),
    ({"env": {"A=B": "x"}}, "does not match"),
    ({"env": {"A": "x\n"}}, "env: A: expected at most 128 printable characters"),
    ({"env": {f"A{n}": "x" for n in range(17)}}, "17 variables; the most is 16"),
    ({"env": "A=1"}, "env: expected a dictionary"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(Refusal) as refused:
        report.decode_page([{**GOOD, **changes}])
    assert refused.value.kind is ErrorKind.INVALID_ARGUMENT
    assert text in refused.value.text


def test_an_entry_without_an_id() -> None:
    with pytest.raises(Refusal) as refused:
        report.decode_page([GOOD, {"resource": "example.com/npu"}], 3)
    assert refused.value.text == "page 3, entry 1: id is missing"


def test_a_missing_resource_and_an_oversized_page() -> None:
    with pytest.raises(Refusal, match="device sim-0: resource is missing"):
        report.decode_page([{"id": "sim-0"}])
    with pytest.raises(Refusal, match="65 in one page; the most is 64"):
        report.decode_page([GOOD] * 65)
    with pytest.raises(Refusal, match="page 3, entry 1: expected a dictionary"):
        report.decode_page([GOOD, "x"], 3)
    with pytest.raises(Refusal, match="expected a list of dictionaries"):
        report.decode_page("x")


def family(*rows: tuple[str, str] | tuple[str, str, tuple[str, ...]]) -> list[report.Entry]:
    return [report.Entry(row[0], "a/b", parent=row[1], aliases=row[2] if len(row) > 2 else ()) for row in rows]


def test_families() -> None:
    kernel = {"0000:3b:00.0"}.__contains__
    report.check_family(family(("a-p1", "a"), ("a", ""), ("b", "0000:3b:00.0"), ("a-p1-s1", "a-p1")), kernel)
    for rows, text in (
        (family(("a", ""), ("a", "")), "device a: reported twice"),
        (family(("a", "b")), "parent b is neither in the report nor known"),
        (family(("a", "b"), ("b", "a")), "is its own ancestor"),
        (family(("a", "b"), ("b", "c"), ("c", "b")), "is its own ancestor"),
        (family(("a", "", ("b",)), ("b", "")), "device a: alias b is the id of another device"),
        (family(("a", "", ("x",)), ("b", "", ("x",))), "device b: alias x is also one of a"),
    ):
        with pytest.raises(Refusal, match=text):
            report.check_family(rows, kernel)


def test_a_long_chain_of_parents_is_walked_once() -> None:
    chain = family(*((f"d{n}", f"d{n - 1}" if n else "") for n in range(4096)))
    calls = 0

    def known(_: str) -> bool:
        nonlocal calls
        calls += 1
        return False

    report.check_family(list(reversed(chain)), known)
    assert calls == 0


def test_health() -> None:
    assert report.decode_health("unhealthy", "hot", {"celsius": 97, "throttled": True, "zone": "hbm"}) == (
        Health.UNHEALTHY,
        "hot",
        {"celsius": "97", "throttled": "true", "zone": "hbm"},
    )
    for arguments, text in (
        (("bad", "", {}), "health: bad is none of"),
        (("healthy", "\x07", {}), "reason: expected at most 256"),
        (("healthy", "", {"A B": 1}), "evidence: A B does not match"),
        (("healthy", "", {f"k{n}": n for n in range(17)}), "17 facts; the most is 16"),
        (("healthy", "", {"k": -5}), "evidence: k: expected a number from 0"),
        (("healthy", "", ["k"]), "evidence: expected a dictionary"),
    ):
        with pytest.raises(Refusal, match=text):
            report.decode_health(*arguments)


_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=8)
)
_anything = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_scalars, inner, max_size=4),
    max_leaves=12,
)
_near = st.fixed_dictionaries(
    {"id": st.just("a") | _anything, "resource": st.just("a/b") | _anything},
    optional=dict.fromkeys(
        ("nodes", "aliases", "attributes", "env", "numa-nodes", "health", "parent"), _anything
    )
    | {"nodes": st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), max_size=3)},
)


@settings(max_examples=400, deadline=None)
@given(st.lists(_near | _anything, max_size=4) | _anything)
@example([{**GOOD, "attributes": {"a": "\ud800"}}])
@example([{**GOOD, "nodes": [("/\x00", "own")]}])
@example([{**GOOD, "nodes": [("/", "own")]}])
@example([{**GOOD, "aliases": [["unhashable"]]}])
def test_decoding_raises_nothing_but_refusals(devices: Any) -> None:
    with contextlib.suppress(Refusal):
        report.check_family(report.decode_page(devices), lambda _: False)


@settings(max_examples=200, deadline=None)
@given(_anything, _anything, _anything | st.dictionaries(st.text(max_size=5), _scalars, max_size=3))
def test_decoding_health_raises_nothing_but_refusals(health: Any, reason: Any, evidence: Any) -> None:
    with contextlib.suppress(Refusal):
        report.decode_health(health, reason, evidence)
