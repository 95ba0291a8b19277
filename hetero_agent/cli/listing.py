"""The verbs that show: list, status, show, leases, history, version."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import hetero_agent
from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer, ago, group_name, jsonable, moment, short, span, until, user_name
from hetero_agent.cli.verbs import Verbs, positive

if TYPE_CHECKING:
    from hetero_agent.client import Client
    from hetero_agent.client.results import Device, Lease, NodeAccess

STATES = ("probing", "idle", "allocating", "in-use", "reclaiming", "occupied", "faulty", "offline", "lost")


def register(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = verbs.add("list", "list the devices", list_devices)
    parser.add_argument("-r", "--resource", help="only devices of this resource")
    parser.add_argument("-s", "--state", choices=STATES, help="only devices in this state")

    verbs.add("status", "show the agent, its resources and its limits", status)

    parser = verbs.add("show", "show devices and leases in detail", show)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a device or a lease")

    parser = verbs.add("leases", "list the leases", list_leases)
    parser.add_argument("-r", "--resource", help="only leases of this resource")
    parser.add_argument("--mine", action="store_true", help="only your own")

    parser = verbs.add("history", "list the last transitions of a device", history)
    parser.add_argument("device", metavar="DEVICE")
    parser.add_argument("-n", "--max", type=positive, default=20, help="at most this many (default: 20)")

    verbs.add_alone("version", "show the versions of heteroctl and of the agent", version)


def as_default(args: argparse.Namespace) -> None:
    """Make ARGS those of ``list``."""
    args.handler = list_devices
    args.connects = True
    args.resource = args.state = None


async def list_devices(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """List the devices, one a line."""
    snapshot = await client.snapshot()
    devices = [
        device
        for device in snapshot.devices
        if (not args.resource or device.resource == args.resource)
        and (not args.state or device.state == args.state)
    ]
    if out.as_json:
        out.document(
            {
                "epoch": snapshot.epoch,
                "generation": snapshot.generation,
                "complete": snapshot.complete,
                "devices": devices,
            }
        )
        return exitcodes.OK
    if not devices:
        _none(out, snapshot.complete, bool(snapshot.devices))
        return exitcodes.OK
    out.table(
        ("DEVICE", "RESOURCE", "STATE", "HEALTH", "LEASE", "MODEL", "SINCE", "REASON"),
        [
            (
                device.id,
                device.resource,
                device.state,
                device.health,
                short(device.lease),
                device.model,
                ago(device.since),
                _reason(device),
            )
            for device in devices
        ],
    )
    return exitcodes.OK


def _none(out: Printer, complete: bool, filtered: bool) -> None:
    if filtered:
        out.line("no such devices; heteroctl list shows all")
    elif not complete:
        out.line("no devices yet: the agent is still looking")
    else:
        out.line("no devices; heteroctl doctor says why")


def _reason(device: Device) -> str:
    parts = [device.reason]
    if device.cordoned and "cordon" not in device.reason:
        parts.append("cordoned")
    if device.blocked_by:
        parts.append("blocked by " + " ".join(device.blocked_by))
    return ", ".join(part for part in parts if part)


async def status(client: Client, _args: argparse.Namespace, out: Printer) -> int:
    """Show the agent at a glance."""
    got = await client.status()
    if out.as_json:
        out.document(got)
        return exitcodes.OK
    out.fields(
        [
            ("agent", got.version),
            ("ready", "yes" if got.ready else "no, still looking for devices"),
            ("epoch", got.epoch),
            ("generation", got.generation),
            *((_spaced(name), span(value)) for name, value in got.durations.items()),
        ]
    )
    if got.resources:
        used = [state for state in STATES if any(counts.get(state) for counts in got.resources.values())]
        out.line()
        out.table(
            ("RESOURCE", "TOTAL", "ALLOCATABLE", *(state.upper() for state in used)),
            [
                (
                    name,
                    counts.get("total", 0),
                    counts.get("allocatable", 0),
                    *(counts.get(state, 0) for state in used),
                )
                for name, counts in sorted(got.resources.items())
            ],
        )
    out.line()
    out.table(
        ("LIMIT", "USED", "MOST"),
        [(_spaced(name), used, most) for name, (used, most) in sorted(got.limits.items())],
    )
    return exitcodes.OK


def _spaced(name: str) -> str:
    """``MaxLeases`` as ``max leases``."""
    return "".join(" " + char.lower() if char.isupper() else char for char in name).strip()


async def show(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Show devices and leases in detail."""
    from hetero_agent import names  # noqa: PLC0415
    from hetero_agent.client.errors import InvalidArgument, NotFound  # noqa: PLC0415

    documents = []
    for number, name in enumerate(args.names):
        if number and not out.as_json:
            out.line()
        if not name.startswith(names.LEASES + "/"):
            try:
                device = await client.device(name)
            except NotFound:
                if name.startswith("/"):
                    raise
            else:
                documents.append(await _show_device(client, device, out))
                continue
        try:
            lease = await client.lease(name)
        except (NotFound, InvalidArgument) as error:
            if isinstance(error, InvalidArgument) and "stands for" in error.text:
                raise
            raise NotFound(f"no device or lease {name!r}") from error
        documents.append(await _show_lease(client, lease, out))
    if out.as_json:
        out.document(documents)
    return exitcodes.OK


