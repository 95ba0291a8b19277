"""People at a node under a real udevd and logind: real consoles, real uevents, callers of several users."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator

import posix1e
import pytest

from hetero_agent import names
from tests.support.process import PYTHON
from tests.support.wait import PATIENCE, wait_until
from tests.system.agent import UNIT, Agent
from tests.system.conftest import settings
from tests.system.machine import Machine

#: Spare virtual consoles that neither logins nor the labs' other tests use.
NODES = ("/dev/tty46", "/dev/tty47")
RESOURCE = "example.com/console"

#: nobody and bin: the bus turns away users that the machine does not know.
ALICE, BOB = 65534, 2
SITTING, STRANGER = 1234, 4321

PROFILE = """
schema = 1
resource = "example.com/console"

[[match]]
subsystem = "tty"
names = ["tty46", "tty47"]

[[nodes]]
subsystem = "tty"
pattern = "tty4[67]"
role = "own"
"""

#: As systemd's 70-uaccess.rules and 50-udev-default.rules do it to graphics cards.
RULES = """
SUBSYSTEM=="tty", KERNEL=="tty46|tty47", GROUP="render", MODE="0660", TAG+="uaccess"
"""

EXPOSURE = "MESSAGE_ID=2d6d777481aa478dbd52939775793d16"


@pytest.fixture(scope="module")
def prepared(machine: Machine) -> Machine:
    """The machine with two consoles as devices, and a rule for them."""
    machine.write("/etc/udev/rules.d/71-people.rules", RULES)
    machine.write("/etc/hetero-agent/profiles.d/console.toml", PROFILE)
    for node in NODES:
        machine.shell(f"rm -f {node}; mknod -m 600 {node} c 4 {node.removeprefix('/dev/tty')}")
    machine.shell(f"udevadm control --reload; systemctl restart {UNIT}")
    return machine


@pytest.fixture
def agent(prepared: Machine) -> Iterator[Agent]:
    """The agent with two closed consoles; afterwards they are that again."""
    one = Agent(prepared)
    trigger(prepared)
    one.wait_states(dict.fromkeys(map(ident, NODES), "idle"))
    yield one
    prepared.shell(f"rm -rf /run/systemd/system/{UNIT}.d; systemctl daemon-reload; systemctl start {UNIT}")
    prepared.write("/etc/udev/rules.d/71-people.rules", RULES)
    prepared.shell("rm -f /run/systemd/seats/seat9; udevadm control --reload; systemctl stop 'job*'")
    prepared.shell("systemctl unmask --runtime systemd-logind")
    for lease in one.leases():
        one.release(lease)
    for node in NODES:
        strip(prepared, node, SITTING)
        prepared.shell(f"chmod 660 {node}")
    prepared.wait(
        lambda: not any(shown(prepared, node)[1] for node in NODES), PATIENCE, "an end of all entries"
    )


@pytest.fixture(scope="module")
def group(machine: Machine) -> int:
    """The group that may lease devices."""
    return int(machine.run("getent", "group", "hetero").stdout.split(":")[2])


def ident(node: str) -> str:
    return f"tty-{node.removeprefix('/dev/')}"


def trigger(machine: Machine) -> None:
    """What an administrator does who has changed a rule."""
    for node in NODES:
        machine.run("udevadm", "trigger", "--settle", f"/sys/class/tty/{node.removeprefix('/dev/')}")


def shown(machine: Machine, node: str) -> tuple[int, dict[int, str]]:
    """The mode as ls shows it, and the effective rights of each uid with an entry."""
    path = machine.path(node)
    text = posix1e.ACL(file=str(path)).to_any_text("", b",", posix1e.TEXT_NUMERIC_IDS).decode()
    mask = next(iter(re.findall(r"mask::(...)", text)), "rwx")
    entries = {
        int(uid): "".join(letter if letter in mask else "-" for letter in letters)
        for uid, letters in re.findall(r"user:(\d+):(...)", text)
    }
    return stat.S_IMODE(path.stat().st_mode), entries


def strip(machine: Machine, node: str, uid: int) -> None:
    """Take the entry of UID away."""
    acl = posix1e.ACL(file=str(machine.path(node)))
    for entry in list(acl):
        if entry.tag_type == posix1e.ACL_USER and entry.qualifier == uid:
            acl.delete_entry(entry)
    acl.applyto(str(machine.path(node)))


def opens(machine: Machine, node: str, uid: int) -> bool:
    """Whether a process of UID without any group can open NODE."""
    program = f"import os; os.open({node!r}, os.O_RDWR | os.O_NOCTTY)"
    done = machine.run(PYTHON, "-ISc", program, uid=uid, check=False)
    assert done.returncode == 0 or "PermissionError" in done.stderr, done.stderr
    return done.returncode == 0


def told(agent: Agent, device: str) -> list[tuple[str, str]]:
    """Priority and words of what the journal has of who can open DEVICE."""
    entries = agent.audit(EXPOSURE, f"HETERO_DEVICE={device}")
    return [(entry["PRIORITY"], entry["MESSAGE"]) for entry in entries]


def test_each_opens_what_is_leased_to_it(prepared: Machine, agent: Agent, group: int) -> None:
    one, two = NODES
    leases = {
        uid: agent.allocate(RESOURCE, uid=uid, groups=[group], devices=[ident(node)])
        for uid, node in ((ALICE, one), (BOB, two))
    }
    assert [opens(prepared, node, uid) for node in NODES for uid in (ALICE, BOB, STRANGER)] == [
        True, False, False,
        False, True, False,
    ]  # fmt: skip
    agent.release(leases[ALICE], uid=ALICE, groups=[group])
    agent.wait_states({ident(one): "idle", ident(two): "in-use"})
    assert [opens(prepared, node, uid) for node in NODES for uid in (ALICE, BOB)] == [False, False, False, True]
    # root gives one to somebody else
    agent.allocate(RESOURCE, owner_uid=STRANGER)
    assert opens(prepared, one, STRANGER)


def test_udevadm_trigger_takes_nothing_away_for_long(prepared: Machine, agent: Agent, group: int) -> None:
    one, two = NODES
    agent.allocate(RESOURCE, uid=ALICE, groups=[group], devices=[ident(one)])
    for mode in ("0660", "0600", "0640", "0660"):
        rules = RULES.replace("0660", mode)
        prepared.write("/etc/udev/rules.d/71-people.rules", rules)
        prepared.run("udevadm", "control", "--reload")
        trigger(prepared)
        prepared.wait(
            lambda: shown(prepared, one)[1] == {ALICE: "rw-"}, PATIENCE, f"the entry after MODE={mode}"
        )
        assert opens(prepared, one, ALICE)
        assert not opens(prepared, one, BOB)
        assert shown(prepared, two) == (int(mode, 8), {})
    # it ends there: what the agent does is no news to it; all machines of a host hear its uevents, so
    # somebody else's may fall into the time
    path = prepared.path(one)

    def quiet() -> bool:
        before = path.stat().st_ctime_ns
        try:
            wait_until(lambda: path.stat().st_ctime_ns != before, 2, "another change")
        except AssertionError:
            return True
        return False

    assert any(quiet() for _ in range(5))


def test_uaccess_alone_would_have_taken_it(prepared: Machine, agent: Agent, group: int) -> None:
    """That these tests can fail: without the agent udev's builtin leaves no entry."""
    one = NODES[0]
    agent.allocate(RESOURCE, uid=ALICE, groups=[group], devices=[ident(one)])
    agent.systemctl("stop", UNIT)
    assert opens(prepared, one, ALICE)
    trigger(prepared)
    assert shown(prepared, one)[1] == {}
    assert not opens(prepared, one, ALICE)
    # at its start the agent looks what is missing
    agent.systemctl("start", UNIT)
    prepared.wait(lambda: opens(prepared, one, ALICE), PATIENCE, "the entry after the start")


