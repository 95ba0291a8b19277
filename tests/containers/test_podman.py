"""Leases in real containers: podman and runc, whose device control group is the kernel's own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero_agent import names
from tests.containers.conftest import CONSOLES, OTHER_CONSOLE, Station
from tests.support.console import CONSOLE
from tests.support.vendor import RESOURCE
from tests.support.wait import wait_until


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def device(lease: str) -> str:
    return f"--device=heteroagent.org/lease={lease}"


# What a program finds in /dev beside what every container has (OCI runtime-spec, "Default Devices").
_LOOK = """
for one in $(find /dev -type c -o -type b); do
    case $one in
        */null|*/zero|*/full|*/random|*/urandom|*/tty|/dev/pts/*|*/console) ;;
        *) echo "node $one" ;;
    esac
done
"""


@pytest.mark.parametrize("user", ["", "1000", "1000:1000"])
def test_exactly_the_leased_nodes_and_they_can_be_used(station: Station, user: str) -> None:
    lease = station.lease("-r", CONSOLES)
    path = station.ctl("manifest", lease, "--format", "json").json["nodes"][0][1]
    options = [device(lease), *([f"--user={user}"] if user else [])]
    done = station.podman.run(*options, script=f'{_LOOK} exec 3<>{path} && echo "used by $(id -u)"; env')
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("node ")] == [f"node {path}"]
    assert f"used by {user.partition(':')[0] or 0}" in said
    assert f"HETERO_LEASE_ID={lease}" in said
    # counted from 0: the driver would see no other device
    assert "CONSOLES=0" in said


def test_all_devices_of_a_lease(station: Station) -> None:
    lease = station.lease("-r", CONSOLES, "-n", "2")
    done = station.podman.run(device(lease), script=f"{_LOOK} exec 3<>{CONSOLE} 4<>{OTHER_CONSOLE}; env")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert {line for line in said if line.startswith("node ")} == {f"node {CONSOLE}", f"node {OTHER_CONSOLE}"}
    assert "CONSOLES=0,1" in said


def test_virtual_devices_are_files_and_only_the_leased_ones_are_there(station: Station) -> None:
    lease = station.lease("-r", RESOURCE, "-d", "npu-0")
    path, other = station.vendor.file("npu-0"), station.vendor.file("npu-1")
    script = f"echo from inside >{path}; ls {path.parent}; test ! -e {other}"
    for user in (0, 1000):
        path.write_text("")
        done = station.podman.run(device(lease), f"--user={user}", script=script)
        assert (done.returncode, done.stdout) == (0, "npu-0\n"), done.stderr
        assert path.read_text() == "from inside\n"
        if user == 0:
            lease = _again(station, lease)


def _again(station: Station, lease: str) -> str:
    """The lease has ended with its container: another of the same device."""
    station.root.wait_for_device("npu-0", State="idle")
    assert not station.specification(lease).exists()
    return station.lease("-r", RESOURCE, "-d", "npu-0")


def test_a_node_of_another_lease_is_refused_by_the_kernel(station: Station) -> None:
    lease, other = station.lease("-r", CONSOLES), station.lease("-r", CONSOLES)
    paths = [station.ctl("manifest", one, "--format", "json").json["nodes"][0][1] for one in (lease, other)]
    numbers = [os.stat(path).st_rdev for path in paths]
    own, theirs = (f"c {os.major(number)} {os.minor(number)}" for number in numbers)
    done = station.podman.run(
        device(lease),
        "--cap-add=MKNOD",
        script=f"""
            mknod -m 666 /tmp/own {own} && mknod -m 666 /tmp/theirs {theirs} || exit 9
            (: <>/tmp/own) && echo own is ours
            (: <>/tmp/theirs) 2>&1 || echo theirs is not
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "own is ours" in done.stdout
    assert "Operation not permitted" in done.stdout
    assert "theirs is not" in done.stdout


def test_an_image_or_a_caller_that_asks_for_all_gets_no_more(station: Station) -> None:
    lease = station.lease("-r", CONSOLES, "--confirm")
    script = f"{_LOOK} env"
    plain = station.podman.run(script=script).stdout
    assert "NVIDIA_VISIBLE_DEVICES=all" in plain, "the image asks for all"
    assert "node " not in plain
    done = station.podman.run(
        device(lease),
        "--env=NVIDIA_VISIBLE_DEVICES=all",
        "--env=CONSOLES=0,1,2",
        "--env=HETERO_DEVICE_COUNT=8",
        script=script,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("NVIDIA_")] == ["NVIDIA_VISIBLE_DEVICES=void"]
    assert "CONSOLES=0" in said
    assert "HETERO_DEVICE_COUNT=1" in said
    assert len([line for line in said if line.startswith("node ")]) == 1


