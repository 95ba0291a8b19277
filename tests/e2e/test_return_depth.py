"""Taking back at depth: every way to hold on to a device, by real processes, and what ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_agent import names
from tests.holders.holding import Child, alive, as_user, holding
from tests.support.agent import CONFIG, DAEMON, GROUP_GID, MEMBER, OUTSIDER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE
from tests.support.console import RESOURCE as CONSOLE_RESOURCE
from tests.support.hold import HoldingProcess
from tests.support.oci import Container
from tests.support.pids import spawn_as
from tests.support.process import PYTHON, scratch
from tests.support.stuck import StuckMount
from tests.support.trail import signals, wait_signals
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

DEADLINE, KILL_AFTER = 2.0, 0.5

SHORT = CONFIG.replace(
    "[reclaim]\n", f"[reclaim]\ndeadline = {DEADLINE}\nkill-after = {KILL_AFTER}\nscan-interval = 60\n"
)

NPU = names.device_path("npu-0")


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(bus, config=SHORT)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def vendor(agent: AgentProcess) -> Iterator[Vendor]:
    """The idle devices npu-0 and npu-1, whose files have a page that can be mapped."""
    with Vendor(agent) as one:
        one.add("npu-0", "npu-1")
        for device in one.devices:
            os.truncate(one.file(device), 4096)
        one.wait_idle()
        yield one


@pytest.fixture
def member(bus: PrivateBus, vendor: Vendor) -> Iterator[Client]:
    with Client(bus, MEMBER, [GROUP_GID]) as client:
        yield client


@pytest.fixture
def root(bus: PrivateBus, vendor: Vendor) -> Iterator[Client]:
    with Client(bus) as client:
        yield client


def lease_of(client: Client, **options: Any) -> str:
    """Lease npu-0, confirmed; return the lease."""
    given = {"confirm": V("b", True), "devices": V("as", ["npu-0"])}
    lease, _ = client.allocate("lease", RESOURCE, 1, {**given, **options})
    return lease


KILL = {"on-end": V("s", "kill")}


def holders(client: Client, path: str = NPU) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.call(path, names.DEVICE, "GetHolders")
    return sorted(found, key=lambda one: one["pid"])


def wait_holders(client: Client, *pids: int, path: str = NPU) -> list[dict[str, Any]]:
    """Wait until exactly PIDS are told to hold the device; return them by pid."""

    def look() -> list[dict[str, Any]] | None:
        found = holders(client, path)
        return found if [one["pid"] for one in found] == sorted(pids) else None

    return wait_until(look, what=f"holders {pids}")


def _results(client: Client, lease: str) -> list[str]:
    ended = client.signals(names.MANAGER, "LeaseEnded")
    return [one.body[1] for one in ended if one.body[0] == lease]


# -- waiting and ending ----------------------------------------------------------------------------
def test_term_that_is_ignored_is_followed_by_kill(agent: AgentProcess, vendor: Vendor, member: Client) -> None:
    lease = lease_of(member, **KILL)
    child = Child(vendor.file("npu-0"), "deaf", as_user(MEMBER))
    try:
        wait_holders(member, child.pid)
        begun = time.monotonic()
        member.release("r", lease)
        assert child.process.wait(30) == -signal.SIGKILL
        assert time.monotonic() - begun >= KILL_AFTER
        member.wait_for_device("npu-0", State="idle")
        wait_signals(agent, child.pid, ["got SIGTERM", "got SIGKILL"])
    finally:
        child.end()


def test_wait_signals_nobody_however_long(agent: AgentProcess, vendor: Vendor, member: Client) -> None:
    lease = lease_of(member)
    with holding(vendor.file("npu-0"), "open", as_user(MEMBER)) as child:
        wait_holders(member, child.pid)
        member.release("r", lease)
        member.wait_for_device("npu-0", State="faulty", Reason="reclaim-timeout")
        with pytest.raises(CallError) as caught:
            member.allocate("next", RESOURCE, 1, {"devices": V("as", ["npu-0"])})
        assert caught.value.name == "Unavailable"
        assert alive(child.pid)
        (one,) = holders(member)
        assert (one["role"], one["lease"]) == ("leftover", lease)
        # it is not ill, and that frees it no more than an administrator's back and forth
        vendor.health("npu-0", "unhealthy", "a passing cloud")
        vendor.health("npu-0", "healthy")
        with Client(agent.bus) as root:
            root.call(NPU, names.DEVICE, "Cordon", "ss", "c", "a look")
            root.call(NPU, names.DEVICE, "Uncordon", "s", "u")
        device = member.device("npu-0")
        assert (device["State"], device["Reason"], device["Health"]) == ("faulty", "reclaim-timeout", "healthy")
    member.wait_for_device("npu-0", State="idle")
    assert '"HETERO_KIND":"process-signalled"' not in agent.log


def test_on_fault_kill_ends_the_leases_own_processes(
    agent: AgentProcess, vendor: Vendor, member: Client
) -> None:
    """And nobody else's, though on-end says wait."""
    lease = lease_of(member, **{"on-fault": V("s", "kill")})
    path = vendor.file("npu-0")
    with holding(path, before=as_user(OUTSIDER)) as other:
        own = Child(path, "open", as_user(MEMBER))
        try:
            wait_holders(member, own.pid, other.pid)
            vendor.health("npu-0", "unhealthy", "fell off the bus")
            assert own.process.wait(30) == -signal.SIGTERM
            member.wait_for_device("npu-0", State=("reclaiming", "faulty"))
            assert alive(other.pid)
            vendor.health("npu-0", "healthy")
        finally:
            own.end()
    member.wait_for_device("npu-0", State="idle")
    wait_until(lambda: _results(member, lease) == ["failed"], what="the end of the lease")


