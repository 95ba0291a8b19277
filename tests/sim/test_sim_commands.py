"""What the simulator can be told, and what it refuses: requests and scenario files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_agent.sim.commands import Add, Fail, Hang, ListDevices, Recover, Remove, SimError, parse
from hetero_agent.sim.scenario import Scenario, Step, load, parse_scenario


def test_requests() -> None:
    assert parse({"verb": "add", "id": "n", "resource": "a/b"}) == Add("n", "a/b")
    assert parse(
        {
            "verb": "add",
            "id": "n",
            "resource": "a/b",
            "count": 3,
            "model": "M",
            "memory": 1 << 34,
            "parent": "p",
            "numa": 1,
            "serial": "S1",
        }
    ) == Add("n", "a/b", 3, "M", 1 << 34, "p", 1, "S1")
    assert parse({"verb": "remove", "id": "n"}) == Remove("n")
    assert parse({"verb": "fail", "id": "n", "reason": "hot"}) == Fail("n", "hot")
    assert parse({"verb": "fail", "id": "n"}) == Fail("n", "simulated-fault")
    assert parse({"verb": "recover", "id": "n"}) == Recover("n")
    assert parse({"verb": "recover", "id": None}) == Recover()
    assert parse({"verb": "hang", "id": "n", "seconds": 2}) == Hang("n", 2.0)
    assert parse({"verb": "hang"}) == Hang()
    assert parse({"verb": "list"}) == ListDevices()


def test_ids_of_many() -> None:
    assert Add("n", "a/b").ids == ("n",)
    assert Add("n", "a/b", 2).ids == ("n-0", "n-1")


ADD = {"verb": "add", "id": "n", "resource": "a/b"}

REFUSED: list[tuple[Any, str]] = [
    ([], "expected an object with a verb"),
    ("add", "expected an object with a verb"),
    ({}, "unknown verb None; the verbs are add, remove, fail, recover, hang, list"),
    ({"verb": "explode"}, "unknown verb explode"),
    ({"verb": ["add"]}, "unknown verb"),
    ({"verb": "add", "resource": "a/b"}, "add: id is missing"),
    ({"verb": "add", "id": "n"}, "add: resource is missing"),
    ({**ADD, "id": "N"}, "add: id: N does not match"),
    ({**ADD, "id": "../n"}, "add: id: ../n does not match"),
    ({**ADD, "resource": "npu"}, "add: resource: npu does not match"),
    ({**ADD, "count": 0}, "add: count: expected a whole number from 1 to 4096, got 0"),
    ({**ADD, "count": 4097}, "from 1 to 4096, got 4097"),
    ({**ADD, "count": True}, "from 1 to 4096, got True"),
    ({**ADD, "count": "2"}, "from 1 to 4096, got 2"),
    ({**ADD, "memory": -1}, "add: memory: expected a whole number"),
    ({**ADD, "numa": -1}, "add: numa: expected a whole number from 0 to 65535"),
    ({**ADD, "model": ""}, "add: model: expected 1 to 128 printable characters"),
    ({**ADD, "model": "\x1b[2J"}, r"got \x1b[2J"),
    ({**ADD, "serial": "a b"}, "add: serial: a b does not match"),
    ({**ADD, "colour": "red"}, "add: unknown key colour; the keys are: id, resource, count"),
    ({"verb": "remove"}, "remove: id is missing"),
    ({"verb": "fail", "id": "n", "reason": 5}, "fail: reason: expected 1 to 128 printable characters, got 5"),
    ({"verb": "hang", "seconds": -1}, "hang: seconds: expected seconds from 0 to 86400"),
    ({"verb": "hang", "seconds": "1"}, "hang: seconds"),
    ({"verb": "hang", "seconds": 0}, "hang: seconds: expected more than 0 seconds"),
    ({"verb": "list", "id": "n"}, "list: unknown key id; the keys are: none"),
]


@pytest.mark.parametrize(("request_", "text"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_refused_requests(request_: Any, text: str) -> None:
    with pytest.raises(SimError) as refused:
        parse(request_)
    assert text in str(refused.value)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    _json
    | st.builds(
        lambda verb, rest: {**rest, "verb": verb},
        st.sampled_from(["add", "hang"]),
        st.dictionaries(st.sampled_from(["id", "resource", "count", "seconds", "x"]), _json),
    )
)
def test_any_request_is_a_command_or_a_clear_error(request_: Any) -> None:
    try:
        parse(request_)
    except SimError as error:
        text = str(error)
    else:
        text = "fine"
    assert text.isprintable()


def test_a_whole_scenario(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        """
        mode = "0666"
        group = "games"

        [[device]]
        id = "npu"
        resource = "example.com/npu"
        count = 4
        memory = 17_179_869_184

        [[step]]
        after = 1.5
        verb = "fail"
        id = "npu-1"
        reason = "hot"

        [[step]]
        after = 1
        verb = "recover"
        id = "npu-1"
        """
    )
    assert load(path) == Scenario(
        0o666,
        "games",
        (Add("npu", "example.com/npu", 4, memory=1 << 34),),
        (Step(1.5, Fail("npu-1", "hot")), Step(1.0, Recover("npu-1"))),
    )
    assert parse_scenario("") == Scenario()


SCENARIOS_REFUSED = [
    ("mode = [", "s: not TOML: "),
    ("mode = 660", 's: mode: expected octal digits as text, like "0660", got 660'),
    ('mode = "999"', "s: mode: expected octal digits"),
    ('mode = "7777"', "s: mode: expected octal digits"),
    ("group = 5", "s: group: expected the name of a group, got 5"),
    ("colour = 1", "s: unknown key colour; the keys are mode, group, [[device]] and [[step]]"),
    ("[device]\nid = 'a'", "s: device: expected [[device]] tables"),
    ("step = 1", "s: step: expected [[step]] tables"),
    ("[[device]]\nid = 'a'", "s: [[device]] number 1: add: resource is missing"),
    (
        "[[device]]\nid='a'\nresource='a/b'\n[[device]]\nid='B'\nresource='a/b'",
        "s: [[device]] number 2: add: id: B",
    ),
    (
        "[[step]]\nverb = 'remove'\nid = 'a'",
        "s: [[step]] number 1: after: expected seconds from 0 to 86400, got None",
    ),
    ("[[step]]\nafter = -1\nverb = 'hang'", "s: [[step]] number 1: after: expected seconds"),
    ("[[step]]\nafter = 1\nverb = 'jump'", "s: [[step]] number 1: unknown verb jump"),
    ("[[step]]\nafter = 1\nverb = 'list'", "s: [[step]] number 1: list has no place in a scenario"),
]


@pytest.mark.parametrize(
    ("text", "error"), SCENARIOS_REFUSED, ids=[str(n) for n in range(len(SCENARIOS_REFUSED))]
)
def test_refused_scenarios(text: str, error: str) -> None:
    with pytest.raises(SimError) as refused:
        parse_scenario(text, "s")
    assert error in str(refused.value)


def test_unreadable_scenarios(tmp_path: Path) -> None:
    with pytest.raises(SimError, match="cannot be read"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SimError, match="cannot be read"):
        load(tmp_path / "bad.toml")
