"""The file in which the agent tells its helper what a lease gives, RUNTIME/grants/ID.

The agent writes it before it asks; the helper takes no more than a lease id from the request.  Who
reads it as root believes nothing of it (verify.py).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

from hetero_agent import names
from hetero_agent.access.grant import Grant
from hetero_agent.access.manifest import AccessError

DIRECTORY: Final = "grants"
VERSION: Final = 1
#: Bytes of one file: 64 devices with all their nodes take a tenth of it.
LARGEST: Final = 256 * 1024

_NEW: Final = ".new"
# The group is the agent's own, and its helper is in it: no capability is needed to read.
_DIRECTORY_MODE: Final = 0o750
_FILE_MODE: Final = 0o640
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class GrantFiles:
    """The agent's side: writes and removes the files in DIRECTORY."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, grant: Grant) -> None:
        """Have the file of a lease say GRANT, whole or not at all.  Raises OSError."""
        text = json.dumps(
            {"version": VERSION, "lease": grant.lease, "uid": grant.uid, "manifest": dict(grant.manifest)}
        )
        path = os.path.join(self._directory, grant.lease)  # noqa: PTH118 (each grant waits for this)
        try:
            file = os.open(path + _NEW, _WRITE, _FILE_MODE)
        except FileNotFoundError:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.chmod(_DIRECTORY_MODE)
            file = os.open(path + _NEW, _WRITE, _FILE_MODE)
        with open(file, "wb") as content:  # noqa: PTH123
            os.fchmod(file, _FILE_MODE)  # whatever our umask
            content.write(text.encode())
        os.replace(path + _NEW, path)  # noqa: PTH105

    def remove(self, lease: str) -> None:
        """Remove the file of LEASE, if it is there.  Raises OSError."""
        (self._directory / lease).unlink(missing_ok=True)

    def exists(self, lease: str) -> bool:
        """Whether the helper was told of LEASE."""
        return (self._directory / lease).exists()

    def keep(self, live: Collection[str]) -> None:
        """Remove the files of all leases but the LIVE ones.  Raises OSError."""
        try:
            found = [entry.name for entry in os.scandir(self._directory)]
        except FileNotFoundError:
            return
        for name in found:
            if name not in live:
                (self._directory / name).unlink(missing_ok=True)


def read(directory: Path, lease: str, owners: Collection[int]) -> Grant:
    """The helper's side: what the file of LEASE in DIRECTORY says.  Both must belong to one of the
    uids OWNERS.  Raises AccessError for all that is not such a file, saying what is wrong."""
    if not names.LEASE_ID.fullmatch(lease):
        raise AccessError("not a lease id")
    try:
        there = _directory(directory, owners)
        try:
            file = os.open(
                lease, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=there
            )
        finally:
            os.close(there)
        try:
            _check(os.fstat(file), owners, stat.S_IFREG, "the grant file")
            content = b""
            while len(content) <= LARGEST and (more := os.read(file, LARGEST + 1 - len(content))):
                content += more
        finally:
            os.close(file)
    except OSError as error:
        raise AccessError(f"the grant file of lease {lease} can't be read: {error.strerror}") from error
    if len(content) > LARGEST:
        raise AccessError(f"the grant file is larger than {LARGEST} bytes")
    return _parse(content, lease)


def listed(directory: Path, owners: Collection[int]) -> set[str]:
    """The helper's side: the leases that have a file in DIRECTORY.  Raises AccessError if that is not
    a directory of one of the OWNERS; a missing one has none."""
    try:
        there = _directory(directory, owners)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise AccessError(f"the grant files can't be listed: {error.strerror}") from error
    try:
        entries = os.listdir(there)  # noqa: PTH208 (a descriptor)
        return {name for name in entries if names.LEASE_ID.fullmatch(name)}
    finally:
        os.close(there)


def _directory(directory: Path, owners: Collection[int]) -> int:
    """Open DIRECTORY.  Raises OSError, or AccessError if it is not one of the OWNERS'."""
    there = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(os.fstat(there), owners, stat.S_IFDIR, "the directory of grant files")
    except AccessError:
        os.close(there)
        raise
    return there


def _check(found: os.stat_result, owners: Collection[int], form: int, what: str) -> None:
    if stat.S_IFMT(found.st_mode) != form:
        raise AccessError(f"{what} is something else: {stat.filemode(found.st_mode)}")
    if found.st_uid not in owners or found.st_mode & 0o022:
        raise AccessError(
            f"{what} belongs to uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: others may write it"
        )


def _parse(content: bytes, lease: str) -> Grant:
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise AccessError("the grant file is not JSON in UTF-8") from error
    if not isinstance(data, dict) or data.keys() != {"version", "lease", "uid", "manifest"}:
        raise AccessError("the grant file has other keys than version, lease, uid, manifest")
    uid = data["uid"]
    if data["version"] != VERSION or type(data["version"]) is not int:
        raise AccessError(f"the grant file is not of version {VERSION}")
    if data["lease"] != lease:
        raise AccessError("the grant file is another lease's")
    if type(uid) is not int or not 0 <= uid < 2**32 - 1:
        raise AccessError("the grant file's uid is none")
    if not isinstance(data["manifest"], dict):
        raise AccessError("the grant file's manifest is no object")
    return Grant(lease, uid, data["manifest"])
