"""Finding out which kernel messages matter.  Runs in the log worker; pure.

Memory is what counts here: no module is imported that a worker doesn't need.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from typing import Any

_NAME = re.compile(r"\(\?P<\w+>")
#: Characters of a message that are looked at, and passed on.
LINE_MAX = 1024

#: Seconds within which the same message about the same device is told once.
SAME_WITHIN = 1.0
_DEVICES_MAX = 4096


class Rules:
    """Compiled rules: each is ``[pattern, codes]``."""

    def __init__(self, rules: list[list[Any]]) -> None:
        self._rules = [(re.compile(pattern), frozenset(codes)) for pattern, codes in rules]
        # most messages fit none of them: one search instead of one for each
        either = "|".join(f"(?:{_NAME.sub('(?:', pattern)})" for pattern, _ in rules)
        self._any = re.compile(either or r"(?!)")

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


class Throttle:
    """Lets one message through per device and second while it stays the same one.

    Only repetitions go: another message about the device may say that it is well again, or not.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[int, str], float, int]] = {}

    def passes(self, device: str, what: tuple[int, str], now: float) -> tuple[bool, int]:
        """Tell whether a message passes at NOW, and how many like it did not since the last one."""
        known = self._last.get(device)
        if known is not None and known[0] == what and now < known[1] + SAME_WITHIN:
            self._last[device] = (what, known[1], known[2] + 1)
            return False, 0
        if known is None and len(self._last) >= _DEVICES_MAX:
            del self._last[next(iter(self._last))]
        self._last[device] = (what, now, 0)
        return True, known[2] if known is not None and known[0] == what else 0
