"""The unit under systemd: started, stopped, reloaded, watched."""

from __future__ import annotations

import signal

import pytest

from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent, Refused
from tests.system.conftest import CONFIG, settings
from tests.system.machine import CommandFailed, Machine


def test_it_is_started_at_boot(machine: Machine, agent: Agent) -> None:
    assert agent.systemctl("is-enabled", UNIT) == "enabled\n"
    assert agent.unit("Type") == "notify"
    assert agent.unit("NRestarts") == "0"
    assert machine.run("systemctl", "is-system-running").stdout == "running\n"


def test_start_returns_when_it_is_ready(agent: Agent) -> None:
    agent.systemctl("stop", UNIT)
    assert not agent.on_bus()
    agent.systemctl("start", UNIT)
    # at once, without waiting for anything
    assert agent.manager()["Ready"] is True
    assert agent.unit("ActiveState") == "active"


def test_it_is_not_ready_before_it_has_its_name(machine: Machine, agent: Agent) -> None:
    agent.systemctl("stop", UNIT)
    bus = agent.unit("MainPID", "dbus.service")
    machine.run("kill", "-STOP", bus)
    try:
        agent.systemctl("start", "--no-block", UNIT)
        machine.wait(lambda: agent.pid, 30, "the agent's process")
        # the bus does not answer, so nothing of it can be ready
        machine.run("sleep", "1")
        assert agent.unit("ActiveState") == "activating"
    finally:
        machine.run("kill", "-CONT", bus)
    machine.wait(lambda: agent.unit("ActiveState") == "active", 30, "an active unit")
    assert agent.manager()["Ready"] is True
    assert agent.unit("NRestarts") == "0"


def test_stop_is_clean(machine: Machine, agent: Agent) -> None:
    pid = agent.pid
    agent.systemctl("stop", UNIT)
    assert agent.unit("ActiveState") == "inactive"
    assert agent.unit("Result") == "success"
    assert agent.unit("ExecMainStatus") == "0"
    assert not agent.on_bus()
    assert not machine.path(f"/proc/{pid}").exists()
    # nothing that it started is left in its control group
    assert agent.unit("TasksCurrent") in ("0", "[not set]")


def test_restart_is_another_life(agent: Agent) -> None:
    pid, before = agent.pid, agent.manager()
    agent.systemctl("restart", UNIT)
    after = agent.manager()
    assert agent.pid != pid
    assert after["Epoch"] != before["Epoch"]
    assert after["Generation"] > before["Generation"]


