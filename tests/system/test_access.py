"""The privileged helper under a real systemd: ACLs and CDI files of leases, made by it and taken back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import posix1e
import pytest

from hetero_agent import names
from tests.support.process import PYTHON, ROOT
from tests.system import confinement
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import UNIT, Agent, Refused
from tests.system.conftest import CONFIG
from tests.system.machine import Machine

HELPER = "hetero-agent-access.service"
SOCKET = "hetero-agent-access.socket"

#: nobody: neither root nor the agent, and in no group but that of the callers.
USER = 65534
#: bin: neither as well; the bus turns away uids that the user database lacks.
OTHER = 2


@pytest.fixture(scope="module")
def group(machine: Machine) -> int:
    """The group that may lease devices."""
    return int(machine.run("getent", "group", "hetero").stdout.split(":")[2])


@pytest.fixture
def helped(agent: Agent, machine: Machine) -> Iterator[Agent]:
    """The agent, and a helper that sees the machine as it is now; afterwards nothing is left of it."""
    machine.run("systemctl", "stop", HELPER)
    yield agent
    machine.shell(f"rm -rf /run/systemd/system/{HELPER}.d; systemctl daemon-reload; systemctl start {SOCKET}")
    for lease in agent.leases():
        agent.release(lease)
    machine.wait(lambda: not records(machine), 30, "an end of all that was made")
    assert specifications(machine) == []


def entries(machine: Machine, node: str) -> set[int]:
    """The uids with an entry of their own in the ACL of NODE that lets them read and write."""
    text = posix1e.ACL(file=str(machine.path(node))).to_any_text(
        separator=b",", options=posix1e.TEXT_NUMERIC_IDS
    )
    return {int(uid) for uid in re.findall(r"(?:user|u):(\d+):rw", text.decode())}


def specifications(machine: Machine) -> list[str]:
    """The files in the directory of CDI specifications."""
    return sorted(path.name for path in machine.path(names.CDI_DIR).iterdir())


def records(machine: Machine) -> set[str]:
    """The leases of which the helper has a record."""
    found = {path.name for path in machine.path(names.ACCESS_DIR).iterdir()}
    return {name for name in found if names.LEASE_ID.fullmatch(name)}


def ident(lease: str) -> str:
    """The id in the path of a lease."""
    return lease.rpartition("/l")[2]


def opened(machine: Machine, node: str, uid: int = USER) -> bool:
    """Whether a process of UID without any group can open NODE."""
    program = f"import os; os.open({node!r}, os.O_RDWR | os.O_NOCTTY)"
    return machine.run(PYTHON, "-ISc", program, uid=uid, check=False).returncode == 0


def test_a_lease_opens_its_node_and_no_other_and_its_end_closes_it(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    first, second = hardware.plug(2)
    helped.wait_states({first.id: "idle", second.id: "idle"})
    assert not opened(machine, first.node)
    lease = helped.allocate(RESOURCE, uid=USER, groups=[group], devices=[first.id])
    assert entries(machine, first.node) == {USER}
    assert opened(machine, first.node)
    assert not opened(machine, second.node)
    # nobody else got anything: the group's bits of an ACL are its mask
    assert not opened(machine, first.node, uid=65533)
    (name,) = specifications(machine)
    path = machine.path(f"{names.CDI_DIR}/{name}")
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.stat().st_uid == 0
    spec = json.loads(path.read_text())
    assert [one["name"] for one in spec["devices"]] == [ident(lease)]
    assert [node["path"] for node in spec["devices"][0]["containerEdits"]["deviceNodes"]] == [first.node]
    helped.release(lease, uid=USER, groups=[group])
    helped.wait_states({first.id: "idle", second.id: "idle"})
    assert entries(machine, first.node) == set()
    assert not opened(machine, first.node)
    assert specifications(machine) == []
    assert records(machine) == set()
    assert machine.path(first.node).stat().st_mode & 0o777 == 0o660


def test_it_runs_only_while_it_is_needed_and_with_one_capability(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    settings_of_helper(machine, "ExecStart=", f"ExecStart={PYTHON} -I -m hetero_agent.access_helper --idle 3")
    (one,) = hardware.plug()
    helped.wait_states({one.id: "idle"})
    lease = helped.allocate(RESOURCE, uid=USER, groups=[group])
    pid = int(helped.unit("MainPID", HELPER))
    status = dict(
        line.split(":\t", 1) for line in machine.read(f"/proc/{pid}/status").splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == ["0"] * 4
    for name in ("CapEff", "CapPrm", "CapBnd"):
        # linux/capability.h: CAP_FOWNER
        assert int(status[name], 16) == 1 << 3, name
    assert status["NoNewPrivs"] == "1"
    machine.wait(lambda: helped.unit("ActiveState", HELPER) == "inactive", 30, "the end of an idle helper")
    assert helped.unit("Result", HELPER) == "success"
    # what it made stays, and it is there again when it is needed
    assert entries(machine, one.node) == {USER}
    helped.release(lease, uid=USER, groups=[group])
    helped.wait_states({one.id: "idle"})
    assert entries(machine, one.node) == set()


def test_nobody_else_reaches_it(helped: Agent, machine: Machine) -> None:
    found = machine.run("stat", "--format=%U:%G %a", names.ACCESS_DIR, names.ACCESS_SOCKET).stdout
    assert found == "root:root 755\nroot:hetero-agent 660\n"
    # and what it believes is root's
    for path in ("/etc/hetero-agent", "/etc/hetero-agent/profiles.d", "/etc/hetero-agent/hetero-agent.conf"):
        assert machine.path(path).stat().st_uid == 0
        assert not machine.path(path).stat().st_mode & 0o022
    ask = "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)"
    ask += f".connect({names.ACCESS_SOCKET!r})"
    done = machine.run(PYTHON, "-ISc", ask, uid=USER, check=False)
    assert "PermissionError" in done.stderr


def test_agents_end_and_start_change_nothing_that_leases_have(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    (one,) = hardware.plug()
    helped.wait_states({one.id: "idle"})
    lease = helped.allocate(RESOURCE, uid=USER, groups=[group])
    made = specifications(machine)
    pid = helped.pid
    helped.systemctl("kill", "--signal=KILL", UNIT)
    machine.wait(lambda: helped.restarted_since(pid), 30, "a new agent")
    assert list(helped.leases()) == [lease]
    assert entries(machine, one.node) == {USER}
    assert specifications(machine) == made
    # what somebody took away meanwhile is made again at the start
    helped.systemctl("stop", UNIT)
    machine.path(f"{names.CDI_DIR}/{made[0]}").unlink()
    os.removexattr(machine.path(one.node), "system.posix_acl_access")
    helped.systemctl("start", UNIT)
    machine.wait(lambda: entries(machine, one.node) == {USER}, 30, "the entry made again")
    machine.wait(lambda: specifications(machine) == made, 30, "the specification made again")
    helped.release(lease)
    helped.wait_states({one.id: "idle"})


def test_what_was_left_of_leases_that_are_no_more_is_swept_at_the_start(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    (one,) = hardware.plug()
    helped.wait_states({one.id: "idle"})
    helped.allocate(RESOURCE, uid=USER, groups=[group])
    assert entries(machine, one.node) == {USER}
    # the ledger is lost, and with it all knowledge of the lease
    helped.systemctl("stop", UNIT)
    for path in machine.path(names.RUNTIME_DIR).glob("ledger.sqlite*"):
        path.unlink()
    helped.systemctl("start", UNIT)
    helped.wait_states({one.id: "idle"})
    machine.wait(lambda: entries(machine, one.node) == set(), 30, "no entry of the lost lease")
    # the record goes last
    machine.wait(lambda: not records(machine), 30, "no record of it")
    assert specifications(machine) == []


def test_two_leases_of_a_user_and_one_of_another(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    first, second = hardware.plug(2)
    helped.wait_states({first.id: "idle", second.id: "idle"})
    mine = helped.allocate(RESOURCE, uid=USER, groups=[group], devices=[first.id])
    others = helped.allocate(RESOURCE, uid=OTHER, groups=[group], devices=[second.id])
    assert (entries(machine, first.node), entries(machine, second.node)) == ({USER}, {OTHER})
    assert not opened(machine, second.node)
    helped.release(mine)
    helped.wait_states({first.id: "idle", second.id: "in-use"})
    assert (entries(machine, first.node), entries(machine, second.node)) == (set(), {OTHER})
    helped.release(others)


def test_udevs_events_take_nothing_away(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    (one,) = hardware.plug()
    helped.wait_states({one.id: "idle"})
    helped.allocate(RESOURCE, uid=USER, groups=[group])
    os.removexattr(machine.path(one.node), "system.posix_acl_access")
    machine.wait(lambda: entries(machine, one.node) == {USER}, 30, "the entry made again")


def test_a_helper_that_is_killed_all_the_time_loses_nothing(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    settings_of_helper(machine, "RestartSec=50ms")
    (one,) = hardware.plug()
    helped.wait_states({one.id: "idle"})
    for _ in range(3):
        machine.run("systemctl", "kill", "--signal=KILL", HELPER, check=False)
        lease = helped.allocate(RESOURCE, uid=USER, groups=[group])
        assert entries(machine, one.node) == {USER}
        machine.run("systemctl", "kill", "--signal=KILL", HELPER)
        helped.release(lease)
        helped.wait_states({one.id: "idle"}, timeout=30)
        assert entries(machine, one.node) == set()
    assert helped.unit("ActiveState", SOCKET) == "active"


def test_a_helper_that_hangs_makes_the_grant_fail_and_what_it_gave_is_taken_back(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    (one,) = hardware.plug()
    helped.wait_states({one.id: "idle"})
    # it may take longer to start than what it is given below
    helped.release(helped.allocate(RESOURCE, uid=USER, groups=[group]))
    helped.wait_states({one.id: "idle"})
    short = "[grant]\neffects-timeout = 2\n[limits]\nleases = 17\n"
    machine.write("/etc/hetero-agent/hetero-agent.conf", CONFIG + short)
    helped.systemctl("reload", UNIT)
    machine.wait(lambda: helped.manager()["MaxLeases"] == 17, 30, "the other configuration")
    helped.systemctl("kill", "--signal=STOP", HELPER)
    try:
        with pytest.raises(Refused, match="access helper does not answer"):
            helped.allocate(RESOURCE, uid=USER, groups=[group])
        # others are not held up, and the device is not given to anybody before all is taken back
        assert helped.states() == {one.id: "reclaiming"}
        machine.wait(lambda: "does not answer" in helped.unit("StatusText"), 30, "the problem in STATUS=")
    finally:
        helped.systemctl("kill", "--signal=CONT", HELPER)
    helped.wait_states({one.id: "idle"}, timeout=30)
    assert entries(machine, one.node) == set()
    assert records(machine) == set()
    machine.wait(lambda: "access helper" not in helped.unit("StatusText"), 30, "a status without a problem")


def test_without_a_helper_it_is_told_and_leases_are_given(
    helped: Agent, machine: Machine, hardware: Accelerators, group: int
) -> None:
    (one,) = hardware.plug()
    helped.wait_states({one.id: "idle"})
    # one that is there and does not run is another matter than none
    machine.run("systemctl", "stop", SOCKET, HELPER)
    with pytest.raises(Refused, match=r"can't be reached.*systemctl restart hetero-agent-access.socket"):
        helped.allocate(RESOURCE, uid=USER, groups=[group])
    machine.path(names.ACCESS_SOCKET).unlink()
    remedy = f"systemctl enable --now {SOCKET}"
    machine.wait(lambda: remedy in helped.unit("StatusText"), 30, "the remedy in STATUS=")
    done = machine.run("heteroctl", "doctor", check=False)
    assert f"{SOCKET} is inactive" in done.stdout
    assert remedy in done.stdout
    machine.run("systemctl", "start", SOCKET)
    machine.wait(lambda: remedy not in helped.unit("StatusText"), 30, "a status without it")
    helped.wait_states({one.id: "idle"}, timeout=30)
    machine.run("systemctl", "stop", SOCKET, HELPER)
    machine.path(names.ACCESS_SOCKET).unlink()
    lease = helped.allocate(RESOURCE, uid=USER, groups=[group])
    assert entries(machine, one.node) == set()
    helped.release(lease)
    helped.wait_states({one.id: "idle"})


def test_a_grant_file_that_names_memory(helped: Agent, machine: Machine, hardware: Accelerators) -> None:
    """The agent's user was taken over, and asks for what it was never to have."""
    (one,) = hardware.plug()
    helped.wait_states({one.id: "idle"})
    lease = helped.allocate(RESOURCE)
    path = f"{names.RUNTIME_DIR}/grants/{ident(lease)}"
    told = json.loads(machine.read(path))
    uid = int(machine.run("id", "--user", "hetero-agent").stdout)
    # one connection at a time is served: the agent's own would have to be idle first
    helped.systemctl("stop", UNIT)
    for change in _HOSTILE:
        hostile = {**told, "uid": USER, "manifest": {**told["manifest"], **change}}
        machine.write(path, json.dumps(hostile), mode=0o640)
        os.chown(machine.path(path), uid, -1)
        done = machine.run(PYTHON, "-ISc", _ASKS, ident(lease), uid=uid, groups=[_agents_group(machine)])
        answer = json.loads(done.stdout)
        assert answer["ok"] is False, change
        assert "not by root's profiles and configuration" in answer["error"]
    assert entries(machine, "/dev/null") == set()
    (spec,) = specifications(machine)
    assert "/etc" not in machine.read(f"{names.CDI_DIR}/{spec}")
    helped.systemctl("start", UNIT)