_STUCK = """
import os, sys
os.open(sys.argv[1], os.O_RDWR)
print("ready", flush=True)
sys.stdin.readline()
open(sys.argv[2])
"""


def test_holder_in_the_kernels_hands(agent: AgentProcess, vendor: Vendor, member: Client, root: Client) -> None:
    """State D: TERM, KILL, and nothing more; one alert; the other devices go on as ever."""
    lease = lease_of(member, **KILL)
    with StuckMount() as stuck:
        command = [PYTHON, "-ISc", _STUCK, str(vendor.file("npu-0")), str(stuck.path / "x")]
        process = subprocess.Popen(
            [*as_user(MEMBER), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_holders(member, process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        wchan = Path(f"/proc/{process.pid}/wchan")
        wait_until(lambda: "request_wait_answer" in wchan.read_text(), what="the wait in the kernel")
        member.release("r", lease)
        member.wait_for_device("npu-0", State="faulty", Reason="reclaim-timeout")
        assert process.poll() is None
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "D"
        # the others are granted and come back meanwhile, and no more is done to this one
        for number in range(3):
            other, _ = root.allocate(f"o{number}", RESOURCE, 1, {"confirm": V("b", True)})
            root.release(f"p{number}", other)
            root.wait_for_device("npu-1", State="idle")
        time.sleep(4 * KILL_AFTER)
        wait_signals(agent, process.pid, ["got SIGTERM", "got SIGKILL"])
        assert agent.log.count("did not come back in time") == 1
        assert process.poll() is None
    assert process.wait(30) in (-signal.SIGTERM, -signal.SIGKILL)
    root.wait_for_device("npu-0", State="idle")
    wait_until(lambda: _results(member, lease) == ["released"], what="the end of the lease")
    process.stdin.close()
    process.stdout.close()


def test_who_is_not_wholly_the_leases_is_never_signalled(
    agent: AgentProcess, vendor: Vendor, member: Client, root: Client
) -> None:
    """What a setuid program inherited, and what was passed to another user's process."""
    lease = lease_of(member, **KILL)
    path = vendor.file("npu-0")
    with (
        holding(path, "open", ["setpriv", f"--ruid={MEMBER}"]) as half,
        holding(path, "open", as_user(OUTSIDER)) as other,
    ):
        wait_holders(member, half.pid, other.pid)
        member.release("r", lease)
        root.wait_for_device("npu-0", State="faulty")
        wait_signals(agent, half.pid, [f"not ended: process {half.pid} has uid 0 among its uids"])
        wait_signals(agent, other.pid, [f"not ended: process {other.pid} does not run wholly as uid {MEMBER}"])
        assert alive(half.pid)
        assert alive(other.pid)
        # an administrator may end the other's, not root's for a user's lease
        both = [(child.pid, child.start) for child in (half, other)]
        with pytest.raises(CallError) as caught:
            root.manager("Reap", "soa(ut)", "k1", NPU, both)
        assert caught.value.name == "NotAuthorized"
        assert root.manager("Reap", "soa(ut)", "k2", NPU, both[1:]) == 1
        wait_until(lambda: not alive(other.pid), what="the end of the other")
        assert alive(half.pid)
        root.wait_for_device("npu-0", State="faulty")
    root.wait_for_device("npu-0", State="idle")


def test_descriptor_handed_to_another_user_after_the_end(vendor: Vendor, member: Client) -> None:
    """The next holder got it over a socket; nobody opened anything."""
    lease = lease_of(member)
    ours, theirs = socket.socketpair()
    with ours, HoldingProcess(vendor.file("npu-0"), MEMBER) as owner:
        wait_holders(member, owner.pid)
        code = (
            "import os, socket, sys\n"
            "one = socket.socket(fileno=int(sys.argv[1]))\n"
            "_, fds, _, _ = socket.recv_fds(one, 1, 1)\n"
            "one.send(b'x'); sys.stdin.read()"
        )
        receiver = subprocess.Popen(
            [*as_user(OUTSIDER), PYTHON, "-ISc", code, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        member.release("r", lease)
        member.wait_for_device("npu-0", State=("reclaiming", "faulty"))
        descriptor = os.open(f"/proc/{owner.pid}/fd/3", os.O_RDWR)
        socket.send_fds(ours, [b"x"], [descriptor])
        os.close(descriptor)
        assert ours.recv(1) == b"x"
        owner.finish()
        (one,) = wait_holders(member, receiver.pid)
        assert (one["uid"], one["role"]) == (OUTSIDER, "leftover")
        assert member.device("npu-0")["State"] in ("reclaiming", "faulty")
        assert receiver.stdin is not None
        receiver.stdin.close()
        assert receiver.wait(30) == 0
    member.wait_for_device("npu-0", State="idle")


# -- pids that come again ----------------------------------------------------------------------------
_NEXT = """
import sys
kept = open(sys.argv[1]) if sys.argv[2] == "True" else None
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("holds", [False, True])
def test_recycled_pid_is_not_the_owner(
    agent: AgentProcess, vendor: Vendor, member: Client, holds: bool
) -> None:
    """The owner ended while the agent was down, and its pid is another user's process now."""
    owner = HoldingProcess(vendor.file("npu-0"), MEMBER, later=True)
    lease_of(member, pid=V("u", owner.pid), **KILL)
    owner.open()
    wait_holders(member, owner.pid)
    agent.kill9()
    pid = owner.pid
    owner.close()
    command = [*as_user(OUTSIDER), PYTHON, "-ISc", _NEXT, str(vendor.file("npu-0")), str(holds)]
    parent = spawn_as(pid, command)
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    agent.start()
    vendor.register()
    vendor.report()
    if holds:
        member.wait_for_device("npu-0", State="faulty")
        wait_signals(agent, pid, [f"not ended: process {pid} does not run wholly as uid {MEMBER}"])
    else:
        member.wait_for_device("npu-0", State="idle")
    assert alive(pid)
    parent.stdin.close()
    assert parent.wait(30) == 0
    parent.stdout.close()
    member.wait_for_device("npu-0", State="idle")
    agent.wait_for_log('"HETERO_REASON":"its pid ended"')


# -- namespaces and containers -----------------------------------------------------------------------
def test_holder_in_namespaces_of_its_own(vendor: Vendor, member: Client) -> None:
    """Own mount, pid and network namespace; the node is bound to another path there."""
    lease = lease_of(member, **KILL)
    place = scratch("bound")
    alias = place / "device"
    alias.touch()
    script = 'mount --bind "$0" "$1"; shift; exec "$@"'
    before = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc"]
    before += ["sh", "-c", script, str(vendor.file("npu-0")), str(alias), *as_user(MEMBER)]
    child = Child(alias, "open", before)
    try:
        (one,) = wait_until(lambda: holders(member), what="the holder")
        assert one["uid"] == MEMBER
        assert one["pid"] != child.pid  # unshare's child, by the host's number
        assert one["evidence"]["path"] == str(alias)
        member.release("r", lease)
        member.wait_for_device("npu-0", State="idle")
        # it holds nothing any more some time before it has ended
        wait_until(lambda: not alive(one["pid"]), what="the end of the holder")
    finally:
        child.end()
        alias.unlink()
        place.rmdir()


def test_path_of_an_executable_proves_nothing(vendor: Vendor, member: Client) -> None:
    """In namespaces of one's own any program is /usr/local/nvidia-persistenced, and uid 0."""
    script = (
        "mount -t tmpfs none /usr/local && touch /usr/local/nvidia-persistenced && "
        'mount --bind "$1" /usr/local/nvidia-persistenced && shift && '
        'exec /usr/local/nvidia-persistenced "$@"'
    )
    before = [*as_user(OUTSIDER), "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    child = Child(vendor.file("npu-0"), "open", before, os.path.realpath(PYTHON))
    try:
        member.wait_for_device("npu-0", State="occupied")
        (one,) = holders(member)
        assert (one["exe"], one["uid"]) == ("/usr/local/nvidia-persistenced", OUTSIDER)
        assert one["role"] == "outsider"
    finally:
        child.end()
    member.wait_for_device("npu-0", State="idle")


def test_container_from_start_to_end(agent: AgentProcess, vendor: Vendor, root: Client) -> None:
    """Bound to a container's first process; what is executed in it later is the lease's, too."""
    identifier = os.urandom(32).hex()
    with Container(identifier, vendor.file("npu-0")) as container:
        lease = lease_of(root, pid=V("u", container.pid), **KILL)
        assert root.call(lease, names.LEASE, "GetBinding")["cgroup"] == f"/docker/{identifier}"
        container.open()
        executed = container.run()
        found = wait_holders(root, container.pid, executed)
        assert {(one["container"], one["role"], one["lease"]) for one in found} == {
            (f"docker:{identifier}", "lease", lease)
        }
        time.sleep(0.5)
        assert root.signals(names.MANAGER, "Conflict") == []
        root.release("r", lease)
        root.wait_for_device("npu-0", State="idle")
        wait_until(lambda: not alive(container.pid), what="the end of the container")
        assert not alive(executed)
    # the first process of a pid namespace is deaf to what it has no handler for
    wait_signals(agent, container.pid, ["got SIGTERM", "got SIGKILL"])
    assert signals(agent, executed)[:1] == ["got SIGTERM"]


def test_container_that_outlives_its_lease(vendor: Vendor, root: Client) -> None:
    identifier = os.urandom(32).hex()
    with Container(identifier, vendor.file("npu-0")) as container:
        lease = lease_of(root, pid=V("u", container.pid))
        container.open()
        wait_holders(root, container.pid)
        root.release("r", lease)
        root.wait_for_device("npu-0", State="faulty")
        (one,) = holders(root)
        assert (one["role"], one["container"]) == ("leftover", f"docker:{identifier}")
    root.wait_for_device("npu-0", State="idle")


# -- ways to hold ------------------------------------------------------------------------------------
def test_mapping_alone_holds(vendor: Vendor, member: Client) -> None:
    lease = lease_of(member)
    with holding(vendor.file("npu-0"), "map", as_user(MEMBER)) as child:
        # its descriptor was there for a moment: what is told is what the last scan saw
        wait_until(
            lambda: [(one["pid"], one["mapped"]) for one in holders(member)] == [(child.pid, True)],
            what="the mapping alone",
        )
        member.release("r", lease)
        member.wait_for_device("npu-0", State="faulty")
    member.wait_for_device("npu-0", State="idle")


def test_node_made_anew_while_it_is_held(vendor: Vendor, member: Client) -> None:
    """The old file has no name any more, and who holds it still holds the device."""
    lease = lease_of(member)
    path = vendor.file("npu-0")
    with holding(path, "open", as_user(MEMBER)) as child:
        wait_holders(member, child.pid)
        path.unlink()
        path.touch()
        path.chmod(0o666)
        vendor.report()
        wait_holders(member, child.pid)
        member.release("r", lease)
        member.wait_for_device("npu-0", State="faulty")
        (one,) = holders(member)
        assert one["evidence"]["path"] == f"{path} (deleted)"
    member.wait_for_device("npu-0", State="idle")
    with holding(path, "open", as_user(OUTSIDER)):
        member.wait_for_device("npu-0", State="occupied")


def test_device_that_comes_back_while_its_holder_stays(vendor: Vendor, member: Client) -> None:
    """Unplugged under a lease and plugged in again: detached from it, and not free before it is let go."""
    lease = lease_of(member)
    with holding(vendor.file("npu-0"), "open", as_user(MEMBER)) as child:
        wait_holders(member, child.pid)
        was = vendor.devices["npu-0"]
        vendor.remove("npu-0")
        member.wait_for_device("npu-0", State="lost")
        vendor.devices["npu-0"] = was
        vendor.report()
        member.wait_for_device("npu-0", State=("reclaiming", "faulty"))
        assert member.properties(lease, names.LEASE)["State"] == "active"
        member.wait_for_device("npu-0", State="faulty")
    member.wait_for_device("npu-0", State="idle")
    member.release("r", lease)
    assert member.wait_for_signal(names.MANAGER, "LeaseEnded").body == (lease, "released")
    assert member.device("npu-0")["State"] == "idle"


def test_control_node_is_no_use(agent: AgentProcess, vendor: Vendor, member: Client) -> None:
    control = agent.directory / "vendor" / "control"
    control.touch()
    control.chmod(0o666)
    nodes = [(str(vendor.file("npu-0")), "own"), (str(control), "control")]
    vendor.devices["npu-0"]["nodes"] = V("a(ss)", nodes)
    vendor.report()
    vendor.wait_idle()
    with holding(control, "open", as_user(OUTSIDER)), holding(control, "open", as_user(MEMBER)):
        time.sleep(1)
        assert member.device("npu-0")["State"] == "idle"
        lease = lease_of(member)
        member.release("r", lease)
        member.wait_for_device("npu-0", State="idle")
        assert holders(member) == []


# -- one node of several shares ------------------------------------------------------------------------
def test_shares_of_one_node_come_back_by_whose_process_it_is(vendor: Vendor, member: Client) -> None:
    path = vendor.directory / "shared"
    path.touch()
    path.chmod(0o666)
    share = {"resource": V("s", "example.com/npu.part"), "nodes": V("a(ss)", [(str(path), "own")])}
    vendor.add("card", resource="example.com/fpga")
    for one in ("card-s1", "card-s2"):
        vendor.devices[one] = {"id": V("s", one), "parent": V("s", "card"), **share}
    vendor.report()
    vendor.wait_idle(["card-s1", "card-s2"])
    first = HoldingProcess(path, MEMBER, child=True, later=True)
    second = HoldingProcess(path, MEMBER, later=True)
    with first, second:
        leases = []
        for number, process in enumerate((first, second), 1):
            options = {
                "confirm": V("b", True),
                "devices": V("as", [f"card-s{number}"]),
                "pid": V("u", process.pid),
            }
            leases.append(member.allocate(f"s{number}", "example.com/npu.part", 1, options)[0])
            process.open()
        for number in (1, 2):
            member.wait_for_device(f"card-s{number}", State="in-use")
        with pytest.raises(CallError) as caught:
            member.allocate("card", "example.com/fpga")
        assert caught.value.name == "Unavailable"
        first.kill()
        member.wait_for_device("card-s1", State=("reclaiming", "faulty"))
        # its child has the node open; so has the other lease's process, which doesn't count
        (one,) = wait_holders(member, first.child, path=names.device_path("card-s1"))
        assert one["role"] == "leftover"
        first.kill_child()
        member.wait_for_device("card-s1", State="idle")
        assert member.device("card-s2")["State"] == "in-use"
        wait_holders(member, second.pid, path=names.device_path("card-s2"))
        assert member.signals(names.MANAGER, "Conflict") == []
        second.kill()
        member.wait_for_device("card-s2", State="idle")
    wait_until(lambda: len(member.signals(names.MANAGER, "LeaseEnded")) == 2, what="the ends of both leases")
    ended = [one.body for one in member.signals(names.MANAGER, "LeaseEnded")]
    assert sorted(ended) == sorted((lease, "owner-gone") for lease in leases)


def test_share_without_a_process_to_tell_it_by_is_refused(vendor: Vendor, member: Client) -> None:
    path = vendor.directory / "shared"
    path.touch()
    share = {"resource": V("s", "example.com/npu.part"), "nodes": V("a(ss)", [(str(path), "own")])}
    vendor.add("card", resource="example.com/fpga")
    for one in ("card-s1", "card-s2"):
        vendor.devices[one] = {"id": V("s", one), "parent": V("s", "card"), **share}
    vendor.report()
    vendor.wait_idle(["card-s1", "card-s2"])
    with pytest.raises(CallError) as caught:
        member.allocate("s", "example.com/npu.part", 1, {"confirm": V("b", True)})
    assert (caught.value.name, "bind a pid or a unit" in caught.value.text) == ("InvalidArgument", True)
    assert member.device("card-s1")["State"] == "idle"


# -- what a scan can't see -----------------------------------------------------------------------------
def test_blind_agent_proves_nothing(
    bus: PrivateBus, agent: AgentProcess, vendor: Vendor, member: Client
) -> None:
    """Restarted without the right to look into processes: nothing comes back, nothing is granted."""
    lease = lease_of(member)
    agent.terminate()
    agent.program = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", *DAEMON)
    agent.start()
    vendor.register()
    vendor.report()
    assert member.properties(lease, names.LEASE)["State"] == "active"
    member.release("r", lease)
    device = member.wait_for_device("npu-0", State="faulty")
    assert device["Reason"] == "scan-incomplete"
    assert member.device("npu-1")["State"] == "probing"
    with pytest.raises(CallError) as caught:
        member.allocate("n", RESOURCE)
    assert caught.value.name == "Unavailable"
    agent.terminate()
    agent.program = DAEMON
    agent.start()
    vendor.register()
    vendor.report()
    member.wait_for_device("npu-0", State="idle")
    member.wait_for_device("npu-1", State="idle")
    wait_until(lambda: not member.properties(names.ROOT, names.MANAGER)["Leases"], what="the end of the lease")


# -- nodes of the kernel -----------------------------------------------------------------------------
@pytest.fixture
def console(bus: PrivateBus) -> Iterator[Client]:
    """A caller, on an agent that has a virtual console as its device and scans all every second."""
    config = SHORT.replace("scan-interval = 60", "scan-interval = 1")
    one = AgentProcess(bus, config=config, profiles={"console.toml": PROFILE}, sources="kernel")
    try:
        one.start()
        with Client(bus) as client:
            client.wait_for_device(DEVICE_ID, State="idle")
            yield client
    finally:
        one.close()


@pytest.fixture
def copy() -> Iterator[Path]:
    """A copy of the console's node, made by mknod, that no watch is on."""
    place = scratch("copy")
    path = place / "device"
    os.mknod(path, 0o020666, CONSOLE.stat().st_rdev)
    yield path
    path.unlink()
    place.rmdir()


def test_stranger_with_a_copy_of_the_node(console: Client, copy: Path) -> None:
    """As a privileged container has it: no open of the node itself tells of it."""
    with holding(copy) as child:
        console.wait_for_device(DEVICE_ID, State="occupied")
        (one,) = holders(console, names.device_path(DEVICE_ID))
        assert (one["pid"], one["evidence"]["path"]) == (child.pid, str(copy))
    console.wait_for_device(DEVICE_ID, State="idle")


def test_leftover_with_a_copy_of_the_node(console: Client, copy: Path) -> None:
    lease, _ = console.allocate("a", CONSOLE_RESOURCE, 1, {"confirm": V("b", True)})
    with holding(copy):
        console.release("r", lease)
        console.wait_for_device(DEVICE_ID, State="faulty")
    console.wait_for_device(DEVICE_ID, State="idle")


def test_node_of_the_kernel_made_anew_while_it_is_held(console: Client) -> None:
    """The same number at the same path: the old one, deleted, is the same device."""
    lease, _ = console.allocate("a", CONSOLE_RESOURCE, 1, {"confirm": V("b", True)})
    before = CONSOLE.stat()
    with holding(CONSOLE) as child:
        console.wait_for_device(DEVICE_ID, State="in-use")
        CONSOLE.unlink()
        os.mknod(CONSOLE, before.st_mode, before.st_rdev)
        os.chown(CONSOLE, before.st_uid, before.st_gid)
        console.release("r", lease)
        console.wait_for_device(DEVICE_ID, State="faulty")
        (one,) = holders(console, names.device_path(DEVICE_ID))
        assert one["pid"] == child.pid
    console.wait_for_device(DEVICE_ID, State="idle")
