"""Every kind of audit record has a message id and an entry in the catalog, and nothing else has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.audit.fields import fields_of
from hetero_agent.core.model import AuditKind
from tests.audit.samples import audit
from tests.support.process import ROOT

CATALOG = ROOT / "systemd" / "hetero-agent.catalog"


def entries() -> dict[str, tuple[dict[str, str], str]]:
    """Message id -> header and body of its entry."""
    found = {}
    for block in re.split(r"^-- ", CATALOG.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        identifier, _, rest = block.partition("\n")
        head, _, body = rest.partition("\n\n")
        assert identifier not in found
        found[identifier] = (dict(line.split(": ", 1) for line in head.splitlines()), body)
    return found


def test_every_kind_has_an_id_of_its_own() -> None:
    assert set(MESSAGE_IDS) == set(AuditKind)
    assert len(set(MESSAGE_IDS.values())) == len(AuditKind)
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in MESSAGE_IDS.values())


def test_the_catalog_has_the_same_ids() -> None:
    assert set(entries()) == set(MESSAGE_IDS.values())


def test_every_entry_says_what_and_what_to_do() -> None:
    for identifier, (head, body) in entries().items():
        assert head["Defined-By"] == "hetero-agent", identifier
        assert head["Subject"], identifier
        paragraphs = [one for one in body.strip().split("\n\n") if one]
        assert len(paragraphs) >= 1, identifier
        assert all(len(line) <= 90 for line in body.splitlines()), identifier


def test_the_catalog_names_only_fields_that_every_record_has() -> None:
    always = set(fields_of(audit(1)))
    named = set(re.findall(r"@([A-Z_]+)@", CATALOG.read_text(encoding="utf-8")))
    assert named <= always
    assert {"HETERO_DEVICE", "HETERO_LEASE", "HETERO_REASON"} <= named


def test_systemd_takes_the_catalog(tmp_path: Path) -> None:
    directory = tmp_path / "usr/lib/systemd/catalog"
    directory.mkdir(parents=True)
    (directory / "hetero-agent.catalog").write_bytes(CATALOG.read_bytes())
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    done = subprocess.run(
        ["journalctl", "--update-catalog", f"--root={tmp_path}"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    listed = subprocess.run(
        ["journalctl", "--list-catalog", f"--root={tmp_path}"], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[0] for line in listed.splitlines()} == set(MESSAGE_IDS.values())
