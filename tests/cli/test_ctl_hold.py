"""heteroctl hold and attach, as far as they go without a service manager; the example for shells; files
of variables."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent.cli import attach, envfile, forms, unitrun
from hetero_agent.cli.complaints import Complaint
from hetero_agent.client.manifest import Manifest
from tests.cli.conftest import Station
from tests.support.agent import GROUP_GID, MEMBER, AgentProcess
from tests.support.ctl import Ctl
from tests.support.process import ROOT, scratch
from tests.support.wait import wait_until

NPU = "example.com/npu"
SCENARIO = """
[[device]]
id = "npu"
resource = "example.com/npu"
count = 2
"""
DEVICES = {"npu-0", "npu-1"}


@pytest.fixture
def place() -> Iterator[Path]:
    path = scratch("hold")
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


class Holding:
    """A heteroctl hold; its messages to the service manager in `told`."""

    def __init__(self, ctl: Ctl, place: Path, *options: str) -> None:
        self.env_file = place / "lease.env"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(place / "notify"))
        self.socket.settimeout(60)
        ctl.env["NOTIFY_SOCKET"] = str(place / "notify")
        self.process = ctl.spawn("hold", "-r", NPU, "--env-file", str(self.env_file), *options)

    def told(self) -> str:
        return self.socket.recv(4096).decode()

    def ended(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)
        self.socket.close()


# -- hold -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_lease_is_held_until_a_signal(ctl: Ctl, place: Path, number: signal.Signals) -> None:
    with Holding(ctl, place, "-d", "npu-1", "--label", "l") as held:
        told = held.told()
        (lease,) = ctl.json("leases")
        assert told == f"READY=1\nSTATUS=Lease {lease['id'][:8]}: npu-1"
        # all is there once it is ready
        assert f"HETERO_LEASE_ID={lease['id']}\n" in held.env_file.read_text()
        assert stat.S_IMODE(held.env_file.stat().st_mode) == 0o600
        (shown,) = ctl.json("show", lease["id"])
        assert (shown["state"], shown["request"]["label"], list(shown["binding"])) == (
            "active",
            "l",
            ["connection"],
        )
        held.process.send_signal(number)
        assert held.told() == "STOPPING=1"
        assert held.ended() == (0, "")
    assert not held.env_file.exists()
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


def test_a_killed_holder_gives_back(ctl: Ctl, place: Path) -> None:
    with Holding(ctl, place) as held:
        held.told()
        held.process.kill()
        wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


def test_a_lease_that_ends_ends_who_holds_it(ctl: Ctl, place: Path) -> None:
    with Holding(ctl, place) as held:
        held.told()
        (lease,) = ctl.json("leases")
        ctl("release", lease["id"])
        code, err = held.ended()
    assert (code, err) == (79, f"heteroctl: the lease {lease['id'][:8]} ended: released\n")
    assert not held.env_file.exists()


def test_waiting_is_bounded_and_can_be_ended(ctl: Ctl, place: Path) -> None:
    taken = ctl.json("allocate", "-r", NPU, "-n", "2", "--confirm")["lease"]
    held_file = place / "lease.env"
    held_file.write_text("HETERO_LEASE_ID=stale\n")
    result = ctl("hold", "-r", NPU, "--env-file", str(held_file), "--wait", "0.3", code=124)
    assert result.err.startswith("heteroctl: waited 0.3 s in vain")
    assert not held_file.exists(), "what a last time has left is of another lease"
    with Holding(ctl, place, "--wait", "100") as waiting:
        wait_until(lambda: _waits_for_signals(waiting.process.pid), what="a holder that waits")
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.ended() == (0, "")
    ctl("release", taken)


def _waits_for_signals(pid: int) -> bool:
    """Whether it catches SIGTERM, by proc(5)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) & (1 << (signal.SIGTERM - 1)))


def test_the_agent_may_restart_meanwhile(own: Station, place: Path) -> None:
    ctl = own.ctl()
    with Holding(ctl, place) as held:
        held.told()
        (lease,) = ctl.json("leases")
        own.agent.kill9()
        own.agent.start()
        wait_until(lambda: [one["id"] for one in ctl.json("leases")] == [lease["id"]], what="the lease")
        held.process.send_signal(signal.SIGTERM)
        assert held.ended() == (0, "")
        assert "active" not in [one["state"] for one in ctl.json("leases")]


