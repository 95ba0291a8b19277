"""hetero-agent.conf, its manual and config.py have the same tables, keys, defaults, choices and ranges."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from hetero_agent import config
from tests.support.process import ROOT

FILE = (ROOT / "systemd/hetero-agent.conf").read_text()
MANUAL = (ROOT / "docs/hetero-agent.conf.5").read_text()

#: How the table of one provider is written down; any other name stands for a real provider.
PROVIDER = "providers.NAME"


def defaults() -> dict[str, dict[str, Any]]:
    """table -> key -> default, as config.py has them."""
    found = {}
    for item in fields(config.Config):
        name = item.name.replace("_", "-")
        kind = config.ProviderTable if name == "providers" else get_type_hints(config.Config)[item.name]
        table = {one.name.replace("_", "-"): getattr(kind(), one.name) for one in fields(kind)}
        found[PROVIDER if name == "providers" else name] = table
    return found


def uncommented() -> str:
    """The file with every setting in force that is commented out, and without the remarks."""
    lines = []
    for line in FILE.splitlines():
        if re.match(r"#(\[|[a-z-]+ = |    \"|\])", line):
            lines.append(line[1:])
        elif not line.startswith("#"):
            lines.append(line)
    return "\n".join(lines)


def test_the_installed_file_sets_nothing() -> None:
    assert config.parse(FILE) == config.Config()


def test_the_file_has_every_key_with_its_default() -> None:
    tables = tomllib.loads(uncommented())
    provider = tables.pop("providers")["NAME"]
    written = {**tables, PROVIDER: provider}
    listed = {
        table: {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}
        for table, keys in defaults().items()
    }
    assert written == listed
    for table, keys in written.items():
        assert list(keys) == list(listed[table]), f"[{table}] in the order of config.py"
        for key, value in keys.items():
            assert type(value) is type(listed[table][key]), f"[{table}] {key}"


def test_the_file_as_uncommented_is_taken() -> None:
    taken = config.parse(uncommented())
    assert taken.providers == {
        "NAME": config.ProviderTable(),
        "sim": config.ProviderTable(directory="/run/hetero-agent-sim/devices"),
    }
    assert taken.reclaim == config.ReclaimTable()


def manual() -> dict[str, dict[str, tuple[str, str]]]:
    """table -> key -> default as TOML, text; as the manual has them."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    section = MANUAL.partition(".Sh TABLES\n")[2].partition("\n.Sh ")[0]
    for part in section.split(".Ss ")[1:]:
        head, _, body = part.partition("\n")
        keys = found[head.strip("[]")] = {}
        for item in body.split(".It ")[1:]:
            first, _, text = item.partition("\n")
            match = re.fullmatch(r"Cm (\S+) No = Li (.*)", first)
            assert match, first
            default = match.group(2).replace("\\(dq", '"').replace(" ,", ",")
            keys[match.group(1)] = default, text
    return found


def test_the_manual_has_every_key_with_its_default() -> None:
    written = {
        table: {key: tomllib.loads(f"value = {default}")["value"] for key, (default, _) in keys.items()}
        for table, keys in manual().items()
    }
    assert written == {
        table: {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}
        for table, keys in defaults().items()
    }


@pytest.mark.parametrize("table", defaults())
def test_the_manual_has_the_ranges_and_choices(table: str) -> None:
    place = "providers" if table == PROVIDER else table
    for key, (_, text) in manual()[table].items():
        match = re.search(r"from ([\d.]+) to ([\d.]*\d)", text)
        given = (float(match.group(1)), float(match.group(2))) if match else None
        assert given == config._RANGES.get((place, key)), f"[{table}] {key}"
        named = tuple(re.findall(r"^\.Cm (\S+)", text, re.MULTILINE))
        assert set(named) == set(config._CHOICES.get((place, key), ())), f"[{table}] {key}"


@pytest.mark.parametrize("choices", config._CHOICES.items(), ids=str)
def test_the_file_has_the_choices(choices: tuple[tuple[str, str], tuple[str, ...]]) -> None:
    (_, key), words = choices
    lines = FILE.partition(f"\n#{key} = ")[0].splitlines()
    above = []
    while lines and lines[-1].startswith("# "):
        above.append(lines.pop())
    remark = " ".join(above)
    assert [word for word in words if not re.search(rf"\b{word}\b", remark)] == []


@pytest.mark.parametrize("path", ["", "/run/x", "/run/x/", "/run/.x/..y/z...", "/run/a b"])
def test_a_provider_directory_is_a_path(path: str) -> None:
    taken = config.parse(f"[providers.x]\ndirectory = {json.dumps(path)}\n")
    assert taken.providers["x"].directory == path


@pytest.mark.parametrize(
    "path",
    ["/", "//", "run/x", "/tmp/../etc", "/tmp/..", "/tmp/.", "/./tmp", "/run//x", "/run/x//", "/a\0b", "../x"],
)
def test_a_provider_directory_leads_nowhere_else(path: str) -> None:
    with pytest.raises(config.ConfigError, match=r"\[x\] directory: expected an absolute path without \. and"):
        config.parse(f"[providers.x]\ndirectory = {json.dumps(path)}\n")


@pytest.mark.parametrize("text", ["[", f"failures = {'9' * 5000}", f"failures = {'[' * 5000}"])
def test_what_can_not_be_read_as_toml_is_told_as_that(text: str) -> None:
    with pytest.raises(config.ConfigError, match=r"^here: not TOML: "):
        config.parse(f"[health]\n{text}", "here")
