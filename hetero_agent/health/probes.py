"""The probes: what one look at a device finds.  Read-only, and run in the probe worker.

Everything comes from sysfs and /proc and by lstat(2) of nodes; no node is ever opened.  Of a device
whose power/runtime_status is not ``active`` only that is read: the rest would wake it.  What is
not there, or may not be read, is no finding.

A finding is ``[grade, reason, {evidence}]`` with the grades of `core.verdict.Grade`.  Memory is
what counts here: no module is imported that a worker doesn't need.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from typing import Any

    Found = list[list[Any]]

_ATTRIBUTE_MAX = 4096
_ENTRIES_MAX = 1024

#: Errors of a read that mean that the device doesn't answer, not that there is nothing to read.
_SICK = (errno.EIO, errno.ENXIO, errno.ETIMEDOUT, errno.EREMOTEIO)

#: Runtime states in which nothing but the state is read (Documentation/power/runtime_pm.rst).
_ASLEEP = ("suspended", "suspending", "resuming")

NVIDIA_GPUS = "/proc/driver/nvidia/gpus"


def probe(spec: dict[str, Any]) -> dict[str, Any]:
    """Look at one device; returns what is worth telling: ``findings``, ``counters`` (name ->
    count), ``asleep``.  SPEC is what `spec.of` made."""
    found: Found = []
    answer: dict[str, Any] = {}
    path = spec["path"]
    if path:
        if not os.path.lexists(path):
            return {"findings": [["failed", "it is not in sysfs any more", {"path": path}]]}
        status = text(f"{path}/power/runtime_status")
        if status in _ASLEEP:
            return {"asleep": True}
        if status == "error":
            found.append(["failed", "runtime power management failed", {"runtime-status": status}])
        _driver(path, spec["driver"], found)
    _nodes(spec["nodes"], found)
    if path and spec["pci"]:
        answer["counters"] = _pci(path, spec, found)
    if path and "rdma-port" in spec["probes"]:
        _ports(path, found)
    if "nvidia-proc" in spec["probes"] and spec["driver"] and spec["pci"]:
        _nvidia(spec["pci"], found)
    if found:
        answer["findings"] = found
    return answer


# -- reading ----------------------------------------------------------------------------------
def text(path: str) -> str:
    """Return what an attribute says, "" if it can't be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            return os.read(descriptor, _ATTRIBUTE_MAX).decode("utf-8", "replace").strip()
        finally:
            os.close(descriptor)
    except OSError:
        return ""


def number(path: str) -> int | None:
    """Return the number in an attribute, None if there is none."""
    value = text(path)
    return int(value) if value.removeprefix("-").isdecimal() and len(value) < 19 else None


def entries(path: str) -> list[str]:
    """Return the names in a directory, none if it can't be read."""
    try:
        return sorted(os.listdir(path))[:_ENTRIES_MAX]  # noqa: PTH208  (names, no Paths wanted)
    except OSError:
        return []


# -- every device -----------------------------------------------------------------------------
def _driver(path: str, driver: str, found: Found) -> None:
    if not driver:
        return
    try:
        target = os.readlink(f"{path}/driver")  # noqa: PTH115  (the text, not a Path)
    except FileNotFoundError:
        found.append(["failed", f"its driver {driver} is not bound any more", {"driver": ""}])
        return
    except OSError:
        return
    if not os.path.exists(f"{path}/driver"):  # noqa: PTH110
        found.append(["failed", f"its driver {driver} is gone, only a link is left", {"driver": target}])


