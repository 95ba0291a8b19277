"""Who may call what: the table of design section 7, and the only place that knows it.

Where a rule names a polkit action, polkit may let in a caller that is outside the circle
(docs/decisions/polkit.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from hetero_agent import names
from hetero_agent.bus import contract
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import Actor, Device, Lease


class Who(StrEnum):
    """The circles of callers; root is in each of them."""

    EVERYONE = "everyone"
    GROUP = "the configured group"
    OWNER = "the lease's uid"
    HOLDER = "the group or a holder's own uid"
    CONTROL_PLANE = "the configured control planes"
    REAPER = "the lease's own control plane"
    PROVIDER = "the uid configured for the provider"
    ROOT = "root"


class Action(StrEnum):
    """The polkit actions, described in dbus/org.heteroagent.Agent1.policy."""

    ALLOCATE = f"{names.BUS_NAME}.allocate"
    RELEASE_OTHERS = f"{names.BUS_NAME}.release-others"
    CORDON = f"{names.BUS_NAME}.cordon"
    REAP = f"{names.BUS_NAME}.reap"


class Rule(NamedTuple):
    """Who may, and the ACTION by which polkit may let in others.  COULD: it is enough that the
    caller could authenticate, and nobody is asked to."""

    who: Who
    action: Action | None = None
    could: bool = False


_EVERYONE = Rule(Who.EVERYONE)

#: Every method of every interface.
METHODS: Mapping[str, Rule] = MappingProxyType(
    {
        f"{names.MANAGER}.Register": Rule(Who.CONTROL_PLANE),
        f"{names.MANAGER}.GetSnapshot": _EVERYONE,
        f"{names.MANAGER}.Allocate": Rule(Who.GROUP, Action.ALLOCATE),
        f"{names.MANAGER}.Confirm": Rule(Who.OWNER),
        f"{names.MANAGER}.Release": Rule(Who.OWNER, Action.RELEASE_OTHERS),
        f"{names.MANAGER}.Explain": Rule(Who.GROUP, Action.ALLOCATE, could=True),
        f"{names.MANAGER}.Reconcile": Rule(Who.CONTROL_PLANE),
        f"{names.MANAGER}.GetConflicts": Rule(Who.CONTROL_PLANE),
        f"{names.MANAGER}.Reap": Rule(Who.REAPER, Action.REAP),
        f"{names.MANAGER}.CanAllocate": _EVERYONE,
        f"{names.MANAGER}.CanReleaseOthers": _EVERYONE,
        f"{names.MANAGER}.CanCordon": _EVERYONE,
        f"{names.MANAGER}.CanReap": _EVERYONE,
        f"{names.DEVICE}.GetNodes": _EVERYONE,
        f"{names.DEVICE}.GetAccess": _EVERYONE,
        f"{names.DEVICE}.GetHistory": _EVERYONE,
        f"{names.DEVICE}.GetHolders": Rule(Who.HOLDER, Action.REAP),
        f"{names.DEVICE}.Cordon": Rule(Who.ROOT, Action.CORDON),
        f"{names.DEVICE}.Uncordon": Rule(Who.ROOT, Action.CORDON),
        f"{names.LEASE}.GetManifest": Rule(Who.OWNER),
        f"{names.LEASE}.GetRequest": Rule(Who.OWNER),
        f"{names.LEASE}.GetBinding": Rule(Who.OWNER),
        f"{names.PROVIDERS}.RegisterProvider": Rule(Who.PROVIDER),
        f"{names.PROVIDERS}.ReportDevices": _EVERYONE,  # the registry: registered connections only
        f"{names.PROVIDERS}.ReportHealth": _EVERYONE,  # the same
        f"{contract.PEER}.Ping": _EVERYONE,
        f"{contract.PEER}.GetMachineId": _EVERYONE,
        f"{contract.INTROSPECTABLE}.Introspect": _EVERYONE,
        f"{contract.PROPERTIES}.Get": _EVERYONE,
        f"{contract.PROPERTIES}.GetAll": _EVERYONE,
        f"{contract.PROPERTIES}.Set": Rule(Who.ROOT),
        f"{contract.OBJECT_MANAGER}.GetManagedObjects": _EVERYONE,
    }
)

#: What the methods Can... of the Manager answer for: the rule of what they are named after, where
#: nothing is known of the lease or device that it would be about.
CAN: Mapping[str, Rule] = MappingProxyType(
    {
        "CanAllocate": Rule(Who.GROUP, Action.ALLOCATE),
        "CanReleaseOthers": Rule(Who.ROOT, Action.RELEASE_OTHERS),
        "CanCordon": Rule(Who.ROOT, Action.CORDON),
        "CanReap": Rule(Who.ROOT, Action.REAP),
    }
)

#: What is more than a method's own rule: the option owner-uid, and the actors in GetHistory.
OWNER_UID = Who.ROOT
HISTORY_ACTORS = Who.GROUP


@dataclass(frozen=True, slots=True)
class Caller:
    """One connection's owner, as the bus says; UNIT is its systemd unit ("" for none)."""

    bus_name: str
    uid: int
    pid: int
    groups: frozenset[int]
    unit: str

    def actor(self, client: str = "", authority: str = "") -> Actor:
        """The caller as the core and the audit know it."""
        return Actor(self.uid, self.pid, self.unit, self.bus_name, client, authority)


