"""The administrator's verbs: cordon, uncordon, reap."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer, jsonable
from hetero_agent.cli.verbs import Verbs, positive
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client import Client


def register(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = verbs.add("cordon", "keep devices from being leased, over reboots too", cordon)
    parser.add_argument("devices", nargs="+", metavar="DEVICE")
    parser.add_argument("--reason", default="by heteroctl", help="why (default: by heteroctl)")

    parser = verbs.add("uncordon", "let devices be leased again", uncordon)
    parser.add_argument("devices", nargs="+", metavar="DEVICE")

    parser = verbs.add("reap", "end processes that hold a device", reap)
    parser.add_argument("device", metavar="DEVICE")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument(
        "--pid", type=positive, action="append", dest="pids", default=[], help="this holder (repeat for each)"
    )
    who.add_argument(
        "--all", action="store_true", help="all that heteroctl holders shows, but those of role system"
    )


async def cordon(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Cordon devices."""
    paths = [await client.device_path(device) for device in args.devices]  # all, before one is changed
    for path in paths:
        await client.cordon(path, args.reason)
    return await _devices(client, paths, out, "cordoned")


async def uncordon(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Uncordon devices."""
    from hetero_agent.client.errors import NotFound  # noqa: PLC0415

    paths, absent = [], []
    for device in args.devices:
        try:
            paths.append(await client.device_path(device))
        except NotFound:
            absent.append(device)
    # these first: if one of them is no device at all, nothing is changed for the others
    for device in (*absent, *paths):
        await client.uncordon(device)
    return await _devices(client, paths, out, "not cordoned any more", absent)


async def _devices(
    client: Client, devices: list[str], out: Printer, word: str, absent: Sequence[str] = ()
) -> int:
    found = [await client.device(device) for device in devices]
    if out.as_json:
        out.document([*jsonable(found), *({"id": one, "state": "", "cordoned": False} for one in absent)])
    else:
        for one in absent:
            out.line(f"{printable(one)} is {word} (not there)")
        for device in found:
            drain = ", offline once its lease has ended" if device.cordoned and device.lease else ""
            card = printable(device.cordon.get("card", ""))
            under = f"; its card {card} still is" if device.cordoned and card and word != "cordoned" else ""
            out.line(f"{printable(device.id)} is {word} ({device.state}{drain}){under}")
    return exitcodes.OK


async def reap(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """End holders of a device: the named ones that hold it now, each by pid and start time."""
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415

    path = await client.device_path(args.device)
    holders = [holder for holder in await client.holders(path) if holder.role != "system"]
    missing = [pid for pid in args.pids if pid not in {holder.pid for holder in holders}]
    if missing:
        raise Complaint(
            exitcodes.FAILURE,
            f"no holder of {printable(args.device)} has pid {', '.join(map(str, missing))}",
            tuple(f"pid {one.pid} {printable(one.comm, 32)} of uid {one.uid}" for one in holders),
            f"heteroctl holders {printable(args.device)} lists them",
        )
    chosen = [holder for holder in holders if args.all or holder.pid in args.pids]
    ended = await client.reap(path, [(holder.pid, holder.start) for holder in chosen]) if chosen else 0
    if out.as_json:
        out.document({"device": args.device, "named": jsonable(chosen), "ended": ended})
    else:
        out.line(f"{ended} of {len(chosen)} processes told to end" if chosen else "nobody has it open")
    return exitcodes.OK
