"""The outbox writer against a real journald, a journald that does not drain, and none."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from hetero_agent.audit import journal
from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.audit.journal import JournalWriter, choose
from hetero_agent.core.model import AuditKind, AuditRecord
from tests.audit.samples import DEVICE, LEASE, MemoryOutbox, audit
from tests.support.namespace import run_in_mount_namespace
from tests.support.process import PYTHON, ROOT
from tests.support.wait import wait_until_async

PRELUDE = """
import asyncio
import time
from hetero_agent.audit.journal import JournalWriter
from hetero_agent.core.model import AuditKind, AuditRecord
from tests.audit.samples import MemoryOutbox, audit
from tests.support.journal import journald
from tests.support.wait import wait_until, wait_until_async
"""


def in_namespace(script: str, *arguments: str) -> str:
    import textwrap

    return run_in_mount_namespace(PRELUDE + textwrap.dedent(script), *arguments)


def test_every_kind_arrives_with_its_fields_in_order() -> None:
    out = in_namespace("""
        async def write(box):
            writer = JournalWriter(box)
            assert writer.sink == "journal"
            writer.start()
            await wait_until_async(lambda: not box.rows, what="an empty outbox")
            box.put(*(audit(n) for n in range(101, 1001)))
            writer.wake()
            await writer.stop(20)

        with journald() as running:
            box = MemoryOutbox(*(audit(n, kind, priority=4) for n, kind in enumerate(AuditKind, 1)))
            asyncio.run(write(box))
            assert not box.rows
            found = running.entries("SYSLOG_IDENTIFIER=hetero-agent")
            print([one["HETERO_SEQUENCE"] for one in found])
            print({one["HETERO_KIND"]: one["MESSAGE_ID"] for one in found})
            one = running.entries("HETERO_SEQUENCE=1")[0]
            print({name: value for name, value in one.items() if not name.startswith("_")})
    """)
    sequences, kinds, fields = map(ast.literal_eval, out.splitlines())
    assert sequences == [str(n) for n in (*range(1, len(AuditKind) + 1), *range(101, 1001))]
    assert kinds == {str(kind): one for kind, one in MESSAGE_IDS.items()}
    assert fields == {
        "MESSAGE": f"{DEVICE}: idle -> allocating",
        "MESSAGE_ID": MESSAGE_IDS[AuditKind.TRANSITION],
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "hetero-agent",
        "HETERO_KIND": "transition",
        "HETERO_SEQUENCE": "1",
        "HETERO_GENERATION": "10",
        "HETERO_TIME_REALTIME": "1700000000000000",
        "HETERO_TIME_BOOTTIME": "5000000",
        "HETERO_TOOK_USEC": "1234",
        "HETERO_ACTOR_UID": "1000",
        "HETERO_ACTOR_PID": "77",
        "HETERO_ACTOR_UNIT": "user@1000.service",
        "HETERO_ACTOR_BUS_NAME": ":1.7",
        "HETERO_ACTOR_CLIENT": "slurm",
        "HETERO_ACTOR_AUTHORITY": "a.polkit.action",
        "HETERO_DEVICE": DEVICE,
        "HETERO_SERIAL": "SN1",
        "HETERO_LEASE": LEASE,
        "HETERO_FROM": "idle",
        "HETERO_TO": "allocating",
        "HETERO_TRIGGER": "granted",
        "HETERO_REASON": "because",
        "HETERO_RESULT": "",
        "HETERO_REQUEST_ID": "request 1",
    }


def test_an_entry_is_what_the_library_would_make_of_it() -> None:
    """systemd.journal.send as the reference for our own use of journald's protocol."""
    out = in_namespace("""
        from systemd import journal
        from hetero_agent.audit.journald import JournalSocket

        fields = {"MESSAGE": "two\\nlines", "PRIORITY": "4", "HETERO_REASON": "", "HETERO_X": "\u00fc = 1"}
        with journald() as running:
            ours = JournalSocket()
            ours.send({**fields, "HETERO_WHO": "us", "CODE_FUNC": "f", "SYSLOG_IDENTIFIER": "x"})
            journal.send(**fields, HETERO_WHO="library", CODE_FUNC="f", SYSLOG_IDENTIFIER="x")
            one, other = running.entries("SYSLOG_IDENTIFIER=x")
            print(one.pop("HETERO_WHO"), other.pop("HETERO_WHO"))
            print(set(one) == set(other), all(one[name] == value for name, value in fields.items()))
            times = {name for name in one if "TIMESTAMP" in name or name == "__CURSOR"}
            print([name for name in set(one) - times if one[name] != other[name]])
    """)
    assert out == "us library\nTrue True\n[]\n"


