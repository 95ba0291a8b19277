"""What people read: aligned tables, times, colour on a terminal; and JSON for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

from hetero_agent.text import printable

#: SGR parameters (ECMA-48) by the word that is shown.
_COLOURS: Final[Mapping[str, str]] = {
    "idle": "32",
    "healthy": "32",
    "ok": "32",
    "now": "32",
    "active": "36",
    "in-use": "36",
    "allocating": "36",
    "pending": "36",
    "probing": "2",
    "offline": "2",
    "reclaiming": "33",
    "occupied": "33",
    "suspect": "33",
    "ending": "33",
    "later": "33",
    "note": "33",
    "faulty": "31",
    "lost": "31",
    "unhealthy": "31",
    "never": "31",
    "wrong": "31",
}

#: Characters of a lease id that tables show; every verb takes them as the whole.
SHORT_LEASE: Final = 8


def colour_wanted(stream: TextIO) -> bool:
    """Tell whether STREAM gets colour: a terminal, not a dumb one, and no NO_COLOR
    (https://no-color.org: set and not empty)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def width(text: str) -> int:
    """Return the columns that printable TEXT takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


class OutputError(Exception):
    """Standard output can't be written to; the text is the system's reason."""


class Printer:
    """Writes to STREAM for a person, or as one JSON document."""

    def __init__(self, stream: TextIO, as_json: bool) -> None:
        self.stream = stream
        self.as_json = as_json
        self._colour = not as_json and colour_wanted(stream)

    def line(self, text: str = "") -> None:
        """Write one line; TEXT is our own or printable already."""
        with _writing():
            self.stream.write(text + "\n")

    def flush(self) -> None:
        """Hand on what was written."""
        with _writing():
            self.stream.flush()

    def paint(self, text: str) -> str:
        """Return TEXT in the colour of the word that it is."""
        code = _COLOURS.get(text) if self._colour else None
        return f"\x1b[{code}m{text}\x1b[0m" if code else text

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write ROWS under HEADS in aligned columns; columns without content are left out."""
        cells = [[_shown(cell, 120) for cell in row] for row in rows]
        used = [
            index for index in range(len(heads)) if not cells or index == 0 or any(row[index] for row in cells)
        ]
        widths = [max(width(row[index]) for row in [list(heads), *cells]) for index in used]
        for number, row in enumerate([list(heads), *cells]):
            parts = []
            for index, size in zip(used, widths, strict=True):
                text = row[index] or "-"
                padding = " " * (size - width(text))
                parts.append((text if number == 0 else self.paint(text)) + padding)
            self.line("  ".join(parts).rstrip())

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Write ``name: value`` lines with the values aligned; empty values are left out."""
        kept = [(name, value) for name, value in pairs if value not in ("", None, (), [], {})]
        size = max((len(name) for name, _ in kept), default=0)
        for name, value in kept:
            shown = _shown(value, 400)
            self.line(f"{name + ':':<{size + 1}} {self.paint(shown)}")

    def document(self, value: Any) -> None:
        """Write VALUE as JSON: indented on a terminal, else one line."""
        self.line(json.dumps(jsonable(value), indent=2 if self.stream.isatty() else None, ensure_ascii=True))


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error


def _shown(value: object, limit: int) -> str:
    """Return VALUE for a person: nothing for None, yes or no for truth values."""
    if value is None:
        return ""
    return ("yes" if value else "no") if isinstance(value, bool) else printable(value, limit)


def jsonable(value: Any) -> Any:
    """Return VALUE with dataclasses as objects and tuples as arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: jsonable(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    return value


def short(lease: str) -> str:
    """Return the beginning of a lease id that tables show."""
    return lease[:SHORT_LEASE]


def user_name(uid: int) -> str:
    """Return the name of UID here, or the number."""
    import pwd  # noqa: PLC0415

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return the name of GID here, or the number."""
    import grp  # noqa: PLC0415

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def ago(microseconds: int) -> str:
    """Return how long ago a realtime moment was: ``12s``, ``5min``, ``3h``, ``9d``; "" for 0."""
    if not microseconds:
        return ""
    return span(max(0, time.time_ns() // 1000 - microseconds))


def until(microseconds: int) -> str:
    """Return how long it is until a moment of CLOCK_BOOTTIME; "" for 0."""
    if not microseconds:
        return ""
    return span(max(0, microseconds - time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000))


def span(microseconds: int) -> str:
    """Return a duration in its largest whole unit."""
    seconds = microseconds // 1_000_000
    if seconds < 1:
        return f"{microseconds // 1000}ms"
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 7200:
        return f"{seconds // 60}min"
    if seconds < 172_800:
        return f"{seconds // 3600}h"
    return f"{seconds // 86_400}d"


def moment(microseconds: int) -> str:
    """Return a realtime moment in local time, to the millisecond; "" for 0."""
    if not microseconds:
        return ""
    seconds, rest = divmod(microseconds, 1_000_000)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{rest // 1000:03d}"
