"""What units get of a lease: exactly its devices, by the kernel's word; over restarts of all kinds."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from hetero_agent import names
from hetero_agent.cli import forms
from hetero_agent.client import Manifest
from tests.support.process import PYTHON, ROOT
from tests.support.terminal import OnTerminal
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
        self.machine.wait(path.exists, 30, what)
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
    machine.wait(lambda: set(agent.states().values()) == {"idle"}, 30, "all devices idle")
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
        assert run.communicate(timeout=60)[0] == "got\n"
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
            30,
            "a lease of the unit",
        )
        (lease,) = agent.leases()
        assert binding(agent, lease) == {"unit": unit, "invocation": agent.unit("InvocationID", unit)}
        assert agent.unit("ActiveState", unit) == "activating"
        assert agent.leases()[lease]["State"] == "active"
        machine.run("pkill", "-KILL", "-f", "heteroctl run --unit lab-window")
        run.wait(30)
        machine.write("/run/probe/go", "")
        assert probe.opens(probe.report()) == ["ok", "EPERM"]
        assert list(agent.leases()) == [lease]
        agent.systemctl("stop", unit)
    agent.wait_states({one.id: "idle", other.id: "idle"})


def test_the_service_manager_and_the_agent_may_restart_meanwhile(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    script = "echo up; until test -e /run/probe/end; do sleep 0.05; done; exit 5"
    words = ["heteroctl", "run", "--unit", "lab-lasts", "-r", RESOURCE, "--", "sh", "-c", script]
    with machine.start(*words) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n"
        agent.systemctl("daemon-reexec")
        pid = agent.pid
        machine.run("kill", "-KILL", str(pid))
        machine.wait(lambda: agent.restarted_since(pid), 30, "another agent")
        assert agent.unit("ActiveState", "lab-lasts.service") == "active"
        machine.write("/run/probe/end", "")
        assert run.communicate(timeout=60) == ("", None)
        assert run.returncode == 5


def test_a_lease_that_ends_under_the_command_is_told(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    script = "echo up; until test -e /run/probe/end; do sleep 0.05; done"
    words = ["heteroctl", "run", "--unit", "lab-told", "-r", RESOURCE, "--", "sh", "-c", script]
    with machine.start(*words) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n"
        (lease,) = agent.leases()
        agent.release(lease)
        assert run.stdout.readline().endswith("ended: released\n")
        machine.write("/run/probe/end", "")
        run.communicate(timeout=60)
        assert run.returncode == 79


def test_what_does_not_start_leaves_nothing(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    one, other = two
    unit = "lab-fails.service"
    machine.write(f"{UNITS}/{unit}.d/fails.conf", "[Service]\nExecStartPre=false\n")
    machine.run("systemctl", "daemon-reload")
    done = machine.run("heteroctl", "run", "--unit", unit, "-r", RESOURCE, "--", "true", check=False)
    assert done.returncode == 125
    assert f"unit {unit} did not start: its start was failed" in done.stderr
    agent.wait_states({one.id: "idle", other.id: "idle"})
    # one that is there already
    machine.run("systemd-run", "--quiet", "--unit=lab-there", "sleep", "1000")
    done = machine.run("heteroctl", "run", "--unit", "lab-there", "-r", RESOURCE, "--", "true", check=False)
    assert (done.returncode, "give --unit another name" in done.stderr) == (125, True)
    # a directory that its user can't enter
    words = ["heteroctl", "run", "--unit", "--uid", "nobody", "-r", RESOURCE, "--", "true"]
    done = machine.run("env", "-C", "/root", *words, check=False)
    assert (done.returncode, "CHDIR: its user can't enter this directory" in done.stderr) == (125, True)
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
    machine.wait(lambda: set(agent.states().values()) == {"idle"}, 30, "all devices idle")
    rule = (
        'polkit.addRule(function(a, s) { if (a.id == "org.freedesktop.systemd1.manage-units") return "yes"; });'
    )
    machine.write("/etc/polkit-1/rules.d/10-lab.rules", rule)
    try:
        machine.wait(
            lambda: machine.run(*words, uid=alice.uid, groups=groups, check=False).stdout == f"{alice.uid}\n",
            30,
            "polkit's new rule",
        )
    finally:
        machine.shell("rm /etc/polkit-1/rules.d/10-lab.rules")


def test_on_a_terminal(machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]) -> None:
    script = 'trap "echo got; exit 9" INT; read word; echo "read $word"; while :; do sleep 0.05; done'
    command = ["heteroctl", "run", "--unit", "lab-tty", "-r", RESOURCE, "--", "sh", "-c", script]
    # on a terminal of the machine's own: what is between us and it would be ended by ctrl-C itself
    words = ["script", "--quiet", "--return", "--command", f"exec {shlex.join(command)}", "/dev/null"]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
    with OnTerminal(machine.command(*words), environment) as terminal:
        machine.wait(lambda: agent.unit("ActiveState", "lab-tty.service") == "active", 30, "the unit")
        terminal.type("a word\n")
        terminal.shows("read a word")
        # ctrl-C: to all processes of the unit, none of which is of the terminal's group
        terminal.type("\x03")
        code, shown = terminal.wait()
    assert (code, "got" in shown) == (9, True), shown
    machine.wait(lambda: set(agent.states().values()) == {"idle"}, 30, "all devices idle")


def test_a_password_for_it_on_the_terminal(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    machine.shell("id dora >/dev/null 2>&1 || useradd -m -G sudo dora; echo dora:open-sesame | chpasswd")
    groups = machine.shell("id -G alice").strip().replace(" ", ",")
    words = [
        "setpriv", f"--reuid={alice.uid}", f"--regid={alice.uid}", f"--groups={groups}", "env", "-C", "/",
        "heteroctl", "run", "--unit", "lab-asks", "-r", RESOURCE, "--", "sh", "-c", "echo as $(id -un)",
    ]  # fmt: skip
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
    with OnTerminal(machine.command(*words), environment) as terminal:
        shown = terminal.shows("Password:")
        assert "manage-units" in shown
        terminal.type("open-sesame\n")
        code, shown = terminal.wait()
    assert code == 0, shown
    assert "as alice" in shown
    # nobody answers, and it is given up
    with OnTerminal(machine.command(*words), environment) as terminal:
        terminal.shows("Password:")
        terminal.type("\x03")
        machine.wait(lambda: set(agent.states().values()) == {"idle"}, 30, "all devices idle")


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
    assert agent.unit("NeedDaemonReload", unit) == "no"
    for verb in ("daemon-reload", "daemon-reexec"):
        agent.systemctl(verb)
        assert probe.opens(probe.again(unit)) == ["ok", "EPERM"], verb
        assert rules(machine, unit) == wanted
        assert list(agent.leases()) == [lease]
    agent.systemctl("stop", unit)
    agent.wait_states({one.id: "idle", other.id: "idle"})


def test_users_that_come_with_the_service(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    one, other = two
    probe = Probe(machine, "dynamic", one, other)
    unit = service(
        machine, "lab-dynamic", "DynamicUser=yes", "ReadWritePaths=/run/probe", *attaching("-d", one.id),
        f"ExecStart={probe.line}",
    )  # fmt: skip
    agent.systemctl("start", unit)
    found = probe.report()
    (lease,) = agent.leases().values()
    assert lease["OwnerUid"] == found["uid"] != 0
    assert probe.opens(found) == ["ok", "EACCES"]  # not of the group either
    agent.systemctl("stop", unit)


def test_a_lease_that_is_none_any_more_is_not_allowed(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    unit = service(
        machine, "lab-ended", "ExecStartPre=+heteroctl attach --unit %n --lease ${GIVEN}", "ExecStart=true"
    )
    machine.write(f"{UNITS}/{unit}.d/given.conf", f"[Service]\nEnvironment=GIVEN={'ab' * 16}\n")
    machine.run("systemctl", "daemon-reload")
    assert machine.run("systemctl", "start", unit, check=False).returncode != 0
    assert rules(machine, unit) == {"DevicePolicy=auto"}


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
        *attaching("--wait", "60"),
        f"ExecStart={probe.line}",
    )
    agent.heteroctl("cordon", other.id)
    agent.systemctl("start", unit)
    assert probe.opens(probe.report()) == ["ok", "EPERM"]
    (first,) = agent.leases()
    # killed: the same device, once it has come back
    machine.run("systemctl", "kill", "--signal=KILL", unit)
    assert probe.opens(probe.report()) == ["ok", "EPERM"]
    machine.wait(lambda: len(agent.leases()) == 1, 30, "one lease")
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


def test_while_it_waits_to_be_restarted_it_has_none(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    one, other = two
    probe = Probe(machine, "waits", one, other)
    unit = service(
        machine,
        "lab-waits",
        "Restart=always",
        "RestartSec=1h",
        *attaching("-d", one.id),
        f"ExecStart={probe.line}",
    )
    agent.systemctl("start", unit)
    probe.report()
    machine.run("systemctl", "kill", "--signal=KILL", unit)
    agent.wait_states({one.id: "idle", other.id: "idle"})
    machine.wait(lambda: agent.unit("SubState", unit) == "auto-restart", 30, "a unit that waits")
    assert agent.leases() == {}


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
        lambda: agent.unit("ActiveState", f"user@{alice.uid}.service") == "active", 30, "alice's manager"
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


# -- hetero-lease@.service ------------------------------------------------------------------------------
def test_a_lease_that_a_unit_holds_for_others(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    one, other = two
    holder = "hetero-lease@lab.service"
    settings = f"RESOURCE={RESOURCE}\nOPTIONS=--owner alice --device {one.id} --label 'two words'\n"
    machine.write("/etc/hetero-agent/leases/lab.conf", settings)
    probe = Probe(machine, "holds", one, other)
    unit = service(
        machine, "lab-holds", "User=alice", "EnvironmentFile=/run/hetero-lease/lab.env",
        "ExecStartPre=+/usr/bin/heteroctl attach --unit %n --lease ${HETERO_LEASE_ID}",
        f"ExecStart={probe.line}",
    )  # fmt: skip
    machine.write(f"{UNITS}/{unit}.d/needs.conf", f"[Unit]\nBindsTo={holder}\nAfter={holder}\n")
    machine.run("systemctl", "daemon-reload")
    agent.systemctl("start", unit)
    found = probe.report()
    assert probe.opens(found) == ["ok", "EPERM"]
    (lease,) = agent.leases()
    assert (agent.leases()[lease]["OwnerUid"], agent.leases()[lease]["State"]) == (alice.uid, "active")
    assert found["env"]["HETERO_LEASE_ID"] in lease
    assert set(binding(agent, lease)) == {"connection"}
    assert agent.call(lease, names.LEASE, "GetRequest")["label"]["data"] == "two words"
    # with who holds it go those who use it, and its variables
    agent.systemctl("stop", holder)
    agent.wait_states({one.id: "idle", other.id: "idle"})
    assert agent.unit("ActiveState", unit) == "inactive"
    assert not machine.path("/run/hetero-lease/lab.env").exists()
    (ended,) = agent.audit("HETERO_KIND=lease-ended")[-1:]
    assert ended["HETERO_TRIGGER"] == "release"


def test_it_ends_with_the_lease_and_with_its_process(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    one, other = two
    holder = "hetero-lease@lab.service"
    machine.write("/etc/hetero-agent/leases/lab.conf", f"RESOURCE={RESOURCE}\nCOUNT=2\nWAIT=0\n")
    agent.systemctl("start", holder)
    assert "Lease" in agent.unit("StatusText", holder)
    # nothing left for another
    machine.write("/etc/hetero-agent/leases/more.conf", f"RESOURCE={RESOURCE}\nWAIT=0\n")
    assert machine.run("systemctl", "start", "hetero-lease@more", check=False).returncode != 0
    assert agent.unit("ExecMainStatus", "hetero-lease@more.service") == "75"
    # the agent may restart meanwhile
    pid = agent.pid
    machine.run("kill", "-KILL", str(pid))
    machine.wait(lambda: agent.restarted_since(pid), 30, "another agent")
    assert agent.states() == {one.id: "in-use", other.id: "in-use"}
    (lease,) = agent.leases()
    agent.release(lease)
    machine.wait(lambda: agent.unit("ActiveState", holder) == "failed", 30, "the end of who holds it")
    assert agent.unit("ExecMainStatus", holder) == "79"
    agent.wait_states({one.id: "idle", other.id: "idle"})
    agent.systemctl("start", holder)
    machine.run("systemctl", "kill", "--signal=KILL", holder)
    agent.wait_states({one.id: "idle", other.id: "idle"})


# -- heteroctl manifest --format systemd ----------------------------------------------------------------
def test_the_manifest_as_a_drop_in(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    one, other = two
    lease = agent.allocate(RESOURCE, devices=[one.id], ttl=600_000_000)
    probe = Probe(machine, "drop", one, other)
    unit = service(machine, "lab-drop", f"ExecStart={probe.line}")
    machine.run("sh", "-c", f"heteroctl manifest {lease} --format systemd >/run/probe/drop.conf")
    machine.shell(
        f"install -D -m 644 /run/probe/drop.conf {UNITS}/{unit}.d/lease.conf; systemctl daemon-reload"
    )
    agent.systemctl("start", unit)
    agent.confirm(lease, unit=unit)
    found = probe.report()
    assert probe.opens(found) == ["ok", "EPERM"]
    assert found["env"]["HETERO_DEVICES"] == one.id
    agent.systemctl("daemon-reload")
    assert probe.opens(probe.again(unit)) == ["ok", "EPERM"]
    agent.systemctl("stop", unit)
    agent.wait_states({one.id: "idle", other.id: "idle"})


@pytest.mark.parametrize("name", ["a b", "100%n", 'q"u', "c:1-2", "back\\slash", "$HOME"])
def test_nodes_with_odd_names(machine: Machine, agent: Agent, name: str) -> None:
    """The rules that the manifest's forms make of any name let the node be used, and it only."""
    major, minor = 4, 60
    node = f"/dev/lab-odd/{name}"
    manifest = Manifest.of({"lease": "ab" * 16, "nodes": [["d", node, "own", "char", major, minor]]})
    machine.shell("mkdir -p /dev/lab-odd; rm -f /dev/lab-odd/*; mknod /dev/lab-odd/other c 4 61")
    machine.run("mknod", node, "c", str(major), str(minor))
    script = "import os, sys; [os.open(one, os.O_RDWR | os.O_NOCTTY) for one in sys.argv[1:]]"
    machine.write("/run/probe/odd.py", script)
    machine.write(f"{UNITS}/lab-odd.service.d/lease.conf", "\n".join(forms.systemd(manifest)) + "\n")
    probe = f"{PYTHON} -IS /run/probe/odd.py /dev/lab-odd"
    machine.write("/run/probe/odd.sh", f"{probe}/[!o]* || exit 1; ! {probe}/other")
    service(machine, "lab-odd", "Type=oneshot", "ExecStart=sh /run/probe/odd.sh")
    try:
        agent.systemctl("start", "lab-odd.service")
        # by the manager's own call, and read again from where it wrote that down
        machine.shell(f"rm -r {UNITS}/lab-odd.service.d; systemctl daemon-reload")
        for device in forms.allowed_devices(manifest):
            machine.run(
                "systemctl", "set-property", "--runtime", "lab-odd.service", "DevicePolicy=closed",
                f"DeviceAllow={device} rw",
            )  # fmt: skip
        agent.systemctl("daemon-reload")
        agent.systemctl("start", "lab-odd.service")
    finally:
        machine.shell("rm -rf /dev/lab-odd")


