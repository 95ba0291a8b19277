"""The verb watch: the agent's signals as lines, until interrupted."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer, jsonable, short
from hetero_agent.cli.verbs import Verbs, positive
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client import Client
    from hetero_agent.client.events import Event


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add("watch", "print what happens as it happens", watch)
    parser.add_argument(
        "-d", "--device", action="append", dest="devices", default=[], metavar="DEVICE", help="only this device"
    )
    parser.add_argument("--reports", action="store_true", help="the counts of each report too")
    parser.add_argument("-n", "--max", type=positive, help="end after this many events")


async def watch(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Print events until interrupted.  A lost agent is waited for."""
    from hetero_agent.client import events  # noqa: PLC0415
    from hetero_agent.client.results import device_of  # noqa: PLC0415

    await client.status()  # an agent that is not there is said at once; one that goes is waited for
    wanted = [device_of(await client.device_path(name)) for name in args.devices]
    kinds: tuple[type[Event], ...] = (
        events.StateChanged,
        events.InterfacesAdded,
        events.InterfacesRemoved,
        events.HealthEvent,
        events.Conflict,
        events.LeaseEnded,
        events.OrphanFound,
    )
    if args.reports:
        kinds += (events.Report,)
    shown = 0
    async with client.watch(*kinds) as news:
        async for event in news:
            if wanted and not _about(event, wanted):
                continue
            _print(event, out)
            out.flush()
            shown += 1
            if shown == args.max:
                break
    return exitcodes.OK


def _about(event: Event, wanted: list[str]) -> bool:
    from hetero_agent.client import events  # noqa: PLC0415
    from hetero_agent.client.results import device_of  # noqa: PLC0415

    if isinstance(event, (events.AgentChanged, events.Missed)):
        return True
    path = getattr(event, "path", "")
    return (device_of(path) if path else getattr(event, "device", "")) in wanted


def _print(event: Event, out: Printer) -> None:
    if out.as_json:
        import json  # noqa: PLC0415

        document = {"event": type(event).__name__, "time": time.time_ns() // 1000, **jsonable(event)}
        out.line(json.dumps(document))
        return
    out.line(f"{time.strftime('%H:%M:%S')}  {_sentence(event)}")


def _sentence(event: Event) -> str:
    from hetero_agent.client import events  # noqa: PLC0415
    from hetero_agent.client.results import device_of, lease_of  # noqa: PLC0415

    text: str
    match event:
        case events.AgentChanged(owner=owner):
            text = f"agent is on the bus as {owner}" if owner else "agent is gone; waiting for it"
        case events.Missed(count=count):
            text = f"{count} events were dropped: this reader is too slow"
        case events.StateChanged():
            text = f"{event.device}  {event.from_state} -> {event.to_state}" + _because(event.reason)
        case events.InterfacesAdded(path=path, properties=properties):
            lease = lease_of(path)
            text = f"lease {short(lease)} granted" if lease else f"{device_of(path)}  appeared"
            text += _devices(properties) if lease else ""
        case events.InterfacesRemoved(path=path):
            lease = lease_of(path)
            text = f"lease {short(lease)} is gone" if lease else f"{device_of(path)}  is gone"
        case events.HealthEvent():
            text = f"{event.device}  is {event.health}" + _because(event.reason)
            text += f", in lease {short(event.lease)}" if event.lease else ""
        case events.Conflict():
            text = f"{event.device}  conflict {event.kind}: {event.theirs}, but {event.ours}"
        case events.LeaseEnded():
            text = f"lease {short(event.lease)} ended: {event.result}"
        case events.OrphanFound():
            text = f"{event.device}  held by {event.count} processes outside any lease"
        case events.Report(resources=resources):
            counts = ", ".join(
                f"{name} {count.get('allocatable', 0)} of {count.get('total', 0)}"
                for name, count in sorted(resources.items())
            )
            text = f"report {event.generation}: {counts or 'nothing'}"
            text += "" if event.complete else " (not complete)"
        case _:
            text = type(event).__name__
    return printable(text, 400)


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _devices(properties: Any) -> str:
    from hetero_agent.client.results import device_of  # noqa: PLC0415

    for values in properties.values():
        if "Devices" in values:
            return ": " + " ".join(device_of(path) for path in values["Devices"])
    return ""
