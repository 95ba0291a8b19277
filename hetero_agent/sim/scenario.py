"""A scenario file: the devices to begin with and what happens to them, in TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_agent.sim import devices
from hetero_agent.sim.commands import Add, Command, ListDevices, SimError, parse, parse_add
from hetero_agent.text import printable


@dataclass(frozen=True, slots=True)
class Step:
    """COMMAND, AFTER seconds behind the step before it (the first: behind the start)."""

    after: float
    command: Command


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a simulator begins with and does by itself.  MODE and GROUP are those of the files."""

    mode: int = devices.MODE
    group: str = devices.GROUP
    devices: tuple[Add, ...] = ()
    steps: tuple[Step, ...] = ()


def load(path: Path) -> Scenario:
    """Read a scenario file.  Raises SimError naming the file, the entry and the key."""
    try:
        return parse_scenario(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SimError(f"{printable(path)}: cannot be read: {printable(error)}") from error


def parse_scenario(text: str, where: str = "scenario") -> Scenario:
    """Parse TOML text.  Raises SimError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SimError(f"{where}: not TOML: {printable(error)}") from error
    mode = _mode(data.pop("mode", f"{devices.MODE:04o}"), where)
    group = data.pop("group", devices.GROUP)
    if not isinstance(group, str):
        raise SimError(f"{where}: group: expected the name of a group, got {printable(group, 80)}")
    adds: list[Add] = []
    for number, table in enumerate(_tables(data.pop("device", []), "device", where), 1):
        try:
            adds.append(parse_add(table))
        except SimError as error:
            raise SimError(f"{where}: [[device]] number {number}: {error}") from error
    steps = [
        _step(table, f"{where}: [[step]] number {number}")
        for number, table in enumerate(_tables(data.pop("step", []), "step", where), 1)
    ]
    if data:
        unknown = printable(next(iter(data)), 48)
        raise SimError(f"{where}: unknown key {unknown}; the keys are mode, group, [[device]] and [[step]]")
    return Scenario(mode, group, tuple(adds), tuple(steps))


def _step(table: dict[str, Any], where: str) -> Step:
    after = table.pop("after", None)
    if not isinstance(after, (int, float)) or isinstance(after, bool) or not 0 <= after <= 86_400:
        raise SimError(f"{where}: after: expected seconds from 0 to 86400, got {printable(after, 80)}")
    try:
        command = parse(table)
    except SimError as error:
        raise SimError(f"{where}: {error}") from error
    if isinstance(command, ListDevices):
        raise SimError(f"{where}: list has no place in a scenario")
    return Step(float(after), command)


def _tables(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise SimError(f"{where}: {name}: expected [[{name}]] tables")
    return value


def _mode(value: Any, where: str) -> int:
    text = value if isinstance(value, str) else ""
    if not 3 <= len(text) <= 4 or any(char not in "01234567" for char in text) or int(text, 8) > 0o777:
        raise SimError(f'{where}: mode: expected octal digits as text, like "0660", got {printable(value, 80)}')
    return int(text, 8)
