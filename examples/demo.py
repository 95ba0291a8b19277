"""``make demo``: the agent at work, in half a minute, on a bus of its own.

Starts a private system bus, the agent with this machine's real devices, and the simulator with four
virtual ones; runs ``heteroctl`` as a person would, shows what it says, and checks that it shows what
it should.  Needs root (a spare virtual console or loop device is opened), no systemd; leaves nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hetero_agent import names
from tests.support.agent import AgentProcess, SimProcess
from tests.support.bus import PrivateBus
from tests.support.hold import HoldingProcess
from tests.support.process import PYTHON, ROOT

NPU = "example.com/npu"
CONSOLE = "example.com/console"

CONFIG = f"""
[agent]
group = "root"

[reclaim]
occupied-after = 0.5

[discovery]
udev-source = "kernel"

[providers.sim]
directory = "{{directory}}/sim"
resources = ["{NPU}"]
"""

SCENARIO = f"""
group = "root"

[[device]]
id = "npu"
resource = "{NPU}"
count = 4
model = "Virtual NPU"
memory = 17179869184
"""

PROFILE = """
schema = 1
resource = "{resource}"

[[match]]
subsystem = "{subsystem}"
names = ["{name}"]

[[nodes]]
subsystem = "{subsystem}"
pattern = "{name}"
role = "own"

