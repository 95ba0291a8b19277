"""A program of ours as a child process: started, watched, ended, its output kept in a file."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.wait import PATIENCE, wait_until

#: The top of the checkout: programs are started from here.
ROOT = Path(__file__).resolve().parents[2]

#: Python of the distribution, which has the libraries; never one of a version manager.
PYTHON = "/usr/bin/python3"

#: Every process and its log since the running test began; a failing test shows them.
logs: list[tuple[str, Path]] = []

_SETTLE = b"\0settle"


def scratch(prefix: str) -> Path:
    """Make a directory that other users can enter (pytest's own are 0700)."""
    path = Path(tempfile.mkdtemp(prefix=f"hetero-agent-{prefix}-", dir="/tmp"))
    path.chmod(0o755)
    return path


class Notifications:
    """A NOTIFY_SOCKET (sd_notify(3)) that keeps every message with its time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[tuple[float, str]] = []
        self._settled = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(8192)
            except OSError:
                return
            if not data:
                return
            if data == _SETTLE:
                self._settled.set()
                continue
            self.messages.append((time.monotonic(), data.decode("utf-8", "replace")))

    def settle(self) -> None:
        """Wait until all that was sent so far has been read."""
        self._settled.clear()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(_SETTLE, str(self.path))
        assert self._settled.wait(PATIENCE), "the notifications are not read"

    def lines(self, prefix: str = "", since: int = 0) -> list[str]:
        """Return the lines that begin with PREFIX, of messages from number SINCE on."""
        return [
            line for _, text in self.messages[since:] for line in text.splitlines() if line.startswith(prefix)
        ]

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


class Program:
    """One program in its own scratch directory, which `close` removes."""

    title = "program"

    def __init__(self) -> None:
        self.directory = scratch(self.title)
        self.log_path = self.directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def launch(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, passed: Sequence[int] = ()
    ) -> None:
        """Start COMMAND in the checkout with its output appended to the log; it gets the descriptors
        PASSED, under their numbers."""
        assert self.process is None or self.process.poll() is not None, f"{self.title} runs already"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=passed,
            )
        logs.append((f"{self.title} ({self.process.pid})", self.log_path))

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        """All output so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        """Wait for the end; return the status as subprocess does (-9 for a kill)."""
        assert self.process is not None
        return self.process.wait(timeout)

    def terminate(self, timeout: float = 30) -> int:
        """SIGTERM, wait, return the status."""
        if self.running():
            self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill9(self) -> int:
        """SIGKILL, wait, return the status."""
        if self.running():
            self.signal(signal.SIGKILL)
        return self.wait()

    def close(self) -> None:
        """End the process however it takes and remove its directory."""
        if self.process is not None and self.running():
            self.signal(signal.SIGCONT)
            try:
                self.terminate(5)
            except subprocess.TimeoutExpired:
                self.kill9()
        shutil.rmtree(self.directory, ignore_errors=True)

    def wait_for_log(self, text: str, timeout: float = 30) -> None:
        """Wait until TEXT stands in the log."""
        wait_until(lambda: text in self.log, timeout, f"{text!r} in the log of {self.title}")
