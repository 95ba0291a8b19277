"""Callers of several users: members of the group, others, root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from hetero_agent import names
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import Agent, Refused
from tests.system.machine import CommandFailed, Machine

GROUP = "hetero"


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
    """Alice and Carol are members of the group, Bob is not."""
    machine.shell(
        f"useradd -m -G {GROUP},render alice; useradd -m -G {GROUP} carol; useradd -m bob",
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
def one(agent: Agent, hardware: Accelerators) -> Iterator[str]:
    """The id of an idle accelerator."""
    (plugged,) = hardware.plug()
    agent.wait_states({plugged.id: "idle"})
    yield plugged.id
    for lease in agent.leases():
        agent.release(lease)
    agent.wait_states({plugged.id: "idle"})


def test_a_member_is_granted_and_owns(agent: Agent, one: str, alice: Person) -> None:
    lease = agent.allocate(RESOURCE, **alice.who)
    assert agent.leases()[lease]["OwnerUid"] == alice.uid
    granted = agent.audit("HETERO_KIND=lease-granted")[-1]
    assert granted["HETERO_ACTOR_UID"] == str(alice.uid)
    assert agent.release(lease, **alice.who) is True


def test_others_are_not(agent: Agent, one: str, bob: Person) -> None:
    with pytest.raises(Refused):
        agent.allocate(RESOURCE, **bob.who)
    assert agent.states() == {one: "idle"}


def test_everybody_reads(agent: Agent, one: str, bob: Person) -> None:
    (listed,) = agent.heteroctl("list", **bob.who)["devices"]
    assert (listed["id"], listed["state"]) == (one, "idle")


def test_a_lease_is_its_owners(agent: Agent, one: str, alice: Person, carol: Person) -> None:
    lease = agent.allocate(RESOURCE, **alice.who)
    with pytest.raises(Refused):
        agent.release(lease, **carol.who)
    with pytest.raises(Refused):
        agent.confirm(lease, ttl=1_000_000, **carol.who)
    with pytest.raises(Refused):
        agent.call(lease, names.LEASE, "GetManifest", **carol.who)
    assert agent.call(lease, names.LEASE, "GetManifest", **alice.who)["devices"]["data"] == [one]
    assert agent.states() == {one: "in-use"}
    assert agent.release(lease) is True


def test_only_root_cordons(agent: Agent, one: str, alice: Person) -> None:
    with pytest.raises(CommandFailed):
        agent.heteroctl("cordon", one, "--reason", "mine", **alice.who)
    assert agent.devices()[one]["Cordoned"] is False
    agent.heteroctl("cordon", one, "--reason", "fan")
    assert agent.states() == {one: "offline"}
    agent.heteroctl("uncordon", one)


def test_nobody_binds_to_what_is_not_theirs(agent: Agent, one: str, alice: Person) -> None:
    with pytest.raises(Refused, match="unit"):
        agent.allocate(RESOURCE, unit="dbus.service", **alice.who)
    with pytest.raises(Refused, match="pid"):
        agent.allocate(RESOURCE, pid=1, **alice.who)
    assert agent.states() == {one: "idle"}


def test_a_member_runs_a_command(machine: Machine, agent: Agent, one: str, alice: Person) -> None:
    done = machine.run(
        "systemd-run", "--quiet", "--wait", "--pipe", f"--uid={alice.name}",
        "heteroctl", "run", "-r", RESOURCE, "--", "sh", "-c", 'echo "$HETERO_DEVICES"; id -u',
    )  # fmt: skip
    assert done.stdout.split() == [one, str(alice.uid)]
    agent.wait_states({one: "idle"})


def test_a_call_that_the_policy_does_not_list_never_arrives(agent: Agent, one: str, bob: Person) -> None:
    with pytest.raises(Refused, match=r"rejected|denied"):
        agent.call(names.ROOT, names.MANAGER, "NoSuchMethod", **bob.who)
    with pytest.raises(Refused, match=r"rejected|denied|not allowed"):
        agent.call(names.LOG_CONTROL_PATH, "org.freedesktop.DBus.Peer", "Nonsense", **bob.who)
