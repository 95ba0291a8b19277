"""The privileged helper as a test needs it: with a socket as systemd passes it, and directories of its own."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from tests.support.agent import AgentProcess
from tests.support.process import PYTHON, Program

#: As sd_listen_fds(3) wants it: descriptor 3, and a pid that is the program's.
_ACTIVATED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execvp(sys.argv[2], sys.argv[2:])
"""


class AccessHelper(Program):
    """``hetero_agent.access_helper`` behind `socket`, for AGENT, else with directories of its own.

    USER may ask beside root; IDLE is the seconds after which it ends.  It is started by `start`, as
    often as one likes; the socket is there all the time, as systemd's would be.
    """

    title = "access helper"

    def __init__(
        self,
        user: str = "root",
        idle: float = 30.0,
        program: Sequence[str] = (),
        agent: AgentProcess | None = None,
    ) -> None:
        super().__init__()
        self.user = user
        self.idle = idle
        self.program = tuple(program) or (PYTHON, "-m", "hetero_agent.access_helper")
        self.config = agent.config_path if agent else self.directory / "hetero-agent.conf"
        self.profiles = agent.profiles if agent else self.directory / "profiles.d"
        self.runtime = agent.runtime if agent else self.directory / "run"
        self.records = self.directory / "records"
        self.cdi = self.runtime / "cdi"
        for path in (self.profiles, self.runtime):
            path.mkdir(exist_ok=True)
        self.socket = self.directory / "socket"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.socket))
        self.socket.chmod(0o666)
        self.listener.listen()

    def start(self) -> AccessHelper:
        """Start it, as systemd does when somebody asks."""
        words = [
            *self.program,
            *("--config", str(self.config), "--profiles", str(self.profiles)),
            *("--runtime-dir", str(self.runtime), "--records", str(self.records)),
            *("--user", self.user, "--idle", str(self.idle)),
        ]
        number = self.listener.fileno()
        self.launch([PYTHON, "-ISc", _ACTIVATED, str(number), *words], passed=[number])
        return self

    def close(self) -> None:
        self.listener.close()
        super().close()
