"""The hands: what they make, what they take back, and that a crash at any moment leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import posix1e
import pytest

from hetero_agent.access.cdi import file_name
from hetero_agent.access.grant import Grant
from hetero_agent.access.hands import Hands
from hetero_agent.access.manifest import AccessError
from tests.access.granting import HOOK, LEASE, OTHER, OTHER_UID, UID, entries, grant, row
from tests.support.console import CONSOLE
from tests.support.process import PYTHON, ROOT


class Host:
    """Directories of a test, and two nodes: a console of the kernel's, and a device file."""

    def __init__(self, directory: Path) -> None:
        self.records = directory / "records"
        self.specifications = directory / "cdi"
        self.node = CONSOLE
        self.file = directory / "npu0"
        self.file.touch()
        self.file.chmod(0o660)

    def hands(self) -> Hands:
        """New hands, as of a process that has just started."""
        return Hands(self.records, self.specifications, True, HOOK)

    def made(self) -> tuple[set[int], set[int], list[str], list[str]]:
        """Whose entries are on the nodes, what specifications and records there are."""
        return (
            entries(self.node),
            entries(self.file),
            sorted(path.name for path in self.specifications.glob("*")),
            sorted(path.name for path in self.records.glob("*")),
        )


NOTHING = (set[int](), set[int](), list[str](), list[str]())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    one = Host(tmp_path)
    mode = one.node.stat().st_mode & 0o777
    yield one
    posix1e.ACL(mode=mode).applyto(str(one.node))


def test_all_is_made_and_all_is_taken_back(host: Host) -> None:
    modes = [path.stat().st_mode for path in (host.node, host.file)]
    hands = host.hands()
    hands.prepare(grant(host.node, host.file))
    nodes, files, specifications, records = host.made()
    assert (nodes, files, records) == ({UID}, {UID}, [LEASE])
    (name,) = specifications
    assert json.loads((host.specifications / name).read_text())["devices"][0]["name"] == LEASE
    hands.revoke(LEASE)
    assert host.made() == NOTHING
    assert [path.stat().st_mode for path in (host.node, host.file)] == modes
    # as often as one likes
    hands.revoke(LEASE)


def test_preparing_again_makes_what_is_missing(host: Host) -> None:
    hands = host.hands()
    hands.prepare(grant(host.node))
    before = host.made()
    # udev's uaccess, on every uevent; and somebody who tidies up
    posix1e.ACL(mode=0o620).applyto(str(host.node))
    for path in host.specifications.iterdir():
        path.unlink()
    for again in (hands, host.hands()):
        again.prepare(grant(host.node))
        assert host.made() == before


def test_a_node_that_is_gone_costs_the_others_nothing(host: Host) -> None:
    hands = host.hands()
    both = grant(host.file, host.node)
    hands.prepare(both)
    host.file.unlink()
    posix1e.ACL(mode=0o620).applyto(str(host.node))
    with pytest.raises(AccessError, match="No such file"):
        hands.prepare(both)
    assert entries(host.node) == {UID}
    hands.revoke(LEASE)
    assert entries(host.node) == set()
    assert list(host.records.iterdir()) == []


def test_a_node_that_is_not_given_any_more_is_taken_back(host: Host) -> None:
    """A device of the lease was unplugged; another lease of the same uid keeps what it has."""
    hands = host.hands()
    hands.prepare(grant(host.file, host.node))
    hands.prepare(grant(host.node))
    assert (entries(host.file), entries(host.node)) == (set(), {UID})
    assert json.loads((host.records / LEASE).read_text())["nodes"] == [["npu-0", *row(host.node)[1:]]]
    hands.prepare(grant(host.file, host.node))
    hands.prepare(grant(host.file, lease=OTHER))
    hands.prepare(grant(host.node))
    assert entries(host.file) == {UID}
    hands.revoke(OTHER)
    assert entries(host.file) == set()
    hands.revoke(LEASE)
    assert host.made() == NOTHING


def test_root_needs_no_entry(host: Host) -> None:
    host.hands().prepare(grant(host.node, uid=0))
    assert host.made()[0] == set()
    assert len(host.made()[2]) == 1


