"""The configuration file: TOML in, one frozen `Config` out, or an error that names the key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from hetero_agent.text import printable


class ConfigError(ValueError):
    """The configuration can't be used; the text names file, table and key and what fits."""


@dataclass(frozen=True, slots=True)
class AgentTable:
    """``[agent]``: who may allocate, and how much the log says."""

    group: str = "hetero"
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class LimitsTable:
    """``[limits]``: the most that callers can have; all are properties of the Manager."""

    leases: int = 4096
    leases_per_uid: int = 1024
    leases_per_client: int = 256
    devices_per_lease: int = 64
    devices_per_client: int = 1024
    requests_per_uid: int = 50_000
    waiting: int = 256
    providers: int = 16
    devices_per_provider: int = 4096
    calls_per_caller: int = 32


@dataclass(frozen=True, slots=True)
class GrantTable:
    """``[grant]``: seconds to confirm a lease, and for all effects of one grant."""

    confirm_within: float = 30.0
    effects_timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class AccessTable:
    """``[access]``: what leases change on the host.  CDI_DIRECTORY is where their CDI specifications
    go, ``auto`` (/run/cdi for the agent of the system, else below the runtime directory) or "" for
    none; ACL says whether a lease's uid gets an entry in the access control lists of its nodes;
    HELPER is the socket of who does it as root: ``auto``, ``none``, or a path; MOVE_NETDEVS says whether
    a lease may have its devices' network interfaces moved into its process's network namespace."""

    cdi_directory: str = "auto"
    acl: bool = True
    helper: str = "auto"
    move_netdevs: bool = False


@dataclass(frozen=True, slots=True)
class ReclaimTable:
    """``[reclaim]``: seconds until an unproven return is a fault, from TERM to KILL, between a
    stranger's two sightings, between full scans; what happens to strangers; and whose processes
    there are: all of the ``host``, or, in a container that alone has the devices, those of the
    agent's ``own`` pid namespace."""

    deadline: float = 60.0
    kill_after: float = 10.0
    occupied_after: float = 2.0
    scan_interval: float = 60.0
    orphans: str = "wait"
    pid_namespace: str = "host"
    system_holders: tuple[str, ...] = (
        "nvidia-persistenced.service",
        "nvidia-fabricmanager.service",
        "nvidia-powerd.service",
        "nvidia-dcgm.service",
        "dcgm.service",
        "rdc.service",
        "xpum.service",
        "opensm.service",
        "ibacm.service",
        "systemd-logind.service",
        "gdm.service",
        "gdm3.service",
        "sddm.service",
        "lightdm.service",
        "lxdm.service",
        "xdm.service",
        "greetd.service",
    )


@dataclass(frozen=True, slots=True)
class DiscoveryTable:
    """``[discovery]``: seconds between comparisons with the whole of /sys, and the uevent
    source: ``udev``, ``kernel``, or ``auto`` (udev where /run/udev/control exists)."""

    resync_interval: float = 300.0
    udev_source: str = "auto"


@dataclass(frozen=True, slots=True)
class HealthTable:
    """``[health]``: seconds between two probes of a device, until a failed one is repeated, and
    that one may take; how many failed ones in a row make a device unhealthy, how many good ones
    bring it back; and where the kernel's messages are read: the ``journal``, ``kmsg``
    (/dev/kmsg), ``auto`` (the journal if it has them), or nowhere (``off``)."""

    interval: float = 7.5
    confirm: float = 1.5
    deadline: float = 2.0
    failures: int = 3
    recoveries: int = 3
    kernel_log: str = "auto"


@dataclass(frozen=True, slots=True)
class ProviderTable:
    """``[providers.NAME]``: who may report as NAME (root always may), what, and from where.

    RESOURCES are the names it may report (none given: any); SUBSYSTEMS the kernel
    subsystems its character nodes must belong to; DIRECTORY, if given, the one that its file-backed
    nodes lie in; GRACE the seconds that its devices stay after it left.
    """

    uid: int = 0
    resources: tuple[str, ...] = ()
    subsystems: tuple[str, ...] = ()
    directory: str = ""
    grace: float = 30.0


