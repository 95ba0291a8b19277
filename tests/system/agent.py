"""The agent of a machine as its administrator sees it: systemctl, busctl, journalctl, heteroctl."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_agent import names
from tests.system.machine import CommandFailed, Machine

UNIT = "hetero-agent.service"

#: Types of Allocate's options and Confirm's binding, as busctl wants them.
_OPTION_TYPES = {
    "client": "s",
    "confirm": "b",
    "confirm-within": "u",
    "connection": "b",
    "devices": "as",
    "label": "s",
    "netdev": "s",
    "on-end": "s",
    "owner-uid": "u",
    "pid": "u",
    "ttl": "t",
    "unit": "s",
}

#: Waits for the file that is the second argument, then holds the node that is the first.
_JOB = """
import os, sys, time
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
held = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
time.sleep(3600)
"""

_requests = itertools.count(1)

Entry = dict[str, Any]


class Refused(Exception):
    """The agent, or the bus, answered with an error; the text is busctl's."""


class Agent:
    """hetero-agent on MACHINE."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    # -- the unit -------------------------------------------------------------------------------
    def systemctl(self, *words: str) -> str:
        """Run systemctl and return its output.  Raises CommandFailed."""
        return self.machine.run("systemctl", *words).stdout

    def unit(self, name: str, unit: str = UNIT) -> str:
        """Return one property of the unit."""
        return self.systemctl("show", unit, f"--property={name}", "--value").strip()

    @property
    def pid(self) -> int:
        """The main process, in the machine's own numbers."""
        return int(self.unit("MainPID"))

    def restarted_since(self, pid: int) -> bool:
        """Tell whether another process than PID is the main one, and ready."""
        return self.unit("ActiveState") == "active" and self.pid not in (0, pid)

    # -- the bus --------------------------------------------------------------------------------
    def call(
        self, path: str, interface: str, member: str, *words: str, uid: int = 0, groups: Sequence[int] = ()
    ) -> Any:
        """Call a method with busctl; WORDS are its signature and arguments.  Return the reply's values,
        one value itself.  Raises Refused."""
        command = ["busctl", "--json=short", "call", names.BUS_NAME, path, interface, member, *words]
        done = self.machine.run(*command, check=False, uid=uid, groups=groups)
        if done.returncode != 0:
            raise Refused(done.stderr.strip().removeprefix("Call failed: "))
        data = json.loads(done.stdout)["data"] if done.stdout.strip() else []
        return data[0] if len(data) == 1 else data

    def on_bus(self) -> bool:
        """Tell whether its name has an owner."""
        return self.machine.run("busctl", "status", names.BUS_NAME, check=False).returncode == 0

    def objects(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all objects: path, interface, property, value."""
        found = self.call(names.ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
        return {
            path: {
                interface: {name: value["data"] for name, value in properties.items()}
                for interface, properties in interfaces.items()
            }
            for path, interfaces in found.items()
        }

    def manager(self) -> dict[str, Any]:
        """Return the Manager's properties."""
        found = self.call(names.ROOT, "org.freedesktop.DBus.Properties", "GetAll", "s", names.MANAGER)
        return {name: value["data"] for name, value in found.items()}

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return the properties of all devices by id."""
        found = [one[names.DEVICE] for one in self.objects().values() if names.DEVICE in one]
        return {one["Id"]: one for one in found}

    def states(self) -> dict[str, str]:
        """Return the states of all devices by id."""
        return {name: device["State"] for name, device in self.devices().items()}

    def leases(self) -> dict[str, dict[str, Any]]:
        """Return the properties of all leases by path."""
        return {path: one[names.LEASE] for path, one in self.objects().items() if names.LEASE in one}

    def wait_states(self, wanted: Mapping[str, str], timeout: float = 30) -> None:
        """Wait until there are just these devices, by id, in these states."""
        self.machine.wait(lambda: self.states() == wanted, timeout, f"states {wanted}")

    def allocate(
        self,
        resource: str,
        count: int = 1,
        request: str = "",
        uid: int = 0,
        groups: Sequence[int] = (),
        **options: object,
    ) -> str:
        """Have devices granted, confirmed unless OPTIONS say otherwise (``_`` for ``-``); return the
        lease's path.  Raises Refused."""
        words = [request or f"lab-{next(_requests)}", resource, str(count)]
        given = {"confirm": True, **{name.replace("_", "-"): value for name, value in options.items()}}
        reply = self.call(
            names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", *words, *_variants(given), uid=uid, groups=groups
        )
        return str(reply[0])

    def confirm(self, lease: str, uid: int = 0, groups: Sequence[int] = (), **binding: object) -> None:
        """Confirm with a binding.  Raises Refused."""
        request = f"lab-{next(_requests)}"
        words = ["soa{sv}", request, lease, *_variants(binding)]
        self.call(names.ROOT, names.MANAGER, "Confirm", *words, uid=uid, groups=groups)

    def release(self, lease: str, uid: int = 0, groups: Sequence[int] = ()) -> bool:
        """Give it back.  Raises Refused."""
        request = f"lab-{next(_requests)}"
        return bool(
            self.call(names.ROOT, names.MANAGER, "Release", "so", request, lease, uid=uid, groups=groups)
        )

    # -- the journal ----------------------------------------------------------------------------
    def journal(self, *matches: str) -> list[Entry]:
        """Return the entries that fit MATCHES (journalctl's own words), oldest first."""
        self.machine.run("journalctl", "--sync")
        output = self.machine.run("journalctl", "--output=json", "--all", *matches).stdout
        return [json.loads(line) for line in output.splitlines()]

    def audit(self, *matches: str) -> list[Entry]:
        """Return the entries of its audit trail that fit MATCHES, each once, by sequence number, as
        soon as no more come for a while: they are written behind the answers."""
        before, same = -1, 0
        while True:
            entries = self.journal("SYSLOG_IDENTIFIER=hetero-agent", *matches)
            found = {int(entry["HETERO_SEQUENCE"]): entry for entry in entries if "HETERO_SEQUENCE" in entry}
            same = same + 1 if len(found) == before else 0
            # none at all is rarer than one that is late
            if same == (2 if found else 5):
                return [found[number] for number in sorted(found)]
            before = len(found)
            time.sleep(0.2)

    def log(self, since: str = "") -> str:
        """Return its log as people read it."""
        self.machine.run("journalctl", "--sync")
        more = [f"--since={since}"] if since else []
        return self.machine.run("journalctl", "--output=cat", f"--unit={UNIT}", *more).stdout

    # -- who uses it ----------------------------------------------------------------------------
    def job(self, name: str, node: str, *properties: str) -> str:
        """Start a transient unit whose process will open NODE when `open_in` says so; return the
        unit's full name.  It restarts with the same program."""
        words = [
            "--quiet",
            f"--unit={name}",
            "--service-type=exec",
            *(f"--property={one}" for one in properties),
        ]
        self.machine.run("systemd-run", *words, "/usr/bin/python3", "-ISc", _JOB, node, f"/run/{name}.open")
        return f"{name}.service"

    def open_in(self, unit: str) -> int:
        """Have the job open its node now; return its process once it has."""
        pid = int(self.unit("MainPID", unit))
        self.machine.write(f"/run/{unit.removesuffix('.service')}.open", "")
        links = self.machine.path(f"/proc/{pid}/fd")
        self.machine.wait(
            lambda: any("/accel" in os.readlink(one) for one in links.iterdir()), 30, f"an open node in {unit}"
        )
        self.machine.path(f"/run/{unit.removesuffix('.service')}.open").unlink()
        return pid

    def heteroctl(self, *words: str, uid: int = 0, groups: Sequence[int] = ()) -> Any:
        """Run ``heteroctl --json`` and return what it says.  Raises CommandFailed."""
        done = self.machine.run("heteroctl", "--json", *words, uid=uid, groups=groups, check=False)
        if done.returncode != 0:
            raise CommandFailed(f"heteroctl {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout)


def jumps(entries: Sequence[Entry]) -> list[str]:
    """Return where a device's story, all ENTRIES that name it, does not go on from where it was: a
    transition begins where the last has ended, or in ``probing`` after the device appeared."""
    found = []
    at = ""
    for entry in entries:
        if entry["HETERO_KIND"] == "device-appeared":
            at = "probing"
        elif entry["HETERO_KIND"] == "transition":
            if entry["HETERO_FROM"] != at:
                found.append(f"{at} | {entry['MESSAGE']}")
            at = entry["HETERO_TO"]
    return found


def gaps(entries: Sequence[Entry]) -> list[int]:
    """Return the sequence numbers that ENTRIES, the whole trail of a boot, lack."""
    numbers = [int(entry["HETERO_SEQUENCE"]) for entry in entries]
    return sorted(set(range(min(numbers), max(numbers) + 1)) - set(numbers))


def _variants(options: dict[str, Any]) -> list[str]:
    words = [str(len(options))]
    for name, value in options.items():
        kind = _OPTION_TYPES[name]
        words += [name, kind]
        if kind == "as":
            words += [str(len(value)), *value]
        elif kind == "b":
            words.append("true" if value else "false")
        else:
            words.append(str(value))
    return words
