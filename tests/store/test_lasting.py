"""What outlives a reboot: it is on the disk when it says so, and without a disk grants go on."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero_agent.core.effects import Restored
from hetero_agent.core.model import Cordon
from hetero_agent.store import lasting as lasting_module
from hetero_agent.store import lasting_file
from hetero_agent.store.codec import decode
from hetero_agent.store.database import StoreInUse, StoreUnusable
from hetero_agent.store.lasting import SqliteLasting
from hetero_agent.store.lasting_file import BLOCK, HISTORY
from tests.store import samples
from tests.support.namespace import run_in_mount_namespace
from tests.support.wait import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path / "state" / "lasting.sqlite"


@contextmanager
def opened(path: Path, restored: Restored | None = None) -> Iterator[tuple[SqliteLasting, Restored]]:
    lasting = SqliteLasting(path, path.parent.parent / "run")
    restored = restored or Restored()
    lasting.load(restored)
    try:
        yield lasting, restored
    finally:
        lasting.close()
        assert not lasting._thread.is_alive()


def store(lasting: SqliteLasting, device: str, cordon: Cordon | None) -> str:
    """Store a cordon and return the answer."""

    async def ask() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        lasting.store_cordon(device, cordon, answer.set_result)
        return await asyncio.wait_for(answer, 30)

    return asyncio.run(ask())


def sql(path: Path, statement: str, *arguments: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        return connection.execute(statement, arguments).fetchall()
    finally:
        connection.close()


def test_cordons_come_back(path: Path) -> None:
    with opened(path) as (lasting, restored):
        assert restored.cordons == []
        assert restored.notes == []
        assert store(lasting, samples.DEVICE, samples.cordon()) == ""
        assert store(lasting, "other", samples.cordon("other")) == ""
        assert store(lasting, "other", None) == ""
        assert lasting.problem == ""
    with opened(path) as (_, restored):
        assert restored.cordons == [samples.cordon()]


def test_a_cordon_is_on_the_disk_when_it_is_answered(path: Path, tmp_path: Path) -> None:
    with opened(path) as (lasting, _):
        assert store(lasting, samples.DEVICE, samples.cordon()) == ""
        # What a crash now would leave: the file and its journal as they are.
        copy = tmp_path / "copy" / "lasting.sqlite"
        copy.parent.mkdir()
        for side in ("", "-wal"):
            Path(f"{copy}{side}").write_bytes(Path(f"{path}{side}").read_bytes())
    with opened(copy) as (_, restored):
        assert restored.cordons == [samples.cordon()]


def test_counts_and_history_come_back(path: Path) -> None:
    with opened(path) as (lasting, _):
        for sequence in range(1, 31):
            lasting.note(samples.changes(samples.audit(sequence), counts={samples.DEVICE: sequence}))
        lasting.note(samples.changes(samples.audit(31, "b", serial="SN1"), counts={"serial:SN1": 5}))
    with opened(path) as (lasting, restored):
        assert restored.counts == {samples.DEVICE: 30, "serial:SN1": 5}
        assert restored.history == {
            samples.DEVICE: [samples.audit(n) for n in range(11, 31)],
            "serial:SN1": [samples.audit(31, "b", serial="SN1")],
        }
        lasting.note(samples.changes(samples.audit(32)))
    assert HISTORY == 20
    with opened(path) as (_, restored):
        assert restored.history[samples.DEVICE] == [samples.audit(n) for n in (*range(12, 31), 32)]


def test_a_file_that_is_read_slowly_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not lose a cordon: only a disk that says nothing at all is given up."""
    with opened(path) as (lasting, _):
        assert store(lasting, samples.DEVICE, samples.cordon()) == ""
        lasting.note(samples.changes(*map(samples.audit, range(1, HISTORY + 1))))

    def slow(kind: type[Any], text: str) -> Any:
        time.sleep(0.1)
        return decode(kind, text)

    monkeypatch.setattr(lasting_module, "_START_WAIT", 1.2)
    monkeypatch.setattr(lasting_file, "decode", slow)
    with opened(path) as (_, restored):
        assert restored.cordons == [samples.cordon()]
        assert [len(one) for one in restored.history.values()] == [HISTORY]
        assert restored.notes == []


