"""The tables ``[health]`` and ``[[kernel-log]]`` of a profile, and what every profile has of them."""

from __future__ import annotations

import re
from typing import Final

from hetero_agent.core.symptoms import COMMON, MessageRule, Probe, Symptoms
from hetero_agent.core.verdict import Fault
from hetero_agent.discovery.tables import ProfileError, Table
from hetero_agent.text import printable

#: Groups that a pattern may have, and places that a text may name.
GROUPS: Final = frozenset({"address", "name", "code"})
PLACES: Final = frozenset({"code", "line"})

_PATTERN = re.compile(r"[\x20-\x7e]{1,256}")
_TEXT = re.compile(r"[\x20-\x7e]{1,128}")
_PLACE = re.compile(r"\{([^{}]*)\}")
_PROBES = re.compile("|".join(Probe))
_FAULTS = re.compile("|".join(Fault))

_ANY: Final = r"\S+ (?P<address>[0-9a-fA-F:.]+): "

#: What the PCI core and DRM say of any device (drivers/pci/pcie/aer.c and err.c, drivers/pci/pci.c,
#: drivers/gpu/drm/xe).  A message about a port is about the devices below it.
EVERYWHERE: Final = (
    MessageRule(
        r"pcieport \S+: AER: (Multiple )?Uncorrect(ed|able) \(Fatal\) error (message )?received"
        r"(:| from) (?P<address>\S+)",
        Fault.NEEDS_RESET,
        "PCIe: uncorrectable fatal error",
    ),
    MessageRule(
        _ANY + r"(AER: )?PCIe Bus Error: severity=Uncorrect(ed|able) \(Fatal\)",
        Fault.NEEDS_RESET,
        "PCIe: uncorrectable fatal error",
    ),
    MessageRule(
        r"pcieport \S+: AER: (Multiple )?Uncorrect(ed|able) \(Non-Fatal\) error (message )?received"
        r"(:| from) (?P<address>\S+)",
        Fault.DEGRADED,
        "PCIe: uncorrectable error",
    ),
    MessageRule(
        r"pcieport (?P<address>\S+): AER: device recovery failed", Fault.FATAL, "PCIe: recovery failed"
    ),
    MessageRule(
        r"pcieport (?P<address>\S+): AER: device recovery successful", Fault.RECOVERED, "PCIe: recovered"
    ),
    MessageRule(
        _ANY + r"Unable to change power state from \S+ to D0, device inaccessible",
        Fault.FATAL,
        "inaccessible: it does not leave its sleep",
    ),
    MessageRule(_ANY + r".*\bfallen off the bus", Fault.FATAL, "fallen off the bus"),
    MessageRule(_ANY + r"\[drm\] CRITICAL: .* as wedged", Fault.NEEDS_RESET, "declared wedged by its driver"),
)


def parse(root: Table) -> Symptoms:
    """Take the two tables out of the root table of a profile.  Raises ProfileError."""
    health = root.table("health")
    probes = health.texts("probes", _PROBES, ", ".join(Probe)) if "probes" in health else COMMON
    symptoms = Symptoms(
        probes=tuple(Probe(one) for one in probes),
        correctable=health.number("correctable-per-minute", 60, low=1, high=1_000_000),
        messages=(*(_message(table) for table in root.tables("kernel-log")), *EVERYWHERE),
    )
    health.done()
    return symptoms


def _message(table: Table) -> MessageRule:
    rule = MessageRule(
        pattern=table.text("pattern", None, _PATTERN, "a regular expression of up to 256 characters"),
        fault=Fault(table.text("class", None, _FAULTS, ", ".join(Fault))),
        text=table.text("text", "{line}", _TEXT, "up to 128 printable characters"),
        codes=table.numbers("codes", 0, 1_000_000),
    )
    table.done()
    try:
        groups = set(re.compile(rule.pattern).groupindex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ProfileError(f"{table.where} pattern: not a regular expression: {printable(error)}") from None
    for name in groups - GROUPS:
        raise ProfileError(f"{table.where} pattern: no group is called {name}; there are {_listed(GROUPS)}")
    if rule.codes and "code" not in groups:
        raise ProfileError(f"{table.where} codes: the pattern has no group (?P<code>...)")
    for place in _PLACE.findall(rule.text):
        if place not in PLACES or (place == "code" and "code" not in groups):
            raise ProfileError(f"{table.where} text: {{{printable(place, 32)}}} is unknown here")
    if re.search(r"[{}]", _PLACE.sub("", rule.text)):
        raise ProfileError(f"{table.where} text: braces stand only around a name, as in {{code}}")
    return rule


def _listed(words: frozenset[str]) -> str:
    return ", ".join(sorted(words))
