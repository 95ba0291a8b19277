"""A /sys and a /dev of the test's own, in its own mount namespace: real files, that every process sees.

Unlike a mocked one by LD_PRELOAD these are seen by the agent's workers too, and a file can be a FIFO,
so that its reading hangs.  Device nodes are spare virtual consoles under other names: they can be
opened, and their numbers are nobody else's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from tests.support.kmsg import PrivateKmsg
from tests.support.namespace import mount
from tests.support.under import run_under

#: Runs a test in a mount namespace of its own.
in_own_mounts = run_under("unshare", "--mount", "--propagation", "private")

_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_FIRST_CONSOLE = 20


class FakeSys:
    """An empty machine: /sys, /dev, /run and the kernel's messages (``kernel``) belong to the test."""

    def __init__(self) -> None:
        for directory in ("/sys", "/dev", "/run"):
            mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", directory)
        for name, number in _NODES.items():
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(*number))
            Path(f"/dev/{name}").chmod(0o666)
        Path("/dev/shm").mkdir()
        Path("/dev/accel").mkdir()
        Path("/dev/kmsg").touch()
        Path("/sys/bus/pci/devices").mkdir(parents=True)
        Path("/sys/class/accel").mkdir(parents=True)
        Path("/sys/dev/char").mkdir(parents=True)
        self.kernel = PrivateKmsg()
        self._count = 0

    def npu(self, address: str, driver: str = "npu", **files: str) -> Path:
        """Add a processing accelerator at ADDRESS with an accel node; returns its directory in /sys.
        ``__`` in the name of a file is a slash."""
        number = self._count
        path = self._pci(
            address, driver, {"vendor": "0x1e52", "device": "0x401e", "class": "0x120000", **files}
        )
        (path / "config").write_bytes(bytes.fromhex("521e1e40"))
        self._node(path, "accel", f"accel{number}", f"accel/accel{number}")
        return path

    def gpu(self, address: str, ids: str, driver: str) -> Path:
        """Add a card with a render node; IDS is ``vendor:device``."""
        vendor, _, device = ids.partition(":")
        minor = 128 + self._count
        files = {"vendor": f"0x{vendor}", "device": f"0x{device}", "class": "0x038000"}
        path = self._pci(address, driver, files)
        (path / "config").write_bytes(bytes.fromhex(vendor)[::-1] + bytes.fromhex(device)[::-1])
        self._node(path, "drm", f"renderD{minor}", f"dri/renderD{minor}")
        return path

    def _pci(self, address: str, driver: str, files: Mapping[str, str]) -> Path:
        path = Path(f"/sys/devices/pci0000:00/{address}")
        given = {
            "uevent": f"PCI_SLOT_NAME={address}",
            "power_state": "D0",
            "power__runtime_status": "active",
            "power__control": "on",
            "numa_node": "0",
            **files,
        }
        for name, text in given.items():
            file = path / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        (path / "subsystem").symlink_to("/sys/bus/pci")
        self.bind(path, driver)
        Path(f"/sys/bus/pci/devices/{address}").symlink_to(path)
        return path

    def _node(self, path: Path, subsystem: str, name: str, below: str) -> None:
        """Add a class device with its node, BELOW /dev, which has the number of a console."""
        minor, self._count = _FIRST_CONSOLE + self._count, self._count + 1
        child = path / subsystem / name
        child.mkdir(parents=True)
        (child / "uevent").write_text(f"MAJOR=4\nMINOR={minor}\nDEVNAME={below}\n")
        classes = Path(f"/sys/class/{subsystem}")
        classes.mkdir(exist_ok=True)
        (child / "subsystem").symlink_to(classes)
        (classes / name).symlink_to(child)
        # relative, as the kernel's are
        Path(f"/sys/dev/char/4:{minor}").symlink_to(f"../..{str(child).removeprefix('/sys')}")
        node = Path("/dev") / below
        node.parent.mkdir(exist_ok=True)
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(4, minor))
        node.chmod(0o660)
        os.chown(node, 0, 44)

    def renumber(self, path: Path, minor: int) -> tuple[str, int]:
        """Give the accel node of the device at PATH, in /sys and in /dev, another MINOR, and tell nobody;
        returns the node's path and the number that it had."""
        uevent = next((path / "accel").glob("*/uevent"))
        fields = dict(line.split("=", 1) for line in uevent.read_text().splitlines())
        uevent.write_text(uevent.read_text().replace(f"MINOR={fields['MINOR']}\n", f"MINOR={minor}\n"))
        numbers = Path("/sys/dev/char")
        (numbers / f"{fields['MAJOR']}:{fields['MINOR']}").rename(numbers / f"{fields['MAJOR']}:{minor}")
        node = Path("/dev") / fields["DEVNAME"]
        node.unlink()
        os.mknod(node, 0o660 | stat.S_IFCHR, os.makedev(int(fields["MAJOR"]), minor))
        os.chown(node, 0, 44)
        return str(node), int(fields["MINOR"])

    def bind(self, path: Path, driver: str) -> None:
        """Make DRIVER the device's driver."""
        where = Path(f"/sys/bus/pci/drivers/{driver}")
        where.mkdir(parents=True, exist_ok=True)
        (path / "driver").symlink_to(where)

    def hang(self, path: Path, name: str) -> None:
        """Make reading a file of a device hang."""
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
