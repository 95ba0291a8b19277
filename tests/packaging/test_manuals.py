"""The manuals: every option of the programs, every member of the interfaces, no complaint of groff."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from docs import manual
from hetero_agent.core.effects import ErrorKind
from tests.support.process import PYTHON, ROOT

INTERFACES = manual.load(sorted((ROOT / "dbus").glob("org.heteroagent.Agent1.*.xml")))


def plain(path: Path) -> str:
    """The manual as it is read, and groff must have nothing to say."""
    command = ["groff", "-k", "-mandoc", "-Tutf8", "-wall", "-P-c", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    text = re.sub(r".\x08", "", done.stdout).replace("\u2019", "'")
    assert max(map(len, text.splitlines())) <= 80
    return text


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "docs").glob("*.[58]"))])
def test_a_written_manual_has_no_complaints(name: str) -> None:
    text = plain(ROOT / "docs" / name)
    for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO"):
        assert f"\n{section}\n" in text


@pytest.mark.parametrize(("program", "module"), [("hetero-agent", "daemon"), ("hetero-agent-sim", "sim.main")])
def test_options_both_ways(program: str, module: str) -> None:
    command = [PYTHON, "-m", f"hetero_agent.{module}", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    options = set(re.findall(r"^  (--[a-z-]+|-h)\b", shown.replace("-h, --help", "-h\n  --help"), re.MULTILINE))
    assert {"--bus", "--help"} <= options
    source = (ROOT / f"docs/{program}.8").read_text().replace("\\-", "-")
    section = source.partition(".Sh OPTIONS\n")[2].partition("\n.Sh ")[0]
    items = [line for line in section.splitlines() if line.startswith(".It Fl")]
    assert {f"-{word}" for line in items for word in re.findall(r"Fl (\S+)", line)} == options


def test_see_also_leads_to_manuals() -> None:
    ours = {path.name for path in (ROOT / "docs").glob("*.[1-8]")} | {"org.heteroagent.Agent1.5"}
    for path in (ROOT / "docs").glob("*.[1-8]"):
        for name, section in re.findall(r"^\.Xr (\S*hetero\S*) (\d)", path.read_text(), re.MULTILINE):
            assert f"{name}.{section}" in ours, f"{path.name} names {name}({section})"


# -- org.heteroagent.Agent1(5) --------------------------------------------------------------------
def test_the_bus_manual_has_every_member(tmp_path: Path) -> None:
    assert [one.attrib["name"].rpartition(".")[2] for one in INTERFACES] == [
        "Manager",
        "Device",
        "Lease",
        "Providers",
    ]
    path = tmp_path / "manual.5"
    path.write_text(manual.render(INTERFACES, "November 29, 2026"))
    text = plain(path)
    words = " ".join(text.split())
    for interface in INTERFACES:
        section = text.partition(f"\nINTERFACE {interface.attrib['name']}\n")[2].partition("\nINTERFACE ")[0]
        flat = " ".join(section.split())
        members = [one for one in interface if one.tag in ("method", "signal", "property")]
        assert members
        for member in members:
            assert f"\n     {member.attrib['name']}" in section
            assert f"{member.attrib['name']} {manual._signature(member)}" in flat
        for note in interface.iter("annotation"):
            if note.attrib["name"] == manual._DOC:
                assert " ".join(note.attrib["value"].split()) in words


def test_signatures_as_they_are_read() -> None:
    (manager,) = [one for one in INTERFACES if one.attrib["name"].endswith(".Manager")]
    members = {one.attrib["name"]: manual._signature(one) for one in manager if "name" in one.attrib}
    assert members["Release"] == "(s request_id, o lease) → (b changed)"
    assert members["LeaseEnded"] == "(o lease, s result)"
    assert members["Ready"] == "b"


def test_foreign_signs_in_texts_are_read_as_they_are(tmp_path: Path) -> None:
    odd = '.Sh not a macro.  \'nor this - \\fB "quoted"'
    element = ET.Element("interface", name="a.b")
    ET.SubElement(element, "annotation", name=manual._DOC, value=odd)
    prop = ET.SubElement(element, "property", name="Fl", type="s", access="readwrite")
    ET.SubElement(prop, "annotation", name=manual._DOC, value=".Pp")
    path = tmp_path / "manual.5"
    path.write_text(manual.render([element], "November 29, 2026"))
    text = " ".join(plain(path).split())
    assert " ".join(odd.split()) in text
    assert "Fl s (writable) .Pp" in text


def test_every_error_is_explained() -> None:
    assert set(manual.ERRORS) == {str(kind) for kind in ErrorKind}
