"""Raw facts and profiles in, device records out; pure.

`correlate` looks at one device; `finish` at all of them together, for what only the whole shows:
the index in PCI order, and serials or aliases that several devices claim.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from hetero_agent import names
from hetero_agent.core import address
from hetero_agent.core.model import Attribute, DeviceRecord, Node, Obstacle, Role
from hetero_agent.discovery import parts
from hetero_agent.discovery.draft import Draft, Nodes
from hetero_agent.discovery.facts import ClassDevice, DeviceFacts
from hetero_agent.discovery.profiles import NodeRule, Profile, fill
from hetero_agent.text import printable

#: Vendors by PCI id (pci.ids) for profiles that don't name theirs.
VENDORS: Final[Mapping[str, str]] = {
    "1002": "AMD", "10de": "NVIDIA", "10ee": "Xilinx", "1172": "Altera", "14e4": "Broadcom",
    "15b3": "Mellanox", "19e5": "Huawei", "1ae0": "Google", "1d0f": "Amazon", "1d22": "Baidu",
    "1d94": "Hygon", "1d95": "Graphcore", "1da3": "Habana", "1dd8": "Pensando", "1de0": "Groq",
    "1e0d": "SambaNova", "1e30": "Sophgo", "1e36": "Enflame", "1e38": "Blaize", "1e3e": "Iluvatar",
    "1e52": "Tenstorrent", "1e60": "Hailo", "1e67": "Untether", "1e9f": "Lynxi", "1ec6": "Vastai",
    "1ed2": "Furiosa", "1ed5": "Moore Threads", "1eed": "XDX", "1eff": "Rebellions", "1f1c": "Sophgo",
    "1f4b": "Axera", "1f82": "d-Matrix", "1fe9": "MemryX", "1ff4": "DEEPX", "209f": "Mobilint",
    "5143": "Qualcomm", "8086": "Intel", "9999": "MetaX", "cabc": "Cambricon",
}  # fmt: skip

_ATTRIBUTE_TEXT_MAX = 128
#: The place that names all ports of a device (rdma.py).
RDMA_PORTS: Final = "rdma-ports"
_ZEROS = re.compile(r"[0:.-]*")


@dataclass(frozen=True, slots=True)
class Correlated:
    """What one device's facts amount to: its units, what an administrator should know, and the paths
    of its nodes that are meant to be everybody's."""

    drafts: tuple[Draft, ...] = ()
    problems: tuple[str, ...] = ()
    open_to_all: frozenset[str] = frozenset()


def correlate(facts: DeviceFacts, profile: Profile) -> Correlated:
    """Make the record of one device, and those of its partitions."""
    if any(name.startswith("virtfn") for name in facts.identity.entries):
        # An SR-IOV physical function with virtual functions switched on: these are the units.
        return Correlated()
    nodes = _nodes(facts, profile)
    obstacle = _obstacle(facts, profile, nodes)
    attributes = _attributes(facts, profile)
    serial = _serial(facts)
    record = DeviceRecord(
        id=_id(facts),
        resource=profile.resource,
        profile=profile.name,
        parent=_physical_function(facts),
        aliases=_aliases(facts, serial),
        vendor=_vendor(facts, profile),
        model=_model(facts),
        driver=printable(facts.identity.driver, 64),
        path=facts.path,
        serial=serial,
        stable_id=facts.identity.subsystem == "pci" or bool(facts.udev.get("ID_PATH")),
        numa_nodes=_numa(facts),
        nodes=tuple(nodes.found),
        attributes=attributes,
        obstacle=obstacle,
        joining=profile.joining,
        groups=profile.groups,
        limits=profile.limits,
    )
    values = _values(facts, record)
    record = replace(
        record,
        mounts=_mounts(profile, values, required=True),
        optional_mounts=_mounts(profile, values, required=False),
    )
    whole = Draft(
        record,
        values,
        profile.env,
        counted=obstacle in (Obstacle.NONE, Obstacle.NO_NODE),
        group=profile.counted_with or profile.name,
        order=_number(str(values.get(profile.index_by, ""))) or 0,
    )
    units = parts.units_of(facts, profile, whole, nodes)
    if not units:
        return Correlated((whole,), tuple(nodes.problems), frozenset(nodes.open_to_all))
    if nodes.open_to_all:
        # what a driver gives its parts, it gives as it does the whole
        nodes.open_to_all.update(node.path for unit in units for node in unit.record.nodes)
    drafts = (parts.partitioned(whole, units), *units)
    return Correlated(drafts, tuple(nodes.problems), frozenset(nodes.open_to_all))


