"""One qemu process: its command line, the monitor (QMP), the port to the guest, its end."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support import process
from tests.support.wait import wait_until

#: Part of the key of saved states: one qemu's state is not another's.
PROGRAM: Final = "qemu-system-x86_64"

#: Root ports: what is plugged where.  Those that `DEVICES` leaves free are for hotplug.
PORTS: Final = 8

#: What is plugged in from the start: two GPUs and an accelerator.
DEVICES: Final = (
    "virtio-gpu-pci,id=gpu0,bus=port0",
    "virtio-gpu-pci,id=gpu1,bus=port1",
    "virtio-blk-pci,id=accelerator0,bus=port2,class=0x1200,drive=memory0,serial=LAB-ACC-0,aer=on",
)

#: What the agent calls them; and the board's SMBus controller, whose driver lets it sleep.
GPU_0: Final = "0000:01:00.0"
GPU_1: Final = "0000:02:00.0"
ACCELERATOR: Final = "0000:03:00.0"
SLEEPER: Final = "0000:00:1f.3"

_MEMORY: Final = "768M"
_KERNEL_LINE: Final = (
    "console=ttyS0 quiet net.ifnames=0 panic=-1 systemd.show_status=0 mitigations=off"
    " rootfstype=ext4 fsck.mode=skip"
)


def command_line(
    system: Path, directory: Path, *, memory_shared: bool, disk_kept: bool, restored: bool
) -> list[str]:
    """Return the command for the machine in SYSTEM (`image.make`), its sockets in DIRECTORY.

    MEMORY_SHARED writes what the guest does to its memory into the file ``memory``, so that it can be
    kept; else it is a private copy.  DISK_KEPT does the same for the disk.
    """
    memory = f"memory-backend-file,id=memory,size={_MEMORY},mem-path={system}/memory"
    disk = f"file={system}/disk,if=none,id=disk,format=raw,cache=unsafe"
    command = [
        PROGRAM, "-name", "hetero-agent-lab", "-nodefaults", "-no-user-config", "-display", "none",
        "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", _MEMORY,
        "-object", f"{memory},share={'on' if memory_shared else 'off'}",
        "-machine", "q35,memory-backend=memory",
        "-kernel", f"{system}/vmlinuz", "-initrd", f"{system}/initrd", "-append", _KERNEL_LINE,
        "-drive", disk if disk_kept else f"{disk},snapshot=on", "-device", "virtio-blk-pci,drive=disk",
        "-serial", f"file:{directory}/serial",
        "-qmp", f"unix:{directory}/monitor,server=on,wait=off",
        "-device", "virtio-serial-pci,id=serial0",
        "-chardev", f"socket,id=exec,path={directory}/exec,server=on,wait=off",
        "-device", "virtserialport,bus=serial0.0,chardev=exec,name=org.heteroagent.lab",
        "-netdev", "hubport,id=net0,hubid=0", "-device", "virtio-net-pci,netdev=net0",
        "-device", "nvme-subsys,id=subsys0",
        # reads give nothing and writes go nowhere
        "-blockdev", "null-co,node-name=memory0,size=16777216,read-zeroes=on",
        "-blockdev", "null-co,node-name=memory1,size=16777216,read-zeroes=on",
    ]  # fmt: skip
    for number in range(PORTS):
        slot = f"chassis={number + 1},slot={number + 1},bus=pcie.0,addr={number + 16:#x}"
        command += ["-device", f"pcie-root-port,id=port{number},{slot}"]
    for device in DEVICES:
        command += ["-device", device]
    return [*command, "-incoming", "defer"] if restored else command


class MonitorError(AssertionError):
    """QMP refused a command."""


class Qemu:
    """A running qemu.  `close` ends it."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self.directory = directory
        self._log = directory / "qemu.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        process.logs.append(("qemu", self._log))
        process.logs.append(("the virtual machine's console", directory / "serial"))
        self.events: list[Mapping[str, Any]] = []
        try:
            self._monitor = self._connect("monitor")
            self._monitor_lines = self._monitor.makefile("r")
            self._monitor_lines.readline()
            self.monitor("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def _connect(self, name: str) -> socket.socket:
        path = self.directory / name

        def attempt() -> socket.socket | None:
            if self._process.poll() is not None:
                raise AssertionError(f"qemu ended: {self._log.read_text()}")
            one = socket.socket(socket.AF_UNIX)
            try:
                one.connect(str(path))
            except OSError:
                one.close()
                return None
            return one

        found = wait_until(attempt, 30, f"qemu's socket {name}")
        assert found is not None
        found.settimeout(60)
        return found

    def connect_guest(self) -> socket.socket:
        """Return a connection to the guest's port."""
        return self._connect("exec")

    def monitor(self, command: str, **arguments: Any) -> Any:
        """Have the monitor do COMMAND and return its answer; events are kept in `events`.

        Raises MonitorError if it refuses.
        """
        text = json.dumps({"execute": command, "arguments": arguments})
        self._monitor.sendall(text.encode() + b"\n")
        while True:
            answer = json.loads(self._monitor_lines.readline())
            if "event" in answer:
                self.events.append(answer)
            elif "error" in answer:
                raise MonitorError(f"{command}: {answer['error']['desc']}")
            else:
                return answer["return"]

    def human(self, line: str) -> str:
        """Have the human monitor do LINE and return what it says."""
        return str(self.monitor("human-monitor-command", **{"command-line": line}))

    def migration(self, wanted: str = "completed", timeout: float = 120) -> None:
        """Wait until the state is saved or restored."""

        def status() -> str:
            return str(self.monitor("query-migrate").get("status", ""))

        end = time.monotonic() + timeout
        while (now := status()) != wanted:
            assert now not in ("failed", "cancelled"), f"migration {now}: {self._log.read_text()}"
            assert time.monotonic() < end, f"migration is still {now!r}"
            time.sleep(0.02)

    def ended(self) -> bool:
        """Tell whether it has ended by itself."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Kill it: what the guest wrote is thrown away anyway."""
        self._process.kill()
        self._process.wait(30)
        for name in ("_monitor_lines", "_monitor"):
            if hasattr(self, name):
                getattr(self, name).close()


def remove_directory(directory: Path) -> None:
    """Remove a machine's directory with its sockets."""
    shutil.rmtree(directory, ignore_errors=True)