def test_journalctl_explains_a_line() -> None:
    out = in_namespace("""
        import subprocess

        async def write(box):
            writer = JournalWriter(box)
            writer.start()
            await writer.stop(20)

        with journald() as running:
            catalog = Path("/run/root/usr/lib/systemd/catalog")
            catalog.mkdir(parents=True)
            text = Path("systemd/hetero-agent.catalog").read_text()
            (catalog / "hetero-agent.catalog").write_text(text)
            database = Path("/run/root/var/lib/systemd/catalog")
            database.mkdir(parents=True)
            subprocess.run(["journalctl", "--update-catalog", "--root=/run/root"], check=True)
            mount("--bind", str(database), "/var/lib/systemd/catalog")
            kinds = (AuditKind.TRANSITION, AuditKind.ORPHAN)
            asyncio.run(write(MemoryOutbox(*(audit(n, kind) for n, kind in enumerate(kinds, 1)))))
            running.entries()
            print(running.explained("SYSLOG_IDENTIFIER=hetero-agent"))
    """)
    assert f"Device {DEVICE} went from idle to allocating" in out
    assert f"Trigger: granted. Reason: because. Lease: {LEASE}." in out
    assert f'root can end them with "heteroctl reap {DEVICE}"' in out
    assert "@HETERO_" not in out


def test_a_journald_that_comes_back_gets_what_it_missed() -> None:
    out = in_namespace("""
        async def write(box, running):
            writer = JournalWriter(box, "journal")
            writer.start()
            await wait_until_async(lambda: writer.problem, what="the problem")
            print(writer.problem.partition(";")[0], len(box.rows))
            running.start()
            await wait_until_async(lambda: not box.rows, what="an empty outbox")
            print(writer.problem == "")
            running.stop()
            box.put(audit(3))
            writer.wake()
            await wait_until_async(lambda: writer.problem, what="the problem")
            running.start()
            await wait_until_async(lambda: not box.rows, what="an empty outbox")
            await writer.stop(1)

        with journald(start=False) as running:
            asyncio.run(write(MemoryOutbox(audit(1), audit(2)), running))
            print([one["HETERO_SEQUENCE"] for one in running.entries("SYSLOG_IDENTIFIER=hetero-agent")])
    """)
    assert out.splitlines() == [
        "audit: journald does not listen at /run/systemd/journal/socket: No such file or directory 2",
        "True",
        "['1', '2', '3']",
    ]


def test_a_journald_that_does_not_drain_blocks_nobody() -> None:
    out = in_namespace("""
        import os
        import socket
        from hetero_agent.audit import journal
        from tests.support.timing import Stalls

        journal._LATE = 0.3

        def sink_of(sink):
            sink.setblocking(False)
            found = []
            try:
                while True:
                    found.append(sink.recv(65536))
            except BlockingIOError:
                return found

        async def write(box, sink):
            writer = JournalWriter(box)
            writer.start()
            async with Stalls() as stalls:
                await wait_until_async(lambda: writer.problem, what="the problem")
            # The loop went on all the time, and the rest waits in the outbox.
            print(stalls.longest < 0.25, len(box.rows) > 0)
            print(writer.problem.partition(";")[0])
            before = time.monotonic()
            await writer.stop(0.5)
            print(0.4 < time.monotonic() - before < 10, 0 < len(box.rows) < 2000)
            # What the socket took is not sent again: the outbox starts with the first that it did not.
            print(min(box.rows) == len(sink_of(sink)) + 1)

        mount("-t", "tmpfs", "tmpfs", "/run")
        Path("/run/systemd/journal").mkdir(parents=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sink:
            sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sink.bind("/run/systemd/journal/socket")
            asyncio.run(write(MemoryOutbox(*(audit(n) for n in range(1, 2001))), sink))
            print("done", flush=True)
    """)
    assert out.splitlines() == [
        "True True",
        "audit: journald does not drain its socket",
        "True True",
        "True",
        "done",
    ]


