"""Python values to D-Bus variants and back; the types of every a{sv} of the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dbus_next.signature import Variant

from hetero_agent.client.errors import InvalidArgument
from hetero_agent.text import printable

#: The options of Allocate and Explain (design section 7), a closed set with fixed types.
OPTIONS: Final[Mapping[str, str]] = {
    "policy": "s",
    "require": "a{sv}",
    "devices": "as",
    "client": "s",
    "label": "s",
    "owner-uid": "u",
    "pid": "u",
    "unit": "s",
    "connection": "b",
    "ttl": "t",
    "confirm": "b",
    "confirm-within": "u",
    "wait": "u",
    "on-fault": "s",
    "on-end": "s",
    "netdev": "s",
}

#: The keys of a binding.
BINDING: Final[Mapping[str, str]] = {key: OPTIONS[key] for key in ("pid", "unit", "connection", "ttl")}

#: The keys of a device in ReportDevices (docs/providers.md).
REPORTED: Final[Mapping[str, str]] = {
    "id": "s",
    "resource": "s",
    "nodes": "a(ss)",
    "vendor": "s",
    "model": "s",
    "driver": "s",
    "serial": "s",
    "parent": "s",
    "aliases": "as",
    "numa-nodes": "au",
    "attributes": "a{sv}",
    "health": "s",
    "reason": "s",
    "env": "a{ss}",
}


def packed(values: Mapping[str, Any], types: Mapping[str, str], what: str) -> dict[str, Any]:
    """Return VALUES as an a{sv} with the TYPES that the contract fixes.

    Raises InvalidArgument for a key that is not among them and a value that doesn't fit.
    """
    out = {}
    for key, value in values.items():
        kind = types.get(key)
        if kind is None:
            raise InvalidArgument(f"{what} has no {printable(key)!r}; it has {', '.join(types)}")
        if kind == "a{sv}":
            out[key] = Variant(kind, guessed(value, f"{what} {key}"))
            continue
        try:
            out[key] = Variant(kind, _lists(value))
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidArgument(
                f"{what} {key}: {printable(value)!r} is not of type {kind}: {error}"
            ) from error
    return out


def guessed(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return VALUES (text, integers, truth values) as an a{sv} of s, t (x below zero) and b."""
    out = {}
    for key, value in values.items():
        if isinstance(value, bool):
            out[key] = Variant("b", value)
        elif isinstance(value, int) and -(2**63) <= value < 2**64:
            out[key] = Variant("t" if value >= 0 else "x", value)
        elif isinstance(value, str):
            out[key] = Variant("s", value)
        else:
            raise InvalidArgument(f"{what}: {printable(key)} must be text, an integer or a truth value")
    return out


def _lists(value: Any) -> Any:
    """The library wants lists for arrays and structs."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_lists(item) for item in value]
    return value


def plain(value: Any) -> Any:
    """Return VALUE with every variant replaced by what it holds."""
    if isinstance(value, Variant):
        return plain(value.value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def check_text(value: Any) -> None:
    """Refuse what would make the bus end the connection: NUL and lone surrogates in a string."""
    if isinstance(value, str):
        if "\0" in value:
            raise InvalidArgument("a text must not contain NUL")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"'{printable(value)}' is not valid UTF-8") from None
    elif isinstance(value, Variant):
        check_text(value.value)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key)
            check_text(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_text(item)
