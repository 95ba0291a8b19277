"""PCI addresses (bus, device, function) in the one form that ids are made of."""

from __future__ import annotations

import re
from typing import Final

#: As the kernel's pci_name() prints it: ``%04x:%02x:%02x.%d``; VMD and Azure have domains of
#: more than four digits.
COMPONENT: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")

_LOOSE: Final = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([01][0-9a-f])(?:\.([0-7]))?")


def normalise(text: str) -> str:
    """Return TEXT as the kernel spells a PCI address: lower case, domain of at least four digits.

    A missing domain is 0 (lspci), a missing function is 0 (Xid lines), and a domain padded to
    eight digits (nvidia-smi) loses its padding.  Raises ValueError for anything else.
    """
    match = _LOOSE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError("not a PCI address: expected [domain:]bus:device[.function] in hex")
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}"


def order(address: str) -> tuple[int, int, int, int]:
    """Return a key that sorts normalised addresses as the bus does (what PCI_BUS_ID order is)."""
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    return int(domain, 16), int(bus, 16), int(device, 16), int(function)


def devfn(address: str) -> int:
    """Return bus, device and function as the 16-bit number of the kernel's pci_dev_id()."""
    _domain, bus, device, function = order(address)
    return bus << 8 | device << 3 | function


def last_in(path: str) -> tuple[str, str] | None:
    """Return the nearest PCI device at or above sysfs PATH as (its path, its address)."""
    parts = path.split("/")
    for index in range(len(parts) - 1, 0, -1):
        if COMPONENT.fullmatch(parts[index]):
            return "/".join(parts[: index + 1]), parts[index]
    return None