# -- whose life the lease hangs on ------------------------------------------------------------------
class Training:
    """A container `train` that keeps a leased console open."""

    def __init__(
        self, station: Station, *options: str, lease: Sequence[str] = (), then: str = "exec sleep 3600"
    ) -> None:
        self.station = station
        self.lease = station.lease("-r", CONSOLES, *lease)
        self.path = station.ctl("manifest", self.lease, "--format", "json").json["nodes"][0][1]
        self.device = f"tty-{self.path.removeprefix('/dev/')}"
        script = f"exec 3<>{self.path}; {then}"
        self.pid = station.podman.start("train", device(self.lease), *options, script=script)
        self.wait_in_use()

    def wait_in_use(self) -> None:
        """Wait until the device is in use by the container's process, and by nobody else."""
        self.station.root.wait_for_device(self.device, State="in-use")
        wait_until(lambda: self.holders() == [self.pid], what="the container's process among the holders")
        binding = self.station.root.call(names.lease_path(self.lease), names.LEASE, "GetBinding")
        assert binding["pid"] == self.pid

    def holders(self) -> list[int]:
        rows = self.station.root.call(names.device_path(self.device), names.DEVICE, "GetHolders")
        return [row["pid"] for row in rows]

    def wait_back(self) -> None:
        """Wait until the device is back, the lease having ended with its process, and all it gave gone."""
        self.station.agent.wait_for_log(f"lease {self.lease} of uid 0 ends: owner-gone (its pid ended)")
        self.station.root.wait_for_device(self.device, State="idle")
        assert not self.station.specification(self.lease).exists()

    def assert_lives(self) -> None:
        """The lease is as good as new: nobody has noticed anything."""
        [lease] = self.station.ctl.json("leases")
        assert (lease["id"], lease["state"]) == (self.lease, "active")
        assert self.station.specification(self.lease).exists()
        self.wait_in_use()


@pytest.mark.parametrize("user", ["0", "1000"])
def test_the_lease_is_bound_to_the_container_and_ends_with_it(station: Station, user: str) -> None:
    training = Training(station, f"--user={user}")
    station.podman.ok("stop", "--time=0", "train")
    training.wait_back()
    # the holder was known as the lease's own, whatever its uid in there
    assert station.root.signals(member="Conflict") == []
    assert station.root.signals(member="OrphanFound") == []


def test_kill_9_of_the_containers_first_process(station: Station) -> None:
    training = Training(station)
    os.kill(training.pid, signal.SIGKILL)
    training.wait_back()


def test_kill_9_of_conmon_leaves_the_container_and_its_lease(station: Station) -> None:
    training = Training(station)
    conmon = station.podman.conmon("train")
    os.kill(conmon, signal.SIGKILL)
    wait_until(lambda: not alive(conmon), what="the end of conmon")
    training.assert_lives()
    # nobody is left to tell podman, but the kernel tells the agent
    os.kill(training.pid, signal.SIGKILL)
    training.wait_back()


def test_kill_9_of_podman_leaves_the_container_and_its_lease(station: Station) -> None:
    lease = station.lease("-r", RESOURCE, "-d", "npu-0")
    path = station.vendor.file("npu-0")
    client = station.podman.spawn(device(lease), "--name=train", script=f"exec 3<>{path}; exec sleep 3600")
    station.root.wait_for_device("npu-0", State="in-use")
    pid = int(wait_until(lambda: station.podman.inspect("train")["State"]["Pid"], what="a running container"))
    client.kill()
    client.wait()
    holders = wait_until(
        lambda: station.root.call(names.device_path("npu-0"), names.DEVICE, "GetHolders"), what="a holder"
    )
    assert [row["pid"] for row in holders] == [pid]
    assert station.root.device("npu-0")["State"] == "in-use"
    station.podman.ok("kill", "train")
    station.root.wait_for_device("npu-0", State="idle")
    assert not station.specification(lease).exists()


def test_kill_9_of_the_agent_while_the_container_lives(own: Station) -> None:
    training = Training(own)
    own.agent.kill9()
    own.agent.start()
    training.assert_lives()
    # and while it ends
    own.agent.kill9()
    own.podman.ok("kill", "train")
    assert own.specification(training.lease).exists()
    own.agent.start()
    training.wait_back()


def test_two_containers_with_one_lease(station: Station) -> None:
    """The last one counts; the first keeps the device from being anybody else's."""
    training = Training(station)
    second = station.podman.start("second", device(training.lease), script="exec sleep 3600")
    binding = station.root.call(names.lease_path(training.lease), names.LEASE, "GetBinding")
    assert binding["pid"] == second
    station.podman.ok("kill", "second")
    station.root.wait_for_device(training.device, State="reclaiming")
    assert training.holders() == [training.pid]
    station.podman.ok("kill", "train")
    training.wait_back()


def test_a_lease_released_while_its_container_runs(station: Station) -> None:
    training = Training(station)
    station.ctl("release", training.lease)
    station.root.wait_for_device(training.device, State="reclaiming")
    # nobody else gets it, and no other container; this one goes on
    assert not station.specification(training.lease).exists()
    assert alive(training.pid)
    assert training.holders() == [training.pid]
    station.podman.ok("kill", "train")
    station.root.wait_for_device(training.device, State="idle")


