"""The privileged helper as a process, and the agent's side of it: asked, ended, killed, hung, lied to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import posix1e
import pytest

from hetero_agent.access.door import Door
from hetero_agent.access.grantfile import DIRECTORY, GrantFiles
from hetero_agent.access.manifest import AccessError
from hetero_agent.access.protocol import ANSWER_MAX, REQUEST_MAX
from hetero_agent.access.remote import Remote
from tests.access.granting import LEASE, OTHER, UID, entries, grant
from tests.access.test_door import lease
from tests.support.access import AccessHelper
from tests.support.console import CONSOLE, PROFILE
from tests.support.process import PYTHON
from tests.support.wait import wait_until


@pytest.fixture
def helper() -> Iterator[AccessHelper]:
    """A helper that knows a console as a device, not started yet."""
    mode = CONSOLE.stat().st_mode & 0o777
    one = AccessHelper()
    (one.profiles / "console.toml").write_text(PROFILE)
    yield one
    one.close()
    posix1e.ACL(mode=mode).applyto(str(CONSOLE))


def remote(helper: AccessHelper, deadline: float = 20) -> Remote:
    return Remote(helper.socket, helper.runtime / DIRECTORY, deadline)


def asked(helper: AccessHelper, work: Callable[[Remote], Awaitable[None]], deadline: float = 20) -> None:
    """Do WORK with an agent's side of HELPER."""

    async def run() -> None:
        one = remote(helper, deadline)
        try:
            await work(one)
        finally:
            one.close()

    asyncio.run(run())


def made(helper: AccessHelper) -> tuple[bool, int, int]:
    """Whether the console has an entry, how many specifications and how many records there are."""
    return UID in entries(CONSOLE), len(list(helper.cdi.glob("*"))), len(list(helper.records.glob("?" * 32)))


ALL, NOTHING = (True, 1, 1), (False, 0, 0)


async def prepare(one: Remote) -> None:
    await one.prepare(grant(CONSOLE))


async def revoke(one: Remote) -> None:
    await one.revoke(LEASE)


def test_prepare_revoke_sweep(helper: AccessHelper) -> None:
    helper.start()

    async def work(one: Remote) -> None:
        for _ in range(2):
            await one.prepare(grant(CONSOLE))
            assert made(helper) == ALL
        for _ in range(2):
            await one.revoke(LEASE)
            assert made(helper) == NOTHING
        assert not list((helper.runtime / DIRECTORY).iterdir())
        await one.prepare(grant(CONSOLE))
        await one.prepare(grant(CONSOLE, lease=OTHER))
        assert made(helper) == (True, 2, 2)
        await one.sweep({OTHER})
        assert made(helper) == ALL
        await one.renew(grant(CONSOLE, lease=OTHER))
        await one.sweep(())
        assert made(helper) == NOTHING
        assert one.problem == ""

    asked(helper, work)


def test_it_ends_when_idle_and_no_request_is_lost(helper: AccessHelper) -> None:
    """The connection is open all the time; between two requests the helper ends and another one comes."""
    helper.idle = 1  # not before the request that it is started for
    helper.start()

    async def work(one: Remote) -> None:
        for _ in range(3):
            await one.prepare(grant(CONSOLE))
            assert helper.wait() == 0
            assert made(helper) == ALL
            helper.start()
            await one.revoke(LEASE)
            assert helper.wait() == 0
            assert made(helper) == NOTHING
            helper.start()

    asked(helper, work)


def test_a_request_waits_for_a_helper_that_is_starting(helper: AccessHelper) -> None:
    async def work(one: Remote) -> None:
        asking = asyncio.ensure_future(one.prepare(grant(CONSOLE)))
        await asyncio.sleep(0.1)
        assert not asking.done()
        helper.start()
        await asking

    asked(helper, work)
    assert made(helper) == ALL


def test_killed_in_the_middle_of_a_request_the_next_one_does_it(helper: AccessHelper, tmp_path: Path) -> None:
    """Killed between record and work: by a program that is the helper and kills itself there once."""
    mark = tmp_path / "killed"
    program = tmp_path / "dies.py"
    program.write_text(_DIES)
    helper.program = (PYTHON, str(program), str(mark))
    helper.start()

    async def work(one: Remote) -> None:
        asking = asyncio.ensure_future(one.prepare(grant(CONSOLE)))
        await asyncio.to_thread(helper.wait)
        assert mark.exists()
        assert made(helper) == (False, 1, 1)
        helper.start()
        await asking

    asked(helper, work)
    assert made(helper) == ALL


_DIES = """
import os, signal, sys
mark = sys.argv.pop(1)
sys.path.insert(0, os.getcwd())
from hetero_agent import access_helper
from hetero_agent.access import acl

real = acl.give


def give(*arguments):
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)


acl.give = give
sys.exit(access_helper.main())
"""


