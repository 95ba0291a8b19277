"""20,000 uevents, and a socket that holds a dozen of them."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent import names
from tests.drills.endstate import all_free, leases
from tests.support.agent import CONFIG, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import Client, V
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE, RESOURCE, SYSFS
from tests.support.hold import HoldingProcess
from tests.support.process import PYTHON
from tests.support.trail import entries
from tests.support.uevents import flood
from tests.support.under import run_under
from tests.support.wait import wait_until

EVENTS = 20_000

#: How many the kernel has sent so far.
_NUMBER = Path("/sys/kernel/uevent_seqnum")

#: The daemon with a small receive buffer, as it has where it may not ask for more.
_SMALL = (
    "import sys; from hetero_agent.discovery.source import KernelSource; "
    "KernelSource.__init__.__kwdefaults__['buffer_sizes'] = (4096,); "
    "from hetero_agent.daemon import main; sys.exit(main())"
)


@pytest.fixture
def agent(bus: PrivateBus) -> Iterator[AgentProcess]:
    one = AgentProcess(
        bus,
        config=CONFIG.replace('log-level = "debug"', 'log-level = "info"'),
        profiles={"console.toml": PROFILE},
        sources="kernel",
        watchdog=6,
        program=(PYTHON, "-c", _SMALL),
    )
    try:
        yield one.start()
    finally:
        one.close()


# what is injected reaches this network namespace only
@run_under("unshare", "--net")
def test_flood_of_uevents(bus: PrivateBus, agent: AgentProcess) -> None:
    with Client(bus) as client, HoldingProcess(CONSOLE, later=True) as process:
        client.wait_for_device(DEVICE_ID, State="idle")
        lease, _ = client.allocate("a", RESOURCE, 1, {"confirm": V("b", True), "pid": V("u", process.pid)})
        process.open()
        policy = SYSFS / "power" / "control"
        before = policy.read_text().strip()
        after = "on" if before == "auto" else "auto"
        thread = threading.Thread(target=flood, args=(EVENTS, str(SYSFS.resolve()), "tty"))
        slowest, sent = 0.0, int(_NUMBER.read_text())
        try:
            # more than the socket holds comes while nobody reads; after that the agent may keep up or not
            agent.signal(signal.SIGSTOP)
            wait_until(lambda: "State:\tT" in Path(f"/proc/{agent.pid}/status").read_text(), what="a stop")
            flood(1000, str(SYSFS.resolve()), "tty")
            agent.signal(signal.SIGCONT)
            thread.start()
            while thread.is_alive():
                asked = time.monotonic()
                assert client.device(DEVICE_ID)["State"] == "in-use"
                slowest = max(slowest, time.monotonic() - asked)
                # told by an event of its own, which is lost with the others or not
                policy.write_text(after)
            thread.join()
            client.wait_for_device(DEVICE_ID, State="in-use")
            wait_until(lambda: client.device(DEVICE_ID)["Attributes"]["power-policy"] == after, what="the news")
        finally:
            policy.write_text(before)
        assert int(_NUMBER.read_text()) - sent >= EVENTS
        assert slowest < 15, "a caller waited for the flood"
        # it lost some, said so, and compared with the whole; nothing was lost by that
        agent.wait_for_log('"HETERO_REASON":"events-lost"')
        assert entries(agent, "device-gone") == []
        assert len(entries(agent, "device-appeared")) == 1
        assert leases(client) == {lease: [DEVICE_ID]}
        signs = [at for at, text in agent.notify.messages if "WATCHDOG=1" in text]
        assert max((then - now for now, then in itertools.pairwise(signs)), default=0) < 6
        # and it hears again
        (SYSFS / "uevent").write_text("change")
        client.release("r", lease)
        client.wait_for_device(DEVICE_ID, State="reclaiming")
        process.finish()
        all_free(client, agent, [DEVICE_ID])
        assert client.properties(names.ROOT, names.MANAGER)["Ready"] is True
