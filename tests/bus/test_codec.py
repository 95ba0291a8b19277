"""Our codec against dbus-next's marshaller, and its bounds."""

from __future__ import annotations

import io
import struct
from typing import Any

import pytest
from dbus_next import Variant
from dbus_next._private.marshaller import Marshaller
from dbus_next._private.unmarshaller import Unmarshaller
from dbus_next.signature import SignatureTree
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_agent.bus import codec
from hetero_agent.bus.codec import CodecError, V, decode, encode

_TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)
_PATH = st.lists(st.from_regex(r"[A-Za-z0-9_]{1,5}", fullmatch=True), max_size=3).map(
    lambda parts: "/" + "/".join(parts)
)
_BASIC = {
    "y": st.integers(0, 2**8 - 1),
    "b": st.booleans(),
    "n": st.integers(-(2**15), 2**15 - 1),
    "q": st.integers(0, 2**16 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "u": st.integers(0, 2**32 - 1),
    "x": st.integers(-(2**63), 2**63 - 1),
    "t": st.integers(0, 2**64 - 1),
    "d": st.floats(allow_nan=False),
    "s": _TEXT,
    "o": _PATH,
    "g": st.sampled_from(["", "s", "a{sv}", "(ii)"]),
}


def _values(signature: str) -> st.SearchStrategy[Any]:
    """Values of one complete type, variants as `V`."""
    letter = signature[0]
    if letter in _BASIC:
        return _BASIC[letter]
    if letter == "v":
        inner = st.sampled_from(["s", "u", "t", "b", "as", "a{sv}", "(su)", "ay", "v"])
        return inner.flatmap(lambda kind: _values(kind).map(lambda value: V(kind, value)))
    if signature == "ay":
        return st.binary(max_size=9)
    if signature.startswith("a{"):
        return st.dictionaries(_values(signature[2]), _values(signature[3:-1]), max_size=3)
    if letter == "a":
        return st.lists(_values(signature[1:]), max_size=3)
    return st.tuples(*(_values(one) for one in codec.split(signature[1:-1]))).map(list)


_SIGNATURES = st.recursive(
    st.sampled_from([*_BASIC, "v", "ay", "a{sv}"]),
    lambda inner: st.one_of(
        inner.map(lambda one: "a" + one),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: "(" + "".join(some) + ")"),
        st.tuples(st.sampled_from("sut"), inner).map(lambda two: f"a{{{two[0]}{two[1]}}}"),
    ),
    max_leaves=4,
)


def _theirs(value: Any) -> Any:
    if isinstance(value, V):
        return Variant(value.signature, _theirs(value.value))
    if isinstance(value, dict):
        return {key: _theirs(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_theirs(item) for item in value]
    return value


@settings(max_examples=300, deadline=None)
@given(
    st.lists(_SIGNATURES, min_size=1, max_size=3).flatmap(
        lambda some: st.tuples(st.just("".join(some)), st.tuples(*(_values(one) for one in some)))
    )
)
def test_same_bytes_as_dbus_next_and_back(case: tuple[str, tuple[Any, ...]]) -> None:
    signature, values = case
    theirs = bytes(Marshaller(signature, [_theirs(one) for one in values]).marshall())
    assert encode(signature, values) == theirs
    assert decode(signature, theirs) == list(values)


def test_big_endian_is_read() -> None:
    body = struct.pack(">I", 7) + struct.pack(">I", 2) + b"hi\0" + b"\0" + struct.pack(">I", 1)
    assert decode("usb", body, little=False) == [7, "hi", True]
    reader = Unmarshaller(io.BytesIO(body))
    reader.endian = ord("B")
    assert [reader.read_argument(one) for one in SignatureTree("usb").types] == [7, "hi", True]


def test_pieces_join_to_what_encodes_at_once() -> None:
    rows = [[f"/x/{number}", "n" * number, number] for number in range(20)]
    pieces = [encode("(osu)", (row,)) for row in rows]
    assert codec.joined(pieces) == encode("a(osu)", (rows,))
    before = encode("a{sv}", ({"a": V("y", 1)},))
    assert codec.append_joined(before, pieces) == encode("a{sv}a(osu)", ({"a": V("y", 1)}, rows))
    assert codec.joined([]) == encode("a(osu)", ([],))


def test_a_nul_never_leaves_the_agent() -> None:
    assert decode("s", encode("s", ("a\0b",))) == ["a\ufffdb"]
    assert decode("s", encode("s", ("a\ud800",))) == ["a?"]


@pytest.mark.parametrize(
    ("signature", "values"),
    [
        ("u", (-1,)),
        ("u", (2**32,)),
        ("u", ("7",)),
        ("s", (7,)),
        ("o", ("no path",)),
        ("o", ("/a/",)),
        ("(su)", (("a",),)),
        ("us", (1,)),
        ("v", (V("ss", "a"),)),
        ("a{sv}", ({"a": 1},)),
    ],
)
def test_what_does_not_fit_is_an_error(signature: str, values: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r".*"):
        encode(signature, values)


@pytest.mark.parametrize(
    "signature", ["a", "(", "()", "{sv}", "a{vs}", "a{s}", "a{ssv}", "z", "a" * 256, "a" * 70 + "u", "(s"]
)
def test_bad_signatures(signature: str) -> None:
    with pytest.raises(CodecError):
        codec.split(signature)


def test_bounds_of_reading() -> None:
    many = encode("ay" + "au", (b"", list(range(3000))))
    with pytest.raises(CodecError, match="too many"):
        decode("ayau", many, most=1000)
    with pytest.raises(CodecError, match="too early"):
        decode("s", b"\xff\xff\xff\x7fab\0")
    with pytest.raises(CodecError, match="UTF-8"):
        decode("s", b"\x01\0\0\0\xff\0")
    with pytest.raises(CodecError, match="twice"):
        decode("a{sy}", struct.pack("<I", 15) + b"\0" * 4 + (b"\x01\0\0\0a\0\x01\0" * 2)[:15])
    nested: Any = V("u", 1)
    for _ in range(70):
        nested = V("v", nested)
    with pytest.raises(CodecError, match="deeply"):
        decode("v", encode("v", (nested,)))
    # arrays and structs count too, also those that a variant brings
    for around, inner in (("a" * 32, "v"), ("(" * 32, "v" + ")" * 32)):
        nested = V("u", 1)
        for level in range(3):
            value: Any = nested
            for _ in range(32):
                value = [value]
            nested = V(around + inner, value)
            if level == 0:
                assert decode("v", encode("v", (nested,))) == [nested]
        with pytest.raises(CodecError, match="deeply"):
            decode("v", encode("v", (nested,)))
    wide = V("(" + "ay" * 60 + "v)", [*[b""] * 60, V("y", 1)])
    assert decode("v", encode("v", (wide,))) == [wide]


def test_foreign_signatures_do_not_grow_the_caches() -> None:
    for number in range(3000):
        kind = "".join("ybnqiuxtds"[int(digit)] for digit in str(number))
        decode("v", encode("v", (V(f"a({kind})", []),)))
    for cache in (codec.split, codec._readers, codec._reader, codec._writers, codec._writer):
        assert cache.cache_info().currsize <= 512