def test_who_sits_at_the_machine_is_known(prepared: Machine, agent: Agent) -> None:
    """logind's word for it is a file per seat."""
    one = NODES[0]
    # logind itself would take the new seat for its own, with nobody there, and take the entries away
    prepared.run("systemctl", "mask", "--runtime", "--now", "systemd-logind")
    prepared.write("/run/systemd/seats/seat9", f"IS_SEAT0=0\nACTIVE=c9\nACTIVE_UID={SITTING}\n")
    rules = RULES.replace('TAG+="uaccess"', 'ENV{ID_SEAT}="seat9", TAG+="seat", TAG+="uaccess"')
    prepared.write("/etc/udev/rules.d/71-people.rules", rules)
    prepared.run("udevadm", "control", "--reload")
    trigger(prepared)
    assert shown(prepared, one)[1] == {SITTING: "rw-"}
    text = (
        f"{one} is open to user {SITTING}, who sits at seat9 (udev's tag uaccess, set by logind) and can use it"
        " without a lease"
    )
    prepared.wait(lambda: told(agent, ident(one))[-1:] == [("5", text)], PATIENCE, "the user at the seat")
    findings = agent.machine.run("heteroctl", "doctor", check=False).stdout
    assert f"note   access: {text}" in findings
    # the same entry of somebody who does not sit there
    prepared.shell("rm /run/systemd/seats/seat9")
    foreign = (
        f"{one} has an ACL entry for user {SITTING} (rw-) that no lease gives: they can use it without one;"
        f" remove it with: setfacl -x u:{SITTING} {one}"
    )

    def stray() -> None:
        # logind, which now knows of a seat without anybody, takes it away whenever it looks
        posix1e.ACL(text=f"u::rw,u:{SITTING}:rw,g::rw,m::rw,o::-").applyto(str(prepared.path(one)))

    def seen() -> bool:
        stray()
        return ("4", foreign) in told(agent, ident(one))

    def found() -> bool:
        stray()
        return f"wrong  access: {foreign}" in agent.machine.run("heteroctl", "doctor", check=False).stdout

    prepared.wait(seen, PATIENCE, "the foreign entry")
    prepared.wait(found, PATIENCE, "what doctor says of it")


