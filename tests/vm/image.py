"""Disk, kernel and initrd of the virtual machine, made from Debian's archive; nothing is installed here.

The root file system is that of `tests.system`, the kernel Debian's package unpacked, the agent the
package of this checkout, with profiles for the machine's devices (`guest/profiles`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.vm import cache

GUEST: Final = Path(__file__).with_name("guest")

#: The agent's configuration in the guest, where starting a program alone takes seconds.
CONFIG: Final = """\
[grant]
effects-timeout = 20
"""

#: Modules that the guest has, with those that they need.
MODULES: Final = (
    "uio_pci_generic", "virtio_pci", "virtio_blk", "virtio_console", "virtio_net", "virtio-gpu", "nvme",
    "i2c-i801", "i2c-dev", "rdma_rxe", "e1000e", "bonding", "8021q", "dummy", "crc32_generic", "vgem",
    "aer_inject", "ext4", "crc32c_generic", "autofs4", "binfmt_misc", "loop", "efi-pstore", "configfs",
    "af_packet", "ipv6", "dmi-sysfs", "fuse",
)  # fmt: skip

#: Modules that the initrd loads to find the root file system; before them the accelerator's driver, since
#: of two that a device fits the first one gets it.
_EARLY: Final = ("uio_pci_generic", "virtio_pci", "virtio_blk", "crc32c_generic", "ext4")

#: Units that cost time under emulation and serve nobody in the guest.
_MASKED: Final = (
    "getty@tty1.service", "serial-getty@ttyS0.service", "systemd-timesyncd.service", "apt-daily.timer",
    "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "systemd-pstore.service", "systemd-rfkill.socket",
)  # fmt: skip


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(one) for one in command], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


# -- the kernel ---------------------------------------------------------------------------------------
def _newest_kernel() -> tuple[str, str]:
    """Return name and version of Debian's kernel package, as apt knows it."""
    needs = _run("apt-cache", "depends", "linux-image-amd64")
    found = re.search(r"Depends: (linux-image-\S+)", needs)
    if found is None:
        raise RuntimeError("apt knows no linux-image-amd64: apt-get update")
    shown = _run("apt-cache", "show", "--no-all-versions", found[1])
    return found[1], shown.partition("Version: ")[2].split()[0]


def kernel() -> Path:
    """Return the directory with Debian's kernel package unpacked."""
    newest = _newest_kernel()
    if not cache.has("kernel", cache.digest(newest)):
        # the archive keeps only the newest, of which apt may not have heard yet
        _run("apt-get", "--quiet", "update")
        newest = _newest_kernel()

    def make(where: Path) -> None:
        asked = ("-o", "APT::Sandbox::User=root", "download", "=".join(newest))
        _run("apt-get", "--quiet", *asked, cwd=where)
        (file,) = where.glob("*.deb")
        _run("dpkg", "--extract", file, where)
        file.unlink()

    return cache.obtain("kernel", cache.digest(newest), make)


# -- the disk -----------------------------------------------------------------------------------------
def make(where: Path, root: Path, linux: Path, package: Path) -> None:
    """Put ``vmlinuz``, ``initrd`` and ``disk`` (ext4) into WHERE, from the root file system without the
    agent, the result of `kernel`, and the agent's Debian package."""
    tree = where / "tree"
    _run("cp", "--archive", "--no-target-directory", root, tree)
    _modules(tree, linux)
    _settings(tree)
    _agent(tree, package)
    (version,) = (one.name for one in (linux / "lib/modules").iterdir())
    shutil.copy(linux / f"boot/vmlinuz-{version}", where / "vmlinuz")
    _initrd(where, tree, version)
    disk = where / "disk"
    disk.touch()
    _run("truncate", "--size=1200M", disk)
    _run("mke2fs", "-q", "-t", "ext4", "-d", tree, "-F", disk)
    shutil.rmtree(tree)


def _dependencies(tree: Path, version: str, names: tuple[str, ...]) -> list[Path]:
    """Return the files of modules NAMES and of what they need, in the order of loading."""
    found: dict[Path, None] = {}
    for name in names:
        shown = _run("modprobe", "-d", tree, "-S", version, "--show-depends", name)
        for line in shown.splitlines():
            kind, _, path = line.strip().partition(" ")
            if kind == "insmod":
                found[Path(path.split()[0])] = None
    return list(found)


def _modules(tree: Path, linux: Path) -> None:
    (source,) = (linux / "lib/modules").iterdir()
    _run("depmod", "-b", linux, source.name)
    place = tree / "usr/lib/modules" / source.name
    for file in _dependencies(linux, source.name, MODULES):
        copy = place / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(source / name, place)
    _run("depmod", "-b", tree, source.name)


def _settings(tree: Path) -> None:
    (tree / "etc/hostname").write_text("lab\n")
    (tree / "etc/machine-id").write_text("")
    (tree / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
    journal = tree / "etc/systemd/journald.conf.d/lab.conf"
    journal.parent.mkdir(parents=True)
    # over reboots, and every line of every test
    journal.write_text("[Journal]\nStorage=persistent\nRateLimitIntervalSec=0\nSystemMaxUse=64M\n")
    (tree / "etc/modules-load.d/lab.conf").write_text("i2c-dev\n")
    for name in _MASKED:
        (tree / "etc/systemd/system" / name).symlink_to("/dev/null")
    (tree / "usr/lib/lab").mkdir()
    shutil.copy(GUEST / "lab-exec", tree / "usr/lib/lab")
    for name in ("lab-exec.service", "lab-bus.service"):
        shutil.copy(GUEST / name, tree / "etc/systemd/system")
    shutil.copy(GUEST / "99-lab.rules", tree / "etc/udev/rules.d")
    profiles = tree / "etc/hetero-agent/profiles.d"
    profiles.mkdir(parents=True)
    for file in (GUEST / "profiles").iterdir():
        shutil.copy(file, profiles)


def _agent(tree: Path, package: Path) -> None:
    """Install the agent."""
    shutil.copy(package, tree / "tmp")
    _run("chroot", tree, "dpkg", "--install", f"/tmp/{package.name}")
    (tree / "tmp" / package.name).unlink()
    (tree / "etc/hetero-agent/hetero-agent.conf").write_text(CONFIG)


def _initrd(where: Path, tree: Path, version: str) -> None:
    top = where / "initrd.d"
    for name in ("bin", "dev", "modules", "proc", "root", "sys"):
        (top / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", top / "bin/busybox")
    shutil.copy(GUEST / "init", top / "init")
    for number, file in enumerate(_dependencies(tree, version, _EARLY)):
        shutil.copy(file, top / f"modules/{number:02}-{file.name}")
    with (where / "initrd").open("wb") as out:
        names = "\n".join(str(one.relative_to(top)) for one in sorted(top.rglob("*")))
        subprocess.run(
            ["cpio", "--create", "--format=newc", "--quiet"],
            input=names.encode(),
            stdout=out,
            cwd=top,
            check=True,
        )
    shutil.rmtree(top)
