"""The verb run: a command that lives as long as its lease, and a lease that lives as long as its command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.command import Command, Relay
from hetero_agent.cli.complaints import Complaint
from hetero_agent.cli.obtaining import obtain
from hetero_agent.cli.table import Printer
from hetero_agent.cli.verbs import Verbs, lease_options, request_options, seconds
from hetero_agent.cli.vigil import Vigil, say
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client import Client, Manifest

#: The variable by which a run inside a lease knows it.
LEASE_VARIABLE: Final = "HETERO_LEASE_ID"


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_alone("run", "run a command with devices leased for it", run)
    request_options(parser)
    lease_options(parser)
    parser.add_argument(
        "--wait", type=seconds, default=0.0, metavar="SECONDS", help="wait so long for devices to be free"
    )
    parser.add_argument(
        "--unit",
        nargs="?",
        const="",
        metavar="UNIT",
        help="as a unit of the system's service manager, which lets it use no other devices",
    )
    parser.add_argument(
        "-E",
        "--setenv",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="with --unit: a variable for the command; without a value, as it is here",
    )
    parser.add_argument("--uid", metavar="USER", help="with --unit, as root: for this user")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run")


def run(args: argparse.Namespace, _out: Printer) -> int:
    """Run the command; its exit code, or one of ours."""
    arguments = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not arguments:
        raise Complaint(
            exitcodes.USAGE, "no command to run", (), "heteroctl run -r RESOURCE -n N -- COMMAND ...", "usage"
        )
    if args.label is None:
        args.label = printable(os.path.basename(arguments[0]), 64)  # noqa: PTH119 (pathlib costs startup)
    if args.unit is None and (args.setenv or args.uid is not None):
        what = "--setenv" if args.setenv else "--uid"
        raise Complaint(exitcodes.USAGE, f"{what} is for --unit", (), "heteroctl run --help", "usage")
    if args.unit is not None and args.netdev == "move":
        what = "network interfaces go where a process is, not where a unit is: --netdev and --unit don't fit"
        raise Complaint(exitcodes.USAGE, what, (), "heteroctl run --help", "usage")
    try:
        if args.unit is not None:
            from hetero_agent.cli import unitrun  # noqa: PLC0415

            return asyncio.run(unitrun.go(args, arguments))
        command = Command(arguments)
        try:
            return asyncio.run(_Run(args, command).go())
        finally:
            command.abandon()
    except Complaint as complaint:
        if complaint.code == exitcodes.FAILURE:
            complaint.code = exitcodes.RUN_FAILED
        raise


class _Run:
    """One run: obtains the lease, starts the command, watches both."""

    def __init__(self, args: argparse.Namespace, command: Command) -> None:
        self._args = args
        self._command = command
        self._over = asyncio.Event()
        self._aborted = 0
        #: Whether the lease is one that this run is inside of: its life hangs on another process.
        self._inside = False
        #: The lease that this run is inside of, if it is another.
        self._outer: Manifest | None = None

    async def go(self) -> int:
        loop = asyncio.get_running_loop()
        Relay(self._command, loop.call_soon_threadsafe, self._over.set, self._abort)
        preparing = asyncio.create_task(self._prepare())
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait({preparing, over}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            preparing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await preparing
            over.cancel()
            if self._aborted:
                return exitcodes.SIGNAL + self._aborted
            raise Complaint(exitcodes.RUN_FAILED, "the process that was to become the command was ended")
        try:
            client, manifest = preparing.result()
        except BaseException:
            over.cancel()
            raise
        async with client:
            if manifest.env_filtered:
                from hetero_agent.client import numbering  # noqa: PLC0415

                manifest = await numbering.here(client, manifest)
            if manifest.limits:
                from hetero_agent.cli import limits  # noqa: PLC0415

                for short in limits.give(self._command.pid, manifest.limits):
                    say(short)
            self._command.start(manifest.environment(os.environ, inside=self._inside, outer=self._outer))
            vigil = Vigil(client, manifest, self._status, ours=not self._inside)
            async with vigil:
                await over
        status = self._command.status
        assert status is not None
        return vigil.code(status)

    def _abort(self, number: int) -> None:
        self._aborted = number
        self._over.set()

    def _status(self) -> int | None:
        self._command.look()
        return self._command.status

    # -- before the command -------------------------------------------------------------------
    async def _prepare(self) -> tuple[Client, Manifest]:
        from hetero_agent.cli import asking, complaints  # noqa: PLC0415
        from hetero_agent.client import Client, HeteroError  # noqa: PLC0415

        person = asking.person(self._args)
        try:
            client = await Client.connect(self._args.bus, person=person)
        except HeteroError as error:
            raise complaints.of_error(error) from error
        try:
            # the terminal is the command's, once there is one
            with person or contextlib.nullcontext():
                outer = await _around(client)
                if outer is not None and self._enough(outer):
                    self._inside = True
                    return client, outer
                self._outer = outer
                return client, (await obtain(client, self._args, pid=self._command.pid)).manifest
        except HeteroError as error:
            await client.close()
            raise complaints.of_error(error) from error
        except BaseException:
            await client.close()
            raise

    def _enough(self, outer: Manifest) -> bool:
        """Whether the lease that this run is inside of is what it would ask for."""
        args = self._args
        particular = args.require or args.devices or args.policy
        return not particular and outer.resource == args.resource and len(outer.devices) >= args.count


async def _around(client: Client) -> Manifest | None:
    """Return the manifest of the lease that this run is inside of: one in use, and the same user's."""
    from hetero_agent.client.errors import AgentError  # noqa: PLC0415

    name = os.environ.get(LEASE_VARIABLE, "")
    if not name:
        return None
    try:
        lease = await client.lease(name)
        if lease.state != "active" or lease.uid != os.getuid():
            return None
        return await client.manifest(lease.path)
    except AgentError:
        return None
