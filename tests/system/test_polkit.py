"""What the machine's own polkit decides: its defaults, its rules, a session, a password on a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from hetero_agent import names
from tests.support.terminal import OnTerminal
from tests.support.timing import within
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import Agent, Refused
from tests.system.machine import CommandFailed, Machine

ACTION = names.BUS_NAME
RULES = "/etc/polkit-1/rules.d/10-lab.rules"
PASSWORD = "open-sesame"


class Person(NamedTuple):
    """A user of the machine: UID, and all its GROUPS."""

    name: str
    uid: int
    groups: tuple[int, ...]

    @property
    def who(self) -> dict[str, object]:
        """What says who calls, for `Agent` and `Machine`."""
        return {"uid": self.uid, "groups": self.groups}


@pytest.fixture(scope="module")
def people(machine: Machine) -> dict[str, Person]:
    """Alice is a member of the agent's group, Bob and Carol are nobody, Dora is an administrator."""
    machine.shell(
        "useradd -m -G hetero alice; useradd -m bob; useradd -m carol; useradd -m -G sudo dora;"
        f"echo dora:{PASSWORD} | chpasswd"
    )
    found = {}
    for name in ("alice", "bob", "carol"):
        uid = int(machine.shell(f"id -u {name}"))
        groups = tuple(int(one) for one in machine.shell(f"id -G {name}").split())
        found[name] = Person(name, uid, groups)
    return found


@pytest.fixture
def alice(people: dict[str, Person]) -> Person:
    return people["alice"]


@pytest.fixture
def bob(people: dict[str, Person]) -> Person:
    return people["bob"]


@pytest.fixture
def carol(people: dict[str, Person]) -> Person:
    return people["carol"]


@pytest.fixture
def one(agent: Agent, hardware: Accelerators, carol: Person) -> Iterator[str]:
    """The id of an idle accelerator; polkit has its defaults again afterwards."""
    (plugged,) = hardware.plug()
    agent.wait_states({plugged.id: "idle"})
    yield plugged.id
    agent.machine.shell(f"rm -f {RULES}")
    agent.machine.wait(lambda: can(agent, carol, "Reap") == "challenge", 30, "polkit's defaults in force")
    for lease in agent.leases():
        agent.release(lease)
    agent.wait_states({plugged.id: "idle"})


def can(agent: Agent, person: Person, what: str) -> str:
    return str(agent.call(names.ROOT, names.MANAGER, f"Can{what}", **person.who))  # type: ignore[arg-type]


def rule(agent: Agent, carol: Person, text: str) -> None:
    """Have polkit decide by TEXT, the body of a function of action and subject.  polkit takes it a moment
    later: that Carol may not see and end holders, which a rule beside it says, shows that it did."""
    told = f'if (action.id == "{ACTION}.reap" && subject.user == "carol") return polkit.Result.NO;'
    agent.machine.write(RULES, f"polkit.addRule(function(action, subject) {{ {told} {text} }});\n")
    agent.machine.wait(lambda: can(agent, carol, "Reap") == "no", 30, "the rule in force")


def busctl_allocate(machine: Machine, person: Person, flag: str, request: str) -> tuple[int, str, float]:
    """Allocate by busctl, which allows interactive authorization or not; return its status, what it says,
    and how long it took."""
    begin = time.monotonic()
    done = machine.run(
        "busctl", f"--allow-interactive-authorization={flag}", "call", names.BUS_NAME, names.ROOT,
        names.MANAGER, "Allocate", "ssua{sv}", request, RESOURCE, "1", "0",
        check=False, uid=person.uid, groups=person.groups,
    )  # fmt: skip
    return done.returncode, done.stderr, time.monotonic() - begin


def test_polkit_knows_the_actions(machine: Machine, agent: Agent) -> None:
    listed = machine.run("pkaction").stdout.split()
    assert {name for name in listed if name.startswith(ACTION)} == {
        f"{ACTION}.{name}" for name in ("allocate", "release-others", "cordon", "reap")
    }
    shown = machine.run("pkaction", "--verbose", "--action-id", f"{ACTION}.allocate").stdout
    assert "implicit active:   yes" in shown
    assert "implicit any:      auth_admin_keep" in shown
    assert "unix-user:hetero-agent" in shown


