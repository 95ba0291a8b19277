"""The frozen records of `core.model` as JSON text and back.

Writing follows the values: a dataclass is an object of its fields, an enum its value, a tuple
(named ones too) an array.  Reading follows the type hints, which are compiled once per type, and
is strict: an unknown or missing field, another type, a value outside an enum or an array of
another length is a ValueError that names the place.  A field with a default may be missing, so
that a record written before the field existed can still be read.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]

#: Deeper nesting than this is no record of ours.
_DEPTH = 32


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_plain)


def encode(record: object) -> str:
    """Return RECORD (a dataclass) as one line of ASCII JSON.  Raises TypeError or ValueError for
    a value that JSON can't hold."""
    return _encoder.encode(record)


def decode(kind: type[T], text: str) -> T:
    """Return the KIND that TEXT holds.  Raises ValueError for anything else."""
    try:
        result: T = reader(kind)(_decoder.decode(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


#: Made once: json.loads() with an argument makes one for each text, a third of what that costs.
_decoder = json.JSONDecoder(parse_constant=_no_constant)


def reader(hint: Any) -> Reader:
    """Return the function that turns parsed JSON into a value of the type HINT, or raises
    ValueError.  Raises TypeError for a type that records don't use."""
    known = _readers.get(hint)
    if known is None:
        known = _readers[hint] = _compile(hint)
    return known


_readers: dict[Any, Reader] = {}


def _compile(hint: Any) -> Reader:
    if hint is Any or hint is object:
        return _json
    simple = _SIMPLE.get(hint)
    if simple is not None:
        return simple
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(get_args(hint))
    if origin is tuple:
        return _tuple(get_args(hint))
    if origin is not None and issubclass(origin, Mapping):
        key, value = get_args(hint)
        if key is str:
            return _mapping(reader(value))
    if isinstance(hint, type):
        if issubclass(hint, Enum):
            return _enum(hint)
        if is_dataclass(hint):
            return _dataclass(hint)
        if issubclass(hint, tuple) and hasattr(hint, "_fields"):
            return _named_tuple(hint)
    raise TypeError(f"no JSON form for {hint!r}")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected text, got {type(value).__name__}")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected an integer, got {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, got {type(value).__name__}")
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise ValueError(f"expected null, got {type(value).__name__}")


def _json(value: Any, depth: int = 0) -> Any:
    if depth > _DEPTH:
        raise ValueError("nested too deeply")
    if type(value) is list:
        for one in value:
            _json(one, depth + 1)
    elif type(value) is dict:
        for one in value.values():
            _json(one, depth + 1)
    return value


_SIMPLE: dict[Any, Reader] = {
    str: _text,
    int: _integer,
    float: _number,
    bool: _truth,
    type(None): _nothing,
}


def _union(members: tuple[Any, ...]) -> Reader:
    readers = [reader(member) for member in members]

    def read(value: Any) -> Any:
        reasons = []
        for one in readers:
            try:
                return one(value)
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError(" or ".join(dict.fromkeys(reasons)))

    return read


def _tuple(members: tuple[Any, ...]) -> Reader:
    if len(members) == 2 and members[1] is Ellipsis:
        every = reader(members[0])

        def read_many(value: Any) -> tuple[Any, ...]:
            return tuple([every(one) for one in _array(value)])

        return read_many
    each = [reader(member) for member in members]

    def read_fixed(value: Any) -> tuple[Any, ...]:
        items = _array(value, len(each))
        return tuple([one(item) for one, item in zip(each, items, strict=True)])

    return read_fixed


def _array(value: Any, length: int | None = None) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"expected an array, got {type(value).__name__}")
    if length is not None and len(value) != length:
        raise ValueError(f"expected {length} elements, got {len(value)}")
    return value


def _mapping(each: Reader) -> Reader:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError(f"expected an object, got {type(value).__name__}")
        return {key: each(one) for key, one in value.items()}

    return read


def _enum(kind: type[Enum]) -> Reader:
    members = {member.value: member for member in kind}

    def read(value: Any) -> Enum:
        member = members.get(value) if type(value) in (str, int) else None
        if member is None:
            raise ValueError(f"not a {kind.__name__}")
        return member

    return read


def _named_tuple(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind)
    names: tuple[str, ...] = kind._fields
    each = [reader(hints[name]) for name in names]

    def read(value: Any) -> Any:
        items = _array(value, len(each))
        return kind(*[one(item) for one, item in zip(each, items, strict=True)])

    return read


def _dataclass(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind)
    each = {item.name: reader(hints[item.name]) for item in fields(kind)}
    required = frozenset(
        item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING
    )

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise ValueError(f"expected an object for {kind.__name__}, got {type(value).__name__}")
        if not required <= value.keys():
            raise ValueError(f"{kind.__name__} lacks {', '.join(sorted(required - value.keys()))}")
        try:
            return kind(**{name: each[name](raw) for name, raw in value.items()})
        except (KeyError, ValueError):
            raise wrong(value) from None

    def wrong(value: dict[str, Any]) -> ValueError:
        """Say which field it is."""
        for name, raw in value.items():
            one = each.get(name)
            if one is None:
                return ValueError(f"{kind.__name__} has an unknown field")
            try:
                one(raw)
            except ValueError as error:
                return ValueError(f"{kind.__name__}.{name}: {error}")
        return ValueError(f"no {kind.__name__}")

    return read
