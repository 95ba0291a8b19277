"""Records survive the way through JSON, and nothing else is read as one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_agent.core import model
from hetero_agent.core.model import AuditRecord, Cordon, Debt, DeviceRecord, Lease, RequestRecord
from hetero_agent.store.codec import decode, encode, reader
from tests.store import samples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """A strategy for a type hint: hypothesis's own but for `Mapping[str, Any]`, which holds what
    JSON can hold."""
    if get_origin(hint) is Mapping:
        value = get_args(hint)[1]
        return st.dictionaries(st.text(), JSON if value is Any else of(value), max_size=3)
    if get_origin(hint) is tuple and len(get_args(hint)) == 2 and get_args(hint)[1] is Ellipsis:
        return st.lists(of(get_args(hint)[0]), max_size=3).map(tuple)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{item.name: of(hints[item.name]) for item in fields(hint)})
    return st.from_type(hint)


STORED = [Lease, Debt, RequestRecord, DeviceRecord, AuditRecord, Cordon]


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[Any]) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(of(kind))
    def check(value: Any) -> None:
        text = encode(value)
        assert text.isascii()
        assert "\n" not in text
        assert decode(kind, text) == value
        assert encode(decode(kind, text)) == text

    check()


def test_values_keep_their_types() -> None:
    back = decode(Lease, encode(samples.lease(1)))
    assert type(back.state) is model.LeaseState
    assert type(back.created) is model.Instant
    assert type(back.devices) is tuple
    assert type(back.binding.pid) is model.ProcessRef
    assert back.binding.unit is None
    attributes = decode(DeviceRecord, encode(samples.record())).attributes
    assert attributes == {"memory": 85899345920, "integrated": False}
    assert type(attributes["integrated"]) is bool


def damaged(**changes: Any) -> str:
    data = json.loads(encode(samples.lease(1)))
    data.update(changes)
    return json.dumps({key: value for key, value in data.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("null", "expected an object for Lease"),
        ("[]", "expected an object for Lease"),
        (damaged(devices=...), "Lease lacks devices"),
        (damaged(extra=1), "unknown field"),
        (damaged(state="asleep"), "Lease.state: not a LeaseState"),
        (damaged(state=["active"]), "Lease.state: not a LeaseState"),
        (damaged(uid=True), "Lease.uid: expected an integer, got bool"),
        (damaged(uid=1.0), "Lease.uid: expected an integer, got float"),
        (damaged(granted=1), "Lease.granted: expected true or false, got int"),
        (damaged(label=None), "Lease.label: expected text, got NoneType"),
        (damaged(devices="ab"), "Lease.devices: expected an array, got str"),
        (damaged(devices=["a", 1]), "Lease.devices: expected text, got int"),
        (damaged(created=[1]), "Lease.created: expected 2 elements, got 1"),
        (damaged(created=[1, 2, 3]), "Lease.created: expected 2 elements, got 3"),
        (damaged(manifest=[]), "Lease.manifest: expected an object, got list"),
        (damaged(binding={"pid": {"pid": 1}}), "Lease.binding: Binding.pid: ProcessRef lacks start or"),
        ('{"id":NaN}', "NaN is not JSON"),
        ('{"a":' * 100_000, "nested too deeply"),
        (damaged(manifest={"x": json.loads("[" * 40 + "]" * 40)}), "nested too deeply"),
    ],
)
def test_reading_is_strict(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        decode(Lease, text)


def test_a_missing_field_with_a_default_is_read() -> None:
    assert decode(Lease, damaged(returned=..., on_end=...)).on_end is model.OnEnd.WAIT


def test_what_json_cannot_hold_is_not_written() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode({"x": float("nan")})
    with pytest.raises(TypeError, match="set has no JSON form"):
        encode({"x": {1}})


def test_a_type_that_records_do_not_use_is_an_error_of_the_programmer() -> None:
    @dataclass(frozen=True)
    class Odd:
        what: set[int]

    assert fields(Odd)[0].name == "what"
    with pytest.raises(TypeError, match="no JSON form"):
        reader(set[int])
