"""The daemon's own log: where it goes, at which level, and that it never blocks."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from hetero_agent.audit import loghandler
from hetero_agent.audit.loghandler import LEVELS, LogHandler, install, level_name, priority_of, set_level
from tests.support.namespace import run_in_mount_namespace
from tests.support.process import PYTHON, ROOT


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for one in list(root.handlers):
        if one not in handlers:
            root.removeHandler(one)
            one.close()
    for one in handlers:
        if one not in root.handlers:
            root.addHandler(one)


def logged(script: str, stderr: int = subprocess.PIPE) -> str:
    """What SCRIPT, with a handler installed, writes to standard error."""
    prelude = "import logging\nfrom hetero_agent.audit.loghandler import *\nlog = logging.getLogger('x')\n"
    done = subprocess.run(
        [PYTHON, "-c", prelude + textwrap.dedent(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stderr or ""


def test_lines_have_sd_daemons_prefixes() -> None:
    out = logged("""
        handler = install("debug")
        for level in (logging.DEBUG, logging.INFO, NOTICE, logging.WARNING, logging.ERROR, logging.CRITICAL):
            log.log(level, "at %d", level)
        handler.close()
    """)
    assert out.splitlines() == ["<7>at 10", "<6>at 20", "<5>at 25", "<4>at 30", "<3>at 40", "<2>at 50"]


def test_a_message_is_one_line_and_a_trace_has_printable_ones() -> None:
    out = logged(r"""
        handler = install()
        log.warning("evil %s", "a\nb\x1b[2J")
        log.warning("wrong %d", "format")
        try:
            raise ValueError("c\x1b[0m")
        except ValueError:
            log.exception("failed")
        handler.close()
    """)
    lines = out.splitlines()
    assert lines[0] == "<4>evil a\\x0ab\\x1b[2J"
    assert lines[1].startswith("<4>unprintable message wrong %d: ")
    assert lines[2:4] == ["<3>failed", "<3>Traceback (most recent call last):"]
    assert lines[-1] == "<3>ValueError: c\\x1b[0m"


@pytest.mark.parametrize("name", LEVELS)
def test_every_level_has_a_name_and_a_priority(name: str) -> None:
    set_level(name)
    assert level_name() == name
    assert priority_of(LEVELS[name]) == list(LEVELS).index(name)


def test_a_level_that_is_none_is_refused() -> None:
    set_level("info")
    with pytest.raises(ValueError, match=r"one of emerg, alert, .* debug, not loud\\x0a"):
        set_level("loud\n")
    assert level_name() == "info"


def test_below_the_level_nothing_is_written() -> None:
    out = logged("""
        handler = install("warning")
        log.info("hidden")
        log.warning("shown")
        set_level("debug")
        log.debug("now shown")
        handler.close()
    """)
    assert out == "<4>shown\n<7>now shown\n"


def _fill(pipe: int) -> None:
    """Fill a pipe before anything is logged: a message that got out would begin the count anew."""
    os.set_blocking(pipe, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"x" * size)
    os.set_blocking(pipe, True)


def test_a_reader_that_does_not_read_costs_messages_and_no_time() -> None:
    """The pipe is full: the program goes on, and counts what it dropped."""
    read, write = os.pipe()
    try:
        _fill(write)
        out = subprocess.run(
            [
                PYTHON,
                "-c",
                "import logging\nfrom hetero_agent.audit.loghandler import *\nhandler = install()\n"
                "for n in range(20000): logging.getLogger('x').warning('%d %s', n, 'y' * 100)\n"
                "print(handler.dropped)\n",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=write,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ).stdout
        # a thousand wait in the queue, and one is being written
        assert 18_999 <= int(out) <= 19_000
    finally:
        os.close(read)
        os.close(write)


def test_what_was_dropped_is_said_once_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loghandler, "_QUEUE", 3)
    read, write = os.pipe()
    saved = os.dup(2)
    os.dup2(write, 2)
    _fill(write)
    try:
        handler = LogHandler("console")
        record = logging.LogRecord("x", logging.INFO, "", 0, "y" * 2000, None, None)
        for _ in range(100):
            handler.emit(record)
        dropped = handler.dropped
        assert dropped in (96, 97)  # three wait in the queue, and one is being written
        text = b""
        while b"were dropped" not in text:
            text += os.read(read, 65536)
        handler.close()
    finally:
        os.dup2(saved, 2)
        for descriptor in (saved, read, write):
            os.close(descriptor)
    assert f"<4>{dropped} log messages were dropped: the log was too slow\n".encode() in text


def test_with_the_journal_behind_standard_error_it_speaks_to_the_journal() -> None:
    out = run_in_mount_namespace("""
        import os
        import subprocess
        from tests.support.journal import journald

        script = '''
        import logging, os
        facts = os.fstat(2)
        os.environ["JOURNAL_STREAM"] = f"{facts.st_dev}:{facts.st_ino}"
        from hetero_agent.audit.loghandler import install
        handler = install()
        logging.getLogger("hetero_agent.x").warning("to the %s", "journal")
        try:
            1 / 0
        except ZeroDivisionError:
            logging.getLogger("hetero_agent.x").exception("two lines")
        handler.close()
        print(handler.target)
        '''
        import textwrap
        with journald() as running:
            command = [sys.executable, "-c", textwrap.dedent(script)]
            done = subprocess.run(command, capture_output=True, text=True)
            print(done.stdout.strip(), done.returncode, repr(done.stderr))
            found = running.entries("SYSLOG_IDENTIFIER=hetero-agent")
            print([(one["PRIORITY"], one["LOGGER"], one["MESSAGE"].splitlines()[0]) for one in found])
            print(found[1]["MESSAGE"].splitlines()[-1])
    """)
    assert out.splitlines() == [
        "journal 0 ''",
        "[('4', 'hetero_agent.x', 'to the journal'), ('3', 'hetero_agent.x', 'two lines')]",
        "ZeroDivisionError: division by zero",
    ]


def test_targets() -> None:
    handler = LogHandler("auto")
    try:
        assert handler.target == "console"
        handler.set_target("journal")
        assert handler.target == "journal"
        with pytest.raises(ValueError, match="auto, journal, console, not kmsg"):
            handler.set_target("kmsg")
        assert handler.target == "journal"
    finally:
        handler.close()


def test_install_replaces_what_was_there() -> None:
    before = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(before)
    handler = install("notice", "console")
    assert logging.getLogger().handlers == [handler]
    assert level_name() == "notice"
