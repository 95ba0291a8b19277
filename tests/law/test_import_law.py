"""Who may import what (docs/architecture.md): the law that keeps the core pure and the edges apart."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import ROOT

PACKAGE = ROOT / "hetero_agent"

#: Modules that hold only words: every part may use them.
WORDS = {"names", "text"}

#: Part -> the other parts of hetero_agent that it may import.  A part is a package or a module
#: directly in hetero_agent; importing itself is always allowed.
EDGE = WORDS | {"config", "core"}
#: The edges with something to read that can hang for ever do it in worker processes.
WORKING = EDGE | {"workers"}
MAY_IMPORT: dict[str, set[str]] = {
    "names": set(),
    "text": set(),
    "cdispec": {"names"},
    "config": {"text", "names"},
    "faultpoints": set(),
    "core": {"text"},
    "discovery": EDGE,
    "profiles": set(),
    "providers": EDGE,
    "health": WORKING,
    "holders": WORKING,
    "access": EDGE | {"cdispec"},
    "store": EDGE,
    "audit": EDGE,
    "bus": EDGE,
    "interfaces": set(),
    "workers": set(),
    "supervision": EDGE,
    "access_jobs": WORDS | {"core"},
    "engine": WORDS | {"core", "faultpoints", "access_jobs"},
    "client": WORDS | {"core"},
    "cli": WORDS | {"client", "cdispec"},
    "sim": WORDS | {"client"},
}

#: The modules that wire a program, the agent and its privileged helper: they may import every part of
#: the agent, and none of its clients.
WIRING = {"daemon", "access_helper"}
CLIENTS = {"client", "cli", "sim", "bridges"}

#: Library -> the parts that may import it.
LIBRARIES: dict[str, set[str]] = {
    "dbus_next": {"bus", "client"},
    "posix1e": {"access"},
    "pyudev": {"discovery"},
    "pyroute2": {"access"},
    "systemd": {"health"},
    "sdnotify": {"supervision"},
}

#: Parts that get time and chance from their caller and do no I/O: they may not even import the means.
PURE = {"core", "names", "text", "cdispec"}
NOT_IN_PURE = {
    "asyncio", "concurrent", "ctypes", "io", "logging", "multiprocessing", "os", "pathlib", "random",
    "secrets", "select", "selectors", "shutil", "signal", "socket", "sqlite3", "subprocess", "sys",
    "tempfile", "threading", "time", "uuid",
}  # fmt: skip


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level
            elif node.module == "hetero_agent":
                for alias in node.names:
                    yield node.lineno, f"hetero_agent.{alias.name}"
            else:
                yield node.lineno, node.module or ""


def breaches(part: str, source: str) -> list[str]:
    """Return what in SOURCE, a module of PART, breaks the law."""
    found = []
    for line, name in _imports(ast.parse(source)):
        top, _, rest = name.partition(".")
        if name.startswith("."):
            found.append(f"line {line}: relative import; write the whole name")
        elif top == "hetero_agent":
            other = rest.partition(".")[0]
            if other in (part, "__version__", ""):
                continue
            allowed = other not in CLIENTS if part in WIRING else other in MAY_IMPORT[part]
            if not allowed:
                found.append(f"line {line}: {part} may not import hetero_agent.{other}")
        elif top in sys.stdlib_module_names:
            if part in PURE and top in NOT_IN_PURE:
                found.append(f"line {line}: {part} may not import {top}")
        elif part not in LIBRARIES.get(top, set()):
            found.append(f"line {line}: {part} may not import {top}")
    return found


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _part(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_keeps_the_law(path: Path) -> None:
    part = _part(path)
    assert part in MAY_IMPORT or part in (*WIRING, "__init__"), f"{part} has no place in the law"
    if part == "__init__":
        assert list(_imports(ast.parse(path.read_text()))) == []
    else:
        assert breaches(part, path.read_text()) == []


@pytest.mark.parametrize(
    ("part", "source", "breach"),
    [
        ("core", "import time", "core may not import time"),
        ("core", "def f():\n    from os import path", "core may not import os"),
        ("text", "import os", "text may not import os"),
        ("core", "from hetero_agent.config import Config", "core may not import hetero_agent.config"),
        ("core", "import dbus_next", "core may not import dbus_next"),
        ("holders", "from hetero_agent.store import ledger", "holders may not import hetero_agent.store"),
        ("store", "from hetero_agent import bus", "store may not import hetero_agent.bus"),
        ("engine", "from hetero_agent.config import Config", "engine may not import hetero_agent.config"),
        ("cli", "from hetero_agent.bus.contract import load", "cli may not import hetero_agent.bus"),
        ("sim", "import dbus_next.aio", "sim may not import dbus_next"),
        ("providers", "import pyudev", "providers may not import pyudev"),
        ("daemon", "from hetero_agent.client import Agent", "daemon may not import hetero_agent.client"),
        ("bus", "from . import contract", "relative import; write the whole name"),
        ("discovery", "import pyroute2", "discovery may not import pyroute2"),
        ("workers", "from hetero_agent.text import printable", "workers may not import hetero_agent.text"),
        ("providers", "from hetero_agent.workers import host", "providers may not import hetero_agent.workers"),
        ("client", "import yaml", "client may not import yaml"),
    ],
)
def test_breach_is_found(part: str, source: str, breach: str) -> None:
    assert [text.partition(": ")[2] for text in breaches(part, source)] == [breach]


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "import enum\nfrom hetero_agent.core.model import Device"),
        ("discovery", "import pyudev\nimport os\nfrom hetero_agent import names, text"),
        ("bus", "from dbus_next.aio import MessageBus\nfrom hetero_agent.core import events"),
        (
            "daemon",
            "import hetero_agent\nfrom hetero_agent import engine\nfrom hetero_agent.bus import service",
        ),
        ("cli", "from hetero_agent import __version__\nfrom hetero_agent.client import Agent"),
    ],
)
def test_lawful_import_passes(part: str, source: str) -> None:
    assert breaches(part, source) == []
