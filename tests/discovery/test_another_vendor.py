"""docs/manifests.md: a vendor added in one file, and the resources that it lists."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from hetero_agent.access import door as module
from hetero_agent.access.door import Door
from hetero_agent.discovery import profiles
from tests.discovery.observe import enumerate_once
from tests.discovery.test_golden import lease
from tests.support.umock import Bed, bed, in_umockdev

TEXT = Path("docs/manifests.md").read_text()
[PROFILE] = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)


def host(mock: Bed) -> None:
    for number, address in enumerate(("0000:21:00.0", "0000:22:00.0")):
        path = mock.pci(address, "1e52:401e", "120000", "tenstorrent")
        node = mock.child(
            path, "tenstorrent", f"tenstorrent!{number}", f"tenstorrent/{number}", f"241:{number}"
        )
        mock.file(f"{node}/tt_card_type", "n150\n")


@in_umockdev()
def test_a_vendor_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hugepages = ("/dev/hugepages-1G", "/dev/hugepages-1G", "rw")
    monkeypatch.setattr(module, "_existing", lambda mount: [mount] if mount == hugepages else [])
    with bed() as mock:
        host(mock)
        before = enumerate_once()
        (tmp_path / "tenstorrent.toml").write_text(PROFILE)
        records = enumerate_once(tmp_path)
        second = records["0000:22:00.0"]
        got = asyncio.run(Door().prepare(lease([second]), [second]))
    assert {record.resource for record in before.values()} == {"heteroagent.org/accelerator"}
    # the generic profile knows no such nodes
    assert {str(record.obstacle) for record in before.values()} == {"no-node"}
    assert list(records) == ["0000:21:00.0", "0000:22:00.0"]
    assert (second.resource, second.vendor) == ("tenstorrent.com/card", "Tenstorrent")
    assert second.attributes["board"] == "n150"
    assert got["nodes"] == [["0000:22:00.0", "/dev/tenstorrent/1", "own", "char", 241, 1]]
    assert got["env"]["TT_VISIBLE_DEVICES"] == "1"
    assert got["env-filtered"] == {"TT_VISIBLE_DEVICES": "0"}
    assert got["mounts"] == [list(hugepages)]


def test_the_document_has_every_shipped_resource_and_variable() -> None:
    table = TEXT.partition("## Vendors\n")[2].partition("\n## ")[0]
    for profile in profiles.load(None).profiles:
        assert f"`{profile.resource}`" in table, profile.origin
        for name in profile.env:
            assert f"`{name}" in table, f"{profile.origin}: {name}"
