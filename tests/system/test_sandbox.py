"""The shipped service, in its sandbox as its own user, does all that it does as root without one.

Each test of the scenario runs twice, with the shipped unit and with one that lacks the whole section
on confinement.  What the sandbox is for comes after that: attempts from inside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hetero_agent import names
from tests.system import confinement
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent, Entry
from tests.system.conftest import CONFIG, settings
from tests.system.machine import Machine

_UNIT_FILE = f"/run/systemd/system/{UNIT}"

#: nobody: a user whose processes are neither root's nor the agent's.
_USER = 65534

#: No full scan happens by itself during a test, so what is seen at once was seen by the watch.
_CONFIG = CONFIG.replace("occupied-after", "scan-interval = 3600\nkill-after = 0.5\noccupied-after")

# Bits of linux/capability.h: DAC_READ_SEARCH, KILL, SYS_PTRACE, CHECKPOINT_RESTORE.
_CAPABILITIES = 1 << 2 | 1 << 5 | 1 << 19 | 1 << 40


@pytest.fixture(scope="module", params=["sandboxed", "bare"])
def variant(request: pytest.FixtureRequest, machine: Machine, hardware: Accelerators) -> Iterator[str]:
    """The service as shipped, or without its confinement.

    As shipped a system call that the filter refuses fails with EPERM, which could be swallowed
    somewhere; here it is the end of the process.
    """
    machine.write("/etc/hetero-agent/hetero-agent.conf", _CONFIG)
    if request.param == "bare":
        machine.write(_UNIT_FILE, confinement.bare())
    else:
        machine.write(f"{_UNIT_FILE}.d/strict.conf", "[Service]\nSystemCallErrorNumber=kill\n")
    machine.shell(f"systemctl daemon-reload; systemctl restart {UNIT}")
    yield request.param
    of_systemd = [entry["MESSAGE"] for entry in Agent(machine).journal("_PID=1", f"UNIT={UNIT}")]
    # what root made is not the service's own user's: as if it were installed anew
    machine.shell(
        f"systemctl stop {UNIT}; rm -rf {_UNIT_FILE} {_UNIT_FILE}.d /run/hetero-agent /var/lib/hetero-agent"
    )
    machine.write("/etc/hetero-agent/hetero-agent.conf", CONFIG)
    machine.shell(f"systemctl daemon-reload; systemctl start {UNIT}")
    assert not [message for message in of_systemd if "status=31/SYS" in message]


@pytest.fixture
def service(variant: str, machine: Machine, hardware: Accelerators) -> Iterator[Agent]:
    """The agent of the variant; afterwards nothing is leased or plugged in."""
    one = Agent(machine)
    yield one
    machine.shell("systemctl stop 'job*'; systemctl reset-failed")
    for lease in one.leases():
        one.release(lease)
    hardware.unplug()
    machine.wait(lambda: not (one.devices() or one.leases()), 30, "an agent without devices and leases")


@pytest.fixture(scope="module")
def group(machine: Machine) -> int:
    """The group that may lease devices."""
    return int(machine.run("getent", "group", "hetero").stdout.split(":")[2])


def _status(machine: Machine, pid: int) -> dict[str, str]:
    lines = machine.read(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _holders(service: Agent, device: str) -> dict[int, tuple[int, bool]]:
    """Return pid: (uid, whether only mapped) of those that hold DEVICE."""
    found = service.call(names.device_path(device), names.DEVICE, "GetHolders")
    rows = [{name: value["data"] for name, value in row.items()} for row in found]
    return {row["pid"]: (row["uid"], row["mapped"]) for row in rows}


def test_it_is_what_the_variant_says(service: Agent, machine: Machine, variant: str) -> None:
    status = _status(machine, service.pid)
    uid = int(machine.run("id", "--user", "hetero-agent").stdout)
    if variant == "bare":
        assert status["Uid"].split() == ["0"] * 4
        assert status["CapEff"] == _status(machine, 1)["CapEff"]
        return
    assert status["Uid"].split() == [str(uid)] * 4
    for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == _CAPABILITIES, name
    assert status["NoNewPrivs"] == "1"
    assert int(status["Seccomp_filters"]) > int(_status(machine, 1)["Seccomp_filters"])
    # its workers are in it too
    workers = machine.run("pgrep", "--parent", str(service.pid)).stdout.split()
    assert workers
    assert {_status(machine, int(worker))["CapEff"] for worker in workers} == {status["CapEff"]}
    # nobody else reads what it keeps
    kept = machine.run("stat", "--format=%U %a %n", "/var/lib/hetero-agent", "/run/hetero-agent/ledger.sqlite")
    assert (
        kept.stdout
        == "hetero-agent 700 /var/lib/hetero-agent\nhetero-agent 600 /run/hetero-agent/ledger.sqlite\n"
    )


def test_a_lease_bound_to_a_process_of_another_user(
    service: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    (one,) = hardware.plug()
    service.wait_states({one.id: "idle"})
    job = service.job("job-own", one.node, f"User={_USER}", "SupplementaryGroups=render")
    pid = int(service.unit("MainPID", job))
    lease = service.allocate(RESOURCE, uid=_USER, groups=[group])
    service.confirm(lease, uid=_USER, groups=[group], pid=pid)
    assert service.open_in(job) == pid
    machine.wait(
        lambda: _holders(service, one.id) == {pid: (_USER, False)}, 30, "the process among the holders"
    )
    assert service.states() == {one.id: "in-use"}
    machine.run("kill", "-KILL", str(pid))
    service.wait_states({one.id: "idle"})
    (ended,) = service.audit("HETERO_KIND=lease-ended", f"HETERO_LEASE={lease.rpartition('/l')[2]}")
    assert ended["HETERO_REASON"] == "its pid ended"


@pytest.mark.parametrize("user", [0, _USER])
def test_opens_of_a_node_that_only_root_may_read_are_seen_at_once(
    service: Agent, machine: Machine, hardware: Accelerators, user: int
) -> None:
    (one,) = hardware.plug()
    service.wait_states({one.id: "idle"})
    job = service.job("job-stranger", one.node, f"User={user}", "SupplementaryGroups=render")
    service.open_in(job)
    service.wait_states({one.id: "occupied"}, timeout=30)
    assert [uid for uid, _ in _holders(service, one.id).values()] == [user]
    service.systemctl("stop", job)
    service.wait_states({one.id: "idle"}, timeout=30)
    # root's alone from here on; a new watch is placed with the next event
    machine.shell(f"chown root:root {one.node}; chmod 600 {one.node}")
    hardware.change(one, numa_node="1")
    machine.wait(lambda: service.devices()[one.id]["NumaNodes"] == [1], 30, "the change")
    service.open_in(service.job("job-root", one.node))
    service.wait_states({one.id: "occupied"}, timeout=30)


# Maps a copy of the zero device, which it then removes, and closes the descriptor.
_MAP = """
import ctypes, mmap, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
place = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
assert place not in (None, 2**64 - 1)
os.close(descriptor)
time.sleep(3600)
"""

_ZERO = """
schema = 1
resource = "example.com/zero"