def test_counts_are_written_soon_without_a_close(path: Path) -> None:
    with opened(path) as (lasting, _):
        lasting.note(samples.changes(samples.audit(1), counts={samples.DEVICE: 1}))
        wait_until(lambda: not lasting._batch and lasting._busy_since is None, what="the write")
        lasting.note(samples.changes(samples.audit(2), counts={samples.DEVICE: 2}))
        wait_until(lambda: not lasting._batch and lasting._busy_since is None, what="the second write")


def test_the_number_of_devices_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lasting", "lasting_file"):
        monkeypatch.setattr(f"hetero_agent.store.{module}.DEVICES", 50)
    monkeypatch.setattr("hetero_agent.store.lasting_file._PRUNE_EVERY", 1)
    for life in range(3):
        with opened(path) as (lasting, _):
            for number in range(100):
                name = f"device-{life}-{number:03}"
                lasting.note(samples.changes(samples.audit(life * 100 + number + 1, name), counts={name: 1}))
    with opened(path) as (_, restored):
        newest = {f"device-2-{number:03}" for number in range(50, 100)}
        assert set(restored.counts) == newest
        assert set(restored.history) == newest


# -- ceilings -----------------------------------------------------------------------------------
def test_the_generation_never_comes_twice(path: Path) -> None:
    starts = []
    for _ in range(3):
        with opened(path) as (_, restored):
            starts.append(restored.generation)
    assert starts[0] > samples.now().real - 60_000_000
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == [BLOCK, BLOCK]


def test_the_next_block_is_reserved_before_this_one_is_used_up(path: Path) -> None:
    with opened(path) as (lasting, restored):
        first = restored.generation
        changes = samples.changes(samples.audit(1))
        changes.generation = first + BLOCK // 2 + 1
        lasting.note(changes)
    with opened(path) as (_, restored):
        assert restored.generation == first + BLOCK // 2 + 1 + BLOCK


def test_a_ledger_that_is_ahead_is_believed(path: Path) -> None:
    with opened(path) as (_, restored):
        ahead = restored.generation + 5 * BLOCK
    with opened(path, Restored(generation=ahead, sequence=70)) as (_, restored):
        assert restored.generation == ahead
        assert restored.sequence == 70


def test_a_lost_ledger_continues_above_all_sequences(path: Path) -> None:
    with opened(path) as (lasting, restored):
        assert restored.sequence == 0
        lasting.note(samples.changes(*map(samples.audit, range(1, 100))))
    with opened(path) as (_, restored):
        assert restored.sequence == BLOCK
    with opened(path, Restored(sequence=BLOCK + 7)) as (_, restored):
        assert restored.sequence == BLOCK + 7


def test_a_lost_ceiling_starts_at_the_wall_clock(path: Path) -> None:
    with opened(path) as (_, restored):
        pass
    path.unlink()
    before = samples.now().real
    with opened(path) as (_, restored):
        assert before <= restored.generation <= samples.now().real


# -- files that are not what they should be ---------------------------------------------------------
def test_a_damaged_file_is_set_aside(path: Path) -> None:
    with opened(path) as (lasting, _):
        store(lasting, samples.DEVICE, samples.cordon())
    path.write_bytes(b"")
    with opened(path) as (lasting, restored):
        assert restored.cordons == []
        assert len(restored.notes) == 1
        assert f"{path} was damaged (empty)" in restored.notes[0]
        assert lasting.problem == ""
        assert store(lasting, samples.DEVICE, samples.cordon()) == ""
    with opened(path) as (_, restored):
        assert restored.cordons == [samples.cordon()]
        assert restored.notes == []


def test_a_newer_schema_is_refused_and_not_touched(path: Path) -> None:
    with opened(path):
        pass
    sql(path, "PRAGMA user_version=9")
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match=r"schema 9, this one knows 1"):
        SqliteLasting(path, path.parent).load(Restored())
    assert path.read_bytes() == before


