"""ACL entries on nodes: what is given, to whom, and that all is as before once it is taken."""

from __future__ import annotations

import gc
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import posix1e
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_agent.access import acl
from hetero_agent.access.grant import GrantedNode
from hetero_agent.access.manifest import AccessError
from tests.support.console import CONSOLE

UID, OTHER_UID, GROUP = 1000, 1001, 7777

_OPENS = """
import os, sys
os.close(os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY))
"""


def opens(path: Path, uid: int, *groups: int) -> bool:
    """Whether a process of UID and GROUPS, with no capability, can open PATH for reading and writing."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _OPENS, str(path)],
        user=uid,
        group=60000,
        extra_groups=groups,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0 or "PermissionError" in done.stderr, done.stderr
    return done.returncode == 0


def row(path: Path, kind: str = "") -> GrantedNode:
    found = path.stat()
    number = (os.major(found.st_rdev), os.minor(found.st_rdev))
    if not kind:
        kind = "char" if stat.S_ISCHR(found.st_mode) else "block" if stat.S_ISBLK(found.st_mode) else "file"
    return GrantedNode("npu-0", str(path), "own", kind, *(number if kind != "file" else (0, 0)))


def text(path: Path) -> list[str]:
    shown = posix1e.ACL(file=str(path)).to_any_text(
        "", b",", posix1e.TEXT_NUMERIC_IDS | posix1e.TEXT_ABBREVIATE
    )
    return str(shown.decode()).split(",")


def extended(path: Path) -> bool:
    return "system.posix_acl_access" in os.listxattr(path, follow_symlinks=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=["console", "file"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real character node, and a file."""
    if request.param == "file":
        # where other uids can get at it
        for above in (tmp_path, *tmp_path.parents[:2]):
            above.chmod(0o755)
        path = tmp_path / "npu0"
        path.touch()
        yield path
        return
    before = CONSOLE.stat()
    assert not extended(CONSOLE)
    yield CONSOLE
    os.removexattr(CONSOLE, "system.posix_acl_access") if extended(CONSOLE) else None
    os.chown(CONSOLE, before.st_uid, before.st_gid)
    CONSOLE.chmod(stat.S_IMODE(before.st_mode))


@pytest.mark.parametrize("bits", [0o600, 0o660, 0o640, 0o620])
def test_given_and_taken(node: Path, bits: int) -> None:
    os.chown(node, 0, GROUP)
    node.chmod(bits)
    what = row(node)
    group_could = opens(node, OTHER_UID, GROUP)
    assert group_could == (bits == 0o660)
    assert not opens(node, UID)
    assert acl.entries(what) == {}

    assert acl.needs(what, UID)
    assert acl.give(what, UID) is True
    assert acl.entries(what) == {UID: "rw-"}
    assert opens(node, UID)
    assert not opens(node, OTHER_UID)
    # the mask shows as the group's bits, and the group has gained nothing
    assert opens(node, OTHER_UID, GROUP) == group_could
    # again: no work
    changed = node.stat().st_ctime_ns
    assert not acl.needs(what, UID)
    assert acl.give(what, UID) is False
    assert node.stat().st_ctime_ns == changed

    acl.take(what, UID)
    assert mode(node) == bits
    assert not extended(node)
    assert not opens(node, UID)
    changed = node.stat().st_ctime_ns
    acl.take(what, UID)
    assert node.stat().st_ctime_ns == changed


