"""Processes outside any lease: seen, told, listed, ended if somebody wants it; and the system's own."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hetero_agent import names
from tests.holders.holding import Child, alive, as_user, holding
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, OUTSIDER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.cgroup import control_group
from tests.support.hold import HoldingProcess
from tests.support.process import PYTHON, ROOT
from tests.support.systemd import POLICY, FakeSystemd
from tests.support.trail import wait_signals
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

SHORT = CONFIG.replace("[reclaim]\n", "[reclaim]\nkill-after = 0.5\n")
NPU = names.device_path("npu-0")
PERSISTENCED = "nvidia-persistenced.service"


@pytest.fixture
def bus() -> Iterator[PrivateBus]:
    """A private bus on which there may be a systemd."""
    one = PrivateBus(extra=POLICY)
    yield one
    one.close()


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, config=SHORT)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def root(bus: PrivateBus, vendor: Vendor) -> Iterator[Client]:
    """Root, on an agent with the idle device npu-0."""
    vendor.add("npu-0")
    vendor.wait_idle()
    with Client(bus) as client:
        yield client


def ctl(bus: PrivateBus, *words: str, code: int = 0, uid: int = 0) -> Any:
    """``heteroctl --json WORDS``, which is to end with CODE; return its document."""
    done = subprocess.run(
        [*as_user(uid), PYTHON, "-m", "hetero_agent.cli.main", "--json", *words],
        cwd=ROOT,
        env={**os.environ, names.BUS_ADDRESS_VARIABLE: bus.address},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )
    assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    return json.loads(done.stdout) if code == 0 else done.stderr


# -- seen and told -----------------------------------------------------------------------------------
def test_orphans_are_told_once_with_their_number(agent: AgentProcess, vendor: Vendor, root: Client) -> None:
    # both at once: a look that sees the first only must be too early to tell of it
    agent.write_config(SHORT.replace("occupied-after = 0.3", "occupied-after = 2"))
    agent.reload()
    path = vendor.file("npu-0")
    with (
        HoldingProcess(path, OUTSIDER, later=True) as first,
        HoldingProcess(path, MEMBER, later=True) as second,
    ):
        for process in (first, second):
            process.open()
        told = root.wait_for_signal(names.MANAGER, "OrphanFound")
        assert told.body == (NPU, 2)
        device = root.device("npu-0")
        assert (device["State"], device["Reason"]) == ("occupied", "held by 2 processes")
        agent.wait_for_log('"HETERO_KIND":"orphan"')
        line = next(one for one in agent.log.splitlines() if '"HETERO_KIND":"orphan"' in one)
        assert all(f"pid {child.pid} " in line for child in (first, second))
        time.sleep(1)
        assert len(root.signals(names.MANAGER, "OrphanFound")) == 1
    root.wait_for_device("npu-0", State="idle")
    with holding(path, before=as_user(OUTSIDER)):
        wait_until(lambda: len(root.signals(names.MANAGER, "OrphanFound")) == 2, what="the next one told")
        assert root.signals(names.MANAGER, "OrphanFound")[1].body == (NPU, 1)
    root.wait_for_device("npu-0", State="idle")


def test_glance_does_not_occupy(agent: AgentProcess, vendor: Vendor, root: Client) -> None:
    """An open that is over before the second look, which is later than usual here: a busy machine may
    take its time to end the process."""
    agent.write_config(SHORT.replace("occupied-after = 0.3", "occupied-after = 2"))
    agent.reload()
    for _ in range(3):
        with holding(vendor.file("npu-0"), before=as_user(OUTSIDER)):
            pass
    time.sleep(3)
    assert root.signals(names.MANAGER, "OrphanFound") == []
    assert [one.body[1] for one in root.signals(names.DEVICE, "StateChanged", NPU)] == []
    assert root.device("npu-0")["State"] == "idle"


def test_heteroctl_says_who_it_is(bus: PrivateBus, vendor: Vendor, root: Client) -> None:
    container = os.urandom(32).hex()
    pod = "12345678-9abc-def0-1234-56789abcdef0"
    lies_in = {
        f"/docker/{container}": ("", f"docker:{container}", ""),
        f"/machine.slice/libpod-{container}.scope": (
            f"libpod-{container}.scope",
            f"podman:{container}",
            "",
        ),
        f"/kubepods/pod{pod}/{container}": ("", f"kubernetes:{container}", pod),
        f"/system.slice/cri-containerd-{container}.scope": (
            f"cri-containerd-{container}.scope",
            f"containerd:{container}",
            "",
        ),
        "/system.slice/train.service": ("train.service", "", ""),
    }
    vendor.add(*(f"npu-{number}" for number in range(5)))
    vendor.wait_idle()
    user = pwd.getpwuid(OUTSIDER).pw_name
    with control_group(*lies_in) as groups, contextlib.ExitStack() as stack:
        children = []
        for number, group in enumerate(groups):
            child = stack.enter_context(HoldingProcess(vendor.file(f"npu-{number}"), OUTSIDER, later=True))
            group.add(child.pid)
            child.open()
            children.append(child)
        for number, (group, child) in enumerate(zip(groups, children, strict=True)):
            root.wait_for_device(f"npu-{number}", State="occupied")
            (one,) = ctl(bus, "holders", f"npu-{number}")
            shown = tuple(one[key] for key in ("unit", "container", "pod"))
            assert shown == lies_in[group.path]
            whose = tuple(one[key] for key in ("pid", "start", "uid", "user", "role", "lease"))
            assert whose == (child.pid, child.start, OUTSIDER, user, "outsider", "")
            assert one["exe"] == os.path.realpath(PYTHON)
            assert time.time_ns() // 1000 - one["since"] < 60_000_000
        # its own user sees it, too; others see nothing
        (own,) = ctl(bus, "holders", "npu-0", uid=OUTSIDER)
        assert own["pid"] == children[0].pid
        assert "uid 9 is not in group" in ctl(bus, "holders", "npu-0", uid=9, code=77)


# -- ended on request --------------------------------------------------------------------------------
def test_reap_by_heteroctl(bus: PrivateBus, agent: AgentProcess, vendor: Vendor, root: Client) -> None:
    path = vendor.file("npu-0")
    first, second = Child(path, "deaf", as_user(OUTSIDER)), Child(path, "open", as_user(MEMBER))
    try:
        root.wait_for_device("npu-0", State="occupied")
        wait_until(lambda: len(ctl(bus, "holders", "npu-0")) == 2, what="both")
        ctl(bus, "reap", "npu-0", "--pid", str(first.pid), uid=OUTSIDER, code=77)
        ctl(bus, "reap", "npu-0", "--pid", str(os.getpid()), code=1)
        document = ctl(bus, "reap", "npu-0", "--pid", str(first.pid))
        assert (document["ended"], [one["pid"] for one in document["named"]]) == (1, [first.pid])
        # deaf to TERM: KILL follows; the other was not named
        assert first.process.wait(30) == -signal.SIGKILL
        wait_signals(agent, first.pid, ["got SIGTERM", "got SIGKILL"])
        assert alive(second.pid)
        root.wait_for_device("npu-0", State="reclaiming")
        assert ctl(bus, "reap", "npu-0", "--all")["ended"] == 1
        assert second.process.wait(30) == -signal.SIGTERM
        root.wait_for_device("npu-0", State="idle")
    finally:
        first.end()
        second.end()


def test_reap_names_a_process_that_is_not_there_any_more(root: Client, vendor: Vendor) -> None:
    """Pid and start time are both needed, so a later process of that pid is never meant."""
    with holding(vendor.file("npu-0"), before=as_user(OUTSIDER)) as child:
        root.wait_for_device("npu-0", State="occupied")
        for pair in ((child.pid, child.start + 1), (child.pid + 1, child.start)):
            with pytest.raises(CallError) as caught:
                root.manager("Reap", "soa(ut)", f"k{pair}", NPU, [pair])
            assert caught.value.name == "NotFound"
        assert alive(child.pid)


# -- ended by configuration --------------------------------------------------------------------------
def test_orphans_kill_ends_by_the_same_rules(agent: AgentProcess, vendor: Vendor, root: Client) -> None:
    path = vendor.file("npu-0")
    setuid = ["setpriv", f"--ruid={OUTSIDER}"]
    deaf = Child(path, "deaf", as_user(OUTSIDER))
    plain = Child(path, "open", as_user(MEMBER))
    try:
        with holding(path) as roots, holding(path, before=setuid) as half:
            root.wait_for_device("npu-0", State="occupied")
            time.sleep(1)
            assert all(alive(child.pid) for child in (deaf, plain, roots, half))  # it says wait
            agent.write_config(SHORT.replace("[reclaim]\n", '[reclaim]\norphans = "kill"\n'))
            agent.reload()
            assert plain.process.wait(30) == -signal.SIGTERM
            assert deaf.process.wait(30) == -signal.SIGKILL
            for child in (roots, half):
                why = f"not ended: process {child.pid} has uid 0 among its uids"
                wait_signals(agent, child.pid, [why])
                assert alive(child.pid)
            assert root.device("npu-0")["State"] == "occupied"
        root.wait_for_device("npu-0", State="idle")
    finally:
        deaf.end()
        plain.end()
    lease, _ = root.allocate("a", RESOURCE)
    assert lease


def test_orphans_kill_spares_a_lease_and_its_leftovers(bus: PrivateBus, vendor: Vendor, root: Client) -> None:
    """Whoever has a lease, or had one with on-end=wait, is no orphan; an intruder is no orphan either."""
    vendor.client.wait_for_device("npu-0", State="idle")
    with Client(bus, MEMBER, [GROUP_GID]) as member:
        lease, _ = member.allocate("a", RESOURCE, 1, {"confirm": V("b", True)})
        path = vendor.file("npu-0")
        with holding(path, before=as_user(MEMBER)) as own, holding(path, before=as_user(OUTSIDER)) as other:
            member.wait_for_signal(names.MANAGER, "Conflict")
            member.release("r", lease)
            member.wait_for_device("npu-0", State="reclaiming")
            time.sleep(1)
            assert alive(own.pid)
            assert alive(other.pid)
        member.wait_for_device("npu-0", State="idle")


# -- what the system keeps ------------------------------------------------------------------------------
def test_what_a_system_unit_holds_is_no_obstacle(bus: PrivateBus, vendor: Vendor, root: Client) -> None:
    """Known by its control group and the uid of its main process; what it runs for others is not."""
    path = vendor.file("npu-0")
    daemon_uid, other_uid = 10, 9
    with (
        FakeSystemd(bus) as systemd,
        control_group(f"/system.slice/{PERSISTENCED}", f"/user.slice/{PERSISTENCED}") as (system, user),
        holding("/dev/null", "none", as_user(daemon_uid)) as main,
    ):
        systemd.units[PERSISTENCED] = ("active", "0" * 32)
        systemd.main_pids[PERSISTENCED] = main.pid
        system.add(main.pid)
        # opened only once they are where they belong
        for uid in (daemon_uid, 0):
            with HoldingProcess(path, uid, later=True) as child:
                system.add(child.pid)
                child.open()
                wait_until(
                    lambda uid=uid: (
                        [(one["uid"], one["role"]) for one in ctl(bus, "holders", "npu-0")] == [(uid, "system")]
                    ),
                    what="the system's holder",
                )
                time.sleep(0.6)
                assert root.device("npu-0")["State"] == "idle"
                lease, _ = root.allocate(f"a{uid}", RESOURCE, 1, {"confirm": V("b", True)})
                root.release(f"r{uid}", lease)
                root.wait_for_device("npu-0", State="idle")
                assert ctl(bus, "reap", "npu-0", "--all")["ended"] == 0
                assert alive(child.pid)
        for group, uid in ((system, other_uid), (user, 0)):
            with HoldingProcess(path, uid, later=True) as child:
                group.add(child.pid)
                child.open()
                root.wait_for_device("npu-0", State="occupied")
            root.wait_for_device("npu-0", State="idle")
        assert root.signals(names.MANAGER, "Conflict") == []