def test_a_lease_may_take_its_container_with_it(station: Station) -> None:
    # the first process of a pid namespace is deaf to what it has no handler for
    then = "trap exit TERM; sleep 3600 3>&- & wait"
    training = Training(station, "--user=1000", lease=("--on-end=kill",), then=then)
    station.ctl("release", training.lease)
    wait_until(lambda: not alive(training.pid), what="the end of the container's process")
    station.root.wait_for_device(training.device, State="idle")


# -- a lease that is over ---------------------------------------------------------------------------
def test_a_lease_that_has_ended_starts_no_container(station: Station) -> None:
    lease = station.lease("-r", CONSOLES)
    station.ctl("release", lease)
    station.wait_idle()
    assert not station.specification(lease).exists()
    done = station.podman.run(device(lease), script="echo started")
    assert done.returncode == 126
    assert f"unresolvable CDI devices heteroagent.org/lease={lease}" in done.stderr
    assert "started" not in done.stdout


def test_a_lease_that_ends_while_the_container_is_made(station: Station) -> None:
    """podman has read the specification by then; the hook has the last word."""
    lease = station.lease("-r", CONSOLES)
    kept = station.specification(lease).read_bytes()
    station.ctl("release", lease)
    station.wait_idle()
    station.specification(lease).write_bytes(kept)
    try:
        done = station.podman.run(device(lease), script="echo started")
    finally:
        station.specification(lease).unlink()
    assert done.returncode == 126
    assert "heteroctl:" in done.stderr
    assert "ended" in done.stderr
    assert "started" not in done.stdout


def test_a_lease_that_lost_a_device_starts_no_container(station: Station) -> None:
    """The device is back and anybody's, under the names that the specification has."""
    lease = station.lease("-r", RESOURCE, "-n", "2", "--confirm")
    kept = station.vendor.devices["npu-0"]
    station.vendor.remove("npu-0")
    station.root.wait_for_device("npu-0", State="lost")
    station.vendor.devices["npu-0"] = kept
    station.vendor.report()
    station.root.wait_for_device("npu-0", State="idle")
    done = station.podman.run(device(lease), script="echo started")
    assert done.returncode == 126
    assert "the lease has lost npu-0" in done.stderr
    assert "started" not in done.stdout
    # nor is the lease the worse for it
    station.root.wait_for_device("npu-1", State="in-use")


def test_without_the_agent_no_container_starts(own: Station) -> None:
    lease = own.lease("-r", CONSOLES)
    own.agent.kill9()
    done = own.podman.run(device(lease), script="echo started")
    assert done.returncode == 126
    assert "systemctl start hetero-agent" in done.stderr
    assert "started" not in done.stdout


def test_a_container_that_has_ended_does_not_start_again_with_the_same_lease(station: Station) -> None:
    training = Training(station)
    station.podman.ok("stop", "--time=0", "train")
    training.wait_back()
    done = station.podman("start", "train")
    assert done.returncode != 0
    assert "unresolvable CDI devices" in done.stderr


def test_the_form_cdi_is_what_the_agent_writes(station: Station) -> None:
    lease = station.lease("-r", RESOURCE)
    printed = station.ctl("manifest", lease, "--format", "cdi").json
    assert printed == json.loads(station.specification(lease).read_text())
    # where somebody else keeps such files, they do as well
    station.specification(lease).rename(station.agent.directory / "moved.json")
    own = station.specifications / "own.json"
    own.write_text(json.dumps(printed))
    try:
        done = station.podman.run(device(lease), script="env")
    finally:
        own.unlink()
    assert f"HETERO_LEASE_ID={lease}" in done.stdout.splitlines()


def test_a_link_to_a_leased_node_is_a_node_in_the_container_that_any_user_can_use(own: Station) -> None:
    """As /dev/dri/by-path, by which Level Zero finds its cards: bound, it would have the host's mode."""
    links = Path(f"/dev/hetero-agent-test-{os.getpid()}")  # /dev/shm is nodev in a container
    links.mkdir()
    try:
        (links / "by-path").symlink_to(CONSOLE)
        (links / "file").write_text("plain\n")
        mounts = "".join(f'\n[[mounts]]\nhost = "{links}/{name}"\n' for name in ("by-path", "file"))
        profile = own.agent.profiles / "console.toml"
        profile.write_text(profile.read_text() + mounts)
        own.agent.reload()
        own.wait_idle()
        lease = own.lease("-r", CONSOLES, "-d", f"tty-{CONSOLE.name}")
        script = f"exec 3<>{links}/by-path 4<>{CONSOLE} && ls -l {links}/by-path && cat {links}/file"
        done = own.podman.run(device(lease), "--user=1000", script=script)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("c")
        assert done.stdout.endswith("plain\n")
        printed = own.ctl("manifest", lease, "--format", "cdi", code=None)
        assert printed.code or printed.json["cdiVersion"] == "0.5.0"
    finally:
        for path in links.iterdir():
            path.unlink()
        links.rmdir()