def test_the_groups_named_entries_and_their_rights_are_nobodys_but_theirs(tmp_path: Path) -> None:
    """A mask that holds others back is raised for ours alone."""
    path = tmp_path / "npu0"
    path.touch()
    posix1e.ACL(text="u::rw,u:1001:rw,g::rw,g:7777:rw,m::r,o::-").applyto(str(path))
    what = row(path)
    assert acl.entries(what) == {OTHER_UID: "r--"}
    assert acl.give(what, UID) is True
    assert acl.entries(what) == {UID: "rw-", OTHER_UID: "r--"}
    assert text(path) == ["u::rw-", "u:1000:rw-", "u:1001:r--", "g::r--", "g:7777:r--", "m::rw-", "o::---"]
    acl.take(what, UID)
    assert text(path) == ["u::rw-", "u:1001:r--", "g::r--", "g:7777:r--", "m::r--", "o::---"]
    assert mode(path) == 0o640
    # not ours: a second look changes nothing
    changed = path.stat().st_ctime_ns
    acl.take(what, UID)
    assert path.stat().st_ctime_ns == changed


RIGHTS = st.integers(0, 7)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    users=st.dictionaries(st.sampled_from([UID, 1001, 1002, 4294967294]), RIGHTS, max_size=3),
    groups=st.dictionaries(st.sampled_from([44, 7777]), RIGHTS, max_size=2),
    plain=st.tuples(RIGHTS, RIGHTS, RIGHTS),
    mask=RIGHTS,
    uid=st.sampled_from([UID, 4294967294]),
)
def test_nobody_elses_rights_change(
    tmp_path: Path,
    users: dict[int, int],
    groups: dict[int, int],
    plain: tuple[int, int, int],
    mask: int,
    uid: int,
) -> None:
    path = tmp_path / "npu0"
    path.unlink(missing_ok=True)
    path.touch()
    lines = [f"u::{letters(plain[0])}", f"g::{letters(plain[1])}", f"o::{letters(plain[2])}"]
    lines += [f"u:{one}:{letters(bits)}" for one, bits in users.items()]
    lines += [f"g:{one}:{letters(bits)}" for one, bits in groups.items()]
    if users or groups:
        lines.append(f"m::{letters(mask)}")
    posix1e.ACL(text=",".join(lines)).applyto(str(path))
    what = row(path)
    before, others, bits = effective(path), effective(path, uid), mode(path)

    needed = acl.needs(what, uid)
    made = acl.give(what, uid)
    assert made == needed
    assert not acl.needs(what, uid)
    assert effective(path, uid) == others
    if made:
        assert acl.entries(what)[uid].startswith("rw")
        acl.take(what, uid)
        assert effective(path) == {who: rights for who, rights in before.items() if who != ("u", uid)}
        if uid not in users:
            # the mask may be tighter than it was: what it held back was nobody's
            assert mode(path) & ~0o070 == bits & ~0o070
        if set(users) <= {uid} and not groups:
            assert not extended(path)
    else:
        assert effective(path) == before
        assert mode(path) == bits


def letters(bits: int) -> str:
    return "".join(letter if bits & bit else "-" for letter, bit in (("r", 4), ("w", 2), ("x", 1)))


def effective(path: Path, without: int | None = None) -> dict[tuple[str, int | None], str]:
    """The rights that each entry has with the mask applied, the entry of the uid WITHOUT left out."""
    found = [line.split(":") for line in text(path)]
    mask = next((line[-1] for line in found if line[0] == "m"), "rwx")
    rights: dict[tuple[str, int | None], str] = {}
    for kind, name, shown in found:
        if kind == "m" or (kind == "u" and name and int(name) == without):
            continue
        bound = kind == "g" or (kind == "u" and name)
        rights[kind, int(name) if name else None] = "".join(
            letter if not bound or letter in mask else "-" for letter in shown.partition("\t")[0]
        )
    return rights


@pytest.mark.parametrize("bits", [0o600, 0o660])
def test_an_entry_that_a_new_mode_holds_back_is_given_again(node: Path, bits: int) -> None:
    """udev sets the mode that its rules say, which on a node with an ACL is the mask."""
    os.chown(node, 0, GROUP)
    node.chmod(bits)
    what = row(node)
    acl.give(what, UID)
    node.chmod(0o600)
    assert acl.entries(what) == {UID: "---"}
    assert not opens(node, UID)
    assert acl.needs(what, UID)
    assert acl.give(what, UID) is True
    assert opens(node, UID)
    # who set 0600 shut the group out, and it stays out
    assert not opens(node, OTHER_UID, GROUP)
    assert acl.look(what).mode == 0o600
    acl.take(what, UID)
    assert mode(node) == 0o600
    assert not extended(node)


