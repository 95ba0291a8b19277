"""``heteroctl oci-hook``: what a container runtime hears, whatever it says and whoever calls it."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hetero_agent import cdispec, names
from hetero_agent.cli import ocihook
from hetero_agent.cli.complaints import Complaint
from hetero_agent.cli.ocihook import container_pid
from hetero_agent.cli.table import Printer
from tests.support.agent import GROUP_GID, MEMBER, OTHER_MEMBER, OUTSIDER, AgentProcess
from tests.support.calls import Client, as_user
from tests.support.ctl import Ctl
from tests.support.process import PYTHON
from tests.support.wait import wait_until

SCENARIO = """
[[device]]
id = "npu-0"
resource = "example.com/npu"
[[device]]
id = "npu-1"
resource = "example.com/npu"
"""
DEVICES = {"npu-0", "npu-1"}


def state(pid: int, **more: Any) -> str:
    """A container's state as runc writes it."""
    return json.dumps(
        {
            "ociVersion": "1.0.2-dev",
            "id": "0123456789ab",
            "status": "creating",
            "pid": pid,
            "bundle": "/var/lib/containers/x/userdata",
            "annotations": {"io.container.manager": "libpod"},
            **more,
        }
    )


def hook(
    ctl: Ctl, lease: str, text: str, uid: int = 0, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*as_user(uid), *before, PYTHON, "-m", "hetero_agent.cli.main", "oci-hook", lease]
    # the environment that a specification gives it, and no more
    env = {name: ctl.env[name] for name in (names.BUS_ADDRESS_VARIABLE, "PYTHONPATH")}
    return subprocess.run(
        command, input=text, env=env, cwd="/", capture_output=True, text=True, timeout=60, check=False
    )


def sleeper(uid: int) -> subprocess.Popen[bytes]:
    """A process that is UID's by now."""
    process = subprocess.Popen([*as_user(uid), "sleep", "600"])
    wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", what="the process")
    return process


@pytest.mark.parametrize("uid", [0, MEMBER])
def test_it_binds_the_containers_process(ctl: Ctl, agent: AgentProcess, uid: int) -> None:
    """Root's runtime confirms root's lease and a user's; a user's runtime their own."""
    owner = Ctl(agent.bus.address, MEMBER, [GROUP_GID])
    lease = owner.json("allocate", "-r", "example.com/npu")["lease"]
    process = sleeper(uid)
    try:
        done = hook(ctl, lease, state(process.pid), uid)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        with Client(agent.bus) as root:
            binding = root.call(names.lease_path(lease), names.LEASE, "GetBinding")
        assert binding["pid"] == process.pid
    finally:
        process.kill()
        process.wait()


def test_in_a_user_namespace(ctl: Ctl, agent: AgentProcess) -> None:
    """A rootless runtime's: it believes to be root, the bus knows better."""
    lease = Ctl(agent.bus.address, MEMBER, [GROUP_GID]).json("allocate", "-r", "example.com/npu")["lease"]
    process = sleeper(MEMBER)
    inside = ("unshare", "--user", "--map-root-user")
    try:
        done = hook(ctl, lease, state(process.pid), MEMBER, inside)
        assert (done.returncode, done.stderr) == (0, "")
        done = hook(ctl, lease, state(process.pid), OTHER_MEMBER, inside)
        assert done.returncode == 77
    finally:
        process.kill()
        process.wait()


def test_a_strangers_container(ctl: Ctl) -> None:
    lease = ctl.json("allocate", "-r", "example.com/npu")["lease"]
    process = sleeper(OUTSIDER)
    try:
        done = hook(ctl, lease, state(process.pid), OUTSIDER)
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 77
    assert "only the lease's owner and root may" in done.stderr
    assert ctl.json("leases")[0]["state"] == "pending"


def test_a_lease_that_has_ended(ctl: Ctl) -> None:
    lease = ctl.json("allocate", "-r", "example.com/npu")["lease"]
    ctl("release", lease)
    done = hook(ctl, lease, state(os.getpid()))
    assert done.returncode == 1
    assert done.stderr.startswith("heteroctl: ")
    assert "ended" in done.stderr
    # and one that there never was
    done = hook(ctl, "0" * 32, state(os.getpid()))
    assert done.returncode == 1
    assert "heteroctl: " in done.stderr


def test_a_process_that_is_gone(ctl: Ctl) -> None:
    lease = ctl.json("allocate", "-r", "example.com/npu")["lease"]
    process = sleeper(0)
    process.kill()
    process.wait()
    done = hook(ctl, lease, state(process.pid))
    assert done.returncode == 2
    assert f"there is no process {process.pid}" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        state(0),
        state(-1),
        state(True),
        '{"pid": "7"}',
        '{"pid": 7.0}',
        "\udcff",
        "[" * 9999,
    ],
    ids=range(12),
)
def test_what_is_no_state(text: str) -> None:
    with pytest.raises(Complaint) as caught:
        container_pid(text.encode("utf-8", "surrogateescape"))
    assert caught.value.code == 2


def test_what_is_no_state_confirms_nothing(ctl: Ctl) -> None:
    lease = ctl.json("allocate", "-r", "example.com/npu")["lease"]
    done = hook(ctl, lease, "")
    assert done.returncode == 2
    assert "no container's state" in done.stderr
    assert ctl.json("leases")[0]["state"] == "pending"


def test_no_standard_input_is_no_state(ctl: Ctl) -> None:
    lease = ctl.json("allocate", "-r", "example.com/npu")["lease"]
    done = hook(ctl, lease, "", before=("sh", "-c", 'exec "$@" <&-', "sh"))
    assert done.returncode == 2
    assert "no container's state" in done.stderr


def test_an_agent_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf:
        async def lease(self, name: str) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr(ocihook, "_ANSWER", 0.05)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(state(7).encode())))
    arguments = argparse.Namespace(lease="0" * 32)
    with pytest.raises(Complaint) as caught:
        asyncio.run(ocihook.oci_hook(Deaf(), arguments, Printer(io.StringIO(), False)))  # type: ignore[arg-type]
    assert caught.value.code == 69
    assert "does not answer" in caught.value.cause
    # and before the runtime loses its patience: 5 s are for the connection
    monkeypatch.undo()
    assert ocihook._ANSWER + 5 < cdispec.HOOK_TIMEOUT


def test_a_state_of_many_annotations() -> None:
    assert container_pid(state(7, annotations={f"a{n}": "x" * 100 for n in range(5000)}).encode()) == 7
