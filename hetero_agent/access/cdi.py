"""The files by which container runtimes find leases: one specification each, in a directory of theirs."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Final

from hetero_agent import cdispec
from hetero_agent.access.grant import Grant
from hetero_agent.cdispec import Hook, confirming

__all__ = ["Hook", "confirming", "file_name", "listed", "remove", "spec", "write"]

# VENDOR-CLASS_ID.json, as the specification advises for what does not last
_PREFIX: Final = cdispec.KIND.replace("/", "-") + "_"
# what is being written: runtimes read nothing but .json and .yaml
_NEW: Final = ".new"
_FILE: Final = re.compile(rf"{re.escape(_PREFIX)}(?P<lease>[0-9a-f]{{32}})\.json(?:{re.escape(_NEW)})?")

_MODE: Final = 0o644


def spec(grant: Grant, hook: Hook) -> dict[str, Any]:
    """Return the specification of what GRANT gives."""
    return cdispec.spec(grant.lease, grant.manifest, hook, os.path.realpath)


def file_name(lease: str) -> str:
    """Return the name of LEASE's file."""
    return f"{_PREFIX}{lease}.json"


def write(directory: Path, grant: Grant, hook: Hook) -> Path:
    """Write GRANT's file, readable by all and never seen half, and return its path; one with the
    same content is left alone.  DIRECTORY is made if it is missing.  Raises OSError."""
    # on one line: the encoder of json is twice as slow with an indent, and each grant waits for it
    content = (json.dumps(spec(grant, hook)) + "\n").encode()
    path = directory / file_name(grant.lease)
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == content and path.stat().st_mode & 0o777 == _MODE:
            return path
    new = f"{path}{_NEW}"
    with os.fdopen(_new_file(directory, new), "wb") as file:
        os.fchmod(file.fileno(), _MODE)
        file.write(content)
    os.replace(new, path)  # noqa: PTH105 (a text)
    return path


def _new_file(directory: Path, path: str) -> int:
    """Open a new file at PATH, in DIRECTORY, for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, _MODE)
    except FileNotFoundError:
        directory.mkdir(parents=True)
        directory.chmod(0o755)  # whatever our umask
    except FileExistsError:
        # one that a crash left is of no use
        os.unlink(path)  # noqa: PTH108
    return os.open(path, flags, _MODE)


def remove(directory: Path, lease: str) -> None:
    """Remove LEASE's file if it is there, and what a crash left of writing it.  Raises OSError."""
    path = directory / file_name(lease)
    path.unlink(missing_ok=True)
    Path(f"{path}{_NEW}").unlink(missing_ok=True)


def listed(directory: Path) -> set[str]:
    """Return the leases of which there is something in DIRECTORY to `remove`.  Raises OSError."""
    try:
        return {found["lease"] for entry in directory.iterdir() if (found := _FILE.fullmatch(entry.name))}
    except FileNotFoundError:
        return set()
