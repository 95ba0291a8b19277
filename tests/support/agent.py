"""The agent and the simulator as processes, each with directories of its own."""

from __future__ import annotations

import grp
import signal
from collections.abc import Mapping, Sequence

from tests.support.bus import PrivateBus
from tests.support.process import PYTHON, Notifications, Program
from tests.support.wait import wait_until

#: The group that may allocate in tests: one that every Debian has and nobody is in.
GROUP = "games"
GROUP_GID = grp.getgrnam(GROUP).gr_gid

#: Uids that are nobody special.  (dbus-daemon turns away uids that the user database lacks.)
#: A member gets the group by `Client(bus, MEMBER, [GROUP_GID])`; an outsider has no group.
MEMBER = 2
OTHER_MEMBER = 9
OUTSIDER = 65534

#: How the daemon is started.
DAEMON = (PYTHON, "-m", "hetero_agent.daemon")

#: What every agent of a test is told unless the test says otherwise; {directory} is its own.
CONFIG = """
[agent]
group = "games"
log-level = "debug"

[reclaim]
occupied-after = 0.3

[discovery]
udev-source = "kernel"

[providers.sim]
directory = "{directory}/sim"
resources = ["example.com/npu", "example.com/fpga"]

[providers.vendor]
directory = "{directory}/vendor"
resources = ["example.com/npu", "example.com/fpga", "example.com/npu.part"]
"""


class AgentProcess(Program):
    """``hetero_agent.daemon`` on BUS.

    CONFIG is TOML, with ``{directory}`` replaced by the agent's scratch directory; PROFILES maps
    file names to TOML; SOURCES is ``kernel`` or ``none``; WATCHDOG is WATCHDOG_USEC in seconds.
    PROGRAM is how it is started, before the daemon's own arguments; another may be set for the next
    start.
    """

    title = "agent"

    def __init__(
        self,
        bus: PrivateBus,
        config: str = CONFIG,
        profiles: Mapping[str, str] | None = None,
        sources: str = "none",
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        watchdog: float | None = None,
        audit: str = "stderr",
        program: Sequence[str] = DAEMON,
    ) -> None:
        super().__init__()
        self.bus = bus
        self.program = tuple(program)
        self.sources = sources
        self.audit = audit
        self.arguments = tuple(arguments)
        self.env = dict(env or {})
        if watchdog is not None:
            self.env["WATCHDOG_USEC"] = str(int(watchdog * 1e6))
        self.runtime = self.directory / "run"
        self.state = self.directory / "state"
        self.profiles = self.directory / "profiles.d"
        self.sim_directory = self.directory / "sim"
        for path in (
            self.runtime,
            self.state,
            self.profiles,
            self.sim_directory,
            self.directory / "vendor",
        ):
            path.mkdir()
        self.config_path = self.directory / "hetero-agent.conf"
        self.write_config(config)
        for name, text in (profiles or {}).items():
            (self.profiles / name).write_text(text)
        self.notify = Notifications(self.directory / "notify")
        self._ready_seen = 0

    def write_config(self, text: str) -> None:
        """Replace the configuration file; ``{directory}`` becomes the scratch directory."""
        self.config_path.write_text(text.replace("{directory}", str(self.directory)))

    def spawn(self, env: Mapping[str, str] | None = None) -> None:
        """Start it and don't wait."""
        self._ready_seen = len(self.notify.messages)
        self.launch(
            [
                *self.program,
                "--config",
                str(self.config_path),
                "--profiles",
                str(self.profiles),
                "--runtime-dir",
                str(self.runtime),
                "--state-dir",
                str(self.state),
                "--bus",
                self.bus.address,
                "--audit",
                self.audit,
                "--sources",
                self.sources,
                *self.arguments,
            ],
            env={"NOTIFY_SOCKET": str(self.notify.path), **self.env, **(env or {})},
        )

    def ready(self) -> bool:
        """Tell whether this run of it has said READY=1."""
        return "READY=1" in self.notify.lines("READY=1", self._ready_seen)

    def wait_ready(self, timeout: float = 30) -> None:
        wait_until(lambda: self.ready() or not self.running(), timeout, "READY=1 from the agent")
        assert self.ready(), f"the agent ended with {self.wait()} before it was ready:\n{self.log}"

    def start(self, env: Mapping[str, str] | None = None) -> AgentProcess:
        """Start it and wait for READY=1.  ENV is for this run only."""
        self.spawn(env)
        self.wait_ready()
        return self

    def restart(self, env: Mapping[str, str] | None = None) -> None:
        """SIGTERM if it runs, then `start` over the same directories."""
        if self.running():
            assert self.terminate() == 0, f"the agent ended badly:\n{self.log}"
        self.start(env)

    def reload(self) -> None:
        """SIGHUP, and wait until it says READY=1 again (sd_notify(3), RELOADING=1)."""
        before = len(self.notify.messages)
        self.signal(signal.SIGHUP)
        wait_until(lambda: self.notify.lines("RELOADING=1", before), what="RELOADING=1")
        wait_until(lambda: self.notify.lines("READY=1", before), what="READY=1 after the reload")

    def wait(self, timeout: float = 30) -> int:
        """As of any program; all that it has notified is known then."""
        status = super().wait(timeout)
        self.notify.settle()
        return status

    def close(self) -> None:
        super().close()
        self.notify.close()


class SimProcess(Program):
    """``hetero_agent.sim.main`` for AGENT, its device files in AGENT's simulator directory."""

    title = "sim"

    def __init__(self, agent: AgentProcess, scenario: str = "", name: str = "sim") -> None:
        super().__init__()
        self.agent = agent
        self.name = name
        self.socket = self.directory / "control.sock"
        self.scenario = self.directory / "scenario.toml"
        if scenario:
            self.scenario.write_text(scenario)

    def spawn(self) -> None:
        command = [PYTHON, "-m", "hetero_agent.sim.main"]
        command += ["--directory", str(self.agent.sim_directory), "--socket", str(self.socket)]
        command += ["--name", self.name, "--bus", self.agent.bus.address]
        if self.scenario.exists():
            command += ["--scenario", str(self.scenario)]
        self.launch(command)

    def start(self) -> SimProcess:
        """Start it and wait for its control socket."""
        self.spawn()
        wait_until(lambda: self.socket.exists() or not self.running(), what="the simulator's socket")
        assert self.running(), f"the simulator ended:\n{self.log}"
        return self
