"""What units get of a lease: exactly its devices, by the kernel's word; over restarts of all kinds."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from hetero_agent import names
from tests.support.process import PYTHON
from tests.system.accelerators import RESOURCE, Accelerator, Accelerators
from tests.system.agent import Agent
from tests.system.machine import Machine

# Says in the file that is its first argument what it is and which of the nodes that are the others it may
# open: at once, and again for each SIGUSR1.  With --once in their place it ends after that.
_PROBE = """
import errno, grp, json, os, signal, sys
place, *nodes = sys.argv[1:]

def look(*_):
    found = {"env": dict(os.environ), "uid": os.getuid(), "groups": os.getgroups(), "nodes": {}}
    for node in nodes:
        try:
            os.close(os.open(node, os.O_RDWR | os.O_NOCTTY))
            found["nodes"][node] = "ok"
        except OSError as error:
            found["nodes"][node] = errno.errorcode[error.errno]
    with open(place + ".new", "w") as file:
        json.dump(found, file)
    os.rename(place + ".new", place)

signal.signal(signal.SIGUSR1, look)
look()
while os.environ.get("PROBE") != "once":
    signal.pause()
"""

UNITS = "/run/systemd/system"


class Person(NamedTuple):
    name: str
    uid: int


@pytest.fixture(scope="module")
def alice(machine: Machine) -> Person:
    """A user who may lease."""
    machine.shell("useradd -m -G hetero,render alice")
    return Person("alice", int(machine.shell("id -u alice")))


@pytest.fixture(scope="module", autouse=True)
def _tools(machine: Machine) -> None:
    machine.write("/run/probe.py", _PROBE)
    machine.shell("install -d -m 1777 /run/probe")


@pytest.fixture
def two(agent: Agent, hardware: Accelerators) -> Iterator[tuple[Accelerator, Accelerator]]:
    """Two idle accelerators."""
    one, other = hardware.plug(2)
    agent.wait_states({one.id: "idle", other.id: "idle"})
    yield one, other
    agent.machine.shell(
        "systemctl stop 'hetero-*@*' 'hetero-[0-9a-f]*.service' 'lab-*'; systemctl reset-failed;"
        f"rm -rf {UNITS}/lab-* /run/systemd/system.control/lab-* /run/probe/* /etc/hetero-agent/leases/*;"
        "systemctl daemon-reload"
    )


class Probe:
    """The probe of a unit, which reports in a file named NAME."""

    def __init__(self, machine: Machine, name: str, *devices: Accelerator) -> None:
        self.machine = machine
        self.place = f"/run/probe/{name}"
        self.devices = devices
        self.command = [PYTHON, "-IS", "/run/probe.py", self.place, *(one.node for one in devices)]

    @property
    def line(self) -> str:
        return shlex.join(self.command)

    def report(self, what: str = "the probe's report") -> dict[str, Any]:
        path = self.machine.path(self.place)
        self.machine.wait(path.exists, 20, what)
        found: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return found

    def again(self, unit: str) -> dict[str, Any]:
        self.machine.run("systemctl", "kill", "--kill-who=main", "--signal=USR1", unit)
        return self.report("another report of the probe")

    def opens(self, found: dict[str, Any]) -> list[str]:
        """What the kernel says to opening each device's node, in their order."""
        return [found["nodes"][one.node] for one in self.devices]


def binding(agent: Agent, lease: str) -> dict[str, Any]:
    found = agent.call(lease, names.LEASE, "GetBinding")
    return {key: value["data"] for key, value in found.items()}


def service(machine: Machine, name: str, *lines: str) -> str:
    """Put a service's file there; return its full name."""
    machine.write(f"{UNITS}/{name}.service", "\n".join(["[Service]", *lines, ""]))
    machine.run("systemctl", "daemon-reload")
    return f"{name}.service"


def attaching(*options: str) -> list[str]:
    words = ["heteroctl", "attach", "--unit", "%n", "-r", RESOURCE, "--env-file", "/run/hetero-lease/%n.env"]
    return [
        f"ExecStartPre=+/usr/bin/{' '.join([*words, *options])}",
        "EnvironmentFile=-/run/hetero-lease/%n.env",
    ]


def rules(machine: Machine, unit: str) -> set[str]:
    """What the unit may use, by the service manager."""
    shown = machine.run("systemctl", "show", unit, "--property=DevicePolicy,DeviceAllow").stdout
    return set(shown.split("\n")) - {""}


