"""heteroctl run: the lease before the command, the command's environment, signals, ends of all kinds."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_agent.client import session
from tests.cli.conftest import Station
from tests.support.agent import GROUP_GID, MEMBER, AgentProcess
from tests.support.ctl import Ctl
from tests.support.process import PYTHON, ROOT, scratch
from tests.support.wait import wait_until

NPU = "example.com/npu"
SCENARIO = """
[[device]]
id = "npu"
resource = "example.com/npu"
count = 3

[[device]]
id = "fpga-0"
resource = "example.com/fpga"
"""


@pytest.fixture
def place() -> Iterator[Path]:
    path = scratch("run")
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def states(ctl: Ctl) -> dict[str, str]:
    return {one["id"]: one["state"] for one in ctl.json("list")["devices"]}


def leases(ctl: Ctl) -> list[dict[str, Any]]:
    return list(ctl.json("leases"))


def wait_idle(ctl: Ctl) -> None:
    wait_until(lambda: list(states(ctl).values()) == ["idle"] * 4, what="all devices idle again")


class Running:
    """A heteroctl run of a Python program that can be told what to do.

    The program says its pid in the file PLACE/pid once it runs; CODE is its source after that.
    """

    def __init__(self, ctl: Ctl, place: Path, code: str, *options: str, **more: Any) -> None:
        self.pid_file = place / "pid"
        program = (
            "import os, signal, sys, time\n"
            f"place = {str(place)!r}\n"
            "def write(name, text):\n"
            "    with open(place + '/new', 'w') as file: file.write(text)\n"
            "    os.rename(place + '/new', place + '/' + name)\n" + code
        )
        self.process = ctl.spawn("run", "-r", NPU, *options, "--", PYTHON, "-Sc", program, **more)
        wait_until(lambda: self.pid_file.exists() or self.process.poll() is not None, what="the command to run")
        assert self.pid_file.exists(), self.process.communicate()
        self.child = int(self.pid_file.read_text())

    def ended(self, timeout: float = 30) -> tuple[int, str]:
        """Wait for the end; return exit code and stderr."""
        _, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, err

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.process.pid, self.child):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate(timeout=60)


READY = "write('pid', str(os.getpid()))\n"
SLEEP = READY + "time.sleep(1000)\n"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- the lease and the command --------------------------------------------------------------------
def test_the_command_starts_with_the_lease_bound_to_it(ctl: Ctl, place: Path) -> None:
    code = READY + "write('lease', os.environ['HETERO_LEASE_ID'])\ntime.sleep(1000)\n"
    with Running(ctl, place, code, "-n", "2", "--client", "c", "--on-end", "kill", "--on-fault", "kill") as run:
        (lease,) = leases(ctl)
        wait_until((place / "lease").exists)
        assert (place / "lease").read_text() == lease["id"]
        (shown,) = ctl.json("show", lease["id"])
        assert (shown["state"], len(shown["devices"]), shown["client"]) == ("active", 2, "c")
        assert shown["binding"]["pid"] == run.child
        assert (shown["request"]["label"], shown["request"]["on-end"]) == ("python3", "kill")
        assert shown["request"]["on-fault"] == "kill"
        assert [states(ctl)[one] for one in shown["devices"]] == ["in-use"] * 2
    wait_idle(ctl)


def test_a_member_of_the_group_runs_as_itself(ctl: Ctl, agent: AgentProcess) -> None:
    """Its own child is the process that the lease is bound to."""
    member = Ctl(agent.bus.address, uid=MEMBER, groups=[GROUP_GID])
    assert member("run", "-r", NPU, "--", "id", "-u").out == f"{MEMBER}\n"


def test_options_choose_the_devices(ctl: Ctl) -> None:
    def devices(*options: str) -> str:
        return ctl("run", "-r", NPU, *options, "--", "sh", "-c", "echo $HETERO_DEVICES").out.strip()

    assert devices("-d", "npu-1", "--policy", "packed", "--label", "l") == "npu-1"
    assert devices("--count", "2", "-d", "npu-2", "-d", "npu-0") in ("npu-0,npu-2", "npu-2,npu-0")
    assert devices("--require", "model=Virtual accelerator") in ("npu-0", "npu-1", "npu-2")


def test_the_environment_is_the_lease_s(ctl: Ctl) -> None:
    ctl.env |= {
        "CUDA_VISIBLE_DEVICES": "7",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "ROCR_VISIBLE_DEVICES": "1",
        "ASCEND_RT_VISIBLE_DEVICES": "1",
        "HETERO_DEVICES": "stale",
        "OTHER": "ünïcode \n line",
        "EMPTY": "",
    }
    out = ctl("run", "-r", NPU, "-n", "2", "--", "env", "-0").out
    seen = dict(item.split("=", 1) for item in out.split("\0") if item)
    assert seen["HETERO_DEVICE_COUNT"] == "2"
    assert len(seen["HETERO_DEVICES"].split(",")) == 2
    assert seen["HETERO_RESOURCE"] == NPU
    assert len(seen["HETERO_LEASE_ID"]) == 32
    assert (seen["OTHER"], seen["EMPTY"]) == ("ünïcode \n line", "")
    assert not [name for name in seen if "VISIBLE_DEVICES" in name]


def test_a_large_environment_and_odd_bytes_arrive(ctl: Ctl) -> None:
    odd = os.fsdecode(b"\xff\xfe=x")
    ctl.env |= {"LARGE": "x" * 120_000, "ODD": odd}
    code = (
        "import os, sys; seen = os.environb;"
        "sys.exit(len(seen[b'LARGE']) != 120000 or seen[b'ODD'] != b'\\xff\\xfe=x')"
    )
    ctl("run", "-r", NPU, "--", PYTHON, "-c", code)


@pytest.mark.parametrize("code", [0, 1, 3, 75, 124, 255])
def test_the_command_s_exit_code_passes_through(ctl: Ctl, code: int) -> None:
    assert ctl("run", "-r", NPU, "--", "sh", "-c", f"exit {code}", code=code).err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_command_ended_by_a_signal_is_128_and_more(ctl: Ctl, number: signal.Signals) -> None:
    result = ctl("run", "-r", NPU, "--", "sh", "-c", f"kill -{number.value} $$", code=128 + number)
    assert result.err == ""
    wait_idle(ctl)


def test_a_command_that_can_not_be_executed(ctl: Ctl, place: Path) -> None:
    result = ctl("run", "-r", NPU, "--", "no-such-command-here", code=127)
    assert result.err == "heteroctl: no-such-command-here: command not found\n"
    ctl("run", "-r", NPU, "--", str(place / "none"), code=127)
    assert ctl("run", "-r", NPU, "--", "", code=127).err == "heteroctl: '': command not found\n"
    wait_idle(ctl)
    plain = place / "plain"
    plain.write_text("text")
    assert "can't be executed: Permission denied" in ctl("run", "-r", NPU, "--", str(plain), code=126).err
    assert "can't be executed" in ctl("run", "-r", NPU, "--", str(place), code=126).err
    plain.chmod(plain.stat().st_mode | stat.S_IXUSR)
    assert "can't be executed: Exec format error" in ctl("run", "-r", NPU, "--", str(plain), code=126).err
    wait_idle(ctl)


def test_options_after_the_command_are_the_command_s(ctl: Ctl) -> None:
    assert ctl("run", "-r", NPU, "--", "echo", "-n", "--json", "--", "x").out == "--json -- x"
    assert ctl("run", "-r", NPU, "echo", "-r", "x").out == "-r x\n"


def test_standard_streams_are_the_command_s(ctl: Ctl) -> None:
    process = subprocess.run(
        [*ctl.command, "run", "-r", NPU, "--", "sh", "-c", "cat; echo err >&2"],
        env=ctl.env,
        input="in\n",
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
        check=True,
    )
    assert (process.stdout, process.stderr) == ("in\n", "err\n")


def test_the_command_inherits_no_descriptor_and_no_blocked_signal(ctl: Ctl) -> None:
    code = (
        "import os, signal; fds = sorted(int(one) for one in os.listdir('/proc/self/fd'));"
        "print(fds[:-1], signal.pthread_sigmask(signal.SIG_BLOCK, []));"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('SigBlk')])"
    )
    lines = ctl("run", "-r", NPU, "--", PYTHON, "-c", code).out.splitlines()
    assert lines == ["[0, 1, 2] set()", "['0000000000000000']"]
    out = ctl("run", "-r", NPU, "--", "sh", "-c", "grep SigIgn /proc/self/status").out
    assert int(out.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


# -- signals --------------------------------------------------------------------------------------
CATCH = (
    """
