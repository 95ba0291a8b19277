"""Arguments of calls to the core's types: closed sets of keys with fixed types, or
InvalidArgument that says what fits.  Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hetero_agent import names
from hetero_agent.bus.codec import V, plain
from hetero_agent.bus.errors import invalid
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import Attribute, Netdev, OnEnd, OnFault, Options, Policy, ProcessRef
from hetero_agent.text import is_printable, printable

#: Most keys in ``require``, and characters of its keys and texts.
MAX_REQUIRE = 16
MAX_KEY = 64
MAX_TEXT = 128
#: Most devices that a request may name, and processes that Reap may.
MAX_NAMED = 64
#: Greatest ttl: a hundred years of microseconds keeps every deadline inside 64 bits.
MAX_TTL = 100 * 365 * 86_400 * 1_000_000
MIN_TTL = 100_000
MAX_CONFIRM_WITHIN = 30

#: systemd.unit(5): characters of a unit name and the types that run processes.
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,240}\.(service|scope|slice|socket|mount|swap)")

#: The D-Bus types of an integer.
_INTEGERS = frozenset("ynqiuxt")

#: The options of Allocate and the signature of each value (design section 7).
OPTIONS: Mapping[str, str] = {
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
#: The keys of Confirm's binding.
BINDING: Mapping[str, str] = {key: OPTIONS[key] for key in ("pid", "unit", "connection", "ttl")}

Choice = TypeVar("Choice", Policy, OnFault, OnEnd, Netdev)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A binding as the caller names it, before the host was asked what that is."""

    pid: int = 0
    unit: str = ""
    connection: bool = False
    ttl: int = 0

    def __bool__(self) -> bool:
        return bool(self.pid or self.unit or self.connection or self.ttl)


@dataclass(frozen=True, slots=True)
class Request:
    """What Allocate and Explain ask for.  OPTIONS lacks the binding, which BINDING names; PLAIN
    is the request as JSON values, for GetRequest."""

    resource: str
    count: int
    options: Options
    binding: Wanted
    plain: Mapping[str, Any]


def request_id(value: str) -> str:
    """A request id: 1 to 128 printable characters."""
    if not is_printable(value, 1, 128):
        raise invalid("request_id: expected 1 to 128 printable characters, for instance a random UUID")
    return value


def fingerprint(*arguments: Any) -> str:
    """A digest of arguments in which the order of keys makes no difference."""
    text = json.dumps(plain(list(arguments)), sort_keys=True, separators=(",", ":"), default=_bytes)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _bytes(value: Any) -> str:
    return bytes(value).hex()


def allocation(identifier: str, resource: str, count: int, given: Mapping[str, V]) -> Request:
    """Decode Allocate's (and Explain's) resource, count and options."""
    if not names.RESOURCE.fullmatch(resource):
        raise invalid(f"resource: {printable(resource, 64)!r} is not vendor/class, like nvidia.com/gpu")
    if not 1 <= count <= 2**31 - 1:
        raise invalid(f"count: expected 1 to {2**31 - 1}")
    values = keyed("options", given, OPTIONS)
    if values.get("wait"):
        raise Refusal(
            ErrorKind.NOT_SUPPORTED, "wait: waiting is not supported; leave it out and ask again later"
        )
    devices = _names(values.get("devices", []))
    if devices and len(devices) != count:
        raise invalid(f"devices: {len(devices)} named for a count of {count}; name exactly as many")
    within = values.get("confirm-within", 0)
    if within > MAX_CONFIRM_WITHIN or ("confirm-within" in values and not within):
        raise invalid(f"confirm-within: expected 1 to {MAX_CONFIRM_WITHIN} seconds, or confirm=true")
    owner = values.get("owner-uid")
    if owner == 0xFFFFFFFF:
        raise invalid("owner-uid: 4294967295 is no uid")
    options = Options(
        policy=_choice(Policy, values, "policy", Policy.LEAST_ALLOCATED),
        require=_require(values.get("require", {})),
        devices=devices,
        client=_text(values, "client", 32),
        label=_text(values, "label", 64),
        owner_uid=owner,
        confirm=values.get("confirm", False),
        confirm_within=within * 1_000_000,
        on_fault=_choice(OnFault, values, "on-fault", OnFault.MARK),
        on_end=_choice(OnEnd, values, "on-end", OnEnd.WAIT),
        netdev=_choice(Netdev, values, "netdev", Netdev.KEEP),
    )
    asked: dict[str, Any] = {"request-id": identifier, "resource": resource, "count": count}
    asked.update({key: plain(value) for key, value in values.items() if key != "wait"})
    return Request(resource, count, options, _wanted(values), asked)


