"""Read-only reading of /sys and /proc into `DeviceFacts`.  Blocking: runs in reader threads.

A device whose power/runtime_status is ``suspended`` is not woken: only its ids, NUMA node,
driver, runtime_status and power_state are read, and what the kernel itself keeps (names and
numbers of its class devices, /proc).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pyudev

from hetero_agent.core import address
from hetero_agent.discovery import rdma, reader, vendors
from hetero_agent.discovery.facts import ClassDevice, DeviceFacts, KfdNode
from hetero_agent.discovery.profiles import Identity, Profile, ProfileSet, fill

PCI_DEVICES = "/sys/bus/pci/devices"

#: Attributes that are kept by the kernel and don't touch the device.
_ASLEEP = ("subsystem_vendor", "subsystem_device", "numa_node", "power/runtime_status", "power_state")
#: Attributes that may read the device's registers.
_AWAKE = (
    "boot_vga",
    "current_link_speed",
    "current_link_width",
    "local_cpulist",
    "max_link_speed",
    "max_link_width",
    "sriov_totalvfs",
)
_LINKS = ("driver", "iommu_group", "physfn")
_UDEV = ("ID_PATH", "ID_MODEL_FROM_DATABASE", "ID_VENDOR_FROM_DATABASE")
#: How deep below a device its class devices are looked for (virtio puts one level between).
_DEPTH = 3
_CHILDREN_MAX = 1024
#: Classes whose devices have others below them: a DFL port (a platform device with a node of its own,
#: Documentation/fpga/dfl.rst) lies below its card's region.
_THROUGH = frozenset({"fpga_region"})
_DEVNAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_.:!+-]+(/[A-Za-z0-9_.:+-]+)*")


@dataclass(frozen=True, slots=True)
class Listing:
    """All places where a device could be: ANCHORS are directories below /sys/devices; PCI_SEEN
    counts the PCI devices among them."""

    anchors: tuple[str, ...]
    pci_seen: int


def anchor_of(path: str, subsystem: str) -> str:
    """Return the directory of the device that class device or device PATH is part of.

    The nearest PCI device; else, for ``PARENT/SUBSYSTEM/NAME``, the parent device; a class
    device without one (``/sys/devices/virtual``) is its own.  Pure, so that it works for what
    has gone already.
    """
    found = address.last_in(path)
    if found:
        return found[0]
    parts = path.split("/")
    if len(parts) > 5 and parts[-2] == subsystem and parts[-3] != "virtual":
        return "/".join(parts[:-2])
    return path


def missing_node_changed(facts: DeviceFacts, profile: Profile) -> bool:
    """Tell whether a node that FACTS found missing or wrong is another one now (one stat each,
    on devtmpfs; the device is not touched)."""
    paths = [child.node for child in (*facts.children, *facts.part_children) if child.node]
    paths += [path for rule in profile.nodes if rule.path and (path := fill(rule.path, facts.told))]
    paths += [one.node(minor) for one in facts.mig for minor in (one.gpu_capability, one.compute_capability)]
    return any(reader.node(path) != facts.nodes.get(path) for path in paths)


def named_node_changed(
    facts: DeviceFacts, profile: Profile, look: Callable[[str], reader.NodeStat | None]
) -> bool:
    """Tell whether a node that the profile names by its path came, went or has another number since FACTS
    were read, as LOOK (`reader.node`) sees it.  Such a node is no device in sysfs and has no uevents."""
    paths = (fill(rule.path, facts.told) for rule in profile.nodes if rule.path)
    return any(path and _identity(look(path)) != _identity(facts.nodes.get(path)) for path in paths)


def _identity(node: reader.NodeStat | None) -> tuple[str, int, int] | None:
    """What a node is, whoever may open it."""
    return (node.kind, node.major, node.minor) if node else None


def instances_changed(facts: DeviceFacts) -> bool:
    """Tell whether a card has other MIG instances than FACTS say: the driver sends no uevent."""
    known = {(one.gpu_instance, one.compute_instance) for one in facts.mig}
    return vendors.mig_names(facts.told.get("nvidia-minor", "")) != known


def list_anchors(profiles: ProfileSet) -> Listing:
    """List what is in /sys that a profile could want."""
    pci = [real for name in reader.entries(PCI_DEVICES) if (real := reader.real(f"{PCI_DEVICES}/{name}"))]
    found = dict.fromkeys(pci)
    for subsystem in sorted(profiles.class_subsystems):
        patterns = [
            pattern
            for profile in profiles.profiles
            for match in profile.matches
            if match.subsystem == subsystem
            for pattern in match.names
        ]
        for base in (f"/sys/class/{subsystem}", f"/sys/bus/{subsystem}/devices"):
            for name in reader.entries(base):
                if any(fnmatchcase(name, pattern) for pattern in patterns):
                    path = reader.real(f"{base}/{name}")
                    if path and address.last_in(path) is None:
                        found[anchor_of(path, subsystem)] = None
    return Listing(tuple(found), len(pci))


@dataclass(frozen=True, slots=True)
class Recognised:
    """A device that PROFILE recognises, and its class devices."""

    identity: Identity
    profile: Profile
    children: tuple[ClassDevice, ...]


def read_device(path: str, profiles: ProfileSet) -> DeviceFacts | None:
    """Read the device at PATH; None if it isn't there or no profile recognises it."""
    found = recognise(path, profiles)
    return None if found is None else _read_facts(path, found.identity, found.profile, found.children)


