"""The door: every node checked against the kernel at the moment of the grant, and the manifest."""

from __future__ import annotations

import asyncio
import grp
import os
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hetero_agent.access import door as module
from hetero_agent.access.door import Doer, Door
from hetero_agent.access.grant import Grant
from hetero_agent.access.manifest import AccessError, environment, filtered
from hetero_agent.core.model import (
    DeviceRecord,
    Instant,
    Joining,
    Lease,
    LeaseState,
    Netdev,
    Node,
    RequestKey,
    Role,
)
from tests.support.timing import within

LEASE_ID = "0123456789abcdef" * 2


def lease(*devices: str, **more: Any) -> Lease:
    whole = Lease(
        id=LEASE_ID,
        key=RequestKey(1000, "", "Allocate", "r"),
        resource="example.com/npu",
        devices=devices,
        uid=1000,
        client="",
        label="",
        state=LeaseState.PENDING,
        created=Instant(5_000_000, 1_700_000_000_000_000),
        deadline=35_000_000,
    )
    return replace(whole, **more)


def file_node(path: Path, role: Role = Role.OWN) -> Node:
    found = path.stat()
    return Node(str(path), role, "file", fsdev=found.st_dev, inode=found.st_ino)


def device_node(path: str, role: Role = Role.OWN) -> Node:
    found = os.stat(path)
    kind = "block" if stat.S_ISBLK(found.st_mode) else "char"
    return Node(path, role, kind, os.major(found.st_rdev), os.minor(found.st_rdev))


def prepare(what: Lease, *records: DeviceRecord, door: Door | None = None) -> dict[str, Any]:
    return asyncio.run((door or Door()).prepare(what, records))


def failure(what: Lease, *records: DeviceRecord) -> str:
    with pytest.raises(AccessError) as caught:
        prepare(what, *records)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def record(name: str, nodes: Sequence[Node] = (), **more: Any) -> DeviceRecord:
    return DeviceRecord(name, "example.com/npu", nodes=tuple(nodes), **more)


def test_interfaces_that_several_slots_share_stay(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    slot = record("a", [file_node(tmp_path / "a")], attributes={"slot": 1, "net": "eth7"})
    assert "a shares its network interfaces with the other slots" in failure(
        lease("a", netdev=Netdev.MOVE), slot
    )


def test_who_can_not_move_interfaces_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    one = record("a", [file_node(tmp_path / "a")], attributes={"net": "eth7"})
    assert "the agent is not root and has no helper" in failure(lease("a", netdev=Netdev.MOVE), one)


def test_the_whole_manifest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o660)
        os.chown(tmp_path / name, -1, 7777)
    records = [
        record(
            name,
            [file_node(tmp_path / name), device_node("/dev/loop-control", Role.CONTROL)],
            env={"NPU_VISIBLE": str(index), "NPU_ORDER": "PCI"},
            mounts=((str(tmp_path), "/opt/npu", "ro"),),
            groups=("games",),
            limits={"memlock": 2 ** (19 + index)},
            attributes={"net": "eth7,eth8"} if name == "b" else {"net": "../eth9"},
        )
        for index, name in enumerate(("a", "b"))
    ]
    got = prepare(lease("b", "a"), *records)
    minor = os.minor(os.stat("/dev/loop-control").st_rdev)
    control = os.stat("/dev/loop-control")
    groups = {grp.getgrnam("games").gr_gid, 7777}
    if control.st_mode & 0o060 == 0o060 and control.st_gid:
        groups.add(control.st_gid)
    assert got == {
        "version": 1,
        "lease": LEASE_ID,
        "resource": "example.com/npu",
        "devices": ["b", "a"],
        "nodes": [
            ["b", str(tmp_path / "b"), "own", "file", 0, 0],
            ["b", "/dev/loop-control", "control", "char", 10, minor],
            ["a", str(tmp_path / "a"), "own", "file", 0, 0],
            ["a", "/dev/loop-control", "control", "char", 10, minor],
        ],
        "mounts": [[str(tmp_path), "/opt/npu", "ro"]],
        "env": {
            "HETERO_LEASE_ID": LEASE_ID,
            "HETERO_DEVICES": "b,a",
            "HETERO_DEVICE_COUNT": "2",
            "NPU_VISIBLE": "1,0",
            "NPU_ORDER": "PCI",
        },
        "env-filtered": {},
        "groups": sorted(groups),
        "limits": {"memlock": 2**20},
        "netdevs": [["b", "eth7"], ["b", "eth8"]],
        "confirm-by": 1_700_000_030_000_000,
        "confirm-by-boottime": 35_000_000,
    }
    # the same again, whatever order the records come in and whenever it is asked
    assert prepare(lease("b", "a"), *reversed(records)) == got


