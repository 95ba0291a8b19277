"""What of the kernel's faults outlives the agent, until the next boot: a file in the runtime directory.

A probe does not find again what only a message told of: without this, a restart of the agent would make
a card with broken memory a good one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hetero_agent.core.verdict import Fault, Latch
from hetero_agent.health import files
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.health")

FILE: Final = "health.json"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SIZE_MAX: Final = 16 * 1024 * 1024


@dataclass(slots=True)
class Memory:
    """FAULTS are the latches of the kernel by (device, serial); CURSOR is where the messages up to
    which it was heard end.  `save` after each change."""

    path: Path
    faults: dict[tuple[str, str], Latch] = field(default_factory=dict)
    cursor: str = ""

    def load(self) -> None:
        """Read what an earlier life of the agent kept; a damaged file, or one of another boot, is as
        good as none."""
        try:
            with self.path.open(encoding="utf-8") as file:
                data = json.loads(file.read(_SIZE_MAX))
            if data["boot"] != _boot():
                return
            faults = {(one["device"], one["serial"]): _latch(one) for one in data["faults"]}
            self.faults, self.cursor = faults, str(data["cursor"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is not used: %s", self.path, printable(error))

    def of(self, device: str, serial: str) -> Latch | None:
        """Return the fault of DEVICE.  While its SERIAL can't be read, as of one that sleeps, or could not
        when the fault was told of, its place has to do."""
        return next((self.faults[key] for key in self._keys(device, serial)), None)

    def keep(self, device: str, serial: str, latch: Latch | None) -> None:
        """Have LATCH, or none, as the fault of DEVICE."""
        for key in self._keys(device, serial):
            del self.faults[key]
        if latch is not None:
            self.faults[device, serial] = latch

    def _keys(self, device: str, serial: str) -> list[tuple[str, str]]:
        """What may be known of it, the surest first."""
        found = [key for key in self.faults if key[0] == device and (not serial or key[1] in (serial, ""))]
        return sorted(found, key=lambda key: key[1] != serial)

    def save(self) -> None:
        """Write it.  A failure is logged: what is lost then is the memory, not the fault."""
        data = {
            "boot": _boot(),
            "cursor": self.cursor,
            "faults": [
                {
                    "device": device,
                    "serial": serial,
                    "fault": latch.fault,
                    "reason": latch.reason,
                    "evidence": dict(latch.evidence),
                    "reset": latch.reset,
                }
                for (device, serial), latch in sorted(self.faults.items())
            ],
        }
        try:
            files.write(self.path, json.dumps(data), 0o600)
        except OSError as error:
            log.warning("%s can't be written: %s", self.path, printable(error))


def _latch(one: dict[str, Any]) -> Latch:
    evidence = {str(key): str(value) for key, value in one["evidence"].items()}
    return Latch(Fault(one["fault"]), str(one["reason"]), evidence, bool(one["reset"]))


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