def test_what_uaccess_leaves_is_cleared_away(node: Path) -> None:
    """udev's builtin removes the users' entries and leaves the mask, and with it an ACL."""
    node.chmod(0o600)
    what = row(node)
    acl.give(what, UID)
    posix1e.ACL(text="u::rw,g::-,m::rw,o::-").applyto(str(node))
    assert extended(node)
    assert mode(node) == 0o660
    acl.take(what, UID)
    assert not extended(node)
    assert mode(node) == 0o600


def test_several_owners_of_one_node(node: Path) -> None:
    """Slots of one card, a control node of several."""
    node.chmod(0o600)
    what = row(node)
    for uid in (UID, OTHER_UID, 165536):
        assert acl.give(what, uid) is True
    acl.take(what, UID)
    assert acl.entries(what) == {OTHER_UID: "rw-", 165536: "rw-"}
    assert opens(node, OTHER_UID)
    assert not opens(node, UID)
    acl.take(what, OTHER_UID)
    acl.take(what, 165536)
    assert not extended(node)
    assert mode(node) == 0o600


def test_who_needs_none(node: Path) -> None:
    what = row(node)
    node.chmod(0o600)
    assert acl.give(what, 0) is False
    node.chmod(0o666)
    assert acl.give(what, UID) is False
    os.chown(node, UID, 0)
    node.chmod(0o600)
    assert acl.give(what, UID) is False
    assert not extended(node)
    os.chown(node, 0, 0)
    # the others' rights are not for members of a group that has fewer
    node.chmod(0o606)
    assert opens(node, UID)
    assert acl.give(what, UID) is True
    acl.take(what, UID)
    assert mode(node) == 0o606
    node.chmod(0o600)
    posix1e.ACL(text="u::rw,u:1000:rw,g::-,m::rw,o::-").applyto(str(node))
    assert acl.give(what, UID) is False
    assert acl.entries(what) == {UID: "rw-"}
    posix1e.ACL(text="u::rw,g::-,o::-").applyto(str(node))
    # an entry with less is raised, and goes with ours
    posix1e.ACL(text="u::rw,u:1000:r,g::-,m::r,o::-").applyto(str(node))
    assert acl.give(what, UID) is True
    assert acl.entries(what) == {UID: "rw-"}
    acl.take(what, UID)
    assert acl.entries(what) == {}
    assert text(node) == ["u::rw-", "g::---", "o::---"]


def refused(what: GrantedNode) -> str:
    with pytest.raises(AccessError) as caught:
        acl.give(what, UID)
    with pytest.raises(AccessError):
        acl.needs(what, UID)
    # and there is nothing of ours to take
    acl.take(what, UID)
    return str(caught.value)


def test_another_node_is_refused(node: Path, tmp_path: Path) -> None:
    what = row(node)
    other = {"char": "block", "block": "char", "file": "char"}[what.kind]
    assert "expected " in refused(what._replace(kind=other))
    assert refused(what._replace(minor=what.minor + 1)).startswith(f"node {node}: expected {what.kind} ")
    missing = refused(what._replace(path=str(tmp_path / "missing\n")))
    assert missing.endswith("No such file or directory")
    assert "\n" not in missing
    link = tmp_path / "link"
    link.symlink_to(node)
    assert "lrwxrwxrwx" in refused(what._replace(path=str(link)))
    assert "drwx" in refused(what._replace(path=str(tmp_path)))
    assert not extended(node)


