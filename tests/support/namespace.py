"""Running a piece of Python in a mount namespace of its own, so that it can mount what it likes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import textwrap
from collections.abc import Mapping

from tests.support.process import PYTHON, ROOT


def run_in_mount_namespace(
    script: str, *arguments: str, timeout: float = 60, env: Mapping[str, str] | None = None
) -> str:
    """Run SCRIPT (Python, indented as it likes) with ARGUMENTS in a private mount namespace; return
    what it printed.  Fails the test, with what it wrote, if it ends with another status than 0."""
    prelude = "import sys\nfrom pathlib import Path\nfrom tests.support.namespace import fill, mount\n"
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            PYTHON,
            "-c",
            prelude + textwrap.dedent(script),
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def mount(*arguments: str) -> None:
    """mount(8) with ARGUMENTS."""
    subprocess.run(["mount", *arguments], check=True)


def fill(directory: str) -> str:
    """Use up all space of the file system at DIRECTORY; return the file that has it."""
    path = f"{directory}/filler"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (65536, 4096):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, b"x" * size)
    finally:
        os.close(descriptor)
    return path
