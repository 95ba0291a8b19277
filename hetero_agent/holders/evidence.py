"""What else the kernel says of how a process uses a device.

- /proc/PID/fdinfo of a DRM or accel node (kernel documentation, "DRM client usage stats"): which
  device it is, which client, how much of its memory and of its engines' time the client has had.
- /sys/class/kfd/kfd/proc/PID (kernel: drivers/gpu/drm/amd/amdkfd/kfd_process.c): what a ROCm
  process has on each GPU.  All open the same /dev/kfd, and KFD keeps the GPU's render node open by
  itself: a process may close it and go on computing.

Reading either can wait for a GPU that hangs.  Only standard modules: this runs in the scan worker.
"""

# pathlib would cost the worker a megabyte
# ruff: noqa: PTH208

from __future__ import annotations

import os
import re

from hetero_agent.holders import proc

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from collections.abc import Sequence

#: The major number of DRM nodes, and the first minor of render nodes (drm_drv.c, drm_internal.h).
DRM_MAJOR, FIRST_RENDER = 226, 128

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MEMORY = re.compile(r"drm-(?:resident|memory)-(?:vram|local)\d*")
_ENGINE = re.compile(r"drm-engine-(?!capacity-).+")
_GPU_MEMORY = re.compile(r"vram_(\d+)")


def of_descriptors(base: int, names: Sequence[str]) -> dict[str, str]:
    """Return what the fdinfo files NAMES under BASE (a descriptor of /proc/PID) say: ``drm-driver``,
    ``drm-pdev``, ``drm-clients`` (ids), ``drm-memory`` (bytes of the device's own) and ``drm-busy``
    (nanoseconds of its engines), those that there are.  Raises OSError."""
    found: dict[str, str] = {}
    clients: dict[str, tuple[int, int]] = {}
    for name in names:
        try:
            fields = _fields(proc.read(name, base))
        except FileNotFoundError:
            continue
        if "drm-driver" not in fields:
            continue
        found["drm-driver"] = fields["drm-driver"]
        if "drm-pdev" in fields:
            found["drm-pdev"] = fields["drm-pdev"]
        # duplicates of a descriptor show the same client
        clients[fields.get("drm-client-id", name)] = _usage(fields)
    if clients:
        found["drm-clients"] = ", ".join(sorted(one for one in clients if one.isdecimal()))
        found["drm-memory"] = str(sum(memory for memory, _ in clients.values()))
        found["drm-busy"] = str(sum(busy for _, busy in clients.values()))
    return found


def _fields(content: bytes) -> dict[str, str]:
    lines = content.decode("utf-8", "backslashreplace").splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _usage(fields: dict[str, str]) -> tuple[int, int]:
    """Bytes of the device's own memory, and nanoseconds of its engines."""
    # "memory" is an older name of "resident"; drivers give both for a while
    memory = {key.rpartition("-")[2]: _number(value) for key, value in fields.items() if _MEMORY.fullmatch(key)}
    busy = sum(_number(value) for key, value in fields.items() if _ENGINE.fullmatch(key))
    return sum(memory.values()), busy


def _number(text: str) -> int:
    number, _, unit = text.partition(" ")
    return int(number) * _UNITS.get(unit, 1) if number.isdecimal() else 0


class Kfd:
    """The processes of ROCm, as KFD at ROOT knows them."""

    def __init__(self, root: str = "/sys/class/kfd/kfd") -> None:
        self._root = root
        self._minors: dict[int, int] | None = None

    @property
    def there(self) -> bool:
        """Whether this host has it."""
        return os.access(f"{self._root}/proc", os.X_OK)

    def uses(self, pid: int) -> dict[int, dict[str, str]]:
        """Return what PID has on which GPU, by render minor: ``kfd-memory`` in bytes and
        ``kfd-queues``.  Raises OSError if that can't be told."""
        try:
            names = os.listdir(f"{self._root}/proc/{pid}")
        except FileNotFoundError:
            return {}
        memory, queues = self._held(pid, names), self._queues(pid)
        found = {}
        for minor, gpu in self._gpus().items():
            if memory.get(gpu) or queues.get(gpu):
                found[minor] = {
                    "kfd-memory": str(memory.get(gpu, 0)),
                    "kfd-queues": str(queues.get(gpu, 0)),
                }
        return found

    def _held(self, pid: int, names: list[str]) -> dict[int, int]:
        held = {}
        for name in names:
            gpu = _GPU_MEMORY.fullmatch(name)
            if gpu:
                held[int(gpu[1])] = self._value(f"proc/{pid}/{name}")
        return held

    def _queues(self, pid: int) -> dict[int, int]:
        queues: dict[int, int] = {}
        try:
            names = os.listdir(f"{self._root}/proc/{pid}/queues")
        except FileNotFoundError:
            return {}
        for name in names:
            gpu = self._value(f"proc/{pid}/queues/{name}/gpuid")
            queues[gpu] = queues.get(gpu, 0) + 1
        return queues

    def _gpus(self) -> dict[int, int]:
        """GPU ids by render minor, from the topology."""
        if self._minors is None:
            self._minors = {}
            for name in os.listdir(f"{self._root}/topology/nodes"):
                gpu = self._value(f"topology/nodes/{name}/gpu_id")
                for line in self._text(f"topology/nodes/{name}/properties").splitlines():
                    key, _, value = line.partition(" ")
                    if gpu and key == "drm_render_minor":
                        self._minors[int(value)] = gpu
        return self._minors

    def _value(self, name: str) -> int:
        """The number in a file, 0 if it is gone."""
        text = self._text(name).strip()
        return int(text) if text.isdecimal() else 0

    def _text(self, name: str) -> str:
        try:
            with open(f"{self._root}/{name}", encoding="ascii") as file:  # noqa: PTH123
                return file.read()
        except FileNotFoundError:
            return ""
