"""The interfaces as ``dbus/*.xml`` states them: the one source of what the bus answers to."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from hetero_agent.bus.codec import split

DOC = "org.gtk.GDBus.DocString"
EMITS = "org.freedesktop.DBus.Property.EmitsChangedSignal"

PEER = "org.freedesktop.DBus.Peer"
INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"
PROPERTIES = "org.freedesktop.DBus.Properties"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"

#: What every introspection begins with (D-Bus Specification, "Introspection Data Format").
HEADER = (
    '<!DOCTYPE node PUBLIC "-//freedesktop//DTD D-BUS Object Introspection 1.0//EN"\n'
    ' "http://www.freedesktop.org/standards/dbus/1.0/introspect.dtd">\n'
)

_BODY = re.compile(r"  <interface .*</interface>\n", re.DOTALL)


class ContractError(ValueError):
    """An interface file can't be used; the text names the file and the member."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a method or signal."""

    name: str
    signature: str


@dataclass(frozen=True, slots=True)
class Method:
    """A method; TAKES and GIVES are the signatures of its arguments and of its reply."""

    name: str
    takes: str
    gives: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    doc: str


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal and the signature of its body."""

    name: str
    signature: str
    arguments: tuple[Argument, ...]
    doc: str


@dataclass(frozen=True, slots=True)
class Property:
    """A property.  EMITS is its EmitsChangedSignal annotation: true, const or false."""

    name: str
    signature: str
    writable: bool
    emits: str
    doc: str


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface.  XML is its ``<interface>`` element as the file has it."""

    name: str
    methods: Mapping[str, Method]
    signals: Mapping[str, Signal]
    properties: Mapping[str, Property]
    doc: str
    xml: str


def directory() -> Path:
    """Where the interface files are: in the installed package, else ``dbus/`` of the checkout."""
    here = Path(__file__).resolve()
    # it has no __init__.py, so importlib.resources would not give a path
    installed = here.parents[1] / "interfaces"
    return installed if installed.is_dir() else here.parents[2] / "dbus"


@lru_cache(maxsize=1)
def load() -> Mapping[str, Interface]:
    """Return all interfaces by name.  Raises ContractError, OSError."""
    found = {}
    for path in sorted(directory().glob("*.xml")):
        interface = parse(path.read_text(encoding="utf-8"), path.name)
        found[interface.name] = interface
    if not found:
        raise ContractError(f"no interface files in {directory()}")
    return MappingProxyType(found)


def parse(text: str, where: str) -> Interface:
    """Parse one file.  Raises ContractError."""
    body = _BODY.search(text)
    try:
        root = ET.fromstring(text)  # noqa: S314  (our own file)
    except ET.ParseError as error:
        raise ContractError(f"{where}: {error}") from error
    element = root.find("interface")
    if element is None or body is None or len(root) != 1:
        raise ContractError(f"{where}: expected one <interface>")
    try:
        return Interface(
            name=element.attrib["name"],
            methods=MappingProxyType({one.attrib["name"]: _method(one) for one in element.iter("method")}),
            signals=MappingProxyType({one.attrib["name"]: _signal(one) for one in element.iter("signal")}),
            properties=MappingProxyType(
                {one.attrib["name"]: _property(one) for one in element.iter("property")}
            ),
            doc=_annotation(element, DOC),
            xml=body.group(0),
        )
    except (KeyError, ValueError) as error:
        raise ContractError(f"{where}: {error}") from error


def _annotation(element: ET.Element, name: str, default: str = "") -> str:
    for one in element.findall("annotation"):
        if one.attrib["name"] == name:
            return one.attrib["value"]
    return default


def _arguments(element: ET.Element, direction: str) -> tuple[Argument, ...]:
    found = []
    for one in element.findall("arg"):
        if one.attrib.get("direction", direction) == direction:
            if len(split(one.attrib["type"])) != 1:
                raise ValueError(f"{element.attrib['name']}: {one.attrib['type']} is not one type")
            found.append(Argument(one.attrib["name"], one.attrib["type"]))
    return tuple(found)


def _method(element: ET.Element) -> Method:
    inputs, outputs = _arguments(element, "in"), _arguments(element, "out")
    return Method(
        element.attrib["name"],
        "".join(one.signature for one in inputs),
        "".join(one.signature for one in outputs),
        inputs,
        outputs,
        _annotation(element, DOC),
    )


def _signal(element: ET.Element) -> Signal:
    arguments = _arguments(element, "out")
    return Signal(
        element.attrib["name"],
        "".join(one.signature for one in arguments),
        arguments,
        _annotation(element, DOC),
    )


def _property(element: ET.Element) -> Property:
    signature = element.attrib["type"]
    if len(split(signature)) != 1:
        raise ValueError(f"{element.attrib['name']}: {signature} is not one type")
    return Property(
        element.attrib["name"],
        signature,
        element.attrib["access"] == "readwrite",
        _annotation(element, EMITS, "true"),
        _annotation(element, DOC),
    )
