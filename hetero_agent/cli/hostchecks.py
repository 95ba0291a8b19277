"""What doctor looks at on the host itself, by reading: bus, unit, udev, PCI, node modes, disks, clock."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_agent import names
from hetero_agent.text import printable

POLICY_FILES: Final = tuple(
    Path(place) / f"{names.BUS_NAME}.conf"
    for place in ("/usr/share/dbus-1/system.d", "/etc/dbus-1/system.d", "/usr/local/share/dbus-1/system.d")
)

#: PCI classes of accelerators, as beginnings of the six digits of sysfs's ``class`` (pci.ids).
_CLASSES: Final = {
    "0300": "VGA controller",
    "0302": "3D controller",
    "0380": "display controller",
    "0b40": "co-processor",
    "1200": "processing accelerator",
    "0207": "InfiniBand adapter",
}

#: Vendors whose display controllers are a server's or a virtual machine's console (pci.ids).
_CONSOLES: Final = frozenset({"1a03", "102b", "1013", "1234", "1af4", "15ad", "1414", "1b36"})

#: The module that drives what a vendor makes, as far as one can say from the vendor.
_DRIVERS: Final = {
    "10de": "nvidia",
    "1002": "amdgpu",
    "8086": "i915 or xe",
    "1da3": "habanalabs",
    "15b3": "mlx5_core",
    "10ee": "xocl",
}

#: What the helper's unit must have before it can move network interfaces, by systemd's properties.
_MOVING: Final = {
    "CapabilityBoundingSet": ("CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE"),
    "PrivateNetwork": ("no",),
    "PrivateMounts": ("no",),
}
_NETWORK_EXAMPLE: Final = "/usr/share/doc/hetero-agent/examples/access-network.conf"

_FIRST_SANE_YEAR: Final = 2024
_SYSTEMCTL_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Finding:
    """One thing looked at.  LEVEL is ``ok``, ``note`` (worth knowing) or ``wrong``."""

    level: str
    subject: str
    text: str
    next: str = ""


def udev(control: Path = Path("/run/udev/control")) -> Finding:
    """Is udev there, which gives device nodes their final owner and mode?"""
    if control.exists():
        return Finding("ok", "udev", "running")
    return Finding(
        "wrong",
        "udev",
        f"{control} is missing: udev is not running here, so the agent listens to the kernel only",
        "start systemd-udevd; in a container mount /run/udev read-only",
    )


def policy(files: Iterable[Path] = POLICY_FILES) -> Finding:
    """Is the bus policy installed, without which the agent can't own its name?"""
    for path in files:
        if path.exists():
            return Finding("ok", "bus policy", str(path))
    return Finding(
        "wrong",
        "bus policy",
        f"{names.BUS_NAME}.conf is in none of dbus's directories: the agent may not own its name",
        f"install dbus/{names.BUS_NAME}.conf in /usr/share/dbus-1/system.d and systemctl reload dbus",
    )


def unit(systemctl: str | None = None, booted: Path = Path("/run/systemd/system")) -> Finding | None:
    """What systemd says of the service; None where there is no systemd (sd_booted(3))."""
    systemctl = systemctl or shutil.which("systemctl")
    if systemctl is None or not booted.is_dir():
        return None
    step = "systemctl enable --now hetero-agent; journalctl -u hetero-agent -e says why it ended"
    state = _state(systemctl, "hetero-agent.service")
    if state is None:
        return Finding("wrong", "service", "systemd does not answer", "systemctl status hetero-agent")
    if state.get("LoadState") != "loaded":
        return Finding("wrong", "service", "hetero-agent.service is not installed", "install the package")
    text = f"{state.get('ActiveState', '?')} ({state.get('SubState', '?')})"
    if state.get("StatusText"):
        text += f": {printable(state['StatusText'])}"
    good = state.get("ActiveState") in ("active", "reloading")
    return Finding("ok" if good else "wrong", "service", text, "" if good else step)


def helper(systemctl: str | None = None, booted: Path = Path("/run/systemd/system")) -> Finding | None:
    """Can the agent, which is not root, have done what only root can?  None where there is no systemd,
    or no such unit."""
    systemctl = systemctl or shutil.which("systemctl")
    if systemctl is None or not booted.is_dir():
        return None
    unit_name = "hetero-agent-access.socket"
    state = _state(systemctl, unit_name) or {}
    lacking = "leases give no ACLs on nodes and no CDI files"
    match state.get("LoadState"), state.get("ActiveState"):
        case "loaded", "active":
            return _told_of_helper(systemctl) or Finding("ok", "helper", f"{unit_name} is active")
        case "loaded", how:
            text = f"{unit_name} is {printable(how)}: {lacking}"
            return Finding("wrong", "helper", text, f"systemctl enable --now {unit_name}")
        case "masked", _:
            return Finding("note", "helper", f"{unit_name} is masked: {lacking}")
    return None


