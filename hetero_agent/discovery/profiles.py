"""Profiles: how one kind of device is recognised and what a lease of it gives.

TOML files; docs/profiles.md is the schema.  The package's own lie in ``hetero_agent/profiles``;
a file of the same name in the profiles directory takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Final

from hetero_agent import names
from hetero_agent.core.model import UNLIMITED, Joining, Role
from hetero_agent.core.symptoms import Symptoms
from hetero_agent.discovery import symptoms
from hetero_agent.discovery.tables import ProfileError, Table, read_toml
from hetero_agent.text import printable

SCHEMA: Final = 1
FILE_MAX: Final = 64 * 1024
FILES_MAX: Final = 256
#: Slots of one shared device.
SLOTS_MAX: Final = 64

#: The sources of facts outside the device's own directory, and the attributes they give.
FACTS: Final[Mapping[str, tuple[str, ...]]] = {
    "nvidia-proc": ("nvidia-minor", "firmware", "uuid", "driver-version"),
    "nvidia-mig": ("gpu-instance", "compute-instance"),
    "ascend": ("davinci-id",),
    "kfd": ("kfd-index", "kfd-gpu-id", "gfx-target"),
    "rdma": ("rdma-ports", "ports", "port-state", "link-layer", "port-rate"),
}
#: Attributes that every record may have, whatever its profile.
COMMON_ATTRIBUTES: Final = (
    "boot-vga", "class", "cpus", "device-id", "integrated", "iommu-group", "kernel-names", "link-speed",
    "link-width", "max-link-speed", "max-link-width", "numa-node", "part", "parts", "pcie-root",
    "physical-function", "power-state", "runtime-status", "slot", "sriov-total", "subsystem-id", "vendor-id",
)  # fmt: skip
#: What ``[limits]`` may name (setrlimit(2)).
LIMITS: Final = ("memlock",)
#: What a template may name beside attributes.
PLACES: Final = ("id", "index", "name", "node", "pci", "serial", "uuid")

_HEX4 = re.compile(r"[0-9a-f]{4}")
_CLASS = re.compile(r"[0-9a-f]{2,6}")
_WORD = re.compile(r"[a-z][a-z0-9-]{0,31}")
_KERNEL_NAME = re.compile(r"[A-Za-z0-9_.!:*?\[\]-]{1,64}")
_RELATIVE = re.compile(r"(?!.*\.\.)[A-Za-z0-9_.:*-]+(/[A-Za-z0-9_.:*-]+){0,7}")
_NODE_PATH = re.compile(r"(?!.*\.\.)/dev(/[A-Za-z0-9_.:{}-]+)+")
_ABSOLUTE = re.compile(r"(?!.*/\.\.(/|$))/[^\x00-\x1f]{0,255}")
_ABSOLUTE_OR_NONE = re.compile(f"(?:{_ABSOLUTE.pattern})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_GROUP = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_PLACE = re.compile(r"\{([a-z0-9-]+)\}")
_PROFILE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_FILE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}\.toml")
_RESOURCE_TEMPLATE = re.compile(r"[a-z0-9.-]{1,63}/[A-Za-z0-9._{}-]{1,63}")
_OPTIONS = re.compile(r"[a-z]+(,[a-z]+)*|")


@dataclass(frozen=True, slots=True)
class Match:
    """``[[match]]``: one way to be recognised; every given key must fit."""

    subsystem: str = "pci"
    vendors: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    exclude_vendors: tuple[str, ...] = ()
    exclude_devices: tuple[str, ...] = ()
    exclude_functions: tuple[int, ...] = ()
    integrated: bool | None = None


@dataclass(frozen=True, slots=True)
class NodeRule:
    """``[[nodes]]``: device nodes by subsystem and kernel name, or by a fixed PATH.

    MAJOR_OF are the names in /proc/devices one of which must own the number of a PATH node.
    OPEN_TO_ALL says that mode 0666 is normal for it.
    """

    role: Role
    subsystem: str = ""
    pattern: str = ""
    path: str = ""
    major_of: tuple[str, ...] = ()
    required: bool = False
    open_to_all: bool = False


@dataclass(frozen=True, slots=True)
class AttributeRule:
    """``[attributes]``: a file of the device's directory (READ, less MINUS), or the kernel name
    of its first class device of subsystem NAME_OF, or of ALL, with commas between them."""

    read: str = ""
    minus: str = ""
    name_of: str = ""
    all: bool = False
    number: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """``[parts]``: class devices that are units of their own when a card has more than one, or what
    the source FACTS lists.  ENV are their variables where they differ from the card's.

    PLATFORM are the names of platform devices that such class devices hang on instead of the
    card; the KFD topology says whose they are.
    """

    resource: str
    subsystem: str = ""
    pattern: str = ""
    platform: str = ""
    facts: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shared:
    """``[shared]``: each whole device is granted as SLOTS units of RESOURCE instead."""

    slots: int
    resource: str


@dataclass(frozen=True, slots=True)
class Mount:
    """``[[mounts]]``: HOST is a template, and ``*`` in it stands for any characters of a name; then
    CONTAINER is "" and each path goes to the same place."""

    host: str
    container: str
    options: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile; NAME is the file's name without its ending, ORIGIN the whole file name."""

    name: str
    origin: str
    resource: str
    priority: int = 50
    vendor: str = ""
    drivers: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    serial: str = ""
    integrated_devices: tuple[str, ...] = ()
    counted_with: str = ""
    index_by: str = ""
    matches: tuple[Match, ...] = ()
    nodes: tuple[NodeRule, ...] = ()
    attributes: Mapping[str, AttributeRule] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    joining: Mapping[str, Joining] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    parts: Parts | None = None
    shared: Shared | None = None
    symptoms: Symptoms = field(default_factory=Symptoms)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile is chosen by: facts that may be read of a sleeping device.

    VENDOR, DEVICE and CLASS_CODE are hex digits without 0x ("" for no PCI device), FUNCTION the
    PCI function, NAME the kernel name, ENTRIES the names in the device's directory.
    """

    subsystem: str
    name: str
    vendor: str = ""
    device: str = ""
    class_code: str = ""
    function: int = 0
    driver: str = ""
    entries: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ProfileSet:
    """All profiles in the order in which they are tried: higher priority first, then by name."""

    profiles: tuple[Profile, ...] = ()
    problems: tuple[str, ...] = ()

    def choose(self, identity: Identity) -> Profile | None:
        """Return the first profile that recognises the device."""
        for profile in self.profiles:
            if any(_fits(match, profile, identity) for match in profile.matches):
                return profile
        return None

    def named(self, name: str) -> Profile:
        """Return the profile of this name; KeyError if there is none."""
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise KeyError(name)

    @property
    def class_subsystems(self) -> frozenset[str]:
        """The subsystems in which devices without a PCI device behind them are looked for."""
        return frozenset(
            match.subsystem
            for profile in self.profiles
            for match in profile.matches
            if match.subsystem != "pci"
        )

    @property
    def node_subsystems(self) -> frozenset[str]:
        """The subsystems whose class devices belong to records."""
        found = {rule.subsystem for profile in self.profiles for rule in profile.nodes if rule.subsystem}
        found |= {one.parts.subsystem for one in self.profiles if one.parts and one.parts.subsystem}
        found |= {
            rule.name_of for profile in self.profiles for rule in profile.attributes.values() if rule.name_of
        }
        return frozenset(found)


def _fits(match: Match, profile: Profile, identity: Identity) -> bool:
    if match.subsystem != identity.subsystem:
        return False
    if match.integrated is not None:
        integrated = identity.device in profile.integrated_devices
        if integrated is not match.integrated:
            return False
    return (
        (not match.vendors or identity.vendor in match.vendors)
        and (not match.devices or identity.device in match.devices)
        and (not match.classes or identity.class_code.startswith(match.classes))
        and (not match.drivers or identity.driver in match.drivers)
        and (not match.names or any(fnmatchcase(identity.name, one) for one in match.names))
        and identity.entries.issuperset(match.require)
        and identity.vendor not in match.exclude_vendors
        and identity.device not in match.exclude_devices
        and identity.function not in match.exclude_functions
    )


def places_in(template: str) -> tuple[str, ...]:
    """Return the names in braces in a template, in order."""
    return tuple(_PLACE.findall(template))


def fill(template: str, values: Mapping[str, object]) -> str | None:
    """Return TEMPLATE with its places filled in, or None if a value is missing or empty."""
    wanted = places_in(template)
    if any(str(values.get(place, "")) == "" for place in wanted):
        return None
    return _PLACE.sub(lambda found: str(values[found.group(1)]), template)


# -- reading ----------------------------------------------------------------------------------
def load(directory: Path | None) -> ProfileSet:
    """Read the package's profiles and those of DIRECTORY.

    A file of DIRECTORY that is wrong is reported in `ProfileSet.problems` and left out; the
    package's own of the same name stays in force then.
    """
    found: dict[str, Profile | None] = {}
    for entry in resources.files("hetero_agent.profiles").iterdir():
        if entry.name.endswith(".toml"):
            found[entry.name] = parse(entry.read_text(encoding="utf-8"), entry.name)
    problems: list[str] = []
    for path in _override_files(directory, problems):
        try:
            found[path.name] = parse(_read(path), path.name, str(path))
        except ProfileError as error:
            kept = "; the shipped profile stays in force" if path.name in found else "; it is left out"
            problems.append(f"{error}{kept}")
    profiles = sorted((one for one in found.values() if one), key=lambda one: (-one.priority, one.name))
    return ProfileSet(tuple(profiles), tuple(problems))


def _override_files(directory: Path | None, problems: list[str]) -> Iterable[Path]:
    if directory is None:
        return []
    try:
        paths = sorted(path for path in directory.iterdir() if path.name.endswith(".toml"))
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{directory}: cannot be read: {printable(error.strerror)}")
        return []
    if len(paths) > FILES_MAX:
        problems.append(f"{directory}: {len(paths)} profiles; the first {FILES_MAX} are used")
    return paths[:FILES_MAX]


def _read(path: Path) -> str:
    where = printable(path)
    try:
        with path.open("rb") as file:
            content = file.read(FILE_MAX + 1)
    except OSError as error:
        raise ProfileError(f"{where}: cannot be read: {printable(error.strerror)}") from error
    if len(content) > FILE_MAX:
        raise ProfileError(f"{where}: larger than {FILE_MAX} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{where}: not UTF-8 at byte {error.start}") from error


def parse(content: str, file_name: str, where: str = "") -> Profile | None:
    """Parse one profile; None if it says ``enabled = false``.

    Raises ProfileError naming WHERE (else FILE_NAME), the table, the key and what fits.
    """
    shown = printable(where or file_name)
    if not _FILE.fullmatch(file_name):
        raise ProfileError(f"{shown}: the file's name must be lower-case letters, digits, - and _, then .toml")
    root = read_toml(content, shown)
    if root.number("schema", SCHEMA, low=SCHEMA, high=SCHEMA) != SCHEMA:
        raise AssertionError("unreachable: the range has one number")
    enabled = root.flag("enabled", True)
    device = root.table("device")
    facts = device.texts("facts", re.compile("|".join(FACTS)), " or ".join(FACTS))
    attributes = _attributes(root.table("attributes"))
    known = _known_places(facts, attributes)
    matches = tuple(_match(table) for table in root.tables("match"))
    if not matches:
        raise ProfileError(f"{shown}: [[match]] is missing; at least one says what the profile is for")
    nodes = tuple(_node(table, facts) for table in root.tables("nodes"))
    if not any(rule.role is Role.OWN for rule in nodes):
        raise ProfileError(f'{shown}: [[nodes]] needs at least one with role = "own": proof of use')
    env, joining = _env(root.table("env"), known)
    resource = root.text("resource", None, names.RESOURCE, "vendor/class, as in nvidia.com/gpu")
    profile = Profile(
        name=file_name.removesuffix(".toml"),
        origin=shown,
        resource=resource,
        priority=root.number("priority", 50, low=0, high=100),
        vendor=device.text("vendor", "", re.compile(r"[ -~]{0,64}"), "up to 64 printable characters"),
        drivers=device.texts("drivers", _KERNEL_NAME, "names of kernel drivers"),
        facts=facts,
        serial=device.text("serial", "", _RELATIVE, "a path below the device's directory"),
        integrated_devices=device.texts("integrated-devices", _HEX4, "four hex digits, lower case"),
        counted_with=device.text("counted-with", "", _PROFILE, "the name of a profile"),
        index_by=device.text("index-by", "", re.compile("|".join(known)), "the name of an attribute"),
        matches=matches,
        nodes=nodes,
        attributes=attributes,
        env=env,
        joining=joining,
        groups=root.texts("groups", _GROUP, "names of groups"),
        limits=_limits(root.table("limits")),
        mounts=tuple(_mount(table, known) for table in root.tables("mounts")),
        parts=_parts(root, facts, known),
        shared=_shared(root, resource),
        symptoms=symptoms.parse(root),
    )
    device.done()
    root.done()
    return profile if enabled else None


def _match(table: Table) -> Match:
    given = Match(
        subsystem=table.text("subsystem", "pci", _KERNEL_NAME, "a kernel subsystem, as in pci or tty"),
        vendors=table.texts("vendors", _HEX4, "four hex digits, lower case"),
        devices=table.texts("devices", _HEX4, "four hex digits, lower case"),
        classes=table.texts("classes", _CLASS, "two to six hex digits, lower case"),
        drivers=table.texts("drivers", _KERNEL_NAME, "names of kernel drivers"),
        names=table.texts("names", _KERNEL_NAME, "kernel names; * ? [] are wildcards"),
        require=table.texts("require", _KERNEL_NAME, "names in the device's sysfs directory"),
        exclude_vendors=table.texts("exclude-vendors", _HEX4, "four hex digits, lower case"),
        exclude_devices=table.texts("exclude-devices", _HEX4, "four hex digits, lower case"),
        exclude_functions=table.numbers("exclude-functions", 0, 7),
        integrated=table.flag("integrated", None),
    )
    table.done()
    if given.subsystem != "pci" and not given.names:
        raise ProfileError(f"{table.where} names: missing; a match in subsystem {given.subsystem} needs it")
    if given.subsystem == "pci" and not (given.vendors or given.classes or given.drivers or given.require):
        raise ProfileError(f"{table.where} needs one of vendors, classes, drivers or require")
    return given


def _node(table: Table, facts: tuple[str, ...]) -> NodeRule:
    rule = NodeRule(
        role=Role(table.text("role", None, re.compile("|".join(Role)), "own, parent or control")),
        subsystem=table.text("subsystem", "", _KERNEL_NAME, "a kernel subsystem, as in drm"),
        pattern=table.text("pattern", "", _KERNEL_NAME, "a kernel name; * ? [] are wildcards"),
        path=table.text("path", "", _NODE_PATH, "a path below /dev"),
        major_of=table.texts("major-of", _KERNEL_NAME, "names of drivers in /proc/devices"),
        required=table.flag("required", False) is True,
        open_to_all=table.flag("open-to-all", False) is True,
    )
    table.done()
    if bool(rule.path) == bool(rule.subsystem) or bool(rule.subsystem) != bool(rule.pattern):
        raise ProfileError(f"{table.where} has either subsystem and pattern, or path")
    if rule.major_of and not rule.path:
        raise ProfileError(f"{table.where} major-of: only for a node given by path")
    given = {place for fact in facts for place in FACTS[fact]}
    for place in places_in(rule.path):
        if place not in given:
            raise ProfileError(
                f"{table.where} path: {{{printable(place, 32)}}} is not given by the facts of [device]"
                f" ({', '.join(sorted(given)) or 'there are none'})"
            )
    return rule


def _attributes(table: Table) -> dict[str, AttributeRule]:
    rules = {}
    for name in table:
        if not _WORD.fullmatch(name):
            raise ProfileError(
                f"{table.where} {printable(name, 40)}: a name is lower-case letters, digits and -"
            )
        entry = table.table(name)
        rule = AttributeRule(
            read=entry.text("read", "", _RELATIVE, "a path below the device's directory"),
            minus=entry.text("minus", "", _RELATIVE, "a path below the device's directory"),
            name_of=entry.text("name-of", "", _KERNEL_NAME, "a kernel subsystem, as in infiniband"),
            all=entry.flag("all", False) is True,
            number=entry.flag("number", False) is True,
        )
        entry.done()
        if bool(rule.read) == bool(rule.name_of):
            raise ProfileError(f"{entry.where} has either read or name-of")
        if rule.minus and not (rule.read and rule.number):
            raise ProfileError(f"{entry.where} minus: needs read and number = true")
        if rule.all and not rule.name_of:
            raise ProfileError(f"{entry.where} all: needs name-of")
        rules[name] = rule
    return rules


def _known_places(facts: tuple[str, ...], attributes: Mapping[str, AttributeRule]) -> frozenset[str]:
    given = [place for fact in facts for place in FACTS[fact]]
    return frozenset([*PLACES, *COMMON_ATTRIBUTES, *given, *attributes])


def _check_places(template: str, known: frozenset[str], where: str) -> None:
    for place in places_in(template):
        if place not in known:
            raise ProfileError(
                f"{where}: {{{printable(place, 32)}}} is unknown; there are {', '.join(sorted(known))}"
            )
    if re.search(r"[{}]", _PLACE.sub("", template)):
        raise ProfileError(f"{where}: braces stand only around a name, as in {{index}}")


def _env(table: Table, known: frozenset[str]) -> tuple[dict[str, str], dict[str, Joining]]:
    """Read variables, whose values are texts or tables with ``value``, and how they are joined."""
    form, fits = re.compile(r"[ -~]{0,256}"), "up to 256 printable characters"
    variables, joining = {}, {}
    for name in table:
        if not _VARIABLE.fullmatch(name):
            raise ProfileError(f"{table.where} {printable(name, 40)}: not a name of an environment variable")
        if table.is_table(name):
            entry = table.table(name)
            value = entry.text("value", None, form, fits)
            joining[name] = Joining(
                prefix=entry.text("prefix", "", re.compile(r"[ -~]{0,32}"), "up to 32 printable characters"),
                renumbered=entry.flag("renumbered", False) is True,
            )
            entry.done()
        else:
            value = table.text(name, None, form, fits)
        _check_places(value, known, f"{table.where} {name}")
        variables[name] = value
    return variables, joining


def _limits(table: Table) -> dict[str, int]:
    form = re.compile(r"unlimited|[1-9][0-9]{0,17}")
    found = {}
    for name in LIMITS:
        value = table.text(name, "", form, '"unlimited", or a number of bytes as text')
        if value:
            found[name] = UNLIMITED if value == "unlimited" else int(value)
    table.done()
    return found


def _mount(table: Table, known: frozenset[str]) -> Mount:
    host = table.text("host", None, _ABSOLUTE, "an absolute path")
    container = table.text("container", "" if "*" in host else host, _ABSOLUTE_OR_NONE, "an absolute path")
    options = table.text("options", "ro", _OPTIONS, "mount options, as in ro,nosuid")
    required = table.flag("required", False) is True
    table.done()
    if container and "*" in host:
        raise ProfileError(f"{table.where} container: none where host has a *; each path goes to its own place")
    for template in (host, container):
        _check_places(template, known, f"{table.where} host")
    return Mount(host, container, options, required)


def _parts(root: Table, facts: tuple[str, ...], known: frozenset[str]) -> Parts | None:
    if "parts" not in root:
        return None
    table = root.table("parts")
    env, joining = _env(table.table("env"), known)
    parts = Parts(
        resource=table.text("resource", None, _RESOURCE_TEMPLATE, "vendor/class, as in amd.com/gpu.{part}"),
        subsystem=table.text("subsystem", "", _KERNEL_NAME, "a kernel subsystem, as in drm"),
        pattern=table.text("pattern", "", _KERNEL_NAME, "a kernel name; * ? [] are wildcards"),
        platform=table.text("platform", "", _KERNEL_NAME, "a name of platform devices; * is a wildcard"),
        facts=table.text("facts", "", re.compile("nvidia-mig"), "nvidia-mig"),
        env=env,
    )
    table.done()
    if bool(parts.facts) == bool(parts.subsystem) or bool(parts.subsystem) != bool(parts.pattern):
        raise ProfileError(f"{table.where} has either subsystem and pattern, or facts")
    if parts.facts and parts.facts not in facts:
        raise ProfileError(f"{table.where} facts: {parts.facts} is not among the facts of [device]")
    if joining:
        raise ProfileError(f"{table.where} env: texts only; how values are joined stands in [env]")
    _check_places(parts.resource, known, f"{table.where} resource")
    return parts


def _shared(root: Table, resource: str) -> Shared | None:
    if "shared" not in root:
        return None
    table = root.table("shared")
    shared = Shared(
        slots=table.number("slots", 0, low=2, high=SLOTS_MAX),
        resource=table.text("resource", f"{resource}.shared", names.RESOURCE, "vendor/class"),
    )
    table.done()
    if not shared.slots:
        raise ProfileError(f"{table.where} slots: missing; expected an integer from 2 to {SLOTS_MAX}")
    return shared
