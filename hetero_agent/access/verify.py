"""What a grant file may name, by what root has configured; the helper's judgement of the agent.

Which device is whose is the agent's to decide.  What a device is, is not: nodes must belong to devices
that root's profiles recognise, or that root lets a provider report; mounts, groups and names of
variables must be the profiles'.  So an agent that was taken over can give a device to the wrong user,
and can name no memory, no disk, no other file, and nothing that is run.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from hetero_agent import names
from hetero_agent.access.grant import Grant
from hetero_agent.access.manifest import COUNT_VARIABLE, DEVICES_VARIABLE, LEASE_VARIABLE, VERSION, AccessError
from hetero_agent.core.model import Role
from hetero_agent.text import is_printable, printable

DEV: Final = "/dev/"

#: The most of each in a grant: 64 devices with all that theirs can have.
_DEVICES_MAX: Final = 256
_ROWS_MAX: Final = 8192
_TEXT_MAX: Final = 4096

# Memory (1:1, 1:3 ...) and terminals are nobody's accelerator, whatever subsystems a provider may
# name; majors as in the kernel's Documentation/admin-guide/devices.txt.
_NEVER_SUBSYSTEMS: Final = frozenset({"mem", "tty", "vc", "vtconsole", "block"})
_NEVER_MAJORS: Final = frozenset({1, 4, 5, 7, *range(128, 144)})
_MEMORY: Final = 1
#: The kernel's include/linux/kdev_t.h, MINORBITS.
_MAJOR_MAX: Final = 2**12 - 1
_MINOR_MAX: Final = 2**20 - 1

_KEYS: Final = {
    "version", "lease", "resource", "devices", "nodes", "mounts", "env", "env-filtered", "groups",
    "limits", "netdevs", "confirm-by", "confirm-by-boottime",
}  # fmt: skip
_ROLES: Final = frozenset(one.value for one in Role)
_OURS: Final = frozenset({LEASE_VARIABLE, DEVICES_VARIABLE, COUNT_VARIABLE})
_LIMIT: Final = re.compile(r"[a-z]{1,16}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_NUMBERS: Final = "/sys/dev/char/"
_WILD: Final = re.compile(r"\{[a-z0-9-]+\}|\*")


class PathRule(NamedTuple):
    """Nodes by their PATH; DRIVERS are the names in /proc/devices one of which must have the major,
    none for any."""

    path: re.Pattern[str]
    drivers: tuple[str, ...] = ()


class MountRule(NamedTuple):
    """Mounts of HOST in the place of CONTAINER, None for the same, with OPTIONS."""

    host: re.Pattern[str]
    container: re.Pattern[str] | None
    options: str


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be named.  LISTED tells whether the class device at a path of sysfs, of a subsystem,
    with a node, belongs to a device that a profile recognises and lists such nodes of; PATHS are the
    nodes that profiles give by path; SUBSYSTEMS and DIRECTORIES those of the providers; MOUNTS,
    VARIABLES and GROUPS (gids) those of profiles."""

    listed: Callable[[str, str, str], bool]
    paths: tuple[PathRule, ...] = ()
    subsystems: frozenset[str] = frozenset()
    directories: tuple[str, ...] = ()
    mounts: tuple[MountRule, ...] = ()
    variables: frozenset[str] = frozenset()
    groups: frozenset[int] = frozenset()


def pattern(template: str) -> re.Pattern[str]:
    """Return the paths that TEMPLATE can stand for: places in braces for a value, stars for any
    characters of one name.  Only normal paths are compared with it, so neither is a way upwards."""
    return re.compile("[^/]*".join(re.escape(part) for part in _WILD.split(template)))