def _nodes(nodes: list[list[Any]], found: Found) -> None:
    for path, kind, *expected in nodes:
        try:
            seen = os.lstat(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                found.append(["failed", f"its node {path} is gone", {"node": path}])
            continue
        if kind == "file":
            right = [seen.st_dev, seen.st_ino] == expected and stat.S_ISREG(seen.st_mode)
        else:
            is_kind = stat.S_ISBLK if kind == "block" else stat.S_ISCHR
            right = [os.major(seen.st_rdev), os.minor(seen.st_rdev)] == expected and is_kind(seen.st_mode)
        if not right:
            found.append(["failed", f"its node {path} is another one now", {"node": path}])


# -- PCI ----------------------------------------------------------------------------------------
def _pci(path: str, spec: dict[str, Any], found: Found) -> dict[str, int]:
    probes = spec["probes"]
    power = text(f"{path}/power_state")
    if power == "error":
        found.append(["failed", "its power state can't be told", {"power-state": power}])
    awake = power in ("", "D0", "unknown")
    if awake and "config" in probes and not _config(path, found):
        # off the bus: whatever else is read now is nonsense
        return {}
    counters: dict[str, int] = {}
    if "aer" in probes:
        for kind, name in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
            count = _total(text(f"{path}/aer_dev_{kind}"), f"TOTAL_ERR_{name}")
            if count is not None:
                counters[f"aer-{kind}"] = count
    if not awake:
        return counters
    if "link" in probes:
        _link(path, found)
    if text(f"{path}/power/control") != "auto":
        # reading sensors keeps a device awake that may go to sleep
        if "temperature" in probes:
            _temperature(path, found)
        if "amdgpu-ras" in probes:
            _ras(path, counters)
    return counters


def _config(path: str, found: Found) -> bool:
    """Read the vendor id from the device itself; all ones are what a bus without it answers.

    A virtual function has all ones there by design (PCI Express Base Specification 4.0, 9.3.4.1):
    its class and revision are read.
    """
    where, size = (8, 4) if os.path.lexists(f"{path}/physfn") else (0, 2)
    try:
        descriptor = os.open(f"{path}/config", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.pread(descriptor, size, where)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _SICK:
            name = errno.errorcode[error.errno or 0]
            found.append(["failed", "its config space can't be read", {"config": name}])
        return error.errno not in _SICK
    if content == b"\xff" * size:
        found.append(["failed", "off the bus: its config space reads 0xffff", {"config": "0xffff"}])
        return False
    return True


def _total(content: str, name: str) -> int | None:
    """Return the count in the line of NAME (Documentation/ABI/testing/sysfs-bus-pci-devices-aer)."""
    for line in content.splitlines():
        word, _, count = line.partition(" ")
        if word == name and count.strip().isdecimal():
            return int(count)
    return None


def _link(path: str, found: Found) -> None:
    """Compare the link's width with what the device and the port above can do.  The speed is no
    sign: drivers lower it to save power."""
    now = number(f"{path}/current_link_width")
    most = [number(f"{one}/max_link_width") for one in (path, os.path.dirname(path))]  # noqa: PTH120
    widths = [one for one in most if one is not None and 0 < one < 255]
    if now is None or not 0 < now < 255 or not widths or now >= min(widths):
        return
    speeds = {
        "link-speed": text(f"{path}/current_link_speed"),
        "max-link-speed": text(f"{path}/max_link_speed"),
    }
    evidence = {"link-width": str(now), "max-link-width": str(min(widths)), **speeds}
    found.append(["degraded", f"its link is x{now} of x{min(widths)}", evidence])


def _temperature(path: str, found: Found) -> None:
    """Compare the sensors with their critical limits, in millidegrees (Documentation/hwmon/
    sysfs-interface.rst)."""
    for sensor in entries(f"{path}/hwmon"):
        base = f"{path}/hwmon/{sensor}"
        for name in entries(base):
            if not (name.startswith("temp") and name.endswith("_crit")):
                continue
            which = name.removesuffix("_crit")
            limit, now = number(f"{base}/{name}"), number(f"{base}/{which}_input")
            alarm = number(f"{base}/{which}_crit_alarm") == 1
            if limit is None or now is None or not (alarm or 0 < limit <= now):
                continue
            label = text(f"{base}/{which}_label") or which
            evidence = {"sensor": label, "temperature": str(now), "critical": str(limit)}
            reason = f"{label} is {now / 1000:g} °C, critical is {limit / 1000:g} °C"
            found.append(["degraded", reason, evidence])


def _ras(path: str, counters: dict[str, int]) -> None:
    """Sum the errors of all blocks (drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c: ``ue: N``, ``ce: N``)."""
    for name in entries(f"{path}/ras"):
        if name.endswith("_err_count"):
            for line in text(f"{path}/ras/{name}").splitlines():
                word, _, count = line.partition(":")
                if word in ("ue", "ce") and count.strip().isdecimal():
                    counters[f"ras-{word}"] = counters.get(f"ras-{word}", 0) + int(count)


# -- vendors --------------------------------------------------------------------------------------
def _ports(path: str, found: Found) -> None:
    """Look at the ports of the RDMA devices; ``4: ACTIVE`` is the one that works
    (Documentation/ABI/stable/sysfs-class-infiniband)."""
    # soft RoCE has no device behind it: PATH is that of the RDMA device then
    places = {device: f"{path}/infiniband/{device}" for device in entries(f"{path}/infiniband")}
    places = places or {path.rsplit("/", 1)[-1]: path}
    states: dict[str, str] = {}
    for device, place in places.items():
        for port in entries(f"{place}/ports"):
            state = text(f"{place}/ports/{port}/state")
            if state:
                states[f"{device}/{port}"] = state
    for port, state in states.items():
        if not state.startswith("4:"):
            found.append(["degraded", f"port {port} is {state.partition(': ')[2] or state}", {"port": port}])


def _nvidia(address: str, found: Found) -> None:
    if os.path.isdir(NVIDIA_GPUS) and not os.path.lexists(f"{NVIDIA_GPUS}/{address}"):  # noqa: PTH112
        reason = "the driver has no entry for it in /proc any more"
        found.append(["failed", reason, {"path": f"{NVIDIA_GPUS}/{address}"}])
