"""People at a node, through a real agent: what a lease's uid can open, and nobody else, whatever udev does."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import posix1e
import pytest

from hetero_agent import faultpoints, names
from tests.access.test_acl import effective, extended, mode, opens
from tests.support import trail
from tests.support.agent import GROUP_GID, MEMBER, OTHER_MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE, RESOURCE
from tests.support.ctl import Ctl
from tests.support.hold import HoldingProcess
from tests.support.vendor import RESOURCE as VENDOR_RESOURCE
from tests.support.vendor import Vendor
from tests.support.wait import wait_until

NODE_GROUP = 7777


@pytest.fixture(autouse=True)
def console() -> Iterator[Path]:
    """The console 0660 with a group of its own; afterwards as it was."""
    before = CONSOLE.stat()
    assert not extended(CONSOLE)
    os.chown(CONSOLE, 0, NODE_GROUP)
    CONSOLE.chmod(0o660)
    yield CONSOLE
    if not CONSOLE.exists():
        os.mknod(CONSOLE, before.st_mode, before.st_rdev)
    if extended(CONSOLE):
        os.removexattr(CONSOLE, "system.posix_acl_access")
    os.chown(CONSOLE, before.st_uid, before.st_gid)
    CONSOLE.chmod(stat.S_IMODE(before.st_mode))


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, profiles={"console.toml": PROFILE}, sources="kernel")
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def member(bus: PrivateBus, agent: AgentProcess) -> Iterator[Client]:
    with Client(bus, MEMBER, [GROUP_GID]) as client:
        client.wait_for_device(DEVICE_ID, State="idle")
        yield client


def wait_open(uid: int, what: str) -> None:
    wait_until(lambda: opens(CONSOLE, uid), what=what)


def wait_quiet() -> None:
    """Wait until nobody has changed the node's modes and entries for a second."""

    def quiet() -> bool:
        before = CONSOLE.stat().st_ctime_ns
        return time.time_ns() - before > 1_000_000_000

    wait_until(quiet, what="an end of the changes of the node")


def test_only_the_owner_of_a_lease_can_open_its_node(member: Client) -> None:
    assert not opens(CONSOLE, MEMBER)
    lease, _ = member.allocate("r1", RESOURCE)
    # from the reply on
    assert opens(CONSOLE, MEMBER)
    assert not opens(CONSOLE, OTHER_MEMBER)
    assert opens(CONSOLE, OTHER_MEMBER, NODE_GROUP)
    member.release("r2", lease)
    member.wait_for_device(DEVICE_ID, State="idle")
    assert not opens(CONSOLE, MEMBER)
    assert not extended(CONSOLE)
    assert mode(CONSOLE) == 0o660


def test_the_owner_uid_of_a_lease_has_the_entry(bus: PrivateBus, member: Client) -> None:
    with Client(bus) as root:
        lease, _ = root.allocate("r1", RESOURCE, options={"owner-uid": V("u", 1000)})
        assert opens(CONSOLE, 1000)
        assert not opens(CONSOLE, MEMBER)
        root.release("r2", lease)
        root.wait_for_device(DEVICE_ID, State="idle")
        assert not extended(CONSOLE)
        # root needs no entry
        lease, _ = root.allocate("r3", RESOURCE)
        assert not extended(CONSOLE)
        root.release("r4", lease)


@pytest.mark.parametrize("bits", [0o660, 0o600])
def test_what_takes_the_entry_away_is_answered_once(member: Client, bits: int) -> None:
    CONSOLE.chmod(bits)
    member.allocate("r1", RESOURCE)
    for reset in (
        # udev's builtin uaccess: all users' entries; setfacl -b; a rule with another mode
        lambda: posix1e.ACL(text="u::rw,g::rw,m::rw,o::-").applyto(str(CONSOLE)),
        lambda: os.removexattr(CONSOLE, "system.posix_acl_access"),
        lambda: CONSOLE.chmod(0o600),
        lambda: CONSOLE.chmod(0o660),
    ):
        reset()
        wait_open(MEMBER, "the entry made again")
        assert not opens(CONSOLE, OTHER_MEMBER)
    wait_quiet()
    assert opens(CONSOLE, MEMBER)


def test_a_node_that_is_deleted_and_made_again(member: Client) -> None:
    member.allocate("r1", RESOURCE)
    found = CONSOLE.stat()
    CONSOLE.unlink()
    os.mknod(CONSOLE, stat.S_IFCHR | 0o600, found.st_rdev)
    wait_open(MEMBER, "the entry on the new node")
    # and in one step
    other = CONSOLE.with_name(CONSOLE.name + ".new")
    os.mknod(other, stat.S_IFCHR | 0o600, found.st_rdev)
    other.rename(CONSOLE)
    wait_open(MEMBER, "the entry on the next node")