def test_defaults(agent: Agent, one: str, alice: Person, bob: Person) -> None:
    # the agent asks about others although it is not root
    assert agent.unit("User") == "hetero-agent"
    assert {what: can(agent, bob, what) for what in ("Allocate", "ReleaseOthers", "Cordon", "Reap")} == (
        dict.fromkeys(("Allocate", "ReleaseOthers", "Cordon", "Reap"), "challenge")
    )
    assert [can(agent, alice, what) for what in ("Allocate", "Cordon")] == ["yes", "challenge"]
    assert agent.call(names.ROOT, names.MANAGER, "CanReap") == "yes"


@pytest.mark.parametrize(
    ("flag", "text"), [("no", "the call does not allow to ask"), ("yes", "polkit has nobody to ask there")]
)
def test_who_would_have_to_authenticate_is_told_at_once(
    machine: Machine, agent: Agent, one: str, bob: Person, flag: str, text: str
) -> None:
    status, said, took = busctl_allocate(machine, bob, flag, f"bob-{flag}")
    assert status != 0
    assert text in said
    assert took < 10
    assert agent.states() == {one: "idle"}
    told = agent.audit("HETERO_KIND=request-refused", f"HETERO_REQUEST_ID=bob-{flag}")
    assert [entry["HETERO_REASON"] for entry in told] == ["InteractiveAuthorizationRequired"]


def test_heteroctl_without_a_terminal_says_what_to_do(machine: Machine, one: str, bob: Person) -> None:
    done = machine.run("heteroctl", "cordon", one, check=False, uid=bob.uid, groups=bob.groups)
    assert done.returncode == 77
    assert "next: run it on a terminal" in done.stderr


def test_a_rule_lets_one_uid_lease(agent: Agent, one: str, bob: Person, carol: Person) -> None:
    rule(
        agent,
        carol,
        f"""
        if (action.id == "{ACTION}.allocate" && subject.user == "bob")
            return action.lookup("resource") == "{RESOURCE}" && action.lookup("count") == "1"
                ? polkit.Result.YES : polkit.Result.NO;
    """,
    )
    lease = agent.allocate(RESOURCE, request="by-rule", **bob.who)  # type: ignore[arg-type]
    assert agent.leases()[lease]["OwnerUid"] == bob.uid
    (granted,) = agent.audit("HETERO_KIND=lease-granted", "HETERO_REQUEST_ID=by-rule")
    assert granted["HETERO_ACTOR_UID"] == str(bob.uid)
    assert granted["HETERO_ACTOR_AUTHORITY"] == f"{ACTION}.allocate"
    assert agent.release(lease, **bob.who) is True  # type: ignore[arg-type]
    with pytest.raises(Refused):
        agent.allocate(RESOURCE, 2, **bob.who)  # type: ignore[arg-type]
    with pytest.raises(Refused):
        agent.allocate(RESOURCE, **carol.who)  # type: ignore[arg-type]


def test_the_group_is_not_asked_about(
    agent: Agent, one: str, alice: Person, bob: Person, carol: Person
) -> None:
    rule(agent, carol, f'if (action.id == "{ACTION}.allocate") return polkit.Result.NO;')
    with pytest.raises(Refused, match=f"no to {ACTION}.allocate"):
        agent.allocate(RESOURCE, **bob.who)  # type: ignore[arg-type]
    assert can(agent, bob, "Allocate") == "no"
    lease = agent.allocate(RESOURCE, request="alice", **alice.who)  # type: ignore[arg-type]
    (granted,) = agent.audit("HETERO_KIND=lease-granted", "HETERO_REQUEST_ID=alice")
    assert granted["HETERO_ACTOR_AUTHORITY"] == ""
    assert agent.release(lease, **alice.who) is True  # type: ignore[arg-type]


def test_a_rule_lets_one_uid_end_anothers_lease(
    agent: Agent, one: str, alice: Person, bob: Person, carol: Person
) -> None:
    lease = agent.allocate(RESOURCE, **alice.who)  # type: ignore[arg-type]
    with pytest.raises(Refused):
        agent.release(lease, **bob.who)  # type: ignore[arg-type]
    rule(
        agent,
        carol,
        f"""
        if (action.id == "{ACTION}.release-others" && subject.user == "bob")
            return action.lookup("owner") == "{alice.uid}" && action.lookup("lease") ==
                "{names.lease_id_of(lease)}" ? polkit.Result.YES : polkit.Result.NO;
    """,
    )
    assert agent.release(lease, **bob.who) is True  # type: ignore[arg-type]
    (ended,) = agent.audit("HETERO_KIND=lease-ended", f"HETERO_LEASE={names.lease_id_of(lease)}")
    assert ended["HETERO_ACTOR_UID"] == str(bob.uid)
    assert ended["HETERO_ACTOR_AUTHORITY"] == f"{ACTION}.release-others"