def test_a_confirmed_lease_has_nothing_to_confirm_by() -> None:
    got = prepare(lease("a", confirmed=True, state=LeaseState.ACTIVE), record("a"))
    assert (got["confirm-by"], got["confirm-by-boottime"]) == (0, 0)


def test_ours_win_over_a_profiles_variables() -> None:
    env = environment(
        LEASE_ID, [record("a", env={"HETERO_LEASE_ID": "x", "A": "1"}), record("b", env={"B": "2"})]
    )
    assert env["HETERO_LEASE_ID"] == LEASE_ID
    assert (env["A"], env["B"]) == ("1", "2")


def test_a_node_swapped_between_discovery_and_grant(tmp_path: Path) -> None:
    path = tmp_path / "npu0"
    path.touch()
    seen = record("a", [file_node(path)])
    assert prepare(lease("a"), seen)["devices"] == ["a"]
    inode = path.stat().st_ino
    (tmp_path / "other").touch()
    (tmp_path / "other").rename(path)
    text = failure(lease("a"), seen)
    assert f"node {path}: expected file " in text
    assert f"inode {inode}, found file" in text
    assert text.endswith(f"inode {path.stat().st_ino}")
    path.unlink()
    assert "found nothing: No such file or directory" in failure(lease("a"), seen)
    path.symlink_to("/dev/null")
    assert "found something of mode lrwxrwxrwx" in failure(lease("a"), seen)
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    assert "found char node 1:3" in failure(lease("a"), seen)


def test_a_character_node_that_got_another_number(tmp_path: Path) -> None:
    path = tmp_path / "renderD128"
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(240, 128))
    seen = record("a", [device_node(str(path))])
    assert prepare(lease("a"), seen)["nodes"] == [["a", str(path), "own", "char", 240, 128]]
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(240, 129))
    assert failure(lease("a"), seen) == f"node {path}: expected char node 240:128, found char node 240:129"
    path.unlink()
    os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(240, 128))
    assert failure(lease("a"), seen) == f"node {path}: expected char node 240:128, found block node 240:128"


def test_a_kernel_device_must_have_its_driver_behind_the_number(tmp_path: Path) -> None:
    for path in ("/dev/loop-control", "/dev/loop0"):
        assert prepare(lease("a"), record("a", [device_node(path)], path="/sys/devices/x"))["devices"] == ["a"]
    stale = tmp_path / "stale"
    os.mknod(stale, stat.S_IFCHR | 0o600, os.makedev(10, 511))
    text = failure(lease("a"), record("a", [device_node(str(stale))], path="/sys/devices/x"))
    assert text == (
        f"node {stale}: expected char node 10:511 with a driver behind it, found none in /sys/dev/char"
        " and /proc/devices"
    )
    # a device of a provider has no place in sysfs to compare with
    assert prepare(lease("a"), record("a", [device_node(str(stale))]))["devices"] == ["a"]


def test_a_driver_that_shows_no_devices_in_sysfs_is_known_by_its_major(tmp_path: Path) -> None:
    shown = {entry.partition(":")[0] for entry in os.listdir("/sys/dev/char")}
    listed = [
        line.split()[0] for line in Path("/proc/devices").read_text().partition("Block")[0].splitlines() if line
    ]
    major = next(one for one in listed if one.isdigit() and one not in shown)
    unused = next(one for one in range(300, 511) if str(one) not in listed)
    path = tmp_path / "npu"
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(int(major), 3))
    assert prepare(lease("a"), record("a", [device_node(str(path))], path="/x"))["devices"] == ["a"]
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(unused, 3))
    assert "found none in /sys/dev/char" in failure(
        lease("a"), record("a", [device_node(str(path))], path="/x")
    )


def test_a_required_mount_must_exist(tmp_path: Path) -> None:
    missing = tmp_path / "lib.so"
    asked = record("a", mounts=((str(missing), "/lib.so", "ro"),))
    text = failure(lease("a"), asked)
    assert text == f"mount {missing}: a needs it, and there is no such file or directory here"
    missing.touch()
    assert prepare(lease("a"), asked)["mounts"] == [[str(missing), "/lib.so", "ro"]]


