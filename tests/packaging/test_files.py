"""debian/ names every file of dbus/ and systemd/, and agrees with the rest of the tree."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import hetero_agent
from tests.support.process import ROOT

DEBIAN = ROOT / "debian"

#: Interfaces that others define; their files belong to others' packages.
FOREIGN = "dbus/org.freedesktop."

#: What a rule of ours may be about (dbus-daemon(1)).
RULE = {"own", "send_destination", "send_type", "send_interface", "send_member", "send_broadcast"}

#: Where what belongs.  debhelper itself knows the places of the files in debian/.
PLACES = {
    ".xml": "usr/share/dbus-1/interfaces",
    ".conf": "usr/share/dbus-1/system.d",
    ".policy": "usr/share/polkit-1/actions",
    ".rules": "usr/share/polkit-1/rules.d",
    ".catalog": "usr/lib/systemd/catalog",
    ".service": "lib/systemd/system",
    ".socket": "lib/systemd/system",
    ".target": "lib/systemd/system",
}


def lines(name: str) -> list[str]:
    return [line for line in (DEBIAN / name).read_text().splitlines() if line and not line.startswith("#")]


def installed() -> dict[str, str]:
    """Source -> directory, as debian/hetero-agent.install has them."""
    pairs = [line.split(maxsplit=1) for line in lines("hetero-agent.install")]
    return dict(pairs)


def field(name: str, paragraph: int) -> str:
    """A field of debian/control on one line; 0 is the source package, 1 the binary one."""
    text = (DEBIAN / "control").read_text().split("\n\n")[paragraph]
    match = re.search(rf"^{name}:((?:.*\n)(?: .*\n?)*)", text + "\n", re.MULTILINE)
    assert match, name
    return " ".join(match.group(1).split())


def depends(name: str, paragraph: int) -> list[str]:
    """The packages of a dependency field, the first of alternatives, without versions."""
    parts = (part.split("|")[0].split("(")[0].strip() for part in field(name, paragraph).split(","))
    return [part for part in parts if part]


@pytest.mark.parametrize("top", ["dbus", "systemd"])
def test_every_file_is_installed_in_its_place(top: str) -> None:
    linked = {path.resolve() for path in DEBIAN.iterdir() if path.is_symlink()}
    places = installed()
    for path in sorted((ROOT / top).iterdir()):
        source = str(path.relative_to(ROOT))
        if source.startswith(FOREIGN):
            assert source not in places
        elif path.suffix in (".sysusers", ".tmpfiles"):
            assert path in linked, f"{source}: debian/hetero-agent{path.suffix} should be a link to it"
        elif source == "systemd/hetero-agent.conf":
            assert places[source] == "etc/hetero-agent", source
        else:
            assert places[source] == PLACES[path.suffix], source


def test_what_is_installed_exists() -> None:
    sources = [*installed(), *lines("hetero-agent.manpages")]
    made = {source for source in sources if source.startswith("debian/generated/")}
    assert [source for source in sources if source not in made and not list(ROOT.glob(source))] == []
    rules = (DEBIAN / "rules").read_text()
    for source in made:
        assert f"$(GENERATED)/{Path(source).name}\n" in rules, source


#: Where the package has its documents.
DOCUMENTS = "usr/share/doc/hetero-agent"


def documents() -> dict[str, Path]:
    """What lies below DOCUMENTS when the package is installed -> its source."""
    globs = dict.fromkeys(lines("hetero-agent.docs"), "")
    globs |= dict.fromkeys(lines("hetero-agent.examples"), "examples")
    for source, place in installed().items():
        if place.startswith(DOCUMENTS):
            globs[source] = place.removeprefix(DOCUMENTS).strip("/")
    found = {}
    for pattern, place in globs.items():
        for top in ROOT.glob(pattern):
            for path in [top] if top.is_file() else top.rglob("*"):
                found[str(Path(place) / path.relative_to(top.parent))] = path
    return found


def test_links_between_documents_hold_once_installed() -> None:
    there = documents()
    checked = 0
    for name, source in there.items():
        if source.suffix != ".md":
            continue
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", source.read_text()):
            target = os.path.normpath(Path(name).parent / link)
            if target == "dbus":
                continue  # the words beside this link say where the package has them
            assert target in there or any(other.startswith(f"{target}/") for other in there), (name, link)
            checked += 1
    assert checked >= 40


def test_documents_that_manuals_and_units_name_are_installed() -> None:
    there = documents()
    named = 0
    for source in [*(ROOT / "docs").glob("*.[1-8]"), *(ROOT / "systemd").iterdir()]:
        text = source.read_text().replace("\\-", "-")
        for name in re.findall(rf"/{DOCUMENTS}/([\w./-]*\w)", text):
            assert name in there, (source, name)
            named += 1
    assert named >= 5


def test_every_manual_is_installed() -> None:
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.[1-8]")}
    given = {source for source in lines("hetero-agent.manpages") if source.startswith("docs/")}
    assert given == written
    programs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for program in programs:
        assert any(Path(source).stem == program for source in given), f"{program} has no manual"


def test_versions_agree() -> None:
    first = (DEBIAN / "changelog").read_text().splitlines()[0]
    match = re.match(r"hetero-agent \((\S+)\) ", first)
    assert match
    assert match.group(1) == hetero_agent.__version__


def test_the_package_depends_on_every_library() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[=<>]", one)[0] for one in wanted}
    packages = {"systemd-python": "python3-systemd"}
    assert {packages.get(name, f"python3-{name}") for name in names} <= set(depends("Depends", 1))
    assert "python3-dbus-next (>= 0.2.3), python3-dbus-next (<< 0.2.4~)" in field("Depends", 1)


def test_what_it_is_built_with_is_set_up() -> None:
    text = (ROOT / ".ci/packages-deb").read_text()
    listed = {line.split()[0] for line in text.splitlines() if line[:1].isalpha()}
    needed = depends("Build-Depends", 0)
    provided = {
        "debhelper-compat": "debhelper",
        "dh-sequence-installsysusers": "debhelper",
        "dh-sequence-python3": "dh-python",
    }
    assert {provided.get(name, name) for name in needed} <= listed


@pytest.mark.parametrize("path", sorted((ROOT / "dbus").iterdir()), ids=lambda path: path.name)
def test_xml_is_well_formed(path: Path) -> None:
    done = subprocess.run(
        ["xmllint", "--noout", "--nonet", "--nowarning", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_bus_policy_is_one() -> None:
    """By the rules of busconfig.dtd that a policy file can break; the tests of the bus load it as well."""
    text = (ROOT / "dbus/org.heteroagent.Agent1.conf").read_text()
    assert text.startswith('<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"')
    root = ET.fromstring(text)
    assert root.tag == "busconfig"
    assert {one.tag for one in root} == {"policy"}
    for policy in root:
        assert len({"user", "group", "context", "at_console"} & set(policy.attrib)) == 1
        assert {one.tag for one in policy} <= {"allow", "deny"}
        for rule in policy:
            assert set(rule.attrib) <= RULE


@pytest.mark.parametrize(
    "name", ["rules", "hetero-agent.postinst", "hetero-agent.prerm", "hetero-agent.postrm"]
)
def test_scripts_are_well_formed(name: str) -> None:
    if name == "rules":
        command = ["make", "--dry-run", "--file", str(DEBIAN / "rules"), "execute_after_dh_auto_build"]
        assert (DEBIAN / name).stat().st_mode & 0o111
    else:
        command = ["sh", "-n", str(DEBIAN / name)]
        text = (DEBIAN / name).read_text()
        assert "\nset -e\n" in text
        assert "\n#DEBHELPER#\n" in text
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_python_package_is_packaged() -> None:
    """setuptools is told each; one that is forgotten is missing only once it is installed."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "hetero_agent").rglob("__init__.py")
    }
    assert set(tool["packages"]) - set(tool["package-dir"]) == found
    data = {path.suffix for path in (ROOT / "hetero_agent").rglob("*.*") if "__pycache__" not in path.parts}
    assert data == {".py", ".toml"}