def test_one_that_hangs_is_not_waited_for_and_does_nothing_late(helper: AccessHelper) -> None:
    """What was given up is undone, in the order in which it was asked, once it goes on."""
    helper.start()
    asked(helper, prepare)
    asked(helper, revoke)
    helper.signal(signal.SIGSTOP)

    async def hung(one: Remote) -> None:
        started = time.monotonic()
        with pytest.raises(AccessError, match="does not answer within"):
            await one.prepare(grant(CONSOLE))
        assert time.monotonic() - started < 20
        assert "does not answer" in one.problem
        with pytest.raises(AccessError, match="does not answer within"):
            await one.revoke(LEASE)

    asked(helper, hung, deadline=0.5)
    assert made(helper) == NOTHING
    helper.signal(signal.SIGCONT)
    asked(helper, revoke)
    assert made(helper) == NOTHING


def test_a_cancelled_request_is_not_answered_by_the_next(helper: AccessHelper) -> None:
    helper.start()

    async def work(one: Remote) -> None:
        await one.prepare(grant(CONSOLE))
        helper.signal(signal.SIGSTOP)
        asking = asyncio.ensure_future(one.prepare(grant(Path("/dev/null"), lease=OTHER)))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        helper.signal(signal.SIGCONT)
        # an answer of the refused request would be an error
        await one.revoke(LEASE)

    asked(helper, work)


def test_without_a_helper_nothing_is_made_and_that_is_told(helper: AccessHelper) -> None:
    helper.socket.unlink()

    async def work(one: Remote) -> None:
        await one.prepare(grant(CONSOLE))
        await one.revoke(LEASE)
        await one.sweep(())
        assert "systemctl enable --now hetero-agent-access.socket" in one.problem

    asked(helper, work)
    assert made(helper) == NOTHING
    assert not (helper.runtime / DIRECTORY).exists()


def test_one_that_went_away_is_an_error(helper: AccessHelper) -> None:
    """Not a grant without what it should give, and not an end of a lease with all that it gave."""
    helper.start()
    asked(helper, prepare)
    helper.kill9()
    helper.listener.close()

    async def work(one: Remote) -> None:
        with pytest.raises(AccessError, match="can't be reached"):
            await one.prepare(grant(CONSOLE, lease=OTHER))
        with pytest.raises(AccessError, match="can't be reached"):
            await one.revoke(LEASE)
        assert "systemctl restart hetero-agent-access.socket" in one.problem

    asked(helper, work)


def test_a_doors_failed_grant_leaves_no_grant_file(helper: AccessHelper) -> None:
    helper.start()

    class Reader:
        def __init__(self) -> None:
            self.remote = remote(helper)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.remote, name)

        async def prepare(self, given: Any) -> None:
            await self.remote.prepare(grant(Path("/dev/null")))

    async def run() -> None:
        door = Door(Reader())  # type: ignore[arg-type]
        with pytest.raises(AccessError, match="not by root's profiles"):
            await door.prepare(lease(id=LEASE), [])
        door.close()

    asyncio.run(run())
    assert made(helper) == NOTHING
    assert not list((helper.runtime / DIRECTORY).iterdir())


# -- what it takes ------------------------------------------------------------------------------------
def exchanged(helper: AccessHelper, *requests: bytes) -> list[Any]:
    """Send REQUESTS on one connection and return the answers, None for its end."""
    found: list[Any] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.settimeout(20)
        one.connect(str(helper.socket))
        for request in requests:
            one.send(request)
            answer = one.recv(ANSWER_MAX)
            found.append(json.loads(answer) if answer else None)
    return found


def request(**parts: object) -> bytes:
    return json.dumps({"version": 1, **parts}).encode()


_WRONG = [
    b"x",
    b"\xff\xfe",
    b"[" * REQUEST_MAX,
    b"9" * REQUEST_MAX,
    b"null",
    b"[]",
    b"{}",
    request(do="prepare"),
    request(do="revoke"),
    request(do="sweep", lease=LEASE),
    request(do="prepare", lease="../" + LEASE),
    request(do="prepare", lease=LEASE + "\n"),
    request(do="prepare", lease=[LEASE]),
    request(do="prepare", lease=LEASE, uid=0),
    request(do=["prepare"], lease=LEASE),
    request(do="exec", lease=LEASE),
    json.dumps({"version": 2, "do": "sweep"}).encode(),
    request(do="sweep", more="x" * 300),
    b" " * 100_000,
]


def test_requests_that_are_none(helper: AccessHelper) -> None:
    helper.start()
    for wrong in _WRONG:
        first, second = exchanged(helper, wrong, request(do="sweep"))
        assert first["ok"] is False, wrong
        assert "a request" in first["error"], wrong
        assert second == {"ok": True}, wrong
    assert helper.log.count("refused or failed: a request") == len(_WRONG)