# -- heteroctl run --unit ---------------------------------------------------------------------------
def test_a_command_as_a_unit(machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]) -> None:
    one, other = two
    probe = Probe(machine, "run", one, other)
    done = machine.run(
        "heteroctl", "run", "--unit", "lab-run", "-r", RESOURCE, "-d", one.id, "-E", "PROBE=once",
        "--", *probe.command,
    )  # fmt: skip
    assert done.stderr == ""
    found = probe.report()
    assert probe.opens(found) == ["ok", "EPERM"]
    assert found["env"]["HETERO_DEVICES"] == one.id
    assert found["uid"] == 0
    agent.wait_states({one.id: "idle", other.id: "idle"})
    (granted,) = agent.audit("HETERO_KIND=lease-granted")[-1:]
    (ended,) = agent.audit("HETERO_KIND=lease-ended")[-1:]
    assert (ended["HETERO_TRIGGER"], ended["HETERO_REASON"]) == ("owner-gone", "its unit ended")
    assert granted["HETERO_LEASE"] == ended["HETERO_LEASE"]
    assert "lab-run" not in machine.run("systemctl", "list-units", "--all", "lab-run.service").stdout


def test_streams_arguments_directory_and_exit_codes(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    run = ["heteroctl", "run", "--unit", "-r", RESOURCE, "--"]
    odd = ["$HOME", "%n", "a b", 'c"d', "e\\f", ";", "", "$$", "${X}"]
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), sys.stdin.read()]))"
    shown = machine.run("env", "-C", "/var/tmp", *run, PYTHON, "-Ic", code, *odd, stdin="in")
    assert json.loads(shown.stdout) == [odd, "/var/tmp", "in"]
    assert machine.run(*run, "sh", "-c", "echo err >&2; exit 7", check=False).returncode == 7
    assert machine.run(*run, "sh", "-c", "kill -TERM $$", check=False).returncode == 128 + signal.SIGTERM
    assert machine.run(*run, "sh", "-c", "kill -KILL $$", check=False).returncode == 128 + signal.SIGKILL
    missing = machine.run(*run, "no-such-command", check=False)
    assert (missing.returncode, missing.stderr) == (127, "heteroctl: no-such-command: command not found\n")
    machine.write("/var/tmp/plain", "text", mode=0o755)
    plain = machine.run(*run, "/var/tmp/plain", check=False)
    assert plain.returncode == 126, plain.stderr
    assert "can't be executed" in plain.stderr
    machine.wait(lambda: set(agent.states().values()) == {"idle"}, 10, "all devices idle")
    assert (
        machine.run(
            "systemctl", "list-units", "--all", "--plain", "--no-legend", "hetero-????????.service"
        ).stdout
        == ""
    )


