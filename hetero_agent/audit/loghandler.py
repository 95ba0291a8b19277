"""The daemon's own log: to the journal, or to standard error with sd-daemon(3)'s level prefixes.

The handler formats and queues; a thread writes.  When the writer is stuck, messages beyond the
queue are dropped and counted, and the count is written once it moves again.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import traceback
from typing import Final

from hetero_agent.audit.fields import IDENTIFIER
from hetero_agent.audit.journald import JournalSocket
from hetero_agent.text import printable

#: Between logging's INFO and WARNING, as syslog has it.
NOTICE: Final = 25

#: The names that LogControl1 and log-level use (org.freedesktop.LogControl1(5)) -> logging's level.
LEVELS: Final = {
    "emerg": logging.CRITICAL + 20,
    "alert": logging.CRITICAL + 10,
    "crit": logging.CRITICAL,
    "err": logging.ERROR,
    "warning": logging.WARNING,
    "notice": NOTICE,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}

#: Least level -> syslog priority, the highest first.
_PRIORITIES: Final = tuple((level, priority) for priority, level in enumerate(LEVELS.values()))

#: What LogTarget may be.
TARGETS: Final = ("auto", "journal", "console")

_QUEUE: Final = 1000
_MESSAGE_LIMIT: Final = 2048
_TRACE_LINES: Final = 40
_POLL: Final = 0.2


def priority_of(level: int) -> int:
    """Return the syslog priority (0 emerg to 7 debug) of a logging level."""
    return next((priority for least, priority in _PRIORITIES if level >= least), 7)


def stderr_is_the_journal() -> bool:
    """Tell whether standard error is connected to journald (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        facts = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM", "") == f"{facts.st_dev}:{facts.st_ino}"


class LogHandler(logging.Handler):
    """The root handler; `install` makes one."""

    def __init__(self, target: str = "auto") -> None:
        super().__init__()
        self._queue: queue.Queue[tuple[int, str, str] | None] = queue.Queue(_QUEUE)
        self._dropped = 0
        self._journal = JournalSocket()
        self._target = "console"
        self._prefix = not sys.stderr.isatty()
        self.set_target(target)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many messages were dropped since the last one that was written."""
        return self._dropped

    @property
    def target(self) -> str:
        """``journal`` or ``console`` (standard error)."""
        return self._target

    def set_target(self, name: str) -> None:
        """Write to ``journal`` or ``console``; ``auto`` is the journal where standard error goes
        there anyway.  Raises ValueError."""
        if name not in TARGETS:
            raise ValueError(f"the log goes to one of {', '.join(TARGETS)}, not {printable(name)}")
        if name == "auto":
            name = "journal" if stderr_is_the_journal() else "console"
        self._target = name

    def emit(self, record: logging.LogRecord) -> None:
        """Queue it, or count it as dropped."""
        try:
            text = printable(record.getMessage(), _MESSAGE_LIMIT)
        except Exception as error:
            text = f"unprintable message {printable(record.msg)}: {printable(error)}"
        if record.exc_info and record.exc_info[0] is not None:
            lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            text = "\n".join([text, *(printable(line) for line in lines[-_TRACE_LINES:])])
        try:
            self._queue.put_nowait((priority_of(record.levelno), record.name, text))
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is queued, for a second at most."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass
        else:
            self._thread.join(1.0)
        super().close()

    # -- the thread ------------------------------------------------------------------------------
    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._write(*item)
            dropped, self._dropped = self._dropped, 0
            if dropped:
                self._write(4, __name__, f"{dropped} log messages were dropped: the log was too slow")

    def _write(self, priority: int, name: str, text: str) -> None:
        fields = {"MESSAGE": text, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": IDENTIFIER, "LOGGER": name}
        while self._target == "journal":
            try:
                self._journal.send(fields)
                return
            except BlockingIOError:
                self._journal.wait(_POLL)
            except OSError:
                break  # no journald: standard error is better than nothing
        prefix = f"<{priority}>" if self._prefix else ""
        data = "".join(f"{prefix}{line}\n" for line in text.split("\n")).encode("utf-8", "backslashreplace")
        try:
            while data:
                data = data[os.write(2, data) :]
        except OSError:
            self._dropped += 1


def install(level: str = "info", target: str = "auto") -> LogHandler:
    """Make the handler the only one of the root logger, at LEVEL.  Raises ValueError."""
    logging.addLevelName(NOTICE, "NOTICE")
    handler = LogHandler(target)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(level)
    return handler


def set_level(name: str) -> None:
    """Set the least level that is logged, by its syslog name.  Raises ValueError."""
    if name not in LEVELS:
        raise ValueError(f"the log level is one of {', '.join(LEVELS)}, not {printable(name)}")
    logging.getLogger().setLevel(LEVELS[name])


def level_name() -> str:
    """Return the name of the level that `set_level` set."""
    level = logging.getLogger().level
    return next((name for name, least in LEVELS.items() if level >= least), "debug")