def network(
    systemctl: str | None = None,
    booted: Path = Path("/run/systemd/system"),
    config: Path = Path(names.CONFIG_FILE),
) -> Finding | None:
    """Where leases may take network interfaces along: has the helper the rights for that
    (examples/access-network.conf)?  None where they may not, or where no helper is installed."""
    systemctl = systemctl or shutil.which("systemctl")
    if systemctl is None or not booted.is_dir() or not _moves_netdevs(config):
        return None
    unit_name = "hetero-agent-access.service"
    state = _state(systemctl, unit_name, ("LoadState", *_MOVING))
    if state is None or state.get("LoadState") != "loaded":
        return None
    lacking = []
    for key, wanted in _MOVING.items():
        words = state.get(key, "").lower().split()
        if missing := [one for one in wanted if one.lower() not in words]:
            lacking.append(f"{key}={' '.join(missing)}")
    if not lacking:
        return Finding("ok", "network", f"{unit_name} has what moving network interfaces needs")
    return Finding(
        "wrong",
        "network",
        f"move-netdevs is on, but {unit_name} lacks {', '.join(lacking)}: leases with netdev=move are refused",
        f"cp {_NETWORK_EXAMPLE} /etc/systemd/system/{unit_name}.d/network.conf (mkdir -p that directory first);"
        f" systemctl daemon-reload; systemctl stop {unit_name}",
    )


def _moves_netdevs(config: Path) -> bool:
    import tomllib  # noqa: PLC0415 (only doctor reads it)

    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))["access"]["move-netdevs"] is True
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False  # none, not readable for this user, or wrong: the agent says that


def _told_of_helper(systemctl: str) -> Finding | None:
    """What the agent says in its status of a helper that it can't reach (access/remote.py)."""
    told = (_state(systemctl, "hetero-agent.service") or {}).get("StatusText", "").split("; ")
    for problem in told:
        if "access helper" in problem:
            text, _, step = problem.rpartition(": ")
            return Finding("wrong", "helper", printable(text), printable(step))
    return None


def _state(
    systemctl: str,
    unit_name: str,
    properties: Iterable[str] = ("LoadState", "ActiveState", "SubState", "StatusText"),
) -> dict[str, str] | None:
    """What systemd says of a unit; None if it does not answer."""
    try:
        done = subprocess.run(
            [systemctl, "show", "-p", ",".join(properties), unit_name],
            capture_output=True,
            text=True,
            timeout=_SYSTEMCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def pci_without_driver(sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """Accelerators on the PCI bus that no driver is bound to, or vfio-pci is."""
    for device in sorted(_entries(sysfs / "bus/pci/devices")):
        kind = _read(device / "class").removeprefix("0x")
        vendor = _read(device / "vendor").removeprefix("0x")
        name = _CLASSES.get(kind[:4])
        if name is None or (kind[:2] == "03" and vendor in _CONSOLES):
            continue
        driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
        where = f"{device.name}, a {name} of vendor {vendor or '?'}"
        if not driver:
            module = _DRIVERS.get(vendor)
            step = f"install and load its driver ({module})" if module else "install and load its driver"
            yield Finding("wrong", "pci", f"{where}, has no driver", step)
        elif driver == "vfio-pci":
            yield Finding("note", "pci", f"{where}, is given to virtual machines (vfio-pci)")


def pci_accelerators(sysfs: Path = Path("/sys")) -> int:
    """Return how many accelerators there are on the PCI bus."""
    count = 0
    for device in _entries(sysfs / "bus/pci/devices"):
        kind = _read(device / "class").removeprefix("0x")
        console = kind[:2] == "03" and _read(device / "vendor").removeprefix("0x") in _CONSOLES
        count += kind[:4] in _CLASSES and not console
    return count


def node(device: str, path: str) -> Finding | None:
    """Is a device's own node there?"""
    try:
        Path(path).stat()
    except FileNotFoundError:
        step = "udevadm settle; heteroctl show names the nodes; the driver may have failed"
        return Finding("wrong", "node", f"{path} of {device} does not exist", step)
    except OSError as error:
        return Finding("wrong", "node", f"{path} of {device}: {printable(error.strerror)}")
    return None


def directories(
    paths: Iterable[Path] = (Path(names.RUNTIME_DIR), Path(names.STATE_DIR)),
) -> Iterator[Finding]:
    """Can the agent store what it must: room, read-write, nothing set aside as corrupt?"""
    for path in paths:
        try:
            state = os.statvfs(path)
            aside = [one.name for one in path.iterdir() if ".corrupt" in one.name or ".aside" in one.name]
        except FileNotFoundError:
            continue
        except PermissionError:
            yield Finding("note", "store", f"{path} is readable for root only: not looked at")
            continue
        except OSError as error:
            yield Finding("wrong", "store", f"{path}: {printable(error.strerror)}", "is the disk well?")
            continue
        step = "grants go on; cordons can't be stored. Make room, or mount it read-write"
        if state.f_flag & os.ST_RDONLY:
            yield Finding("wrong", "store", f"{path} is read-only", step)
        elif state.f_bavail == 0 or (state.f_files and state.f_favail == 0):
            yield Finding("wrong", "store", f"{path} is full", step)
        elif aside:
            names_shown = ", ".join(printable(one, 80) for one in sorted(aside)[:4])
            yield Finding(
                "wrong",
                "store",
                f"{path} holds files that were set aside as unusable: {names_shown}",
                "journalctl -u hetero-agent says what was wrong; remove them once looked at",
            )
        else:
            yield Finding("ok", "store", f"{path} is writable and has room")


def clock(now: float | None = None) -> Finding:
    """Is the wall clock set?  Deadlines don't need it; what people read does."""
    moment = time.time() if now is None else now
    year = time.gmtime(moment).tm_year
    if year < _FIRST_SANE_YEAR:
        return Finding("wrong", "clock", f"the wall clock says {year}", "timedatectl set-ntp true")
    return Finding("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment)))


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip().lower()
    except OSError:
        return ""
