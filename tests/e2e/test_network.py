"""The whole daemon moves a device's network interface for a lease: mocked hardware, a real interface.

The agent's host is a network namespace of the test's own; the workload is a process in another.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero_agent import faultpoints, names
from tests.support.access import AccessHelper
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.fakesys import FakeSys
from tests.support.network import NIC as RESOURCE
from tests.support.network import NIC_PROFILE as PROFILE
from tests.support.network import Workload, ip, is_up, links
from tests.support.process import PYTHON, ROOT
from tests.support.under import run_under
from tests.support.wait import wait_until

DEVICE = "0000:3b:00.0"
MOVE = {"netdev": V("s", "move")}

in_a_host = run_under("unshare", "--net", "--mount", "--propagation", "private")


class Host:
    """A host with an accelerator, its interface ``hca0``, and an agent that MAY move it, itself or by a
    helper (HELPED)."""

    def __init__(self, may: bool = True, env: Mapping[str, str] | None = None, helped: bool = False) -> None:
        path = FakeSys().npu(DEVICE)
        child = path / "net/hca0"
        child.mkdir(parents=True)
        (child / "uevent").write_text("INTERFACE=hca0\nIFINDEX=2\n")
        Path("/sys/class/net").mkdir()
        (child / "subsystem").symlink_to("/sys/class/net")
        Path("/sys/class/net/hca0").symlink_to(child)
        ip("link add hca0 type veth peer name wire0")
        ip("link set wire0 up")
        ip("link set hca0 up")
        self.bus = PrivateBus()
        self.agent = AgentProcess(self.bus, profiles={"nic.toml": PROFILE}, sources="kernel")
        self.helper = AccessHelper(agent=self.agent)
        access = "\n[access]\nmove-netdevs = true\n" if may else "\n[access]\n"
        if helped:
            access += f'helper = "{self.helper.socket}"\n'
            self.helper.start()
        self.agent.write_config(CONFIG + access)
        self.agent.start(env)
        self.root = Client(self.bus)
        self.root.wait_for_device(DEVICE, State="idle", Health="healthy")

    def bound(self, workload: Workload) -> dict[str, V]:
        return {"pid": V("u", workload.pid)}

    def records(self) -> list[str]:
        """What is written down of leases."""
        places = (self.agent.runtime / "access", self.helper.records)
        found = [one for place in places for one in place.rglob("*") if not one.is_dir()]
        return [str(one) for one in found if names.LEASE_ID.match(one.name)]

    def close(self) -> None:
        self.root.close()
        self.agent.close()
        self.helper.close()
        self.bus.close()


@contextlib.contextmanager
def host(**more: Any) -> Iterator[Host]:
    one = Host(**more)
    try:
        yield one
    finally:
        one.close()


def is_back(host: Host) -> None:
    """All is as it was before any lease."""
    host.root.wait_for_device(DEVICE, State="idle")
    assert is_up("hca0")
    assert links().keys() == {"hca0", "wire0"}
    assert host.records() == []
    assert "nsfs" not in Path("/proc/self/mountinfo").read_text()


@in_a_host
def test_confirmed_it_is_with_the_workload_and_released_on_the_host() -> None:
    with host() as it, Workload() as workload:
        lease, manifest = it.root.allocate("r1", RESOURCE, options=MOVE)
        assert manifest["netdevs"] == [[DEVICE, "hca0"]]
        assert is_up("hca0")
        it.root.confirm("r2", lease, it.bound(workload))
        assert links().keys() == {"wire0"}
        assert is_up("hca0", workload.pid)
        it.root.release("r3", lease)
        it.root.wait_for_device(DEVICE, State="idle")
        assert links(workload.pid) == {}
        is_back(it)


@in_a_host
def test_the_end_of_the_workload_brings_it_back() -> None:
    with host() as it, Workload() as workload:
        options = {**MOVE, **it.bound(workload), "confirm": V("b", True)}
        lease, _ = it.root.allocate("r1", RESOURCE, options=options)
        assert is_up("hca0", workload.pid)
        ip("link set hca0 down", workload.pid)
        ip("link set hca0 name mine0", workload.pid)
        workload.kill()
        is_back(it)
        assert it.root.wait_for_signal(names.MANAGER, "LeaseEnded").body == (lease, "owner-gone")


@in_a_host
def test_the_agent_dies_and_the_workload_while_it_is_away() -> None:
    with host() as it, Workload() as workload:
        lease, _ = it.root.allocate("r1", RESOURCE, options=MOVE)
        it.root.confirm("r2", lease, it.bound(workload))
        it.root.close()
        it.agent.signal(signal.SIGKILL)
        it.agent.wait()
        assert is_up("hca0", workload.pid)
        it.agent.start()
        it.root = Client(it.bus)
        it.root.wait_for_device(DEVICE, State="in-use")
        assert is_up("hca0", workload.pid)
        it.root.close()
        it.agent.signal(signal.SIGKILL)
        it.agent.wait()
        workload.kill()
        assert links().keys() == {"wire0"}
        it.agent.start()
        it.root = Client(it.bus)
        is_back(it)


@pytest.mark.parametrize("stage", faultpoints.STAGES)
@pytest.mark.parametrize("step", ["confirm", "attached"])
@in_a_host
def test_killed_at_every_step_of_a_confirm(step: str, stage: str) -> None:
    with host(env={"HETERO_FAULT_POINT": f"{step}:{stage}"}) as it, Workload() as workload:
        lease, _ = it.root.allocate("r1", RESOURCE, options=MOVE)
        with contextlib.suppress(CallError):
            it.root.confirm("r2", lease, it.bound(workload))
        wait_until(lambda: not it.agent.running(), what="the end at the fault point")
        it.agent.start()
        it.root.wait_for_device(DEVICE)
        confirmed = it.root.properties(lease, names.LEASE)["State"] == "active"
        if confirmed:
            assert is_up("hca0", workload.pid)
        else:
            # nobody was told that it is there
            wait_until(lambda: "hca0" in links() and is_up("hca0"), what="hca0 on the host")
        # who asks again gets what was asked
        it.root.confirm("r2", lease, it.bound(workload))
        assert is_up("hca0", workload.pid)
        workload.kill()
        is_back(it)


@in_a_host
def test_what_the_host_needs_is_not_granted() -> None:
    with host() as it:
        ip("link add bridge0 type bridge")
        ip("link set hca0 master bridge0")
        with pytest.raises(CallError) as caught:
            it.root.allocate("r1", RESOURCE, options=MOVE)
        assert caught.value.name == "Unavailable"
        assert "network interface hca0 can't be moved: it is a member of bridge bridge0" in caught.value.text
        it.root.wait_for_device(DEVICE, State="idle")
        assert it.records() == []
        # who leaves it where it is, may have the device
        it.root.allocate("r2", RESOURCE)


@in_a_host
def test_a_confirm_that_fails_changes_nothing() -> None:
    with host() as it, Workload() as workload:
        lease, _ = it.root.allocate("r1", RESOURCE, options=MOVE)
        ip("address add 192.0.2.1/24 dev hca0")
        with pytest.raises(CallError) as caught:
            it.root.confirm("r2", lease, it.bound(workload))
        assert "the host has the address 192.0.2.1/24 on it" in caught.value.text
        assert caught.value.text.endswith("the lease is as it was")
        assert it.root.properties(lease, names.LEASE)["State"] == "pending"
        assert is_up("hca0")
        with pytest.raises(CallError, match="bind a pid"):
            it.root.confirm("r3", lease)
        ip("address flush dev hca0")
        it.root.confirm("r4", lease, it.bound(workload))
        assert is_up("hca0", workload.pid)


@in_a_host
def test_a_device_is_not_free_before_its_interface_is_back() -> None:
    with host() as it, Workload() as workload:
        lease, _ = it.root.allocate("r1", RESOURCE, options=MOVE)
        it.root.confirm("r2", lease, it.bound(workload))
        ip("link add hca0 type bridge")
        it.root.release("r3", lease)
        it.root.wait_for_device(DEVICE, State="reclaiming", Reason="access-not-revoked")
        assert links(workload.pid) == {}
        wait_until(lambda: "another interface has its name now" in it.agent.log, what="the reason in the log")
        ip("link delete hca0")
        is_back(it)


@in_a_host
def test_the_helper_moves_it_and_another_one_brings_it_back() -> None:
    with host(helped=True) as it, Workload() as workload:
        lease, _ = it.root.allocate("r1", RESOURCE, options=MOVE)
        it.root.confirm("r2", lease, it.bound(workload))
        assert is_up("hca0", workload.pid)
        it.helper.signal(signal.SIGKILL)
        it.helper.wait()
        workload.kill()
        it.root.wait_for_device(DEVICE, State="reclaiming")
        it.helper.start()
        is_back(it)


@in_a_host
def test_the_helper_says_why_not() -> None:
    with host(helped=True) as it, Workload() as workload:
        lease, _ = it.root.allocate("r1", RESOURCE, options=MOVE)
        ip("address add 192.0.2.1/24 dev hca0")
        with pytest.raises(CallError, match=r"the host has the address 192\.0\.2\.1/24 on it"):
            it.root.confirm("r2", lease, it.bound(workload))
        # the helper finds for itself what belongs to the device
        child = Path("/sys/class/net/hca0")
        child.unlink()
        child.symlink_to("/sys/devices/virtual/net/hca0")
        ip("address flush dev hca0")
        with pytest.raises(CallError, match=f"network interface hca0 is none of device {DEVICE}"):
            it.root.confirm("r3", lease, it.bound(workload))
        assert is_up("hca0")


def hook(it: Host, lease: str, pid: int) -> subprocess.CompletedProcess[str]:
    """Do what a container's runtime does before it starts the container's command."""
    words = [
        PYTHON,
        "-m",
        "hetero_agent.cli.main",
        "--bus",
        it.bus.address,
        "oci-hook",
        lease.rpartition("/l")[2],
    ]
    state = json.dumps({"ociVersion": "1.0.2", "id": "c", "status": "creating", "pid": pid, "bundle": "/"})
    return subprocess.run(words, input=state, cwd=ROOT, capture_output=True, text=True, check=False)


@in_a_host
def test_a_container_has_it_before_its_command_starts() -> None:
    with host() as it, Workload() as container:
        lease, _ = it.root.allocate("r1", RESOURCE, options=MOVE)
        ip("address add 192.0.2.1/24 dev hca0")
        done = hook(it, lease, container.pid)
        # the runtime shows this, and gives the container up
        assert done.returncode != 0
        assert (
            "network interface hca0 can't be moved: the host has the address 192.0.2.1/24 on it" in done.stderr
        )
        ip("address flush dev hca0")
        done = hook(it, lease, container.pid)
        assert (done.returncode, done.stderr) == (0, "")
        assert is_up("hca0", container.pid)
        container.kill()
        is_back(it)


@in_a_host
def test_nothing_moves_unless_the_configuration_says_so() -> None:
    with host(may=False) as it:
        with pytest.raises(CallError, match="network interfaces are not moved on this host: move-netdevs"):
            it.root.allocate("r1", RESOURCE, options=MOVE)
        it.root.wait_for_device(DEVICE, State="idle")