def test_a_stray_rule_is_told_once(prepared: Machine, agent: Agent) -> None:
    one = NODES[0]
    before = len(told(agent, ident(one)))
    prepared.write("/etc/udev/rules.d/71-people.rules", RULES.replace("0660", "0666"))
    prepared.run("udevadm", "control", "--reload")
    for _ in range(3):
        trigger(prepared)
    text = (
        f"{one} is open to every user (0666): anybody can use it without a lease; look for a stray udev rule"
        " with MODE="
    )
    prepared.wait(lambda: told(agent, ident(one))[before:] == [("4", text)], PATIENCE, "the stray mode")
    trigger(prepared)
    prepared.write("/etc/udev/rules.d/71-people.rules", RULES)
    prepared.run("udevadm", "control", "--reload")
    trigger(prepared)
    prepared.wait(lambda: len(told(agent, ident(one))) > before + 1, PATIENCE, "the end of it")
    again = f"the nodes of {ident(one)} are closed again to all but their group and the owner of a lease"
    assert told(agent, ident(one))[before:] == [("4", text), ("5", again)]


def test_what_was_opened_keeps_the_device(prepared: Machine, agent: Agent, group: int) -> None:
    one = NODES[0]
    lease = agent.allocate(RESOURCE, uid=ALICE, groups=[group], devices=[ident(one)])
    hold = f"import os, sys; os.open({one!r}, os.O_RDWR | os.O_NOCTTY); print('open', flush=True)"
    hold += "; sys.stdin.read()"
    with prepared.start(
        "setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups", PYTHON, "-ISc", hold
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        agent.release(lease, uid=ALICE, groups=[group])
        prepared.wait(lambda: shown(prepared, one) == (0o660, {}), PATIENCE, "the end of the entry")
        assert not opens(prepared, one, ALICE)
        agent.wait_states({ident(one): "reclaiming", ident(NODES[1]): "idle"})
        prepared.end(holder)
    agent.wait_states(dict.fromkeys(map(ident, NODES), "idle"))


@pytest.mark.parametrize("point", ["granted:decided", "granted:stored", "release:stored", "return:stored"])
def test_killed_between_grant_and_revocation(prepared: Machine, agent: Agent, group: int, point: str) -> None:
    one = NODES[0]
    settings(prepared, Environment=f"HETERO_FAULT_POINT={point}", RestartSec="100ms")
    agent.systemctl("restart", UNIT)
    agent.wait_states(dict.fromkeys(map(ident, NODES), "idle"))
    pid = agent.pid
    call = (
        f"busctl call {names.BUS_NAME} {names.ROOT} {names.MANAGER} Allocate 'ssua{{sv}}' {point} {RESOURCE} 1"
        f" 2 confirm b true devices as 1 {ident(one)}"
    )
    done = prepared.run("sh", "-c", call, uid=ALICE, groups=[group], check=False)
    if done.returncode == 0:
        lease = done.stdout.split()[1].strip('"')
        call = f"busctl call {names.BUS_NAME} {names.ROOT} {names.MANAGER} Release so r-{point} {lease}"
        prepared.run("sh", "-c", call, uid=ALICE, groups=[group], check=False)
    prepared.wait(lambda: agent.restarted_since(pid), PATIENCE, "the next life of the agent")
    prepared.wait(lambda: len(agent.states()) == len(NODES), PATIENCE, "its devices")
    # an entry exactly while there is a lease
    alive = list(agent.leases())
    assert len(alive) == (1 if point == "granted:stored" else 0)
    for lease in alive:
        assert opens(prepared, one, ALICE)
        agent.release(lease)
    agent.wait_states(dict.fromkeys(map(ident, NODES), "idle"))
    assert shown(prepared, one) == (0o660, {})
    assert not opens(prepared, one, ALICE)
