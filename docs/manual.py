"""org.heteroagent.Agent1(5), the manual of the bus interfaces, made from dbus/*.xml.

    python3 docs/manual.py dbus/org.heteroagent.Agent1.*.xml >org.heteroagent.Agent1.5

It is written in mdoc(7).  Its date is SOURCE_DATE_EPOCH, else today's.
"""

from __future__ import annotations

import os
import re
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_DOC: Final = "org.gtk.GDBus.DocString"
_EMITS: Final = "org.freedesktop.DBus.Property.EmitsChangedSignal"

#: What EmitsChangedSignal means to a reader (D-Bus Specification, "Introspection Data Format").
_CHANGES: Final = {
    "true": "",
    "const": "Constant.",
    "false": "Changes are not announced.",
    "invalidates": "Changes are announced without the value.",
}

#: What each error tells its caller; a test compares with the agent's own list.
ERRORS: Final = {
    "NotReady": "The agent has not seen all devices yet. Ask again.",
    "InvalidArgument": "An argument has no meaning; the text says which, and what fits.",
    "NotFound": "There is no such resource, device or lease.",
    "Unavailable": "Too few devices are free now; the text has counts and reasons.",
    "LimitExceeded": "A limit of the configuration would be passed.",
    "QueueFull": "Too many requests wait already.",
    "NotAuthorized": "The caller may not do this.",
    "NotOwner": "The lease is another user's.",
    "RequestConflict": "The request id was used with other arguments.",
    "RequestSpent": "The lease of this request id has ended; the id never grants again.",
    "LeaseEnded": "The lease has ended.",
    "Timeout": "The wait was in vain, or a step took too long.",
    "ProtocolUnsupported": "The agent does not speak this protocol version; the text has its range.",
    "NotSupported": "This agent or this host can't do that.",
    "StoreFailed": "The change could not be stored, and so was not made.",
    "Internal": "A fault of the agent. The id in the text leads to the details in its log.",
}

_HEAD: Final = r"""
.Dt ORG.HETEROAGENT.AGENT1 5
.Os hetero-agent
.Sh NAME
.Nm org.heteroagent.Agent1
.Nd the D-Bus interfaces of hetero-agent
.Sh SYNOPSIS
.Bl -tag -width Ds -compact
.It Pa /org/heteroagent/Agent1
the agent
.It Pa /org/heteroagent/Agent1/devices/ID
a device
.It Pa /org/heteroagent/Agent1/leases/ID
a lease
.It Pa /org/freedesktop/LogControl1
its log
.El
.Sh DESCRIPTION
.Xr hetero-agent 8
owns the name
.Li org.heteroagent.Agent1
on the system bus.
The agent implements
.Li org.freedesktop.DBus.ObjectManager
on its own object: the devices and leases are the objects that it manages.
Ids are escaped in paths as
.Xr sd_bus_path_encode 3
does.
All objects have
.Li org.freedesktop.DBus.Properties , Introspectable
and
.Li Peer .
The log level is set by
.Xr org.freedesktop.LogControl1 5 .
.Pp
The interface files are in
.Pa /usr/share/dbus-1/interfaces .
""".lstrip()

_TAIL: Final = r"""
.Sh SEE ALSO
.Xr busctl 1 ,
.Xr heteroctl 1 ,
.Xr hetero-agent.conf 5 ,
.Xr hetero-agent 8
""".lstrip()


def render(interfaces: Iterable[ET.Element], date: str) -> str:
    """Return the manual of <interface> elements."""
    lines = [f".Dd {date}", *_HEAD.splitlines()]
    for interface in interfaces:
        lines += _interface(interface)
    lines += [".Sh ERRORS", "Their names begin with", ".Li org.heteroagent.Agent1.Error ."]
    lines += [".Bl -tag -width Ds"]
    for name, text in ERRORS.items():
        lines += [f".It Sy {name}", *_sentences(text)]
    lines += [".El", *_TAIL.splitlines()]
    return "\n".join(lines) + "\n"


def _interface(interface: ET.Element) -> Iterator[str]:
    yield f".Sh INTERFACE {_literal(interface.attrib['name'])}"
    yield from _sentences(_annotation(interface, _DOC))
    for title, tag in (("Methods", "method"), ("Signals", "signal"), ("Properties", "property")):
        members = interface.findall(tag)
        if members:
            yield f".Ss {title}"
            yield ".Bl -tag -width Ds"
            for member in members:
                yield f".It Sy {_words(member.attrib['name'])} No {_words(_signature(member))}"
                yield from _sentences(_annotation(member, _DOC))
                if tag == "property":
                    yield from _sentences(_CHANGES[_annotation(member, _EMITS) or "true"])
            yield ".El"


def _signature(member: ET.Element) -> str:
    """What follows the name: ``(s request_id, u count) → (o lease)``; of a property, its type."""
    if member.tag == "property":
        return member.attrib["type"] + (" (writable)" if member.attrib["access"] == "readwrite" else "")
    takes = [one for one in member.findall("arg") if one.get("direction") != "out"]
    gives = [one for one in member.findall("arg") if one.get("direction") == "out"]
    if member.tag == "signal":
        return _list(takes + gives)
    return _list(takes) + (f" → {_list(gives)}" if gives else "")


def _list(arguments: list[ET.Element]) -> str:
    return "(" + ", ".join(f"{one.attrib['type']} {one.attrib['name']}" for one in arguments) + ")"


def _annotation(element: ET.Element, name: str) -> str:
    return next((one.attrib["value"] for one in element.findall("annotation") if one.get("name") == name), "")


def _sentences(text: str) -> list[str]:
    """Text as mdoc wants it: each sentence begins a line."""
    return [_plain(one) for one in re.split(r"(?<=[.:;?]) {1,2}(?=[A-Z])", text) if one]


def _plain(text: str) -> str:
    """TEXT as it is: no word is hyphenated, since many are names, and none is taken for a macro."""
    return " ".join(f"\\%{_literal(word)}" for word in text.split())


def _words(text: str) -> str:
    """The same as arguments of a macro, none of them taken for a delimiter either."""
    return " ".join(f"\\&\\%{_literal(word)}" for word in text.split())


def _literal(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq").replace("→", "\\(->")


def load(paths: Iterable[Path]) -> list[ET.Element]:
    """Return the <interface> of each file, the Manager's first, then by name."""
    found = [element for path in paths for element in ET.parse(path).getroot().findall("interface")]  # noqa: S314
    return sorted(found, key=lambda one: (not one.attrib["name"].endswith(".Manager"), one.attrib["name"]))


def _date() -> str:
    moment = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    return time.strftime("%B ", moment) + time.strftime("%d, %Y", moment).lstrip("0")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render(load(map(Path, sys.argv[1:])), _date()))
