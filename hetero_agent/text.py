"""The one function through which foreign text passes before a log or a terminal sees it.

Foreign is everything the agent did not write itself: sysfs attributes, uevents, bus arguments,
configuration, names of processes.  It may hold escape sequences, newlines, bidirectional
overrides or megabytes of nothing.
"""

from __future__ import annotations

import unicodedata

#: Characters kept of one foreign text unless the caller asks for another number.
CLIP = 256

_ELLIPSIS = "..."


def printable(value: object, limit: int = CLIP) -> str:
    """Return VALUE as one line of printable characters, at most LIMIT of them.

    Control, format (bidi), surrogate, private and unassigned characters become ``\\xNN`` or
    ``\\uNNNN``; bytes are read as UTF-8 with the undecodable ones shown as ``\\xNN``.  What is
    cut off is marked by three dots inside the limit.  Never raises for any string or bytes.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        text = bytes(value[: limit * 4 + 4]).decode("utf-8", "backslashreplace")
    else:
        text = value if isinstance(value, str) else str(value)
    clipped = len(text) > limit
    text = text[: limit + 1]
    if not (text.isascii() and text.isprintable()):
        text = "".join(_shown(char) for char in text)
    if clipped or len(text) > limit:
        keep = max(0, limit - len(_ELLIPSIS))
        text = text[:keep] + _ELLIPSIS[: limit - keep]
    return text


def _shown(char: str) -> str:
    if char == " " or (char.isprintable() and unicodedata.category(char)[0] not in "CZ"):
        return char
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def is_printable(text: str, low: int, high: int) -> bool:
    """Tell whether TEXT has LOW to HIGH characters and all of them show as themselves."""
    return low <= len(text) <= high and printable(text, high) == text
