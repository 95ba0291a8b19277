"""The virtual devices and their files."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

import pytest

from hetero_agent.providers.report import decode_page
from hetero_agent.sim.commands import Add, SimError
from hetero_agent.sim.devices import Stock


def test_a_device_is_a_file_of_its_own(tmp_path: Path) -> None:
    stock = Stock(tmp_path / "new" / "devices", 0o640, "games")
    assert stock.add(Add("npu", "example.com/npu", 2, memory=1 << 30, numa=1, serial="S")) == ("npu-0", "npu-1")
    first, second = (tmp_path / "new" / "devices" / name for name in ("npu-0", "npu-1"))
    found = first.stat()
    assert stat.S_ISREG(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o640
    assert found.st_gid == grp.getgrnam("games").gr_gid
    assert found.st_size == 4096
    assert found.st_ino != second.stat().st_ino
    (entry, other) = decode_page(stock.entries(0.0))
    assert entry.nodes[0].path == str(first)
    assert entry.attributes == {"virtual": True, "memory-total": 1 << 30, "memory-free": 1 << 30}
    assert (entry.serial, entry.aliases, entry.numa_nodes) == ("S-0", ("S-0",), (1,))
    assert other.serial == "S-1"


def test_an_existing_file_is_kept_and_so_is_what_holds_it(tmp_path: Path) -> None:
    stock = Stock(tmp_path)
    stock.add(Add("a", "x.y/z"))
    inode = (tmp_path / "a").stat().st_ino
    Stock(tmp_path).add(Add("a", "x.y/z"))
    assert (tmp_path / "a").stat().st_ino == inode
    stock.remove(["a"])
    assert not (tmp_path / "a").exists()
    assert stock.devices == {}


def test_refusals_change_nothing(tmp_path: Path) -> None:
    stock = Stock(tmp_path)
    stock.add(Add("card", "x.y/z", serial="S"))
    stock.add(Add("part", "x.y/p", parent="card"))
    before = (dict(stock.devices), sorted(os.listdir(tmp_path)))
    for command, text in (
        (Add("card", "x.y/z"), "there is a device card already"),
        (Add("part", "x.y/z", parent="nobody"), "there is a device part already"),
        (Add("b", "x.y/z", parent="nobody"), "no device nobody that could be the parent"),
        (Add("b", "x.y/z", serial="S"), "serial S is another device's already"),
        (Add("b", "x.y/z", 4095), "that would be 4097 devices; the most is 4096"),
        (Add("b" * 62, "x.y/z", 2), "is longer than 63 characters"),
    ):
        with pytest.raises(SimError, match=text):
            stock.add(command)
    with pytest.raises(SimError, match="part is a part of card; remove it first"):
        stock.remove(["card"])
    with pytest.raises(SimError, match="there is no device ghost"):
        stock.remove(["ghost"])
    with pytest.raises(SimError, match="there is no device ghost"):
        stock.set_health("ghost", "healthy", "")
    assert (stock.devices, sorted(os.listdir(tmp_path))) == before


def test_what_lies_there_already_is_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    target.chmod(0o600)
    directory = tmp_path / "devices"
    stock = Stock(directory)
    (directory / "link").symlink_to(target)
    (directory / "hard").hardlink_to(target)
    os.mkfifo(directory / "fifo")
    (directory / "n-1").mkdir()
    for name in ("link", "hard", "fifo"):
        with pytest.raises(SimError, match=f"file {directory}/{name}: "):
            stock.add(Add(name, "x.y/z"))
    # half an add is undone
    with pytest.raises(SimError, match="Is a directory"):
        stock.add(Add("n", "x.y/z", 2))
    assert not (directory / "n-0").exists()
    assert target.read_text() == "precious"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert stock.devices == {}


def test_health_and_hangs(tmp_path: Path) -> None:
    stock = Stock(tmp_path)
    stock.add(Add("a", "x.y/z"))

    def told(now: float) -> tuple[str, str]:
        (entry,) = stock.entries(now)
        return entry["health"], entry["reason"]

    assert told(1.0) == ("healthy", "")
    stock.set_health("a", "unhealthy", "hot")
    assert told(1.0) == ("unhealthy", "hot")
    stock.freeze("a", 5.0, 1.0)
    stock.set_health("a", "healthy", "")
    assert told(4.9) == ("unhealthy", "hot")
    assert stock.devices["a"].listed(4.9)["hung"] is True
    assert stock.devices["a"].listed(4.9)["health"] == "healthy"
    assert told(5.0) == ("healthy", "")
