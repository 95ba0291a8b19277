"""Real containers by podman and runc, with storage of their own and with /run/cdi where a test says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.calls import as_user
from tests.support.process import scratch
from tests.support.wait import wait_until

#: The host's programs are the containers' too; the image has but links to them.
_LINKS = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")}
_DIRECTORIES = ("usr", "proc", "sys", "dev", "etc", "run", "tmp")

#: An image that asks for every device of its vendor, as vendors' own images do.
IMAGE = "localhost/greedy"

#: With what every container is made.  The limits of the host may be higher than a runtime may set.
MADE_WITH = (
    "--network=none",
    "--log-driver=none",
    "--ulimit=nofile=1024:4096",
    "--ulimit=nproc=4096:4096",
    "--volume=/usr:/usr:ro",
)

_UNSHARE = ("unshare", "--mount", "--propagation", "private")

# A mount namespace in which nothing of the host's is touched.  The device controller must be there
# to have containers kept to their devices; where no group hierarchy is, it is made here.
_PLACE = """
set -e
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
mount -t tmpfs none /etc/cni
mkdir /run/cdi
mount --bind "$1" /run/cdi
# a range of uids and gids for a rootless one
printf '%s:1000000:65536\n' "$3" >/run/range
mount --bind /run/range /etc/subuid
mount --bind /run/range /etc/subgid
if [ "$(stat -fc %T /sys/fs/cgroup)" != cgroup2fs ] && ! mountpoint -q /sys/fs/cgroup/devices; then
    mount -t tmpfs none /sys/fs/cgroup
    for one in systemd $(awk '$1 !~ /#/ && $4 == 1 { print $1 }' /proc/cgroups); do
        mkdir "/sys/fs/cgroup/$one"
        case $one in systemd) how=none,name=systemd ;; *) how=$one ;; esac
        mount -t cgroup -o "$how" none "/sys/fs/cgroup/$one"
    done
fi
touch "$2"
exec sleep infinity
"""


class Podman:
    """podman(1) of UID (not 0: rootless), reading specifications in the directory CDI.

    No container has a network, and none's output is kept.  All is removed by `close`.
    """

    def __init__(self, cdi: Path, uid: int = 0) -> None:
        self.uid = uid
        self.directory = scratch("podman")
        os.chown(self.directory, uid, uid)
        ready = self.directory / "ready"
        self._place = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _PLACE, "sh", str(cdi), str(ready), str(uid)],
            stdin=subprocess.DEVNULL,
        )
        wait_until(lambda: ready.exists() or self._place.poll() is not None, what="the mount namespace")
        assert self._place.poll() is None, "no mount namespace with control groups can be made"
        archive = self.directory / "image.tar"
        with tarfile.open(archive, "w") as tar:
            for name in _DIRECTORIES:
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(entry)
            for name, target in _LINKS.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)
            # users by their names are none of these tests'
            entry = tarfile.TarInfo("etc/passwd")
            data = b"root:x:0:0::/:/bin/sh\n"
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        self.ok("import", "--change=ENV NVIDIA_VISIBLE_DEVICES=all", str(archive), IMAGE)

    @property
    def _entering(self) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self._place.pid}/ns/mnt"]

    @property
    def _command(self) -> list[str]:
        options = {
            "root": self.directory / "store",
            "runroot": self.directory / "run",
            "tmpdir": self.directory / "tmp",
            "storage-driver": "vfs",
            "cgroup-manager": "cgroupfs",
            "events-backend": "file",
            "runtime": "runc",
        }
        home = ["env", f"HOME={self.directory}", f"XDG_RUNTIME_DIR={self.directory}"]
        given = (f"--{name}={value}" for name, value in options.items())
        return [*self._entering, *as_user(self.uid), *home, "/usr/bin/podman", *given]

    @property
    def program(self) -> str:
        """A script that is this podman."""
        return f'#!/bin/sh\nexec {shlex.join(self._command)} "$@"\n'

    def __call__(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run podman with WORDS to its end."""
        return self.call([*self._command, *words], timeout)

    def call(
        self, command: Sequence[str], timeout: float = 60, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run COMMAND, which may start containers, to its end."""
        # conmon keeps what it inherits: its output must be no pipe that is read to the end
        with (self.directory / "out").open("w+") as out, (self.directory / "err").open("w+") as err:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd="/",
                env=env,
                timeout=timeout,
                check=False,
            )
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, out.read(), err.read())

    def ok(self, *words: str) -> str:
        """Run podman with WORDS, which must succeed; return what it printed."""
        done = self(*words)
        assert done.returncode == 0, f"podman {words[0]}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    @staticmethod
    def create(*words: str) -> list[str]:
        """The arguments with which a container is made; WORDS are options, the image and its command."""
        return ["run", *MADE_WITH, *words]

    def run(self, *options: str, script: str) -> subprocess.CompletedProcess[str]:
        """Run SCRIPT (sh) in a container made with OPTIONS to its end."""
        return self(*self.create("--rm", *options, IMAGE, "sh", "-c", script))

    def start(self, name: str, *options: str, script: str) -> int:
        """Start the container NAME with SCRIPT (sh) in the background; return its pid on the host."""
        self.ok(*self.create("--detach", f"--name={name}", *options, IMAGE, "sh", "-c", script))
        return int(self.inspect(name)["State"]["Pid"])

    def spawn(self, *options: str, script: str) -> subprocess.Popen[bytes]:
        """Start podman in the foreground of a container with SCRIPT (sh), and don't wait."""
        return subprocess.Popen(
            [*self._command, *self.create("--rm", *options, IMAGE, "sh", "-c", script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )

    def inspect(self, name: str) -> dict[str, Any]:
        """What podman knows of a container."""
        [found] = json.loads(self.ok("container", "inspect", name))
        return dict(found)

    def conmon(self, name: str) -> int:
        """The pid of the container's monitor."""
        return int(self.inspect(name)["State"]["ConmonPid"])

    def clear(self) -> None:
        """End and remove all containers."""
        # without its conmon, podman learns of a container's end while it fails to end it
        self("rm", "--all", "--force", "--time=0")
        self.ok("rm", "--all", "--force", "--time=0")

    def close(self) -> None:
        """End and remove all."""
        try:
            self.clear()
            self._end_pause()
            wait_until(lambda: not self._working(), what="the end of podman's own processes")
        finally:
            # the groups above those of the containers; others' containers may be in them
            script = "find /sys/fs/cgroup -depth -type d -path '*/libpod_parent*' -exec rmdir {} + 2>/dev/null"
            subprocess.run([*self._entering, "sh", "-c", script], check=False)
            self._place.kill()
            self._place.wait()
            subprocess.run(["rm", "-rf", str(self.directory)], check=True)

    def _end_pause(self) -> None:
        """End the process that keeps the user namespace of a rootless podman."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.directory / "tmp" / "pause.pid").read_text()), signal.SIGKILL)

    def _working(self) -> bool:
        """Whether a process with our storage in its arguments lives: conmon, podman's own clean-up."""
        wanted = os.fsencode(self.directory / "store")
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if wanted in place.read_bytes():
                    return True
        return False

    def __enter__(self) -> Podman:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
