"""The log worker: reads the kernel's messages, passes on those that fit a rule.

A process of its own, since libsystemd maps the journal's files, and a file that is cut off under it
ends the process that reads it.  What `hetero_agent.workers.child` says of workers; this one is told
once what to do and then speaks by itself:

- in: ``{"rules": [[pattern, [code, ...], good], ...], "source": "auto" | "journal" | "kmsg", "cursor": text,
  "back": seconds, "libraries": directory}``: begin after CURSOR if it is known, else at most BACK
  seconds before now;
- out: ``{"source": name, "doubt": text}`` once it reads, DOUBT saying why nothing may ever come, and
  again without it when something has; ``{"said": [[rule, address, name, code, line, device, age,
  repeated], ...], "cursor": text}`` for messages that fit, DEVICE being the kernel's own word for whom
  it is about, AGE in seconds; ``{"lost": count}`` after messages were overwritten unread;
  ``{"problem": text}`` if nothing can be read, before it ends.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time

from hetero_agent.health import messages
from hetero_agent.workers import child

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

KMSG = "/dev/kmsg"
_RECORD_MAX = 8192
#: Messages read before what fits is passed on; and the rest in seconds after so many in a row, so that
#: a flood costs a quarter of a processor at most.
_BATCH = 256
_REST = 0.03


class Kmsg:
    """/dev/kmsg (Documentation/ABI/testing/dev-kmsg)."""

    name = "kmsg"

    def __init__(self, cursor: str, back: float) -> None:
        self._fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._back = back
        self._after = int(cursor.removeprefix("kmsg:")) if cursor.startswith("kmsg:") else -1
        self._last = self._after
        self.lost = 0

    def fileno(self) -> int:
        return self._fd

    def wait(self) -> float:
        """How long at most to wait for news, in seconds; below 0 for ever."""
        return -1.0

    def read(self) -> Iterator[tuple[str, str, float, str]]:
        """Yield what there is."""
        while True:
            try:
                record = os.read(self._fd, _RECORD_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:
                    # overwritten before it was read; the next one tells how many by its number, if
                    # there was one before
                    self.lost += self._last < 0
                    continue
                if error.errno == errno.EINVAL:
                    self.lost += 1
                    continue
                raise
            if not record:
                return
            parsed = self._parse(record)
            if parsed is not None:
                yield parsed

    def _parse(self, record: bytes) -> tuple[str, str, float, str] | None:
        head, _, rest = record.decode("utf-8", "replace").partition(";")
        fields = head.split(",")
        line, *more = rest.split("\n")
        try:
            number, age = int(fields[1]), time.monotonic() - int(fields[2]) / 1e6
        except (IndexError, ValueError):
            return None
        if self._last >= 0 and number > self._last + 1:
            self.lost += number - self._last - 1
        self._last = number
        if number <= self._after or (self._after < 0 and age > self._back):
            return None
        device = next((one[8:] for one in more if one.startswith(" DEVICE=")), "")
        return line, device, age, f"kmsg:{number}"


class Journal:
    """The kernel's messages in the journal (systemd.journal-fields(7))."""

    name = "journal"

    def __init__(self, cursor: str, back: float) -> None:
        from systemd import journal  # noqa: PLC0415  (a megabyte that kmsg doesn't need)

        self._invalidate = journal.INVALIDATE
        plain = {"MESSAGE": _text, "_KERNEL_DEVICE": _text}
        self._reader = journal.Reader(journal.LOCAL_ONLY | journal.SYSTEM_ONLY, converters=plain)
        self._reader.data_threshold = 4 * messages.LINE_MAX
        self._reader.this_boot()
        self._reader.add_match("_TRANSPORT=kernel")
        self.lost = 0
        self._at = cursor if cursor and not cursor.startswith("kmsg:") else ""
        self._back = back
        self._seek()

    def _seek(self) -> None:
        if self._at:
            self._reader.seek_cursor(self._at)
        else:
            self._reader.seek_monotonic(max(0.0, time.monotonic() - self._back))

    @property
    def has_any(self) -> bool:
        """Whether there is any message of this boot at all."""
        self._reader.seek_head()
        found = bool(self._reader.get_next())
        self._seek()
        return found

    def fileno(self) -> int:
        return int(self._reader.fileno())

    def wait(self) -> float:
        """How long at most to wait for news, in seconds; below 0 for ever."""
        milliseconds = self._reader.get_timeout_ms()
        return milliseconds / 1000 if milliseconds >= 0 else -1.0

    def read(self) -> Iterator[tuple[str, str, float, str]]:
        """Yield what there is."""
        if self._reader.process() == self._invalidate:
            # files came or went: without a new look at the place the reader may stand at the old end
            self._seek()
        while entry := self._reader.get_next():
            cursor = entry["__CURSOR"]
            if cursor == self._at:
                continue
            self._at = cursor
            age = time.monotonic() - entry["__MONOTONIC_TIMESTAMP"].timestamp.total_seconds()
            yield _first(entry.get("MESSAGE", "")), _first(entry.get("_KERNEL_DEVICE", "")), age, cursor


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _first(value: Any) -> str:
    return str(value[0]) if isinstance(value, list) else str(value)