@pytest.mark.parametrize("table", ["cordons", "counts", "history", "ceilings"])
def test_a_bad_row_alone_is_dropped(path: Path, table: str) -> None:
    with opened(path) as (lasting, _):
        store(lasting, samples.DEVICE, samples.cordon())
        lasting.note(samples.changes(samples.audit(1), counts={samples.DEVICE: 1}))
    sql(path, f"UPDATE {table} SET sum = sum + 1")
    with opened(path) as (_, restored):
        assert f"{path}: a damaged row of {table} was dropped" in restored.notes[0]
        kept = {
            "cordons": len(restored.cordons),
            "counts": len(restored.counts),
            "history": len(restored.history),
        }
        assert kept == {name: int(name != table) for name in kept}


# -- a disk that can't be used -------------------------------------------------------------------------
def test_a_missing_directory_degrades_and_heals(path: Path) -> None:
    path.parent.rmdir()
    with opened(path) as (lasting, restored):
        assert len(restored.notes) == 1
        assert "grants go on, cordons cannot be stored" in restored.notes[0]
        assert restored.generation > samples.now().real - 60_000_000
        assert "No such file or directory" in lasting.problem
        lasting.note(samples.changes(samples.audit(1), counts={samples.DEVICE: 3}))
        assert "No such file or directory" in store(lasting, samples.DEVICE, samples.cordon())
        path.parent.mkdir()
        assert store(lasting, samples.DEVICE, samples.cordon()) == ""
        assert lasting.problem == ""
    with opened(path) as (_, again):
        assert again.cordons == [samples.cordon()]
        assert again.counts == {samples.DEVICE: 3}
        assert again.generation == restored.generation + BLOCK


def test_a_file_removed_under_it_is_made_again_with_its_cordons(path: Path) -> None:
    with opened(path) as (lasting, _):
        assert store(lasting, "a", samples.cordon("a")) == ""
        for left in path.parent.iterdir():
            left.unlink()
        assert store(lasting, "b", samples.cordon("b")) == ""
    with opened(path) as (_, restored):
        assert restored.cordons == [samples.cordon("a"), samples.cordon("b")]


def test_a_full_disk_refuses_only_the_cordon_and_heals() -> None:
    out = run_in_mount_namespace("""
        from hetero_agent.core.effects import Restored
        from tests.store import samples
        from tests.store.test_lasting import opened, store

        mount("-t", "tmpfs", "-o", "size=1M", "tmpfs", "/mnt")
        for name in ("state", "run"):
            Path(f"/mnt/{name}").mkdir()
        path = Path("/mnt/state/lasting.sqlite")
        with opened(path) as (lasting, _):
            assert store(lasting, "a", samples.cordon("a")) == ""
            filler = fill("/mnt")
            answers = [store(lasting, f"b{n}", samples.cordon("b", "x" * 2000)) for n in range(5)]
            print("full" in answers[-1], answers[-1] == lasting.problem)
            lasting.note(samples.changes(samples.audit(1), counts={"a": 1}))
            Path(filler).unlink()
            print(store(lasting, "c", samples.cordon("c")) == "", lasting.problem == "")
        with opened(path) as (_, restored):
            names = {one.device for one in restored.cordons}
            print({"a", "c"} <= names, restored.counts, restored.notes)
    """)
    assert out == "True True\nTrue True\nTrue {'a': 1} []\n"


def test_a_read_only_disk_still_gives_its_cordons() -> None:
    out = run_in_mount_namespace("""
        import shutil
        from tests.store import samples
        from tests.store.test_lasting import opened, store

        mount("-t", "tmpfs", "tmpfs", "/mnt")
        for name in ("state", "run"):
            Path(f"/mnt/{name}").mkdir()
        mount("-t", "tmpfs", "tmpfs", "/mnt/state")
        path = Path("/mnt/state/lasting.sqlite")
        with opened(path) as (lasting, first):
            assert store(lasting, "a", samples.cordon("a")) == ""
            # as a crash leaves it: with a journal that must be replayed
            for side in ("", "-wal"):
                shutil.copy(f"{path}{side}", f"/mnt/run/copy{side}")
        for side in ("", "-wal"):
            shutil.copy(f"/mnt/run/copy{side}", f"{path}{side}")
            Path(f"/mnt/run/copy{side}").unlink()
        mount("-o", "remount,ro", "/mnt/state")
        with opened(path) as (lasting, restored):
            print([one.device for one in restored.cordons], len(restored.notes), lasting.problem != "")
            print(restored.generation > first.generation + 10**5)
            print(store(lasting, "b", samples.cordon("b")) == lasting.problem != "")
            mount("-o", "remount,rw", "/mnt/state")
            print(store(lasting, "b", samples.cordon("b")) == "", lasting.problem == "")
        with opened(path) as (_, restored):
            print([one.device for one in restored.cordons], restored.notes)
        print(list(Path("/mnt/run").iterdir()))
    """)
    assert out == "['a'] 1 True\nTrue\nTrue\nTrue True\n['a', 'b'] []\n[]\n"