def recognise(path: str, profiles: ProfileSet) -> Recognised | None:
    """Tell what the device at PATH is; None if it isn't there or no profile recognises it."""
    if not reader.is_there(path):
        return None
    name = path.rsplit("/", 1)[-1]
    if address.COMPONENT.fullmatch(name):
        return _recognise_pci(path, name, profiles)
    return _recognise_other(path, profiles)


def lists_node(path: str, subsystem: str, node: str, profiles: ProfileSet) -> bool:
    """Tell whether NODE, a path below /dev, is the node of the class device at PATH and belongs to a
    device that a profile recognises and lists such nodes of."""
    anchor = anchor_of(path, subsystem)
    found = recognise(anchor, profiles)
    if found is not None:
        parts = found.profile.parts
        rules = [(rule.subsystem, rule.pattern) for rule in found.profile.nodes]
        rules += [(parts.subsystem, parts.pattern)] if parts else []
        children = found.children
    else:
        name = anchor.rsplit("/", 1)[-1]
        rules = [
            (one.parts.subsystem, one.parts.pattern)
            for one in profiles.profiles
            if one.parts and one.parts.platform and fnmatchcase(name, one.parts.platform)
        ]
        children = tuple(_class_device(path, subsystem))
    return any(
        child.path == path
        and child.node == node
        and any(child.subsystem == wanted and fnmatchcase(child.name, pattern) for wanted, pattern in rules)
        for child in children
    )


def _recognise_pci(path: str, name: str, profiles: ProfileSet) -> Recognised | None:
    ids = [(reader.text(f"{path}/{item}") or "").removeprefix("0x") for item in ("vendor", "device", "class")]
    identity = Identity(
        subsystem="pci",
        name=name,
        vendor=ids[0],
        device=ids[1],
        class_code=ids[2],
        function=int(name[-1]),
        driver=reader.link(f"{path}/driver"),
        entries=frozenset(reader.entries(path)),
    )
    profile = profiles.choose(identity)
    if profile is None:
        return None
    return Recognised(identity, profile, _children(path, profiles.node_subsystems))


def _recognise_other(path: str, profiles: ProfileSet) -> Recognised | None:
    own = reader.link(f"{path}/subsystem")
    children: tuple[ClassDevice, ...]
    if own in profiles.class_subsystems:
        children = tuple(_class_device(path, own))
    else:
        children = _children(path, profiles.node_subsystems | profiles.class_subsystems)
    names = frozenset(reader.entries(path))
    for child in children:
        identity = Identity(child.subsystem, child.name, driver=reader.link(f"{path}/driver"), entries=names)
        profile = profiles.choose(identity)
        if profile is not None:
            return Recognised(identity, profile, children)
    return None


def _read_facts(
    path: str, identity: Identity, profile: Profile, children: tuple[ClassDevice, ...]
) -> DeviceFacts:
    attributes = _texts(path, _ASLEEP)
    asleep = attributes.get("power/runtime_status") == "suspended"
    extra: dict[str, str] = {}
    ports: dict[str, str] = {}
    serial = ""
    if not asleep:
        ports = rdma.ports(path) if "rdma" in profile.facts else {}
        attributes |= _texts(path, _AWAKE)
        serial = _read_pattern(path, profile.serial) or "" if profile.serial else ""
        for name, rule in profile.attributes.items():
            value = _read_pattern(path, rule.read) if rule.read else None
            if value is not None and rule.minus:
                value = _difference(value, _read_pattern(path, rule.minus))
            if value is not None:
                extra[name] = value
    pci = identity.name if identity.subsystem == "pci" else ""
    told = _told(path, pci, profile)
    kfd = vendors.kfd(pci) if "kfd" in profile.facts and pci else ()
    mig = vendors.mig(told.get("nvidia-minor", "")) if "nvidia-mig" in profile.facts else ()
    part_children = tuple(_on_platform(profile, kfd, children))
    wanted = [child.node for child in (*children, *part_children) if child.node]
    wanted += [filled for rule in profile.nodes if rule.path and (filled := fill(rule.path, told))]
    wanted += [one.node(minor) for one in mig for minor in (one.gpu_capability, one.compute_capability)]
    return DeviceFacts(
        path=path,
        identity=identity,
        profile=profile.name,
        attributes=attributes,
        extra=extra,
        links={name: target for name in _LINKS if (target := reader.link(f"{path}/{name}"))},
        children=children,
        part_children=part_children,
        nodes={name: found for name in wanted if (found := reader.node(name))},
        majors=_majors() if any(rule.major_of for rule in profile.nodes) else {},
        told=told,
        ports=ports,
        kfd=kfd,
        mig=mig,
        udev=_udev(children[0].path if identity.subsystem != "pci" and children else path),
        serial=serial,
        asleep=asleep,
    )


