"""What vendors' drivers tell outside the device's own directory, or in a form of their own.

Blocking: runs in reader threads.  All of it is answered from the driver's memory, whatever the
device's power state.
"""

from __future__ import annotations

import contextlib
import re
from typing import Final

from hetero_agent.core import address
from hetero_agent.discovery import reader
from hetero_agent.discovery.facts import KfdNode, MigInstance

KFD_TOPOLOGY: Final = "/sys/class/kfd/kfd/topology"
KFD_NODES: Final = f"{KFD_TOPOLOGY}/nodes"
NVIDIA: Final = "/proc/driver/nvidia"

_VERSION = re.compile(r"[0-9]+(\.[0-9]+){1,3}")
_ASCEND = re.compile(r"\s*([0-9a-fA-F:.]+)\s*-+>\s*([0-9]{1,4})\s*")


def nvidia(pci: str) -> dict[str, str]:
    """Read /proc/driver/nvidia/gpus/ADDRESS/information (NVIDIA's driver README, "The NVIDIA
    /proc interface") and the version of the module."""
    fields = reader.pairs(reader.text(f"{NVIDIA}/gpus/{pci}/information") or "", ":")
    found = {
        "nvidia-minor": fields.get("Device Minor", ""),
        "uuid": fields.get("GPU UUID", ""),
        "model": fields.get("Model", ""),
        "firmware": fields.get("Video BIOS", ""),
    }
    if not found["nvidia-minor"].isdecimal():
        del found["nvidia-minor"]
    version = reader.text("/sys/module/nvidia/version") or ""
    if _VERSION.fullmatch(version):
        found["driver-version"] = version
    return {key: value for key, value in found.items() if value and "?" not in value and value != "N/A"}


def mig_names(minor: str) -> frozenset[tuple[int, int]]:
    """Return the (GPU instance, compute instance) pairs of the card with this minor.  Only
    directories are listed, which the driver doesn't notice, so this can't hang."""
    found = set()
    base = f"{NVIDIA}/capabilities/gpu{minor}/mig"
    for outer in reader.entries(base) if minor else ():
        if outer.startswith("gi") and outer[2:].isdecimal():
            for inner in reader.entries(f"{base}/{outer}"):
                if inner.startswith("ci") and inner[2:].isdecimal():
                    found.add((int(outer[2:]), int(inner[2:])))
    return frozenset(found)


def mig(minor: str) -> tuple[MigInstance, ...]:
    """Read the MIG instances of the card with this minor (NVIDIA MIG User Guide, "Device Nodes and
    Capabilities").  One whose capabilities can't be read is left out: it can't be given to anybody."""
    base = f"{NVIDIA}/capabilities/gpu{minor}/mig"
    found = []
    for outer, inner in sorted(mig_names(minor)):
        gpu = _capability(f"{base}/gi{outer}/access")
        compute = _capability(f"{base}/gi{outer}/ci{inner}/access")
        if gpu and compute:
            found.append(MigInstance(outer, inner, gpu, compute))
    return tuple(found)


def _capability(path: str) -> int:
    return _number(reader.pairs(reader.text(path) or "", ":").get("DeviceFileMinor"))


def ascend(path: str, pci: str) -> dict[str, str]:
    """Read which /dev/davinciN the device at PATH is: each device has the table of all of them,
    ``0000:c1:00.0 ---> 0`` a line (Huawei's driver, devdrv_sysfs.c: bdf_to_devid)."""
    for line in (reader.text(f"{path}/devdrv_sysfs_bdf_to_devid") or "").splitlines():
        entry = _ASCEND.fullmatch(line)
        with contextlib.suppress(ValueError):
            if entry and address.normalise(entry[1]) == pci:
                return {"davinci-id": entry[2]}
    return {}


def kfd(pci: str) -> tuple[KfdNode, ...]:
    """Read the KFD topology (kernel: drivers/gpu/drm/amd/amdkfd/kfd_topology.c): location_id holds
    pci_dev_id() below and, on a partitioned card, the partition's number in bits 28 to 31."""
    domain, _, _ = pci.partition(":")
    found = []
    index = 0
    numbers = sorted(int(name) for name in reader.entries(KFD_NODES) if name.isdecimal())
    for number in numbers:
        gpu_id = _number(reader.text(f"{KFD_NODES}/{number}/gpu_id"))
        if gpu_id == 0:
            continue
        fields = reader.pairs(reader.text(f"{KFD_NODES}/{number}/properties") or "", " ")
        location = _number(fields.get("location_id"))
        if location & 0xFFFF == address.devfn(pci) and _number(fields.get("domain")) == int(domain, 16):
            found.append(
                KfdNode(
                    index=index,
                    gpu_id=gpu_id,
                    render_minor=_number(fields.get("drm_render_minor")),
                    partition=location >> 28,
                    gfx_target=fields.get("gfx_target_version", ""),
                )
            )
        index += 1
    return tuple(found)


def kfd_generation() -> str:
    """Return a number that is another one whenever the KFD topology is, "" if there is none (kernel:
    drivers/gpu/drm/amd/amdkfd/kfd_topology.c, sysprops_show).  Neither a lock nor a device is in the
    way of reading it, so this can't hang."""
    return reader.text(f"{KFD_TOPOLOGY}/generation_id") or ""


def _number(value: str | None) -> int:
    return int(value) if value and value.isdecimal() else 0
