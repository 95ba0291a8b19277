"""What the simulator can be told, by its control socket or a scenario: JSON or TOML to types.

Pure.  docs/simulator.md describes every verb and key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hetero_agent import names
from hetero_agent.text import is_printable, printable

#: Most devices that one `add` makes.
MOST_AT_ONCE: Final = 4096

_SERIAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,55}")


class SimError(ValueError):
    """The simulator can't do what it was told; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Add:
    """COUNT devices; more than one are ID-0, ID-1 and so on.  MEMORY is in bytes, 0 for none."""

    id: str
    resource: str
    count: int = 1
    model: str = "Virtual accelerator"
    memory: int = 0
    parent: str = ""
    numa: int = -1
    serial: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the devices it makes."""
        if self.count == 1:
            return (self.id,)
        return tuple(f"{self.id}-{index}" for index in range(self.count))


@dataclass(frozen=True, slots=True)
class Remove:
    """Take a device away."""

    id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Make a device unhealthy."""

    id: str
    reason: str = "simulated-fault"


@dataclass(frozen=True, slots=True)
class Recover:
    """Make a device healthy and end its hang; without ID end the hang of the whole provider."""

    id: str = ""


@dataclass(frozen=True, slots=True)
class Hang:
    """Report nothing of a device (without ID: nothing at all) for SECONDS; 0: until `Recover`."""

    id: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ListDevices:
    """Tell what there is."""


Command = Add | Remove | Fail | Recover | Hang | ListDevices


def parse(request: object) -> Command:
    """Return the command in a request: a table with ``verb`` and that verb's keys.  Raises SimError."""
    if not isinstance(request, Mapping):
        raise SimError("expected an object with a verb")
    verb = request.get("verb")
    if not isinstance(verb, str) or verb not in _VERBS:
        raise SimError(f"unknown verb {printable(verb, 48)}; the verbs are {', '.join(_VERBS)}")
    kind, keys, required = _VERBS[verb]
    values: dict[str, Any] = {}
    for key, value in request.items():
        if key == "verb" or value is None:
            continue
        check = keys.get(key) if isinstance(key, str) else None
        if check is None:
            known = ", ".join(keys) or "none"
            raise SimError(f"{verb}: unknown key {printable(key, 48)}; the keys are: {known}")
        values[key] = check(value, f"{verb}: {key}")
    for key in required:
        if key not in values:
            raise SimError(f"{verb}: {key} is missing")
    return kind(**values)


def parse_add(table: Mapping[str, object]) -> Add:
    """Return the `Add` in a table without verb.  Raises SimError."""
    command = parse({**table, "verb": "add"})
    assert isinstance(command, Add)
    return command


def _matching(pattern: re.Pattern[str]) -> Callable[[object, str], str]:
    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise SimError(f"{where}: {printable(value, 80)} does not match {pattern.pattern}")
        return value

    return check


def _text(limit: int) -> Callable[[object, str], str]:
    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or not is_printable(value, 1, limit):
            raise SimError(f"{where}: expected 1 to {limit} printable characters, got {printable(value, 80)}")
        return value

    return check


def _number(low: int, high: int) -> Callable[[object, str], int]:
    def check(value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise SimError(f"{where}: expected a whole number from {low} to {high}, got {printable(value, 80)}")
        return value

    return check


def _seconds(value: object, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 86_400:
        raise SimError(f"{where}: expected seconds from 0 to 86400, got {printable(value, 80)}")
    return float(value)


def _time(value: object, where: str) -> float:
    if not _seconds(value, where):
        raise SimError(f"{where}: expected more than 0 seconds; without it, until recover")
    return _seconds(value, where)


_id = _matching(names.DEVICE_ID)

#: Verb -> its type, its keys with their checks, and the keys that must be there.
_VERBS: Final[
    dict[str, tuple[Callable[..., Command], dict[str, Callable[[object, str], Any]], tuple[str, ...]]]
] = {
    "add": (
        Add,
        {
            "id": _id,
            "resource": _matching(names.RESOURCE),
            "count": _number(1, MOST_AT_ONCE),
            "model": _text(128),
            "memory": _number(0, 2**63 - 1),
            "parent": _id,
            "numa": _number(0, 65_535),
            "serial": _matching(_SERIAL),
        },
        ("id", "resource"),
    ),
    "remove": (Remove, {"id": _id}, ("id",)),
    "fail": (Fail, {"id": _id, "reason": _text(128)}, ("id",)),
    "recover": (Recover, {"id": _id}, ()),
    "hang": (Hang, {"id": _id, "seconds": _time}, ()),
    "list": (ListDevices, {}, ()),
}