def test_optional_mounts_are_left_out_and_patterns_are_each_path(tmp_path: Path) -> None:
    for name in ("libnpu.so.2", "libnpu.so.10", "libother.so"):
        (tmp_path / name).touch()
    asked = record(
        "a",
        mounts=((f"{tmp_path}/libnpu.so.*", "", "ro"),),
        optional_mounts=(
            (f"{tmp_path}/firmware", "/lib/firmware/npu", "ro"),
            (f"{tmp_path}/libother.so", "/usr/lib/libother.so", "ro,nosuid"),
            (f"{tmp_path}/{{driver-version}}", "/x", "ro"),
            (f"{tmp_path}/none*", "", "ro"),
        ),
    )
    assert prepare(lease("a", "b"), asked, replace(asked, id="b"))["mounts"] == [
        [f"{tmp_path}/libnpu.so.10", f"{tmp_path}/libnpu.so.10", "ro"],
        [f"{tmp_path}/libnpu.so.2", f"{tmp_path}/libnpu.so.2", "ro"],
        [f"{tmp_path}/libother.so", "/usr/lib/libother.so", "ro,nosuid"],
    ]
    for name in ("libnpu.so.2", "libnpu.so.10"):
        (tmp_path / name).unlink()
    assert failure(lease("a"), asked).startswith(f"mount {tmp_path}/libnpu.so.*: a needs it")


def test_numbers_of_the_driver_go_up_and_are_counted_from_zero_where_a_filter_hides_the_rest() -> None:
    joining = {"NPU": Joining(renumbered=True), "HCA": Joining(prefix="="), "SEL": Joining("l:", True)}
    records = [
        record(name, env={"NPU": npu, "HCA": f"mlx_{name}:1", "SEL": npu, "ORDER": "PCI"}, joining=joining)
        for name, npu in (("x", "10"), ("y", "9"), ("z", "9"))
    ]
    env = environment(LEASE_ID, records)
    assert {name: env[name] for name in ("NPU", "HCA", "SEL", "ORDER", "HETERO_DEVICES")} == {
        "NPU": "9,10",
        "HCA": "=mlx_x:1,mlx_y:1,mlx_z:1",
        "SEL": "l:9,10",
        "ORDER": "PCI",
        "HETERO_DEVICES": "x,y,z",
    }
    # two of the three are shares of one card
    assert filtered(records) == {"NPU": "0,1", "SEL": "l:0,1"}
    # a uuid means the same everywhere
    assert filtered([record("a", env={"NPU": "MIG-1"}, joining=joining)]) == {}


def test_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "n"
    path.touch()
    os.chown(path, -1, 4242)
    door = Door()
    for mode, wanted in ((0o660, [4242]), (0o666, []), (0o640, []), (0o600, [])):
        path.chmod(mode)
        assert prepare(lease("a"), record("a", [file_node(path)]), door=door)["groups"] == wanted
    named = record("a", groups=("games", "no-such-group-here"))
    gid = grp.getgrnam("games").gr_gid
    for _ in range(2):
        assert prepare(lease("a"), named, door=door)["groups"] == [gid]
    said = [line for line in caplog.messages if "no-such-group-here" in line]
    assert len(said) == 1
    door.reload()
    assert prepare(lease("a"), named, door=door)["groups"] == [gid]
    assert len([line for line in caplog.messages if "no-such-group-here" in line]) == 2


def test_a_device_without_a_record() -> None:
    assert failure(lease("a", "b"), record("a")) == "device b has no record any more"


