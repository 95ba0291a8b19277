"""What only a kernel with control groups of version 2 confines: the unit's device policy and its network.

Both are programs of the kernel's that belong to the service's control group.  A process of root's, with
all capabilities and no filter of system calls, is put into that group: what it can't do there, nothing of
the service can.
"""

from __future__ import annotations

import json
import shlex
from typing import Final

import pytest

from hetero_agent import names
from tests.support.wait import wait_until
from tests.vm.machine import Machine
from tests.vm.qemu import ACCELERATOR, GPU_0

UNIT: Final = "hetero-agent.service"
_GROUP: Final = f"/sys/fs/cgroup/system.slice/{UNIT}/cgroup.procs"

# Of each attempt: "ok" or the name of its error.
_ATTEMPTS: Final = r"""
import ctypes, errno, json, os, socket, sys

if sys.argv[1]:
    with open(sys.argv[1], "w") as group:
        group.write(str(os.getpid()))
libc = ctypes.CDLL(None, use_errno=True)
found = {}


def attempt(name, work):
    try:
        work()
        found[name] = "ok"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]


def watch(path):
    if libc.inotify_add_watch(libc.inotify_init1(0), path.encode(), 0x20) < 0:  # IN_OPEN
        raise OSError(ctypes.get_errno(), "")


def node(path, kind, number):
    os.mknod(path, kind, os.makedev(*number))
    os.unlink(path)


def say(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.sendto(b"?", address)


for path in ("/dev/dri/renderD128", "/dev/uio0", "/dev/kmsg", "/dev/vda", "/dev/mem", "/dev/null"):
    for word, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
        attempt(f"{word} {path}", lambda: os.close(os.open(path, flags | os.O_NONBLOCK)))
    attempt(f"watch {path}", lambda: watch(path))
attempt("make a node", lambda: node("/run/lab-node", 0o20600, (226, 128)))
attempt("make a disk's node", lambda: node("/run/lab-node", 0o60600, (254, 0)))
attempt("speak to the local host", lambda: say(socket.AF_INET, ("127.0.0.1", 9)))
attempt("speak to the local host by IPv6", lambda: say(socket.AF_INET6, ("::1", 9)))
print(json.dumps(found))
"""


def attempts(vm: Machine, group: str) -> dict[str, str]:
    """What comes of each attempt by a process of root's in GROUP, "" for where it is."""
    found = json.loads(vm.run(f"python3 -c {shlex.quote(_ATTEMPTS)} '{group}'"))
    assert isinstance(found, dict)
    return found


def test_no_node_can_be_opened_for_writing_and_no_network_be_reached(vm: Machine) -> None:
    assert vm.read("/proc/self/cgroup").startswith("0::"), "version 2 and no other"
    vm.run("ip link set lo up")
    free, inside = attempts(vm, ""), attempts(vm, _GROUP)
    assert {name for name, result in free.items() if result != "ok"} == set()
    refused = {name: result for name, result in inside.items() if result != "ok"}
    # what everybody may have, systemd leaves to every unit (DevicePolicy=closed in systemd.resource-control(5))
    assert refused == {
        **{f"write {path}": "EPERM" for path in ("/dev/dri/renderD128", "/dev/uio0", "/dev/kmsg", "/dev/vda")},
        "write /dev/mem": "EPERM",
        "make a node": "EPERM",
        "make a disk's node": "EPERM",
        "speak to the local host": "EPERM",
        "speak to the local host by IPv6": "EPERM",
    }
    # the service is in no other group, and systemd knows of these limits
    main, group = vm.run(
        f"systemctl show --value --property=MainPID --property=ControlGroup {UNIT}"
    ).splitlines()[:2]
    assert main in vm.read(_GROUP).split()
    assert group == f"/system.slice/{UNIT}"


@pytest.mark.parametrize(("device", "node"), [(GPU_0, "/dev/dri/renderD128"), (ACCELERATOR, "/dev/uio0")])
def test_opens_of_nodes_that_only_root_may_open_are_seen_at_once(vm: Machine, device: str, node: str) -> None:
    """By the watch: no scan is due, and the watch asks for the right to read."""
    vm.configure("[reclaim]\nscan-interval = 3600\noccupied-after = 0.5\n")
    vm.run(f"chmod 600 {node} && chown root:root {node}")
    vm.run("systemctl restart hetero-agent")
    vm.wait_for_device(device, State="idle")
    pid = vm.hold(node, "stranger")
    vm.wait_for_device(device, 15, State="occupied")
    assert vm.holders(device) == [pid]
    assert [one[:2] for one in vm.signals("OrphanFound")] != []
    vm.run("systemctl stop stranger")
    vm.wait_for_device(device, 15, State="idle")


def test_a_lease_is_given_held_and_taken_back_in_the_sandbox(vm: Machine) -> None:
    """With no line of the kernel's or of systemd's that something was refused to the service."""
    lease, manifest = vm.allocate("r1", "lab.test/gpu", device=GPU_0, confirm="b true")
    assert manifest["devices"] == [GPU_0]
    vm.confirm("r2", lease, vm.hold("/dev/dri/renderD128", "owner"))
    assert vm.device(GPU_0)["Lease"] == lease
    vm.run("systemctl stop owner")
    vm.wait_for_device(GPU_0, State="idle")
    wait_until(lambda: vm.signals("LeaseEnded") == [[lease, "owner-gone"]], 10, "the end of the lease")
    log = vm.run(f"journalctl --no-pager --output=cat --unit={UNIT}")
    for word in ("Operation not permitted", "Permission denied"):
        assert word not in log, log
    assert vm.run("heteroctl doctor").endswith("nothing is wrong")
    assert vm.properties(names.ROOT, names.MANAGER)["Ready"] is True
