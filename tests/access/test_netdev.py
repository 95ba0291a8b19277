"""Network interfaces: into a workload's namespace and back, whatever it and the host do meanwhile.

Each test has a network namespace of its own for the host.  Its interfaces are virtual: one that sits
on hardware is moved in tests/vm.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_agent.access import links as module
from hetero_agent.access import movable, namespaces, netdev
from hetero_agent.access.grant import Grant, GrantedNode
from hetero_agent.access.links import Link
from hetero_agent.access.manifest import AccessError
from hetero_agent.access.namespaces import Process
from hetero_agent.access.netdev import Moved
from tests.support.network import Workload, in_own_network, ip, is_up, links
from tests.support.process import PYTHON, ROOT

LEASE = "0123456789abcdef" * 2
OTHER = "f" * 32


class Netdevs(netdev.Netdevs):
    """Those of a host on which leases may have anything moved, and device ``d`` has all interfaces."""

    def __init__(self, directory: Path, may: bool = True) -> None:
        super().__init__(directory, may, lambda *_: True)

    def move(self, lease: str, names: Sequence[str], process: Process | None) -> None:
        self.attach(Grant(lease, 1000, manifest(*names)), process)


def manifest(*names: str) -> dict[str, object]:
    return {"nodes": [["d", "/dev/null", "own", "char", 1, 3]], "netdevs": [["d", name] for name in names]}


def pair() -> None:
    """A pair of interfaces on the host, both up: ``hca0`` is what leases move."""
    ip("link add hca0 type veth peer name wire0")
    ip("link set hca0 up")
    ip("link set wire0 up")


def settled() -> dict[str, list[object]]:
    """The host's interfaces without what comes a little after the commands (links that are found up)."""
    kept = ("ifindex", "address", "mtu", "master")
    return {name: [is_up(name), *map(one.get, kept)] for name, one in links().items()}


def refusal(directory: Path, workload: Workload, name: str = "hca0") -> str:
    """Why an interface can't be moved; it is where and as it was, and nothing is left behind."""
    before = settled()
    with pytest.raises(AccessError) as caught:
        Netdevs(directory).move(LEASE, [name], workload.process)
    assert settled() == before
    assert_nothing_left(directory)
    return str(caught.value)


def assert_nothing_left(directory: Path) -> None:
    assert Netdevs(directory).leases() == []
    left = [path for path in directory.rglob("*") if not path.is_dir()]
    assert left == []
    assert str(directory) not in Path("/proc/thread-self/mountinfo").read_text()


# -- there and back -------------------------------------------------------------------------------
@in_own_network
def test_an_interface_goes_and_comes_back_as_it_was(tmp_path: Path) -> None:
    pair()
    before = links()["hca0"]
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        assert "hca0" not in links()
        assert is_up("hca0", workload.pid)
        assert LEASE in netdevs
        netdevs.move(LEASE, ["hca0"], workload.process)
        netdevs.detach(LEASE)
        assert links(workload.pid) == {}
    after = links()["hca0"]
    for key in ("ifindex", "address", "mtu"):
        assert after[key] == before[key], key
    assert is_up("hca0")
    assert_nothing_left(tmp_path)


@in_own_network
def test_into_a_container_of_a_user_and_back(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload(rootless=True) as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        assert is_up("hca0", workload.pid)
        ip("link set hca0 name mine0", workload.pid)
        workload.kill()
        netdevs.detach(LEASE)
    assert is_up("hca0")
    assert_nothing_left(tmp_path)


@in_own_network
def test_one_that_is_down_stays_down(tmp_path: Path) -> None:
    ip("link add hca0 type veth peer name wire0")
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        assert not is_up("hca0", workload.pid)
        ip("link set hca0 up", workload.pid)
        netdevs.detach(LEASE)
    assert not is_up("hca0")


@in_own_network
def test_all_of_a_lease_or_none(tmp_path: Path) -> None:
    ip("link add hca0 type veth peer name hca1")
    ip("address add 198.51.100.1/24 dev hca1")
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        with pytest.raises(
            AccessError, match=r"hca1 can't be moved: the host has the address 198\.51\.100\.1/24"
        ):
            netdevs.move(LEASE, ["hca0", "hca1"], workload.process)
        assert links().keys() == {"hca0", "hca1"}
        ip("address flush dev hca1")
        netdevs.move(LEASE, ["hca0", "hca1"], workload.process)
        assert links(workload.pid).keys() == {"hca0", "hca1"}
        netdevs.detach(LEASE)
    assert links().keys() == {"hca0", "hca1"}
    assert_nothing_left(tmp_path)


@in_own_network
def test_for_a_process_on_the_host_it_stays(tmp_path: Path) -> None:
    pair()
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        start = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19])
        Netdevs(tmp_path).move(LEASE, ["hca0"], namespaces.Process(sleeper.pid, start))
        sleeper.kill()
    assert is_up("hca0")
    assert_nothing_left(tmp_path)


