"""The verb doctor: names what is wrong and what to do about it."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer
from hetero_agent.cli.verbs import Verbs
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.cli.hostchecks import Finding
    from hetero_agent.client import Client
    from hetero_agent.client.results import Device, Snapshot, Status

#: Share of a limit in use from which on it is worth a warning.
_NEARLY: Final = 0.9

#: Devices that one finding names, and questions to the agent at once.
_NAMED: Final = 8
_AT_ONCE: Final = 8

#: A resource name that every agent takes as well-formed and no host has.
_NO_RESOURCE: Final = "heteroctl.invalid/doctor"

#: What the agent can be asked about, in words.
_RIGHTS: Final = {
    "allocate": "lease devices",
    "release-others": "end others' leases",
    "cordon": "cordon devices",
    "reap": "see and end holders",
}


def register(verbs: Verbs) -> None:
    """Add the verb."""
    verbs.add_alone("doctor", "look for what is wrong, and say what to do", doctor)


def doctor(args: argparse.Namespace, out: Printer) -> int:
    """Look at everything; 0 if nothing is wrong."""
    findings = asyncio.run(_examine(args.bus))
    wrong = [one for one in findings if one.level == "wrong"]
    if out.as_json:
        out.document({"well": not wrong, "findings": findings})
    else:
        for one in findings:
            out.line(f"{out.paint(f'{one.level:<5}'.strip()):<5}  {one.subject}: {printable(one.text, 400)}")
            if one.next:
                out.line(f"       next: {printable(one.next, 400)}")
        out.line("nothing is wrong" if not wrong else f"{len(wrong)} things are wrong")
    return exitcodes.FAILURE if wrong else exitcodes.OK


async def _examine(bus: str | None) -> list[Finding]:
    from hetero_agent.cli import hostchecks  # noqa: PLC0415
    from hetero_agent.cli.complaints import next_step  # noqa: PLC0415
    from hetero_agent.cli.hostchecks import Finding  # noqa: PLC0415
    from hetero_agent.client import Client, HeteroError, NoBus  # noqa: PLC0415

    findings = [hostchecks.clock(), hostchecks.udev()]
    try:
        async with await Client.connect(bus) as client:
            findings.append(Finding("ok", "bus", client.address))
            if client.agent_present:
                await _agent(client, findings)
            else:
                findings.append(
                    Finding("wrong", "agent", "it is not on the bus", "systemctl start hetero-agent")
                )
                findings.append(hostchecks.policy())
    except NoBus as error:
        findings.append(Finding("wrong", "bus", error.text, next_step(error)))
    except HeteroError as error:
        findings.append(Finding("wrong", "agent", error.text, next_step(error)))
    on_host = (hostchecks.unit(), hostchecks.helper(), hostchecks.network())
    findings += [found for found in on_host if found is not None]
    findings += hostchecks.pci_without_driver()
    findings += hostchecks.directories()
    return findings


async def _agent(client: Client, findings: list[Finding]) -> None:
    """Add what the agent itself can tell; that stays if it then tells no more."""
    from hetero_agent.cli.hostchecks import Finding  # noqa: PLC0415

    status = await client.status()
    findings.append(Finding("ok", "agent", f"version {status.version}, epoch {status.epoch}"))
    if not status.ready:
        findings.append(
            Finding(
                "wrong",
                "agent",
                "it has not seen all devices yet; nothing can be leased",
                "wait a few seconds; if it stays so, journalctl -u hetero-agent says what it waits for",
            )
        )
    findings += _limits(status)
    findings += await _rights(client)
    snapshot = await client.snapshot()
    findings += _devices(snapshot)
    findings += await _nodes(client, snapshot)


def _limits(status: Status) -> list[Finding]:
    from hetero_agent.cli.hostchecks import Finding  # noqa: PLC0415

    return [
        Finding(
            "wrong",
            "limits",
            f"{name} are nearly used up: {used} of {most}",
            "release what is done (heteroctl leases), or raise [limits] in /etc/hetero-agent/hetero-agent.conf",
        )
        for name, (used, most) in sorted(status.limits.items())
        if used is not None and most and used >= most * _NEARLY
    ]


async def _rights(client: Client) -> list[Finding]:
    """What this caller may, by uid, groups and polkit."""
    from hetero_agent.cli.complaints import next_step  # noqa: PLC0415
    from hetero_agent.cli.hostchecks import Finding  # noqa: PLC0415
    from hetero_agent.client.errors import AgentError, NotAuthorized  # noqa: PLC0415

    try:
        answers = {what: await client.can(what) for what in _RIGHTS}
    except AgentError as error:
        return [Finding("wrong", "rights", error.text, next_step(error) or "systemctl status polkit")]
    step = next_step(NotAuthorized(""))
    match answers.pop("allocate"):
        case "yes":
            findings = [Finding("ok", "rights", "you may lease devices")]
        case "challenge":
            how = "you may lease devices once you have authenticated"
            findings = [Finding("note", "rights", how, step)]
        case _:
            why = ""
            try:
                await client.explain(_NO_RESOURCE, 1)
            except AgentError as error:
                why = f": {error.text}"
            findings = [Finding("wrong", "rights", f"you may not lease devices{why}", step)]
    for answer, how in (("yes", "you may"), ("challenge", "once you have authenticated you may")):
        some = [_RIGHTS[what] for what, one in answers.items() if one == answer]
        if some:
            findings.append(Finding("ok", "rights", f"{how} {', '.join(some)}"))
    return findings


def _devices(snapshot: Snapshot) -> list[Finding]:
    from hetero_agent.cli import hostchecks  # noqa: PLC0415
    from hetero_agent.cli.hostchecks import Finding  # noqa: PLC0415

    if not snapshot.devices:
        there = hostchecks.pci_accelerators()
        if not snapshot.complete:
            why, step = "the agent is still looking", "try again in a few seconds"
        elif there:
            why = f"the PCI bus has {there} accelerators, but no profile takes them"
            step = "add a profile in /etc/hetero-agent/profiles.d, or load the drivers named below"
        else:
            why = "there is no accelerator on the PCI bus, and no provider reports any"
            step = "is the card seated, passed through, or its provider (simulator) running?"
        return [Finding("wrong", "devices", f"none: {why}", step)]
    findings = [Finding("ok", "devices", f"{len(snapshot.devices)} known")]
    by_state: dict[str, list[Device]] = {}
    for device in snapshot.devices:
        by_state.setdefault(device.state, []).append(device)
    for state, level, step in (
        ("faulty", "wrong", "heteroctl history DEVICE says since when; heteroctl holders DEVICE who has it"),
        ("lost", "wrong", "it was unplugged or lost its driver while leased: look at the kernel log"),
        ("probing", "wrong", "systemctl status hetero-agent says why nobody can tell who has it open"),
        ("occupied", "wrong", "heteroctl holders DEVICE names who uses it without a lease"),
        ("offline", "note", ""),
    ):
        some = by_state.get(state, [])
        if some:
            shown = ", ".join(f"{one.id} ({one.reason or 'no reason given'})" for one in some[:_NAMED])
            more = f" and {len(some) - _NAMED} more" if len(some) > _NAMED else ""
            findings.append(Finding(level, state, f"{len(some)}: {shown}{more}", step))
    return findings


async def _nodes(client: Client, snapshot: Snapshot) -> list[Finding]:
    """The nodes that are a device's own, and who can open them without a lease."""
    from hetero_agent.cli import hostchecks  # noqa: PLC0415
    from hetero_agent.cli.complaints import next_step  # noqa: PLC0415
    from hetero_agent.cli.hostchecks import Finding  # noqa: PLC0415
    from hetero_agent.client.errors import AgentError, CallTimeout, NotFound  # noqa: PLC0415

    free = asyncio.Semaphore(_AT_ONCE)

    async def look(device: Device) -> list[Finding]:
        async with free:
            try:
                nodes = await client.nodes(device.path)
                access = await client.access(device.path)
            except NotFound:
                return []  # it is gone meanwhile
            except (AgentError, CallTimeout) as error:
                return [Finding("wrong", "access", f"{device.id}: {error.text}", next_step(error))]
        looked = [hostchecks.node(device.id, node.path) for node in nodes if node.role == "own"]
        remarks = [Finding(level, "access", text) for node in access for level, text in node.remarks]
        return [*(one for one in looked if one is not None), *remarks]

    found = await asyncio.gather(*(look(device) for device in snapshot.devices))
    # the parts of a card share nodes
    return list(dict.fromkeys(one for some in found for one in some))
