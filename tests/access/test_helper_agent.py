"""A real agent and its privileged helper: what leases give is made and taken back, whoever of them dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import posix1e
import pytest

from hetero_agent import names
from tests.access.granting import entries
from tests.support.access import AccessHelper
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, Reply, V
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE, RESOURCE
from tests.support.wait import wait_until

#: What a caller gets for a call that the agent died over.
GONE = {"NoReply", "ServiceUnknown"}


class Both(NamedTuple):
    agent: AgentProcess
    helper: AccessHelper
    member: Client

    def allocate(self, request: str = "a") -> Reply:
        return self.member.reply(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", request, RESOURCE, 1, {})

    def release(self, lease: str) -> Reply:
        return self.member.reply(names.ROOT, names.MANAGER, "Release", "so", f"end-{lease[-32:]}", lease)

    def made(self) -> tuple[bool, int, int, int]:
        """Whether the member has an entry; how many specifications, records and grant files there are."""
        directories = (
            (self.helper.cdi, "*"),
            (self.helper.records, "?" * 32),
            (self.helper.runtime / "grants", "*"),
        )
        cdi, records, grants = (len(list(one.glob(form))) for one, form in directories)
        return MEMBER in entries(CONSOLE), cdi, records, grants

    def wait_made(self, wanted: tuple[bool, int, int, int]) -> None:
        wait_until(lambda: self.made() == wanted, what=f"{wanted} on the host")

    def wait_state(self, state: str) -> None:
        self.member.wait_for_device(DEVICE_ID, State=state)


ALL, NOTHING = (True, 1, 1, 1), (False, 0, 0, 0)


@pytest.fixture
def both(bus: PrivateBus) -> Iterator[Both]:
    """An agent that asks a helper; the agent runs, the helper does."""
    mode = CONSOLE.stat().st_mode & 0o777
    agent = AgentProcess(bus, profiles={"console.toml": PROFILE}, sources="kernel")
    helper = AccessHelper(agent=agent)
    agent.write_config(CONFIG + f'[access]\nhelper = "{helper.socket}"\n[grant]\neffects-timeout = 6\n')
    try:
        helper.start()
        agent.start()
        with Client(bus, MEMBER, [GROUP_GID]) as member:
            member.wait_for_device(DEVICE_ID, State="idle")
            yield Both(agent, helper, member)
    finally:
        agent.close()
        helper.close()
        posix1e.ACL(mode=mode).applyto(str(CONSOLE))


def test_made_with_the_lease_and_gone_with_it(both: Both) -> None:
    lease = both.allocate().value[0]
    assert both.made() == ALL
    both.release(lease)
    both.wait_state("idle")
    assert both.made() == NOTHING


@pytest.mark.parametrize("point", ["allocate:stored", "granted:decided", "granted:stored"])
def test_the_agent_is_killed_in_a_grant(both: Both, point: str) -> None:
    """The same call gets its lease afterwards, or it was answered; either way the lease gives what it should,
    and nothing is there of any other."""
    both.agent.terminate()
    both.agent.start(env={"HETERO_FAULT_POINT": point})
    both.wait_state("idle")
    try:
        both.allocate()
    except CallError as error:
        if error.name.rpartition(".")[2] not in GONE:
            raise
    assert both.agent.wait() == -signal.SIGKILL
    both.agent.start()
    wait_until(
        lambda: both.member.device(DEVICE_ID)["State"] in ("idle", "allocating", "in-use"), what="a state"
    )
    if both.member.device(DEVICE_ID)["State"] == "idle":
        both.wait_made(NOTHING)
    lease = both.allocate().value[0]
    both.wait_made(ALL)
    both.release(lease)
    both.wait_state("idle")
    assert both.made() == NOTHING


@pytest.mark.parametrize("point", ["release:decided", "release:stored", "release:done"])
def test_the_agent_is_killed_in_a_release(both: Both, point: str) -> None:
    both.agent.terminate()
    both.agent.start(env={"HETERO_FAULT_POINT": point})
    both.wait_state("idle")
    lease = both.allocate().value[0]
    try:
        both.release(lease)
    except CallError as error:
        if error.name.rpartition(".")[2] not in GONE:
            raise
    assert both.agent.wait() == -signal.SIGKILL
    both.agent.start()
    if point == "release:decided":
        # nothing of it was stored
        both.wait_made(ALL)
        both.release(lease)
    both.wait_state("idle")
    both.wait_made(NOTHING)


def test_no_device_is_free_before_all_is_taken_back(both: Both) -> None:
    lease = both.allocate().value[0]
    both.helper.signal(signal.SIGSTOP)
    both.release(lease)
    both.wait_state("reclaiming")
    assert both.made() == ALL
    with pytest.raises(CallError):
        both.allocate("b")
    both.helper.signal(signal.SIGCONT)
    both.wait_state("idle")
    assert both.made() == NOTHING


def test_a_helper_that_died_in_between_is_asked_again(both: Both) -> None:
    lease = both.allocate().value[0]
    both.helper.kill9()
    both.release(lease)
    both.wait_state("reclaiming")
    both.helper.start()
    both.wait_state("idle")
    assert both.made() == NOTHING


def test_what_a_helper_was_too_late_for_at_the_start_is_swept_later(both: Both) -> None:
    both.allocate()
    both.agent.kill9()
    # the lease is nobody's any more, as after a reboot that kept what the helper wrote down
    for path in both.agent.runtime.glob("ledger.sqlite*"):
        path.unlink()
    both.helper.signal(signal.SIGSTOP)
    both.agent.start()
    wait_until(lambda: "can't be taken back yet" in both.agent.log, what="a sweep that fails")
    assert both.made()[:3] == ALL[:3]
    both.helper.signal(signal.SIGCONT)
    both.wait_made(NOTHING)


def test_a_reload_takes_another_helper_or_none(both: Both) -> None:
    """What the old one made is undone by whoever is there then, as far as it knows of it."""
    lease = both.allocate().value[0]
    both.agent.signal(signal.SIGHUP)
    both.agent.wait_for_log("the configuration was read again")
    assert both.made() == ALL
    both.release(lease)
    both.wait_state("idle")
    assert both.made() == NOTHING


def test_a_lease_that_ended_while_it_waited_to_be_renewed_is_over(both: Both) -> None:
    """Whoever may write a node can touch it, and all leases that share it are renewed, one by one."""
    (both.agent.profiles / "console.toml").write_text(PROFILE + "\n[shared]\nslots = 4\n")
    both.agent.signal(signal.SIGHUP)
    slots = [f"{DEVICE_ID}-s{number}" for number in range(4)]

    def wait_idle() -> None:
        for slot in slots:
            both.member.wait_for_device(slot, State="idle")

    def allocate(request: str) -> str:
        options = {"pid": V("u", process.pid), "confirm": V("b", True)}
        arguments = (request, f"{RESOURCE}.shared", 1, options)
        lease: str = both.member.reply(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", *arguments).value[0]
        return lease

    with as_member() as process:
        wait_idle()
        leases = [allocate(f"r{number}") for number in range(4)]
        before = files(both)
        both.helper.signal(signal.SIGSTOP)
        os.utime(CONSOLE)
        wait_until(lambda: files(both) != before, what="the first of the renewals")
        for lease in leases:
            both.release(lease)
        both.helper.signal(signal.SIGCONT)
        wait_idle()
        # as many requests as renewals could have been waiting for these
        for number in range(4):
            both.release(allocate(f"s{number}"))
            wait_idle()
    assert both.made() == NOTHING


@contextlib.contextmanager
def as_member() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the member's, to bind leases to."""
    with subprocess.Popen(["sleep", "600"], user=MEMBER, group=MEMBER, extra_groups=[]) as process:
        try:
            yield process
        finally:
            process.kill()


def files(both: Both) -> set[tuple[str, int]]:
    """The grant files as they are: each renewal writes its anew."""
    return {(path.name, path.stat().st_ino) for path in (both.helper.runtime / "grants").glob("?" * 32)}
