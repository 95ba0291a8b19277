"""The verb that shows which processes have devices open."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer, ago, jsonable, short, user_name
from hetero_agent.cli.verbs import Verbs
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client import Client
    from hetero_agent.client.results import Holder

#: Characters of a container's id that tables show, as container tools do.
_SHORT_CONTAINER = 12


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add("holders", "list the processes that have devices open", list_holders)
    parser.add_argument("devices", nargs="+", metavar="DEVICE")
    parser.add_argument("-e", "--evidence", action="store_true", help="say how each of them uses the device")


async def list_holders(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """List the processes that have the devices open."""
    rows = [(device, holder) for device in args.devices for holder in await client.holders(device)]
    if out.as_json:
        out.document(
            [{"device": device, "user": user_name(holder.uid), **jsonable(holder)} for device, holder in rows]
        )
        return exitcodes.OK
    if not rows:
        out.line("nobody has it open" if len(args.devices) == 1 else "nobody has them open")
        return exitcodes.OK
    out.table(
        (
            "DEVICE",
            "PID",
            "USER",
            "ROLE",
            "COMMAND",
            "EXECUTABLE",
            "UNIT",
            "CONTAINER",
            "SINCE",
            "MAPPED",
            "LEASE",
        ),
        [
            (
                device,
                holder.pid,
                user_name(holder.uid),
                holder.role,
                holder.comm,
                holder.exe,
                holder.unit,
                _container(holder.container),
                ago(holder.since),
                "mapped" if holder.mapped else "",
                short(holder.lease),
            )
            for device, holder in rows
        ],
    )
    if args.evidence:
        for device, holder in rows:
            out.line()
            out.line(f"{printable(device)}, pid {holder.pid}:")
            for name, text in _evidence(holder):
                out.line(f"  {name}: {printable(text, 400)}")
    return exitcodes.OK


def _evidence(holder: Holder) -> list[tuple[str, str]]:
    """What shows how HOLDER uses the device; names it doesn't know are the agent's own."""
    pod = [("pod", holder.pod)] if holder.pod else []
    shown = [(printable(name, 64), text) for name, text in sorted(holder.evidence.items())]
    return pod + shown or [("evidence", "none")]


def _container(name: str) -> str:
    runtime, _, identifier = name.partition(":")
    return f"{runtime}:{identifier[:_SHORT_CONTAINER]}" if len(identifier) == 64 else name
