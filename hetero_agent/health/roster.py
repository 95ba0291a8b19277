"""The devices that are looked after, and how what the kernel calls them leads to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hetero_agent.core import address
from hetero_agent.core.model import DeviceRecord, Obstacle, Opinion, Origin, Role
from hetero_agent.core.symptoms import Probe, Symptoms
from hetero_agent.core.verdict import Standing
from hetero_agent.health.counters import Sample


@dataclass(slots=True)
class Patient:
    """One device.

    SPEC is what its probe is asked with.  SAID is what was submitted last, by origin.  FOUND is the
    reason of its last finding, None before the first.  DUE is the loop time of its next probe.
    BUSY: it waits for a probe, or is being probed.  BLOCKED: the worker that looked at it last has
    not come back, and nobody else may look.  ALONE: it was slow or blocked, so no other device
    shares a worker with it; PROMPT counts its quick answers since.  PAUSE is how long it is left
    alone while it blocks, in seconds.
    """

    record: DeviceRecord
    spec: dict[str, Any]
    symptoms: Symptoms
    standing: Standing = field(default_factory=Standing)
    said: dict[Origin, Opinion] = field(default_factory=dict)
    sample: Sample | None = None
    found: str | None = None
    due: float = 0.0
    busy: bool = False
    blocked: bool = False
    alone: bool = False
    prompt: int = 0
    pause: float = 0.0

    @property
    def id(self) -> str:
        """The device's id."""
        return self.record.id


def spec_of(record: DeviceRecord, symptoms: Symptoms) -> dict[str, Any]:
    """Return what the probe worker needs to know of a device (see `probes.probe`)."""
    kernel = record.source == "kernel"
    # what only the profile's own driver could answer, which has not got the device
    without = {Probe.NVIDIA_PROC} if record.obstacle in (Obstacle.VFIO, Obstacle.NO_DRIVER) else set()
    return {
        "path": record.path if kernel else "",
        "pci": address_in(record.path) if kernel else "",
        "driver": record.driver if kernel else "",
        "nodes": [
            [one.path, one.kind, *((one.fsdev, one.inode) if one.kind == "file" else (one.major, one.minor))]
            for one in record.nodes
            if one.role is not Role.CONTROL
        ],
        "probes": [str(one) for one in symptoms.probes if one not in without] if kernel else [],
    }


def address_in(path: str) -> str:
    """Return the PCI address that a device's directory is named by, "" for no PCI device."""
    name = path.rpartition("/")[2]
    return name if address.COMPONENT.fullmatch(name) else ""


class Roster:
    """All patients, by id and by what the kernel's messages call them."""

    def __init__(self) -> None:
        self._patients: dict[str, Patient] = {}
        self._keys: dict[str, frozenset[tuple[str, str]]] = {}
        self._index: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._patients)

    def __iter__(self) -> Iterator[Patient]:
        return iter(list(self._patients.values()))

    def get(self, device: str) -> Patient | None:
        """The patient of this id."""
        return self._patients.get(device)

    def put(self, patient: Patient) -> None:
        """Add a patient, or take its new record into the index."""
        self._unlink(patient.id)
        self._patients[patient.id] = patient
        keys = self._keys[patient.id] = frozenset(_keys(patient.record))
        for key in keys:
            self._index[key].add(patient.id)

    def drop(self, device: str) -> Patient | None:
        """Take a patient out."""
        self._unlink(device)
        return self._patients.pop(device, None)

    def _unlink(self, device: str) -> None:
        for key in self._keys.pop(device, ()):
            self._index[key].discard(device)
            if not self._index[key]:
                del self._index[key]

    def _named(self, kind: str, name: str) -> list[Patient]:
        return [self._patients[one] for one in sorted(self._index.get((kind, name), ()))]

    def at(self, where: str) -> list[Patient]:
        """The devices at a PCI address in any spelling: the one there, else its units, else those
        below it (if it is a port's); none for what is no address."""
        try:
            place = address.normalise(where)
        except ValueError:
            return []
        found = self._named("address", place) or self._named("parent", place)
        if found:
            return found
        inside = f"/{place}/"
        return _cards([one for one in self._patients.values() if inside in f"{one.record.path}/"])

    def called(self, name: str) -> list[Patient]:
        """The devices that the kernel calls NAME, or that have a class device of that name."""
        return _cards(self._named("name", name))

    def under(self, path: str) -> list[Patient]:
        """The devices whose directory PATH, below /sys, lies in."""
        return _cards(
            [
                one
                for one in self._patients.values()
                if one.record.path and f"{path}/".startswith(f"{one.record.path}/")
            ]
        )


def _cards(patients: list[Patient]) -> list[Patient]:
    """Leave out the units whose card is among them: what it suffers is theirs anyway."""
    ids = {one.id for one in patients}
    return [one for one in patients if one.record.parent not in ids]


def _keys(record: DeviceRecord) -> Iterator[tuple[str, str]]:
    for name in (record.id, *record.aliases):
        try:
            yield "address", address.normalise(name)
        except ValueError:
            continue
    if record.parent:
        yield "parent", record.parent
    if record.source == "kernel" and record.path:
        yield "name", record.path.rpartition("/")[2]
    for key in ("kernel-names", "rdma-device", "net"):
        for name in str(record.attributes.get(key, "")).split(","):
            if name:
                yield "name", name