def check(grant: Grant, rules: Rules) -> Grant:
    """Return GRANT if all that it names may be named by RULES.

    Files that others than root could exchange for a link are left out: whoever makes the container
    would follow it.  So are the groups of files that are others' to give to a group.  Raises
    AccessError, naming what may not be.
    """
    manifest = grant.manifest
    if manifest.keys() != _KEYS:
        _refuse("manifest", "has other keys than it should")
    if manifest["version"] != VERSION or manifest["lease"] != grant.lease:
        _refuse("manifest", "is of another version or lease")
    for key in ("confirm-by", "confirm-by-boottime"):
        _number(manifest[key], 2**63 - 1, key)
    _text(manifest["resource"], names.RESOURCE, "resource")
    for device in _listed(manifest["devices"], _DEVICES_MAX, "devices"):
        _text(device, names.DEVICE_ID, "device")
    groups = set(rules.groups)
    others: set[int] = set()
    nodes = [row for row in _listed(manifest["nodes"], _ROWS_MAX, "nodes") if _node(row, rules, groups, others)]
    for row in _listed(manifest["mounts"], _ROWS_MAX, "mounts"):
        _mount(row, rules)
    for key in ("env", "env-filtered"):
        _variables(manifest[key], rules, key)
    for group in _listed(manifest["groups"], _ROWS_MAX, "groups"):
        _number(group, 2**32 - 2, "group")
        if group not in groups | others:
            _refuse(f"group {group}", "is none that a profile names or that may open a node of the grant")
    limits = manifest["limits"]
    if not isinstance(limits, dict):
        _refuse("limits", "are none")
    for key, value in limits.items():
        _text(key, _LIMIT, "limit")
        _number(value, 2**64 - 1, f"limit {key}")
    for row in _listed(manifest["netdevs"], _ROWS_MAX, "netdevs"):
        if not isinstance(row, list) or len(row) != 2:
            _refuse("netdevs", "has a row that is none")
        # whether it may be moved is looked at when it is to be (netdev.py)
        _text(row[0], names.DEVICE_ID, "device of a network interface")
        _text(row[1], names.INTERFACE, "network interface")
    kept = [group for group in manifest["groups"] if group in groups]  # type: ignore[attr-defined]
    return Grant(grant.lease, grant.uid, {**manifest, "nodes": nodes, "groups": kept})


# -- nodes ------------------------------------------------------------------------------------------
def _node(row: object, rules: Rules, groups: set[int], others: set[int]) -> bool:
    """Check a row of nodes, and add the node's own group to GROUPS, or to OTHERS if not only root can
    choose it; False if the row is to be left out."""
    if not isinstance(row, list) or len(row) != 6:
        _refuse("nodes", "has a row that is none")
    device, path, role, kind, major, minor = row
    _text(device, names.DEVICE_ID, "device of a node")
    if not isinstance(path, str) or os.path.normpath(path) != path or not is_printable(path, 2, 255):
        _refuse("node", f"{printable(path)} is not a plain path")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"node {path}", "has no role")
    _number(major, _MAJOR_MAX, "major")
    _number(minor, _MINOR_MAX, "minor")
    if kind == "file":
        return _file(path, rules, groups, others)
    if kind != "char":
        _refuse(f"node {path}", "is no character node")
    found = _in_dev(path)
    if found.st_rdev != os.makedev(major, minor):
        _refuse(f"node {path}", f"is {os.major(found.st_rdev)}:{os.minor(found.st_rdev)}, not {major}:{minor}")
    if not _may(path, major, minor, rules):
        _refuse(f"node {path}", "belongs to no device that a profile or a provider's configuration lists")
    groups.add(found.st_gid)
    return True


def _in_dev(path: str) -> os.stat_result:
    """Stat a character node that the kernel or udev put into /dev.  Only root can change it."""
    where = f"node {path}"
    try:
        if not path.startswith(DEV) or os.path.realpath(path, strict=True) != path:
            _refuse(where, "is not in /dev, or a link")
        found = os.lstat(path)
        same = found.st_dev == os.lstat(DEV).st_dev
    except OSError as error:
        raise AccessError(f"{where}: {error.strerror}") from error
    if not stat.S_ISCHR(found.st_mode):
        _refuse(where, "is no character node")
    if not same:
        _refuse(where, "lies on another file system than /dev")
    return found


