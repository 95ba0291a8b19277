"""A machine of the lab: a Debian container with systemd as process 1, its own udevd, D-Bus and journal.

It lives in process and mount namespaces of its own, whose first process takes everything with it
when it dies, mounts included; and that one dies with pytest.  What could be left then are empty
control groups and a scratch directory: the next run removes them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

from tests.support import process
from tests.support.wait import wait_until

#: Where machines keep what they write: a disk, since a memory file system may be small.
SCRATCH = Path("/var/tmp/hetero-agent-lab")

_GROUP = "hetero-agent-lab-"
_NAMESPACES = ("-m", "-p", "-u", "-i", "-n", "-C", "-r", "-w")
_OUTSIDE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

#: Runs in the new namespaces.  machine-id is empty: each boot of the same layers is another machine.
#: libudev shall take what lies in an overlay over /sys (accelerators.py) for devices.
_BOOT = """
set -eu
root=$1 layers=$2 upper=$3 work=$4 name=$5
mount -t overlay overlay -o "lowerdir=$layers,upperdir=$upper,workdir=$work" "$root"
: > "$root/etc/machine-id"
echo lab > "$root/etc/hostname"
mkdir -p "$root/etc/systemd/system.conf.d"
cat > "$root/etc/systemd/system.conf.d/lab.conf" <<END
[Manager]
ManagerEnvironment=SYSTEMD_DEVICE_VERIFY_SYSFS=0
DefaultEnvironment=SYSTEMD_DEVICE_VERIFY_SYSFS=0
END
exec systemd-nspawn --boot --quiet --directory="$root" --machine="$name" --register=no --keep-unit \
    --private-network --capability=all --system-call-filter=bpf --link-journal=no --resolv-conf=off \
    --timezone=off --console=read-only
"""

#: nspawn mounts version 1 controllers read-only: limits would silently not hold.  After that process 1
#: looks again; it also missed udevd, which was not up when it looked first.
_SETTLE = """
for one in memory pids cpu cpuacct devices; do
    if mountpoint -q /sys/fs/cgroup/$one; then mount -o remount,rw,bind /sys/fs/cgroup/$one; fi
