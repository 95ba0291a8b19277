"""The README says only what is so: its commands parse, its links and files exist."""

from __future__ import annotations

import re
import shlex

import pytest

from hetero_agent.cli.main import build_parser
from tests.support.process import ROOT

README = (ROOT / "README.md").read_text()

#: Every heteroctl command line in it, without prompt and remark.
COMMANDS = sorted(
    {match.group(1) for match in re.finditer(r"^[$#] (heteroctl(?: [^#\n]*[^#\s])?)", README, re.MULTILINE)}
)


def test_commands_were_found() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_heteroctl_command_parses(command: str) -> None:
    words = shlex.split(command)[1:]
    parsed = build_parser().parse_args(words)
    assert not words or hasattr(parsed, "handler")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^):]+)\)", README))))
def test_link_leads_to_a_file(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z]+)", README))))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?<![\w/])(?:dbus|systemd|\.ci)/[\w./-]+\w", README))))
def test_file_exists(path: str) -> None:
    assert (ROOT / path).exists()