# -- examples -----------------------------------------------------------------------------------------
def example(name: str, instead: Mapping[str, str]) -> str:
    """The text of an example with other words for those that only fit where it is used."""
    text = (ROOT / "examples" / name).read_text()
    for old, new in instead.items():
        assert old in text, f"{name} has no {old}"
        text = text.replace(old, new)
    return text


def test_example_of_a_shell(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    machine.write("/run/probe/shell.sh", (ROOT / "examples/shell.sh").read_text(), mode=0o755)
    groups = [int(one) for one in machine.shell("id -G alice").split()]
    words = ["/run/probe/shell.sh", RESOURCE, "2", "sh", "-c", 'echo "$HETERO_DEVICE_COUNT"; exit 3']
    done = machine.run(*words, uid=alice.uid, groups=groups, check=False)
    assert (done.returncode, done.stdout) == (3, "2\n"), done.stderr
    machine.wait(lambda: set(agent.states().values()) == {"idle"}, 30, "all devices idle")


def test_example_of_a_command_as_a_unit(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator]
) -> None:
    machine.write("/run/probe/run.sh", (ROOT / "examples/unit/run.sh").read_text(), mode=0o755)
    done = machine.run("/run/probe/run.sh", RESOURCE, "2", "sh", "-c", 'echo "$HETERO_DEVICE_COUNT"')
    assert done.stdout == "2\n"
    machine.wait(lambda: set(agent.states().values()) == {"idle"}, 30, "all devices idle")


