"""What was read of one device, as it was read: the input of `correlate`, which does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hetero_agent.discovery.profiles import Identity
from hetero_agent.discovery.reader import NodeStat


@dataclass(frozen=True, slots=True)
class ClassDevice:
    """A class device on the device: PATH in sysfs, NODE its path below /dev ("" for none) with
    the number that the kernel gave it."""

    subsystem: str
    name: str
    path: str
    node: str = ""
    kind: str = "char"
    major: int = 0
    minor: int = 0


@dataclass(frozen=True, slots=True)
class KfdNode:
    """A GPU in the KFD topology.  INDEX counts GPUs in topology order, as ROCr does; PARTITION
    is the node's number on its card; RENDER_MINOR the minor of its render node (0 for none)."""

    index: int
    gpu_id: int
    render_minor: int
    partition: int
    gfx_target: str = ""


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A compute instance of an NVIDIA card in MIG mode: its number, that of the GPU instance it is
    in, and the minor numbers of the capability nodes of both."""

    gpu_instance: int
    compute_instance: int
    gpu_capability: int
    compute_capability: int

    @staticmethod
    def node(minor: int) -> str:
        """Return the path of a capability node."""
        return f"/dev/nvidia-caps/nvidia-cap{minor}"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device that a profile recognised.

    PATH is its directory below /sys/devices.  ATTRIBUTES are texts by their name in sysfs, what
    could not be read missing; EXTRA those that the profile asked for, by the profile's names.
    LINKS maps ``driver``, ``iommu_group`` and ``physfn`` to the last component of their target.
    PART_CHILDREN are class devices on other (platform) devices that the KFD topology puts on
    this card.  NODES is what stat(2) says, by path; missing nodes are missing.  MAJORS is
    /proc/devices by name, read only if the profile asks for it.  TOLD is what the sources named in
    the profile's ``facts`` say, by the names that they give, PORTS what its RDMA ports are like
    (rdma.py).  ASLEEP says that only what doesn't wake the device was read.
    """

    path: str
    identity: Identity
    profile: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    children: tuple[ClassDevice, ...] = ()
    part_children: tuple[ClassDevice, ...] = ()
    nodes: Mapping[str, NodeStat] = field(default_factory=dict)
    majors: Mapping[str, frozenset[int]] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, str] = field(default_factory=dict)
    kfd: tuple[KfdNode, ...] = ()
    mig: tuple[MigInstance, ...] = ()
    udev: Mapping[str, str] = field(default_factory=dict)
    serial: str = ""
    asleep: bool = False

    def with_memory_of(self, earlier: DeviceFacts) -> DeviceFacts:
        """Return these facts with what EARLIER knew and a sleeping device doesn't tell now."""
        new, old = self.identity, earlier.identity
        if not self.asleep or (new.vendor, new.device, new.driver) != (old.vendor, old.device, old.driver):
            return self
        return replace(
            self,
            attributes={**earlier.attributes, **self.attributes},
            extra={**earlier.extra, **self.extra},
            ports=earlier.ports,
            serial=self.serial or earlier.serial,
        )
