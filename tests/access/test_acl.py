"""ACL entries on nodes: what is given, to whom, and that all is as before once it is taken."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import posix1e
import pytest

from hetero_agent.access import acl
from hetero_agent.access.grant import GrantedNode
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
