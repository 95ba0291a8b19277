"""Who carries it out: the helper, this process, or nobody."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hetero_agent import names
from hetero_agent.access.choice import choose
from hetero_agent.access.direct import Direct
from hetero_agent.access.places import specifications
from hetero_agent.access.remote import Remote
from hetero_agent.config import AccessTable
from tests.access.granting import grant

SYSTEM = Path(names.RUNTIME_DIR)


def chosen(table: AccessTable, runtime: Path) -> str:
    one = choose(table, runtime, "unix:path=/nowhere", 10)
    return "remote" if isinstance(one, Remote) else "direct" if isinstance(one, Direct) else repr(one)


@pytest.mark.parametrize(
    ("helper", "uid", "there", "system", "elsewhere"),
    [
        ("auto", 990, True, "remote", "direct"),
        ("auto", 990, False, "remote", "direct"),
        ("auto", 0, True, "remote", "direct"),
        ("auto", 0, False, "direct", "direct"),
        ("none", 990, True, "remote", "direct"),
        ("none", 0, True, "direct", "direct"),
        ("/run/other", 990, False, "remote", "remote"),
        ("/run/other", 0, True, "remote", "remote"),
    ],
)
def test_who(
    helper: str,
    uid: int,
    there: bool,
    system: str,
    elsewhere: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    socket = tmp_path / "socket"
    monkeypatch.setattr(names, "ACCESS_SOCKET", str(socket))
    if there:
        socket.touch()
    table = AccessTable(helper=helper)
    assert chosen(table, SYSTEM) == system
    assert chosen(table, tmp_path) == elsewhere


@pytest.mark.parametrize("table", [AccessTable(helper="none"), AccessTable(acl=False, cdi_directory="")])
def test_nobody_who_is_not_wanted_is_missed(
    table: AccessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 990)
    monkeypatch.setattr(names, "ACCESS_SOCKET", str(tmp_path / "socket"))
    one = choose(table, SYSTEM, "unix:path=/nowhere", 10)
    assert one.problem == ""
    asyncio.run(one.prepare(grant()))
    assert not (tmp_path / "grants").exists()
    missed = choose(AccessTable(), SYSTEM, "unix:path=/nowhere", 10)
    assert "systemctl enable --now" in missed.problem


def test_specifications(tmp_path: Path) -> None:
    assert specifications(AccessTable(), SYSTEM) == Path("/run/cdi")
    assert specifications(AccessTable(), tmp_path) == tmp_path / "cdi"
    assert specifications(AccessTable(cdi_directory=""), SYSTEM) is None
    assert specifications(AccessTable(cdi_directory="/etc/cdi"), tmp_path) == Path("/etc/cdi")
