"""The machine booted once and kept as it was then, so that each test has it back in seconds.

Under emulation a boot takes most of a minute.  The guest's memory is a file that the booting
machine shares; what else there is of its state is a migration stream.  A restored machine maps the
memory copy-on-write and writes its disk into a file that goes with it: what is kept never changes.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.support.wait import wait_until
from tests.system import image as root_file_system
from tests.system import product
from tests.vm import cache, image
from tests.vm.machine import Machine
from tests.vm.qemu import (
    ACCELERATOR,
    GPU_0,
    GPU_1,
    PROGRAM,
    SLEEPER,
    Qemu,
    command_line,
    remove_directory,
)

_SCRATCH: Final = "hetero-agent-vm-"

#: Seconds that a boot may take on a busy machine.
BOOT: Final = 300


def system() -> Path:
    """Return the directory of the booted machine; make what is missing."""
    base, kernel, package = root_file_system.build(), image.kernel(), product.package()
    here = Path(__file__).parent
    version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [
        base.name, kernel.name, package, version, image.GUEST,
        *(here / name for name in ("image.py", "qemu.py", "saved.py")),
    ]  # fmt: skip

    def make(where: Path) -> None:
        image.make(where, base, kernel, package)
        _boot_and_save(where)

    return cache.obtain("system", cache.digest(parts), make)


def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-", dir="/var/tmp"))


def sweep() -> None:
    """Remove the directories of runs that were killed; their machines ended with them."""
    for directory in Path("/var/tmp").glob(f"{_SCRATCH}*"):
        pid = directory.name.removeprefix(_SCRATCH).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            remove_directory(directory)


def wait_for_boot(machine: Machine, timeout: float = BOOT) -> None:
    """Wait until systemd and the agent are up and the devices of the first moment are idle."""
    state = machine.attempt("systemctl is-system-running --wait", timeout)[1].strip()
    assert state == "running", f"the guest is {state}: {machine.attempt('systemctl --failed --no-legend')[1]}"
    machine.run("udevadm settle")
    for device in (GPU_0, GPU_1, ACCELERATOR, SLEEPER):
        machine.wait_for_device(device, 60, State="idle")


def _boot_and_save(where: Path) -> None:
    directory = _directory()
    qemu = Qemu(command_line(where, directory, memory_shared=True, disk_kept=True, restored=False), directory)
    machine = Machine(qemu)
    try:
        wait_for_boot(machine)
        machine.run("systemctl start lab-bus.service && journalctl --sync && sync")
        qemu.monitor("stop")
        qemu.monitor(
            "migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}]
        )
        qemu.monitor("migrate", uri=f"exec:cat >'{where}/state'")
        qemu.migration()
        qemu.monitor("quit")
        wait_until(qemu.ended, 60, "the end of qemu")
    finally:
        machine.close()
        remove_directory(directory)


def restored(where: Path) -> tuple[Machine, Path]:
    """Start a machine from what `system` gave; returns it and the directory to remove after it."""
    directory = _directory()
    try:
        qemu = Qemu(
            command_line(where, directory, memory_shared=False, disk_kept=False, restored=True), directory
        )
        try:
            qemu.monitor(
                "migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}]
            )
            qemu.monitor("migrate-incoming", uri=f"exec:cat '{where}/state'")
            qemu.migration()
            qemu.monitor("cont")
        except BaseException:
            qemu.close()
            raise
    except BaseException:
        remove_directory(directory)
        raise
    return Machine(qemu), directory