def finish(correlated: Iterable[Correlated]) -> dict[str, DeviceRecord]:
    """Return all records by id, with index and environment filled in.

    The index counts whole devices of one profile (and of those counted with it) in PCI order, or
    by the attribute that the profile names, those without a working driver left out, as the
    vendors' runtimes count.  A serial or alias that two devices have names
    neither; an id that two have (never, by construction) keeps the first.
    """
    drafts = sorted((draft for one in correlated for draft in one.drafts), key=_bus_order)
    serials = Counter(draft.record.serial for draft in drafts)
    aliases = Counter(alias for draft in drafts for alias in {*draft.record.aliases, draft.record.id})
    indexes = _indexes(drafts)
    records: dict[str, DeviceRecord] = {}
    for draft in drafts:
        record, values = draft.record, dict(draft.values)
        # a unit is reached by the number of its card
        index = indexes.get(record.id, indexes.get(record.parent))
        if index is not None:
            values["index"] = index
        env = {name: text for name, form in draft.env.items() if (text := fill(form, values)) is not None}
        records.setdefault(
            record.id,
            replace(
                record,
                serial=record.serial if serials[record.serial] == 1 else "",
                aliases=tuple(alias for alias in record.aliases if aliases[alias] == 1),
                env=env,
            ),
        )
    return records


def _indexes(drafts: list[Draft]) -> dict[str, int]:
    """Return the index of each counted device by its id; DRAFTS are in PCI order."""
    counts: Counter[str] = Counter()
    found = {}
    for draft in sorted(drafts, key=lambda one: one.order):
        if draft.counted:
            found[draft.record.id] = counts[draft.group]
            counts[draft.group] += 1
    return found


def _bus_order(draft: Draft) -> tuple[tuple[int, ...], str]:
    pci = str(draft.values.get("pci", ""))
    return (address.order(pci) if pci else ()), draft.record.id


# -- identity ---------------------------------------------------------------------------------
def _id(facts: DeviceFacts) -> str:
    if facts.identity.subsystem == "pci":
        return facts.identity.name
    place = facts.udev.get("ID_PATH") or f"{facts.identity.subsystem}-{facts.identity.name}"
    return _as_id(place)


def _as_id(place: str) -> str:
    """Return PLACE as an id; one that doesn't fit is cut and told apart by a hash."""
    lower = place.lower()
    if names.DEVICE_ID.fullmatch(lower):
        return lower
    plain = re.sub(r"[^a-z0-9_.:-]", "-", lower)[:46].lstrip("_.:-") or "device"
    return f"{plain}-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


def _physical_function(facts: DeviceFacts) -> str:
    name = facts.links.get("physfn", "")
    return name if address.COMPONENT.fullmatch(name) else ""


def _serial(facts: DeviceFacts) -> str:
    serial = facts.serial or facts.told.get("uuid", "")
    return "" if _ZEROS.fullmatch(serial) else printable(serial, 64)


def _uuid(facts: DeviceFacts) -> str:
    return printable(facts.told.get("uuid", ""), 64)


def _aliases(facts: DeviceFacts, serial: str) -> tuple[str, ...]:
    """Serial, uuid and the ways lspci and nvidia-smi write the address; never a kernel name,
    which may be another device's after the next boot."""
    found = [serial, _uuid(facts)]
    if facts.identity.subsystem == "pci":
        domain, _, rest = facts.identity.name.partition(":")
        found.append(f"{int(domain, 16):08x}:{rest}")
        if int(domain, 16) == 0:
            found.append(rest)
    return tuple(dict.fromkeys(alias for alias in found if alias and alias != facts.identity.name))


def _vendor(facts: DeviceFacts, profile: Profile) -> str:
    vendor = facts.identity.vendor
    found = profile.vendor or VENDORS.get(vendor) or facts.udev.get("ID_VENDOR_FROM_DATABASE") or vendor
    return printable(found, 64)


def _model(facts: DeviceFacts) -> str:
    known = facts.told.get("model") or facts.udev.get("ID_MODEL_FROM_DATABASE")
    if known:
        return printable(known, 128)
    if facts.identity.subsystem == "pci":
        return f"{facts.identity.vendor}:{facts.identity.device}"
    return printable(facts.identity.name, 64)