def test_for_another_user(ctl: Ctl, agent: AgentProcess, place: Path) -> None:
    with Holding(ctl, place, "--owner", str(MEMBER)) as held:
        held.told()
        (lease,) = ctl.json("leases")
        assert lease["uid"] == MEMBER
    member = Ctl(agent.bus.address, uid=MEMBER, groups=[GROUP_GID])
    refused = member("hold", "-r", NPU, "--owner", "0", code=77)
    assert "owner-uid" in refused.err
    assert (
        "no user 'nobody-of-that-name'" in ctl("hold", "-r", NPU, "--owner", "nobody-of-that-name", code=2).err
    )


# -- attach and run --unit ------------------------------------------------------------------------------
def test_what_can_not_be_attached(ctl: Ctl, agent: AgentProcess) -> None:
    member = Ctl(agent.bus.address, uid=MEMBER, groups=[GROUP_GID])
    refused = member("attach", "--unit", "a.service", "-r", NPU, code=77)
    assert "the + makes it root's" in refused.err
    assert "either --resource or --lease" in ctl("attach", "--unit", "a.service", code=2).err
    both = ctl("attach", "--unit", "a.service", "-r", NPU, "--lease", "abcd", code=2)
    assert "either --resource or --lease" in both.err
    # nobody has systemd's name on this bus
    missing = ctl("attach", "--unit", "a.service", "-r", NPU, code=1)
    assert "the service manager" in missing.err
    assert ctl.json("leases") == []


def test_what_is_for_units_only(ctl: Ctl) -> None:
    assert "--setenv is for --unit" in ctl("run", "-r", NPU, "-E", "A=1", "--", "true", code=2).err
    refused = ctl("run", "-r", NPU, "--unit", "--netdev", "move", "--", "true", code=2)
    assert "--netdev and --unit don't fit" in refused.err
    assert "--uid is for --unit" in ctl("run", "-r", NPU, "--uid", "root", "--", "true", code=2).err
    assert (
        "there is no user 'x-y' here"
        in ctl("run", "--unit", "-r", NPU, "--uid", "x-y", "--", "true", code=2).err
    )
    assert (
        "no-such-command: command not found" in ctl("run", "--unit", "-r", NPU, "no-such-command", code=127).err
    )


def test_no_name_of_a_variable(ctl: Ctl) -> None:
    result = ctl("run", "--unit", "-r", NPU, "-E", "A-B=1", "--", "true", code=2)
    assert "'A-B' is no name of a variable" in result.err
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


def test_without_a_service_manager_nothing_is_left(ctl: Ctl) -> None:
    result = ctl("run", "--unit", "-r", NPU, "--", "true", code=125)
    assert "the service manager" in result.err
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a", "a.service"),
        ("a.service", "a.service"),
        ("a@b", "a@b.service"),
        ("a.b-c_d:e", "a.b-c_d:e.service"),
    ],
)
def test_names_of_units(given: str, name: str) -> None:
    assert unitrun.unit_name(given) == name


@pytest.mark.parametrize("given", ["", "a/b", "a b", "a.scope", "x.slice", "@", "a@b@c", "é", "a" * 250, "a'b"])
def test_no_names_of_units(given: str) -> None:
    with pytest.raises(Complaint):
        unitrun.unit_name(given)


def test_rules_that_are_not_ours_stay() -> None:
    service = {"DeviceAllow": [["/dev/a", "rw"], ["char-pts", "r"], ["/dev/b", "rw"]]}
    assert attach.unit_rules(service, ["/dev/b"]) == [("/dev/a", "rw"), ("char-pts", "r")]


def test_nodes_are_named_as_systemd_takes_them() -> None:
    nodes = [
        ["d", "/dev/dri/by-path/pci-0000:3b:00.0-render", "own", "char", 226, 128],
        ["d", "/dev/a b", "own", "char", 240, 1],
        ["d", "/dev/100%", "own", "char", 240, 2],
        ["d", "/run/x/node", "control", "block", 7, 3],
        ["d", "/run/x/file", "own", "file", 0, 0],
    ]
    manifest = Manifest.of({"lease": "ab" * 16, "nodes": nodes})
    wanted = [
        "/dev/block/7:3",
        "/dev/char/240:1",
        "/dev/char/240:2",
        "/dev/dri/by-path/pci-0000:3b:00.0-render",
    ]
    assert forms.allowed_devices(manifest) == wanted