def test_what_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is held by a FIFO that nobody writes, in place of a dead file server."""
    os.mkfifo(tmp_path / "fifo")

    def dead(mount: tuple[str, str, str]) -> list[tuple[str, str, str]]:
        Path(mount[0]).read_bytes()
        return [mount]

    monkeypatch.setattr(module, "_existing", dead)
    monkeypatch.setattr(module, "DEADLINE", 0.2)
    beginning = time.monotonic()
    text = failure(lease("a"), record("a", mounts=((str(tmp_path / "fifo"), "/x", "ro"),)))
    assert text == "looking at the nodes and mounts of the lease takes more than 0.2 s; something there hangs"
    assert time.monotonic() - beginning < 20
    with open(tmp_path / "fifo", "w"):
        pass


def test_what_is_being_prepared_is_revoked_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be made after it was undone, when the device may be the next one's."""
    (tmp_path / "a").touch()
    done: list[str] = []
    looking, go_on = threading.Event(), threading.Event()

    class Noted:
        """Who would do it notes what."""

        problem = ""

        async def prepare(self, _: Grant) -> None:
            done.append("prepare")

        async def revoke(self, _: str) -> None:
            done.append("revoke")

    def slow(name: str) -> grp.struct_group:
        looking.set()
        assert go_on.wait(30)
        raise KeyError(name)

    async def test() -> None:
        monkeypatch.setattr(grp, "getgrnam", slow)
        door = Door(cast("Doer", Noted()))
        one = record("a", [file_node(tmp_path / "a")], groups=("elsewhere",))
        making = asyncio.create_task(door.prepare(lease("a"), [one]))
        await asyncio.to_thread(looking.wait, 30)
        # tried in vain for a while, and again
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(door.revoke(LEASE_ID), 0.05)
        undoing = asyncio.create_task(door.revoke(LEASE_ID))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(making, undoing)
        assert door._turns == {}

    asyncio.run(test())
    assert done == ["prepare", "revoke"]


def test_what_is_being_renewed_is_revoked_after_it() -> None:
    done: list[str] = []

    class Slow:
        """Who would do it takes two steps."""

        problem = ""

        async def renew(self, _: Grant) -> None:
            await asyncio.sleep(0.05)
            done.append("renew")

        async def revoke(self, _: str) -> None:
            done.append("revoke")

    async def test() -> None:
        door = Door(cast("Doer", Slow()))
        renewing = asyncio.create_task(door.renew(lease("a")))
        await asyncio.sleep(0)
        await asyncio.gather(renewing, door.revoke(LEASE_ID))

    asyncio.run(test())
    assert done == ["renew", "revoke"]


def test_revoke_as_often_as_called() -> None:
    async def body() -> None:
        door = Door()
        await door.revoke(LEASE_ID)
        await door.prepare(lease("a"), [record("a")])
        await door.revoke(LEASE_ID)
        await door.revoke(LEASE_ID)

    asyncio.run(body())


def count_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    started: list[str] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread.name)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return started


def test_nodes_that_can_not_hang_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Path(f"/dev/shm/hetero-agent-test-{os.getpid()}")
    shm.touch()
    try:
        nodes = [device_node("/dev/loop-control"), file_node(shm)]
        records = [record(f"d{number}", nodes, path="/sys/devices/x") for number in range(64)]
        started = count_threads(monkeypatch)

        def attempt() -> float:
            before = time.monotonic()
            prepare(lease(*(one.id for one in records)), *records)
            return time.monotonic() - before

        within(0.2, attempt)
        assert started == []
    finally:
        shm.unlink()


def test_files_of_a_file_server_are_looked_at_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setattr(module, "_filesystem", lambda _: "nfs4")
    started = count_threads(monkeypatch)
    assert prepare(lease("a"), record("a", [file_node(tmp_path / "a")]))["devices"] == ["a"]
    assert started == ["access: the nodes and mounts of the lease"]


def test_the_type_of_a_filesystem() -> None:
    assert module._filesystem(os.stat("/dev/shm").st_dev) == "tmpfs"
    assert module._filesystem(os.stat("/proc").st_dev) == "proc"
    assert module._filesystem(os.makedev(4095, 4095)) == ""


def test_the_kernels_devices_that_can_not_be_given_are_looked_at_again(tmp_path: Path) -> None:
    seen: list[str] = []
    (tmp_path / "a").touch()
    card, part, other = (
        record(name, [Node(str(tmp_path / name), Role.OWN, "file", fsdev=1, inode=2)], path=path)
        for name, path in (("a", "/sys/devices/x/1"), ("b", "/sys/devices/x/1"), ("c", ""))
    )
    with pytest.raises(AccessError, match="expected file"):
        prepare(lease("a", "b", "c"), card, part, other, door=Door(look=seen.append))
    assert seen == ["/sys/devices/x/1"]
    good = record("a", [file_node(tmp_path / "a")], path="/sys/devices/x/1")
    prepare(lease("a"), good, door=Door(look=seen.append))
    assert len(seen) == 1
