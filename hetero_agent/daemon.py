"""hetero-agent, the daemon: reads the configuration, builds the edges, wires them, runs.

Start: monitor -> enumerate -> reconcile the ledger -> first scan, or 5 s -> export -> own the
name -> READY=1 -> empty report -> full report.  SIGTERM stops without releasing anything;
SIGHUP reads the configuration again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hetero_agent import __version__, names
from hetero_agent import config as configuration
from hetero_agent.access.choice import choose
from hetero_agent.access.door import Doer, Door
from hetero_agent.access.survey import Survey
from hetero_agent.audit import loghandler
from hetero_agent.audit.journal import JournalWriter
from hetero_agent.bus.service import BusService
from hetero_agent.config import Config, ConfigError
from hetero_agent.core.effects import Effect
from hetero_agent.core.events import Event, Happened, Note, Observed
from hetero_agent.core.governor import KERNEL, Governor
from hetero_agent.core.model import AuditKind, State
from hetero_agent.core.settings import Settings
from hetero_agent.discovery.source import KernelSource
from hetero_agent.engine import Engine, instant
from hetero_agent.health.alerts import Alerts
from hetero_agent.health.edge import HealthEdge
from hetero_agent.holders.edge import HolderEdge
from hetero_agent.providers.registry import Registry
from hetero_agent.store.database import StoreUnusable
from hetero_agent.store.lasting import SqliteLasting
from hetero_agent.store.ledger import SqliteLedger
from hetero_agent.supervision import Notifier, Reloads, Watchdog, interval_from_env
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.daemon")

#: Seconds that the first scan and probe may take before the agent is ready without them.
FIRST_LOOK = 5.0

#: Seconds between two looks at what STATUS= says.
STATUS_INTERVAL = 2.0

#: Seconds that the audit trail may take to be written at the end.
LAST_WORDS = 2.0


class Places(NamedTuple):
    """Where the daemon finds and keeps its things."""

    config: Path
    profiles: Path
    runtime: Path
    state: Path
    bus: str
    audit: str
    sources: str


def settings_of(config: Config) -> Settings:
    """Return what the governor goes by: seconds become microseconds."""

    def usec(seconds: float) -> int:
        return int(seconds * 1_000_000)

    limits = config.limits
    return Settings(
        confirm_within=usec(config.grant.confirm_within),
        reclaim_deadline=usec(config.reclaim.deadline),
        kill_after=usec(config.reclaim.kill_after),
        occupied_after=usec(config.reclaim.occupied_after),
        orphans_kill=config.reclaim.orphans == "kill",
        probes=True,
        system_holders=config.reclaim.system_holders,
        leases=limits.leases,
        leases_per_uid=limits.leases_per_uid,
        leases_per_client=limits.leases_per_client,
        devices_per_lease=limits.devices_per_lease,
        devices_per_client=limits.devices_per_client,
        requests_per_uid=limits.requests_per_uid,
        waiting=limits.waiting,
    )


def _contained(config: Config) -> bool:
    """Tell whether the agent's own pid namespace has all processes that could hold a device."""
    return config.reclaim.pid_namespace == "own"


