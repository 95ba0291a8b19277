"""A real journald in the test's own mount namespace (see `namespace.run_in_mount_namespace`)."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.kmsg import PrivateKmsg
from tests.support.namespace import mount
from tests.support.wait import wait_until

_JOURNALS = "/run/log/journal"
_SYNC = ["journalctl", "--sync"]
_CONFIG = "[Journal]\nStorage=volatile\nReadKMsg={}\nRateLimitIntervalSec=0\nAudit=no\n"


@contextmanager
def journald(start: bool = True, kmsg: bool = False) -> Iterator[Journald]:
    """An empty /run with a journald in it, started at once or by `Journald.start`.  KMSG: it reads
    the kernel's messages too, from a /dev/kmsg of its own (`Journald.kernel`)."""
    mount("-t", "tmpfs", "tmpfs", "/run")
    Path("/run/systemd/journal").mkdir(parents=True)
    Path(_JOURNALS).mkdir(parents=True)
    config = Path("/run/journald.conf")
    config.write_text(_CONFIG.format("yes" if kmsg else "no"))
    mount("--bind", str(config), "/etc/systemd/journald.conf")
    one = Journald()
    if kmsg:
        one.kernel = PrivateKmsg()
    if start:
        one.start()
    try:
        yield one
    finally:
        one.stop()


class Journald:
    """The process, and what is in its journal."""

    kernel: PrivateKmsg

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it takes messages."""
        self.process = subprocess.Popen(["/lib/systemd/systemd-journald"], stderr=subprocess.DEVNULL)
        wait_until(Path("/run/systemd/journal/socket").exists, what="journald's socket")
        # it heeds signals and answers only some time after that
        wait_until(lambda: subprocess.run(_SYNC, check=False).returncode == 0, what="an answer of journald")

    def stop(self) -> None:
        """End it; its socket goes too."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
            self.process = None
            Path("/run/systemd/journal/socket").unlink(missing_ok=True)

    def rotate(self) -> None:
        """Have it begin a new file."""
        before = set(Path(_JOURNALS).rglob("*.journal"))
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR2)
        wait_until(lambda: set(Path(_JOURNALS).rglob("*.journal")) - before, what="another file")

    def entries(self, *matches: str) -> list[dict[str, Any]]:
        """The entries that MATCHES (FIELD=value) select, oldest first, as journalctl gives them."""
        subprocess.run(_SYNC, check=True, timeout=60)
        done = subprocess.run(
            ["journalctl", "-D", _JOURNALS, "--no-pager", "-o", "json", *matches],
            check=True,
            capture_output=True,
            timeout=20,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def explained(self, *matches: str) -> str:
        """What ``journalctl -x`` shows of them."""
        done = subprocess.run(
            ["journalctl", "-D", _JOURNALS, "--no-pager", "-x", *matches],
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.stdout