def _numa(facts: DeviceFacts) -> tuple[int, ...]:
    number = facts.attributes.get("numa_node", "")
    return (int(number),) if number.isascii() and number.isdecimal() and len(number) < 6 else ()


# -- nodes ------------------------------------------------------------------------------------
def _nodes(facts: DeviceFacts, profile: Profile) -> Nodes:
    nodes = Nodes()
    for rule in profile.nodes:
        before = len(nodes.found)
        if rule.subsystem:
            for child in (*facts.children, *facts.part_children):
                fits = child.subsystem == rule.subsystem and fnmatchcase(child.name, rule.pattern)
                if fits and child.node and child.path not in nodes.by_child:
                    _take(facts, rule, child, nodes)
        else:
            _take_path(facts, rule, nodes)
        if rule.required and len(nodes.found) == before:
            nodes.missing = True
    return nodes


def _take(facts: DeviceFacts, rule: NodeRule, child: ClassDevice, nodes: Nodes) -> None:
    """Add a class device's node if /dev has it with the kernel's own number."""
    stat = facts.nodes.get(child.node)
    if stat is None:
        return
    if (stat.kind, stat.major, stat.minor) != (child.kind, child.major, child.minor):
        nodes.problems.append(
            f"{child.node} is {stat.kind} {stat.major}:{stat.minor}, but the kernel's {child.name} is"
            f" {child.kind} {child.major}:{child.minor}; remove the node and run: udevadm trigger"
        )
        return
    node = Node(child.node, rule.role, stat.kind, stat.major, stat.minor, mode=stat.mode, gid=stat.gid)
    nodes.found.append(node)
    nodes.by_child[child.path] = node
    if rule.open_to_all:
        nodes.open_to_all.add(child.node)


def _take_path(facts: DeviceFacts, rule: NodeRule, nodes: Nodes) -> None:
    path = fill(rule.path, facts.told)
    stat = facts.nodes.get(path) if path else None
    if path is None or stat is None:
        return
    if rule.major_of:
        majors = frozenset().union(*(facts.majors.get(name, frozenset()) for name in rule.major_of))
        if stat.major not in majors:
            nodes.problems.append(
                f"{path} has major {stat.major}, which is not the driver's"
                f" ({' or '.join(rule.major_of)} in /proc/devices); remove the stale node"
            )
            return
    nodes.found.append(Node(path, rule.role, stat.kind, stat.major, stat.minor, mode=stat.mode, gid=stat.gid))
    if rule.open_to_all:
        nodes.open_to_all.add(path)


def _obstacle(facts: DeviceFacts, profile: Profile, nodes: Nodes) -> Obstacle:
    driver = facts.identity.driver
    # vfio-pci and its vendor variants (mlx5_vfio_pci, nvgrace_gpu_vfio_pci ...)
    if "vfio" in driver:
        return Obstacle.VFIO
    if facts.identity.subsystem == "pci" and not driver:
        return Obstacle.NO_DRIVER
    if profile.drivers and driver not in profile.drivers:
        return Obstacle.NO_DRIVER
    if nodes.missing or not any(node.role is Role.OWN for node in nodes.found):
        return Obstacle.NO_NODE
    return Obstacle.NONE