class Daemon:
    """One life of the agent.  `run` returns the exit status."""

    def __init__(self, places: Places, config: Config, handler: loghandler.LogHandler) -> None:
        self.places = places
        self.config = config
        self.notifier = Notifier()
        self.stop_asked = asyncio.Event()
        self._reloads = Reloads(self.notifier, self._read_again)
        # A file that was there and is gone was hardly meant to take everybody's devices: only a start without
        # it means the defaults.
        self._configured = places.config.exists()
        self.ledger = SqliteLedger(places.runtime / names.LEDGER_FILE, instant)
        self.lasting = SqliteLasting(places.state / names.LASTING_FILE, places.runtime)
        self.audit = JournalWriter(self.ledger, places.audit)
        self.governor = Governor(settings_of(config), secrets.token_hex(8))
        self.engine = Engine(self.governor, self.ledger, self.lasting)
        self.engine.on_stored = self.audit.wake
        submit, now = self._submit, self.engine.now
        self.holders = HolderEdge(submit, now, self._protected, self._main_pid, _contained(config))
        self.health = HealthEdge(config.health, places.runtime, submit, now, self._look)
        self.alerts = Alerts(places.runtime, self.governor.devices)
        self.kernel = KernelSource(config.discovery, places.profiles, submit, now, wedged=self.health.wedged)
        self.registry = Registry(
            config.providers, config.limits, submit, now, self.governor.epoch, self._source_of
        )
        self.door = Door(self._doer(), self._look)
        self.survey = Survey(
            self.governor,
            self.engine.submit,
            now,
            open_to_all=lambda: self.kernel.open_to_all,
            gives=lambda: self.config.access.acl and not self.door.problem,
        )
        self.bus = BusService(
            config,
            self.engine,
            self.holders.identify,
            self.registry,
            self.survey,
            loghandler.set_level,
            handler.target,
        )
        self.bus.host_news = self._host_news

    def _doer(self) -> Doer:
        return choose(
            self.config.access, self.places.runtime, self.places.bus, self.config.grant.effects_timeout
        )

    def _submit(self, event: Event) -> None:
        """Hand the engine what an edge tells; some of it may be news of who can open nodes."""
        self.survey.tell(event)
        self.engine.submit(event)

    def _protected(self) -> set[int]:
        """Processes that are never signalled whatever a lease says."""
        return {os.getpid(), os.getppid(), self.bus.bus_pid}

    async def _main_pid(self, unit: str) -> int:
        """The main process of a systemd service, as the bus edge learns it."""
        return await self.bus.owners.units.main_pid(unit)

    def _look(self, path: str) -> None:
        """A probe or a grant saw that the kernel's device at PATH has changed."""
        self.kernel.look(path)

    def _source_of(self, name: str) -> str:
        device = self.governor.find_device(name)
        return device.record.source if device is not None else ""

    # -- life -----------------------------------------------------------------------------------
    async def run(self) -> int:
        """Live until told to stop (0) or until the bus is lost (1)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop_asked.set)
        loop.add_signal_handler(signal.SIGHUP, self._reloads.ask)
        watchdog: asyncio.Task[None] | None = None
        try:
            await self._start()
            interval = interval_from_env()
            if interval is not None:
                dog = Watchdog(self.notifier, interval, self._checks(), self.bus.ping)
                watchdog = loop.create_task(dog.run())
            self.notifier.ready()
            self.bus.publisher.start()
            await self._live()
        except StoreUnusable as error:
            # a new start would find the same: the unit does not restart this status
            log.error("%s", printable(error, 512))
            return 2
        except OSError as error:
            log.error("%s", printable(error, 512))
            return 1
        finally:
            self.notifier.stopping()
            if watchdog is not None:
                watchdog.cancel()
            await self._end()
        if self.bus.lost.done() and not self.stop_asked.is_set():
            log.error("the bus is lost: %s", self.bus.lost.result())
            return 1
        return 0

    async def _start(self) -> None:
        started = time.monotonic()
        restored = self.ledger.load(self.engine.now())
        self.lasting.load(restored)
        await self.bus.connect(self.places.bus)
        self.engine.attach(
            access=self.door,
            holders=self.holders,
            health=self.health,
            owners=self.bus.owners,
            publisher=self,
            effects_timeout=self.config.grant.effects_timeout,
            scan_interval=self.config.reclaim.scan_interval,
        )
        await self.holders.start()
        self.health.start()
        self.engine.start(restored)
        self.audit.start()
        self.registry.expect(restored.records)
        if self.places.sources == "none":
            self.engine.submit(Observed(self.engine.now(), KERNEL, complete=True))
        else:
            await self.kernel.start()
            self.health.listen(self.kernel.symptoms)
        await self._first_look(started + FIRST_LOOK)
        self.alerts.start()
        self.survey.start()
        await self.bus.request_name()
        self._tell_status()

    async def _first_look(self, until: float) -> None:
        """Wait until no device waits for its first scan or probe any more, or UNTIL (monotonic)."""
        while time.monotonic() < until:
            if not any(device.state is State.PROBING for device in self.governor.devices.values()):
                return
            await asyncio.sleep(0.005)

    async def _live(self) -> None:
        stop = asyncio.ensure_future(self.stop_asked.wait())
        try:
            while not stop.done() and not self.bus.lost.done():
                await asyncio.wait(
                    (stop, self.bus.lost), timeout=STATUS_INTERVAL, return_when=asyncio.FIRST_COMPLETED
                )
                self._tell_status()
        finally:
            stop.cancel()

    async def _end(self) -> None:
        """Leave leases, ledger and devices as they are and close all edges."""
        self._reloads.cancel()
        if self.engine.running:
            self.engine.submit(Note(self.engine.now(), AuditKind.STOPPED, "stopped; leases stay as they are"))
        if self.places.sources != "none":
            await self.kernel.stop()
        await self.survey.stop()
        await self.health.stop()
        await self.holders.stop()
        self.registry.close()
        await self.engine.stop()
        self.door.close()
        self.bus.close()
        await self.audit.stop(LAST_WORDS)
        self.lasting.close()
        self.ledger.close()
        self.notifier.close()

    # -- between the edges ------------------------------------------------------------------------
    def publish(self, effects: Sequence[Effect]) -> None:
        """Give the governor's news to everybody who shows them; see `core.ports.Publisher`."""
        self.bus.publisher.publish(effects)
        self.alerts.publish(effects)

    def _host_news(self, what: str, begins: bool) -> None:
        """Something befell the host: devices may suffer from it, and their histories tell of it."""
        now = self.engine.now()
        if what == "reload" and begins:
            # device rules of running units are written anew: who had a device may have lost it
            self.engine.submit(Happened(now, "daemon-reload", "systemd reads its units again", leased=True))
        elif what == "sleep":
            word, text = ("suspend", "goes to sleep") if begins else ("resume", "woke up")
            self.engine.submit(Happened(now, word, f"the machine {text}"))
            self.health.sleep(begins)

    # -- supervision ------------------------------------------------------------------------------
    def _checks(self) -> dict[str, Callable[[], float]]:
        checks: dict[str, Callable[[], float]] = {"engine": lambda: self.engine.progress}
        if self.places.sources != "none":
            checks["udev"] = self.kernel.progress
        return checks

    def _tell_status(self) -> None:
        """Say in STATUS= what there is and what is wrong, when that has changed."""
        governor = self.governor
        devices = governor.devices.values()
        parts = [
            f"{len(devices)} devices",
            f"{sum(counts['allocatable'] for counts in governor.resources().values())} allocatable",
            f"{len(governor.leases)} leases",
        ]
        for state in (State.RECLAIMING, State.OCCUPIED, State.FAULTY, State.LOST):
            number = sum(device.state is state for device in devices)
            if number:
                parts.append(f"{number} {state}")
        status = ", ".join(parts)
        problems = self.problems()
        if problems:
            status += "; " + "; ".join(problems[:3])
        self.notifier.status(status)

    def problems(self) -> list[str]:
        """What an administrator should know of the agent itself, each with what to do."""
        found = []
        if self.engine.store_problem:
            found.append(f"ledger: {self.engine.store_problem}")
        edges = (
            self.lasting.problem,
            self.audit.problem,
            self.holders.problem,
            self.alerts.problem,
            self.door.problem,
        )
        found += [problem for problem in edges if problem]
        found += self.health.problems()
        if self.places.sources != "none":
            found += self.kernel.problems()
        found += self.survey.problems()
        return found

    # -- reload -----------------------------------------------------------------------------------
    async def _read_again(self) -> None:
        """Read the configuration again; a bad one is reported and the old one stays."""
        try:
            config = await asyncio.to_thread(configuration.load, self.places.config, needed=self._configured)
            self._configured = self._configured or await asyncio.to_thread(self.places.config.exists)
        except ConfigError as error:
            text = f"the new configuration is not used: {error}"
            priority = 3
        else:
            self.config = config
            self.governor.configure(settings_of(config))
            self.holders.configure(_contained(config))
            self.health.configure(config.health)
            self.engine.configure(config.grant.effects_timeout, config.reclaim.scan_interval)
            self.registry.reload(config)
            self.door.reload()
            self.door.use(self._doer())
            loghandler.set_level(config.agent.log_level)
            await self.bus.reload(config)
            text, priority = "the configuration was read again", 5
            if self.places.sources != "none":
                self.kernel.configure(config.discovery)
                try:
                    await self.kernel.reload()
                except OSError as error:
                    text, priority = f"{text}, but the kernel's news come as before: {printable(error)}", 4
                self.health.listen(self.kernel.symptoms)
            self.survey.again()
        self.engine.submit(Note(self.engine.now(), AuditKind.RELOADED, text, priority))
        self._tell_status()