def test_status_says_what_there_is(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    one, two = hardware.plug(2)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    agent.allocate(RESOURCE)
    wanted = "2 devices, 1 allocatable, 1 leases"
    # what is wrong with the machine itself, if anything, follows after a semicolon
    machine.wait(
        lambda: agent.unit("StatusText").split("; ")[0] == wanted,
        30,
        f"the status {wanted!r}",
    )
    assert f'Status: "{wanted}' in agent.systemctl("status", UNIT)


def test_reload_takes_another_configuration(machine: Machine, agent: Agent) -> None:
    pid = agent.pid
    machine.write("/etc/hetero-agent/hetero-agent.conf", CONFIG + "[limits]\nleases = 17\n")
    agent.systemctl("reload", UNIT)
    machine.wait(lambda: agent.manager()["MaxLeases"] == 17, 30, "the other limit")
    assert agent.pid == pid
    assert agent.unit("ActiveState") == "active"


def test_reload_of_a_bad_configuration_keeps_the_old_one(machine: Machine, agent: Agent) -> None:
    before = agent.manager()["MaxLeases"]
    machine.write("/etc/hetero-agent/hetero-agent.conf", CONFIG + "[limits]\nleases = 'many'\n")
    agent.systemctl("reload", UNIT)
    machine.wait(lambda: "leases: expected a number" in agent.log(), 30, "the complaint")
    machine.wait(lambda: agent.unit("ActiveState") == "active", 30, "the end of the reload")
    assert agent.manager()["MaxLeases"] == before


def test_bad_configuration_at_start_fails_for_good(machine: Machine, agent: Agent) -> None:
    agent.systemctl("stop", UNIT)
    machine.write("/etc/hetero-agent/hetero-agent.conf", "[limits]\nleases = 'many'\n")
    with pytest.raises(CommandFailed):
        agent.systemctl("start", UNIT)
    assert agent.unit("ActiveState") == "failed"
    assert agent.unit("ExecMainStatus") == "2"
    assert agent.unit("NRestarts") == "0"
    assert "/etc/hetero-agent/hetero-agent.conf: [limits] leases: expected a number" in agent.log()


def test_log_level_by_systemctl(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    assert agent.systemctl("service-log-level", UNIT) == "info\n"
    agent.systemctl("service-log-level", UNIT, "debug")
    assert agent.systemctl("service-log-level", UNIT) == "debug\n"
    (device,) = hardware.plug()
    agent.wait_states({device.id: "idle"})
    machine.wait(
        lambda: [one for one in agent.journal(f"--unit={UNIT}", "PRIORITY=7") if device.id in one["MESSAGE"]],
        30,
        "its name in what is said for debugging",
    )
    agent.systemctl("service-log-level", UNIT, "warning")
    with pytest.raises(CommandFailed):
        agent.systemctl("service-log-level", UNIT, "loud")
    assert agent.systemctl("service-log-level", UNIT) == "warning\n"
    assert agent.systemctl("service-log-target", UNIT) == "journal\n"
    agent.systemctl("reload", UNIT)
    machine.wait(
        lambda: agent.systemctl("service-log-level", UNIT) == "info\n", 30, "the level of the configuration"
    )


def test_killed_it_is_started_again(machine: Machine, agent: Agent) -> None:
    settings(machine, RestartSec="100ms")
    pid = agent.pid
    machine.run("kill", "-KILL", str(pid))
    machine.wait(lambda: agent.restarted_since(pid), 30, "another process")
    assert agent.unit("NRestarts") == "1"
    assert agent.manager()["Ready"] is True


def test_stopped_by_a_signal_the_watchdog_ends_it(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    one, two = hardware.plug(2)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    settings(machine, WatchdogSec="3s", RestartSec="100ms")
    agent.systemctl("restart", UNIT)
    agent.wait_states({one.id: "idle", two.id: "idle"})
    job = agent.job("job-watchdog", one.node)
    lease = agent.allocate(RESOURCE, devices=[one.id], unit=job)
    agent.open_in(job)
    pid = agent.pid
    machine.run("kill", "-STOP", str(pid))
    machine.wait(lambda: agent.restarted_since(pid), 30, "another process")
    assert f"{UNIT}: Watchdog timeout" in "\n".join(
        entry["MESSAGE"] for entry in agent.journal("_PID=1", f"UNIT={UNIT}")
    )
    assert list(agent.leases()) == [lease]
    agent.wait_states({one.id: "in-use", two.id: "idle"})
    agent.systemctl("stop", job)
    agent.wait_states({one.id: "idle", two.id: "idle"})


def test_a_bus_that_does_not_answer_starves_the_watchdog(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    settings(machine, WatchdogSec="1s", RestartSec="100ms")
    agent.systemctl("restart", UNIT)
    # an interval shorter than any of its periods is kept
    machine.run("sleep", "3")
    assert agent.unit("NRestarts") == "0"
    lease = agent.allocate(RESOURCE)
    pid = agent.pid
    bus = agent.unit("MainPID", "dbus.service")
    machine.run("kill", "-STOP", bus)
    try:
        machine.wait(lambda: agent.pid not in (0, pid), 30, "another process")
        assert agent.unit("ActiveState") == "activating"
    finally:
        machine.run("kill", "-CONT", bus)
    machine.wait(lambda: agent.restarted_since(pid), 30, "a ready process")
    assert "3 pings over the bus in a row were not answered" in agent.log()
    assert list(agent.leases()) == [lease]
    assert agent.states() == {one.id: "in-use"}


# Takes the agent's uevent socket (pidfd_getfd(2)) and makes its queue as small as it gets: the next burst
# of events overflows it.  A limit of descriptors keeps the agent from opening another socket; a process
# without CAP_SYS_RESOURCE may set that for its own user only.
_DEAFEN = """
import ctypes, os, resource, socket, sys
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
pidfd = os.pidfd_open(pid)
for name in os.listdir(f"/proc/{pid}/fd"):
    if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
        fd = libc.syscall(438, pidfd, int(name), 0)
        one = socket.socket(fileno=fd)
        if one.family == socket.AF_NETLINK and one.proto == 15:  # NETLINK_KOBJECT_UEVENT
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            owner = os.stat(f"/proc/{pid}")
            os.setresgid(owner.st_gid, owner.st_gid, owner.st_gid)
            os.setresuid(owner.st_uid, owner.st_uid, owner.st_uid)
            hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
            sys.exit(0)
sys.exit("no netlink socket")
"""


def test_deaf_to_the_kernel_it_is_not_fed(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    settings(machine, WatchdogSec="3s", RestartSec="100ms")
    agent.systemctl("restart", UNIT)
    pid = agent.pid
    machine.run("/usr/bin/python3", "-ISc", _DEAFEN, str(pid))
    # it can't keep up with a burst
    machine.run("kill", "-STOP", str(pid))
    devices = hardware.plug(12)
    machine.run("udevadm", "settle")
    machine.run("kill", "-CONT", str(pid))
    machine.wait(lambda: agent.restarted_since(pid), 40, "another process")
    log = agent.log()
    assert "the watchdog is not fed any more: no progress of udev" in log
    # and the new one sees what the old one did not
    agent.wait_states({one.id: "idle" for one in devices})


def test_interrupted_by_sigterm_it_answers_what_it_has_begun(
    machine: Machine, agent: Agent, hardware: Accelerators
) -> None:
    (one,) = hardware.plug()
    agent.wait_states({one.id: "idle"})
    machine.run("kill", f"-{signal.SIGTERM.value}", str(agent.pid))
    machine.wait(lambda: agent.unit("ActiveState") == "inactive", 30, "a stopped unit")
    assert agent.unit("Result") == "success"
    with pytest.raises(Refused):
        agent.allocate(RESOURCE)
