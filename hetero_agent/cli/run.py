"""The verb run: a command that lives as long as its lease, and a lease that lives as long as its command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.command import Command, Relay
from hetero_agent.cli.complaints import Complaint
from hetero_agent.cli.table import Printer, short
from hetero_agent.cli.verbs import Verbs, lease_of, lease_options, request_of, request_options, seconds
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client import Client, Manifest
    from hetero_agent.client.events import Event
    from hetero_agent.client.results import Lease

#: The variable by which a run inside a lease knows it.
LEASE_VARIABLE: Final = "HETERO_LEASE_ID"

#: Seconds between attempts while waiting, unless a report comes sooner.
_RETRY: Final = 2.0

#: Seconds for the question, after the command, whether the lease still lived.
_LAST_QUESTION: Final = 2.0

#: The end of a lease that follows from the end of its command.
_OWN_END: Final = "owner-gone"


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_alone("run", "run a command with devices leased for it", run)
    request_options(parser)
    lease_options(parser)
    parser.add_argument(
        "--wait", type=seconds, default=0.0, metavar="SECONDS", help="wait so long for devices to be free"
    )
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
    command = Command(arguments)
    try:
        return asyncio.run(_Run(args, command).go())
    except Complaint as complaint:
        if complaint.code == exitcodes.FAILURE:
            complaint.code = exitcodes.RUN_FAILED
        raise
    finally:
        command.abandon()


class _Run:
    """One run: obtains the lease, starts the command, watches both."""

    def __init__(self, args: argparse.Namespace, command: Command) -> None:
        self._args = args
        self._command = command
        self._over = asyncio.Event()
        self._aborted = 0
        #: How the lease ended before its command, "" while it lives.
        self._ended = ""
        self._lost: set[str] = set()
        #: Whether the lease is one that this run is inside of: its life hangs on another process.
        self._inside = False

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
            self._command.start(manifest.environment(os.environ))
            watching = asyncio.create_task(self._watch(client, manifest))
            await over
            watching.cancel()
            await asyncio.wait({watching})
            if not watching.cancelled() and (error := watching.exception()) is not None:
                _say(f"lost sight of the lease while the command ran: {error}")
            await self._last_look(client, manifest)
        return self._code()

    def _abort(self, number: int) -> None:
        self._aborted = number
        self._over.set()

    def _code(self) -> int:
        status = self._command.status
        assert status is not None
        if self._ended or (self._lost and status):
            what = f"the lease ended ({self._ended})" if self._ended else "the lease lost devices"
            _say(f"{what} while the command ran; it ended with {status}")
            return exitcodes.LEASE_LOST
        return status

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
                manifest = await self._outer(client)
                self._inside = manifest is not None
                return client, manifest or await self._obtain(client)
        except HeteroError as error:
            await client.close()
            raise complaints.of_error(error) from error
        except BaseException:
            await client.close()
            raise

    async def _outer(self, client: Client) -> Manifest | None:
        """Return the manifest of the lease that this run is inside of, if it is enough."""
        from hetero_agent.client.errors import AgentError  # noqa: PLC0415

        args = self._args
        outer = os.environ.get(LEASE_VARIABLE, "")
        if not outer or args.require or args.devices or args.policy:
            return None
        try:
            lease = await client.lease(outer)
            enough = lease.resource == args.resource and len(lease.devices) >= args.count
            if lease.state != "active" or lease.uid != os.getuid() or not enough:
                return None
            return await client.manifest(lease.path)
        except AgentError:
            return None

    async def _obtain(self, client: Client) -> Manifest:
        """Lease the devices, bound to the command's process; wait if that was asked for."""
        from hetero_agent.cli import complaints  # noqa: PLC0415
        from hetero_agent.client import errors, events  # noqa: PLC0415
        from hetero_agent.client.session import new_request_id  # noqa: PLC0415

        args = self._args
        end = time.monotonic() + args.wait
        request = request_of(args)
        request_id = new_request_id()

        async def attempt() -> Manifest:
            grant = await client.allocate(
                args.resource,
                args.count,
                request_id=request_id,
                pid=self._command.pid,
                confirm=True,
                **request,
                **lease_of(args),
            )
            return grant.manifest

        async def complaint(error: errors.HeteroError) -> Complaint:
            return await complaints.about_request(client, error, args.resource, args.count, request)

        try:
            return await attempt()
        except errors.HeteroError as error:
            found = await complaint(error)
            if found.code != exitcodes.BUSY or not args.wait:
                raise found from error
        async with client.watch(events.Report) as reports:
            while True:
                left = end - time.monotonic()
                if left <= 0:
                    found.code = exitcodes.TIMED_OUT
                    found.cause = f"waited {args.wait:g} s in vain: {found.cause}"
                    raise found
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_RETRY, left)):
                        await anext(reports)
                try:
                    return await attempt()
                except errors.HeteroError as error:
                    found = await complaint(error)
                    if found.code != exitcodes.BUSY:
                        raise found from error

    # -- beside the command -------------------------------------------------------------------
    async def _watch(self, client: Client, manifest: Manifest) -> None:
        """Tell what befalls the lease while the command runs."""
        from hetero_agent import names  # noqa: PLC0415
        from hetero_agent.client import HeteroError, events  # noqa: PLC0415

        path = names.lease_path(manifest.lease)
        async with (
            client.watch(events.PropertiesChanged, path=path) as own,
            client.watch(events.LeaseEnded, events.HealthEvent, path=names.ROOT) as all_leases,
        ):
            try:
                self._judge(await client.lease(path))
            except HeteroError as error:
                self._not_there(error, manifest.lease)

            async def follow(watch: Any) -> None:
                async for event in watch:
                    if isinstance(event, (events.AgentChanged, events.Missed)):
                        with contextlib.suppress(HeteroError):
                            await self._ask(client, path)
                    else:
                        self._hear(event, manifest)

            async with asyncio.TaskGroup() as group:
                group.create_task(follow(own))
                group.create_task(follow(all_leases))

    def _hear(self, event: Event, manifest: Manifest) -> None:
        from hetero_agent.client import events  # noqa: PLC0415
        from hetero_agent.client.results import device_of  # noqa: PLC0415

        match event:
            case events.PropertiesChanged(changed=changed):
                self._lose(device_of(one) for one in changed.get("Lost", ()))
                if changed.get("Result"):
                    self._end(changed["Result"], manifest.lease)
            case events.LeaseEnded(lease=lease, result=result):
                if lease == manifest.lease:
                    self._end(result, lease)
            case events.HealthEvent() if event.device in manifest.devices:
                why = f": {event.reason}" if event.reason else ""
                _say(f"device {event.device} is {event.health}{why}")

    async def _ask(self, client: Client, path: str) -> None:
        from hetero_agent.client.errors import NotFound  # noqa: PLC0415
        from hetero_agent.names import lease_id_of  # noqa: PLC0415

        try:
            self._judge(await client.lease(path))
        except NotFound as error:
            self._not_there(error, lease_id_of(path))

    def _judge(self, lease: Lease) -> None:
        self._lose(lease.lost)
        if not lease.alive:
            self._end(lease.result or lease.state, lease.id)

    def _not_there(self, error: Exception, lease: str) -> None:
        from hetero_agent.client.errors import NotFound  # noqa: PLC0415

        if isinstance(error, NotFound):
            self._end("gone", lease)

    def _lose(self, devices: Any) -> None:
        for device in devices:
            if device not in self._lost:
                self._lost.add(device)
                _say(f"device {device} was unplugged or lost its driver")

    def _end(self, result: str, lease: str) -> None:
        """The lease has ended.  If that follows from the command's own end, it is as it should be."""
        self._command.look()
        follows = result in (_OWN_END, "gone") if self._command.status is not None else result == _OWN_END
        if self._ended or (follows and not (self._inside and self._command.status is None)):
            return
        self._ended = result
        _say(f"the lease {short(lease)} ended: {result}")

    async def _last_look(self, client: Client, manifest: Manifest) -> None:
        """The command may have ended because the lease did, and been faster than the news."""
        from hetero_agent import names  # noqa: PLC0415
        from hetero_agent.client import HeteroError  # noqa: PLC0415

        if self._ended or not client.agent_present:
            return
        with contextlib.suppress(HeteroError, TimeoutError):
            async with asyncio.timeout(_LAST_QUESTION):
                lease = await client.lease(names.lease_path(manifest.lease))
                self._lose(lease.lost)
                if not lease.alive:
                    self._end(lease.result, lease.id)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"heteroctl: {printable(text, 400)}\n")
        sys.stderr.flush()