def test_only_roots_symlinks_lead_to_a_node(tmp_path: Path) -> None:
    """Of directories: whoever can put one on the way could have another's file opened to them."""
    real = tmp_path / "real"
    real.mkdir()
    path = real / "npu0"
    path.touch()
    for target in (real, Path("real"), Path("..") / tmp_path.name / "real", Path("link2")):
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        if target == Path("link2"):
            (tmp_path / "link2").symlink_to(real)
        what = row(path)._replace(path=str(link / "npu0"))
        assert acl.give(what, UID) is True
        assert acl.entries(row(path)) == {UID: "rw-"}
        acl.take(what, UID)
        assert not extended(path)
    os.chown(link, UID, UID, follow_symlinks=False)
    assert "symbolic links" in refused(what)
    os.chown(link, 0, 0, follow_symlinks=False)
    os.chown(tmp_path, UID, 0)
    assert "symbolic links" in refused(what)
    os.chown(tmp_path, 0, 0)
    tmp_path.chmod(0o777)
    assert "symbolic links" in refused(what)
    tmp_path.chmod(0o1777)
    assert acl.give(what, UID) is True
    tmp_path.chmod(0o755)
    link.unlink()
    link.symlink_to("link")
    assert "symbolic links" in refused(what)


def test_a_file_of_several_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "npu0"
    path.touch()
    os.link(path, tmp_path / "other")
    assert "2 names" in refused(row(path))
    assert not extended(path)


def test_a_second_name_keeps_no_entry(tmp_path: Path) -> None:
    """Who may write a file may link it (proc(5), protected_hardlinks): so may a lease's owner."""
    path = tmp_path / "npu0"
    path.touch(mode=0o600)
    what = row(path)
    assert acl.give(what, UID)
    os.link(path, tmp_path / "other")
    acl.take(what, UID)
    assert not extended(path)
    assert not opens(tmp_path / "other", UID)


def test_a_path_swapped_at_any_moment_leads_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, victim = tmp_path / "npu0", tmp_path / "victim"
    path.touch(mode=0o600)
    victim.touch(mode=0o600)
    what = row(path)
    real = acl._may

    def swapped(*arguments: object) -> bool:
        path.rename(tmp_path / "moved")
        path.symlink_to(victim)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(acl, "_may", swapped)
    assert acl.give(what, UID) is True
    assert not extended(victim)
    assert extended(tmp_path / "moved")


def test_no_device_is_opened_and_no_descriptor_left(node: Path) -> None:
    what = row(node)
    gc.collect()  # what earlier tests left is not to go meanwhile
    before = len(os.listdir("/proc/self/fd"))
    opened: list[tuple[object, ...]] = []
    watching, here = True, threading.get_ident()

    def spy(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and threading.get_ident() == here:
            opened.append(arguments)

    sys.addaudithook(spy)  # for good: they can't be removed
    try:
        acl.give(what, UID)
        acl.entries(what)
        acl.take(what, UID)
        refused(what._replace(minor=what.minor + 1))
        refused(what._replace(path=f"{node}/x"))
    finally:
        watching = False
    assert opened
    assert all(int(str(flags)) & os.O_PATH for _, _, flags in opened)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_descriptors_an_entry_is_not_taken_for_gone(node: Path) -> None:
    node.chmod(0o600)
    what = row(node)
    acl.give(what, UID)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(AccessError, match="Too many open files"):
            acl.take(what, UID)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert acl.entries(what) == {UID: "rw-"}
    acl.take(what, UID)
    assert not extended(node)


def test_a_file_system_without_acls_is_named(tmp_path: Path) -> None:
    """sysfs has none; neither has FAT."""
    what = GrantedNode("npu-0", "/sys/kernel/uevent_seqnum", "own", "file", 0, 0)
    with pytest.raises(AccessError) as caught:
        acl.give(what, UID)
    assert str(caught.value) == "node /sys/kernel/uevent_seqnum: its ACL: Operation not supported"