# -- files of variables -------------------------------------------------------------------------------
def test_a_file_of_variables_is_written_whole_and_for_its_writer(place: Path) -> None:
    path = place / "new" / "lease.env"
    envfile.write(str(path), ["A=1", "B='x y'"])
    assert path.read_text() == "A=1\nB='x y'\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    envfile.write(str(path), ["A=2"])
    assert os.listdir(path.parent) == ["lease.env"]
    # one that is in somebody's hands stays as it was there
    with path.open() as before:
        envfile.write(str(path), ["A=3"])
        assert before.read() == "A=2\n"
    envfile.remove(str(path))
    envfile.remove(str(path))
    assert os.listdir(path.parent) == []


def test_a_link_in_its_place_is_replaced(place: Path) -> None:
    (place / "target").write_text("kept")
    (place / "lease.env").symlink_to(place / "target")
    envfile.write(str(place / "lease.env"), ["A=1"])
    assert (place / "target").read_text() == "kept"
    assert not (place / "lease.env").is_symlink()


@pytest.mark.parametrize("way", ["above", "link", "link above"])
def test_a_directory_that_others_could_exchange_is_none_of_roots(place: Path, way: str) -> None:
    """Whoever may rename a directory above, or a link on the way, chooses what is at the path later."""
    user = place / "user"
    (user / "safe").mkdir(parents=True)
    (place / "safe").mkdir()
    (user / "link").symlink_to(place / "safe")
    (place / "link").symlink_to(user / "link")
    os.chown(user, 1000, 1000)
    directory = {"above": user / "safe", "link": user / "link", "link above": place / "link" / "new"}[way]
    with pytest.raises(Complaint) as caught:
        envfile.write(str(directory / "lease.env"), ["A=1"])
    assert f"others than root may put files into {user}" in caught.value.cause
    assert os.listdir(user / "safe") == os.listdir(place / "safe") == []


def test_a_link_of_roots_leads_to_a_file(place: Path) -> None:
    (place / "real").mkdir()
    (place / "link").symlink_to("real")
    envfile.write(str(place / "link" / "new" / "lease.env"), ["A=1"])
    assert (place / "real" / "new" / "lease.env").read_text() == "A=1\n"


def test_a_file_that_can_not_be_written(ctl: Ctl) -> None:
    result = ctl("hold", "-r", NPU, "--env-file", "/proc/none/lease.env", code=1)
    assert result.err.startswith("heteroctl: can't write /proc/none/lease.env: ")
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


# -- the example for shells -----------------------------------------------------------------------------
@pytest.fixture
def shell(ctl: Ctl, place: Path) -> list[str]:
    """The example, with heteroctl on its path."""
    program = place / "heteroctl"
    command = " ".join(ctl.command)
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    ctl.env["PATH"] = f"{place}:{ctl.env['PATH']}"
    return [str(ROOT / "examples/shell.sh"), NPU, "2"]


def test_the_example_uses_its_lease(ctl: Ctl, shell: list[str]) -> None:
    ctl.env["HETERO_DEVICES"] = "stale"
    script = 'echo "$HETERO_DEVICES"; heteroctl leases --json; exit 5'
    done = subprocess.run(
        [*shell, "sh", "-c", script],
        env=ctl.env,
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    devices, leases = done.stdout.split("\n", 1)
    assert sorted(devices.split(",")) == ["npu-0", "npu-1"]
    assert '"state": "active"' in leases
    # released, not merely left
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_example_gives_back_however_it_ends(ctl: Ctl, shell: list[str], place: Path, number: int) -> None:
    script = f"echo $$ >{place}/new; mv {place}/new {place}/pid; exec sleep 1000"
    process = subprocess.Popen([*shell, "sh", "-c", script], env=ctl.env, stderr=subprocess.DEVNULL, cwd="/")
    try:
        wait_until((place / "pid").exists, what="the example's command")
        assert len(ctl.json("leases")) == 1
        process.send_signal(number)
    finally:
        os.kill(int((place / "pid").read_text()), signal.SIGKILL)
        process.wait(60)
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")