def test_signals_reach_the_unit(machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]) -> None:
    script = 'trap "echo got; exit 33" USR1; echo up; while :; do sleep 0.05; done'
    with machine.start(
        "heteroctl", "run", "--unit", "lab-signal", "-r", RESOURCE, "--", "sh", "-c", script
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n"
        machine.run("pkill", "-USR1", "-f", "heteroctl run --unit lab-signal")
        assert run.communicate(timeout=20)[0] == "got\n"
        assert run.returncode == 33


def test_the_unit_has_the_lease_before_its_command_runs_and_whatever_becomes_of_heteroctl(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    one, other = two
    unit = "lab-window.service"
    # beside what heteroctl gives the unit: it stays before its command for as long as we like
    machine.write(
        f"{UNITS}/{unit}.d/held.conf",
        "[Service]\nExecStartPre=sh -c 'until test -e /run/probe/go; do sleep 0.05; done'\n",
    )
    machine.run("systemctl", "daemon-reload")
    probe = Probe(machine, "window", one, other)
    words = ["heteroctl", "run", "--unit", unit, "-r", RESOURCE, "-d", one.id, "--", *probe.command]
    with machine.start(*words) as run:
        machine.wait(
            lambda: [binding(agent, lease).get("unit") for lease in agent.leases()] == [unit],
            20,
            "a lease of the unit",
        )
        (lease,) = agent.leases()
        assert binding(agent, lease) == {"unit": unit, "invocation": agent.unit("InvocationID", unit)}
        assert agent.unit("ActiveState", unit) == "activating"
        assert agent.leases()[lease]["State"] == "active"
        machine.run("pkill", "-KILL", "-f", "heteroctl run --unit lab-window")
        run.wait(20)
        machine.write("/run/probe/go", "")
        assert probe.opens(probe.report()) == ["ok", "EPERM"]
        assert list(agent.leases()) == [lease]
        agent.systemctl("stop", unit)
    agent.wait_states({one.id: "idle", other.id: "idle"})


def test_what_does_not_start_leaves_nothing(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    one, other = two
    unit = "lab-fails.service"
    machine.write(f"{UNITS}/{unit}.d/fails.conf", "[Service]\nExecStartPre=false\n")
    machine.run("systemctl", "daemon-reload")
    done = machine.run("heteroctl", "run", "--unit", unit, "-r", RESOURCE, "--", "true", check=False)
    assert done.returncode == 125
    assert f"unit {unit} did not start" in done.stderr
    agent.wait_states({one.id: "idle", other.id: "idle"})
    # one that is there already
    machine.run("systemd-run", "--quiet", "--unit=lab-there", "sleep", "1000")
    done = machine.run("heteroctl", "run", "--unit", "lab-there", "-r", RESOURCE, "--", "true", check=False)
    assert (done.returncode, "give --unit another name" in done.stderr) == (125, True)
    # the lease is not to be had
    done = machine.run("heteroctl", "run", "--unit", "-n", "3", "-r", RESOURCE, "--", "true", check=False)
    assert done.returncode == 78
    agent.wait_states({one.id: "idle", other.id: "idle"})
    assert agent.leases() == {}


def test_for_another_user(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    one, other = two
    probe = Probe(machine, "uid", one, other)
    words = ["heteroctl", "run", "--unit", "lab-uid", "--uid", "alice", "-r", RESOURCE, "-d", one.id]
    machine.run("env", "-C", "/", *words, "-E", "PROBE=once", "--", *probe.command)
    found = probe.report()
    assert (found["uid"], found["env"]["HOME"]) == (alice.uid, "/home/alice")
    assert probe.opens(found) == ["ok", "EPERM"]


def test_a_plain_user_needs_the_managers_right(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    groups = [int(one) for one in machine.shell("id -G alice").split()]
    words = ["env", "-C", "/", "heteroctl", "run", "--unit", "lab-plain", "-r", RESOURCE, "--", "id", "-u"]
    done = machine.run(*words, uid=alice.uid, groups=groups, check=False)
    assert done.returncode == 77
    assert "the service manager does not let you" in done.stderr
    assert "org.freedesktop.systemd1.manage-units" in done.stderr
    machine.wait(lambda: set(agent.states().values()) == {"idle"}, 10, "all devices idle")
    rule = (
        'polkit.addRule(function(a, s) { if (a.id == "org.freedesktop.systemd1.manage-units") return "yes"; });'
    )
    machine.write("/etc/polkit-1/rules.d/10-lab.rules", rule)
    try:
        machine.wait(
            lambda: machine.run(*words, uid=alice.uid, groups=groups, check=False).stdout == f"{alice.uid}\n",
            20,
            "polkit's new rule",
        )
    finally:
        machine.shell("rm /etc/polkit-1/rules.d/10-lab.rules")


# -- heteroctl attach ---------------------------------------------------------------------------------
def test_a_service_of_the_administrators(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    one, other = two
    probe = Probe(machine, "service", one, other)
    unit = service(
        machine, "lab-service", "User=alice", "DeviceAllow=/dev/kmsg r", *attaching("-d", one.id),
        f"ExecStart={probe.line}",
    )  # fmt: skip
    agent.systemctl("start", unit)
    found = probe.report()
    assert probe.opens(found) == ["ok", "EPERM"]
    assert (found["uid"], found["env"]["HETERO_DEVICES"]) == (alice.uid, one.id)
    (lease,) = agent.leases()
    assert agent.leases()[lease]["OwnerUid"] == alice.uid
    assert binding(agent, lease) == {"unit": unit, "invocation": agent.unit("InvocationID", unit)}
    assert found["env"]["HETERO_LEASE_ID"] in lease
    assert machine.path(f"/run/hetero-lease/{unit}.env").stat().st_mode & 0o777 == 0o600
    wanted = {"DevicePolicy=closed", f"DeviceAllow={one.node} rw", "DeviceAllow=/dev/kmsg r"}
    assert rules(machine, unit) == wanted
    for verb in ("daemon-reload", "daemon-reexec"):
        agent.systemctl(verb)
        assert probe.opens(probe.again(unit)) == ["ok", "EPERM"], verb
        assert rules(machine, unit) == wanted
        assert list(agent.leases()) == [lease]
    agent.systemctl("stop", unit)
    agent.wait_states({one.id: "idle", other.id: "idle"})


def test_each_run_has_a_lease_of_its_own(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    one, other = two
    probe = Probe(machine, "runs", one, other)
    unit = service(
        machine,
        "lab-runs",
        "Restart=always",
        "RestartSec=0",
        *attaching("--wait", "20"),
        f"ExecStart={probe.line}",
    )
    agent.heteroctl("cordon", other.id)
    agent.systemctl("start", unit)
    assert probe.opens(probe.report()) == ["ok", "EPERM"]
    (first,) = agent.leases()
    # killed: the same device, once it has come back
    machine.run("systemctl", "kill", "--signal=KILL", unit)
    assert probe.opens(probe.report()) == ["ok", "EPERM"]
    machine.wait(lambda: len(agent.leases()) == 1, 10, "one lease")
    (second,) = agent.leases()
    assert second != first
    # restarted while only the other is free: what the last run had is not allowed any more
    agent.heteroctl("cordon", one.id)
    agent.heteroctl("uncordon", other.id)
    agent.systemctl("restart", unit)
    found = probe.report()
    assert probe.opens(found) == ["EPERM", "ok"]
    assert found["env"]["HETERO_DEVICES"] == other.id
    assert rules(machine, unit) == {"DevicePolicy=closed", f"DeviceAllow={other.node} rw"}
    agent.heteroctl("uncordon", one.id)
    agent.systemctl("stop", unit)
    agent.wait_states({one.id: "idle", other.id: "idle"})


def test_a_service_without_devices_fails_and_says_why(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    held = agent.allocate(RESOURCE, 2)
    unit = service(machine, "lab-none", *attaching("--wait", "0.5"), "ExecStart=sleep 1000")
    assert machine.run("systemctl", "start", unit, check=False).returncode != 0
    said = machine.run("journalctl", "--sync", check=False)
    said = machine.run("journalctl", "--output=cat", f"_SYSTEMD_UNIT={unit}")
    assert "waited 0.5 s in vain" in said.stdout
    assert list(agent.leases()) == [held]
    assert not machine.path(f"/run/hetero-lease/{unit}.env").exists()
    agent.release(held)


def test_who_may_not_attach(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    unit = service(
        machine,
        "lab-may",
        "User=alice",
        f"ExecStartPre=/usr/bin/heteroctl attach --unit %n -r {RESOURCE}",
        "ExecStart=true",
    )
    assert machine.run("systemctl", "start", unit, check=False).returncode != 0
    hidden = service(machine, "lab-hidden", "PrivateDevices=yes", *attaching(), "ExecStart=true")
    assert machine.run("systemctl", "start", hidden, check=False).returncode != 0
    machine.run("journalctl", "--sync")
    assert (
        "only root may lease for a unit"
        in machine.run("journalctl", "-o", "cat", f"_SYSTEMD_UNIT={unit}").stdout
    )
    assert "PrivateDevices=yes" in machine.run("journalctl", "-o", "cat", f"_SYSTEMD_UNIT={hidden}").stdout
    assert agent.leases() == {}
    # a user's own service manager
    machine.run("loginctl", "enable-linger", "alice")
    machine.wait(
        lambda: agent.unit("ActiveState", f"user@{alice.uid}.service") == "active", 20, "alice's manager"
    )
    done = machine.run(
        "systemd-run", "--user", "--quiet", "--unit=lab-user", "--service-type=oneshot",
        "--property=StandardError=file:/run/probe/said",
        "heteroctl", "attach", "--unit", "lab-user.service", "-r", RESOURCE,
        uid=alice.uid, check=False, env={"XDG_RUNTIME_DIR": f"/run/user/{alice.uid}"},
    )  # fmt: skip
    machine.run("loginctl", "disable-linger", "alice")
    assert done.returncode != 0
    assert "unit of a user's service manager" in machine.read("/run/probe/said")