@in_own_network
def test_a_lease_that_is_bound_anew_takes_it_along(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as first, Workload() as second:
        netdevs.move(LEASE, ["hca0"], first.process)
        netdevs.move(LEASE, ["hca0"], second.process)
        assert (links(first.pid).keys(), links(second.pid).keys()) == (set(), {"hca0"})
        netdevs.detach(LEASE)
    assert is_up("hca0")


@in_own_network
def test_what_no_lease_has_is_no_error(tmp_path: Path) -> None:
    netdevs = Netdevs(tmp_path)
    netdevs.detach(LEASE)
    assert LEASE not in netdevs
    assert netdevs.leases() == []


# -- whose it is -----------------------------------------------------------------------------------
@in_own_network
def test_a_process_that_has_ended_gets_nothing(tmp_path: Path) -> None:
    pair()
    with Workload() as workload:
        process = workload.process
        workload.kill()
        with pytest.raises(AccessError, match=f"process {process.pid} has ended"):
            Netdevs(tmp_path).move(LEASE, ["hca0"], process)
    assert_nothing_left(tmp_path)


@in_own_network
def test_a_later_process_of_the_same_pid_gets_nothing(tmp_path: Path) -> None:
    pair()
    with Workload() as workload:
        process = workload.process
        with pytest.raises(AccessError, match=f"process {process.pid} has ended"):
            Netdevs(tmp_path).move(LEASE, ["hca0"], process._replace(start=process.start - 1))
        assert links(workload.pid) == {}
    assert is_up("hca0")


# -- what the host needs ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        (["route add default dev hca0"], "the host's default route goes through it"),
        (["-6 route add default dev hca0"], "the host's default route goes through it"),
        (["route add default dev hca0 table 77"], "the host's default route goes through it"),
        (["route add 198.51.100.0/24 dev hca0"], "the host's route to 198.51.100.0/24 goes through it"),
        (
            ["address add 192.0.2.1/24 dev hca0"],
            "the host has the address 192.0.2.1/24 on it; take it away first",
        ),
        (["address add 2001:db8::1/64 dev hca0"], "the host has the address 2001:db8::1/64 on it"),
        (["link add bridge0 type bridge", "link set hca0 master bridge0"], "it is a member of bridge bridge0"),
        (["link add link hca0 name above0 type macvlan"], "macvlan above0 is on top of it"),
    ],
)
def test_what_the_host_needs_stays(tmp_path: Path, commands: list[str], reason: str) -> None:
    @in_own_network
    def test() -> None:
        pair()
        for command in commands:
            ip(command)
        with Workload() as workload:
            assert f"network interface hca0 can't be moved: {reason}" in refusal(tmp_path, workload)

    test()


@in_own_network
def test_a_default_route_over_several_ways_counts(tmp_path: Path) -> None:
    pair()
    ip("route add default nexthop dev hca0 nexthop dev wire0")
    with Workload() as workload:
        assert "the host's default route goes through it" in refusal(tmp_path, workload)


@in_own_network
def test_the_loopback_stays(tmp_path: Path) -> None:
    with Workload() as workload:
        assert "it is the loopback interface" in refusal(tmp_path, workload, "lo")


@in_own_network
def test_one_that_is_not_there(tmp_path: Path) -> None:
    with Workload() as workload:
        assert refusal(tmp_path, workload) == "there is no network interface hca0 on this host"


@in_own_network
def test_the_workload_has_one_of_that_name(tmp_path: Path) -> None:
    pair()
    with Workload() as workload:
        ip("link add hca0 type bridge", workload.pid)
        assert "the workload's network namespace has one of that name" in refusal(tmp_path, workload)