def binding(given: Mapping[str, V]) -> Wanted:
    """Decode Confirm's binding."""
    return _wanted(keyed("binding", given, BINDING))


def keyed(what: str, given: Mapping[str, V], allowed: Mapping[str, str]) -> dict[str, Any]:
    """Check an a{sv} against a closed set of keys with fixed types."""
    values = {}
    for key, value in given.items():
        signature = allowed.get(key)
        if signature is None:
            known = ", ".join(allowed) or "none"
            raise invalid(f"{what}: unknown key {printable(key, 48)!r}; known: {known}")
        if value.signature != signature:
            raise invalid(f"{key}: expected type {signature}, got {printable(value.signature, 48)}")
        values[key] = value.value
    return values


def cordon_reason(value: str) -> str:
    """A reason that people will read: 1 to 128 printable characters."""
    if not is_printable(value, 1, 128):
        raise invalid("reason: expected 1 to 128 printable characters")
    return value


def targets(pairs: list[list[int]]) -> tuple[ProcessRef, ...]:
    """Reap's processes."""
    if not 1 <= len(pairs) <= MAX_NAMED:
        raise invalid(f"pid_and_start: expected 1 to {MAX_NAMED} processes; GetHolders names them")
    found = []
    for pid, start in pairs:
        if not 1 <= pid < 2**31:
            raise invalid(f"pid_and_start: {pid} is no process id")
        found.append(ProcessRef(pid, start))
    return tuple(dict.fromkeys(found))


def device_path(path: str) -> str:
    """The device id in an argument of type o."""
    try:
        return names.device_id_of(path)
    except ValueError:
        raise invalid(f"device: {printable(path, 96)} is not below {names.DEVICES}") from None


def lease_path(path: str) -> str:
    """The lease id in an argument of type o."""
    try:
        return names.lease_id_of(path)
    except ValueError:
        raise invalid(f"lease: {printable(path, 96)} is not a lease below {names.LEASES}") from None


def _wanted(values: Mapping[str, Any]) -> Wanted:
    pid = values.get("pid", 0)
    if "pid" in values and not 1 <= pid < 2**31:
        raise invalid("pid: expected the id of a running process")
    unit = values.get("unit", "")
    if "unit" in values and not _UNIT.fullmatch(unit):
        raise invalid(f"unit: {printable(unit, 64)!r} is not the full name of a unit, like job.service")
    ttl = values.get("ttl", 0)
    if "ttl" in values and not MIN_TTL <= ttl <= MAX_TTL:
        raise invalid(f"ttl: expected {MIN_TTL} to {MAX_TTL} microseconds")
    return Wanted(pid, unit, values.get("connection", False), ttl)


def _choice(kind: Callable[[str], Choice], values: Mapping[str, Any], key: str, default: Choice) -> Choice:
    if key not in values:
        return default
    try:
        return kind(values[key])
    except ValueError:
        known = ", ".join(type(default))
        raise invalid(f"{key}: {printable(values[key], 48)!r} is not one of {known}") from None


def _text(values: Mapping[str, Any], key: str, most: int) -> str:
    text: str = values.get(key, "")
    if not is_printable(text, 0, most):
        raise invalid(f"{key}: expected at most {most} printable characters")
    return text


def _names(given: list[str]) -> tuple[str, ...]:
    if len(given) > MAX_NAMED:
        raise invalid(f"devices: at most {MAX_NAMED} can be named")
    for one in given:
        if not is_printable(one, 1, MAX_TEXT):
            raise invalid(f"devices: {printable(one, 64)!r} is no device id or alias")
    if len(set(given)) != len(given):
        raise invalid("devices: one is named twice")
    return tuple(given)


def _require(given: Mapping[str, V]) -> dict[str, Attribute]:
    if len(given) > MAX_REQUIRE:
        raise invalid(f"require: at most {MAX_REQUIRE} attributes")
    found: dict[str, Attribute] = {}
    for key, value in given.items():
        if not is_printable(key, 1, MAX_KEY):
            raise invalid(f"require: {printable(key, 48)!r} is no attribute name")
        if value.signature == "s":
            if not is_printable(value.value, 0, MAX_TEXT):
                raise invalid(f"require: {key}: expected at most {MAX_TEXT} printable characters")
        elif value.signature in _INTEGERS:
            if value.value < 0:
                raise invalid(f"require: {key}: expected a number of at least 0")
        elif value.signature != "b":
            raise invalid(f"require: {key}: expected s, b or an integer, got {printable(value.signature, 32)}")
        found[key] = value.value
    return found