def _agents_group(machine: Machine) -> int:
    return int(machine.run("id", "--group", "hetero-agent").stdout)


_HOSTILE: list[dict[str, object]] = [
    {"nodes": [["npu", "/dev/null", "own", "char", 1, 3]]},
    {"nodes": [["npu", "/dev/tty", "own", "char", 5, 0]]},
    {"nodes": [["npu", "/etc/shadow", "own", "file", 0, 0]]},
    {"mounts": [["/etc", "/etc", "rw"]]},
    {"groups": [42]},
    {"hooks": [{"hookName": "createRuntime", "path": "/bin/sh"}]},
]

_ASKS = """
import json, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
    one.settimeout(40)
    one.connect("/run/hetero-agent-access/socket")
    one.send(json.dumps({"version": 1, "do": "prepare", "lease": sys.argv[1]}).encode())
    print(one.recv(4096).decode())
"""


#: What is left to a helper that was taken over: what belongs to root and needs no capability.
_LEFT = {"make a file in /dev", "read a file that only root may", "list another's descriptors"}


def test_what_can_be_done_from_inside_the_helper(machine: Machine, hardware: Accelerators) -> None:
    (one,) = hardware.plug()
    shipped = (ROOT / "systemd" / HELPER).read_text().replace("[Service]", "[Service]\nStateDirectory=probe")
    # what the attempts themselves need
    shipped += "SystemCallFilter=memfd_create pipe pipe2\n"
    found = confinement.attempts(machine, shipped, one.node)
    machine.shell("rm -rf /var/lib/probe")
    hardware.unplug()
    victim = found.pop("the victim")
    assert {name for name, result in found.items() if result == "ok"} == _LEFT, json.dumps(found, indent=1)
    assert victim == "untouched"


def settings_of_helper(machine: Machine, *lines: str) -> None:
    machine.write(f"/run/systemd/system/{HELPER}.d/lab.conf", "\n".join(("[Service]", *lines, "")))
    machine.run("systemctl", "daemon-reload")
