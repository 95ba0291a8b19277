"""docs/profiles.md shows profiles that work and names every key."""

from __future__ import annotations

import re
from pathlib import Path

from hetero_agent.discovery import profiles

TEXT = Path("docs/profiles.md").read_text()


def test_the_profiles_shown_are_good() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    found = [profiles.parse(block, f"block{number}.toml") for number, block in enumerate(blocks)]
    assert [profile.resource for profile in found if profile] == ["example.org/npu", "example.org/console"]


def test_every_attribute_and_fact_is_named() -> None:
    made_by_parts = {"part", "parts", "slot"}
    wanted = set(profiles.COMMON_ATTRIBUTES) - made_by_parts | {*profiles.PLACES, *profiles.FACTS}
    wanted |= {name for names in profiles.FACTS.values() for name in names}
    assert [name for name in sorted(wanted) if f"`{name}`" not in TEXT and f"`{{{name}}}`" not in TEXT] == []
