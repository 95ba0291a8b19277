"""Real containers, by runc: own mount, pid, ipc, uts and network namespaces, control groups named as
Docker's are, and a device among their nodes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.process import PYTHON, scratch
from tests.support.wait import wait_until

#: The host's directories that the container sees, read-only: programs and their libraries.
_SHARED = ("/usr", "/lib", "/lib64", "/bin", "/etc")

# Opens argv[1] when the file argv[2] appears, and stays.
_HOLD = """
import os, sys, time
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
open(sys.argv[2] + ".done", "w").close()
time.sleep(3600)
"""


class Container:
    """A container in which SOURCE, a host's file or node, is found as /dev/thing.

    Its first process opens that when `open` says so; `run` starts another that does at once.
    """

    def __init__(self, identifier: str, source: str | Path) -> None:
        self.id = identifier
        self.directory = scratch("oci")
        root, shared = self.directory / "root", self.directory / "shared"
        root.mkdir()
        shared.mkdir()
        self._shared = shared
        self._runc("spec", "--bundle", str(self.directory))
        place = self.directory / "config.json"
        spec = json.loads(place.read_text())
        self._fit(spec, root, source)
        place.write_text(json.dumps(spec))
        self._runc("run", "--detach", "--bundle", str(self.directory), identifier)
        self.pid = int(json.loads(self._runc("state", identifier))["pid"])
        self.executed: list[int] = []

    def _fit(self, spec: dict[str, Any], root: Path, source: str | Path) -> None:
        process = spec["process"]
        process["terminal"] = False
        process["args"] = [PYTHON, "-ISc", _HOLD, "/dev/thing", "/shared/first"]
        del process["rlimits"]
        spec["root"] = {"path": str(root), "readonly": False}
        binds = {one: one for one in _SHARED if os.path.exists(one)}
        spec["mounts"] += [
            {"destination": there, "source": here, "type": "none", "options": ["bind", "ro"]}
            for here, there in binds.items()
        ]
        spec["mounts"] += [
            {"destination": there, "source": str(here), "type": "none", "options": ["bind", "rw"]}
            for here, there in ((source, "/dev/thing"), (self._shared, "/shared"))
        ]
        spec["linux"]["cgroupsPath"] = f"/docker/{self.id}"
        # the device controller would need a rule for the node, and v1 has it only where it is mounted
        spec["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}

    def _runc(self, *words: str) -> str:
        # the container keeps runc's output streams: they must be no pipe that somebody reads to its end
        with (self.directory / "out").open("w+") as out:
            done = subprocess.run(
                ["runc", "--root", str(self.directory / "state"), *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                check=False,
                timeout=30,
            )
            out.seek(0)
            said = out.read()
        assert done.returncode == 0, f"runc {words[0]}: {done.returncode}\n{said}"
        return said

    def open(self) -> None:
        """Have the first process open the device."""
        self._open("first")

    def _open(self, name: str) -> None:
        (self._shared / name).touch()
        wait_until((self._shared / f"{name}.done").exists, what="the open in the container")

    def run(self) -> int:
        """Start another process in it (as docker exec does) that opens the device; return its pid
        on the host."""
        pid_file = self.directory / "pid"
        command: Sequence[str] = (PYTHON, "-ISc", _HOLD, "/dev/thing", "/shared/second")
        self._runc("exec", "--detach", "--pid-file", str(pid_file), self.id, *command)
        self._open("second")
        return int(pid_file.read_text())

    def close(self) -> None:
        """End and remove it."""
        self._runc("delete", "--force", self.id)
        for line in Path("/proc/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split()
            if kind.startswith("cgroup"):
                with contextlib.suppress(OSError):
                    Path(place, "docker").rmdir()
        for path in sorted(self.directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.directory.rmdir()

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
