"""A file for each device that somebody should look at, for as long as that is so.

``alerts/ID.json`` in the runtime directory, readable by all, with nothing in it that is not public.
The agent starts nothing by itself; systemd can (systemd.path(5), examples/hetero-agent-alert.path).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from hetero_agent.core.effects import DeviceAdded, DeviceChanged, DeviceRemoved, Effect
from hetero_agent.core.model import Device, Health, State
from hetero_agent.core.verdict import combine
from hetero_agent.health import files
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.health")

DIRECTORY: Final = "alerts"
_ENDING: Final = ".json"

#: Files that could not be written, or taken away, and are tried once more with the next news.
_RETRIES: Final = 16

#: States that somebody has to look at, whatever the health.
_ALARMING: Final = frozenset({State.FAULTY, State.LOST})


class Alerts:
    """Keeps the files in line with DEVICES, the governor's own table."""

    def __init__(self, runtime: Path, devices: Mapping[str, Device]) -> None:
        self._directory = runtime / DIRECTORY
        self._devices = devices
        self._written: dict[str, tuple[State, Health, str]] = {}
        self._owed: dict[str, None] = {}
        self._live = False
        self.problem = ""

    def start(self) -> None:
        """Make the directory, and from now on what belongs into it; what an earlier life left goes."""
        self._live = True
        try:
            self._directory.mkdir(mode=0o755, exist_ok=True)
            self._directory.chmod(0o755)
            for path in self._directory.iterdir():
                device = self._devices.get(path.name.removesuffix(_ENDING))
                if device is None or _alert(device) is None:
                    path.unlink(missing_ok=True)
        except OSError as error:
            self._failed(error)
        for device_id in list(self._devices):
            self._look(device_id)

    def publish(self, effects: Sequence[Effect]) -> None:
        """Take the governor's news."""
        if not self._live:
            return
        for effect in effects:
            if isinstance(effect, (DeviceAdded, DeviceChanged, DeviceRemoved)):
                self._look(effect.device)
        for device_id in list(self._owed)[:_RETRIES]:
            self._look(device_id)

    def _look(self, device_id: str) -> None:
        device = self._devices.get(device_id)
        wanted = _alert(device) if device is not None else None
        if wanted == self._written.get(device_id) and device_id not in self._owed:
            return
        self._owed.pop(device_id, None)
        path = self._directory / f"{device_id}{_ENDING}"
        try:
            if device is None or wanted is None:
                self._written.pop(device_id, None)
                path.unlink(missing_ok=True)
            else:
                files.write(path, json.dumps(_content(device), indent=1) + "\n", 0o644)
                self._written[device_id] = wanted
        except OSError as error:
            self._owed[device_id] = None  # the last to be tried again
            self._failed(error)
        else:
            if not self._owed:
                self.problem = ""

    def _failed(self, error: OSError) -> None:
        problem = f"alerts can't be written to {self._directory}: {printable(error)}"
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem


def _alert(device: Device) -> tuple[State, Health, str] | None:
    """Return what an alert of this device would say, None if there is none."""
    if device.health is not Health.UNHEALTHY and device.state not in _ALARMING:
        return None
    return device.state, device.health, f"{device.reason}\n{device.health_reason}"


def _content(device: Device) -> dict[str, object]:
    return {
        "device": device.id,
        "serial": device.record.serial,
        "resource": device.record.resource,
        "state": str(device.state),
        "reason": device.reason,
        "health": str(device.health),
        "health-reason": device.health_reason,
        "since": device.since.real,
        "lease": device.lease,
        "evidence": dict(combine(device.opinions.values()).evidence),
    }