def test_neither_specification_nor_entry_if_not_wanted(host: Host) -> None:
    Hands(host.records, None, False, HOOK).prepare(grant(host.node))
    assert host.made() == NOTHING


@pytest.mark.parametrize("first", [LEASE, OTHER])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_two_leases_of_a_user_share_goes_with_the_last(host: Host, first: str, restarted: bool) -> None:
    """As control nodes are, each card of the vendor has them."""
    hands = host.hands()
    hands.prepare(grant(host.node))
    hands.prepare(grant(host.node, host.file, lease=OTHER))
    if restarted:
        hands = host.hands()
    hands.revoke(first)
    assert host.made()[0] == {UID}
    hands.revoke({LEASE: OTHER, OTHER: LEASE}[first])
    assert host.made() == NOTHING


def test_another_users_lease_is_another_matter(host: Host) -> None:
    hands = host.hands()
    hands.prepare(grant(host.node))
    hands.prepare(grant(host.node, lease=OTHER, uid=OTHER_UID))
    assert host.made()[0] == {UID, OTHER_UID}
    hands.revoke(LEASE)
    assert host.made()[0] == {OTHER_UID}


def test_an_entry_that_somebody_else_gave_stays(host: Host) -> None:
    """As of the user at the seat, whom udev gives graphics cards."""
    _give(host.node)
    hands = host.hands()
    hands.prepare(grant(host.node))
    hands.prepare(grant(host.node))
    hands.revoke(LEASE)
    assert host.made() == ({UID}, set(), [], [])


def _give(path: Path) -> None:
    given = posix1e.ACL(text=f"u::rw,u:{UID}:rw,g::r,m::rw,o::-")
    given.applyto(str(path))


def test_a_failed_grant_leaves_nothing(host: Host) -> None:
    host.specifications.write_text("no directory")
    hands = host.hands()
    with pytest.raises(AccessError, match=LEASE):
        hands.prepare(grant(host.node))
    assert entries(host.node) == set()
    assert list(host.records.iterdir()) == []


def test_a_failed_renewal_takes_nothing_away(host: Host) -> None:
    hands = host.hands()
    hands.prepare(grant(host.node))
    (path,) = host.specifications.iterdir()
    path.unlink()
    path.mkdir()
    with pytest.raises(AccessError):
        hands.prepare(grant(host.node))
    assert host.made()[0] == {UID}
    assert host.made()[3] == [LEASE]
    path.rmdir()
    hands.prepare(grant(host.node))
    assert path.is_file()


def test_what_could_not_be_undone_is_tried_again(host: Host) -> None:
    hands = host.hands()
    hands.prepare(grant(host.node))
    (path,) = host.specifications.iterdir()
    path.unlink()
    path.mkdir()
    with pytest.raises(AccessError):
        hands.revoke(LEASE)
    # the rest is not held up by it
    assert host.made()[0] == set()
    assert host.made()[3] == [LEASE]
    with pytest.raises(AccessError, match=LEASE):
        host.hands().sweep(())
    path.rmdir()
    host.hands().sweep(())
    assert host.made() == NOTHING


def test_undoing_goes_by_the_record_whatever_the_settings_are_now(host: Host) -> None:
    host.hands().prepare(grant(host.node))
    Hands(host.records, None, False, HOOK).revoke(LEASE)
    assert host.made() == NOTHING


def test_a_sweep_leaves_the_living(host: Host) -> None:
    hands = host.hands()
    hands.prepare(grant(host.node))
    hands.prepare(grant(host.file, lease=OTHER))
    host.hands().sweep({OTHER})
    assert host.made()[:2] == (set(), {UID})
    assert host.made()[3] == [OTHER]


def test_a_specification_that_cannot_be_removed_keeps_no_other(host: Host) -> None:
    paths = [host.specifications / file_name(f"{number:032x}") for number in range(8)]
    for path in paths[::2]:
        path.mkdir(parents=True)
    for path in paths[1::2]:
        path.write_text("{}")
    with pytest.raises(AccessError, match="Is a directory"):
        host.hands().sweep(())
    assert [path.exists() for path in paths] == [True, False] * 4