class Guard:
    """Applies the table.  GROUP_GID is None while the group does not exist: then only root is
    in it.  MAY_PROVIDE tells whether a uid may report as a provider of that name."""

    def __init__(self, may_provide: Callable[[int, str], bool]) -> None:
        self.group = ""
        self.group_gid: int | None = None
        self.control_planes: tuple[int, ...] = ()
        self._may_provide = may_provide

    def in_group(self, caller: Caller) -> bool:
        """Whether the caller is of the configured group, or root."""
        return caller.uid == 0 or (self.group_gid is not None and self.group_gid in caller.groups)

    def check(self, who: Who, caller: Caller, member: str, subject: object = None) -> None:
        """Raise Refusal unless CALLER is in the circle WHO.

        SUBJECT is what the circle is about: the Lease of OWNER (None: not known here, the core
        decides), the Device of HOLDER, the device's Lease of REAPER, the name of PROVIDER.
        """
        if caller.uid == 0 or who is Who.EVERYONE:
            return
        if who is Who.OWNER:
            if isinstance(subject, Lease) and subject.uid != caller.uid:
                raise Refusal(
                    ErrorKind.NOT_OWNER,
                    f"{member}: the lease is uid {subject.uid}'s; only that uid or root may do this",
                )
            return
        if not self._allowed(who, caller, subject):
            raise Refusal(ErrorKind.NOT_AUTHORIZED, f"{member}: {self._need(who, caller)}")

    def _allowed(self, who: Who, caller: Caller, subject: object) -> bool:
        if who is Who.GROUP:
            return self.in_group(caller)
        if who is Who.HOLDER:
            held = isinstance(subject, Device) and any(caller.uid in one.uids for one in subject.holders)
            return held or self.in_group(caller)
        if who is Who.CONTROL_PLANE:
            return caller.uid in self.control_planes
        if who is Who.REAPER:
            mine = isinstance(subject, Lease) and subject.client and subject.creator.uid == caller.uid
            return bool(mine) and caller.uid in self.control_planes
        if who is Who.PROVIDER:
            return isinstance(subject, str) and self._may_provide(caller.uid, subject)
        return False

    def _need(self, who: Who, caller: Caller) -> str:
        if who in (Who.GROUP, Who.HOLDER):
            if self.group_gid is None:
                return f"group {self.group} does not exist on this host, so only root may; create it"
            return (
                f"uid {caller.uid} is not in group {self.group}; "
                f"have it added (usermod -aG {self.group} USER) and log in again"
            )
        if who in (Who.CONTROL_PLANE, Who.REAPER):
            return f"for root and {who.value}; uid {caller.uid} is none (uids in [control-planes])"
        if who is Who.PROVIDER:
            return f"uid {caller.uid} is not configured for this provider (uid in [providers.NAME])"
        return f"only root may; uid {caller.uid} asked"