done
systemctl daemon-reexec
"""


#: What commands on a machine find in their environment.
_ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "SYSTEMD_DEVICE_VERIFY_SYSFS": "0",
}


T = TypeVar("T")


class CommandFailed(AssertionError):
    """A command on a machine ended otherwise than it should."""


class Machine:
    """A container over LAYERS, the lowest last; UPPER is where it writes, its own if None."""

    _count = 0
    #: Those that are up.
    running: ClassVar[list[Machine]] = []

    def __init__(self, layers: Sequence[Path], upper: Path | None = None) -> None:
        Machine._count += 1
        self.name = f"lab{os.getpid()}-{Machine._count}"
        self.directory = SCRATCH / self.name
        self.upper = upper or self.directory / "upper"
        self.leader = 0
        self._layers = layers
        self._console = self.directory / "console"
        self._process: subprocess.Popen[bytes] | None = None
        self._groups = [top / (_GROUP + self.name) for top in _own_groups()]

    # -- life -----------------------------------------------------------------------------------
    def boot(self) -> Machine:
        """Start it and wait until it is up."""
        work, root = self.directory / "work", self.directory / "root"
        for path in (self.upper, work, root):
            path.mkdir(parents=True, exist_ok=True)
        for group in self._groups:
            group.mkdir()
        words = [str(root), ":".join(map(str, self._layers)), str(self.upper), str(work), self.name]
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                [*_OUTSIDE, "sh", "-c", _BOOT, "boot", *words],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "1"},
                start_new_session=True,
                preexec_fn=self._enter,  # noqa: PLW1509  (two system calls, and no thread holds a lock there)
            )
        process.logs.append((f"console of {self.name}", self._console))
        Machine.running.append(self)
        self.leader = wait_until(self._find_leader, 20, f"process 1 of {self.name}")
        wait_until(self._is_up, 60, f"the end of {self.name}'s boot")
        self.shell(_SETTLE)
        wait_until(self._is_up, 30, f"process 1 of {self.name} after it executed itself anew")
        return self

    def _enter(self) -> None:
        """In the child: the machine's groups are its own, and it does not outlive pytest."""
        for group in self._groups:
            (group / "cgroup.procs").write_text("0")
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def _find_leader(self) -> int:
        """Return the process that is number 1 of the innermost of three namespaces, 0 if not yet."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise CommandFailed(f"{self.name} did not boot:\n{self.console}")
        for pid in _below(self._process.pid):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            if len(numbers) == 3 and numbers[-1] == "1":
                return pid
        return 0

    def _is_up(self) -> bool:
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded")

    def halt(self) -> None:
        """Take the power away.  Nothing of it is left but what it wrote."""
        if self._process is not None:
            Machine.running.remove(self)
            # not the process that waits for it: that one collects it
            for pid in _children(self._process.pid):
                os.kill(pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None
        wait_until(lambda: all(_remove_group(group) for group in self._groups), 20, "empty control groups")

    def close(self) -> None:
        """Halt it and forget what it wrote."""
        self.halt()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def console(self) -> str:
        """What it printed while it booted."""
        return self._console.read_text(errors="replace") if self._console.exists() else ""

    # -- commands and files ---------------------------------------------------------------------
    def command(self, *words: str) -> list[str]:
        """Return the command line that runs WORDS in the machine, as root and outside any unit."""
        assert self.leader, f"{self.name} is not running"
        return ["nsenter", f"--target={self.leader}", *_NAMESPACES, *words]

    def run(
        self,
        *words: str,
        check: bool = True,
        uid: int = 0,
        groups: Sequence[int] = (),
        stdin: str | None = None,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run WORDS in the machine as UID with exactly GROUPS.  Raises CommandFailed if it fails
        and CHECK is set."""
        as_whom: list[str] = []
        if uid or groups:
            more = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
            as_whom = ["setpriv", f"--reuid={uid}", f"--regid={uid}", more]
        done = subprocess.run(
            self.command(*as_whom, *words),
            capture_output=True,
            text=True,
            errors="replace",
            input=stdin if stdin is not None else "",
            timeout=timeout,
            check=False,
            env={**_ENVIRONMENT, **_marks(), **(env or {})},
        )
        if check and done.returncode != 0:
            raise CommandFailed(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def shell(self, script: str, **options: object) -> str:
        """Run a script of sh -eu and return its output."""
        return self.run("sh", "-euc", script, **options).stdout  # type: ignore[arg-type]

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start WORDS in the machine and return the process of pytest's that stands for it; its
        standard input and output are pipes."""
        return subprocess.Popen(
            self.command(*words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**_ENVIRONMENT, **_marks()},
        )

    @staticmethod
    def end(process: subprocess.Popen[str]) -> str:
        """SIGTERM what `start` started, and return what it still had to say."""
        # nsenter waits for it and does not pass signals on
        for pid in _children(process.pid):
            os.kill(pid, signal.SIGTERM)
        return process.communicate(timeout=60)[0]

    def path(self, inside: str) -> Path:
        """Return where pytest finds the machine's absolute path INSIDE (without links in it)."""
        return Path(f"/proc/{self.leader}/root") / inside.lstrip("/")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Put a file there, with its directories; also before it is booted."""
        path = self.path(inside) if self.leader else self.upper / inside.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def read(self, inside: str) -> str:
        """Return what is in the file."""
        return self.path(inside).read_text()

    def wait(self, check: Callable[[], T], timeout: float, what: str) -> T:
        """`wait_until`, and on failure say how the machine's units are."""
        try:
            return wait_until(check, timeout, what)
        except AssertionError as error:
            failed = self.run("systemctl", "--failed", "--no-legend", "--plain", check=False).stdout
            raise AssertionError(f"{error}; failed units: {failed or 'none'}") from None


def sweep() -> None:
    """Remove what runs that were killed have left: scratch directories and empty control groups of
    processes that are no more."""
    for top in _own_groups():
        for group in top.glob(f"{_GROUP}*"):
            if not _alive(group.name.removeprefix(_GROUP)):
                _remove_group(group)
    for directory in SCRATCH.glob("lab*"):
        if not _alive(directory.name):
            shutil.rmtree(directory, ignore_errors=True)


def _alive(name: str) -> bool:
    number = name.removeprefix("lab").partition("-")[0]
    return number.isdecimal() and Path(f"/proc/{number}").exists()


def _marks() -> dict[str, str]:
    """What tells conftest's search for leftovers that a process is of this run."""
    return {name: value for name, value in os.environ.items() if name.startswith("HETERO_AGENT_TEST")}


def _own_groups() -> list[Path]:
    """Return this process's control group of each hierarchy that systemd could use."""
    points = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            points[""] = Path(before.split()[4])
        elif kind == "cgroup":
            points |= {one: Path(before.split()[4]) for one in options.split(",")}
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        first = names.split(",")[0]
        # a group of cpuset takes no process before it is given processors; systemd does not use it here
        if first in points and first not in ("cpuset", "freezer", "blkio"):
            found.append(points[first] / path.lstrip("/"))
    return found


def _remove_group(group: Path) -> bool:
    """Remove GROUP and those below it; False if a process is still in one."""
    if not group.exists():
        return True
    for path, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(path)
        except OSError:
            return False
    return True


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(one) for t in threads for one in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except OSError:
        return []


def _below(pid: int) -> list[int]:
    found = _children(pid)
    for one in found:
        found.extend(_children(one))
    return found