def test_a_disk_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A frozen file system (fsfreeze(8)): every write to it waits until it is thawed."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    out = run_in_mount_namespace(
        """
        import asyncio
        import subprocess
        from hetero_agent.store import lasting as module
        from tests.store import samples
        from tests.store.test_lasting import opened, store
        from tests.support.wait import wait_until

        module._CORDON_WAIT = 0.3
        mount("-o", "loop", sys.argv[1], "/mnt")
        for name in ("state", "run"):
            Path(f"/mnt/{name}").mkdir()
        path = Path("/mnt/state/lasting.sqlite")

        async def ask(lasting, thaw):
            answer = asyncio.get_running_loop().create_future()
            lasting.store_cordon("a", samples.cordon("a", "late"), answer.set_result)
            print("did not answer within" in await asyncio.wait_for(answer, 30))
            lasting.note(samples.changes(samples.audit(1)))
            thaw()
            # what was refused for being late is taken back: wait for both writes
            while lasting._orders or lasting._busy_since is not None or not late_came.is_set():
                await asyncio.sleep(0.01)

        with opened(path) as (lasting, _):
            assert store(lasting, "a", samples.cordon("a", "first")) == ""
            late_came = asyncio.Event()
            put = lasting._file.put_cordon
            words = []

            def seen(device, cordon):
                before = put(device, cordon)
                words.append(cordon.reason)
                if len(words) == 2:
                    late_came.set()
                return before

            lasting._file.put_cordon = seen
            subprocess.run(["fsfreeze", "-f", "/mnt"], check=True)
            try:
                asyncio.run(ask(lasting, lambda: subprocess.run(["fsfreeze", "-u", "/mnt"], check=True)))
            except BaseException:
                subprocess.run(["fsfreeze", "-u", "/mnt"])
                raise
            print(words)
        with opened(path) as (_, restored):
            print([one.reason for one in restored.cordons], restored.notes)
        subprocess.run(["umount", "/mnt"], check=True)
        """,
        str(image),
    )
    assert out == "True\n['late', 'first']\n['first'] []\n"


def test_a_late_cordon_does_not_undo_a_later_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is refused since the disk hangs; the second, asked for meanwhile, is answered and stands."""
    monkeypatch.setattr(lasting_module, "_CORDON_WAIT", 0.2)
    thawed = threading.Event()

    async def ask(lasting: SqliteLasting) -> None:
        def order(cordon: Cordon | None) -> asyncio.Future[str]:
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            lasting.store_cordon("a", cordon, answer.set_result)
            return answer

        first = order(samples.cordon("a", "first"))
        assert "did not answer" in await first
        queued = order(samples.cordon("a", "queued"))
        assert "did not answer" in await queued
        monkeypatch.setattr(lasting_module, "_CORDON_WAIT", 30)
        second = order(samples.cordon("a", "second"))
        thawed.set()
        assert await second == ""

    with opened(path) as (lasting, _):
        put = lasting._file.put_cordon
        written = []

        def slow(device: str, cordon: Cordon | None) -> Cordon | None:
            assert thawed.wait(30)
            written.append(cordon.reason if cordon else "")
            return put(device, cordon)

        monkeypatch.setattr(lasting._file, "put_cordon", slow)
        asyncio.run(ask(lasting))
    assert written == ["first", "", "second"]
    with opened(path) as (_, restored):
        assert [one.reason for one in restored.cordons] == ["second"]


def test_a_file_in_use_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_agent.store.database._LOCK_WAIT", 0.1)
    with opened(path), pytest.raises(StoreInUse, match="another process has it open"):
        SqliteLasting(path, path.parent).load(Restored())
