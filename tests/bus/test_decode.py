"""Arguments: closed sets, fixed types, errors that say what fits."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_agent import names
from hetero_agent.bus import decode
from hetero_agent.bus.codec import V
from hetero_agent.bus.decode import Wanted
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import Netdev, OnEnd, OnFault, Options, Policy, ProcessRef


def _allocation(options: dict[str, V], count: int = 1, resource: str = "a.b/c") -> decode.Request:
    return decode.allocation("r", resource, count, options)


def test_every_option() -> None:
    options = {
        "policy": V("s", "packed"),
        "require": V("a{sv}", {"memory": V("u", 5), "model": V("s", "X"), "integrated": V("b", False)}),
        "devices": V("as", ["d1", "d2"]),
        "client": V("s", "c"),
        "label": V("s", "l"),
        "owner-uid": V("u", 1000),
        "pid": V("u", 7),
        "unit": V("s", "job@1.service"),
        "connection": V("b", True),
        "ttl": V("t", 5_000_000),
        "confirm": V("b", True),
        "confirm-within": V("u", 30),
        "wait": V("u", 0),
        "on-fault": V("s", "kill"),
        "on-end": V("s", "kill"),
        "netdev": V("s", "move"),
    }
    assert options.keys() == decode.OPTIONS.keys()
    found = _allocation(options, 2)
    assert found.options == Options(
        policy=Policy.PACKED,
        require={"memory": 5, "model": "X", "integrated": False},
        devices=("d1", "d2"),
        client="c",
        label="l",
        owner_uid=1000,
        confirm=True,
        confirm_within=30_000_000,
        on_fault=OnFault.KILL,
        on_end=OnEnd.KILL,
        netdev=Netdev.MOVE,
    )
    assert found.binding == Wanted(7, "job@1.service", True, 5_000_000)
    assert found.plain["request-id"] == "r"
    assert found.plain["require"] == {"memory": 5, "model": "X", "integrated": False}


def test_no_options_are_the_defaults() -> None:
    found = _allocation({})
    assert found.options == Options()
    assert not found.binding
    assert found.plain == {"request-id": "r", "resource": "a.b/c", "count": 1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"polizy": V("s", "packed")}, "unknown key 'polizy'; known: policy"),
        ({"policy": V("s", "best")}, "least-allocated, packed, most-free-memory"),
        ({"policy": V("u", 1)}, "policy: expected type s, got u"),
        ({"ttl": V("u", 1)}, "ttl: expected type t, got u"),
        ({"ttl": V("t", 1)}, "ttl: expected 100000 to"),
        ({"ttl": V("t", 2**63)}, "ttl: expected 100000 to"),
        ({"client": V("s", "x" * 33)}, "client: expected at most 32 printable"),
        ({"client": V("s", "a\x1b[1m")}, "client: expected at most 32 printable"),
        ({"label": V("s", "x" * 65)}, "label: expected at most 64 printable"),
        ({"confirm-within": V("u", 31)}, "confirm-within: expected 1 to 30 seconds"),
        ({"confirm-within": V("u", 0)}, "confirm-within: expected 1 to 30 seconds"),
        ({"owner-uid": V("u", 2**32 - 1)}, "owner-uid: 4294967295 is no uid"),
        ({"pid": V("u", 0)}, "pid: expected the id of a running process"),
        ({"unit": V("s", "../etc")}, "unit: '../etc' is not the full name of a unit"),
        ({"unit": V("s", "job")}, "unit: 'job' is not the full name of a unit"),
        ({"on-end": V("s", "burn")}, "on-end: 'burn' is not one of wait, kill"),
        ({"netdev": V("s", "burn")}, "netdev: 'burn' is not one of keep, move"),
        ({"devices": V("as", ["a", "a"])}, "devices: one is named twice"),
        ({"devices": V("as", ["a"] * 65)}, "devices: at most 64"),
        ({"devices": V("as", ["a", "b", "c"])}, "devices: 3 named for a count of 2"),
        ({"devices": V("as", ["", "b"])}, "devices: '' is no device id"),
        ({"require": V("a{sv}", {"x": V("d", 1.5)})}, "require: x: expected s, b or an integer, got d"),
        ({"require": V("a{sv}", {"x": V("i", -1)})}, "require: x: expected a number of at least 0"),
        ({"require": V("a{sv}", {"x" * 65: V("i", 1)})}, "is no attribute name"),
        ({"require": V("a{sv}", {str(n): V("i", 1) for n in range(17)})}, "at most 16 attributes"),
        ({"require": V("a{sv}", {"x": V("s", "y" * 129)})}, "require: x: expected at most 128"),
    ],
)
def test_bad_options(options: dict[str, V], says: str) -> None:
    with pytest.raises(Refusal) as caught:
        _allocation(options, 2)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert says in caught.value.text


def test_wait_is_not_supported_yet() -> None:
    with pytest.raises(Refusal) as caught:
        _allocation({"wait": V("u", 5)})
    assert caught.value.kind is ErrorKind.NOT_SUPPORTED


@pytest.mark.parametrize(("resource", "count"), [("gpu", 1), ("", 1), ("a/b/c", 1), ("A/b", 1), ("a/b", 0)])
def test_bad_resource_or_count(resource: str, count: int) -> None:
    with pytest.raises(Refusal) as caught:
        _allocation({}, count, resource)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


@pytest.mark.parametrize("value", ["", "x" * 129, "a\n", "\x7f", "\u202e"])
def test_bad_request_ids(value: str) -> None:
    with pytest.raises(Refusal, match="request_id: expected 1 to 128 printable"):
        decode.request_id(value)


@pytest.mark.parametrize("value", ["x", "x" * 128, "überß 7"])
def test_good_request_ids(value: str) -> None:
    assert decode.request_id(value) == value


def test_binding() -> None:
    assert decode.binding({}) == Wanted()
    assert decode.binding({"pid": V("u", 3), "connection": V("b", False)}) == Wanted(pid=3)
    with pytest.raises(Refusal, match="binding: unknown key 'label'; known: pid, unit, connection, ttl"):
        decode.binding({"label": V("s", "x")})


def test_targets() -> None:
    assert decode.targets([[5, 6], [5, 6], [7, 8]]) == (ProcessRef(5, 6), ProcessRef(7, 8))
    for bad in ([], [[0, 1]], [[2**31, 1]], [[5, 6]] * 65):
        with pytest.raises(Refusal, match="pid_and_start"):
            decode.targets(bad)


def test_paths() -> None:
    path = names.device_path("0000:3b:00.0")
    assert decode.device_path(path) == "0000:3b:00.0"
    lease = "ab" * 16
    assert decode.lease_path(names.lease_path(lease)) == lease
    for bad in ("/", names.ROOT, names.LEASES + "/l12", names.DEVICES + "/_zz", names.DEVICES + "/a/b"):
        with pytest.raises(Refusal):
            decode.lease_path(bad)
        with pytest.raises(Refusal):
            decode.device_path(bad)


def test_fingerprint_ignores_the_order_of_keys_only() -> None:
    def of(*arguments: Any) -> str:
        return decode.fingerprint(*arguments)

    first = of("a/b", 1, {"x": V("s", "1"), "y": V("a{sv}", {"p": V("u", 1), "q": V("u", 2)})})
    again = of("a/b", 1, {"y": V("a{sv}", {"q": V("u", 2), "p": V("u", 1)}), "x": V("s", "1")})
    assert first == again
    assert len(first) == 64
    assert of("a/b", 2, {}) != of("a/b", 1, {})
    assert of("a/b", 1, {"x": V("s", "1")}) != of("a/b", 1, {"x": V("s", "2")})
    assert of("a/b", 1, {"x": V("s", "1")}) != of("a/b", 1, {"x": V("u", 1)})
