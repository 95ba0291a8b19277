"""The ledger: what is answered is kept, whatever happens to the process, the file or the space."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_agent.core.effects import Restored
from hetero_agent.core.model import AuditKind, Instant
from hetero_agent.store.database import StoreError, StoreInUse, StoreUnusable
from hetero_agent.store.ledger import REMEMBER, SqliteLedger, boot_id
from tests.store import samples
from tests.support.namespace import run_in_mount_namespace
from tests.support.process import PYTHON, ROOT

OTHER_BOOT = "0" * 32


def opened(path: Path, boot: str | None = None) -> tuple[SqliteLedger, Restored]:
    ledger = SqliteLedger(path, samples.now, boot)
    return ledger, ledger.load(samples.now())


def filled(path: Path, boot: str | None = None) -> None:
    """Make a ledger with one of each kind of row, and three audit records."""
    ledger, _ = opened(path, boot)
    one = samples.lease(1)
    ledger.commit(
        samples.changes(
            *map(samples.audit, (1, 2, 3)),
            leases={one.id: one},
            debts={samples.DEVICE: samples.debt(1)},
            requests={one.key: samples.request(1)},
            records={samples.DEVICE: samples.record()},
        )
    )
    ledger.close()


def sql(path: Path, statement: str, *arguments: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        return connection.execute(statement, arguments).fetchall()
    finally:
        connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


# -- what it holds -----------------------------------------------------------------------------
def test_a_first_start_is_empty_and_says_nothing(path: Path) -> None:
    ledger, restored = opened(path)
    assert restored == Restored()
    assert ledger.outbox(0, 10) == []
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir() if not one.name.startswith("ledger.sqlite")] == []


def test_all_of_it_comes_back(path: Path) -> None:
    filled(path)
    ledger, restored = opened(path)
    assert restored.leases == [samples.lease(1)]
    assert restored.debts == [samples.debt(1)]
    assert [one.key for one in restored.requests] == [samples.request_key(1)]
    assert restored.records == [samples.record()]
    assert (restored.sequence, restored.generation) == (3, 30)
    assert restored.notes == []
    assert restored.other_boot == set()
    assert restored.other_boot_debts == set()
    assert [one.sequence for one in ledger.outbox(0, 10)] == [1, 2, 3]
    assert ledger.backlog == 3


def test_none_removes_a_row(path: Path) -> None:
    filled(path)
    ledger, _ = opened(path)
    one = samples.lease(1)
    ledger.commit(
        samples.changes(
            samples.audit(4),
            leases={one.id: None},
            debts={samples.DEVICE: None},
            requests={one.key: None},
            records={samples.DEVICE: None},
        )
    )
    ledger.close()
    _, restored = opened(path)
    assert (restored.leases, restored.debts, restored.requests, restored.records) == ([], [], [], [])
    assert restored.sequence == 4


def test_what_cannot_be_written_as_json_stores_nothing(path: Path) -> None:
    ledger, _ = opened(path)
    one = samples.lease(1)
    bad = samples.lease(2)
    object.__setattr__(bad, "manifest", {"nodes": {1, 2}})
    with pytest.raises(StoreError, match="set has no JSON form"):
        ledger.commit(samples.changes(samples.audit(1), leases={one.id: one, bad.id: bad}))
    assert ledger.outbox(0, 10) == []
    ledger.commit(samples.changes(samples.audit(1), leases={one.id: one}))
    ledger.close()
    _, restored = opened(path)
    assert restored.leases == [one]
    assert restored.sequence == 1


def test_a_commit_takes_little_time(path: Path) -> None:
    """The aim is well under 200 µs on tmpfs; here the bound only catches a wait for a disk."""
    ledger, _ = opened(Path("/dev/shm") / f"hetero-agent-test-{os.getpid()}.sqlite")
    took = []
    try:
        for number in range(1, 301):
            one = samples.lease(number)
            changes = samples.changes(
                samples.audit(number), leases={one.id: one}, requests={one.key: samples.request(number)}
            )
            start = time.perf_counter()
            ledger.commit(changes)
            took.append(time.perf_counter() - start)
    finally:
        ledger.close()
        for left in Path("/dev/shm").glob(f"hetero-agent-test-{os.getpid()}.sqlite*"):
            left.unlink()
    assert sorted(took)[len(took) // 2] < 0.003


# -- kill -9 -----------------------------------------------------------------------------------
def test_killed_in_the_middle_of_commits_it_keeps_whole_ones(path: Path) -> None:
    first = 1
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(12):
        child = subprocess.Popen(
            [PYTHON, "-m", "tests.store.ledger_child", str(path), str(first)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        answered = int(child.stdout.readline())
        end = time.monotonic() + chance.uniform(0, 0.1)
        while time.monotonic() < end:
            answered = int(child.stdout.readline())
        child.kill()
        rest = child.stdout.read().split()
        child.wait()
        answered = max([answered, *map(int, rest)])
        ledger, restored = opened(path)
        assert restored.notes == [], seed
        stored = len(restored.leases)
        # The one that was stored but not answered yet may be there, whole.
        assert stored in (answered, answered + 1), seed
        assert [one.id for one in restored.leases] == [f"{n:032x}" for n in range(1, stored + 1)], seed
        assert len(restored.requests) == stored, seed
        assert [one.lease for one in restored.debts] == [f"{stored:032x}"], seed
        assert restored.sequence == 2 * stored, seed
        waiting = [one.sequence for one in ledger.outbox(0, 100_000)]
        assert waiting == list(range(2 * stored - len(waiting) + 1, 2 * stored + 1)), seed
        ledger.close()
        first = stored + 1
    assert first > 24, "they were killed in the middle of many"


# -- files that are not what they should be ------------------------------------------------------
def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scribbled(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for offset in range(4096, len(raw), 64):
        raw[offset : offset + 32] = b"\xff" * 32
    path.write_bytes(raw)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "short": (lambda path: path.write_bytes(b"SQLite format 3\0"), "not an SQLite file"),
    "text": (lambda path: path.write_bytes(b"x" * 5000), "not an SQLite file"),
    "truncated": (truncated, "malformed"),
    "scribbled": (scribbled, "in database main"),
    "another program's": (lambda path: sql(path, "PRAGMA application_id=7"), "another program's file"),
    "no version": (lambda path: sql(path, "PRAGMA user_version=0"), "no schema version"),
    "no tables": (lambda path: sql(path, "DROP TABLE leases"), "not the tables of its schema"),
    "directory": (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
    "link": (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "a symbolic link"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside_and_a_new_one_started(path: Path, damage: str) -> None:
    make, reason = DAMAGES[damage]
    filled(path)
    make(path)
    ledger, restored = opened(path)
    assert restored.leases == []
    assert restored.sequence == 0
    assert len(restored.notes) == 1
    assert f"{path} was damaged (" in restored.notes[0]
    assert reason in restored.notes[0]
    aside = [one for one in path.parent.iterdir() if ".corrupt-" in one.name]
    assert len(aside) == 1
    assert aside[0].name in restored.notes[0]
    ledger.commit(samples.changes(samples.audit(1)))
    ledger.close()
    _, again = opened(path)
    assert (again.sequence, again.notes) == (1, [])
    assert Path("/etc/passwd").read_text().startswith("root:")


def test_only_some_of_the_files_set_aside_are_kept(path: Path) -> None:
    for number in range(6):
        path.write_bytes(b"%d" % number)
        opened(path)[0].close()
    kept = sorted(one for one in path.parent.iterdir() if ".corrupt-" in one.name)
    assert [one.read_bytes() for one in kept] == [b"3", b"4", b"5"]


def test_a_newer_schema_is_refused_and_not_touched(path: Path) -> None:
    filled(path)
    sql(path, "PRAGMA user_version=2")
    before = (path.read_bytes(), path.stat().st_mtime_ns, sorted(path.parent.iterdir()))
    with pytest.raises(StoreUnusable, match=r"newer hetero-agent \(schema 2, this one knows 1\)"):
        opened(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns, sorted(path.parent.iterdir())) == before


def test_a_second_agent_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_agent.store.database._LOCK_WAIT", 0.1)
    ledger, _ = opened(path)
    with pytest.raises(StoreInUse, match="another process has it open"):
        opened(path)
    ledger.commit(samples.changes(samples.audit(1)))
    ledger.close()
    assert opened(path)[1].sequence == 1


@pytest.mark.parametrize("table", ["leases", "debts", "requests", "records"])
@pytest.mark.parametrize("column", ["data", "sum", "boot"])
def test_a_bad_row_alone_goes_to_quarantine(path: Path, table: str, column: str) -> None:
    filled(path)
    sql(path, f"UPDATE {table} SET {column} = {column} || '1'")
    _, restored = opened(path)
    rows = {one: len(getattr(restored, one)) for one in ("leases", "debts", "requests", "records")}
    assert rows == {one: int(one != table) for one in rows}
    assert len(restored.notes) == 1
    assert f"a damaged row of {table} (checksum) is in quarantine" in restored.notes[0]


def test_a_row_in_quarantine_stays_there(path: Path) -> None:
    filled(path)
    sql(path, "UPDATE leases SET data = x'ff00'")
    opened(path)[0].close()
    ledger, restored = opened(path)
    ledger.close()
    assert restored.notes == []
    assert sql(path, "SELECT source, key, data, reason FROM quarantine") == [
        ("leases", f"{1:032x}", b"\xff\x00", "checksum")
    ]


def test_a_good_row_under_another_key_is_bad(path: Path) -> None:
    from hetero_agent.store.database import checksum

    filled(path)
    ((boot, data),) = sql(path, "SELECT boot, data FROM leases")
    sql(path, "UPDATE leases SET key = 'ff', sum = ?", checksum("ff", boot, data))
    assert "a damaged row of leases (another key) is in quarantine: ff" in opened(path)[1].notes[0]


def test_a_damaged_audit_row_leaves_no_gap(path: Path) -> None:
    filled(path)
    sql(path, "UPDATE outbox SET data = 'x' WHERE key = 2")
    ledger, restored = opened(path)
    assert "a damaged row of outbox (checksum) is in quarantine: 2" in restored.notes[0]
    found = ledger.outbox(0, 10)
    assert [one.sequence for one in found] == [1, 2, 3]
    assert found[1].kind is AuditKind.STORE
    assert found[1].message == "audit record 2 was damaged in the ledger and is lost"
    assert restored.sequence == 3


def test_the_counters_are_found_again_without_their_row(path: Path) -> None:
    filled(path)
    sql(path, "UPDATE counters SET data = '{}'")
    restored = opened(path)[1]
    assert (restored.sequence, restored.generation) == (3, 30)


# -- another boot ------------------------------------------------------------------------------------
def test_rows_of_another_boot_are_given_and_named(path: Path) -> None:
    filled(path, OTHER_BOOT)
    ledger, restored = opened(path)
    assert restored.leases == [samples.lease(1)]
    assert restored.other_boot == {f"{1:032x}"}
    assert restored.other_boot_debts == {samples.DEVICE}
    assert restored.sequence == 3
    one = samples.lease(1)
    ledger.commit(samples.changes(samples.audit(4), leases={one.id: one}, debts={samples.DEVICE: None}))
    ledger.close()
    restored = opened(path)[1]
    assert restored.other_boot == set()
    assert restored.other_boot_debts == set()


def test_the_boot_id_is_the_kernels() -> None:
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    assert len(boot_id()) == 32


# -- forgetting requests -----------------------------------------------------------------------------
class Clock:
    """A clock that the test sets; the ledger is told the time, it reads none."""

    def __init__(self) -> None:
        self.at = Instant(1_000_000_000_000, 1_700_000_000_000_000)

    def __call__(self) -> Instant:
        return self.at

    def pass_time(self, boot: int, real: int | None = None) -> None:
        self.at = Instant(self.at.boot + boot, self.at.real + (boot if real is None else real))


def remembered(path: Path) -> int:
    return int(str(sql(path, "SELECT count(*) FROM requests")[0][0]))


def test_spent_requests_are_forgotten_after_a_day(path: Path) -> None:
    clock = Clock()
    ledger = SqliteLedger(path, clock)
    ledger.load(clock())
    requests = {samples.request_key(n): samples.request(n, ended=n > 5, boot=clock().boot) for n in range(50)}
    ledger.commit(samples.changes(requests=requests))
    clock.pass_time(REMEMBER - 1_000_000)
    ledger.commit(samples.changes(samples.audit(1)))
    ledger.close()
    assert remembered(path) == 50
    ledger.load(clock())
    clock.pass_time(62_000_000)
    left = []
    for sequence in range(2, 6):
        ledger.commit(samples.changes(samples.audit(sequence)))
        ledger.close()
        left.append(remembered(path))
        restored = ledger.load(clock())
        # Those of living leases (0 to 5) stay; what waits for its removal is not given any more.
        assert sorted(one.key.request_id for one in restored.requests) == [f"request {n}" for n in range(6)]
    assert left == [34, 18, 6, 6]


def test_a_jump_of_the_wall_clock_forgets_nothing(path: Path) -> None:
    clock = Clock()
    ledger = SqliteLedger(path, clock)
    ledger.load(clock())
    spent = samples.request(1, ended=True, boot=clock().boot)
    ledger.commit(samples.changes(requests={spent.key: spent}))
    clock.pass_time(61_000_000, real=30 * REMEMBER)
    ledger.commit(samples.changes(samples.audit(1)))
    ledger.close()
    assert ledger.load(clock()).requests == [spent]


def test_requests_of_another_boot_go_by_the_wall_clock(path: Path) -> None:
    clock = Clock()
    ledger = SqliteLedger(path, clock, OTHER_BOOT)
    ledger.load(clock())
    spent = samples.request(1, ended=True, boot=clock().boot)
    ledger.commit(samples.changes(requests={spent.key: spent}))
    ledger.close()
    hour = REMEMBER // 24
    clock.at = Instant(5_000_000, clock.at.real + hour)
    ledger = SqliteLedger(path, clock)
    assert [one.boot for one in ledger.load(clock()).requests] == [5_000_000 - hour]
    clock.pass_time(5_000_000, real=24 * hour)
    ledger.commit(samples.changes(samples.audit(1)))
    ledger.close()
    assert remembered(path) == 0


# -- the outbox ----------------------------------------------------------------------------------------
def test_the_outbox_is_read_in_pages_and_shrinks(path: Path) -> None:
    ledger, _ = opened(path)
    ledger.commit(samples.changes(*map(samples.audit, range(1, 1201))))
    assert ledger.backlog == 1200
    pages = []
    after = 0
    while page := ledger.outbox(after, 256):
        after = page[-1].sequence
        pages.append(len(page))
        ledger.taken([row.sequence for row in page])
    assert pages == [256, 256, 256, 256, 176]
    assert after == 1200
    assert ledger.backlog == 0
    ledger.close()
    assert sql(path, "SELECT count(*) FROM outbox") == [(0,)]


def test_after_a_crash_what_was_not_taken_is_sent_again_with_its_numbers(path: Path) -> None:
    filled(path)
    ledger, _ = opened(path)
    ledger.taken([1])
    ledger.commit(samples.changes(samples.audit(4)))
    ledger.close()
    ledger, restored = opened(path)
    assert [one.sequence for one in ledger.outbox(0, 10)] == [2, 3, 4]
    assert ledger.outbox(0, 10)[0] == samples.audit(2)
    assert restored.sequence == 4


# -- no space --------------------------------------------------------------------------------------------
def test_a_full_disk_refuses_and_goes_on_once_there_is_space() -> None:
    out = run_in_mount_namespace("""
        from hetero_agent.store.database import StoreError
        from hetero_agent.store.ledger import SqliteLedger
        from tests.store import samples

        mount("-t", "tmpfs", "-o", "size=3M", "tmpfs", "/mnt")
        path = Path("/mnt/ledger.sqlite")
        ledger = SqliteLedger(path, samples.now)
        ledger.load(samples.now())
        number, filler = 0, Path("/mnt/filler")

        def commit() -> None:
            one = samples.lease(number + 1)
            ledger.commit(samples.changes(samples.audit(number + 1), leases={one.id: one}))

        for _ in range(3):
            for _ in range(10):
                commit()
                number += 1
            fill("/mnt")
            refused = 0
            while refused < 5:
                try:
                    commit()
                    number += 1
                except StoreError as error:
                    assert "full" in str(error), error
                    refused += 1
            ledger.taken(range(1, number + 1))
            filler.unlink()
        commit()
        number += 1
        fill("/mnt")
        # With no space left at all it can still be closed, opened and read.
        ledger.close()
        ledger = SqliteLedger(path, samples.now)
        restored = ledger.load(samples.now())
        print(len(restored.leases) == number, restored.sequence == number, restored.notes)
    """)
    assert out == "True True []\n"


def test_a_start_with_a_full_disk_and_no_file_goes_on_once_there_is_space() -> None:
    out = run_in_mount_namespace("""
        from hetero_agent.store.database import StoreError
        from hetero_agent.store.ledger import SqliteLedger
        from tests.store import samples

        mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt")
        filler = Path(fill("/mnt"))
        ledger = SqliteLedger(Path("/mnt/ledger.sqlite"), samples.now)
        restored = ledger.load(samples.now())
        print(len(restored.notes), "/mnt/ledger.sqlite: cannot be made: " in restored.notes[0])
        try:
            ledger.commit(samples.changes(samples.audit(1)))
        except StoreError as error:
            print("refused")
        filler.unlink()
        mount("-o", "remount,size=1M", "/mnt")
        ledger.commit(samples.changes(samples.audit(1)))
        print([one.sequence for one in ledger.outbox(0, 9)])
    """)
    assert out == "1 True\nrefused\n[1]\n"


def test_a_file_that_cannot_be_opened_now_is_not_replaced(path: Path) -> None:
    filled(path)
    out = run_in_mount_namespace(
        """
        from hetero_agent.store.database import StoreError
        from hetero_agent.store.ledger import SqliteLedger
        from tests.store import samples

        path = Path(sys.argv[1])
        mount("--bind", str(path.parent), str(path.parent))
        mount("-o", "remount,ro,bind", str(path.parent))
        try:
            SqliteLedger(path, samples.now).load(samples.now())
        except StoreError as error:
            print(type(error).__name__, str(path) in str(error))
        """,
        str(path),
    )
    assert out == "StoreError True\n"
    assert opened(path)[1].leases == [samples.lease(1)]