def test_rdma_devices_with_namespaces_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = tmp_path / "netns_mode"
    monkeypatch.setattr(movable, "_RDMA_SHARED", str(mode))
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/sys/class/net/hca0/device/infiniband")
    link = link_of()
    mode.write_text("Y\n")
    assert movable._bound_to_host(link) == ""
    mode.write_text("N\n")
    assert "rdma system set netns shared" in movable._bound_to_host(link)
    assert movable._bound_to_host(replace(link, name="eth0")) == ""


@in_own_network
def test_only_where_the_administrator_says_so(tmp_path: Path) -> None:
    pair()
    with Workload() as workload, pytest.raises(AccessError, match="move-netdevs in"):
        Netdevs(tmp_path, may=False).move(LEASE, ["hca0"], workload.process)
    assert is_up("hca0")
    # what was moved before it was forbidden comes back
    with Workload() as workload:
        Netdevs(tmp_path).move(LEASE, ["hca0"], workload.process)
        Netdevs(tmp_path, may=False).detach(LEASE)
    assert is_up("hca0")


@in_own_network
def test_a_grant_is_told_before_there_is_a_process(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    netdevs.move(LEASE, ["hca0"], None)
    assert_nothing_left(tmp_path)
    ip("address add 192.0.2.1/24 dev hca0")
    with pytest.raises(AccessError, match=r"the host has the address 192\.0\.2\.1/24 on it"):
        netdevs.move(LEASE, ["hca0"], None)
    with pytest.raises(AccessError, match="device d has no network interface that could be moved"):
        netdevs.move(LEASE, [], None)


@in_own_network
def test_what_is_none_of_the_devices_stays(tmp_path: Path) -> None:
    pair()
    own = netdev.Netdevs(tmp_path, True)
    with Workload() as workload, pytest.raises(AccessError, match="network interface hca0 is none of device d"):
        own.attach(Grant(LEASE, 1000, manifest("hca0")), workload.process)
    assert is_up("hca0")


def test_an_interface_belongs_to_a_device_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "/sys/class/net/eth1": "/sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/net/eth1",
        "/sys/class/net/lo": "/sys/devices/virtual/net/lo",
        "/sys/dev/char/231:192": "/sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/infiniband_verbs/uverbs0",
        "/sys/dev/char/231:193": "/sys/devices/pci0000:00/0000:00:01.0/0000:03:00.1/infiniband_verbs/uverbs1",
        "/sys/dev/char/1:3": "/sys/devices/virtual/mem/null",
    }
    monkeypatch.setattr(os.path, "realpath", lambda path: places.get(path, path))

    def node(minor: int, major: int = 231, role: str = "own") -> GrantedNode:
        return GrantedNode("d", "/dev/x", role, "char", major, minor)

    assert netdev.belongs("eth1", [node(193), node(192)])
    assert not netdev.belongs("eth1", [node(193), node(3, 1)])
    assert not netdev.belongs("eth1", [node(192, role="control")])
    assert not netdev.belongs("eth1", [])
    assert not netdev.belongs("eth2", [node(192)])
    assert not netdev.belongs("lo", [node(3, 1)])
    assert not netdev.belongs("../class/net/eth1", [node(192)])


# -- what workloads do ----------------------------------------------------------------------------------
@in_own_network
def test_a_killed_workload_that_changed_all_it_could(tmp_path: Path) -> None:
    pair()
    before = links()["hca0"]
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip("link set hca0 down", workload.pid)
        ip("link set hca0 name eth0", workload.pid)
        ip("link set eth0 address 02:00:00:00:00:01 mtu 1400 promisc on up", workload.pid)
        ip("address add 192.0.2.7/24 dev eth0", workload.pid)
        ip("link add link eth0 name above0 type macvlan", workload.pid)
        workload.kill()
        # of the namespace nothing is left but what keeps it for the lease
        assert links().keys() == {"wire0"}
        netdevs.detach(LEASE)
    after = links()
    assert after.keys() == {"hca0", "wire0"}
    for key in ("ifindex", "address", "mtu"):
        assert after["hca0"][key] == before[key], key
    assert is_up("hca0")
    assert after["hca0"]["promiscuity"] == 0
    assert "192.0.2.7" not in ip("address show dev hca0")
    assert_nothing_left(tmp_path)


