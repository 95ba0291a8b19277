"""The walk finds every way of holding a node, by number or inode and never by path."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from hetero_agent.core.model import Node
from hetero_agent.holders import proc, scan
from hetero_agent.holders.scanner import node_keys
from tests.holders.holding import (
    STRANGER,
    as_user,
    console,
    file_node,
    holding,
    loop_node,
    run_python,
)
from tests.support.process import PYTHON
from tests.support.wait import wait_until


def found(**targets: Node) -> dict[str, dict[int, bool]]:
    """Scan in this process; device -> pid -> whether only mapped."""
    answer = scan.scan({device: node_keys([node]) for device, node in targets.items()})
    result: dict[str, dict[int, bool]] = {device: {} for device in targets}
    for process in answer["processes"]:
        for device, mapped in process["devices"].items():
            result[device][process["pid"]] = mapped
    return result


def test_nobody_holds_a_new_file(tmp_path: Path) -> None:
    assert found(a=file_node(tmp_path / "a")) == {"a": {}}


@pytest.mark.parametrize(("way", "mapped"), [("open", False), ("map", True)])
def test_file_is_found_by_its_inode(tmp_path: Path, way: str, mapped: bool) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path, way) as child:
        assert found(a=node, b=file_node(tmp_path / "b")) == {"a": {child.pid: mapped}, "b": {}}
    assert found(a=node) == {"a": {}}


def test_open_console_is_found_by_its_number() -> None:
    with holding("/dev/tty50") as child:
        assert found(a=console(50), b=console(51)) == {"a": {child.pid: False}, "b": {}}


def test_mapped_block_device_is_found_with_every_descriptor_closed() -> None:
    with holding("/dev/loop5", "map") as child:
        assert found(a=loop_node(5), b=loop_node(6)) == {"a": {child.pid: True}, "b": {}}


def test_char_and_block_device_of_the_same_number_differ() -> None:
    with holding("/dev/loop5") as child:
        same = Node("/dev/other", loop_node().role, "char", 7, 5)
        assert found(block=loop_node(5), char=same) == {"block": {child.pid: False}, "char": {}}


@pytest.mark.parametrize("way", ["open", "map"])
def test_deleted_file_is_still_held(tmp_path: Path, way: str) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path, way) as child:
        os.unlink(node.path)
        assert found(a=node) == {"a": {child.pid: way == "map"}}


def test_renamed_and_linked_file_is_still_held(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    os.link(node.path, tmp_path / "link")
    with holding(tmp_path / "link") as child:
        os.rename(tmp_path / "link", tmp_path / "elsewhere")
        assert found(a=node) == {"a": {child.pid: False}}


@pytest.mark.parametrize("way", ["open", "map"])
def test_copy_of_a_node_is_found_by_its_number(tmp_path: Path, way: str) -> None:
    copy = tmp_path / "innocent"
    os.mknod(copy, stat.S_IFBLK | 0o600, os.makedev(7, 5))
    with holding(copy, way) as child:
        copy.unlink()
        assert found(a=loop_node(5)) == {"a": {child.pid: way == "map"}}


@pytest.mark.parametrize("way", ["open", "map"])
def test_node_bound_to_another_path_in_another_mount_namespace(tmp_path: Path, way: str) -> None:
    place = tmp_path / "innocent"
    place.touch()
    bind = ["unshare", "-m", "sh", "-c", f'mount --bind /dev/loop5 {place} && exec "$@"', "sh"]
    with holding(place, way, bind) as child:
        assert found(a=loop_node(5)) == {"a": {child.pid: way == "map"}}


def test_file_seen_from_another_root(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    inside = ["unshare", "-m", "sh", "-c", f'mount --bind {tmp_path} /mnt && exec "$@"', "sh"]
    with holding("/mnt/a", "map", inside) as child:
        assert found(a=node) == {"a": {child.pid: True}}


def test_forked_child_holds_on_after_its_parent(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path, "child") as parent:
        both = found(a=node)["a"]
        assert parent.pid in both
        assert len(both) == 2
        parent.kill()
        assert found(a=node)["a"].keys() == both.keys() - {parent.pid}
    wait_until(lambda: not found(a=node)["a"], what="the end of the child")


def test_process_of_another_uid(tmp_path: Path) -> None:
    with holding("/dev/null", "none"):
        pass
    place = Path(f"/tmp/hetero-agent-holders-{os.getpid()}")
    node = file_node(place)
    try:
        with holding(place, "open", as_user(STRANGER)) as child:
            (process,) = scan.scan({"a": node_keys([node])})["processes"]
            assert process["pid"] == child.pid
            assert process["uids"] == (STRANGER,) * 4
            assert process["start"] == child.start
    finally:
        place.unlink()


def test_descriptor_that_only_names_the_node_is_no_use(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path, "path"):
        assert found(a=node) == {"a": {}}


def test_thread_with_a_descriptor_table_of_its_own(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path, "thread") as child:
        assert os.listdir(f"/proc/{child.pid}/task") != [str(child.pid)]
        assert found(a=node) == {"a": {child.pid: False}}


@pytest.mark.parametrize(("way", "mapped"), [("leaderless", False), ("leaderless-map", True)])
def test_threads_that_outlive_the_main_thread(tmp_path: Path, way: str, mapped: bool) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path, way) as child:
        stat_file = Path(f"/proc/{child.pid}/stat")
        wait_until(lambda: stat_file.read_text().rpartition(")")[2].split()[0] == "Z", what="a zombie")
        assert found(a=node) == {"a": {child.pid: mapped}}


def test_one_node_of_two_devices(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path) as child:
        assert found(one=node, two=node) == {"one": {child.pid: False}, "two": {child.pid: False}}


def test_process_that_appears_during_the_walk_is_walked_too(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    late: list[subprocess.Popen[bytes]] = []

    def announce(pid: int) -> None:
        # the list of processes has been read by now
        if not late:
            with open(node.path, "rb") as file:
                late.append(subprocess.Popen(["sleep", "60"], stdin=file))

    try:
        answer = scan.scan({"a": node_keys([node])}, announce=announce)
        assert [process["pid"] for process in answer["processes"]] == [late[0].pid]
    finally:
        late[0].kill()
        late[0].wait()


def test_the_start_is_taken_before_the_first_look(tmp_path: Path) -> None:
    times: list[int] = []
    before = scan.boottime()
    answer = scan.scan({}, announce=lambda _: times.append(scan.boottime()))
    assert before <= answer["started"] <= times[0]
    assert answer["started"] + answer["took"] >= times[-1]
    assert answer["blind"] == ""
    assert answer["seen"] == len(times) - 1


def test_skipped_processes_are_left_alone(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    asked: list[int] = []
    with holding(node.path) as child:
        answer = scan.scan({"a": node_keys([node])}, {child.pid}, asked.append)
    assert answer["processes"] == []
    assert child.pid not in asked
    assert os.getpid() not in asked


def test_what_is_told_of_a_holder(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    # the name of a program is its file's: here one that looks like the fields after it
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/a) R (\x1b[1m\xff")
    os.symlink(PYTHON, odd)
    with holding(node.path, "open", python=odd):
        (process,) = scan.scan({"a": node_keys([node])})["processes"]
    assert process["comm"] == "a) R (\x1b[1m\\xff"
    assert process["exe"] == os.path.realpath("/usr/bin/python3")
    assert process["uids"] == (0, 0, 0, 0)
    assert process["session"] == os.getsid(0)
    assert process["ancestors"][0] == (os.getpid(), proc.start_of(os.getpid()))
    assert process["ancestors"][-1] == (1, proc.start_of(1))
    assert process["devices"] == {"a": False}


_WITHOUT = "-sys_admin,-checkpoint_restore"

_SCAN = """
import json
from hetero_agent.holders import scan
answer = scan.scan({targets!r})
print(json.dumps(answer))
"""


@pytest.mark.parametrize("device", ["file", "loop"])
def test_mappings_are_found_without_the_capability_for_map_files(tmp_path: Path, device: str) -> None:
    node = file_node(tmp_path / "with\nnewline") if device == "file" else loop_node(5)
    with holding(node.path, "map") as child:
        code = _SCAN.format(targets={"a": node_keys([node])})
        answer = json.loads(run_python(code, ["setpriv", "--bounding-set", _WITHOUT]))
    assert [(one["pid"], one["devices"]) for one in answer["processes"]] == [(child.pid, {"a": True})]


def test_mapping_that_cannot_be_told_makes_the_process_uninspected() -> None:
    copy = Path(f"/dev/hetero-agent-test-{os.getpid()}")
    os.mknod(copy, stat.S_IFBLK | 0o600, os.makedev(7, 5))
    try:
        with holding(copy, "map") as child:
            copy.unlink()
            code = _SCAN.format(targets={"a": node_keys([loop_node(5)])})
            answer = json.loads(run_python(code, ["setpriv", "--bounding-set", _WITHOUT]))
            assert [child.pid, 0] in answer["uninspected"]
            assert found(a=loop_node(5)) == {"a": {child.pid: True}}
    finally:
        copy.unlink(missing_ok=True)


def test_processes_that_cannot_be_read_are_listed_with_their_uid(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path) as child:
        code = _SCAN.format(targets={"a": node_keys([node])})
        answer = json.loads(run_python(code, as_user(STRANGER)))
    assert answer["processes"] == []
    assert [child.pid, 0] in answer["uninspected"]
    assert answer["blind"].startswith("the agent lacks CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE: ")


_NEEDED = "-all,+dac_read_search,+sys_ptrace"
_CAPABLE = [f"--inh-caps={_NEEDED}", f"--ambient-caps={_NEEDED}", f"--bounding-set={_NEEDED}"]


def test_the_capabilities_are_enough_for_another_user(tmp_path: Path) -> None:
    node = file_node(tmp_path / "a")
    with holding(node.path) as child:
        code = _SCAN.format(targets={"a": node_keys([node])})
        answer = json.loads(run_python(code, [*as_user(STRANGER), *_CAPABLE]))
    assert [(one["pid"], one["devices"]) for one in answer["processes"]] == [(child.pid, {"a": False})]
    assert answer["blind"] == ""


_BLIND = "from hetero_agent.holders import scan; print(scan.blindness())"


def test_a_pid_namespace_blinds() -> None:
    inside = run_python(_BLIND, ["unshare", "--pid", "--fork", "--mount-proc"])
    assert inside.startswith("the agent runs in a pid namespace: processes outside can't be seen; if no")
    assert scan.blindness() == ""


def test_a_pid_namespace_that_has_all_processes_does_not_blind() -> None:
    code = _BLIND.replace("()", "(contained=True)")
    assert run_python(code, ["unshare", "--pid", "--fork", "--mount-proc"]) == ""
    assert run_python(code, ["unshare", "--pid", "--fork"]) == (
        "/proc belongs to another pid namespace than the agent"
    )


def test_proc_of_another_namespace_blinds() -> None:
    shown = run_python(_BLIND, ["unshare", "--pid", "--fork"])
    assert shown == "/proc belongs to another pid namespace than the agent"


def test_hidepid_blinds_only_without_the_capability(tmp_path: Path) -> None:
    hidden = ["unshare", "-m", "sh", "-c", 'mount -t proc -o hidepid=invisible proc /proc; exec "$@"', "sh"]
    stranger = [*hidden, *as_user(STRANGER)]
    assert "CAP_SYS_PTRACE" in run_python(_BLIND, stranger)
    assert run_python(_BLIND, [*stranger, *_CAPABLE]) == ""
    with holding(file_node(tmp_path / "a").path) as child:
        listed = f"import os; print(os.path.exists('/proc/{child.pid}'))"
        assert run_python(listed, stranger) == "False"
        assert run_python(listed, [*stranger, *_CAPABLE]) == "True"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b"0::/system.slice/ssh.service\n", "/system.slice/ssh.service"),
        (b"1:name=systemd:/user.slice/a.scope\n0::/\n", "/user.slice/a.scope"),
        (b"9:name=systemd:/\n4:memory:/job\n0::/system.slice/b.service\n", "/system.slice/b.service"),
        (b"4:memory:/job\n1:name=systemd:/\n0::/\n", "/"),
        (b"4:memory:/job:with:colons\n", ""),
        (b"0::/a:b\xff\n", "/a:b\\xff"),
    ],
)
def test_cgroup_of_either_hierarchy(tmp_path: Path, text: bytes, path: str) -> None:
    (tmp_path / "cgroup").write_bytes(text)
    base = os.open(tmp_path, os.O_PATH)
    try:
        assert proc.cgroup(base) == path
    finally:
        os.close(base)


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice/ssh.service", "ssh.service"),
        ("/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service"),
        ("/user.slice/user-1000.slice/session-3.scope", "session-3.scope"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/ssh.service", "user@1000.service"),
        ("/system.slice/_cpu.service/x", "cpu.service"),
        ("/docker/3f9a", ""),
        ("/init.scope", "init.scope"),
        ("/machine.slice", ""),
        ("/", ""),
        ("", ""),
    ],
)
def test_the_unit_is_the_first_below_the_slices(path: str, unit: str) -> None:
    assert proc.unit_of(path) == unit