def test_a_held_handle_keeps_the_device_when_the_entry_is_gone(member: Client) -> None:
    lease, _ = member.allocate("r1", RESOURCE)
    with HoldingProcess(CONSOLE, uid=MEMBER):
        member.release("r2", lease)
        wait_until(lambda: not extended(CONSOLE), what="the end of the entry")
        assert not opens(CONSOLE, MEMBER)
        assert mode(CONSOLE) == 0o660
        member.wait_for_device(DEVICE_ID, State="reclaiming")
        with pytest.raises(CallError) as caught:
            member.allocate("r3", RESOURCE)
        assert caught.value.name == "Unavailable"
        assert member.device(DEVICE_ID)["State"] == "reclaiming"
    member.wait_for_device(DEVICE_ID, State="idle")


def test_an_entry_that_was_there_before_stays(member: Client) -> None:
    posix1e.ACL(text=f"u::rw,u:{MEMBER}:rw,u:1000:r,g::rw,m::rw,o::-").applyto(str(CONSOLE))
    before = effective(CONSOLE)
    lease, _ = member.allocate("r1", RESOURCE)
    member.release("r2", lease)
    member.wait_for_device(DEVICE_ID, State="idle")
    assert effective(CONSOLE) == before


def test_strangers_entries_and_modes_are_told_once(
    agent: AgentProcess, member: Client, bus: PrivateBus
) -> None:
    def told() -> list[tuple[str, str]]:
        return [(one["PRIORITY"], one["HETERO_REASON"]) for one in trail.entries(agent, "exposure")]

    ctl = Ctl(bus.address)
    lease, _ = member.allocate("r1", RESOURCE)
    access = member.call(names.device_path(DEVICE_ID), names.DEVICE, "GetAccess")
    assert access == [
        {
            "path": str(CONSOLE),
            "role": "own",
            "mode": 0o660,
            "uid": 0,
            "gid": NODE_GROUP,
            "entries": {str(MEMBER): "rw-"},
            "remarks": [],
        }
    ]
    shown = re.sub(" +", " ", ctl("show", DEVICE_ID).out)
    assert f"\naccess {CONSOLE}: 0660 root:{NODE_GROUP}, {pwd.getpwuid(MEMBER).pw_name} rw-\n" in shown
    subprocess.run(["setfacl", "-m", "u:1234:rw", str(CONSOLE)], check=True)
    foreign = (
        f"{CONSOLE} has an ACL entry for user 1234 (rw-) that no lease gives: they can use it without one;"
        f" remove it with: setfacl -x u:1234 {CONSOLE}"
    )
    wait_until(lambda: told() == [("4", foreign)], what="the foreign entry")
    assert f"wrong  access: {foreign}" in ctl("doctor", code=None).out
    CONSOLE.chmod(0o666)
    stray = (
        f"{CONSOLE} is open to every user (0666): anybody can use it without a lease; look for a stray udev"
        " rule with MODE="
    )
    wait_until(lambda: told()[1:] == [("4", stray)], what="the stray mode")
    assert f"wrong  access: {stray}" in ctl("doctor", code=None).out
    wait_until(lambda: stray in "".join(agent.notify.lines("STATUS=")), what="the status line")
    CONSOLE.chmod(0o660)
    subprocess.run(["setfacl", "-x", "u:1234", str(CONSOLE)], check=True)
    wait_until(lambda: len(told()) > 2, what="the end of it")
    wait_quiet()
    assert [priority for priority, _ in told()] == ["4", "4", "5"]
    assert "access:" not in ctl("doctor", code=None).out
    # an entry of the lease's own uid that outlives the lease is nobody's
    member.release("r2", lease)
    member.wait_for_device(DEVICE_ID, State="idle")
    subprocess.run(["setfacl", "-m", f"u:{MEMBER}:rw", str(CONSOLE)], check=True)
    wait_until(lambda: f"for user {MEMBER} " in told()[-1][1], what="the entry that no lease gives any more")


def test_a_node_of_roots_alone_is_worth_knowing(bus: PrivateBus) -> None:
    os.chown(CONSOLE, 0, 0)
    CONSOLE.chmod(0o600)
    for given, level, who in ((True, "note", "root and the owner of a lease"), (False, "wrong", "root")):
        one = AgentProcess(bus, profiles={"console.toml": PROFILE}, sources="kernel")
        if not given:
            one.config_path.write_text(one.config_path.read_text() + "\n[access]\nacl = false\n")
        try:
            one.start()
            with Client(bus) as root:
                root.wait_for_device(DEVICE_ID, State="idle")
                (node,) = root.call(names.device_path(DEVICE_ID), names.DEVICE, "GetAccess")
            text = (
                f"{CONSOLE} is root:root 0600: only {who} can use it; a udev rule with GROUP= and"
                ' MODE="0660" lets a group in'
            )
            assert node["remarks"] == [[level, text]]
            wait_until(lambda: trail.entries(one, "exposure"), what="the journal")  # noqa: B023
            assert [entry["PRIORITY"] for entry in trail.entries(one, "exposure")] == ["5" if given else "4"]
        finally:
            one.close()