[env]
DEMO_NODE = "{{node}}"
"""


class DemoError(Exception):
    """A step did not show what it should."""


def spare_device() -> tuple[str, Path]:
    """Return (subsystem, node) of a real device that can be opened and that nobody uses."""
    for subsystem, pattern in (("tty", "tty6[0-3]"), ("block", "loop[0-9]")):
        for entry in sorted(Path("/sys/class", subsystem).glob(pattern), reverse=True):
            node = Path("/dev", entry.name)
            try:
                os.close(os.open(node, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
            except OSError:
                continue
            return subsystem, node
    raise DemoError("this machine lets us open neither a virtual console (/dev/tty63) nor a loop device")


class Stage:
    """Where the demo plays: captions, commands and their output, and checks of that output."""

    def __init__(self, bus: PrivateBus, sim: SimProcess) -> None:
        self.bus = bus
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        commands = bus.directory / "bin"
        commands.mkdir()
        wrapper = commands / "heteroctl"
        wrapper.write_text(
            "#!/bin/sh\n"
            f'[ "$1" != sim ] || export HETERO_SIM_SOCKET="{sim.socket}"\n'
            f'PYTHONPATH="{ROOT}" exec {PYTHON} -m hetero_agent.cli.main "$@"\n'
        )
        wrapper.chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            names.BUS_ADDRESS_VARIABLE: bus.address,
        }

    def caption(self, text: str) -> None:
        text = "\n".join(textwrap.wrap(text, 96))
        print(f"\n\033[1m{text}\033[0m" if self.colour else f"\n{text}", flush=True)

    def run(self, command: str, *expected: str, status: int = 0, shown: bool = True) -> str:
        """Run a shell command, show it and its output; every EXPECTED pattern must be in it."""
        if shown:
            print(f"$ {command}", flush=True)
        done = subprocess.run(
            ["sh", "-c", command],
            env=self.env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
            check=False,
        )
        if shown:
            print(textwrap.indent(done.stdout.rstrip("\n"), "  "), flush=True)
        if done.returncode != status:
            raise DemoError(f"`{command}` ended with {done.returncode}, not {status}:\n{done.stdout}")
        for pattern in expected:
            if not re.search(pattern, done.stdout, re.MULTILINE):
                raise DemoError(f"`{command}` does not show {pattern!r}:\n{done.stdout}")
        return done.stdout

    def wait_state(self, device_id: str, state: str, seconds: float = 10) -> None:
        """Wait until the bus says that the device is in STATE."""
        path = names.device_path(device_id)
        ask = [
            "busctl",
            f"--address={self.bus.address}",
            "get-property",
            names.BUS_NAME,
            path,
            names.DEVICE,
            "State",
        ]
        end = time.monotonic() + seconds
        while True:
            answer = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
            if answer == f's "{state}"':
                return
            if time.monotonic() > end:
                raise DemoError(
                    f"{device_id} did not become {state} within {seconds:g} s; it is {answer or 'not there'}"
                )
            time.sleep(0.05)


def discovery(stage: Stage, console: str) -> None:
    stage.caption(
        "Discovery. The agent has looked through this machine's /sys; a profile makes the spare device"
        f" {console} one of ours; four virtual ones come from a provider, the simulator."
    )
    for one in (console, "npu-0", "npu-1", "npu-2", "npu-3"):
        stage.wait_state(one, "idle")
    stage.run("heteroctl list", rf"{console}.*idle", *(rf"npu-{n}\b.*idle" for n in range(4)))
    stage.run("heteroctl status", NPU, CONSOLE)


def lease(stage: Stage) -> None:
    stage.caption(
        "A lease with a command inside. It starts once the lease is bound to it, and the lease ends with it."
    )
    inside = "env | grep ^HETERO_; heteroctl list"
    stage.run(f"heteroctl run -r {NPU} -n 2 -- sh -c '{inside}'", r"^HETERO_LEASE", r"npu-\d.*in-use")
    for number in range(4):
        stage.wait_state(f"npu-{number}", "idle")


def real_device(stage: Stage, console: str) -> None:
    stage.caption(
        "The real device. The shell opens the node that the lease gives it: the agent sees who holds it,"
        " and takes the device back once that process has let go."
    )
    inside = f"exec 3<$DEMO_NODE; echo $$ holds $DEMO_NODE; sleep 3; heteroctl holders {console} 3<&-"
    stage.run(f"heteroctl run -r {CONSOLE} -- sh -c '{inside}'", r"^(\d+) holds /dev/", r"\bsh\b")
    stage.wait_state(console, "idle")
    stage.run(f"heteroctl show {console}", r"idle")


def stranger(stage: Stage, sim_directory: Path) -> None:
    stage.caption("A stranger opens npu-3 without a lease: it is occupied, and not granted to anyone.")
    node = next(path for path in sim_directory.rglob("npu-3*") if path.is_file())
    with HoldingProcess(node) as process:
        stage.wait_state("npu-3", "occupied")
        stage.run("heteroctl list", r"npu-3\b.*occupied")
        stage.run("heteroctl holders npu-3", rf"\b{process.pid}\b")
        stage.run(f"heteroctl explain -r {NPU} -n 4", r"npu-3\b.*occupied", status=75)
    stage.wait_state("npu-3", "idle")
    print("  (the stranger has gone; npu-3 is idle again)", flush=True)


def fault(stage: Stage) -> None:
    stage.caption("A fault and its recovery. The other devices go on.")
    stage.run("heteroctl sim fail npu-1 --reason 'double bit error'")
    stage.wait_state("npu-1", "faulty")
    stage.run("heteroctl list", r"npu-1\b.*faulty.*double bit error", r"npu-0\b.*idle")
    stage.run("heteroctl sim recover npu-1")
    stage.wait_state("npu-1", "idle")
    stage.run("heteroctl show npu-1", r"idle")


def trail(stage: Stage, agent: AgentProcess, console: str) -> None:
    stage.caption("What was it? Every device has its last transitions, and the journal has all of them.")
    stage.run(f"heteroctl history {console}", r"idle.*in-use|allocating.*in-use", r"reclaiming.*idle")
    records = [json.loads(line) for line in agent.log.splitlines() if line.startswith("{")]
    sequence = [int(one["HETERO_SEQUENCE"]) for one in records]
    if len(records) < 20 or sequence != list(range(1, len(records) + 1)):
        raise DemoError(f"the audit trail has gaps or too few lines: {sequence}")
    print("$ journalctl -u hetero-agent    # the last lines; here the agent writes them to standard error")
    for one in records[-7:]:
        print(f"  #{one['HETERO_SEQUENCE']}  {one['MESSAGE']}")
    print("$ journalctl -u hetero-agent HETERO_KIND=lease-granted -o verbose -n 1")
    granted = [one for one in records if one["HETERO_KIND"] == "lease-granted"][-1]
    for key in (
        "MESSAGE",
        "MESSAGE_ID",
        "HETERO_SEQUENCE",
        "HETERO_LEASE",
        "HETERO_ACTOR_UID",
        "HETERO_ACTOR_PID",
    ):
        print(f"  {key}={granted[key]}")


def play(stack: ExitStack) -> None:
    subsystem, node = spare_device()
    console = f"{subsystem}-{node.name}"
    bus = PrivateBus()
    stack.callback(bus.close)
    profile = PROFILE.format(resource=CONSOLE, subsystem=subsystem, name=node.name)
    agent = AgentProcess(bus, config=CONFIG, profiles={"demo.toml": profile}, sources="kernel")
    stack.callback(agent.close)
    agent.start()
    sim = SimProcess(agent, scenario=SCENARIO)
    stack.callback(sim.close)
    sim.start()
    stage = Stage(bus, sim)
    stage.caption(f"hetero-agent on a private bus, {bus.address}")
    discovery(stage, console)
    lease(stage)
    real_device(stage, console)
    stranger(stage, agent.sim_directory)
    fault(stage)
    trail(stage, agent, console)


def main(arguments: Sequence[str]) -> int:
    if arguments:
        print("usage: demo.py (no arguments)", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            print("demo: needs root; run it as root or install sudo", file=sys.stderr)
            return 1
        return subprocess.run(["sudo", PYTHON, str(Path(__file__).resolve())], check=False).returncode
    start = time.monotonic()
    try:
        with ExitStack() as stack:
            play(stack)
    except (DemoError, AssertionError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    print(f"\nThat was it, in {time.monotonic() - start:.0f} s; nothing is left running.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