@in_own_network
def test_other_names_that_the_workload_gave_it_are_gone(tmp_path: Path) -> None:
    """With the name of one of the host's it would not come back: names of both kinds are one space."""
    pair()
    ip("link property add dev hca0 altname enp1s0")
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip("link property add dev hca0 altname wire0", workload.pid)
        ip("link property add dev hca0 altname uplink", workload.pid)
        netdevs.detach(LEASE)
    assert links()["hca0"].get("altnames") == ["enp1s0"]
    assert_nothing_left(tmp_path)


@in_own_network
def test_another_name_that_somebody_on_the_host_has_now_stays_theirs(tmp_path: Path) -> None:
    pair()
    ip("link property add dev hca0 altname enp1s0 altname ens1")
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip("link property add dev wire0 altname enp1s0")
        netdevs.detach(LEASE)
    assert links()["hca0"].get("altnames") == ["ens1"]
    assert links()["wire0"].get("altnames") == ["enp1s0"]
    assert_nothing_left(tmp_path)


def filters(pid: int = 0) -> set[str]:
    """How XDP programs are attached to the interface ``hca0``."""
    return {
        one for one in ("xdp", "xdpgeneric", "xdpmulti") if f" {one} " in f" {ip('link show dev hca0', pid)} "
    }


def attach_filter(directory: Path, pid: int, flags: int) -> None:
    """Attach an XDP program, which lets all pass, to ``hca0`` of a process's network namespace."""
    program = directory / "filter.py"
    program.write_text(
        textwrap.dedent(
            """
            import ctypes, os, socket, struct, sys
            flags = int(sys.argv[1])
            # bpf(2): BPF_PROG_LOAD of BPF_PROG_TYPE_XDP, "r0 = XDP_PASS; exit"
            code = ctypes.create_string_buffer(struct.pack("<BBhiBBhi", 0xB7, 0, 0, 2, 0x95, 0, 0, 0))
            license = ctypes.create_string_buffer(b"GPL")
            what = struct.pack("<IIQQ", 6, 2, ctypes.addressof(code), ctypes.addressof(license))
            libc = ctypes.CDLL(None, use_errno=True)
            file = libc.syscall({"x86_64": 321}.get(os.uname().machine, 280), 5, what.ljust(128, b"\\0"), 128)
            assert file >= 0, os.strerror(ctypes.get_errno())
            nested = struct.pack("<HHi", 8, 1, file) + struct.pack("<HHI", 8, 3, flags)
            index = socket.if_nametoindex("hca0")
            body = struct.pack("<BxHiII", 0, 0, index, 0, 0) + struct.pack("<HH", 4 + len(nested), 43) + nested
            link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
            link.send(struct.pack("<IHHII", 16 + len(body), 19, 5, 1, 0) + body)
            assert struct.unpack_from("<i", link.recv(4096), 16) == (0,)
            """
        )
    )
    enter = ["nsenter", f"--net=/proc/{pid}/ns/net", PYTHON, "-I", str(program), str(flags)]
    subprocess.run(enter, check=True, timeout=30)
    program.unlink()


@in_own_network
@pytest.mark.parametrize(("flags", "shown"), [(1 << 1, "xdpgeneric"), (1 << 2, "xdp")])
def test_the_workloads_filter_is_gone(tmp_path: Path, flags: int, shown: str) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        attach_filter(tmp_path, workload.pid, flags)
        assert filters(workload.pid) == {shown}
        netdevs.detach(LEASE)
    assert filters() == set()
    assert_nothing_left(tmp_path)