@dataclass(frozen=True, slots=True)
class ControlPlanesTable:
    """``[control-planes]``: the uids that may Register, Reconcile and GetConflicts."""

    uids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration."""

    agent: AgentTable = field(default_factory=AgentTable)
    limits: LimitsTable = field(default_factory=LimitsTable)
    grant: GrantTable = field(default_factory=GrantTable)
    access: AccessTable = field(default_factory=AccessTable)
    reclaim: ReclaimTable = field(default_factory=ReclaimTable)
    discovery: DiscoveryTable = field(default_factory=DiscoveryTable)
    health: HealthTable = field(default_factory=HealthTable)
    control_planes: ControlPlanesTable = field(default_factory=ControlPlanesTable)
    providers: Mapping[str, ProviderTable] = field(default_factory=dict)


_CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    ("agent", "log-level"): ("debug", "info", "notice", "warning", "err"),
    ("access", "cdi-directory"): ("auto",),
    ("access", "helper"): ("auto", "none"),
    ("reclaim", "orphans"): ("wait", "kill"),
    ("reclaim", "pid-namespace"): ("host", "own"),
    ("discovery", "udev-source"): ("auto", "udev", "kernel"),
    ("health", "kernel-log"): ("auto", "journal", "kmsg", "off"),
}

#: Texts that are, or that besides their choices may also be, an absolute path, and what that looks like.
_PATHS: dict[tuple[str, str], tuple[re.Pattern[str], str]] = {
    ("access", "cdi-directory"): (re.compile(r"(/.+)?", re.DOTALL), "an absolute path or nothing"),
    ("access", "helper"): (re.compile(r"/.+", re.DOTALL), "an absolute path"),
    ("providers", "directory"): (
        re.compile(r"((/(?!\.{1,2}(/|$))[^/\0]+)+/?)?"),
        "an absolute path without . and .., not /, or nothing",
    ),
}

#: Least and greatest value of a number, by (table, key); others are 1 to 2**31-1.
_RANGES: dict[tuple[str, str], tuple[float, float]] = {
    ("grant", "confirm-within"): (0.1, 30),
    ("grant", "effects-timeout"): (0.1, 20),
    ("reclaim", "deadline"): (0.1, 86_400),
    ("reclaim", "kill-after"): (0.1, 600),
    ("reclaim", "occupied-after"): (0.1, 60),
    ("reclaim", "scan-interval"): (1, 3600),
    ("discovery", "resync-interval"): (1, 86_400),
    ("health", "interval"): (0.1, 600),
    ("health", "confirm"): (0.05, 60),
    ("health", "deadline"): (0.1, 60),
    ("health", "failures"): (1, 100),
    ("health", "recoveries"): (1, 100),
    ("providers", "uid"): (0, 2**32 - 2),
    ("providers", "grace"): (0, 3600),
}


def load(path: Path, *, needed: bool = False) -> Config:
    """Read the file; a missing one gives the defaults, unless it is NEEDED.  Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if needed:
            raise ConfigError(f"{path}: there is no such file") from error
        return Config()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {printable(error)}") from error
    return parse(text, str(path))


def parse(text: str, where: str = "configuration") -> Config:
    """Parse TOML text.  Raises ConfigError naming WHERE, the table and the key."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # other than TOMLDecodeError: too many digits, or brackets
        raise ConfigError(f"{where}: not TOML: {printable(error)}") from error
    tables: dict[str, Any] = {}
    for item in fields(Config):
        name = item.name.replace("_", "-")
        given = data.pop(name, {})
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: [{name}] is a table, not {printable(type(given).__name__)}")
        if item.name == "providers":
            tables[item.name] = {
                key: _table(ProviderTable, "providers", key, value, where) for key, value in given.items()
            }
        else:
            kind = get_type_hints(Config)[item.name]
            tables[item.name] = _table(kind, name, name, given, where)
    if data:
        known = ", ".join(item.name.replace("_", "-") for item in fields(Config))
        raise ConfigError(f"{where}: unknown table [{printable(next(iter(data)))}]; the tables are {known}")
    return Config(**tables)


def _table(kind: type[Any], table: str, shown: str, given: Any, where: str) -> Any:
    label = f"{where}: [{printable(shown)}]"
    if not isinstance(given, dict):
        raise ConfigError(f"{label} is a table")
    given = dict(given)
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for item in fields(kind):
        key = item.name.replace("_", "-")
        if key in given:
            values[item.name] = _value(hints[item.name], table, key, given.pop(key), label)
    if given:
        known = ", ".join(item.name.replace("_", "-") for item in fields(kind))
        raise ConfigError(f"{label} has no key {printable(next(iter(given)))}; the keys are {known}")
    return kind(**values)


def _value(hint: Any, table: str, key: str, value: Any, label: str) -> Any:
    where = f"{label} {key}"
    if hint is str:
        choices = _CHOICES.get((table, key))
        path, words = _PATHS.get((table, key), (None, ""))
        limited = bool(choices or path)
        fits = isinstance(value, str) and (
            not limited or value in (choices or ()) or (path is not None and bool(path.fullmatch(value)))
        )
        if not fits:
            shown = [*(choices or ()), *([words] if words else [])]
            raise ConfigError(
                f"{where}: expected {' or '.join(shown) if shown else 'text'}, got {printable(value)}"
            )
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: expected true or false, got {printable(value)}")
        return value
    if hint in (int, float):
        low, high = _RANGES.get((table, key), (1, 2**31 - 1))
        number = isinstance(value, int) or (hint is float and isinstance(value, float))
        if isinstance(value, bool) or not number or not low <= value <= high:
            raise ConfigError(f"{where}: expected a number from {low} to {high}, got {printable(value)}")
        return hint(value)
    inner: type[Any] = hint.__args__[0]
    if not isinstance(value, list) or not all(
        isinstance(one, inner) and not isinstance(one, bool) for one in value
    ):
        word = "numbers" if inner is int else "texts"
        raise ConfigError(f"{where}: expected a list of {word}, got {printable(value)}")
    return tuple(value)
