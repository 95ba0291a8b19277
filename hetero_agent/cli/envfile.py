"""Files in which units find the variables of a lease (EnvironmentFile= of systemd.exec(5))."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from typing import Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.complaints import Complaint

#: Where they are meant to be; root's, gone with the boot.
DIRECTORY: Final = "/run/hetero-lease"


def write(path: str, lines: Sequence[str]) -> None:
    """Put LINES into the file at PATH, all or nothing, for its writer only: systemd reads it as root,
    and what a user could write there would be in the environment of commands that run as root.

    A directory that is missing is made; one that others than root may write in is refused to root.  Raises
    Complaint.
    """
    directory = os.path.dirname(path) or "."  # noqa: PTH120 (pathlib costs startup)
    try:
        os.makedirs(directory, 0o755, exist_ok=True)  # noqa: PTH103
        _check_place(directory)
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
    """Raise Complaint if we are root and others could put a file of theirs into DIRECTORY."""
    found = os.stat(directory)  # noqa: PTH116
    if os.geteuid() == 0 and (found.st_uid != 0 or found.st_mode & 0o022):
        cause = f"not written: others than root may put files into {directory}, and so set variables of root's"
        raise Complaint(exitcodes.FAILURE, cause, (), f"{DIRECTORY} is the place for them", "env-file")


def remove(path: str) -> None:
    """Remove the file at PATH if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108
