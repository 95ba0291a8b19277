"""Finding out which kernel messages matter.  Runs in the log worker; pure.

Memory is what counts here: no module is imported that a worker doesn't need.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from typing import Any

_NAME = re.compile(r"\(\?P<\w+>")
#: What is an error in a pattern, or means something else, once others stand before it: flags for all of it,
#: references to its groups, a parenthesis that only looks like the beginning of a group.
_APART = re.compile(r"\(\?[aiLmsux]+\)|\(\?P=|\(\?\(|\\[1-9]|\\\(\?P<")
#: Characters of a message that are looked at, and passed on.
LINE_MAX = 1024

#: Seconds within which the same message about the same device is told once, and in which so many
#: different ones are told of it before the choice begins.
SAME_WITHIN = 1.0
MOST = 10
_DEVICES_MAX = 4096
_KINDS_MAX = 64


class Rules:
    """Compiled rules: each is ``[pattern, codes, good]``, GOOD for news that a device is well again."""

    def __init__(self, rules: list[list[Any]]) -> None:
        self._rules = [(re.compile(pattern), frozenset(codes)) for pattern, codes, _ in rules]
        self.good = [bool(good) for _, _, good in rules]
        # most messages fit none of them: one search instead of one for each, where that can be had
        patterns = [pattern for pattern, _, _ in rules]
        either = "|".join(f"(?:{_NAME.sub('(?:', pattern)})" for pattern in patterns) or r"(?!)"
        self._any = re.compile("" if any(map(_APART.search, patterns)) else either)

    def match(self, line: str) -> tuple[int, str, str, str] | None:
        """Return the number of the first rule that fits, with address, name and code, "" for none."""
        line = line[:LINE_MAX]
        if not self._any.match(line):
            return None
        for number, (pattern, codes) in enumerate(self._rules):
            found = pattern.match(line)
            if found is None:
                continue
            groups = found.groupdict()
            code = groups.get("code") or ""
            if codes and not (code.isdecimal() and int(code) in codes):
                continue
            return number, groups.get("address") or "", groups.get("name") or "", code
        return None


class _Device:
    """What was told of one device: LAST, whether that was GOOD news, when, how many like it were not
    told since; and since BEGAN how many were told, and of which kinds."""

    __slots__ = ("at", "began", "count", "good", "kinds", "last", "left_out")

    def __init__(self) -> None:
        self.last: tuple[int, str] | None = None
        self.good = False
        self.at = 0.0
        self.left_out = 0
        self.began = 0.0
        self.count = 0
        self.kinds: set[tuple[int, str]] = set()


class Throttle:
    """Bounds what is told of one device, without ever making it look better than it is.

    The same message passes once a second while no other one is told.  Of a flood of different ones
    each kind of bad news passes, and bad news after good; good news doesn't.
    """

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}

    def passes(self, device: str, what: tuple[int, str], good: bool, now: float) -> tuple[bool, int]:
        """Tell whether a message of kind WHAT passes at NOW, and how many like it did not before.
        GOOD: it says that the device is well again."""
        known = self._devices.get(device)
        if known is None:
            if len(self._devices) >= _DEVICES_MAX:
                del self._devices[next(iter(self._devices))]
            known = self._devices[device] = _Device()
        if now >= known.began + SAME_WITHIN:
            known.began, known.count = now, 0
            known.kinds.clear()
        if not self._is_news(known, what, good, now):
            known.left_out += 1
            return False, 0
        repeated = known.left_out if known.last == what else 0
        known.last, known.good, known.at, known.left_out = what, good, now, 0
        known.count += 1
        known.kinds.add(what)
        return True, repeated

    @staticmethod
    def _is_news(known: _Device, what: tuple[int, str], good: bool, now: float) -> bool:
        if known.last == what and now < known.at + SAME_WITHIN:
            return False
        if known.count < MOST:
            return True
        return not good and (known.good or (what not in known.kinds and len(known.kinds) < _KINDS_MAX))
