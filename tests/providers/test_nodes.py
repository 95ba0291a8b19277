"""Whose nodes a provider may name: tried on this machine's real nodes, links and directories."""

from __future__ import annotations

import gc
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import Node, Role
from hetero_agent.providers.nodes import inspect


@pytest.fixture
def own(tmp_path: Path) -> Path:
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "dev0").write_bytes(b"")
    (directory / "dev0").chmod(0o640)
    return directory


@pytest.fixture
def in_dev() -> Iterator[Path]:
    """A directory of ours below /dev, for links and nodes made here."""
    path = Path(f"/dev/hetero-agent-test-{os.getpid()}")
    path.mkdir()
    try:
        yield path
    finally:
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()


def look(path: object, subsystems: tuple[str, ...] = (), directory: object = "") -> Node | None:
    return inspect([(str(path), Role.OWN)], subsystems, str(directory))[str(path), Role.OWN]


def refusal(path: object, subsystems: tuple[str, ...] = (), directory: object = "") -> str:
    with pytest.raises(Refusal) as refused:
        look(path, subsystems, directory)
    assert refused.value.kind is ErrorKind.INVALID_ARGUMENT
    assert refused.value.text.startswith(f"node {path} ")
    return refused.value.text


def test_a_file_in_the_directory(own: Path) -> None:
    found = (own / "dev0").stat()
    assert look(own / "dev0", (), own) == Node(
        str(own / "dev0"),
        Role.OWN,
        "file",
        fsdev=found.st_dev,
        inode=found.st_ino,
        mode=0o640,
        gid=found.st_gid,
    )


def test_a_file_below_a_subdirectory_and_by_the_configured_name_of_the_directory(own: Path) -> None:
    (own / "sub").mkdir()
    (own / "sub" / "dev1").touch()
    alias = own.parent / "alias"
    alias.symlink_to(own)
    by_alias = look(alias / "sub" / "dev1", (), alias)
    by_path = look(own / "sub" / "dev1", (), alias)
    assert by_alias is not None
    assert by_path is not None
    assert by_alias.inode == by_path.inode == (own / "sub" / "dev1").stat().st_ino


def test_what_does_not_exist_yet_is_none(own: Path) -> None:
    assert look(own / "later", (), own) is None
    assert look(own / "sub" / "later", (), own) is None
    assert look("/dev/hetero-agent-no-such-node", ("misc",)) is None
    assert look(own.parent / "nowhere" / "dev0", (), own.parent / "nowhere") is None