async def _show_device(client: Client, device: Device, out: Printer) -> dict[str, object]:
    from hetero_agent.client.errors import AgentError, CallTimeout  # noqa: PLC0415

    nodes = await client.nodes(device.path)
    try:
        access = await client.access(device.path)
    except (AgentError, CallTimeout):
        access = ()  # a file system hangs, or the agent is older than this; doctor says what it is
    if not out.as_json:
        out.fields(
            [
                ("device", device.id),
                ("aliases", " ".join(device.aliases)),
                ("resource", device.resource),
                ("state", device.state),
                ("since", f"{moment(device.since)} ({ago(device.since)})" if device.since else ""),
                ("reason", device.reason),
                ("health", device.health),
                ("cordoned", _cordon(device)),
                ("blocked by", " ".join(device.blocked_by)),
                ("lease", device.lease),
                ("vendor", device.vendor),
                ("model", device.model),
                ("driver", device.driver),
                ("numa nodes", " ".join(map(str, device.numa_nodes))),
                ("part of", device.parent),
                ("source", device.source),
                ("sysfs", device.sysfs),
                ("stable id", "" if device.stable_id else "no"),
                ("granted", f"{device.allocation_count} times"),
                *((f"attribute {key}", value) for key, value in sorted(device.attributes.items())),
                *((f"node {node.role}", node.path) for node in nodes),
                *((f"access {node.path}", _who_may(node)) for node in access),
                ("object", device.path),
            ]
        )
    return {"kind": "device", **jsonable(device), "nodes": jsonable(nodes), "access": jsonable(access)}


def _who_may(node: NodeAccess) -> str:
    """Mode, owner and group as ls shows them, and the users that have an entry of their own."""
    users = (f"{user_name(uid)} {rights}" for uid, rights in sorted(node.entries.items()))
    return ", ".join((f"{node.mode & 0o777:04o} {user_name(node.uid)}:{group_name(node.gid)}", *users))


def _cordon(device: Device) -> str:
    """Why, by whom and since when a device is cordoned."""
    if not device.cordon:
        return "yes" if device.cordoned else ""
    uid, since = device.cordon.get("uid", 0), device.cordon.get("since", 0)
    card = f", with its card {device.cordon['card']}" if "card" in device.cordon else ""
    return f"{device.cordon.get('reason', '')} (by {user_name(uid)}, {ago(since)}{card})"


