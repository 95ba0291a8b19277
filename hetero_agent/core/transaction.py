"""One event, one transaction: what it changes, what it wants done, how to undo it, and alarms."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeVar

from hetero_agent.core.effects import Effect, Outcome

K = TypeVar("K")
V = TypeVar("V")


class Transaction:
    """Collects an event's outcome; every change of a table on top of it says how to undo it."""

    def __init__(self) -> None:
        self.sequence = 0
        self.generation = 0
        self.outcome = Outcome()
        self._undo: list[Callable[[], None]] = []
        self._alarms: list[tuple[int, str, str]] = []
        self._due: dict[tuple[str, str], int] = {}

    # -- one event, one transaction ----------------------------------------------------------
    def begin(self) -> None:
        """Start the changes of one event."""
        self.outcome = Outcome()
        self._undo.clear()

    def finish(self) -> Outcome:
        """End the event; `undo` still works until the next `begin`."""
        self.outcome.changes.sequence = self.sequence
        self.outcome.changes.generation = self.generation
        return self.outcome

    def undo(self) -> None:
        """Put back all that changed since `begin`."""
        self.outcome = Outcome()
        while self._undo:
            self._undo.pop()()
        self.outcome = Outcome()

    def effect(self, effect: Effect) -> None:
        """Have EFFECT carried out once the changes are stored."""
        self.outcome.effects.append(effect)

    def note(self, undo: Callable[[], None]) -> None:
        """Remember how to undo a change that was made outside the tables."""
        self._undo.append(undo)

    def assign(self, table: dict[K, V], key: K, value: V) -> None:
        """Set an entry of a table that is not the world's own, in a way that `undo` knows."""
        had, old = key in table, table.get(key)
        table[key] = value

        def undo() -> None:
            if had:
                table[key] = old  # type: ignore[assignment]
            else:
                del table[key]

        self._undo.append(undo)

    def discard(self, table: dict[K, V], key: K) -> None:
        """Take an entry, if there, out of a table, in a way that `undo` knows."""
        if key in table:
            old = table.pop(key)
            self._undo.append(lambda: table.__setitem__(key, old))

    # -- alarms --------------------------------------------------------------------------------------
    def alarm(self, boot: int, kind: str, name: str) -> None:
        """Have `due` name (KIND, NAME) once the boot clock is at BOOT.

        There is one alarm for each, the earliest: whoever handles it asks for the next."""
        waiting = self._due.get((kind, name))
        if waiting is None or boot < waiting:
            self._undo.append(lambda: self._install_alarm((kind, name), waiting))
            self._install_alarm((kind, name), boot)

    def _install_alarm(self, entry: tuple[str, str], boot: int | None) -> None:
        if boot is None:
            self._due.pop(entry, None)
            return
        self._due[entry] = boot
        heapq.heappush(self._alarms, (boot, *entry))
        if len(self._alarms) > 4 * len(self._due) + 64:
            self._alarms = sorted((at, *one) for one, at in self._due.items())

    def due(self, boot: int) -> list[tuple[str, str]]:
        """Take the alarms that are due; whoever handles one checks that it still applies.
        `undo` sets them a second later, so that a defect does not make the agent spin."""
        found: list[tuple[str, str]] = []
        while (first := self.next_alarm()) is not None and first <= boot:
            _, *names = heapq.heappop(self._alarms)
            entry = (names[0], names[1])
            del self._due[entry]
            found.append(entry)

        def undo() -> None:
            for entry in found:
                self._install_alarm(entry, min(boot + 1_000_000, self._due.get(entry, boot + 1_000_000)))

        self._undo.append(undo)
        return found

    def next_alarm(self) -> int | None:
        """The boot time of the next alarm."""
        while self._alarms and self._due.get(self._alarms[0][1:]) != self._alarms[0][0]:
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None
