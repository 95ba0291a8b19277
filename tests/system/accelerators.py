"""Accelerators that are not there: PCI devices of class 0x1200 on a machine, under its real udevd.

Their directories lie in overlays over the machine's /sys.  The events are the kernel's own as far
as anybody can tell: what a process with CAP_SYS_ADMIN sends to the kernel's uevent socket, the
kernel numbers and sends on to all who listen (kernel: lib/kobject_uevent.c, uevent_net_rcv()).
udevd runs its rules, sets the node's mode and links, and tells libudev's users.  The node is a
spare virtual console under another name, so it can be opened and held.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.support.process import PYTHON
from tests.system.machine import Machine

RESOURCE = "heteroagent.org/accelerator"

#: Consoles from this number on are the nodes; logins and other tests take others.
_FIRST_CONSOLE = 32
_TTY_MAJOR = 4
_ROOT = "/devices/pci0000:f0"
_DRIVER = "/sys/bus/pci/drivers/lab"

#: The rule of systemd 253 and later for this subsystem, and a link of the lab's own.
_RULES = """\
SUBSYSTEM=="accel", GROUP="render", MODE="0660", SYMLINK+="lab/%k"
"""

_OVERLAYS = """
mkdir -p /run/lab-sys
cd /run/lab-sys
for one in devices bus class dev; do
    mkdir $one $one.work
    mount -t overlay overlay -o lowerdir=/sys/$one,upperdir=$one,workdir=$one.work /sys/$one
done
mkdir -p /dev/accel /sys/class/accel %(driver)s
udevadm control --reload
"""

# NETLINK_KOBJECT_UEVENT is 15; flags REQUEST and ACK.  Each argument is one event, its lines the properties.
_INJECT = """
import socket, struct, sys
for text in sys.argv[1:]:
    fields = dict(line.split("=", 1) for line in text.splitlines())
    body = (fields["ACTION"] + "@" + fields["DEVPATH"]).encode() + b"\\0"
    body += b"".join(line.encode() + b"\\0" for line in text.splitlines())
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15) as one:
        one.bind((0, 0))
        one.settimeout(5)
        one.sendto(struct.pack("=IHHII", 16 + len(body), 16, 5, 1, 0) + body, (0, 0))
        status = struct.unpack_from("=i", one.recv(8192), 16)[0]
        if status:
            sys.exit(f"the kernel refused {text!r}: {status}")
"""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One: its device ID, its NODE, the DIRECTORY of the PCI device below /sys, its NUMBER."""

    number: int

    @property
    def id(self) -> str:
        return f"0000:f0:{self.number:02x}.0"

    @property
    def directory(self) -> str:
        return f"{_ROOT}/{self.id}"

    @property
    def child(self) -> str:
        """The directory of its class device below /sys."""
        return f"{self.directory}/accel/accel{self.number}"

    @property
    def node(self) -> str:
        return f"/dev/accel/accel{self.number}"

    @property
    def link(self) -> str:
        """The link that the lab's udev rule makes."""
        return f"/dev/lab/accel{self.number}"

    @property
    def device_number(self) -> tuple[int, int]:
        return _TTY_MAJOR, _FIRST_CONSOLE + self.number


