"""Mocked hardware: tests that run under umockdev-wrapper, and a bed to put devices in.

umockdev redirects /sys, /dev and /proc to the testbed by LD_PRELOAD, so the test itself runs in
a child of pytest that was started under its wrapper.  Its sender aborts when a monitor's buffer is
full, and its open(2) holds a lock, so what hangs must hang in read(2).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.under import P, run_under

#: Prefix for tests that must not have CAP_SYS_ADMIN (an exclusive terminal answers EBUSY then).
WITHOUT_SYS_ADMIN = ("setpriv", "--inh-caps=-sys_admin", "--bounding-set=-sys_admin")


def in_umockdev(*prefix: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run the decorated test in a child pytest under ``PREFIX umockdev-wrapper``."""
    return run_under(*prefix, "umockdev-wrapper")


class Bed:
    """A testbed and what the tests put in it.  Paths are as the code under test sees them."""

    def __init__(self) -> None:
        import gi

        gi.require_version("UMockdev", "1.0")
        from gi.repository import UMockdev

        self._bed: Any = UMockdev.Testbed.new()
        self.root = Path(self._bed.get_root_dir())
        for path in ("sys/bus/pci/devices", "sys/dev/char"):
            (self.root / path).mkdir(parents=True)

    def real(self, path: str) -> Path:
        """Where PATH really lies."""
        return self.root / path.lstrip("/")

    def pci(
        self, address: str, ids: str, class_code: str, driver: str = "", parent: str = "", **attributes: str
    ) -> str:
        """Add a PCI device; IDS is ``vendor:device``; ``__`` in the name of an attribute is a slash."""
        vendor, _, device = ids.partition(":")
        given = {"vendor": f"0x{vendor}", "device": f"0x{device}", "class": f"0x{class_code}", "numa_node": "0"}
        given |= {key.replace("__", "/"): value for key, value in attributes.items()}
        root = f"pci{address[:-8]}:00" if address.count(":") == 2 else "pci0000:00"
        path = self._bed.add_device(
            "pci",
            address if parent else f"{root}/{address}",
            parent or None,
            [item for pair in given.items() for item in pair],
            ["PCI_CLASS", class_code.lstrip("0"), "PCI_ID", ids.upper(), "PCI_SLOT_NAME", address],
        )
        if driver:
            self.bind(path, driver)
        return str(path)

    def bind(self, path: str, driver: str) -> None:
        """Make DRIVER the device's driver."""
        where = self.real(f"/sys/bus/pci/drivers/{driver}")
        where.mkdir(parents=True, exist_ok=True)
        self.real(path).joinpath("driver").symlink_to(where)

    def unbind(self, path: str) -> None:
        """Take the device's driver away."""
        self.real(path).joinpath("driver").unlink()

    def child(self, parent: str | None, subsystem: str, name: str, node: str = "", number: str = "") -> str:
        """Add a class device, with a node of NUMBER (``major:minor``) in /dev if NODE is given."""
        major, _, minor = number.partition(":")
        properties = ["DEVNAME", f"/dev/{node}", "MAJOR", major, "MINOR", minor] if node else []
        # class devices lie in a directory named like their class; devices of a bus don't
        below = (
            name if subsystem == "virtio" or not (parent or subsystem == "platform") else f"{subsystem}/{name}"
        )
        path = str(self._bed.add_device(subsystem, below, parent, ["dev", number] if node else [], properties))
        if node:
            self.node(node, number)
        return path

    def bus_device(self, parent: str, subsystem: str, name: str, node: str, number: str) -> str:
        """Add a device of a bus below PARENT that has a node of its own."""
        major, _, minor = number.partition(":")
        properties = ["DEVNAME", f"/dev/{node}", "MAJOR", major, "MINOR", minor]
        path = str(self._bed.add_device(subsystem, name, parent, ["dev", number], properties))
        self.node(node, number)
        return path

    def node(self, node: str, number: str, mode: int = 0o660, group: int = 44) -> None:
        """Make a character node in /dev with the number that the bed answers for it."""
        path = self.root / "dev" / node
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.chmod(mode)
        os.chown(path, 0, group)
        link = self.root / "dev/.node" / node.replace("/", "_")
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(number)

    def nvidia(self, address: str, minor: int, uuid: str = "") -> None:
        """Make what NVIDIA's driver shows of a card in /proc, and the card's node."""
        self.file(
            f"/proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 100\nGPU UUID: \t {uuid or f'GPU-{minor:08x}'}\n"
            f"Video BIOS: \t 96.00.89.00.01\nBus Location: \t {address}\nDevice Minor: \t {minor}\n",
        )
        self.node(f"nvidia{minor}", f"195:{minor}", 0o666)

    def file(self, path: str, content: str) -> None:
        """Write a file, with the directories above it."""
        real = self.real(path)
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_text(content)

    def link(self, path: str, target: str) -> None:
        """Make PATH a link to TARGET as the kernel sees it (not redirected)."""
        self.real(path).unlink(missing_ok=True)
        self.real(path).parent.mkdir(parents=True, exist_ok=True)
        self.real(path).symlink_to(target)

    def uevent(self, path: str, action: str) -> None:
        """Send a uevent of both kinds, as the kernel and as udev."""
        self._bed.uevent(path, action)

    def remove(self, path: str) -> None:
        """Take a device out, children first, telling everybody."""
        for child in sorted(self.real(path).rglob("uevent"), reverse=True):
            inner = "/" + str(child.parent.relative_to(self.root))
            self._bed.uevent(inner, "remove")
            self._bed.remove_device(inner)


@contextlib.contextmanager
def bed() -> Iterator[Bed]:
    """A testbed for one test."""
    yield Bed()
