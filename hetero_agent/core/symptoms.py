"""What a profile says of a device's health: which probes fit it, and what kernel messages mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hetero_agent.core.verdict import Fault


class Probe(StrEnum):
    """The probes that a profile may ask for, beside those that every device gets: that it is
    there, that it has its driver, that its nodes have the right numbers, its power state."""

    CONFIG = "config"
    AER = "aer"
    LINK = "link"
    TEMPERATURE = "temperature"
    AMDGPU_RAS = "amdgpu-ras"
    RDMA_PORT = "rdma-port"
    NVIDIA_PROC = "nvidia-proc"


#: What a profile that says nothing gets.
COMMON: Final = (Probe.CONFIG, Probe.AER, Probe.LINK, Probe.TEMPERATURE)


@dataclass(frozen=True, slots=True)
class MessageRule:
    """``[[kernel-log]]``: PATTERN is a regular expression that a line has to match from its
    beginning.  Its group ``address`` is the device's PCI address in any spelling, ``name`` its
    kernel name, ``code`` a number that has to be one of CODES if there are any.  FAULT is what
    that means; TEXT, with ``{code}`` and ``{line}``, what people are told."""

    pattern: str
    fault: Fault
    text: str = "{line}"
    codes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Symptoms:
    """``[health]`` and ``[[kernel-log]]`` of one profile.  CORRECTABLE is the number of
    correctable PCIe errors per minute from which on a device is suspect."""

    probes: tuple[Probe, ...] = COMMON
    correctable: int = 60
    messages: tuple[MessageRule, ...] = ()
