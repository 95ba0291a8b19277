"""Speaking to a simulator's control socket as any program would."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


def ask_raw(path: Path, line: bytes, timeout: float = 90) -> dict[str, Any]:
    """Send one line, return the decoded reply line."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(timeout)
        one.connect(str(path))
        one.sendall(line)
        with one.makefile("rb") as stream:
            return dict(json.loads(stream.readline()))


def ask(path: Path, verb: str, **arguments: Any) -> dict[str, Any]:
    """Send one request, return the reply."""
    return ask_raw(path, json.dumps({"verb": verb, **arguments}).encode() + b"\n")


def tell(path: Path, verb: str, **arguments: Any) -> dict[str, Any]:
    """Like `ask`, and the answer must be ``ok``."""
    reply = ask(path, verb, **arguments)
    assert reply["ok"], reply
    return reply
