"""Files in which units find the variables of a lease (EnvironmentFile= of systemd.exec(5))."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Sequence
from typing import Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.complaints import Complaint

#: Where they are meant to be; root's, gone with the boot.
DIRECTORY: Final = "/run/hetero-lease"

#: As many as the kernel follows (path_resolution(7)).
_LINKS_MAX: Final = 40


def write(path: str, lines: Sequence[str]) -> None:
    """Put LINES into the file at PATH, all or nothing, for its writer only: systemd reads it as root,
    and what a user could write there would be in the environment of commands that run as root.

    A directory that is missing is made; one that others than root may write in, or exchange, is refused to
    root.  Raises Complaint.
    """
    directory = os.path.dirname(path) or "."  # noqa: PTH120 (pathlib costs startup)
    try:
        _check_place(directory)
        os.makedirs(directory, 0o755, exist_ok=True)  # noqa: PTH103
        _check_place(directory)  # again: in a sticky directory somebody may have been faster
        descriptor, fresh = tempfile.mkstemp(prefix=".", dir=directory)  # 0600
        try:
            with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123
                file.writelines(f"{line}\n" for line in lines)
            os.rename(fresh, path)  # noqa: PTH104
        except BaseException:
            os.unlink(fresh)  # noqa: PTH108
            raise
    except OSError as error:
        raise Complaint(
            exitcodes.FAILURE,
            f"can't write {path}: {error.strerror}",
            (),
            f"name another --env-file; {DIRECTORY} is the place for them",
            "env-file",
        ) from error


def _check_place(directory: str) -> None:
    """Raise Complaint if we are root and others could put a file of theirs into DIRECTORY, or another
    directory in its place, by the name of one above it or by a symlink on the way."""
    if os.geteuid() != 0:
        return
    # in a user namespace the host's root is somebody unknown
    roots = {0, os.lstat("/").st_uid}
    here, ahead, links = "/", _parts(os.path.join(os.getcwd(), directory)), 0  # noqa: PTH109, PTH118
    while True:
        found = os.lstat(here)
        link = stat.S_ISLNK(found.st_mode)
        # in a sticky directory nobody else can move what is root's
        open_to_others = not link and found.st_mode & 0o022 and not (ahead and found.st_mode & stat.S_ISVTX)
        if found.st_uid not in roots or open_to_others:
            cause = f"not written: others than root may put files into {here}, and so set variables of root's"
            raise Complaint(exitcodes.FAILURE, cause, (), f"{DIRECTORY} is the place for them", "env-file")
        if link:
            links += 1
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = os.readlink(here)  # noqa: PTH115
            here = "/" if target.startswith("/") else os.path.dirname(here)  # noqa: PTH120
            ahead += _parts(target)
        if not ahead:
            return
        here = os.path.join(here, ahead.pop())  # noqa: PTH118
        if not os.path.lexists(here):
            return  # it is to be made


def _parts(path: str) -> list[str]:
    """The names in PATH, the last one first."""
    return [part for part in reversed(path.split("/")) if part]


def remove(path: str) -> None:
    """Remove the file at PATH if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108