class Accelerators:
    """The false hardware of MACHINE."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._plugged: dict[int, Accelerator] = {}
        machine.write("/etc/udev/rules.d/90-lab.rules", _RULES)
        machine.shell(_OVERLAYS % {"driver": _DRIVER})

    def plug(self, count: int = 1) -> list[Accelerator]:
        """Plug in COUNT more, each with its driver bound."""
        free = [number for number in range(1, 24) if number not in self._plugged][:count]
        fresh = [Accelerator(number) for number in free]
        events = []
        for one in fresh:
            self._plugged[one.number] = one
            directory = self._sys(one.directory)
            directory.mkdir(parents=True)
            for name, text in (("vendor", "0x1e52"), ("device", "0x0001"), ("class", "0x120000")):
                (directory / name).write_text(f"{text}\n")
            (directory / "numa_node").write_text("0\n")
            (directory / "uevent").write_text(f"PCI_CLASS=120000\nPCI_SLOT_NAME={one.id}\n")
            _link(directory / "subsystem", "../../../bus/pci")
            _link(self._sys(f"/bus/pci/devices/{one.id}"), f"../../..{one.directory}")
            events.append(self._pci("add", one))
            events += self._bind(one)
        self._send(*events)
        return fresh

    def unplug(self, *which: Accelerator) -> None:
        """Take them out, all if none is named."""
        events = []
        for one in which or tuple(self._plugged.values()):
            if self._sys(one.child).exists():
                events += self._unbind(one)
            self._sys(f"/bus/pci/devices/{one.id}").unlink()
            shutil.rmtree(self._sys(one.directory))
            events.append(self._pci("remove", one))
            del self._plugged[one.number]
        self._send(*events)

    def bind(self, one: Accelerator) -> None:
        """Bind its driver: class device and node come."""
        self._send(*self._bind(one))

    def unbind(self, one: Accelerator) -> None:
        """Unbind its driver: class device and node go."""
        self._send(*self._unbind(one))

    def change(self, one: Accelerator, **attributes: str) -> None:
        """Change attributes of the PCI device and say so."""
        for name, text in attributes.items():
            (self._sys(one.directory) / name).write_text(f"{text}\n")
        self._send(self._pci("change", one))

    # -- the machine's /sys -----------------------------------------------------------------------
    def _sys(self, path: str) -> Path:
        return self._machine.path(f"/sys{path}")

    def _bind(self, one: Accelerator) -> list[str]:
        child = self._sys(one.child)
        major, minor = one.device_number
        child.mkdir(parents=True)
        (child / "dev").write_text(f"{major}:{minor}\n")
        (child / "uevent").write_text(f"MAJOR={major}\nMINOR={minor}\nDEVNAME=accel/accel{one.number}\n")
        _link(child / "subsystem", "../../../../../class/accel")
        _link(child / "device", "../..")
        _link(self._sys(f"/class/accel/accel{one.number}"), f"../..{one.child}")
        _link(self._sys(f"/dev/char/{major}:{minor}"), f"../..{one.child}")
        _link(self._sys(one.directory) / "driver", "../../../bus/pci/drivers/lab")
        # what devtmpfs does in the kernel
        os.mknod(self._machine.path(one.node), 0o020600, os.makedev(major, minor))
        return [self._accel("add", one), self._pci("bind", one, DRIVER="lab")]

    def _unbind(self, one: Accelerator) -> list[str]:
        major, minor = one.device_number
        self._machine.path(one.node).unlink()
        shutil.rmtree(self._sys(f"{one.directory}/accel"))
        for path in (
            f"/class/accel/accel{one.number}",
            f"/dev/char/{major}:{minor}",
            f"{one.directory}/driver",
        ):
            self._sys(path).unlink()
        return [self._accel("remove", one), self._pci("unbind", one)]

    # -- events ---------------------------------------------------------------------------------
    @staticmethod
    def _pci(action: str, one: Accelerator, **more: str) -> str:
        given = {"ACTION": action, "DEVPATH": one.directory, "SUBSYSTEM": "pci"}
        return _text({**given, "PCI_CLASS": "120000", "PCI_SLOT_NAME": one.id, **more})

    @staticmethod
    def _accel(action: str, one: Accelerator) -> str:
        major, minor = one.device_number
        given = {"ACTION": action, "DEVPATH": one.child, "SUBSYSTEM": "accel"}
        return _text({**given, "MAJOR": str(major), "MINOR": str(minor), "DEVNAME": f"accel/accel{one.number}"})

    def _send(self, *events: str) -> None:
        if events:
            self._machine.run(PYTHON, "-ISc", _INJECT, *events)


def _text(fields: dict[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in fields.items())


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