got = []
def take(number, frame):
    got.append(number)
    write('got', ' '.join(map(str, got)))
    if number == signal.SIGTERM:
        sys.exit(33)
for number in (1, 2, 3, 10, 12, 15, 18, 28):
    signal.signal(number, take)
"""
    + READY
    + "while True: time.sleep(0.02)\n"
)


def test_signals_are_passed_on_once_each(ctl: Ctl, place: Path) -> None:
    with Running(ctl, place, CATCH) as run:
        sent: list[int] = []
        for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "WINCH", "CONT", "TERM"):
            number = getattr(signal, f"SIG{name}")
            sent.append(number)
            run.process.send_signal(number)
            wanted = " ".join(str(int(one)) for one in sent)
            wait_until(
                lambda wanted=wanted: (place / "got").exists() and (place / "got").read_text() == wanted,
                what=f"the command to get {wanted}",
            )
        assert run.ended() == (33, "")


#: Starts a command, and is another user's than that from then on: as with a command that became root (sudo).
LESS = """
import os
from hetero_agent.cli.command import Command
command = Command(["sh", "-c", "read line; exit 3"])
command.start({"PATH": os.environ["PATH"]})
os.setresuid(65534, 65534, 65534)
command.send(15)
print("sent", flush=True)
while command.look() is None and command.status is None:
    os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
