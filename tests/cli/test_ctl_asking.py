"""On a terminal heteroctl has polkit ask for a password, with an agent of its own if there is none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent.bus import polkit
from hetero_agent.bus.whomay import Action
from tests.support.agent import OUTSIDER
from tests.support.bus import PrivateBus
from tests.support.bus_service import RESOURCE, Service, record
from tests.support.ctl import Ctl
from tests.support.polkit import POLICY, FakePolkit
from tests.support.terminal import OnTerminal
from tests.support.wait import wait_until

DEVICE = "0000:00:01.0"


@pytest.fixture(scope="module")
def polkit_bus() -> Iterator[PrivateBus]:
    private = PrivateBus(extra=POLICY)
    yield private
    private.close()


@pytest.fixture(scope="module")
def service(polkit_bus: PrivateBus) -> Iterator[Service]:
    with Service(polkit_bus, devices=[record(number) for number in range(3)]) as one:
        yield one


@pytest.fixture
def authority(polkit_bus: PrivateBus, service: Service) -> Iterator[FakePolkit]:
    """polkit, which wants everybody to authenticate and knows no agent."""
    with FakePolkit(polkit_bus) as one:
        one.answers = dict.fromkeys(Action, "challenge")
        yield one


def outsider(bus: PrivateBus) -> Ctl:
    return Ctl(bus.address, uid=OUTSIDER)


def on_terminal(bus: PrivateBus, *arguments: str) -> OnTerminal:
    ctl = outsider(bus)
    return OnTerminal([*ctl.command, *arguments], ctl.env)


def agents(service: Service) -> list[int]:
    """The processes of pkttyagent on this bus."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name = (entry / "comm").read_text().strip()
            address = service.bus.address.encode() in (entry / "environ").read_bytes()
        except OSError:
            continue
        if name == "pkttyagent" and address:
            found.append(int(entry.name))
    return found


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_it_brings_an_agent_and_asks_again(
    polkit_bus: PrivateBus, service: Service, authority: FakePolkit
) -> None:
    with on_terminal(polkit_bus, "cordon", DEVICE, "--reason", "fan") as terminal:
        question = authority.wait_asked(2, 30)
        ((kind, subject),) = authority.registered
        assert kind == "unix-process"
        assert (subject["pid"], subject["start-time"]) == (terminal.pid, start_time(terminal.pid))
        assert len(agents(service)) == 1
        assert [one.interactive for one in authority.asked] == [True, True]
        authority.answer(question.ticket, "yes")
        code, shown = terminal.wait()
        assert (code, f"{DEVICE} is cordoned" in shown) == (0, True), shown
    assert agents(service) == []
    assert service.do(lambda: service.engine.view.devices[DEVICE].cordon) is not None


def test_refused_is_77(polkit_bus: PrivateBus, service: Service, authority: FakePolkit) -> None:
    with on_terminal(polkit_bus, "cordon", DEVICE) as terminal:
        authority.answer(authority.wait_asked(2, 30).ticket, "dismissed")
        code, shown = terminal.wait()
    assert code == 77
    assert "the authentication was dismissed" in shown
    assert agents(service) == []


def test_nobody_types(
    polkit_bus: PrivateBus, service: Service, authority: FakePolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polkit, "WITHIN_FOR_A_PERSON", 3.0)
    with on_terminal(polkit_bus, "release", "0" * 32, "--no-ask-password") as terminal:
        assert terminal.wait()[0] == 1
    with on_terminal(polkit_bus, "cordon", DEVICE) as terminal:
        question = authority.wait_asked(2, 30)
        code, shown = terminal.wait()
    assert code == 77
    assert "nobody has authenticated within 3 s" in shown
    wait_until(lambda: question.ticket in authority.cancelled, what="the question taken back")


def test_an_agent_that_is_there_is_used(
    polkit_bus: PrivateBus, authority: FakePolkit, service: Service
) -> None:
    authority.registered.append(("unix-session", {"session-id": "1"}))
    with on_terminal(polkit_bus, "cordon", DEVICE) as terminal:
        question = authority.wait_asked(1, 30)
        assert agents(service) == []
        authority.answer(question.ticket, "yes")
        assert terminal.wait()[0] == 0
    assert len(authority.asked) == 1


@pytest.mark.parametrize("how", ["--no-ask-password", "no terminal"])
def test_nobody_is_asked(polkit_bus: PrivateBus, authority: FakePolkit, how: str) -> None:
    begin = time.monotonic()
    if how == "no terminal":
        result = outsider(polkit_bus)("cordon", DEVICE, code=77)
        shown = result.err
    else:
        with on_terminal(polkit_bus, "cordon", DEVICE, how) as terminal:
            code, shown = terminal.wait()
            assert code == 77
    assert "may once it has authenticated for org.heteroagent.Agent1.cordon" in shown
    assert "next: run it on a terminal" in shown
    assert time.monotonic() - begin < 60
    assert [one.interactive for one in authority.asked] == [False]
    assert authority.registered == []


def test_run_frees_the_terminal_for_its_command(
    polkit_bus: PrivateBus, service: Service, authority: FakePolkit
) -> None:
    command = ("run", "-r", RESOURCE, "--", "sh", "-c", 'read line; echo "got $line"')
    with on_terminal(polkit_bus, *command) as terminal:
        authority.answer(authority.wait_asked(2, 30).ticket, "yes")
        wait_until(lambda: service.engine.view.leases and not agents(service), what="the command alone")
        terminal.type("words\n")
        code, shown = terminal.wait()
    assert code == 0, shown
    assert "got words" in shown
    # nobody watches processes in this service
    assert Ctl(polkit_bus.address)("release", "--all").out.endswith(" released\n")
    wait_until(lambda: not service.engine.view.leases, what="no leases")


def test_an_interrupt_while_asking_ends_all(
    polkit_bus: PrivateBus, service: Service, authority: FakePolkit
) -> None:
    with on_terminal(polkit_bus, "run", "-r", RESOURCE, "--", "true") as terminal:
        question = authority.wait_asked(2, 30)
        terminal.type("\x03")
        assert terminal.wait()[0] == 130
        wait_until(lambda: question.ticket in authority.cancelled, what="the question taken back")
    assert agents(service) == []
    assert not service.engine.view.leases


def test_an_agent_does_not_outlive_a_killed_heteroctl(
    polkit_bus: PrivateBus, service: Service, authority: FakePolkit
) -> None:
    with on_terminal(polkit_bus, "cordon", DEVICE) as terminal:
        authority.wait_asked(2, 30)
        assert len(agents(service)) == 1
        os.kill(terminal.pid, 9)
        terminal.wait()
        wait_until(lambda: not agents(service), what="no agent")
