"""The verb hold: a lease for others, as long as this process lives (hetero-lease@.service).

The lease is bound to the connection, not to a process: whoever of its user opens the devices is of the
lease, in whatever unit it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pwd
import signal
import socket
from typing import TYPE_CHECKING, Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer, short
from hetero_agent.cli.verbs import Verbs, lease_options, request_options, seconds, whole

if TYPE_CHECKING:
    from hetero_agent.client import Client
    from hetero_agent.client.manifest import Manifest

#: What ends it as it should.
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add("hold", "hold a lease for others until ended by a signal", hold)
    request_options(parser)
    lease_options(parser, of_process=False)
    parser.add_argument(
        "--owner", type=account, metavar="USER", help="lease for this user, by name or uid (root only)"
    )
    parser.add_argument("--env-file", metavar="PATH", help="write the lease's variables there meanwhile")
    parser.add_argument(
        "--wait", type=seconds, default=0.0, metavar="SECONDS", help="wait so long for devices to be free"
    )


def account(text: str) -> int:
    """Read a user's name or uid."""
    uid = whole(text)
    if uid is None:
        try:
            return pwd.getpwnam(text).pw_uid
        except KeyError:
            raise argparse.ArgumentTypeError(f"there is no user {text!r} here") from None
    if not 0 <= uid < 2**32 - 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a uid")
    return uid


async def hold(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Lease devices, say that they are there, release them at the end."""
    from hetero_agent.cli import envfile, forms  # noqa: PLC0415
    from hetero_agent.cli.obtaining import obtain  # noqa: PLC0415
    from hetero_agent.cli.vigil import Vigil  # noqa: PLC0415
    from hetero_agent.client import HeteroError  # noqa: PLC0415

    ended = asyncio.Event()
    for number in _ENDING:
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    if args.env_file:
        envfile.remove(args.env_file)
    obtaining = asyncio.create_task(obtain(client, args, connection=True, owner_uid=args.owner))
    ending = asyncio.create_task(ended.wait())
    await asyncio.wait({obtaining, ending}, return_when=asyncio.FIRST_COMPLETED)
    if not obtaining.done():
        obtaining.cancel()
        return exitcodes.OK
    manifest = obtaining.result().manifest
    try:
        if args.env_file:
            envfile.write(args.env_file, forms.shell(manifest))
        async with Vigil(client, manifest, lambda: None, ours=False) as vigil:
            _print(out, args, manifest)
            notify(f"READY=1\nSTATUS=Lease {short(manifest.lease)}: {' '.join(manifest.devices)}")
            await asyncio.wait(
                {ending, asyncio.create_task(vigil.ended.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
    finally:
        ending.cancel()
        if args.env_file:
            envfile.remove(args.env_file)
    if vigil.result:
        return exitcodes.LEASE_LOST
    notify("STOPPING=1")
    with contextlib.suppress(HeteroError):  # it ends with our connection in any case
        await client.release(manifest.lease)
    return exitcodes.OK


def _print(out: Printer, args: argparse.Namespace, manifest: Manifest) -> None:
    if out.as_json:
        out.document({"lease": manifest.lease, "env_file": args.env_file, "manifest": manifest.raw})
    else:
        out.line(f"lease {short(manifest.lease)} of {' '.join(manifest.devices)} is held")
    out.flush()


def notify(text: str) -> None:
    """Tell the service manager, if there is one (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # if it does not get there, the start times out and says so
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.connect("\0" + address[1:] if address.startswith("@") else address)
        one.send(text.encode("ascii", "replace"))
