"""org.freedesktop.LogControl1: ``systemctl service-log-level hetero-agent debug``."""

from __future__ import annotations

from collections.abc import Callable

from hetero_agent.bus.codec import V
from hetero_agent.bus.errors import invalid
from hetero_agent.text import printable

#: syslog(3) levels, as systemctl sends them.
LEVELS = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")
IDENTIFIER = "hetero-agent"


class LogControl:
    """The level can be set, the target only to what it is.  SET_LEVEL puts a level in force."""

    def __init__(self, level: str, target: str, set_level: Callable[[str], None]) -> None:
        self._level = level
        self._target = target
        self._set_level = set_level

    def property(self, name: str) -> V:
        """One property.  Raises KeyError for an unknown one."""
        return V(
            "s",
            {"LogLevel": self._level, "LogTarget": self._target, "SyslogIdentifier": IDENTIFIER}[name],
        )

    def set(self, name: str, value: str) -> None:
        """Write a property.  Raises Refusal."""
        if name == "LogTarget":
            if value != self._target:
                raise invalid(f"LogTarget: only {self._target} is possible here")
            return
        if value not in LEVELS:
            raise invalid(f"LogLevel: {printable(value, 32)!r} is not one of {', '.join(LEVELS)}")
        self._set_level(value)
        self._level = value

    def level_changed(self, level: str) -> None:
        """The configuration has put another level in force."""
        self._level = level
