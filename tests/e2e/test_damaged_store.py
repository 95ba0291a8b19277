"""The agent starts over damaged, foreign and too new files, as the design says of each."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero_agent import names
from hetero_agent.store.database import checksum
from tests.support.agent import AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until


class Host:
    """An agent with a lease on npu-0 that was ended by SIGTERM, and its files."""

    def __init__(self, bus: PrivateBus) -> None:
        self.bus = bus
        self.agent = AgentProcess(bus).start()
        self.vendor = Vendor(self.agent)
        self.vendor.add("npu-0", "npu-1")
        self.vendor.wait_idle()
        self.client = Client(bus)
        options = {"confirm": ("b", True)}
        self.lease = self.allocate("a", options)
        assert self.agent.terminate() == 0
        self.ledger = self.agent.runtime / names.LEDGER_FILE
        self.lasting = self.agent.state / names.LASTING_FILE

    def allocate(self, request: str, options: dict[str, tuple[str, object]] | None = None) -> str:
        given = {key: V(*value) for key, value in (options or {}).items()}
        reply = self.client.reply(
            names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", request, RESOURCE, 1, given
        )
        return str(reply.value[0])

    def start(self) -> None:
        self.agent.start()
        self.vendor.register()
        self.vendor.report()

    def leases(self) -> list[str]:
        objects = self.client.call(names.ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
        return [path for path, interfaces in objects.items() if names.LEASE in interfaces]

    def audited(self, kind: str, text: str) -> None:
        wait_until(
            lambda: any(
                f'"HETERO_KIND":"{kind}"' in line and text in line for line in self.agent.log.splitlines()
            ),
            what=f"{kind} {text} in the audit trail",
        )

    def close(self) -> None:
        self.client.close()
        self.vendor.close()
        self.agent.close()


@pytest.fixture
def host(bus: PrivateBus) -> Iterator[Host]:
    made = Host(bus)
    yield made
    made.close()


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xa5" * 8192)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_garbage, _truncate, _empty], ids=lambda one: one.__name__.strip("_"))
@pytest.mark.parametrize("which", ["ledger", "lasting"])
def test_damaged_file_is_set_aside_and_the_agent_starts(
    host: Host, which: str, damage: Callable[[Path], None]
) -> None:
    path: Path = getattr(host, which)
    damage(path)
    host.start()
    host.client.wait_for_device("npu-1", State="idle")
    aside = [one.name for one in path.parent.iterdir() if one.name.startswith(f"{path.name}.corrupt-")]
    assert len(aside) == 1
    host.audited("store", path.name)
    if which == "lasting":
        assert host.leases() == [host.lease]
    else:
        # the lease is forgotten with its file; a device that nobody holds is free again
        assert host.leases() == []
        host.client.wait_for_device("npu-0", State="idle")


@pytest.mark.parametrize("which", ["ledger", "lasting"])
def test_file_of_a_newer_version_is_not_touched(host: Host, which: str) -> None:
    path: Path = getattr(host, which)
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 9999")
    database.close()
    before = path.read_bytes()
    host.agent.spawn()
    assert host.agent.wait() == 2
    assert path.read_bytes() == before
    assert "newer" in host.agent.log


def test_leases_of_another_boot_are_closed(host: Host) -> None:
    database = sqlite3.connect(host.ledger)
    changed = 0
    for table in ("leases", "debts", "records", "counters", "requests", "outbox"):
        for key, data in database.execute(f"SELECT key, data FROM {table}").fetchall():
            values = ("another", checksum(key, "another", data), key)
            changed += database.execute(f"UPDATE {table} SET boot = ?, sum = ? WHERE key = ?", values).rowcount
    assert changed >= 3
    database.commit()
    database.close()
    host.start()
    host.client.wait_for_device("npu-0", State="idle")
    assert host.leases() == []
    host.audited("lease-ended", "reboot")


def test_one_bad_row_costs_that_row_only(host: Host) -> None:
    host.start()
    host.client.wait_for_device("npu-1", State="idle")
    second = host.allocate("b", {"confirm": ("b", True)})
    assert sorted(host.leases()) == sorted([host.lease, second])
    assert host.agent.terminate() == 0
    database = sqlite3.connect(host.ledger)
    number = second.removeprefix(names.LEASES + "/l")
    assert database.execute("UPDATE leases SET data = '{}' WHERE key = ?", (number,)).rowcount == 1
    database.commit()
    database.close()
    host.start()
    host.client.wait_for_device("npu-1", State="idle")
    assert host.leases() == [host.lease]
    host.audited("store", "quarantine")
