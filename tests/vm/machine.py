"""One virtual machine as the tests use it: commands in the guest, its bus, its journal, its slots."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from hetero_agent import names
from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditKind
from tests.support.wait import wait_until
from tests.vm.image import CONFIG
from tests.vm.qemu import Qemu

#: Where `signals` finds what the guest's bus carried (lab-bus.service).
_SIGNALS: Final = "/run/lab-signals"

TRANSITION: Final = MESSAGE_IDS[AuditKind.TRANSITION]

Entry = Mapping[str, Any]


class Machine:
    """A running guest.  Commands run one after another as root."""

    def __init__(self, qemu: Qemu) -> None:
        self.qemu = qemu
        self._number = 0
        self._port: socket.socket | None = None

    def close(self) -> None:
        """End the machine; nothing of it stays."""
        if self._port is not None:
            self._port.close()
        self.qemu.close()

    def reboot(self, timeout: float = 300) -> None:
        """Reboot the guest in good order and wait until it runs commands again, its agent started."""
        boot = self.read("/proc/sys/kernel/random/boot_id")
        self.run("systemctl reboot")

        def again() -> bool:
            try:
                status, out, _ = self.attempt(
                    "cat /proc/sys/kernel/random/boot_id; systemctl is-active hetero-agent", 5
                )
            except TimeoutError:
                return False
            return status == 0 and boot not in out

        wait_until(again, timeout, "the guest after its reboot")

    # -- commands ---------------------------------------------------------------------------------
    def attempt(self, command: str, timeout: float = 60) -> tuple[int, str, str]:
        """Run COMMAND with the guest's bash; returns its status, output and errors."""
        if self._port is None:
            self._port = self.qemu.connect_guest()
        self._number += 1
        request = {"number": self._number, "command": command, "timeout": timeout}
        self._port.settimeout(timeout + 30)
        self._port.sendall(json.dumps(request).encode() + b"\n")
        while True:
            answer = json.loads(self._line())
            if answer["number"] == self._number:
                return answer["status"], answer["out"], answer["err"]

    def _line(self) -> bytes:
        assert self._port is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            chunk = self._port.recv(65536)
            assert chunk, "the guest's port was closed"
            line += chunk
        return bytes(line)

    def run(self, command: str, timeout: float = 60) -> str:
        """Run COMMAND, which has to succeed; returns its output without the last newline."""
        status, out, err = self.attempt(command, timeout)
        assert status == 0, f"{command}: status {status}\n{out}{err}"
        return out.removesuffix("\n")

    def read(self, path: str) -> str:
        """Return what a file of the guest holds, stripped."""
        return self.run(f"cat {shlex.quote(path)}").strip()

    def write(self, path: str, text: str) -> None:
        """Write TEXT to a file of the guest (of sysfs, usually)."""
        self.run(f"printf %s {shlex.quote(text)} > {shlex.quote(path)}")

    def configure(self, text: str) -> None:
        """Give the agent this configuration beside that of the lab; it is read by a reload or a start."""
        self.write("/etc/hetero-agent/hetero-agent.conf", CONFIG + text)

    def hold(self, node: str, unit: str) -> int:
        """Have service UNIT hold NODE open for reading; returns its pid once it does."""
        command = f"exec 9<{shlex.quote(node)}; exec sleep infinity"
        self.run(f"systemd-run --quiet --unit={unit} --service-type=exec bash -c {shlex.quote(command)}")
        pid = int(self.run(f"systemctl show --value --property=MainPID {unit}"))
        wait_until(lambda: self.attempt(f"test -e /proc/{pid}/fd/9")[0] == 0, 10, f"{unit}'s open file")
        return pid

    # -- the bus ------------------------------------------------------------------------------------
    def call(self, path: str, interface: str, method: str, signature: str = "", *arguments: object) -> Any:
        """Call the agent with busctl and return the reply's arguments as JSON has them."""
        words = [
            names.BUS_NAME,
            path,
            interface,
            method,
            *([signature] if signature else []),
            *map(str, arguments),
        ]
        text = self.run(f"busctl --json=short call {' '.join(map(shlex.quote, words))}")
        return json.loads(text)["data"] if text else []

    def properties(self, path: str, interface: str) -> dict[str, Any]:
        """Return the properties of an object of the agent."""
        (found,) = self.call(path, "org.freedesktop.DBus.Properties", "GetAll", "s", interface)
        return {name: value["data"] for name, value in found.items()}

    def device(self, device: str) -> dict[str, Any]:
        """Return the properties of a device, its attributes without their types; none if it isn't there."""
        status, out, _ = self.attempt(
            f"busctl --json=short call {names.BUS_NAME} {names.device_path(device)}"
            f" org.freedesktop.DBus.Properties GetAll s {names.DEVICE}"
        )
        if status:
            return {}
        found = {name: value["data"] for name, value in json.loads(out)["data"][0].items()}
        found["Attributes"] = {name: value["data"] for name, value in found["Attributes"].items()}
        return found

    def devices(self) -> dict[str, str]:
        """Return the id of each device and its state."""
        _, devices = self.call(names.ROOT, names.MANAGER, "GetSnapshot", "u", 0)
        return {one[1]: one[3] for one in devices}

    def wait_for_device(self, device: str, timeout: float = 30, **wanted: object) -> dict[str, Any]:
        """Wait until the device has the properties WANTED and return all."""
        last: dict[str, Any] = {}

        def fits() -> bool:
            nonlocal last
            last = self.device(device)
            return bool(last) and all(last[name] == value for name, value in wanted.items())

        try:
            wait_until(fits, timeout, f"{device} with {wanted}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None
        return last

    def wait_until_gone(self, device: str, timeout: float = 30) -> None:
        """Wait until the agent has no object for the device."""
        wait_until(lambda: not self.device(device), timeout, f"the end of {device}")

    def holders(self, device: str) -> list[int]:
        """Return the pids of a device's holders."""
        (found,) = self.call(names.device_path(device), names.DEVICE, "GetHolders")
        return [one["pid"]["data"] for one in found]

    def nodes(self, device: str) -> dict[str, tuple[int, int]]:
        """Return the paths of a device's own nodes and their numbers."""
        (found,) = self.call(names.device_path(device), names.DEVICE, "GetNodes")
        return {path: (major, minor) for path, role, _, major, minor in found if role == "own"}

    def allocation(self, request: str, resource: str, device: str = "", **options: str) -> str:
        """Return the command that allocates one device; OPTIONS are ``name="type value"``."""
        words = [f"devices as 1 {device}"] if device else []
        words += [f"{name.replace('_', '-')} {value}" for name, value in options.items()]
        return (
            f"busctl --json=short call {names.BUS_NAME} {names.ROOT} {names.MANAGER} Allocate 'ssua{{sv}}'"
            f" {request} {resource} 1 {len(words)} {' '.join(words)}"
        )

    def allocate(
        self, request: str, resource: str, device: str = "", **options: str
    ) -> tuple[str, dict[str, Any]]:
        """Allocate one device, as root; returns the lease's path and the manifest."""
        lease, manifest = json.loads(self.run(self.allocation(request, resource, device, **options)))["data"]
        return lease, {name: value["data"] for name, value in manifest.items()}

    def refusal(self, request: str, resource: str, device: str = "", **options: str) -> str:
        """Ask for a device that is not to be had; returns the error's text."""
        status, out, complaint = self.attempt(self.allocation(request, resource, device, **options))
        assert status, f"{resource} was granted: {out}"
        return complaint

    def confirm(self, request: str, lease: str, pid: int | None = None) -> None:
        """Confirm a lease, bound to PID if one is given."""
        binding = (0,) if pid is None else (1, "pid", "u", pid)
        self.call(names.ROOT, names.MANAGER, "Confirm", "soa{sv}", request, lease, *binding)

    def release(self, request: str, lease: str) -> bool:
        """Release a lease; tells whether it was one."""
        (changed,) = self.call(names.ROOT, names.MANAGER, "Release", "so", request, lease)
        return bool(changed)

    def lease(self, lease: str) -> dict[str, Any]:
        """Return the properties of a lease by its path; none if it isn't there."""
        if self.attempt(f"busctl get-property {names.BUS_NAME} {lease} {names.LEASE} Id")[0]:
            return {}
        return self.properties(lease, names.LEASE)

    def signals(self, member: str, path: str = "") -> list[list[Any]]:
        """Return the arguments of the agent's signals MEMBER so far, of one object if PATH is given."""
        found = []
        for line in self.run(f'grep -F \'"member":"{member}"\' {_SIGNALS} || true').splitlines():
            message = json.loads(line)
            if message["type"] == "signal" and (not path or message["path"] == path):
                found.append(message["payload"]["data"])
        return found

    def changes(self, device: str) -> list[tuple[str, str, str]]:
        """Return the device's StateChanged signals: from, to, reason."""
        return [(one[0], one[1], one[2]) for one in self.signals("StateChanged", names.device_path(device))]

    # -- the journal ----------------------------------------------------------------------------------
    def journal(self, *matches: str) -> list[Entry]:
        """Return the journal's entries with all of MATCHES (FIELD=value), oldest first."""
        self.run("journalctl --sync")
        out = self.run(f"journalctl --output=json --all --no-pager {' '.join(map(shlex.quote, matches))}")
        return [json.loads(line) for line in out.splitlines()]

    def story(self, device: str) -> list[tuple[str, str, str]]:
        """Return the device's transitions in the journal: from, to, reason."""
        entries = self.journal(f"MESSAGE_ID={TRANSITION}", f"HETERO_DEVICE={device}")
        return [(one["HETERO_FROM"], one["HETERO_TO"], one["HETERO_REASON"]) for one in entries]

    def wait_for_entry(self, *matches: str, timeout: float = 15) -> Entry:
        """Wait for an entry with all of MATCHES and return the last one."""
        found: list[Entry] = []

        def look() -> bool:
            found[:] = self.journal(*matches)
            return bool(found)

        wait_until(look, timeout, f"a journal entry with {matches}")
        return found[-1]

    def told(self, device: str, *expected: tuple[str | None, str, str | None], timeout: float = 15) -> None:
        """Wait until bus and journal both end the device's story with EXPECTED (from, to, reason).

        None stands for any.  A removal is not one step for the kernel: nodes go first, then the driver,
        then the device, and how much of that is seen is a matter of time.
        """
        last: list[tuple[str, str, str]] = []

        def agrees(look: Callable[[str], list[tuple[str, str, str]]]) -> bool:
            nonlocal last
            last = look(device)
            ending = last[-len(expected) :]
            return len(ending) == len(expected) and all(
                want in (None, got)
                for found, wanted in zip(ending, expected, strict=True)
                for got, want in zip(found, wanted, strict=True)
            )

        for place, look in (("on the bus", self.changes), ("in the journal", self.story)):
            try:
                wait_until(lambda look=look: agrees(look), timeout, f"the end of {device}'s story {place}")
            except AssertionError as error:
                raise AssertionError(f"{error}\nexpected {list(expected)}\nfound    {last}") from None

    # -- slots ------------------------------------------------------------------------------------------
    def plug(self, driver: str, name: str, port: int, **properties: object) -> None:
        """Plug a device into a root port."""
        self.qemu.monitor("device_add", driver=driver, id=name, bus=f"port{port}", **properties)

    def unplug(self, name: str, timeout: float = 60) -> None:
        """Press the attention button and wait until the guest has let go of the device."""

        def gone() -> bool:
            self.qemu.monitor("query-status")  # fetches events
            return any(
                one["event"] == "DEVICE_DELETED" and one["data"].get("device") == name
                for one in self.qemu.events
            )

        self.qemu.monitor("device_del", id=name)
        wait_until(gone, timeout, f"the guest to let go of {name}")