def _open(request: dict[str, Any]) -> tuple[Kmsg | Journal, str]:
    """Open the source that was asked for; returns it and why nothing may ever come from it.
    Raises OSError, ImportError."""
    wanted, cursor, back = request["source"], request["cursor"], request["back"]
    sys.path.append(request["libraries"])
    if wanted == "kmsg":
        return Kmsg(cursor, back), ""
    if wanted == "journal":
        return Journal(cursor, back), ""
    try:
        journal = Journal(cursor, back)
        if journal.has_any:
            return journal, ""
    except (OSError, ImportError):
        journal = None
    try:
        return Kmsg(cursor, back), ""
    except OSError as error:
        if journal is None:
            raise
        return journal, f"the journal has none that may be read here, and {KMSG}: {error.strerror}"


class Reading:
    """Passes on what fits."""

    def __init__(self, channel: child.Channel, request: dict[str, Any]) -> None:
        self._channel = channel
        self._rules = messages.Rules(request["rules"])
        self._throttle = messages.Throttle()
        self._source, self._doubt = _open(request)
        channel.send({"source": self._source.name, "doubt": self._doubt})

    def run(self) -> None:
        """Read until the agent is gone."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._source.fileno(), select.POLLIN | select.POLLPRI)
        while True:
            self._drain()
            wait = self._source.wait()
            for descriptor, _ in poll.poll(None if wait < 0 else wait * 1000 + 1):
                if descriptor == 0:
                    return  # nothing more is said to us: the other end is closed

    def _drain(self) -> None:
        said: list[list[Any]] = []
        cursor, count = "", 0
        for line, device, age, place in self._source.read():
            cursor, count = place, count + 1
            found = self._rules.match(line)
            if found is not None:
                rule, address, name, code = found
                passes, repeated = self._throttle.passes(
                    address or name or device, (rule, code), self._rules.good[rule], time.monotonic()
                )
                if passes:
                    said.append([rule, address, name, code, line[: messages.LINE_MAX], device, age, repeated])
            if count % _BATCH == 0:
                self._tell(said, cursor)
                said = []
                time.sleep(_REST)
        self._tell(said, cursor)
        if self._doubt and count:
            self._doubt = ""
            self._channel.send({"source": self._source.name, "doubt": ""})
        if self._source.lost:
            self._channel.send({"lost": self._source.lost})
            self._source.lost = 0

    def _tell(self, said: list[list[Any]], cursor: str) -> None:
        if said:
            self._channel.send({"said": said, "cursor": cursor})


def _work(channel: child.Channel) -> None:
    request = channel.receive()
    if request is None:
        return
    try:
        Reading(channel, request).run()
    except (OSError, ImportError) as error:
        channel.send({"problem": f"{error.strerror or error}" if isinstance(error, OSError) else f"{error}"})


def main(progress: int) -> None:
    """Serve until the agent is gone."""
    child.run(progress, _work)