print(command.status)
"""


def test_a_signal_that_may_not_be_passed_on_is_told() -> None:
    done = subprocess.run(
        [PYTHON, "-c", LESS], input="\n", cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "heteroctl: signal 15 was not passed on: the command is another user's\n"
    assert done.stdout == "sent\n3\n"


def test_what_the_terminal_sends_reaches_the_command_once(ctl: Ctl, place: Path) -> None:
    """On a terminal of its own: ctrl-C goes to the foreground group, in which both are."""
    master, terminal = os.openpty()
    with Running(
        ctl,
        place,
        CATCH,
        preexec_fn=_controlling(terminal),
        stdout=terminal,
        stderr=terminal,
        pass_fds=[terminal],
    ) as run:
        os.close(terminal)
        os.write(master, b"\x03")
        wait_until((place / "got").exists, what="SIGINT from the terminal")
        os.write(master, b"\x1c")
        wait_until(lambda: (place / "got").read_text() == "2 3", what="SIGQUIT from the terminal")
        time.sleep(0.2)  # a second delivery would come now
        assert (place / "got").read_text() == "2 3"
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(30) == 33
    os.close(master)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_terminal_that_is_gone_hangs_up_the_command(ctl: Ctl, place: Path, stopped: bool) -> None:
    """As when ssh loses its connection: the kernel tells the leader of the session only, which is us."""
    master, terminal = os.openpty()
    with Running(
        ctl,
        place,
        SLEEP,
        preexec_fn=_controlling(terminal),
        stdout=terminal,
        stderr=terminal,
        pass_fds=[terminal],
    ) as run:
        os.close(terminal)
        if stopped:
            os.kill(run.child, signal.SIGSTOP)
            wait_until(lambda: process_state(run.child) == "T", what="the command to stop")
        os.close(master)
        assert run.process.wait(30) == 128 + signal.SIGHUP


def _controlling(terminal: int) -> Callable[[], None]:
    """Make TERMINAL the controlling one of a new session, with a leader of its own group."""

    def prepare() -> None:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    return prepare


def test_job_control_stops_and_continues_both(ctl: Ctl, place: Path) -> None:
    with Running(ctl, place, SLEEP, process_group=0) as run:
        run.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: process_state(run.child) == "T", what="the command to stop")
        wait_until(lambda: process_state(run.process.pid) == "T", what="heteroctl to stop")
        assert os.waitid(os.P_PID, run.process.pid, os.WSTOPPED | os.WNOHANG) is not None, "the shell sees it"
        os.killpg(run.process.pid, signal.SIGCONT)
        wait_until(lambda: process_state(run.child) == "S" and process_state(run.process.pid) == "S")
        run.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: process_state(run.process.pid) == "T")
        run.process.send_signal(signal.SIGCONT)  # to heteroctl alone: passed on
        wait_until(lambda: process_state(run.child) == "S", what="the command to go on")
        os.kill(run.child, signal.SIGSTOP)  # a debugger's stop is between it and the command
        time.sleep(0.1)
        assert process_state(run.process.pid) != "T"
        os.kill(run.child, signal.SIGCONT)
        run.process.send_signal(signal.SIGTERM)
        assert run.ended() == (128 + signal.SIGTERM, "")


def test_an_ignored_signal_stays_ignored(ctl: Ctl, place: Path) -> None:
    """As nohup has it."""
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with Running(ctl, place, SLEEP, preexec_fn=ignore) as run:
        run.process.send_signal(signal.SIGHUP)
        os.kill(run.child, signal.SIGHUP)
        run.process.send_signal(signal.SIGTERM)
        assert run.ended() == (128 + signal.SIGTERM, "")


def test_a_signal_that_was_ignored_before_reaches_a_command_that_wants_it(ctl: Ctl, place: Path) -> None:
    """A background job of a script has SIGINT and SIGQUIT ignored."""

    def ignore() -> None:
        for number in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)

    with Running(ctl, place, CATCH, preexec_fn=ignore) as run:
        for name, wanted in (("INT", "2"), ("QUIT", "2 3")):
            run.process.send_signal(getattr(signal, f"SIG{name}"))
            wait_until(
                lambda wanted=wanted: (place / "got").exists() and (place / "got").read_text() == wanted,
                what=f"the command to get {wanted}",
            )
        run.process.send_signal(signal.SIGTERM)
        assert run.ended() == (33, "")


def test_an_ignored_signal_does_not_end_the_wait(ctl: Ctl) -> None:
    held = ctl.json("allocate", "-r", NPU, "-n", "3")["lease"]
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    process = ctl.spawn("run", "-r", NPU, "--wait", "100", "--", "echo", "done", preexec_fn=ignore)
    wait_until(lambda: _children(process.pid), what="the waiting child")
    process.send_signal(signal.SIGINT)
    ctl("release", held)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "done\n", "")


# -- ends -----------------------------------------------------------------------------------------
def test_a_killed_heteroctl_leaves_the_command_and_its_lease(ctl: Ctl, place: Path) -> None:
    with Running(ctl, place, SLEEP) as run:
        (lease,) = leases(ctl)
        run.process.kill()
        run.process.wait()
        time.sleep(0.2)
        assert alive(run.child)
        assert [(one["id"], one["state"]) for one in leases(ctl)] == [(lease["id"], "active")]
        os.kill(run.child, signal.SIGKILL)
        wait_until(lambda: leases(ctl) == [], what="the lease to end with the command")
    wait_idle(ctl)


def test_a_heteroctl_killed_before_the_command_runs_leaves_nothing(ctl: Ctl) -> None:
    held = ctl.json("allocate", "-r", NPU, "-n", "3")["lease"]
    process = ctl.spawn("run", "-r", NPU, "--wait", "100", "--", "sleep", "1000")
    wait_until(lambda: _children(process.pid), what="the waiting child")
    (child,) = _children(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not alive(child), what="the child to notice")
    assert [one["id"] for one in leases(ctl)] == [held]


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_waiting_ends_the_wait(ctl: Ctl, number: signal.Signals) -> None:
    ctl("allocate", "-r", NPU, "-n", "3")
    process = ctl.spawn("run", "-r", NPU, "--wait", "100", "--", "sleep", "1000")
    wait_until(lambda: _children(process.pid), what="the waiting child")
    (child,) = _children(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, "")
    assert not alive(child)


def test_waiting_gets_what_becomes_free(ctl: Ctl) -> None:
    held = ctl.json("allocate", "-r", NPU, "-n", "3")["lease"]
    process = ctl.spawn(
        "run", "-r", NPU, "-n", "2", "--wait", "60", "--", "sh", "-c", "echo $HETERO_DEVICE_COUNT"
    )
    wait_until(lambda: _children(process.pid), what="the waiting child")
    ctl("release", held)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "2\n", "")


def test_waiting_in_vain_is_124_and_not_waiting_75(ctl: Ctl) -> None:
    held = ctl.json("allocate", "-r", NPU, "-n", "3")["lease"]
    result = ctl("run", "-r", NPU, "--", "true", code=75)
    assert f"lease {held[:8]} of uid 0" in result.err
    began = time.monotonic()
    result = ctl("run", "-r", NPU, "--wait", "0.5", "--", "true", code=124)
    assert 0.5 <= time.monotonic() - began < 60
    assert result.err.startswith("heteroctl: waited 0.5 s in vain: ")
    assert f"lease {held[:8]} of uid 0" in result.err


def test_a_lease_that_ends_under_the_command_is_79(ctl: Ctl, place: Path) -> None:
    code = READY + "while not os.path.exists(place + '/go'): time.sleep(0.01)\n"
    with Running(ctl, place, code) as run:
        (lease,) = leases(ctl)
        ctl("release", lease["id"])
        assert run.process.stderr is not None
        said = run.process.stderr.readline()
        assert said == f"heteroctl: the lease {lease['id'][:8]} ended: released\n"
        assert alive(run.child), "it is told, not ended"
        (place / "go").touch()
        status, err = run.ended()
    assert status == 79
    assert err == "heteroctl: the lease ended (released) while the command ran; it ended with 0\n"


def test_a_fault_that_kills_is_79(ctl: Ctl, place: Path) -> None:
    """on-fault=kill: the lease fails, and its processes that hold the device are ended."""
    code = "fd = os.open(os.environ['NODE'], os.O_RDONLY)\n" + SLEEP
    (shown,) = ctl.json("show", "npu-0")
    ctl.env["NODE"] = shown["nodes"][0]["path"]
    with Running(ctl, place, code, "-d", "npu-0", "--on-fault", "kill", "--on-end", "kill") as run:
        ctl("sim", "fail", "npu-0", "--reason", "too-hot")
        status, err = run.ended()
    assert status == 79
    assert "ended: failed" in err
    assert "device npu-0 is unhealthy: too-hot" in err


def test_a_fault_that_marks_is_told_and_no_end(ctl: Ctl, place: Path) -> None:
    code = READY + "while not os.path.exists(place + '/go'): time.sleep(0.01)\n"
    with Running(ctl, place, code, "-d", "npu-0") as run:
        ctl("sim", "fail", "npu-0", "--reason", "hot")
        assert run.process.stderr is not None
        assert run.process.stderr.readline() == "heteroctl: device npu-0 is unhealthy: hot\n"
        (place / "go").touch()
        assert run.ended() == (0, "")


@pytest.mark.parametrize(("status", "code"), [(0, 0), (5, 79)])
def test_an_unplugged_device_is_told(ctl: Ctl, place: Path, status: int, code: int) -> None:
    """79 if the command failed; one that could do without the device decides itself."""
    source = READY + f"while not os.path.exists(place + '/go'): time.sleep(0.01)\nsys.exit({status})\n"
    with Running(ctl, place, source, "-d", "npu-0") as run:
        ctl("sim", "remove", "npu-0")
        assert run.process.stderr is not None
        said = run.process.stderr.readline()
        assert said == "heteroctl: device npu-0 was unplugged or lost its driver\n"
        (place / "go").touch()
        assert run.ended()[0] == code


def test_the_agent_may_restart_meanwhile(own: Station, place: Path) -> None:
    ctl, agent = own.ctl(), own.agent
    code = READY + "while not os.path.exists(place + '/go'): time.sleep(0.01)\nsys.exit(7)\n"
    with Running(ctl, place, code) as run:
        (lease,) = leases(ctl)
        agent.kill9()
        agent.start()
        wait_until(
            lambda: [one["id"] for one in leases(ctl)] == [lease["id"]], what="the lease to be known again"
        )
        (place / "go").touch()
        assert run.ended() == (7, "")


def test_the_agent_may_be_gone_when_the_command_ends(own: Station, place: Path) -> None:
    ctl, agent = own.ctl(), own.agent
    code = READY + "while not os.path.exists(place + '/go'): time.sleep(0.01)\nsys.exit(7)\n"
    with Running(ctl, place, code) as run:
        agent.terminate()
        (place / "go").touch()
        began = time.monotonic()
        assert run.ended() == (7, "")
        # it doesn't wait for the agent to come back, as a call does
        assert time.monotonic() - began < session.PATIENCE


# -- run inside run -------------------------------------------------------------------------------
def test_a_run_inside_a_lease_uses_it(ctl: Ctl) -> None:
    heteroctl = " ".join(ctl.command)
    script = (
        f'{heteroctl} run -r {NPU} -n 1 -- sh -c "echo \\$HETERO_LEASE_ID \\$HETERO_DEVICE_COUNT";'
        "echo $HETERO_LEASE_ID $HETERO_DEVICE_COUNT;"
        f"{heteroctl} leases --json | grep -o '\"id\"' | wc -l"
    )
    inner, outer, count = ctl("run", "-r", NPU, "-n", "2", "--", "sh", "-c", script).out.splitlines()
    assert inner == outer
    assert outer.endswith(" 2")
    assert count.strip() == "1"


@pytest.mark.parametrize(
    "options",
    [
        ["-r", "example.com/fpga"],
        ["-r", NPU, "-n", "2"],
        ["-r", NPU, "-d", "npu-2"],
        ["-r", NPU, "--policy", "packed"],
    ],
    ids=" ".join,
)
def test_a_run_inside_a_lease_that_does_not_fit_leases_anew(ctl: Ctl, options: list[str]) -> None:
    heteroctl = " ".join(ctl.command)
    inside = f'{heteroctl} run {" ".join(options)} -- sh -c "echo \\$HETERO_LEASE_ID"; echo $HETERO_LEASE_ID'
    inner, outer = ctl("run", "-r", NPU, "-d", "npu-0", "--", "sh", "-c", inside).out.splitlines()
    assert inner != outer
    assert len(inner) == 32


def test_a_stale_lease_in_the_environment_is_no_lease(ctl: Ctl) -> None:
    for stale in ("0" * 32, "nonsense", "/org/heteroagent/Agent1/leases/l" + "0" * 32):
        ctl.env["HETERO_LEASE_ID"] = stale
        out = ctl("run", "-r", NPU, "--", "sh", "-c", "echo $HETERO_LEASE_ID").out.strip()
        assert len(out) == 32
        assert out != stale


def test_the_lease_of_an_outer_run_may_end_under_the_inner_one(ctl: Ctl, place: Path) -> None:
    granted = ctl.json("allocate", "-r", NPU, "--confirm")["lease"]
    ctl.env["HETERO_LEASE_ID"] = granted
    code = READY + "while not os.path.exists(place + '/go'): time.sleep(0.01)\n"
    with Running(ctl, place, code) as run:
        assert [one["id"] for one in leases(ctl)] == [granted]
        ctl("release", granted)
        assert run.process.stderr is not None
        assert f"the lease {granted[:8]} ended: released" in run.process.stderr.readline()
        (place / "go").touch()
        assert run.ended()[0] == 79
