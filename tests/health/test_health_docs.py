"""docs/health.md and the example units say what is so."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hetero_agent.config import HealthTable
from hetero_agent.core.symptoms import Probe
from hetero_agent.core.verdict import Fault, Rules
from hetero_agent.discovery import profiles
from hetero_agent.health.alerts import DIRECTORY
from tests.support.process import ROOT

TEXT = (ROOT / "docs/health.md").read_text()


def test_every_probe_and_class_is_explained() -> None:
    for word in (*Probe, *Fault):
        assert f"| `{word}` |" in TEXT, word


def test_the_numbers_are_the_defaults() -> None:
    table, rules = HealthTable(), Rules()
    assert f"`interval` ({table.interval:g} s)" in TEXT
    assert f"`confirm` ({table.confirm:g} s)" in TEXT
    assert f"`deadline` ({table.deadline:g} s)" in TEXT
    assert f"`failures` ({table.failures})" in TEXT
    assert f"`recoveries` ({table.recoveries})" in TEXT
    assert (rules.flaps, rules.window, rules.patience) == (3, 600_000_000, 48)
    assert "up to 48" in TEXT


def test_the_xids_are_those_of_the_profile() -> None:
    profile = profiles.load(None).named("nvidia")
    of = {
        rule.fault: set(rule.codes)
        for rule in profile.symptoms.messages
        if "Xid" in rule.pattern and rule.codes
    }
    for fault, codes in of.items():
        [row] = [line for line in TEXT.splitlines() if line.startswith(f"| `{fault}` |")]
        shown = re.search(r"Xid ([\d, ]+\d)", row)
        assert shown is not None
        assert {int(one) for one in shown.group(1).split(",")} <= codes


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_the_example_units_are_good(tmp_path: Path) -> None:
    for name in ("hetero-agent-alert.path", "hetero-agent-alert.service"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "--man=no", "verify", str(tmp_path / "hetero-agent-alert.path")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert f"PathChanged=/run/hetero-agent/{DIRECTORY}\n" in (tmp_path / "hetero-agent-alert.path").read_text()
