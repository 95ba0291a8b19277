"""The simulator's control socket, on the real process; no agent is needed for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator

import pytest

from hetero_agent.sim.control import LONGEST_LINE
from tests.support.calls import as_user
from tests.support.process import PYTHON, Program
from tests.support.sim import ask, ask_raw, tell
from tests.support.wait import wait_until


class LoneSim(Program):
    """A simulator on no bus at all."""

    title = "sim"

    def __init__(self) -> None:
        super().__init__()
        self.socket = self.directory / "run" / "control.sock"
        self.devices = self.directory / "devices"

    def start(self, *more: str, wait: bool = True) -> LoneSim:
        command = [PYTHON, "-m", "hetero_agent.sim.main", "--directory", str(self.devices)]
        self.launch([*command, "--socket", str(self.socket), "--bus", f"unix:path={self.directory}/bus", *more])
        if wait:
            wait_until(lambda: self.socket.exists() or not self.running(), what="the socket")
        return self


@pytest.fixture
def lone() -> Iterator[LoneSim]:
    one = LoneSim()
    try:
        yield one
    finally:
        one.close()


def test_verbs(lone: LoneSim) -> None:
    path = lone.start().socket
    reply = tell(path, "add", id="npu", resource="example.com/npu", count=2, model="N1", memory=5, numa=0)
    assert reply["devices"] == ["npu-0", "npu-1"]
    assert reply["reported"] is False
    assert "no bus at" in reply["note"]
    assert (lone.devices / "npu-1").exists()
    tell(path, "fail", id="npu-1", reason="hot")
    tell(path, "hang", id="npu-0", seconds=1000)
    listed = tell(path, "list")
    assert listed["reported"] is False
    assert listed["devices"] == [
        {
            "id": "npu-0",
            "resource": "example.com/npu",
            "path": str(lone.devices / "npu-0"),
            "model": "N1",
            "memory": 5,
            "parent": "",
            "numa": 0,
            "serial": "",
            "health": "healthy",
            "reason": "",
            "hung": True,
        },
        {
            "id": "npu-1",
            "resource": "example.com/npu",
            "path": str(lone.devices / "npu-1"),
            "model": "N1",
            "memory": 5,
            "parent": "",
            "numa": 0,
            "serial": "",
            "health": "unhealthy",
            "reason": "hot",
            "hung": False,
        },
    ]
    tell(path, "recover", id="npu-0")
    tell(path, "recover", id="npu-1")
    assert [(one["health"], one["hung"]) for one in tell(path, "list")["devices"]] == [("healthy", False)] * 2
    assert tell(path, "remove", id="npu-0")["devices"] == ["npu-0"]
    assert [one["id"] for one in tell(path, "list")["devices"]] == ["npu-1"]
    tell(path, "hang")
    assert tell(path, "fail", id="npu-1")["note"] == "the provider hangs, as it was told to"
    tell(path, "recover")


def test_the_socket_is_roots_alone(lone: LoneSim) -> None:
    lone.start()
    assert stat.S_IMODE(lone.socket.stat().st_mode) == 0o600
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    done = subprocess.run(
        [*as_user(65534), PYTHON, "-ISc", code, str(lone.socket)],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert "PermissionError" in done.stderr


def test_bad_input_is_answered_and_changes_nothing(lone: LoneSim) -> None:
    path = lone.start().socket
    tell(path, "add", id="a", resource="x.y/z")
    for line, text in (
        (b"{\n", "not JSON: "),
        (b"\n", "not JSON: "),
        (b"\xff\xfe\n", "not JSON: "),
        (b"[" * 60_000 + b"\n", "not JSON: "),
        (b"[]\n", "expected an object with a verb"),
        (b'{"verb": "explode"}\n', "unknown verb explode; the verbs are add, remove"),
        (b'{"verb": "add", "id": "../x", "resource": "x.y/z"}\n', "add: id: ../x does not match"),
        (b'{"verb": "add", "id": "a", "resource": "x.y/z"}\n', "there is a device a already"),
        (b'{"verb": "fail", "id": "b"}\n', "there is no device b"),
        (b"x" * 100_000 + b"\n", "a request is longer than 65536 bytes"),
    ):
        reply = ask_raw(path, line)
        assert reply["ok"] is False
        assert text in reply["error"]
        assert reply["error"].isprintable()
    assert [one["id"] for one in tell(path, "list")["devices"]] == ["a"]
    assert os.listdir(lone.devices) == ["a"]


def test_many_requests_on_one_connection(lone: LoneSim) -> None:
    lone.start()
    with socket.socket(socket.AF_UNIX) as one, one.makefile("rb") as stream:
        one.connect(str(lone.socket))
        for number in range(20):
            one.sendall(json.dumps({"verb": "add", "id": f"d{number}", "resource": "x.y/z"}).encode() + b"\n")
        assert [json.loads(stream.readline())["devices"] for _ in range(20)] == [[f"d{n}"] for n in range(20)]
    # one that hangs up in the middle disturbs nobody
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(lone.socket))
        one.sendall(b'{"verb": "li')
    assert len(tell(lone.socket, "list")["devices"]) == 20


@pytest.mark.parametrize("length", [LONGEST_LINE + 1, 2 * LONGEST_LINE, 4 << 20])
def test_a_line_that_is_too_long_is_read_to_its_end_before_it_is_refused(lone: LoneSim, length: int) -> None:
    # closed under a sender that is not done, the socket would break its pipe and eat the answer
    lone.start()
    with socket.socket(socket.AF_UNIX) as one, one.makefile("rb") as stream:
        one.settimeout(30)
        one.connect(str(lone.socket))
        one.sendall(b"x" * length + b'\n{"verb": "list"}\n')
        assert json.loads(stream.readline()) == {"ok": False, "error": "a request is longer than 65536 bytes"}
        assert json.loads(stream.readline())["devices"] == []
        one.sendall(b"x" * length)
        one.shutdown(socket.SHUT_WR)
        assert "longer than" in json.loads(stream.readline())["error"]
        assert stream.readline() == b""


def test_a_second_simulator_and_a_dead_ones_socket(lone: LoneSim) -> None:
    lone.start()
    second = LoneSim()
    second.socket = lone.socket
    try:
        second.start(wait=False)
        assert second.wait() == 1
        assert f"control socket {lone.socket}: another simulator has it" in second.log
        assert tell(lone.socket, "list")["devices"] == []
        lone.kill9()
        left = lone.socket.stat().st_ino
        second.start(wait=False)
        wait_until(lambda: lone.socket.stat().st_ino != left, what="the new one's socket")
        assert tell(lone.socket, "list")["devices"] == []
        assert stat.S_IMODE(lone.socket.stat().st_mode) == 0o600
    finally:
        second.close()


def test_sigterm_ends_it_cleanly_and_leaves_the_files(lone: LoneSim) -> None:
    lone.start()
    tell(lone.socket, "add", id="a", resource="x.y/z")
    lone.signal(signal.SIGTERM)
    assert lone.wait() == 0
    assert not lone.socket.exists()
    # a process may still hold the device: it must find the same inode when the simulator is back
    assert (lone.devices / "a").exists()
    assert "Traceback" not in lone.log


def test_a_scenario_plays(lone: LoneSim) -> None:
    scenario = lone.directory / "s.toml"
    scenario.write_text(
        """
        mode = "0644"
        [[device]]
        id = "a"
        resource = "x.y/z"
        [[step]]
        after = 0.1
        verb = "fail"
        id = "a"
        reason = "hot"
        [[step]]
        after = 0.1
        verb = "remove"
        id = "no-such-device"
        [[step]]
        after = 0.1
        verb = "add"
        id = "b"
        resource = "x.y/z"
        """
    )
    lone.start("--scenario", str(scenario))
    (first,) = tell(lone.socket, "list")["devices"][:1]
    assert first["id"] == "a"
    assert stat.S_IMODE((lone.devices / "a").stat().st_mode) == 0o644
    wait_until(lambda: len(tell(lone.socket, "list")["devices"]) == 2, what="the last step")
    assert tell(lone.socket, "list")["devices"][0]["reason"] == "hot"
    assert "a step of the scenario could not be done: there is no device no-such-device" in lone.log


def test_a_bad_start_is_one_line(lone: LoneSim) -> None:
    scenario = lone.directory / "s.toml"
    scenario.write_text("[[device]]\nid = 'a'\n")
    lone.start("--scenario", str(scenario), wait=False)
    assert lone.wait() == 1
    assert lone.log == f"hetero-agent-sim: {scenario}: [[device]] number 1: add: resource is missing\n"


def test_four_thousand_devices(lone: LoneSim) -> None:
    lone.start()
    beginning = time.monotonic()
    assert len(tell(lone.socket, "add", id="n", resource="x.y/z", count=4096)["devices"]) == 4096
    assert len(tell(lone.socket, "list")["devices"]) == 4096
    assert time.monotonic() - beginning < 60
    assert ask(lone.socket, "add", id="m", resource="x.y/z")["error"] == (
        "add: that would be 4097 devices; the most is 4096"
    )