def test_example_of_a_service(
    machine: Machine, agent: Agent, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    one, other = two
    probe = Probe(machine, "train", one, other)
    words = {"/usr/bin/python3 /srv/train/train.py": probe.line, "nvidia.com/gpu": RESOURCE}
    text = example("unit/train.service", words)
    machine.write(f"{UNITS}/lab-train.service", text)
    machine.run("systemd-analyze", "verify", f"{UNITS}/lab-train.service")
    machine.run("systemctl", "daemon-reload")
    agent.systemctl("start", "lab-train")
    found = probe.report()
    assert probe.opens(found) == ["ok", "ok"]
    assert (found["uid"], found["env"]["HETERO_DEVICE_COUNT"]) == (alice.uid, "2")
    agent.systemctl("stop", "lab-train")
    agent.wait_states({one.id: "idle", other.id: "idle"})


def test_example_of_services_that_share_a_lease(
    machine: Machine, agent: Agent, hardware: Accelerators, two: tuple[Accelerator, Accelerator], alice: Person
) -> None:
    one, other = two
    (third,) = hardware.plug()
    agent.wait_states({one.id: "idle", other.id: "idle", third.id: "idle"})
    machine.write("/etc/hetero-agent/leases/pool.conf", example("unit/pool.conf", {"nvidia.com/gpu": RESOURCE}))
    probe = Probe(machine, "%i", one, other, third)
    command = {"/usr/bin/python3 /srv/worker/worker.py": " ".join(probe.command)}
    text = example("unit/worker@.service", command)
    machine.write(f"{UNITS}/lab-worker@.service", text)
    machine.run("systemctl", "daemon-reload")
    agent.systemctl("start", "lab-worker@1", "lab-worker@2")
    found = [Probe(machine, str(number), one, other, third).report() for number in (1, 2)]
    assert len(agent.leases()) == 1
    opened = [probe.opens(one) for one in found]
    assert opened[0] == opened[1]
    assert sorted(opened[0]) == ["EPERM", "ok", "ok"]
    assert {one["uid"] for one in found} == {alice.uid}
    agent.systemctl("stop", "hetero-lease@pool.service")
    agent.wait_states({one.id: "idle", other.id: "idle", third.id: "idle"})
    assert agent.unit("ActiveState", "lab-worker@2.service") == "inactive"
