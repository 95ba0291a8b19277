"""The simulator's process: command line, control socket, scenario, signals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from hetero_agent import names
from hetero_agent.sim import control
from hetero_agent.sim.commands import SimError
from hetero_agent.sim.devices import DIRECTORY, Stock
from hetero_agent.sim.engine import Engine
from hetero_agent.sim.scenario import Scenario, Step, load

log = logging.getLogger("hetero_agent.sim")


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.  Returns 0, or 1 with the reason on standard error."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        scenario = load(options.scenario) if options.scenario else Scenario()
        asyncio.run(_run(options, scenario))
    except SimError as error:
        print(f"hetero-agent-sim: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hetero-agent-sim", description="A provider of virtual devices for hetero-agent."
    )
    parser.add_argument("--directory", type=Path, default=Path(DIRECTORY), help="where the device files lie")
    parser.add_argument("--socket", type=Path, default=Path(names.SIM_SOCKET), help="the control socket")
    parser.add_argument("--name", default="sim", help="the provider name, as in [providers.NAME]")
    parser.add_argument("--scenario", type=Path, help="a scenario file (docs/simulator.md)")
    parser.add_argument(
        "--bus", help=f"the bus's address (default: ${names.BUS_ADDRESS_VARIABLE}, the system bus)"
    )
    return parser


async def _run(options: argparse.Namespace, scenario: Scenario) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    # the agent knows the directory by its real path, and so do the processes that hold a device
    stock = Stock(options.directory.resolve(), scenario.mode, scenario.group)
    for device in scenario.devices:
        stock.add(device)
    engine = Engine(stock, options.name, options.bus)
    listening = control.listen(options.socket)
    try:
        server = await control.serve(listening, engine.do)
        jobs = [asyncio.create_task(engine.run()), asyncio.create_task(_play(engine, scenario.steps))]
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait([jobs[0], waiting], return_when=asyncio.FIRST_COMPLETED)
        server.close()
        waiting.cancel()
        if jobs[0].done():
            jobs[0].result()
        for job in jobs:
            job.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await job
    finally:
        options.socket.unlink(missing_ok=True)


async def _play(engine: Engine, steps: tuple[Step, ...]) -> None:
    for step in steps:
        await asyncio.sleep(step.after)
        try:
            await engine.do(step.command)
        except SimError as error:
            log.warning("a step of the scenario could not be done: %s", error)


if __name__ == "__main__":
    sys.exit(main())