def _told(path: str, pci: str, profile: Profile) -> dict[str, str]:
    found: dict[str, str] = {}
    if "nvidia-proc" in profile.facts and pci:
        found |= vendors.nvidia(pci)
    if "ascend" in profile.facts and pci:
        found |= vendors.ascend(path, pci)
    return found


def _texts(path: str, names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name in names if (value := reader.text(f"{path}/{name}")) is not None}


def _read_pattern(path: str, pattern: str) -> str | None:
    """Read the file at PATTERN below PATH; each ``*`` stands for the first name that leads on."""
    head, star, rest = pattern.partition("*")
    if not star:
        return reader.text(f"{path}/{pattern}")
    directory, _slash, prefix = f"{path}/{head}".rpartition("/")
    suffix, _slash, below = rest.partition("/")
    for name in reader.entries(directory):
        if name.startswith(prefix) and name.endswith(suffix):
            value = _read_pattern(f"{directory}/{name}", below) if below else reader.text(f"{directory}/{name}")
            if value is not None:
                return value
    return None


def _difference(value: str, minus: str | None) -> str | None:
    try:
        return str(max(0, int(value) - int(minus or "")))
    except ValueError:
        return None


# -- class devices ----------------------------------------------------------------------------
def _children(path: str, subsystems: frozenset[str]) -> tuple[ClassDevice, ...]:
    found = []
    for child in _walk(path, subsystems, _DEPTH):
        found.append(child)
        if len(found) >= _CHILDREN_MAX:
            break
    return tuple(sorted(found, key=lambda one: (one.subsystem, len(one.name), one.name)))


def _walk(path: str, subsystems: frozenset[str], depth: int) -> Iterator[ClassDevice]:
    for name in reader.entries(path):
        below = f"{path}/{name}"
        if name in subsystems:
            for child in reader.entries(below):
                if reader.link(f"{below}/{child}/subsystem") == name:
                    yield from _class_device(f"{below}/{child}", name)
        elif name in _THROUGH:
            for child in reader.entries(below):
                yield from _walk(f"{below}/{child}", subsystems, depth - 1)
        elif depth > 1 and not address.COMPONENT.fullmatch(name) and _is_device(below):
            if (own := reader.link(f"{below}/subsystem")) in subsystems:
                yield from _class_device(below, own)
            yield from _walk(below, subsystems, depth - 1)


def _is_device(path: str) -> bool:
    """Tell whether PATH is the directory of a device (not a link to one elsewhere)."""
    return not reader.link(path) and bool(reader.link(f"{path}/subsystem"))


def _class_device(path: str, subsystem: str) -> Iterator[ClassDevice]:
    content = reader.text(f"{path}/uevent")
    if content is None:
        return
    fields = reader.pairs(content, "=")
    name = fields.get("DEVNAME", "").removeprefix("/dev/")
    major, minor = fields.get("MAJOR", ""), fields.get("MINOR", "")
    has_node = bool(_DEVNAME.fullmatch(name)) and major.isdecimal() and minor.isdecimal()
    yield ClassDevice(
        subsystem=subsystem,
        name=path.rsplit("/", 1)[-1],
        path=path,
        node=f"/dev/{name}" if has_node else "",
        kind="block" if subsystem == "block" else "char",
        major=int(major) if has_node else 0,
        minor=int(minor) if has_node else 0,
    )


def _on_platform(
    profile: Profile, kfd: tuple[KfdNode, ...], children: tuple[ClassDevice, ...]
) -> Iterator[ClassDevice]:
    """Find render nodes that the KFD topology gives to this card and sysfs to a platform device."""
    if profile.parts is None or not profile.parts.platform:
        return
    have = {child.minor for child in children if child.subsystem == profile.parts.subsystem}
    for node in kfd:
        if node.render_minor and node.render_minor not in have:
            path = reader.real(f"/sys/class/{profile.parts.subsystem}/renderD{node.render_minor}")
            owner = path.split("/")[-3:-2]
            if owner and fnmatchcase(owner[0], profile.parts.platform):
                yield from _class_device(path, profile.parts.subsystem)


# -- outside the device's directory -------------------------------------------------------------
def _majors() -> dict[str, frozenset[int]]:
    """Read /proc/devices: which majors each driver's name has (character and block alike)."""
    found: dict[str, frozenset[int]] = {}
    for line in (reader.text("/proc/devices", reader.TABLE_MAX) or "").splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdecimal() and name:
            found[name] = found.get(name, frozenset()) | {int(number)}
    return found


_threads = threading.local()


def _udev(path: str) -> Mapping[str, str]:
    """Return what udev's database says of PATH; nothing without udev.  libudev's context is not
    shared between threads (libudev(3)), so each has its own."""
    context = getattr(_threads, "context", None)
    if context is None:
        context = _threads.context = pyudev.Context()
    try:
        properties = pyudev.Devices.from_sys_path(context, path).properties
        return {name: str(properties[name]) for name in _UDEV if name in properties}
    except (pyudev.DeviceNotFoundError, OSError, ValueError, UnicodeDecodeError):
        return {}