def _may(path: str, major: int, minor: int, rules: Rules) -> bool:
    if major == _MEMORY:
        return False
    if any(rule.path.fullmatch(path) and _driven(major, rule.drivers) for rule in rules.paths):
        return True
    try:
        # ../../devices/...: the kernel's own links have no others in them
        device = os.path.normpath(_NUMBERS + os.readlink(f"{_NUMBERS}{major}:{minor}"))  # noqa: PTH115
        subsystem = os.readlink(f"{device}/subsystem").rpartition("/")[2]  # noqa: PTH115
    except OSError:
        device = subsystem = ""
    if device and rules.listed(device, subsystem, path):
        return True
    if not rules.subsystems or major in _NEVER_MAJORS or subsystem in _NEVER_SUBSYSTEMS:
        return False
    return subsystem in rules.subsystems or _driven(major, tuple(rules.subsystems))


def _driven(major: int, drivers: tuple[str, ...]) -> bool:
    """Whether MAJOR is one of those DRIVERS' by /proc/devices; of any if none is named."""
    if not drivers:
        return True
    text = Path("/proc/devices").read_text(encoding="ascii", errors="replace").partition("Block devices:")[0]
    return any(line.split() == [str(major), name] for line in text.splitlines() for name in drivers)


def _file(path: str, rules: Rules, groups: set[int], others: set[int]) -> bool:
    """Whether a file may be named and only root decides what is there; its group as in `_node`."""
    if not any(path.startswith(f"{directory}/") for directory in rules.directories):
        _refuse(f"file {path}", "lies in no provider's directory")
    try:
        found = [os.lstat(one) for one in (path, *map(str, Path(path).parents))]
    except OSError as error:
        raise AccessError(f"file {path}: {error.strerror}") from error
    if not stat.S_ISREG(found[0].st_mode) or found[0].st_nlink != 1:
        _refuse(f"file {path}", "is no regular file with one name")
    roots = all(one.st_uid == 0 and stat.S_ISDIR(one.st_mode) and not one.st_mode & 0o022 for one in found[1:])
    (groups if roots and found[0].st_uid == 0 else others).add(found[0].st_gid)
    return roots


# -- the rest ---------------------------------------------------------------------------------------
def _mount(row: object, rules: Rules) -> None:
    if not isinstance(row, list) or len(row) != 3 or not all(isinstance(one, str) for one in row):
        _refuse("mounts", "has a row that is none")
    host, container, options = row
    where = f"mount {printable(host)}"
    for path in (host, container):
        if not path.startswith("/") or os.path.normpath(path) != path or not is_printable(path, 1, _TEXT_MAX):
            _refuse(where, f"{printable(path)} is not a plain absolute path")
    for rule in rules.mounts:
        if options == rule.options and rule.host.fullmatch(host):
            there = rule.container.fullmatch(container) if rule.container is not None else container == host
            if there:
                return
    _refuse(where, "is none of a profile's")


def _variables(given: object, rules: Rules, key: str) -> None:
    if not isinstance(given, Mapping) or len(given) > _ROWS_MAX:
        _refuse(key, "is no table")
    for name, value in given.items():
        known = name in _OURS or name in rules.variables or not names.FORBIDDEN_VARIABLE.fullmatch(name)
        if not _VARIABLE.fullmatch(name) or not known:
            _refuse(f"variable {printable(name)}", "is none of a profile's or provider's")
        if not isinstance(value, str) or not is_printable(value, 0, 64 * _TEXT_MAX):
            _refuse(f"variable {name}", "has a value that is not printable")


def _listed(value: object, most: int, what: str) -> Iterable[Any]:
    if not isinstance(value, list) or len(value) > most:
        _refuse(what, f"is no list of at most {most}")
    return value


def _text(value: object, form: re.Pattern[str], what: str) -> None:
    if not isinstance(value, str) or not form.fullmatch(value):
        _refuse(what, f"{printable(value)} is none")


def _number(value: object, most: int, what: str) -> None:
    if type(value) is not int or not 0 <= value <= most:
        _refuse(what, f"{printable(value)} is no number from 0 to {most}")


def _refuse(what: str, why: str) -> NoReturn:
    raise AccessError(f"not by root's profiles and configuration: {what} {why}")
