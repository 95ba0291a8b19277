"""What the agent tells systemd: sd_notify(3) through a safe wrapper, and the watchdog.

The library behind it encodes latin-1, swallows errors and blocks on a full socket; so only
printable ASCII is sent, on a non-blocking socket, and what could not be sent is counted.  The
states that systemd waits for (READY, RELOADING, STOPPING) are tried again until they are through;
of the others only the newest STATUS is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import sdnotify

from hetero_agent.text import printable

_log = logging.getLogger("hetero_agent.supervision")

_STATUS_LIMIT: Final = 256
_RETRY: Final = 0.1
#: States waiting to be sent; more than a reload or two never wait.
_WAITING: Final = 8

#: Missed answers to our own ping on the bus after which the watchdog is starved (design section 8).
MISSED: Final = 3


class Notifier:
    """The notification socket of this service; without $NOTIFY_SOCKET all calls do nothing."""

    def __init__(self) -> None:
        self.enabled = bool(os.environ.get("NOTIFY_SOCKET"))
        self.dropped = 0
        self._library: sdnotify.SystemdNotifier | None = None
        self._waiting: list[str] = []
        self._status = ""
        self._status_waits = False
        self._timer: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """Startup, or the reload, is done."""
        self._must("READY=1")

    def reloading(self) -> None:
        """The configuration is being read again; `ready` ends it."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._must(f"RELOADING=1\nMONOTONIC_USEC={now}")

    def stopping(self) -> None:
        """The agent is on its way out."""
        self._must("STOPPING=1")

    def status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows; the same text is not sent twice."""
        shown = printable(text, _STATUS_LIMIT).encode("ascii", "backslashreplace").decode()[:_STATUS_LIMIT]
        if shown == self._status:
            return
        self._status = shown
        self._status_waits = True
        self._flush()

    def watchdog(self) -> None:
        """Feed the watchdog; a feed that gets lost is followed by the next one."""
        if not self._send("WATCHDOG=1"):
            self.dropped += self.enabled

    def close(self) -> None:
        """Close the socket."""
        if self._timer is not None:
            self._timer.cancel()
        self._forget()

    def _must(self, state: str) -> None:
        if not self.enabled:
            return
        self._waiting.append(state)
        if len(self._waiting) > _WAITING:
            self._waiting.pop(0)
            self.dropped += 1
        self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._send(self._waiting[0]):
            self._waiting.pop(0)
        if not self._waiting and self._status_waits and self._send(f"STATUS={self._status}"):
            self._status_waits = False
        if self.enabled and (self._waiting or self._status_waits):
            try:
                self._timer = asyncio.get_running_loop().call_later(_RETRY, self._flush)
            except RuntimeError:  # no loop: the next call tries again
                return

    def _send(self, state: str) -> bool:
        if not self.enabled:
            return False
        try:
            if self._library is None:
                # debug: it raises instead of swallowing
                self._library = sdnotify.SystemdNotifier(debug=True)
                self._library.socket.setblocking(False)
            self._library.notify(state)
        except BlockingIOError:
            return False
        except (OSError, UnicodeError, TypeError, AttributeError, IndexError):
            # A new socket next time: systemd may have been started anew.
            self._forget()
            return False
        return True

    def _forget(self) -> None:
        if self._library is not None and self._library.socket is not None:
            self._library.socket.close()
        self._library = None


class Reloads:
    """Has the configuration read again when that is asked for, and tells systemd of it.

    READ does it; it is asked for one at a time, and once more if the asking came meanwhile: what was
    read may be older.
    """

    def __init__(self, notifier: Notifier, read: Callable[[], Awaitable[None]]) -> None:
        self._notifier = notifier
        self._read = read
        self._asked = False
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Read again, soon."""
        self._asked = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """Give up what is under way."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._asked:
            self._asked = False
            self._notifier.reloading()
            try:
                await self._read()
            except Exception:
                # systemd waits for the end of it, whatever it was
                _log.exception("reading the configuration again failed")
            self._notifier.ready()


def interval_from_env(environ: Mapping[str, str] | None = None) -> float | None:
    """Return systemd's watchdog interval in seconds, None if it does not watch this process
    (sd_watchdog_enabled(3): WATCHDOG_USEC, and WATCHDOG_PID if it is set)."""
    environ = os.environ if environ is None else environ
    try:
        usec = int(environ.get("WATCHDOG_USEC", ""))
        pid = int(environ.get("WATCHDOG_PID", os.getpid()))
    except ValueError:
        return None
    return usec / 1e6 if usec > 0 and pid == os.getpid() else None


class Watchdog:
    """Feeds the watchdog for as long as everything that must move does.

    INTERVAL is systemd's, in seconds.  CHECKS maps a part's name to the time.monotonic() of its
    last progress; it is stuck when that is an INTERVAL ago, so a part with nothing to do must move
    by itself.  BUS_PING asks our own name over the bus and raises or hangs if no answer comes;
    after `MISSED` periods without one, feeding stops too.  That the loop runs is proven by the
    feeding itself.
    """

    def __init__(
        self,
        notifier: Notifier,
        interval: float,
        checks: Mapping[str, Callable[[], float]],
        bus_ping: Callable[[], Awaitable[object]],
    ) -> None:
        self._notifier = notifier
        self._interval = interval
        self._checks = dict(checks)
        self._bus_ping = bus_ping
        self._missed = 0
        self._starving = ""

    @property
    def starving(self) -> str:
        """Why the watchdog is not fed, "" while it is."""
        return self._starving

    async def run(self) -> None:
        """Feed until cancelled, twice per interval at least."""
        period = self._interval / 3
        while True:
            self._turn()
            start = time.monotonic()
            try:
                async with asyncio.timeout(period):
                    await self._bus_ping()
                self._missed = 0
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._missed += 1
                _log.warning("our own bus name did not answer: %s", printable(repr(error)))
            await asyncio.sleep(max(0.0, period - (time.monotonic() - start)))

    def _turn(self) -> None:
        cause = self._cause()
        if cause and cause != self._starving:
            _log.error("the watchdog is not fed any more: %s", cause)
            self._notifier.status(f"Stuck: {cause}")
        self._starving = cause
        if not cause:
            self._notifier.watchdog()

    def _cause(self) -> str:
        now = time.monotonic()
        stuck = [name for name, progress in self._checks.items() if now - progress() > self._interval]
        if stuck:
            return f"no progress of {', '.join(stuck)}"
        if self._missed >= MISSED:
            return f"{MISSED} pings over the bus in a row were not answered"
        return ""