def test_callers_of_other_users_are_sent_away(helper: AccessHelper) -> None:
    helper.start()
    program = (
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(20);"
        f"s.connect({str(helper.socket)!r}); s.send(b'{{}}'); print(s.recv(100))"
    )
    helper.directory.chmod(0o755)
    done = subprocess.run(
        [PYTHON, "-ISc", program],
        user=UID,
        group=UID,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == "b''\n" or "Error" in done.stderr, done
    helper.wait_for_log(f"refused: uid {UID} may not ask")
    asked(helper, prepare)


def test_grants_that_name_what_they_may_not(helper: AccessHelper) -> None:
    """The agent was taken over: it asks for memory, other files, and hooks."""
    helper.start()
    files = GrantFiles(helper.runtime / DIRECTORY)
    hostile = [
        grant(Path("/dev/null")),
        grant(CONSOLE, mounts=[["/etc", "/etc", "rw"]]),
        grant(CONSOLE, hooks=[{"path": "/bin/sh"}]),
        grant(CONSOLE, env={"LD_PRELOAD": "/tmp/x.so"}),
        grant(nodes=[["npu-0", "/run/x", "own", "file", 0, 0]]),
    ]
    for one in hostile:
        files.write(one)
        (answer,) = exchanged(helper, request(do="prepare", lease=LEASE))
        assert answer["ok"] is False
        assert "not by root's profiles and configuration" in answer["error"]
    assert made(helper) == NOTHING
    os.chown(helper.runtime / DIRECTORY / LEASE, UID, UID)
    (answer,) = exchanged(helper, request(do="prepare", lease=LEASE))
    assert "belongs to uid" in answer["error"]


def test_roots_files_count_as_they_are_now(helper: AccessHelper) -> None:
    helper.start()
    profile = helper.profiles / "console.toml"

    async def work(one: Remote) -> None:
        await one.prepare(grant(CONSOLE))
        await one.revoke(LEASE)
        profile.write_text(PROFILE.replace(CONSOLE.name, "tty1"))
        with pytest.raises(AccessError, match=CONSOLE.name):
            await one.prepare(grant(CONSOLE))
        profile.write_text(PROFILE)
        helper.config.write_text('[access]\nacl = false\ncdi-directory = ""\n')
        await one.prepare(grant(CONSOLE))
        assert made(helper) == NOTHING
        # that with an error is not in force, also for a helper that starts now
        helper.config.write_text("[access]\nacl = 1\n")
        helper.terminate()
        helper.start()
        await one.prepare(grant(CONSOLE))
        assert made(helper) == NOTHING
        assert "expected true or false, got 1; the configuration of before stays in force" in helper.log
        helper.config.unlink()
        await one.prepare(grant(CONSOLE))
        assert made(helper) == ALL
        # undoing needs no configuration
        helper.config.write_text("broken")
        await one.revoke(LEASE)
        assert made(helper) == NOTHING

    asked(helper, work)


def test_undo_all(helper: AccessHelper) -> None:
    """As the removal of the package does."""
    helper.start()
    asked(helper, prepare)
    helper.terminate()
    helper.config.write_text("broken")
    helper.program = (*helper.program, "--undo-all")
    helper.start()
    assert helper.wait() == 0
    assert made(helper) == NOTHING
    assert list(helper.records.iterdir()) == []


def test_a_configuration_with_an_error_from_the_start(helper: AccessHelper) -> None:
    helper.config.write_text("broken")
    helper.start()

    async def work(one: Remote) -> None:
        with pytest.raises(AccessError, match="not TOML"):
            await one.prepare(grant(CONSOLE))

    asked(helper, work)


def test_without_a_socket_it_says_what_to_start(helper: AccessHelper) -> None:
    command = [PYTHON, "-m", "hetero_agent.access_helper", "--user", "root"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "start hetero-agent-access.socket" in done.stderr


def test_a_connection_that_asks_nothing_is_ended(helper: AccessHelper) -> None:
    helper.idle = 0.2
    helper.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.connect(str(helper.socket))
        assert helper.wait() == 0


def test_renewals_are_in_nobodys_way(helper: AccessHelper) -> None:
    """After a start all leases are renewed: a new one waits for one of them at most."""
    helper.start()
    order: list[str] = []

    async def work(one: Remote) -> None:
        async def note(name: str, what: Awaitable[None]) -> None:
            await what
            order.append(name)

        renewals = [note("renewal", one.renew(grant(CONSOLE, lease=f"{n:032x}"))) for n in range(20)]
        tasks = [asyncio.ensure_future(each) for each in renewals]
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(note("grant", one.prepare(grant(CONSOLE)))))
        await asyncio.gather(*tasks)

    asked(helper, work)
    assert order.index("grant") <= 1
    wait_until(lambda: len(list(helper.records.glob("?" * 32))) == 21, what="all of them")