def test_records_sent_before_a_crash_are_sent_again_under_their_numbers() -> None:
    """The process is killed after the journal took the records and before the ledger forgot them."""
    out = in_namespace("""
        import os
        import subprocess
        from hetero_agent.store.ledger import SqliteLedger
        from tests.store import samples

        child = '''
        import asyncio, os, signal
        from pathlib import Path
        from hetero_agent.audit.journal import JournalWriter
        from hetero_agent.store.ledger import SqliteLedger
        from tests.store import samples

        ledger = SqliteLedger(Path("/run/ledger.sqlite"), samples.now)
        ledger.load(samples.now())
        ledger.commit(samples.changes(*map(samples.audit, range(1, 6))))
        ledger.taken = lambda sequences: os.kill(os.getpid(), signal.SIGKILL)

        async def write():
            JournalWriter(ledger).start()
            await asyncio.sleep(60)

        asyncio.run(write())
        '''
        import textwrap

        async def write(ledger):
            writer = JournalWriter(ledger)
            writer.start()
            await writer.stop(20)

        with journald() as running:
            done = subprocess.run([sys.executable, "-c", textwrap.dedent(child)])
            assert done.returncode == -9, done
            ledger = SqliteLedger(Path("/run/ledger.sqlite"), samples.now)
            print(ledger.load(samples.now()).sequence, ledger.backlog)
            ledger.commit(samples.changes(samples.audit(6)))
            asyncio.run(write(ledger))
            print(ledger.backlog)
            print([one["HETERO_SEQUENCE"] for one in running.entries("SYSLOG_IDENTIFIER=hetero-agent")])
    """)
    assert out.splitlines() == ["5 5", "0", str([str(n) for n in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6)])]


class Swallow:
    """A sink that takes everything."""

    def write(self, record: AuditRecord, stop: threading.Event) -> None:
        return


# -- standard error, and the loop's side -----------------------------------------------------------
def test_on_standard_error_each_record_is_a_line_of_json() -> None:
    script = """
import asyncio
from hetero_agent.audit.journal import JournalWriter
from tests.audit.samples import MemoryOutbox, audit

async def write():
    writer = JournalWriter(MemoryOutbox(audit(1), audit(2)), "stderr")
    writer.start()
    await writer.stop(10)

asyncio.run(write())
"""
    done = subprocess.run(
        [PYTHON, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["HETERO_SEQUENCE"] for line in lines] == ["1", "2"]
    assert lines[0]["HETERO_DEVICE"] == DEVICE


def test_auto_is_the_journal_where_its_socket_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "JOURNAL_SOCKET", str(tmp_path / "socket"))
    assert choose("auto") == "stderr"
    monkeypatch.setattr(journal, "JOURNAL_SOCKET", "/dev/null")
    assert choose("auto") == "journal"
    assert choose("stderr") == "stderr"
    with pytest.raises(KeyError):
        JournalWriter(MemoryOutbox(), "syslog")


def test_a_burst_is_one_read_and_only_a_page_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(journal.SINKS, "stderr", Swallow)

    async def run() -> None:
        box = MemoryOutbox()
        writer = JournalWriter(box, "stderr")
        writer.start()
        await wait_until_async(lambda: box.pulls, what="the look for what an earlier life left")
        pulls = box.pulls
        for sequence in range(1, 101):
            box.put(audit(sequence))
            writer.wake()
        await wait_until_async(lambda: not box.rows, what="an empty outbox")
        assert box.pulls == pulls + 1
        box.put(*map(audit, range(101, 701)))
        writer.wake()
        await wait_until_async(lambda: not box.rows, what="an empty outbox")
        # 600 records are three pages, and a look that finds nothing more is not made.
        assert box.pulls == pulls + 4
        assert writer.stuck_for == 0
        assert writer.problem == ""
        await writer.stop(1)

    asyncio.run(run())


def test_an_outbox_that_cannot_be_read_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(journal.SINKS, "stderr", Swallow)
    monkeypatch.setattr(journal, "_RETRY", 0.02)

    async def run() -> None:
        box = MemoryOutbox(audit(1))
        box.broken = "disk I/O error"
        writer = JournalWriter(box, "stderr")
        writer.start()
        await wait_until_async(lambda: writer.problem, what="the problem")
        assert writer.problem.startswith("audit: disk I/O error; 1 records wait in the ledger")
        box.broken = ""
        await wait_until_async(lambda: not box.rows, what="an empty outbox")
        assert writer.problem == ""
        await writer.stop(1)

    asyncio.run(run())


def test_a_full_pipe_on_standard_error_blocks_only_the_thread() -> None:
    """Nobody reads the pipe: the process must still stop within its bound."""
    script = """
import asyncio
from hetero_agent.audit.journal import JournalWriter
from hetero_agent.audit.loghandler import install
from tests.audit.samples import MemoryOutbox, audit

async def write():
    install()
    writer = JournalWriter(MemoryOutbox(*(audit(n) for n in range(1, 2000))), "stderr")
    writer.start()
    await writer.stop(0.5)

asyncio.run(write())
print("done", flush=True)
"""
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [PYTHON, "-c", script],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=write,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": "."},
        )
        assert done.stdout == b"done\n"
    finally:
        os.close(read)
        os.close(write)