[[match]]
subsystem = "mem"
names = ["zero"]

[[nodes]]
subsystem = "mem"
pattern = "zero"
role = "own"
"""


def test_mappings_of_root_and_of_others_are_seen(service: Agent, machine: Machine) -> None:
    profile = "/etc/hetero-agent/profiles.d/zero.toml"
    machine.write(profile, _ZERO)
    try:
        service.systemctl("reload", UNIT)
        service.wait_states({"mem-zero": "idle"})
        wanted = {}
        for user in (0, _USER):
            copy = f"/dev/copy-{user}"
            machine.shell(f"mknod -m 666 {copy} c 1 5")
            words = ["--quiet", f"--unit=job-map-{user}", "--service-type=exec", f"--property=User={user}"]
            machine.run("systemd-run", *words, "/usr/bin/python3", "-ISc", _MAP, copy)
            pid = int(service.unit("MainPID", f"job-map-{user}.service"))
            machine.wait(
                lambda pid=pid, copy=copy: copy in machine.read(f"/proc/{pid}/maps"), 30, "the mapping"
            )
            machine.shell(f"rm {copy}")
            wanted[pid] = (user, True)
        # an open of the node itself has the device looked at
        machine.shell("head --bytes=1 /dev/zero >/dev/null")
        service.wait_states({"mem-zero": "occupied"})
        assert _holders(service, "mem-zero") == wanted
    finally:
        machine.shell(f"rm {profile}; systemctl stop 'job*'")
        service.systemctl("reload", UNIT)


# Holds a node and does not end when it is asked to.
_STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
time.sleep(3600)
"""