def test_a_rule_lets_one_uid_cordon_one_device(agent: Agent, one: str, bob: Person, carol: Person) -> None:
    rule(
        agent,
        carol,
        f"""
        if (action.id == "{ACTION}.cordon" && subject.user == "bob")
            return action.lookup("device") == "{one}" ? polkit.Result.YES : polkit.Result.NO;
    """,
    )
    agent.heteroctl("cordon", one, "--reason", "fan", **bob.who)  # type: ignore[arg-type]
    assert agent.states() == {one: "offline"}
    agent.heteroctl("uncordon", one, **bob.who)  # type: ignore[arg-type]
    assert {entry["HETERO_ACTOR_AUTHORITY"] for entry in agent.audit("HETERO_KIND=cordon")} == {
        f"{ACTION}.cordon"
    }


def test_an_active_local_session_may_lease(machine: Machine, agent: Agent, one: str, bob: Person) -> None:
    call = [
        "busctl", "--json=short", "call", names.BUS_NAME, names.ROOT, names.MANAGER, "CanAllocate",
    ]  # fmt: skip
    session = ["--property=PAMName=login", "--setenv=XDG_SEAT=seat0"]
    answers = []
    for properties in ([], session):
        done = machine.run(
            "systemd-run", "--quiet", "--wait", "--pipe", f"--uid={bob.name}", *properties, *call
        )
        answers.append(json.loads(done.stdout)["data"][0])
    assert answers == ["challenge", "yes"]


def test_a_password_on_the_terminal(machine: Machine, agent: Agent, one: str, bob: Person) -> None:
    words = [
        "setpriv",
        f"--reuid={bob.uid}",
        f"--regid={bob.uid}",
        "--clear-groups",
        "heteroctl",
        "cordon",
        one,
    ]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
    with OnTerminal(machine.command(*words), environment) as terminal:
        shown = terminal.shows("Password:")
        assert "take accelerators of this host out of service" in shown
        terminal.type(f"{PASSWORD}\n")
        code, shown = terminal.wait()
    assert code == 0, shown
    assert PASSWORD not in shown
    assert agent.states() == {one: "offline"}
    with OnTerminal(machine.command(*words[:-2], "uncordon", one), environment) as terminal:
        terminal.shows("Password:")
        terminal.type("wrong\n")
        code, shown = terminal.wait()
    assert code == 77, shown
    assert agent.states() == {one: "offline"}
    agent.heteroctl("uncordon", one)


def test_a_polkit_that_hangs_holds_up_nobody(
    machine: Machine, agent: Agent, one: str, alice: Person, bob: Person
) -> None:
    polkit = agent.unit("MainPID", "polkit.service")
    machine.run("kill", "-STOP", polkit)
    try:
        waiting = machine.start(
            "setpriv", f"--reuid={bob.uid}", f"--regid={bob.uid}", "--clear-groups", "busctl", "call",
            names.BUS_NAME, names.ROOT, names.MANAGER, "CanAllocate",
        )  # fmt: skip

        def attempt() -> float:
            begin = time.monotonic()
            lease = agent.allocate(RESOURCE, **alice.who)  # type: ignore[arg-type]
            assert agent.release(lease) is True
            took = time.monotonic() - begin
            agent.wait_states({one: "idle"})
            return took

        within(4, attempt)
        status, said, took = busctl_allocate(machine, bob, "no", "hangs")
        assert status != 0
        assert "polkit did not answer within 5 s" in said
        assert took < 20
        assert "polkit did not answer" in waiting.communicate(timeout=60)[0]
    finally:
        machine.run("kill", "-CONT", polkit)
    machine.wait(lambda: can(agent, bob, "Allocate") == "challenge", 30, "polkit's answer again")


def test_without_polkit_root_and_the_group_remain(
    machine: Machine, agent: Agent, one: str, alice: Person, bob: Person
) -> None:
    machine.shell("systemctl mask --runtime --now polkit.service")
    try:
        with pytest.raises(Refused):
            agent.allocate(RESOURCE, **bob.who)  # type: ignore[arg-type]
        with pytest.raises(CommandFailed):
            agent.heteroctl("cordon", one, **alice.who)  # type: ignore[arg-type]
        lease = agent.allocate(RESOURCE, **alice.who)  # type: ignore[arg-type]
        assert agent.release(lease) is True
    finally:
        machine.shell("systemctl unmask --runtime polkit.service")