async def _show_lease(client: Client, lease: Lease, out: Printer) -> dict[str, object]:
    from hetero_agent.client.errors import NotAuthorized, NotOwner  # noqa: PLC0415

    private: dict[str, object] = {}
    try:
        private["request"] = await client.request(lease.path)
        private["binding"] = await client.binding(lease.path)
        private["manifest"] = (await client.manifest(lease.path)).raw
    except (NotOwner, NotAuthorized):
        private = {}
    if not out.as_json:
        out.fields(
            [
                ("lease", lease.id),
                ("resource", lease.resource),
                ("devices", " ".join(lease.devices)),
                ("lost", " ".join(lease.lost)),
                ("state", lease.state),
                ("result", lease.result),
                ("owner uid", str(lease.uid)),
                ("client", lease.client),
                ("created", f"{moment(lease.created)} ({ago(lease.created)})"),
                ("ends in", until(lease.deadline_boottime)),
                *(
                    (f"{kind} {key}", value)
                    for kind in ("request", "binding")
                    for key, value in sorted(_mapping(private.get(kind)).items())
                ),
                *(
                    ("environment", f"{key}={value}")
                    for key, value in sorted(_mapping(_mapping(private.get("manifest")).get("env")).items())
                ),
                ("object", lease.path),
            ]
        )
    return {"kind": "lease", **jsonable(lease), **private}


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


async def list_leases(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """List the leases, one a line."""
    import os  # noqa: PLC0415

    found = [
        lease
        for lease in await client.leases()
        if (not args.resource or lease.resource == args.resource)
        and (not args.mine or lease.uid == os.getuid())
    ]
    if out.as_json:
        out.document(found)
    elif not found:
        out.line("no leases")
    else:
        out.table(
            ("LEASE", "RESOURCE", "STATE", "RESULT", "UID", "CLIENT", "AGE", "ENDS IN", "DEVICES"),
            [
                (
                    short(lease.id),
                    lease.resource,
                    lease.state,
                    lease.result,
                    lease.uid,
                    lease.client,
                    ago(lease.created),
                    until(lease.deadline_boottime),
                    " ".join(lease.devices),
                )
                for lease in found
            ],
        )
    return exitcodes.OK


async def history(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """List the last transitions of a device, oldest first."""
    rows = await client.history(args.device, args.max)
    if out.as_json:
        out.document(rows)
    elif not rows:
        out.line("nothing has happened to it since it appeared")
    else:
        out.table(
            ("TIME", "FROM", "TO", "TRIGGER", "REASON", "TOOK", "LEASE", "UID", "REQUEST"),
            [
                (
                    moment(row.get("time", 0)),
                    row.get("from", ""),
                    row.get("to", ""),
                    row.get("trigger", ""),
                    row.get("reason", ""),
                    span(row.get("took", 0)),
                    short(_lease(row.get("lease", ""))),
                    row.get("uid", ""),
                    row.get("request-id", ""),
                )
                for row in rows
            ],
        )
    return exitcodes.OK


def _lease(path: str) -> str:
    from hetero_agent.client.results import lease_of  # noqa: PLC0415

    return lease_of(path)


def version(args: argparse.Namespace, out: Printer) -> int:
    """Show both versions; an agent that can't be reached is said so and no failure."""
    import asyncio  # noqa: PLC0415

    agent, problem = asyncio.run(_agent_version(args.bus))
    if out.as_json:
        out.document({"heteroctl": hetero_agent.__version__, "agent": agent or None})
    else:
        out.line(f"heteroctl {hetero_agent.__version__}")
        out.line(f"agent {agent}" if agent else f"agent unknown: {problem}")
    return exitcodes.OK


async def _agent_version(bus: str | None) -> tuple[str, str]:
    from hetero_agent.client import Client, HeteroError  # noqa: PLC0415

    try:
        async with await Client.connect(bus) as client:
            return (await client.status()).version, ""
    except HeteroError as error:
        return "", error.text