def test_a_lease_that_asks_for_it_has_its_users_process_ended(
    service: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    (one,) = hardware.plug()
    service.wait_states({one.id: "idle"})
    lease = service.allocate(RESOURCE, uid=_USER, groups=[group], on_end="kill")
    job = "job-stubborn.service"
    words = ["--quiet", f"--unit={job}", "--service-type=exec", f"--property=User={_USER}"]
    words.append("--property=SupplementaryGroups=render")
    machine.run("systemd-run", *words, "/usr/bin/python3", "-ISc", _STUBBORN, one.node)
    pid = int(service.unit("MainPID", job))
    machine.wait(lambda: pid in _holders(service, one.id), 30, "the process among the holders")
    assert service.release(lease, uid=_USER, groups=[group]) is True
    service.wait_states({one.id: "idle"})
    assert service.unit("ExecMainCode", job) == "2"  # CLD_KILLED
    assert service.unit("ExecMainStatus", job) == "9"


def test_a_unit_as_owner(service: Agent, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    service.wait_states({one.id: "idle"})
    job = service.job("job-owner", one.node, f"User={_USER}", "SupplementaryGroups=render")
    service.allocate(RESOURCE, unit=job)
    service.open_in(job)
    assert service.states() == {one.id: "in-use"}
    service.systemctl("stop", job)
    service.wait_states({one.id: "idle"})
    assert service.leases() == {}


def test_a_restart_keeps_leases_and_cordons(service: Agent, hardware: Accelerators) -> None:
    one, two = hardware.plug(2)
    service.wait_states({one.id: "idle", two.id: "idle"})
    lease = service.allocate(RESOURCE, devices=[one.id])
    service.call(names.device_path(two.id), names.DEVICE, "Cordon", "ss", "sandbox", "a test")
    try:
        service.systemctl("restart", UNIT)
        service.wait_states({one.id: "in-use", two.id: "offline"})
        assert list(service.leases()) == [lease]
        assert service.devices()[two.id]["Cordoned"] is True
    finally:
        service.call(names.device_path(two.id), names.DEVICE, "Uncordon", "s", "sandbox-end")
    service.wait_states({one.id: "in-use", two.id: "idle"})


def test_a_reload_takes_another_configuration(service: Agent, machine: Machine) -> None:
    pid = service.pid
    machine.write("/etc/hetero-agent/hetero-agent.conf", _CONFIG + "[limits]\nleases = 17\n", mode=0o600)
    service.systemctl("reload", UNIT)
    machine.wait(lambda: service.manager()["MaxLeases"] == 17, 30, "the other limit")
    machine.write("/etc/hetero-agent/hetero-agent.conf", _CONFIG)
    service.systemctl("reload", UNIT)
    machine.wait(lambda: service.manager()["MaxLeases"] == 4096, 30, "the limit that it had")
    assert service.pid == pid


def test_the_watchdog_is_fed_and_bites(service: Agent, machine: Machine, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    service.wait_states({one.id: "idle"})
    lease = service.allocate(RESOURCE)
    settings(machine, WatchdogSec="3s", RestartSec="50ms")
    try:
        service.systemctl("restart", UNIT)
        pid = service.pid
        machine.run("sleep", "4")
        assert service.pid == pid
        machine.run("kill", "-STOP", str(pid))
        machine.wait(lambda: service.restarted_since(pid), 30, "a restart by the watchdog")
        assert list(service.leases()) == [lease]
    finally:
        machine.shell(f"rm {_UNIT_FILE}.d/test.conf; systemctl daemon-reload")


def test_the_trail_is_in_the_journal_under_the_services_name(
    service: Agent, machine: Machine, hardware: Accelerators
) -> None:
    (one,) = hardware.plug()
    service.wait_states({one.id: "idle"})
    service.release(service.allocate(RESOURCE))
    service.wait_states({one.id: "idle"})

    def told() -> list[Entry]:
        matches = ("HETERO_KIND=transition", f"HETERO_DEVICE={one.id}", f"_PID={service.pid}")
        return service.audit(*matches)[-3:]

    steps = [("idle", "in-use"), ("in-use", "reclaiming"), ("reclaiming", "idle")]
    machine.wait(
        lambda: [(entry["HETERO_FROM"], entry["HETERO_TO"]) for entry in told()] == steps,
        30,
        f"the trail {steps}",
    )
    owner = _status(machine, service.pid)["Uid"].split()[0]
    assert {(entry["_UID"], entry["_SYSTEMD_UNIT"]) for entry in told()} == {(owner, UNIT)}


def test_files_of_a_provider(service: Agent, machine: Machine) -> None:
    machine.write(
        "/etc/hetero-agent/hetero-agent.conf",
        _CONFIG + '[providers.sim]\ndirectory = "/run/hetero-agent-sim/devices"\n',
    )
    service.systemctl("restart", UNIT)
    try:
        machine.run("systemd-run", "--quiet", "--unit=job-sim", "--service-type=exec", "hetero-agent-sim")
        machine.wait(lambda: machine.path("/run/hetero-agent-sim/control.sock").exists(), 30, "the simulator")
        machine.run("heteroctl", "sim", "add", "npu", "--resource=example.com/npu")
        service.wait_states({"npu": "idle"})
        words = ["--quiet", "--unit=job-file", "--service-type=exec", f"--property=User={_USER}"]
        words += ["--property=SupplementaryGroups=hetero", "/usr/bin/python3", "-ISc", _STUBBORN]
        machine.run("systemd-run", *words, "/run/hetero-agent-sim/devices/npu")
        service.wait_states({"npu": "occupied"})
        assert [uid for uid, _ in _holders(service, "npu").values()] == [_USER]
        machine.run("systemctl", "kill", "--signal=KILL", "job-file")
        service.wait_states({"npu": "idle"})
        machine.run("heteroctl", "sim", "remove", "npu")
        service.wait_states({})
    finally:
        machine.write("/etc/hetero-agent/hetero-agent.conf", _CONFIG)
        machine.shell("systemctl stop job-sim")
        service.systemctl("restart", UNIT)


def test_what_the_service_as_root_left_is_taken_over(machine: Machine, hardware: Accelerators) -> None:
    """An agent that ran as root, and then gets a unit with a user of its own, loses nothing."""
    service = Agent(machine)
    machine.write(_UNIT_FILE, confinement.bare())
    # the container has a boot id of its own, over the kernel's, which this hides: the same for both
    settings(machine, ProtectKernelTunables="yes")
    machine.shell(f"systemctl stop {UNIT}; rm -rf /run/hetero-agent /var/lib/hetero-agent")
    (one,) = hardware.plug()
    try:
        service.systemctl("start", UNIT)
        service.wait_states({one.id: "idle"})
        lease = service.allocate(RESOURCE)
        assert machine.path("/run/hetero-agent/ledger.sqlite").stat().st_uid == 0
    finally:
        machine.shell(f"rm -r {_UNIT_FILE} {_UNIT_FILE}.d; systemctl daemon-reload; systemctl restart {UNIT}")
    assert machine.path("/run/hetero-agent/ledger.sqlite").stat().st_uid != 0
    assert list(service.leases()) == [lease]
    service.wait_states({one.id: "in-use"})
    service.release(lease)
    service.wait_states({one.id: "idle"})
    hardware.unplug()


#: What goes on working in the sandbox: the scan, the watch, signals, and speaking to a helper.
_WORKS = {
    "list another's descriptors",
    "see what they are",
    "read another's mappings",
    "follow a mapping",
    "signal another's process",
    "watch a node",
    "speak to a helper that knows who speaks",
}

#: What is left to a service that was taken over; docs/decisions/sandbox.md says why.
_LEFT = {"read another's memory by /proc", "read a file that only root may"}


def test_what_can_be_done_from_inside(machine: Machine, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    machine.shell(f"chown root:root {one.node}; chmod 600 {one.node}")
    found = confinement.attempts(machine, confinement.SHIPPED, one.node)
    hardware.unplug()
    assert found.pop("the victim") == "untouched"
    assert {name for name, result in found.items() if result == "ok"} == _WORKS | _LEFT, json.dumps(
        found, indent=1
    )
    refused = {name: result for name, result in found.items() if result != "ok"}
    assert "nteractive authentication" in refused.pop("have systemd run a command as root")
    assert set(refused.values()) <= {"EACCES", "EPERM", "EROFS", "EAFNOSUPPORT"}, json.dumps(refused, indent=1)


def test_the_same_attempts_succeed_where_nothing_confines(machine: Machine, hardware: Accelerators) -> None:
    """Otherwise the refusals would prove nothing."""
    (one,) = hardware.plug()
    found = confinement.attempts(machine, confinement.bare(), one.node)
    hardware.unplug()
    assert found.pop("the victim") == "overwrite"
    failed = {name: result for name, result in found.items() if result != "ok"}
    assert failed == {}


@pytest.mark.parametrize(
    ("capability", "fails"),
    [
        (
            "CAP_DAC_READ_SEARCH",
            {"list another's descriptors", "watch a node", "follow a mapping", "see what they are"}
            | {"read another's memory by /proc", "read a file that only root may"},
        ),
        (
            "CAP_SYS_PTRACE",
            {
                "see what they are",
                "read another's mappings",
                "follow a mapping",
                "read another's memory by /proc",
            },
        ),
        ("CAP_CHECKPOINT_RESTORE", {"follow a mapping"}),
        ("CAP_KILL", {"signal another's process"}),
    ],
)
def test_no_capability_could_be_spared(
    machine: Machine, hardware: Accelerators, capability: str, fails: set[str]
) -> None:
    (one,) = hardware.plug()
    machine.shell(f"chown root:root {one.node}; chmod 600 {one.node}")
    lines = confinement.SHIPPED.splitlines()
    less = [
        line.replace(capability, "") if "Capabilities=" in line or "BoundingSet=" in line else line
        for line in lines
    ]
    found = confinement.attempts(machine, "\n".join(less), one.node)
    hardware.unplug()
    assert {name for name in _WORKS | _LEFT if found[name] != "ok"} == fails