#: Where the agent is killed; what is told to the bus in between changes nothing on the host.
POINTS = [
    f"{step}:{stage}"
    for step in ("allocate", "granted", "release", "return")
    for stage in faultpoints.STAGES
    if stage != "published"
]


@pytest.mark.parametrize("point", POINTS)
def test_killed_between_grant_and_revocation(bus: PrivateBus, point: str) -> None:
    """After the next start an entry is there exactly while there is a lease."""
    agent = AgentProcess(bus, profiles={"console.toml": PROFILE}, sources="kernel")
    try:
        agent.start(env={"HETERO_FAULT_POINT": point})
        with Client(bus, MEMBER, [GROUP_GID]) as client:
            client.wait_for_device(DEVICE_ID, State="idle")
            # whether it answered before it died is another test's affair
            with contextlib.suppress(CallError):
                lease, _ = client.allocate("a", RESOURCE)
                client.release("r", lease)
            wait_until(lambda: not agent.running(), what="the end at the fault point")
            assert agent.wait() == -9
            agent.start()
            client.wait_for_device(DEVICE_ID)
            if point in ("granted:stored", "granted:done", "release:decided"):
                assert opens(CONSOLE, MEMBER)
                # the same request again has the same answer, and the lease is the caller's to end
                lease, _ = client.allocate("a", RESOURCE)
                client.release("again", lease)
            client.wait_for_device(DEVICE_ID, State="idle")
            assert not opens(CONSOLE, MEMBER)
            assert not extended(CONSOLE)
            assert mode(CONSOLE) == 0o660
            records = agent.runtime / "access"
            assert not records.exists() or list(records.iterdir()) == []
    finally:
        agent.close()


def test_a_lost_device_costs_the_others_nothing(bus: PrivateBus) -> None:
    """Of a lease of two, one is unplugged; then udev resets the other's ACL."""
    agent = AgentProcess(bus)
    vendor = None
    try:
        agent.start()
        vendor = Vendor(agent)
        vendor.add("npu-0", "npu-1")
        for one in ("npu-0", "npu-1"):
            vendor.file(one).chmod(0o660)
        vendor.wait_idle()
        with Client(bus, MEMBER, [GROUP_GID]) as client:
            lease, _ = client.allocate("r1", VENDOR_RESOURCE, 2, {"confirm": V("b", True)})
            assert opens(vendor.file("npu-0"), MEMBER)
            vendor.remove("npu-0")
            client.wait_for_device("npu-0", State="lost")
            vendor.file("npu-0").unlink()
            os.removexattr(vendor.file("npu-1"), "system.posix_acl_access")
            wait_until(lambda: opens(vendor.file("npu-1"), MEMBER), what="the entry made again")
            client.release("r2", lease)
            client.wait_for_device("npu-1", State="idle")
            assert not extended(vendor.file("npu-1"))
            assert list((agent.runtime / "access").iterdir()) == []
            assert trail.entries(agent, "access") == []
    finally:
        if vendor is not None:
            vendor.close()
        agent.close()


def test_a_lost_device_that_comes_back_is_its_owners_no_more(bus: PrivateBus) -> None:
    """Its file stayed as it was; the lease goes on with its other device."""
    agent = AgentProcess(bus)
    vendor = None
    try:
        agent.start()
        vendor = Vendor(agent)
        vendor.add("npu-0", "npu-1")
        files = [vendor.file(one) for one in ("npu-0", "npu-1")]
        for file in files:
            file.chmod(0o660)
        vendor.wait_idle()
        with Client(bus, MEMBER, [GROUP_GID]) as client, Client(bus, OTHER_MEMBER, [GROUP_GID]) as other:
            lease, _ = client.allocate("r1", VENDOR_RESOURCE, 2, {"confirm": V("b", True)})
            entry = vendor.devices["npu-0"]
            vendor.remove("npu-0")
            client.wait_for_device("npu-0", State="lost")
            wait_until(lambda: not extended(files[0]), what="the lost device's entry taken back")
            assert opens(files[1], MEMBER)
            vendor.devices["npu-0"] = entry
            vendor.report()
            other.wait_for_device("npu-0", State="idle")
            theirs, _ = other.allocate("r2", VENDOR_RESOURCE, 1, {"confirm": V("b", True)})
            assert [opens(files[0], one) for one in (MEMBER, OTHER_MEMBER)] == [False, True]
            other.release("r3", theirs)
            client.release("r4", lease)
            for one in ("npu-0", "npu-1"):
                client.wait_for_device(one, State="idle")
            assert not extended(files[0])
    finally:
        if vendor is not None:
            vendor.close()
        agent.close()