def parse(arguments: Sequence[str] | None = None) -> Places:
    """Read the command line; what it leaves out comes from systemd's variables, then the defaults."""
    parser = argparse.ArgumentParser(
        prog="hetero-agent", description="The one authority on this node for its accelerators."
    )
    parser.add_argument("--version", action="version", version=f"hetero-agent {__version__}")
    parser.add_argument("--config", type=Path, default=Path(names.CONFIG_FILE), help="configuration file")
    parser.add_argument(
        "--profiles", type=Path, default=Path(names.PROFILES_DIR), help="profiles that override the package's"
    )
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        default=Path(os.environ.get("RUNTIME_DIRECTORY", names.RUNTIME_DIR)),
        help="where the lease ledger is",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=Path(os.environ.get("STATE_DIRECTORY", names.STATE_DIR)),
        help="where cordons, counts and history are",
    )
    parser.add_argument("--bus", default=os.environ.get(names.BUS_ADDRESS_VARIABLE, ""), help="bus address")
    parser.add_argument("--audit", choices=("auto", "journal", "stderr"), default="auto", help="audit trail")
    parser.add_argument(
        "--sources", choices=("kernel", "none"), default="kernel", help="sources built into the agent"
    )
    given = parser.parse_args(arguments)
    return Places(
        given.config,
        given.profiles,
        given.runtime_dir,
        given.state_dir,
        given.bus or names.SYSTEM_BUS,
        given.audit,
        given.sources,
    )


async def _run(places: Places, config: Config, handler: loghandler.LogHandler) -> int:
    return await Daemon(places, config, handler).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status: 0 stopped, 1 failed, 2 can't start until somebody
    mends the configuration or the store's version."""
    places = parse(arguments)
    try:
        config = configuration.load(places.config, needed=places.config != Path(names.CONFIG_FILE))
    except ConfigError as error:
        print(f"hetero-agent: {error}", file=sys.stderr)
        return 2
    handler = loghandler.install(config.agent.log_level)
    try:
        places.runtime.mkdir(mode=0o755, parents=True, exist_ok=True)
        return asyncio.run(_run(places, config, handler))
    except OSError as error:
        log.error("%s", printable(error, 512))
        return 1
    finally:
        handler.close()


if __name__ == "__main__":
    sys.exit(main())
