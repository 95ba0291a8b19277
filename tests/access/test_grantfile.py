"""Grant files: what the agent writes the helper reads, and nothing else."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_agent.access import grantfile
from hetero_agent.access.grantfile import GrantFiles
from hetero_agent.access.manifest import AccessError
from tests.access.granting import LEASE, OTHER, grant
from tests.support.console import CONSOLE

AGENT = 990
OWNERS = {0, AGENT}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of grant files with that of a lease."""
    path = tmp_path / "grants"
    GrantFiles(path).write(grant(CONSOLE))
    return path


def test_what_was_written_is_read(directory: Path) -> None:
    found = grantfile.read(directory, LEASE, OWNERS)
    assert found == grant(CONSOLE)
    assert found.nodes == grant(CONSOLE).nodes
    assert grantfile.listed(directory, OWNERS) == {LEASE}


def test_only_the_agent_and_its_group_may_read(directory: Path) -> None:
    previous = os.umask(0o077)
    try:
        GrantFiles(directory).write(grant(CONSOLE, lease=OTHER))
    finally:
        os.umask(previous)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o640}


def test_files_go_with_their_leases(directory: Path) -> None:
    files = GrantFiles(directory)
    files.write(grant(CONSOLE, lease=OTHER))
    assert files.exists(LEASE)
    files.remove(LEASE)
    files.remove(LEASE)
    assert not files.exists(LEASE)
    (directory / (LEASE + ".new")).touch()
    files.keep({OTHER})
    assert [path.name for path in directory.iterdir()] == [OTHER]


def test_without_a_directory_there_are_none(tmp_path: Path) -> None:
    files = GrantFiles(tmp_path / "none")
    files.keep(())
    assert grantfile.listed(tmp_path / "none", OWNERS) == set()
    with pytest.raises(AccessError, match="No such file"):
        grantfile.read(tmp_path / "none", LEASE, OWNERS)


@pytest.mark.parametrize("lease", ["", ".", "..", "../grants/" + LEASE, "A" * 32, LEASE + "\n", LEASE + "/"])
def test_what_is_no_lease_id_is_no_file(directory: Path, lease: str) -> None:
    with pytest.raises(AccessError, match="not a lease id"):
        grantfile.read(directory, lease, OWNERS)


def _said(directory: Path) -> str:
    with pytest.raises(AccessError) as caught:
        grantfile.read(directory, LEASE, OWNERS)
    return str(caught.value)


def test_others_files_and_what_others_may_write(directory: Path) -> None:
    path = directory / LEASE
    os.chown(path, 1000, -1)
    assert "belongs to uid 1000" in _said(directory)
    os.chown(path, AGENT, AGENT)
    grantfile.read(directory, LEASE, OWNERS)
    for mode in (0o660, 0o642):
        path.chmod(mode)
        assert "others may write it" in _said(directory)
    path.chmod(0o640)
    directory.chmod(0o777)
    assert "the directory of grant files" in _said(directory)
    directory.chmod(0o750)
    os.chown(directory, 1000, -1)
    assert "the directory of grant files" in _said(directory)
    with pytest.raises(AccessError):
        grantfile.listed(directory, OWNERS)


def test_links_and_what_is_no_file(directory: Path, tmp_path: Path) -> None:
    path = directory / LEASE
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert "symbolic links" in _said(directory)
    path.unlink()
    os.mkfifo(path)
    # without a writer: neither a hang nor an empty file
    assert "is something else" in _said(directory)
    path.unlink()
    path.mkdir()
    assert "is something else" in _said(directory)
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert "symbolic links" in _said(directory)
    path.unlink()
    elsewhere.rename(path)
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(AccessError):
        grantfile.read(link, LEASE, OWNERS)


def changed(change: Callable[[dict[str, object]], object]) -> bytes:
    data = {"version": 1, "lease": LEASE, "uid": 1000, "manifest": dict(grant().manifest)}
    change(data)
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "other keys"),
        (b"null", "other keys"),
        (b"9" * 5000, "not JSON"),
        (b" " * (grantfile.LARGEST + 1), "larger than"),
        (changed(lambda data: data.pop("uid")), "other keys"),
        (changed(lambda data: data.update(hook="/bin/sh")), "other keys"),
        (changed(lambda data: data.update(version=2)), "version"),
        (changed(lambda data: data.update(version=True)), "version"),
        (changed(lambda data: data.update(lease=OTHER)), "another lease's"),
        (changed(lambda data: data.update(uid=-1)), "uid"),
        (changed(lambda data: data.update(uid=2**32 - 1)), "uid"),
        (changed(lambda data: data.update(uid="0")), "uid"),
        (changed(lambda data: data.update(uid=1.5)), "uid"),
        (changed(lambda data: data.update(uid=True)), "uid"),
        (changed(lambda data: data.update(manifest=[])), "no object"),
    ],
)
def test_contents_that_are_no_grant(directory: Path, content: bytes, why: str) -> None:
    (directory / LEASE).write_bytes(content)
    assert why in _said(directory)
