"""examples/podman.sh, word for word, with this podman and this heteroctl in the PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from hetero_agent import names
from tests.containers.conftest import CONSOLES, Station
from tests.support.podman import IMAGE, MADE_WITH
from tests.support.process import ROOT, scratch
from tests.support.wait import wait_until

Example = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def example(station: Station) -> Iterator[Example]:
    """Runs the example with arguments for it, after which come those that every container here needs."""
    programs = scratch("programs")
    for name, text in (
        ("podman", station.podman.program),
        ("heteroctl", f'#!/bin/sh\nexec {shlex.join(station.ctl.command)} "$@"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = {**station.ctl.env, "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(resource: str, count: int, *options: str, script: str) -> subprocess.CompletedProcess[str]:
        words = [resource, str(count), *options, *MADE_WITH, IMAGE, "sh", "-c", script]
        return station.podman.call([str(ROOT / "examples/podman.sh"), *words], env=env)

    yield run
    shutil.rmtree(programs)


def test_to_its_end(station: Station, example: Example) -> None:
    done = example(CONSOLES, 2, "--rm", script="echo $HETERO_DEVICES $CONSOLES; exit 5")
    assert done.returncode == 5, done.stderr
    devices, numbers = done.stdout.split()
    assert set(devices.split(",")) == {one for one in station.devices() if one.startswith("tty-")}
    assert numbers == "0,1"
    assert done.stderr == ""
    station.wait_idle()


def test_in_the_background(station: Station, example: Example) -> None:
    """podman ends, and with it heteroctl run; the lease is the container's by then."""
    done = example(CONSOLES, 1, "--detach", "--name=train", script="exec sleep 3600")
    assert done.returncode == 0, done.stderr
    [lease] = station.ctl.json("leases")
    assert lease["state"] == "active"
    pid = station.podman.inspect("train")["State"]["Pid"]
    binding = station.root.call(names.lease_path(lease["id"]), names.LEASE, "GetBinding")
    assert binding["pid"] == pid
    station.podman.ok("stop", "--time=0", "train")
    station.agent.wait_for_log(f"lease {lease['id']} of uid 0 ends: owner-gone (its pid ended)")


def test_a_container_that_can_not_be_made_gives_the_devices_back(station: Station, example: Example) -> None:
    done = example(CONSOLES, 1, "--rm", "--volume=/nowhere:/x", script="true")
    assert done.returncode == 125
    assert "/nowhere" in done.stderr
    wait_until(lambda: not station.ctl.json("leases"), what="the end of the lease")