def test_links_out_of_the_directory_are_not_followed(own: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (own / "link").symlink_to(secret)
    (own / "null").symlink_to("/dev/null")
    (own / "up").symlink_to(tmp_path)
    (own / "hard").hardlink_to(secret)
    assert "is a symbolic link" in refusal(own / "link", (), own)
    assert "is a symbolic link" in refusal(own / "null", ("mem",), own)
    assert "cannot be reached without following links" in refusal(own / "up" / "secret", (), own)
    assert "has a second name (hard link)" in refusal(own / "hard", (), own)


def test_only_files_in_the_directory(own: Path) -> None:
    os.mkfifo(own / "fifo")
    (own / "directory").mkdir()
    os.mknod(own / "char", stat.S_IFCHR | 0o600, os.makedev(240, 7))
    os.mknod(own / "block", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(own / "socket"))
        assert "is a FIFO; in the provider's directory only regular files" in refusal(own / "fifo", (), own)
        assert "is a directory" in refusal(own / "directory", (), own)
        assert "is a character node" in refusal(own / "char", (), own)
        assert "is a block node" in refusal(own / "block", (), own)
        assert "is a socket" in refusal(own / "socket", (), own)


def test_paths_elsewhere(own: Path, tmp_path: Path) -> None:
    assert f"lies outside /dev/ or {own}/" in refusal("/etc/passwd", (), own)
    assert "lies outside /dev/" in refusal("/etc/passwd")
    # a directory whose name begins with the provider's is not the provider's
    (tmp_path / "own-not").mkdir()
    (tmp_path / "own-not" / "dev0").touch()
    assert "lies outside" in refusal(tmp_path / "own-not" / "dev0", (), own)


def test_a_character_node_of_an_allowed_subsystem() -> None:
    found = os.stat("/dev/loop-control")
    assert look("/dev/loop-control", ("misc",)) == Node(
        "/dev/loop-control",
        Role.OWN,
        "char",
        major=os.major(found.st_rdev),
        minor=os.minor(found.st_rdev),
        mode=stat.S_IMODE(found.st_mode),
        gid=found.st_gid,
    )
    text = refusal("/dev/loop-control", ("drm", "accel"))
    assert "belongs to subsystem misc; those allowed for this provider in the configuration: drm, accel" in text
    assert "in the configuration: none" in refusal("/dev/loop-control")


NEVER = (
    "/dev/null",
    "/dev/mem",
    "/dev/kmsg",
    "/dev/zero",
    "/dev/tty",
    "/dev/tty60",
    "/dev/console",
    "/dev/ptmx",
)


@pytest.mark.parametrize("path", [path for path in NEVER if os.path.exists(path)])
def test_memory_and_terminals_are_never_taken(path: str) -> None:
    everything = ("mem", "tty", "vc", "misc", "block")
    assert "is never a provider's node" in refusal(path, everything)


def test_block_nodes_are_never_taken() -> None:
    path = next(path for path in ("/dev/loop0", "/dev/vda") if os.path.exists(path))
    assert "is a block node; below /dev/ only character nodes are taken" in refusal(path, ("block",))
    assert "is a directory" in refusal("/dev/pts", ("tty",))


def test_links_below_dev_are_resolved_and_judged_by_what_they_lead_to(in_dev: Path, own: Path) -> None:
    (in_dev / "by-path").symlink_to("../loop-control")
    (in_dev / "memory").symlink_to("../null")
    (in_dev / "file").symlink_to(own / "dev0")
    (in_dev / "round").symlink_to("round")
    found = look(in_dev / "by-path", ("misc",))
    assert found is not None
    assert found.path == "/dev/loop-control"
    assert "is never a provider's node" in refusal(in_dev / "memory", ("mem", "misc"))
    assert "which is no device node of the kernel" in refusal(in_dev / "file", ("misc",), own)
    assert "cannot be looked at" in refusal(in_dev / "round", ("misc",))


def test_nodes_in_the_writable_places_of_dev_are_not_taken() -> None:
    path = Path(f"/dev/shm/hetero-agent-test-{os.getpid()}")
    os.mknod(path, stat.S_IFCHR | 0o600, os.stat("/dev/loop-control").st_rdev)
    try:
        assert "is no device node of the kernel" in refusal(path, ("misc",))
    finally:
        path.unlink()


def test_a_number_that_sysfs_lacks_is_known_by_its_driver(in_dev: Path) -> None:
    drivers = {}
    for line in Path("/proc/devices").read_text().partition("Block")[0].splitlines():
        if line[:3].strip().isdigit():
            drivers[int(line.split()[0])] = line.split()[1]
    shown = {int(entry.partition(":")[0]) for entry in os.listdir("/sys/dev/char")}
    spare = [major for major in drivers if major > 143 and major not in shown]
    major = spare[0]
    os.mknod(in_dev / "spare", stat.S_IFCHR | 0o600, os.makedev(major, 0))
    found = look(in_dev / "spare", (drivers[major],))
    assert found is not None
    assert found.major == major
    assert f"belongs to subsystem {drivers[major]}" in refusal(in_dev / "spare", ("misc",))


def test_another_filesystem_inside_the_directory(own: Path) -> None:
    import subprocess

    (own / "mnt").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(own / "mnt")], check=True)
    try:
        (own / "mnt" / "dev0").touch()
        assert "lies on another filesystem" in refusal(own / "mnt" / "dev0", (), own)
    finally:
        subprocess.run(["umount", str(own / "mnt")], check=True)


def test_no_descriptor_is_left_open(own: Path) -> None:
    gc.collect()  # what earlier tests left is not to go meanwhile
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        look(own / "dev0", (), own)
        look("/dev/loop-control", ("misc",), own)
        refusal("/dev/null", (), own)
    assert len(os.listdir("/proc/self/fd")) == before