@in_own_network
def test_what_the_workload_put_on_top_of_it_is_gone(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip("link add link hca0 name above0 type macvlan", workload.pid)
        netdevs.detach(LEASE)
        # it would hear and speak through the host's interface
        assert links(workload.pid) == {}


@in_own_network
def test_also_if_it_was_moved_elsewhere(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload, Workload() as inner:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip("link add link hca0 name above0 type macvlan", workload.pid)
        ip(f"link set above0 netns {inner.pid}", workload.pid)
        ip("link add alone0 type veth peer name alone1", inner.pid)
        assert links(inner.pid).keys() == {"above0", "alone0", "alone1"}
        netdevs.detach(LEASE)
        assert links(inner.pid).keys() == {"alone0", "alone1"}
    assert is_up("hca0")


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces have a permanent address, as hardware has: that which they were made with."""
    read = module._link

    def with_permanent(message: Any) -> Link:
        link = read(message)
        return replace(link, permanent=link.address)

    monkeypatch.setattr(module, "_link", with_permanent)


@pytest.mark.usefixtures("hardware")
@in_own_network
def test_hardware_that_was_moved_on_is_found(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload, Workload() as inner:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip(f"link set hca0 netns {inner.pid} name deep0", workload.pid)
        netdevs.detach(LEASE)
        assert links(inner.pid) == {}
    assert is_up("hca0")
    assert_nothing_left(tmp_path)


@in_own_network
def test_a_virtual_one_is_not_looked_for_among_those_of_others(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload, Workload() as inner:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip(f"link set hca0 netns {inner.pid}", workload.pid)
        netdevs.detach(LEASE)
        assert links(inner.pid).keys() == {"hca0"}
    assert_nothing_left(tmp_path)


@in_own_network
def test_a_virtual_one_that_was_deleted_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip("link delete hca0", workload.pid)
        netdevs.detach(LEASE)
    assert "network interface hca0 is gone" in caplog.text
    assert_nothing_left(tmp_path)


@in_own_network
def test_what_a_lost_device_had_is_its_next_owners(tmp_path: Path) -> None:
    """A device of two is unplugged and comes back, with a new interface of the same identity."""
    ip("link add hca0 type veth peer name wire0")
    ip("link add hca1 type veth peer name wire1")
    netdevs = Netdevs(tmp_path)
    nodes = [[device, "/dev/null", "own", "char", 1, 3] for device in ("d", "e")]
    rows = [["d", "hca0"], ["e", "hca1"]]
    both = Grant(LEASE, 1000, {"nodes": nodes, "netdevs": rows})
    left = Grant(LEASE, 1000, {"nodes": nodes[:1], "netdevs": rows[:1]})
    with Workload() as workload, Workload() as other:
        netdevs.attach(both, workload.process)
        netdevs.retain(both)
        assert links(workload.pid).keys() == {"hca0", "hca1"}
        move_home(workload, "hca1", "hca1")
        netdevs.retain(left)
        # from now on it is another's
        netdevs.move(OTHER, ["hca1"], other.process)
        netdevs.detach(LEASE)
        assert links(other.pid).keys() == {"hca1"}
        netdevs.detach(OTHER)
    assert links().keys() == {"hca0", "hca1", "wire0", "wire1"}
    assert_nothing_left(tmp_path)


@in_own_network
def test_a_lease_that_lost_all_has_nothing_elsewhere(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        netdevs.retain(Grant(LEASE, 1000, {"nodes": [], "netdevs": []}))
        assert is_up("hca0")
        assert_nothing_left(tmp_path)
        netdevs.retain(Grant(LEASE, 1000, {"nodes": [], "netdevs": []}))


def pairs() -> None:
    """Two pairs of interfaces on the host, up: ``hca0`` and ``hca1`` are what a lease moves."""
    for number in (0, 1):
        ip(f"link add hca{number} type veth peer name wire{number}")
        ip(f"link set hca{number} up")


@in_own_network
def test_what_is_in_the_way_of_one_is_not_in_the_way_of_the_others(tmp_path: Path) -> None:
    pairs()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0", "hca1"], workload.process)
        ip("link add hca0 type bridge")
        with pytest.raises(AccessError, match=r"hca0 is back as ha.*: another interface has its name now"):
            netdevs.detach(LEASE)
        # the workload's is none of them any more
        assert links(workload.pid) == {}
        assert is_up("hca1")
        ip("link delete hca0")
        netdevs.detach(LEASE)
    assert is_up("hca0")
    assert_nothing_left(tmp_path)


@in_own_network
def test_an_error_at_one_is_told_after_the_others_were_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0", "hca1"], workload.process)
        bring = netdev._bring_home

        def fail_once(one: Moved, here: int, target: int | None) -> None:
            if one.name == "hca0":
                raise OSError(errno.EBUSY, "busy")
            bring(one, here, target)

        with monkeypatch.context() as patch:
            patch.setattr(netdev, "_bring_home", fail_once)
            with pytest.raises(AccessError, match="network interfaces: busy"):
                netdevs.detach(LEASE)
        assert links(workload.pid).keys() == {"hca0"}
        netdevs.detach(LEASE)
    assert {name for name in links() if is_up(name)} >= {"hca0", "hca1"}
    assert_nothing_left(tmp_path)


# -- what the host does meanwhile -------------------------------------------------------------------------
@in_own_network
def test_somebody_has_its_name(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip("link add hca0 type bridge")
        for _ in range(2):
            with pytest.raises(AccessError, match=r"hca0 is back as ha.*: another interface has its name now"):
                netdevs.detach(LEASE)
            # but no longer in the hands of the workload
            assert links(workload.pid) == {}
        ip("link set hca0 name usurper0")
        netdevs.detach(LEASE)
    assert links().keys() == {"hca0", "usurper0", "wire0"}
    assert links()["hca0"]["linkinfo"]["info_kind"] == "veth"
    assert_nothing_left(tmp_path)


@in_own_network
def test_back_by_the_kernel_under_another_name(tmp_path: Path) -> None:
    """What falls back to the host because its namespace died is called dev and its number there."""
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        ip("link set hca0 down", workload.pid)
        move_home(workload, "dev7")
        netdevs.detach(LEASE)
    assert links().keys() == {"hca0", "wire0"}
    assert is_up("hca0")


def move_home(workload: Workload, name: str, which: str = "hca0") -> None:
    with subprocess.Popen(["sleep", "600"]) as here:
        ip(f"link set {which} netns {here.pid} name {name}", workload.pid)
        here.kill()
    assert name in links()


@pytest.mark.usefixtures("hardware")
@in_own_network
def test_the_name_of_the_namespace_was_unmounted(tmp_path: Path) -> None:
    pair()
    netdevs = Netdevs(tmp_path)
    with Workload() as workload:
        netdevs.move(LEASE, ["hca0"], workload.process)
        subprocess.run(["umount", tmp_path / "netns" / LEASE], check=True)
        netdevs.detach(LEASE)
    assert is_up("hca0")
    assert_nothing_left(tmp_path)


@in_own_network
@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 2}', '{"version": 1, "namespace": [1, 2], "moved": [{}]}']
)
def test_a_damaged_record_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "netdev").mkdir()
    (tmp_path / "netdev" / LEASE).write_text(text)
    with pytest.raises(AccessError, match=f"the record of lease {LEASE}'s network interfaces"):
        Netdevs(tmp_path).detach(LEASE)


# -- crashes ---------------------------------------------------------------------------------------------
#: Dies at the Nth step that changes anything: a record, a mount, an interface.
_DYING = """
import os, signal, sys
from pathlib import Path
from hetero_agent.access import movable, namespaces, netdev
from hetero_agent.access.grant import Grant
from hetero_agent.access.grant import Grant
from pyroute2 import IPRoute

left = int(sys.argv[1])

def counted(work):
    def run(*arguments, **named):
        global left
        if arguments[1:2] == ("dump",):
            return work(*arguments, **named)
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*arguments, **named)
    return run

IPRoute.link = counted(IPRoute.link)
namespaces.keep = counted(namespaces.keep)
namespaces.let_go = counted(namespaces.let_go)
Path.replace = counted(Path.replace)
Path.unlink = counted(Path.unlink)
netdevs = netdev.Netdevs(Path(sys.argv[2]), True, lambda *_: True)
if sys.argv[3] == "attach":
    manifest = {"nodes": [["d", "/dev/null", "own", "char", 1, 3]], "netdevs": [["d", "hca0"]]}
    process = namespaces.Process(int(sys.argv[5]), int(sys.argv[6]))
    netdevs.attach(Grant(sys.argv[4], 1000, manifest), process)
else:
    netdevs.detach(sys.argv[4])
"""


def dies(steps: int, directory: Path, what: str, workload: Workload) -> bool:
    """Have a process do WHAT and die after STEPS; false if it was done before that."""
    command = [PYTHON, "-c", _DYING, str(steps), str(directory), what, LEASE, *map(str, workload.process)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


@pytest.mark.parametrize("what", ["attach", "detach"])
@pytest.mark.parametrize("workload_dies", [False, True])
def test_killed_at_any_step_it_heals(tmp_path: Path, what: str, workload_dies: bool) -> None:
    died: list[bool] = []

    @in_own_network
    def after(steps: int, directory: Path) -> None:
        pair()
        with Workload() as workload:
            if what == "detach":
                Netdevs(directory).move(LEASE, ["hca0"], workload.process)
            died.append(dies(steps, directory, what, workload))
            if workload_dies:
                workload.kill()
            if died[-1] or what == "attach":
                Netdevs(directory).detach(LEASE)
            assert is_up("hca0"), steps
            assert links().keys() == {"hca0", "wire0"}, steps
            assert_nothing_left(directory)

    while not died or died[-1]:
        directory = tmp_path / str(len(died))
        directory.mkdir()
        after(len(died), directory)
    assert len(died) > 6


# -- identity --------------------------------------------------------------------------------------------
def link_of(name: str = "hca0", **more: object) -> Link:
    plain = Link(3, name, 0, "02:00:00:00:00:02", 1500, "", "", "", 0, -1, 0, ())
    return replace(plain, **more)  # type: ignore[arg-type]


def moved_of(link: Link) -> Moved:
    return netdev._moved(LEASE, "d", link)


@pytest.mark.parametrize(
    ("was", "is_now", "same"),
    [
        ({"parent": "pci/0000:03:00.0"}, {"parent": "pci/0000:03:00.0", "index": 9}, True),
        ({"parent": "pci/0000:03:00.0"}, {"parent": "pci/0000:04:00.0"}, False),
        ({"parent": "pci/0000:03:00.0"}, {}, False),
        ({}, {"parent": "pci/0000:03:00.0"}, False),
        # two ports of one function
        ({"parent": "pci/0:1", "permanent": "aa"}, {"parent": "pci/0:1", "permanent": "ab"}, False),
        ({"parent": "pci/0:1", "permanent": "aa"}, {"parent": "pci/0:1", "permanent": "aa", "name": "x"}, True),
        ({"permanent": "aa"}, {"permanent": "aa", "index": 9, "name": "x"}, True),
        ({"permanent": "aa"}, {"permanent": "ab"}, False),
        # a workload makes up addresses as it likes; a permanent one it can't
        ({"address": "aa"}, {"address": "ab"}, True),
        ({"kind": "veth"}, {"kind": "bridge"}, False),
        ({}, {"index": 9}, False),
        ({}, {"index": 9, "name": "ha0123456700003"}, True),
    ],
)
def test_what_tells_one_from_another(was: dict[str, object], is_now: dict[str, object], same: bool) -> None:
    assert moved_of(link_of(**was)).is_it(link_of(**is_now)) is same


def test_the_name_on_the_way_is_a_name() -> None:
    moved = moved_of(link_of(index=2**31 - 1))
    assert len(moved.on_the_way) == 15


def test_hardware_that_is_nowhere_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[str] = []

    def lexists(path: str) -> bool:
        there.append(path)
        return True

    monkeypatch.setattr(os.path, "lexists", lexists)

    @in_own_network
    def test() -> None:
        netdevs = Netdevs(tmp_path)
        moved = moved_of(link_of(parent="pci/0000:03:00.0"))
        netdevs._write(LEASE, netdev._Record(namespaces.Identity(1, 2), (moved,)))
        with pytest.raises(AccessError, match="none of the network namespaces that can be looked into"):
            netdevs.detach(LEASE)
        assert LEASE in netdevs
        monkeypatch.setattr(os.path, "lexists", lambda _: False)
        netdevs.detach(LEASE)
        assert_nothing_left(tmp_path)

    test()
    assert there == ["/sys/bus/pci/devices/0000:03:00.0/driver"]


# -- cost -------------------------------------------------------------------------------------------------
def test_netlink_costs_nobody_who_moves_nothing() -> None:
    script = """
        import sys
        import hetero_agent.access.choice, hetero_agent.access.hands, hetero_agent.daemon
        from hetero_agent.access.netdev import Netdevs
        from pathlib import Path
        netdevs = Netdevs(Path("/nowhere"), True)
        assert "0" * 32 not in netdevs and netdevs.leases() == []
        netdevs.detach("0" * 32)
        assert "pyroute2" not in sys.modules
    """
    subprocess.run([PYTHON, "-c", textwrap.dedent(script)], cwd=ROOT, check=True)
