"""Calls from outside, by programs and a library that are not ours: busctl and GLib.

`busctl` runs systemd's tool.  `Client` is a process of any uid with one lasting connection made by
GLib: it makes calls, many at once if asked, and keeps the agent's signals.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gi.repository import Gio, GLib

from hetero_agent import names
from tests.support.bus import PrivateBus
from tests.support.process import PYTHON
from tests.support.wait import wait_until

#: A D-Bus variant: ``V("u", 5)``.
V = GLib.Variant


class CallError(Exception):
    """An error reply: NAME without our prefix, or the full standard name, and its TEXT."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name.removeprefix(names.ERROR_PREFIX)
        self.text = text


def as_user(uid: int, groups: Sequence[int] = ()) -> list[str]:
    """Return the command prefix that runs what follows as UID with exactly these GROUPS."""
    if uid == 0 and not groups:
        return []
    more = ["--groups=" + ",".join(map(str, groups))] if groups else ["--clear-groups"]
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", *more]


def busctl(
    bus: PrivateBus, *arguments: str, uid: int = 0, groups: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``busctl --address=BUS ARGUMENTS`` and return what came of it."""
    return subprocess.run(
        [*as_user(uid, groups), "busctl", f"--address={bus.address}", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def busctl_json(bus: PrivateBus, *arguments: str, uid: int = 0, groups: Sequence[int] = ()) -> Any:
    """Like `busctl` with JSON output, which is returned decoded.  Raises CallError."""
    done = busctl(bus, "--json=short", *arguments, uid=uid, groups=groups)
    if done.returncode != 0:
        raise CallError("busctl", done.stderr.strip())
    return json.loads(done.stdout) if done.stdout.strip() else None


# Runs with the caller's uid, which need not be able to read the checkout: hence text, not a module.
_CLIENT = r"""
import json, os, sys
from gi.repository import Gio, GLib
address, name, listen = sys.argv[1:4]
connection = Gio.DBusConnection.new_for_address_sync(
    address,
    Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION,
    None, None)
connection.set_exit_on_close(False)

def out(**answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()

def signal(_connection, sender, path, interface, member, parameters, *_):
    out(signal=[path, interface, member, parameters.unpack()])

if listen:
    connection.signal_subscribe(name, None, None, None, None, Gio.DBusSignalFlags.NONE, signal)

def answered(_connection, result, number):
    try:
        reply, _fds = connection.call_with_unix_fd_list_finish(result)
        out(id=number, value=reply.unpack(), type=reply.get_type_string(),
            bytes=reply.get_data_as_bytes().get_data().hex())
    except GLib.Error as error:
        remote = Gio.DBusError.get_remote_error(error) or error.domain
        Gio.DBusError.strip_remote_error(error)
        out(id=number, error=remote, text=error.message)

def send(want):
    arguments = GLib.Variant.parse(GLib.VariantType(want["type"]), want["arguments"], None, None)
    connection.call_with_unix_fd_list(
        want["destination"], want["path"], want["interface"], want["member"], arguments, None,
        Gio.DBusCallFlags(want["flags"]), int(want["timeout"] * 1000), None, None, answered, want["id"])

pending = b""

def take(source, condition):
    global pending
    data = os.read(0, 65536)
    if not data:
        loop.quit()
        return False
    *lines, pending = (pending + data).split(b"\n")
    for line in lines:
        send(json.loads(line))
    return True

# answered once the match rule stands, so that no later signal is missed
connection.call_sync("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus.Peer", "Ping",
                     None, None, Gio.DBusCallFlags.NONE, -1, None)
out(unique=connection.get_unique_name())
loop = GLib.MainLoop()
GLib.io_add_watch(GLib.IOChannel.unix_new(0), GLib.PRIORITY_DEFAULT, GLib.IO_IN | GLib.IO_HUP, take)
loop.run()
"""


@dataclass(frozen=True)
class Reply:
    """A method return: the VALUE unpacked, its TYPE, and the BYTES of its GVariant form in hex."""

    value: Any
    type: str
    bytes: str


@dataclass(frozen=True)
class Signal:
    """A signal of the agent, its BODY unpacked."""

    path: str
    interface: str
    member: str
    body: tuple[Any, ...]


class Client:
    """A connection of another process, of UID with the supplementary GROUPS (gids).

    Use as a context manager, or `close` it; `kill` ends it without a goodbye.  Without LISTEN it
    asks for no signals.
    """

    def __init__(self, bus: PrivateBus, uid: int = 0, groups: Sequence[int] = (), listen: bool = True) -> None:
        self._process = subprocess.Popen(
            [*as_user(uid, groups), PYTHON, "-c", _CLIENT, bus.address, names.BUS_NAME, "1" if listen else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._signals: list[Signal] = []
        self.unique_name = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: self.unique_name or self._process.poll() is not None, what="a connection to the bus")
        assert self.unique_name, "the client could not connect"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "unique" in answer:
                self.unique_name = answer["unique"]
            elif "signal" in answer:
                path, interface, member, body = answer["signal"]
                self._signals.append(Signal(path, interface, member, tuple(body)))
            else:
                self._answers[answer["id"]] = answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *values: Any,
        destination: str = names.BUS_NAME,
        timeout: float = 25,
        interactive: bool = False,
    ) -> int:
        """Send a call; return the number to `receive` its answer by.  INTERACTIVE: somebody may be
        asked to authenticate for it."""
        flags = Gio.DBusCallFlags.ALLOW_INTERACTIVE_AUTHORIZATION if interactive else Gio.DBusCallFlags.NONE
        self._number += 1
        arguments = GLib.Variant(f"({signature})", values)
        want = {
            "id": self._number,
            "destination": destination,
            "path": path,
            "interface": interface,
            "member": member,
            "type": f"({signature})",
            "arguments": arguments.print_(True),
            "timeout": timeout,
            "flags": int(flags),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(want) + "\n")
        self._process.stdin.flush()
        return self._number

    def receive(self, number: int, timeout: float = 30) -> Reply:
        """Wait for the answer to call NUMBER.  Raises CallError."""
        wait_until(
            lambda: number in self._answers or self._process.poll() is not None, timeout, f"answer {number}"
        )
        answer = self._answers.pop(number)
        if "error" in answer:
            raise CallError(answer["error"], answer["text"])
        return Reply(tuple(answer["value"]), answer["type"], answer["bytes"])

    def reply(
        self, path: str, interface: str, member: str, signature: str = "", *values: Any, **more: Any
    ) -> Reply:
        """Call and wait for the whole `Reply`.  Raises CallError."""
        return self.receive(self.send(path, interface, member, signature, *values, **more))

    def call(
        self, path: str, interface: str, member: str, signature: str = "", *values: Any, **more: Any
    ) -> Any:
        """Call and return the one value of the answer, a tuple if there are several, None if none."""
        value = self.reply(path, interface, member, signature, *values, **more).value
        return value[0] if len(value) == 1 else value or None

    def manager(self, member: str, signature: str = "", *values: Any, **more: Any) -> Any:
        """Call a method of the Manager."""
        return self.call(names.ROOT, names.MANAGER, member, signature, *values, **more)

    def allocate(
        self, request: str, resource: str, count: int = 1, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Allocate; return the lease's path and the manifest.  Option values are `V`."""
        lease, manifest = self.manager("Allocate", "ssua{sv}", request, resource, count, options or {})
        return lease, manifest

    def confirm(self, request: str, lease: str, binding: dict[str, Any] | None = None) -> None:
        self.manager("Confirm", "soa{sv}", request, lease, binding or {})

    def release(self, request: str, lease: str) -> bool:
        return bool(self.manager("Release", "so", request, lease))

    def properties(self, path: str, interface: str) -> dict[str, Any]:
        return dict(self.call(path, "org.freedesktop.DBus.Properties", "GetAll", "s", interface))

    def device(self, device_id: str) -> dict[str, Any]:
        """Return all properties of a device."""
        return self.properties(names.device_path(device_id), names.DEVICE)

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return id -> properties of every device, from GetManagedObjects."""
        objects = self.call(names.ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
        return {
            interfaces[names.DEVICE]["Id"]: interfaces[names.DEVICE]
            for interfaces in objects.values()
            if names.DEVICE in interfaces
        }

    def wait_for_device(self, device_id: str, timeout: float = 30, **wanted: Any) -> dict[str, Any]:
        """Wait until the device exists and its properties have the WANTED values; a tuple is any of them."""

        def look() -> dict[str, Any] | None:
            try:
                found = self.device(device_id)
            except CallError:
                return None
            fits = (
                found[key] in value if isinstance(value, tuple) else found[key] == value
                for key, value in wanted.items()
            )
            return found if all(fits) else None

        return wait_until(look, timeout, f"device {device_id} with {wanted}")

    def signals(self, interface: str = "", member: str = "", path: str = "") -> list[Signal]:
        """Return the signals received so far that fit."""
        return [
            one
            for one in list(self._signals)
            if (not interface or one.interface == interface)
            and (not member or one.member == member)
            and (not path or one.path == path)
        ]

    def wait_for_signal(self, interface: str, member: str, path: str = "", timeout: float = 30) -> Signal:
        """Wait for the first signal that fits, and return it."""
        return wait_until(
            lambda: self.signals(interface, member, path),
            timeout,
            f"signal {interface}.{member} from {path or 'anyone'}",
        )[0]

    def kill(self) -> None:
        """End the process by SIGKILL: the bus sees the connection drop."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
        self._thread.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def receive_all(client: Client, numbers: Iterable[int]) -> tuple[list[Reply], list[CallError]]:
    """Receive the answers to NUMBERS; return the good ones and the errors."""
    good: list[Reply] = []
    bad: list[CallError] = []
    for number in numbers:
        try:
            good.append(client.receive(number))
        except CallError as error:
            bad.append(error)
    return good, bad
