"""Fixtures for all tests, and three rules: a failing test shows the logs of the programs it
started, a skip must be listed in tests/skips.txt when CI is set, and no process outlives its test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import process
from tests.support.agent import AgentProcess, SimProcess
from tests.support.bus import PrivateBus
from tests.support.vendor import Vendor

# how long an example takes says more of the machine than of the code
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")

_SKIPS = Path(__file__).with_name("skips.txt")
_LOG_SHOWN = 20_000

#: In the environment of everything that the tests start, so that what they leave is found.
_MARK = "HETERO_AGENT_TEST_RUN"


def _heed_signals() -> None:
    """Have what the tests start heed every signal again, whatever they were started from: a background
    job ignores SIGINT and SIGQUIT, what nohup started SIGHUP, and programs inherit that."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # those Python itself ignores
        if signal.getsignal(number) is signal.SIG_IGN:
            # a handler, since a program that is started then has the default, and this one lives on
            handler = signal.default_int_handler if number == signal.SIGINT else lambda *_: None
            signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    _heed_signals()
    os.environ[_MARK] = str(os.getpid())
    config.stash[_unlisted] = []


_unlisted = pytest.StashKey[list[str]]()


def _marked() -> dict[int, str]:
    """Return pid -> command line of every living process with this run's mark."""
    wanted = f"{_MARK}={os.getpid()}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    )
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test after which a process that it started still lives."""
    process.logs.clear()
    before = _marked()
    yield
    deadline = time.monotonic() + 30
    while True:
        left = {pid: what for pid, what in _marked().items() if pid not in before}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in left:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    if left:
        pytest.fail("processes left behind: " + "; ".join(f"{pid} {what}" for pid, what in left.items()))


@pytest.fixture
def bus() -> Iterator[PrivateBus]:
    """A private system bus with our policy."""
    private = PrivateBus()
    yield private
    private.close()


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    """A running agent without kernel devices, on `bus`."""
    one = AgentProcess(bus)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def sim(agent: AgentProcess) -> Iterator[SimProcess]:
    """A running simulator without devices, a provider of `agent`."""
    one = SimProcess(agent)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def vendor(agent: AgentProcess) -> Iterator[Vendor]:
    """A provider of `agent` without devices, its calls made by GLib."""
    with Vendor(agent) as one:
        yield one


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for title, path in process.logs:
            if path.exists():
                report.sections.append((f"log of {title}", path.read_text(errors="replace")[-_LOG_SHOWN:]))
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason not in _listed():
            item.config.stash[_unlisted].append(f"{item.nodeid}: {reason}")


def _listed() -> set[str]:
    lines = _SKIPS.read_text().splitlines() if _SKIPS.exists() else []
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for one in config.stash[_unlisted]:
        terminalreporter.write_line(f"skipped without a listed reason (tests/skips.txt): {one}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if os.environ.get("CI") and session.config.stash[_unlisted] and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