def test_a_lease_that_is_anothers_now(host: Host) -> None:
    hands = host.hands()
    hands.prepare(grant(host.node, host.file))
    hands.prepare(grant(host.node, uid=OTHER_UID))
    assert host.made()[:2] == ({OTHER_UID}, set())


def test_what_is_no_record_is_left_alone_and_told(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.records.mkdir()
    for name in ("socket", "README", "netdev", OTHER + ".new"):
        (host.records / name).write_text("")
    for number, text in enumerate(
        ("", "[]", '{"version": 2}', '{"version": 1, "uid": []}', "\xff", "9" * 9999, "[" * 9999)
    ):
        (host.records / f"{number:032x}").write_text(text)
    hands = host.hands()
    hands.prepare(grant(host.node))
    hands.sweep(())
    assert host.made()[0] == set()
    assert caplog.text.count("can't be read") == 7
    # never came into force
    assert not (host.records / (OTHER + ".new")).exists()
    assert (host.records / "socket").exists()


@pytest.mark.parametrize("at", ["scandir", "open"])
def test_records_that_can_not_be_read_now_are_read_later(
    host: Host, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Without descriptors a lease is not taken for one that has nothing."""
    host.hands().prepare(grant(host.node))
    hands = host.hands()

    def none_left(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for attempt in (
        lambda: hands.revoke(LEASE),
        lambda: hands.sweep(()),
        lambda: hands.prepare(grant(host.file)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*((os, "scandir") if at == "scandir" else (Path, "read_text")), none_left)
            with pytest.raises(AccessError, match="Too many open files"):
                attempt()
    hands.revoke(LEASE)
    assert host.made() == NOTHING


# -- kill -9 ------------------------------------------------------------------------------------------
#: Prepares (and revokes) in a process that ends at the N-th call of a function of one of its modules.
_DIES = """
import json, os, signal, sys
from pathlib import Path
from hetero_agent.access import acl, cdi, hands, record
from hetero_agent.access.grant import Grant

directory, wanted, nth, lease, uid, manifest = sys.argv[1:]
place, name = wanted.split(".")
owner = {"acl": acl, "cdi": cdi, "records": record.Records}[place]
real, calls = getattr(owner, name), []


def call(*arguments):
    calls.append(1)
    if len(calls) == int(nth):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)


setattr(owner, name, call)
hook = cdi.Hook("/usr/bin/heteroctl", ())
both = hands.Hands(Path(directory, "records"), Path(directory, "cdi"), True, hook)
both.prepare(Grant(lease, int(uid), json.loads(manifest)))
both.revoke(lease)
"""


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("records.write", 1),
        ("cdi.write", 1),
        ("acl.give", 1),
        ("acl.give", 2),
        ("cdi.remove", 1),
        ("acl.take", 1),
        ("acl.take", 2),
        ("records.remove", 1),
    ],
)
def test_killed_at_any_moment_the_next_one_makes_it_whole_or_undoes_it(
    host: Host, tmp_path: Path, call: str, nth: int
) -> None:
    wanted = grant(host.node, host.file)
    words = [str(tmp_path), call, str(nth), wanted.lease, str(wanted.uid), json.dumps(dict(wanted.manifest))]
    done = subprocess.run([PYTHON, "-c", _DIES, *words], cwd=ROOT, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    host.hands().sweep(())
    assert host.made() == NOTHING
    # and as well if the lease is live
    subprocess.run([PYTHON, "-c", _DIES, *words], cwd=ROOT, timeout=30, check=False)
    hands = host.hands()
    hands.sweep({LEASE})
    hands.prepare(wanted)
    assert host.made()[:2] == ({UID}, {UID})
    assert len(host.made()[2]) == 1
    hands.revoke(LEASE)
    assert host.made() == NOTHING


def test_a_grant_without_nodes(host: Host) -> None:
    hands = host.hands()
    hands.prepare(Grant(LEASE, UID, grant().manifest))
    hands.revoke(LEASE)
    assert host.made() == NOTHING
