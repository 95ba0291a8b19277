"""A provider's report as it comes from the bus: decoded and bounded, no I/O.

docs/providers.md tells authors of providers the same rules.  Everything here raises nothing but
`Refusal`, whatever the provider sent, and the text names the entry and the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from hetero_agent import names
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import Attribute, Health, Role
from hetero_agent.text import is_printable, printable

#: Most devices in one page.  The bus refuses bodies over 64 KiB, so 64 devices of up to 1,000 bytes fit;
#: a provider with larger ones sends fewer a page.
PAGE_SIZE: Final = 64

MAX_NODES: Final = 16
MAX_ALIASES: Final = 8
MAX_NUMA_NODES: Final = 16
MAX_ATTRIBUTES: Final = 32
MAX_ENV: Final = 16
MAX_EVIDENCE: Final = 16
#: No property of a device object is over 1 KiB (design section 7); Attributes is one.
MAX_ATTRIBUTES_BYTES: Final = 1000

_TEXT = 128
_REASON = 256
_PATH = 255
_INTEGER = 2**63 - 1
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
_ATTRIBUTE = re.compile(r"[a-z][a-z0-9_.-]{0,47}")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeClaim:
    """A node as the provider names it; nothing is known of it yet."""

    path: str
    role: Role


@dataclass(frozen=True, slots=True)
class Entry:
    """One device of a report, well-formed but not yet compared with this host.

    HEALTH is None where the provider says nothing of it.
    """

    id: str
    resource: str
    nodes: tuple[NodeClaim, ...] = ()
    vendor: str = ""
    model: str = ""
    driver: str = ""
    serial: str = ""
    parent: str = ""
    aliases: tuple[str, ...] = ()
    numa_nodes: tuple[int, ...] = ()
    attributes: Mapping[str, Attribute] | None = None
    health: Health | None = None
    reason: str = ""
    env: Mapping[str, str] | None = None


def refuse(text: str) -> NoReturn:
    """Raise InvalidArgument with TEXT."""
    raise Refusal(ErrorKind.INVALID_ARGUMENT, text)


def decode_page(devices: object, page: int = 0) -> tuple[Entry, ...]:
    """Decode the entries of page PAGE of ReportDevices.  Raises Refusal."""
    if not isinstance(devices, (list, tuple)):
        refuse("devices: expected a list of dictionaries")
    if len(devices) > PAGE_SIZE:
        refuse(f"devices: {len(devices)} in one page; the most is {PAGE_SIZE}, send more pages")
    return tuple(decode_entry(one, f"page {page}, entry {index}") for index, one in enumerate(devices))


def decode_entry(device: object, where: str) -> Entry:
    """Decode the dictionary of one device; WHERE names it until its id is known.  Raises Refusal."""
    if not isinstance(device, Mapping):
        refuse(f"{where}: expected a dictionary")
    if "id" not in device:
        refuse(f"{where}: id is missing")
    given = device["id"]
    if not isinstance(given, str) or not names.DEVICE_ID.fullmatch(given):
        refuse(
            f"{where}: id {printable(given, 80)} does not match {names.DEVICE_ID.pattern}; it is the device's"
            " place, in lower case"
        )
    where = f"device {given}"
    values: dict[str, Any] = {}
    for key, value in device.items():
        field = _FIELDS.get(key) if isinstance(key, str) else None
        if field is None:
            refuse(f"{where}: unknown key {printable(key, 48)}; the keys are {', '.join(_FIELDS)}")
        name, decode = field
        values[name] = decode(value, f"{where}: {key}")
    if "resource" not in values:
        refuse(f"{where}: resource is missing")
    entry = Entry(**values)
    if entry.parent == entry.id:
        refuse(f"{where}: parent is the device itself")
    return entry


def decode_health(health: object, reason: object, evidence: object) -> tuple[Health, str, dict[str, str]]:
    """Decode the arguments of ReportHealth; the evidence becomes texts.  Raises Refusal."""
    where = "evidence"
    if not isinstance(evidence, Mapping):
        refuse(f"{where}: expected a dictionary")
    if len(evidence) > MAX_EVIDENCE:
        refuse(f"{where}: {len(evidence)} facts; the most is {MAX_EVIDENCE}")
    facts = {
        _matching(_ATTRIBUTE)(key, where): _as_text(_attribute(value, f"{where}: {printable(key, 48)}"))
        for key, value in evidence.items()
    }
    return _health(health, "health"), _text(_REASON)(reason, "reason"), facts


def check_family(entries: Sequence[Entry], known: Callable[[str], bool]) -> None:
    """Check what entries say of each other: ids once, aliases nobody's id or another's alias,
    parents in the report or KNOWN elsewhere, no device its own ancestor.  Raises Refusal."""
    parents: dict[str, str] = {}
    for entry in entries:
        if entry.id in parents:
            refuse(f"device {entry.id}: reported twice in one version")
        parents[entry.id] = entry.parent
    aliases: dict[str, str] = {}
    for entry in entries:
        for alias in entry.aliases:
            if alias in parents and alias != entry.id:
                refuse(f"device {entry.id}: alias {alias} is the id of another device")
            if aliases.setdefault(alias, entry.id) != entry.id:
                refuse(f"device {entry.id}: alias {alias} is also one of {aliases[alias]}")
        if entry.parent and entry.parent not in parents and not known(entry.parent):
            refuse(f"device {entry.id}: parent {entry.parent} is neither in the report nor known to the agent")
    rooted: set[str] = set()
    for start in parents:
        walked: dict[str, None] = {}
        current = start
        while current in parents and current not in rooted:
            if current in walked:
                refuse(f"device {current}: is its own ancestor")
            walked[current] = None
            current = parents[current]
        rooted.update(walked)


# -- one value ------------------------------------------------------------------------------------
def _text(limit: int) -> Callable[[object, str], str]:
    def decode(value: object, where: str) -> str:
        if not isinstance(value, str) or not is_printable(value, 0, limit):
            refuse(f"{where}: expected at most {limit} printable characters, got {printable(value, 80)}")
        return value

    return decode


_short = _text(_TEXT)


def _matching(pattern: re.Pattern[str], optional: bool = False) -> Callable[[object, str], str]:
    def decode(value: object, where: str) -> str:
        if not isinstance(value, str) or not (pattern.fullmatch(value) or (optional and value == "")):
            refuse(f"{where}: {printable(value, 80)} does not match {pattern.pattern}")
        return value

    return decode


def _listed(limit: int, decode: Callable[[object, str], T]) -> Callable[[object, str], tuple[T, ...]]:
    def decode_all(value: object, where: str) -> tuple[T, ...]:
        if not isinstance(value, (list, tuple)):
            refuse(f"{where}: expected a list")
        if len(value) > limit:
            refuse(f"{where}: {len(value)} given; the most is {limit}")
        items = tuple(decode(one, where) for one in value)
        if len(set(items)) != len(items):
            refuse(f"{where}: one is given twice")
        return items

    return decode_all


def _integer(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _INTEGER:
        refuse(f"{where}: expected a number from 0 to {_INTEGER}, got {printable(value, 80)}")
    return value


def _numa_node(value: object, where: str) -> int:
    number = _integer(value, where)
    if number > 65_535:
        refuse(f"{where}: {number} is no NUMA node")
    return number


def _node(value: object, where: str) -> NodeClaim:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        refuse(f"{where}: expected pairs of path and role")
    path, role = value
    if not isinstance(path, str) or not is_printable(path, 2, _PATH):
        refuse(f"{where}: expected a path of at most {_PATH} printable characters, got {printable(path, 80)}")
    parts = path.split("/")
    if parts[0] != "" or any(part in ("", ".", "..") for part in parts[1:]):
        refuse(f"{where}: {path} is not an absolute path without '.', '..' and empty parts")
    if not isinstance(role, str) or role not in _ROLES:
        refuse(f"{where}: role {printable(role, 48)} of {path} is none of {', '.join(_ROLES)}")
    return NodeClaim(path, _ROLES[role])


def _nodes(value: object, where: str) -> tuple[NodeClaim, ...]:
    claims = _listed(MAX_NODES, _node)(value, where)
    if len({claim.path for claim in claims}) != len(claims):
        refuse(f"{where}: one path is given with two roles")
    return claims


def _health(value: object, where: str) -> Health:
    if not isinstance(value, str) or value not in _HEALTHS:
        refuse(f"{where}: {printable(value, 48)} is none of {', '.join(_HEALTHS)}")
    return _HEALTHS[value]


def _attribute(value: object, where: str) -> Attribute:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _short(value, where)
    if not isinstance(value, int):
        refuse(f"{where}: expected text, a number or a truth value, got {printable(value, 80)}")
    return _integer(value, where)


def _as_text(value: Attribute) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _attributes(value: object, where: str) -> dict[str, Attribute]:
    if not isinstance(value, Mapping):
        refuse(f"{where}: expected a dictionary")
    if len(value) > MAX_ATTRIBUTES:
        refuse(f"{where}: {len(value)} given; the most is {MAX_ATTRIBUTES}")
    checked: dict[str, Attribute] = {}
    size = 0
    for key, one in value.items():
        name = _matching(_ATTRIBUTE)(key, where)
        attribute = _attribute(one, f"{where}: {name}")
        # a{sv} on the wire: padding to 8, a length and a NUL for each text, the signature
        size += 24 + len(name) + (len(attribute.encode()) if isinstance(attribute, str) else 8)
        checked[name] = attribute
    if size > MAX_ATTRIBUTES_BYTES:
        refuse(f"{where}: {size} bytes together; the most is {MAX_ATTRIBUTES_BYTES}")
    return checked


def _env(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        refuse(f"{where}: expected a dictionary")
    if len(value) > MAX_ENV:
        refuse(f"{where}: {len(value)} variables; the most is {MAX_ENV}")
    checked: dict[str, str] = {}
    for key, one in value.items():
        name = _matching(_VARIABLE)(key, where)
        if names.FORBIDDEN_VARIABLE.fullmatch(name):
            refuse(f"{where}: {name} is not a provider's to set")
        checked[name] = _short(one, f"{where}: {name}")
    return checked


_ROLES: Final = {role.value: role for role in Role}
_HEALTHS: Final = {health.value: health for health in Health}

#: Key of the report -> field of `Entry` and how its value is decoded.
_FIELDS: Final[dict[str, tuple[str, Callable[[object, str], Any]]]] = {
    "id": ("id", _matching(names.DEVICE_ID)),
    "resource": ("resource", _matching(names.RESOURCE)),
    "nodes": ("nodes", _nodes),
    "vendor": ("vendor", _short),
    "model": ("model", _short),
    "driver": ("driver", _short),
    "serial": ("serial", _matching(_ALIAS, optional=True)),
    "parent": ("parent", _matching(names.DEVICE_ID, optional=True)),
    "aliases": ("aliases", _listed(MAX_ALIASES, _matching(_ALIAS))),
    "numa-nodes": ("numa_nodes", _listed(MAX_NUMA_NODES, _numa_node)),
    "attributes": ("attributes", _attributes),
    "health": ("health", _health),
    "reason": ("reason", _text(_REASON)),
    "env": ("env", _env),
}
