"""A restored machine for each test, and what holds after every one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm import saved
from tests.vm.machine import Machine
from tests.vm.qemu import remove_directory


@pytest.fixture(scope="session")
def system() -> Path:
    """The booted machine in the cache; the first run makes it, which takes minutes."""
    if os.geteuid() != 0:
        pytest.exit("the lab makes disks with the files of many users: run it as root", 2)
    saved.sweep()
    return saved.system()


@pytest.fixture
def vm(system: Path) -> Iterator[Machine]:
    """A machine as it was after the boot: agent up, four devices idle."""
    machine, directory = saved.restored(system)
    try:
        yield machine
        _is_well(machine)
    finally:
        machine.close()
        remove_directory(directory)


def _is_well(machine: Machine) -> None:
    """The agent was never restarted, logged no error of its own, and its trail has no gap."""
    assert machine.run("systemctl show --value --property=NRestarts hetero-agent") == "0"
    entries = machine.journal("_SYSTEMD_UNIT=hetero-agent.service")
    errors = [one["MESSAGE"] for one in entries if int(one["PRIORITY"]) <= 3 and "HETERO_KIND" not in one]
    assert errors == []
    boot = entries[-1]["_BOOT_ID"]
    numbers = sorted(
        {int(one["HETERO_SEQUENCE"]) for one in entries if "HETERO_KIND" in one and one["_BOOT_ID"] == boot}
    )
    assert numbers == list(range(numbers[0], numbers[-1] + 1))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    machine = item.funcargs.get("vm") if isinstance(item, pytest.Function) else None
    if report.when == "call" and report.failed and isinstance(machine, Machine):
        shown = machine.attempt("journalctl --no-pager --unit hetero-agent | tail -n 60; dmesg | tail -n 20")[1]
        report.sections.append(("the guest's journal and kernel log", shown))