# -- attributes -------------------------------------------------------------------------------
def _attributes(facts: DeviceFacts, profile: Profile) -> dict[str, Attribute]:
    raw = facts.attributes
    identity = facts.identity
    texts = {
        "vendor-id": identity.vendor,
        "device-id": identity.device,
        "class": identity.class_code,
        "link-speed": _speed(raw.get("current_link_speed", "")),
        "max-link-speed": _speed(raw.get("max_link_speed", "")),
        "cpus": raw.get("local_cpulist", ""),
        "power-state": raw.get("power_state", ""),
        # "unsupported" is what devices without runtime power management say
        "runtime-status": raw.get("power/runtime_status", "").replace("unsupported", ""),
        "pcie-root": _root(facts.path),
        "physical-function": _physical_function(facts),
        "kernel-names": ",".join(child.name for child in (*facts.children, *facts.part_children) if child.node),
        "firmware": facts.told.get("firmware", ""),
        "uuid": _uuid(facts),
        **{key: facts.told.get(key, "") for key in ("nvidia-minor", "davinci-id", "driver-version")},
    }
    if raw.get("subsystem_vendor") and raw.get("subsystem_device"):
        subsystem = (raw["subsystem_vendor"], raw["subsystem_device"])
        texts["subsystem-id"] = ":".join(one.removeprefix("0x") for one in subsystem)
    numbers = {
        "numa-node": raw.get("numa_node"),
        "link-width": raw.get("current_link_width"),
        "max-link-width": raw.get("max_link_width"),
        "iommu-group": facts.links.get("iommu_group"),
        "sriov-total": raw.get("sriov_totalvfs"),
    }
    found: dict[str, Attribute] = {
        key: printable(text, _ATTRIBUTE_TEXT_MAX) for key, text in texts.items() if text
    }
    found |= {key: number for key, text in numbers.items() if (number := _number(text)) is not None}
    for key in ("link-width", "max-link-width", "sriov-total"):
        if found.get(key) == 0:
            del found[key]
    if "boot_vga" in raw:
        found["boot-vga"] = raw["boot_vga"] == "1"
    if identity.device and profile.integrated_devices:
        found["integrated"] = identity.device in profile.integrated_devices
    return found | _rdma_attributes(facts) | _profile_attributes(facts, profile) | _kfd_attributes(facts)


def _profile_attributes(facts: DeviceFacts, profile: Profile) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    for key, rule in profile.attributes.items():
        if rule.name_of:
            here = [one.name for one in facts.children if one.subsystem == rule.name_of]
            while len(text := ",".join(here if rule.all else here[:1])) > _ATTRIBUTE_TEXT_MAX and rule.all:
                here.pop()  # whole names only: a part of one may be another's
        else:
            text = facts.extra.get(key, "")
        if rule.number:
            number = _number(text)
            if number is not None:
                found[key] = number
        elif text:
            found[key] = printable(text, _ATTRIBUTE_TEXT_MAX)
    return found


def _rdma_attributes(facts: DeviceFacts) -> dict[str, Attribute]:
    """What the ports are like; which there are, RDMA_PORTS, is for templates only: it may be long."""
    found: dict[str, Attribute] = {
        key: printable(text, _ATTRIBUTE_TEXT_MAX) for key, text in facts.ports.items() if key != RDMA_PORTS
    }
    if (number := _number(facts.ports.get("ports"))) is not None:
        found["ports"] = number
    return found


def _kfd_attributes(facts: DeviceFacts) -> dict[str, Attribute]:
    if len(facts.kfd) != 1:
        return {}
    only = facts.kfd[0]
    found: dict[str, Attribute] = {"kfd-index": only.index, "kfd-gpu-id": only.gpu_id}
    if only.gfx_target:
        found["gfx-target"] = printable(only.gfx_target, 32)
    return found


def _number(text: str | None) -> int | None:
    if text and text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    return None


def _speed(text: str) -> str:
    """Return what the kernel calls a link's speed (``32.0 GT/s PCIe``), "" for ``Unknown``."""
    return "" if text.startswith("Unknown") else text


def _root(path: str) -> str:
    """Return the PCIe root as Kubernetes names it: the first component under /sys/devices."""
    first = path.removeprefix("/sys/devices/").split("/", 1)[0]
    return first if first.startswith("pci") else ""


def _values(facts: DeviceFacts, record: DeviceRecord) -> dict[str, Attribute]:
    own = record.own_nodes
    return {
        **record.attributes,
        "id": record.id,
        "pci": facts.identity.name if facts.identity.subsystem == "pci" else "",
        "name": facts.identity.name,
        "serial": record.serial,
        "uuid": _uuid(facts),
        RDMA_PORTS: facts.ports.get(RDMA_PORTS, ""),
        "node": own[0].path if own else "",
    }


def _mounts(
    profile: Profile, values: Mapping[str, Attribute], required: bool
) -> tuple[tuple[str, str, str], ...]:
    """Return the mounts of one kind with places filled in.  What is unknown stays in braces: no such
    path exists, so an optional mount is left out and a required one is told of at the grant."""
    return tuple(
        (
            fill(mount.host, values) or mount.host,
            fill(mount.container, values) or mount.container,
            mount.options,
        )
        for mount in profile.mounts
        if mount.required is required
    )
