"""Network namespaces of a test's own: what it does to interfaces there, no other sees."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, ParamSpec

from hetero_agent.access.namespaces import Process
from tests.support.wait import wait_until

P = ParamSpec("P")

#: A resource of accelerators with network interfaces, and its profile.
NIC: Final = "example.com/nic"
NIC_PROFILE: Final = """
schema = 1
resource = "example.com/nic"
priority = 60
[[match]]
vendors = ["1e52"]
classes = ["1200"]
[[nodes]]
subsystem = "accel"
pattern = "accel*"
role = "own"
required = true
[attributes]
net = { name-of = "net", all = true }
"""

_CLONE_FS: Final = 0x200
_CLONE_NEWNS: Final = 0x20000
_CLONE_NEWNET: Final = 0x40000000


def in_own_network(test: Callable[P, None]) -> Callable[P, None]:
    """Run the decorated test in a thread with a network and a mount namespace of its own, which go
    with it; what it starts is in them too."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        failure: list[BaseException] = []

        def inside() -> None:
            try:
                library = ctypes.CDLL(None, use_errno=True)
                done = library.unshare(_CLONE_FS | _CLONE_NEWNS | _CLONE_NEWNET)
                assert done == 0, os.strerror(ctypes.get_errno())
                subprocess.run(["mount", "--make-rprivate", "/"], check=True)
                test(*arguments, **named)
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if failure:
            raise failure[0]

    return run


def ip(arguments: str, inside: int | None = None) -> str:
    """Run ip(8), in the network namespace of process INSIDE if one is given."""
    enter = ["nsenter", "--net", f"--target={inside}"] if inside else []
    done = subprocess.run([*enter, "ip", *arguments.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {arguments}: {done.stderr}"
    return done.stdout


def links(inside: int | None = None) -> dict[str, dict[str, Any]]:
    """The interfaces by name, as ip(8) tells them; the loopback is left out."""
    found = json.loads(ip("-details -json link show", inside))
    return {one["ifname"]: one for one in found if one["ifname"] != "lo"}


def is_up(name: str, inside: int | None = None) -> bool:
    """Whether an interface was switched on."""
    return "UP" in links(inside)[name]["flags"]


class Workload:
    """A process in a network namespace of its own; a context manager that ends it.  That of a ROOTLESS
    one belongs to a user namespace, as those of users' containers do."""

    def __init__(self, rootless: bool = False) -> None:
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if rootless else []
        mine = ["--user", "--map-root-user"] if rootless else []
        self._program = subprocess.Popen([*user, "unshare", *mine, "--net", "sleep", "600"])
        self.pid = self._program.pid
        here = os.readlink(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net")
        wait_until(
            lambda: (
                os.readlink(f"/proc/{self.pid}/ns/net") != here
                and Path(f"/proc/{self.pid}/comm").read_text() == "sleep\n"
            ),
            what="a network namespace of its own",
        )

    @property
    def process(self) -> Process:
        """It, so that it can't be mistaken for another."""
        text = Path(f"/proc/{self.pid}/stat").read_text()
        return Process(self.pid, int(text.rpartition(")")[2].split()[19]))

    def kill(self) -> None:
        """End it at once, as nobody would who has something to put in order."""
        self._program.kill()
        self._program.wait()

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
