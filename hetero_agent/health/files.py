"""Small files that others may read at any moment: whole, or not there at all."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, text: str, mode: int) -> None:
    """Put TEXT at PATH in one step, with permissions MODE whatever the umask is.  Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
