"""heteroctl as a program: run to its end, or started and watched."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_agent import names
from tests.support.calls import as_user
from tests.support.process import PYTHON, ROOT


@dataclass(frozen=True)
class Result:
    """What came of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


class Ctl:
    """Runs heteroctl on the bus at ADDRESS as UID with the supplementary GROUPS.

    SIM is the simulator's socket; ENV is added to the environment.
    """

    def __init__(
        self,
        address: str,
        uid: int = 0,
        groups: Sequence[int] = (),
        sim: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.command = [*as_user(uid, groups), PYTHON, "-m", "hetero_agent.cli.main"]
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1" if uid else "",
            names.BUS_ADDRESS_VARIABLE: address,
            **({"HETERO_SIM_SOCKET": str(sim)} if sim else {}),
            **(env or {}),
        }

    def __call__(self, *arguments: str, code: int | None = 0, timeout: float = 60) -> Result:
        """Run to the end; the exit code must be CODE (None: any)."""
        done = subprocess.run(
            [*self.command, *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd="/",
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"{arguments} gave {done.returncode}: {done.stdout}{done.stderr}"
        return Result(done.returncode, done.stdout, done.stderr)

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run with --json and return the document."""
        return self(*arguments, "--json", code=code).json

    def spawn(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        """Start it, with pipes for stdout and stderr; MORE is Popen's."""
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(
            [*self.command, *arguments], env=self.env, stdin=subprocess.DEVNULL, text=True, cwd="/", **options
        )
