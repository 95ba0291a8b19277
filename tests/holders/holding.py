"""Real processes that hold things in each way there is, and the nodes for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hetero_agent.core.events import Event, Scanned
from hetero_agent.core.model import DeviceRecord, Instant, Node, Role
from hetero_agent.holders.edge import HolderEdge
from tests.support.process import PYTHON
from tests.support.wait import wait_until_async

E = TypeVar("E")

#: A uid that nobody else on the machine has.
STRANGER = 54321

#: What a child opens that is to hold nothing.
NOWHERE = "/dev/null"

#: How a child gets hold of argv[1]; afterwards it says so and stays until its stdin ends.
_SCRIPT = """
import ctypes, mmap, os, signal, sys, threading
path, way = sys.argv[1], sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
keep = []

def opened(flags=os.O_RDWR | os.O_NOCTTY):
    return os.open(path, flags)

def mapped():
    fd = opened()
    keep.append(mmap.mmap(fd, 4096))
    os.close(fd)
    # mmap keeps a duplicate of the descriptor, which is to go too
    for number in os.listdir("/proc/thread-self/fd"):
        try:
            if int(number) > 2 and os.stat(int(number)).st_ino == os.stat(path).st_ino:
                os.close(int(number))
        except OSError:
            pass

def wait():
    print("ready", flush=True)
    sys.stdin.read()

def apart():
    assert libc.unshare(0x400) == 0  # CLONE_FILES
    opened()
    wait()
    os._exit(0)

def rest(get):
    get()
    wait()
    os._exit(0)

if way == "open":
    opened()
elif way == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    opened()
elif way == "path":
    opened(os.O_PATH)
elif way == "map":
    mapped()
elif way == "none":
    pass
elif way == "child":
    opened()
    if os.fork():
        sys.stdin.read()
        os._exit(0)
elif way == "thread":
    threading.Thread(target=apart).start()
    threading.Event().wait()
elif way in ("leaderless", "leaderless-map"):
    threading.Thread(target=rest, args=(opened if way == "leaderless" else mapped,)).start()
    libc.syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)  # exit(2): this thread only
elif way == "zombie":
    if (pid := os.fork()) == 0:
        opened()
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    print(pid, flush=True)
    sys.stdin.read()
    os._exit(0)
wait()
"""


class Child:
    """A process that holds PATH in WAY until `end`."""

    def __init__(
        self, path: str | Path, way: str = "open", before: Sequence[str] = (), python: str = PYTHON
    ) -> None:
        self.process = subprocess.Popen(
            [*before, python, "-I", "-S", "-c", _SCRIPT, str(path), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()
        if not self.said:
            self.end()
            raise AssertionError(f"the child that was to {way} {path} failed")

    @property
    def start(self) -> int:
        """Field 22 of its stat."""
        return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[19])

    def kill(self) -> None:
        """SIGKILL, reaped."""
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        """End of file on its stdin, then its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@contextmanager
def holding(
    path: str | Path, way: str = "open", before: Sequence[str] = (), python: str = PYTHON
) -> Iterator[Child]:
    """A child for the length of a block."""
    child = Child(path, way, before, python)
    try:
        yield child
    finally:
        child.end()


def as_user(uid: int) -> list[str]:
    """The words before a command that is to run as UID."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def file_node(path: Path, role: Role = Role.OWN) -> Node:
    """The node of a file-backed device, made if it isn't there."""
    if not path.exists():
        path.write_bytes(b"\0" * 4096)
        path.chmod(0o666)
    found = path.stat()
    return Node(str(path), role, "file", fsdev=found.st_dev, inode=found.st_ino)


def console(number: int) -> Node:
    """The node of a spare virtual console."""
    return Node(f"/dev/tty{number}", Role.OWN, "char", 4, number)


def loop_node(number: int = 5) -> Node:
    """The node of a loop device without a file, which can be mapped all the same."""
    return Node(f"/dev/loop{number}", Role.OWN, "block", 7, number)


def record(device: str, *nodes: Node) -> DeviceRecord:
    """A device of the given nodes."""
    return DeviceRecord(device, "example.com/thing", nodes=nodes)


def now() -> Instant:
    """This moment."""
    return Instant(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000, time.time_ns() // 1000)


class Rig:
    """An edge with the events that it submitted."""

    def __init__(self, **options: Any) -> None:
        self.events: list[Event] = []
        self.protected: set[int] = set()
        self.main_pids: dict[str, int] = {}
        self.edge = HolderEdge(self.events.append, now, lambda: self.protected, self._main_pid, **options)

    async def _main_pid(self, unit: str) -> int:
        return self.main_pids.get(unit, 0)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def scan(self, **targets: tuple[Node, ...]) -> Scanned:
        """Ask for a scan and return its result."""
        before = len(self.of(Scanned))
        self.edge.request_scan(targets)
        await wait_until_async(lambda: len(self.of(Scanned)) > before, what="a scan")
        return self.of(Scanned)[before]

    async def next(self, kind: type[E], count: int = 1) -> E:
        """Wait until there are COUNT events of KIND; return the last of these."""
        await wait_until_async(lambda: len(self.of(kind)) >= count, what=f"{count} {kind.__name__}")
        return self.of(kind)[count - 1]

    @property
    def worker(self) -> int:
        """The pid of the only worker."""
        (pid,) = self.edge.stats()["workers"]
        return int(pid)


def with_rig(test: Callable[[Rig], Any], **options: Any) -> None:
    """Run an async test with an edge that is started and stopped around it."""

    async def run() -> None:
        rig = Rig(**options)
        await rig.edge.start()
        try:
            await test(rig)
        finally:
            await rig.edge.stop()

    asyncio.run(run())


def alive(pid: int) -> bool:
    """Whether PID is a process that runs (no zombie)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def run_python(code: str, before: Sequence[str] = ()) -> str:
    """Run CODE with the package importable; return what it printed."""
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [*before, PYTHON, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {root!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
