"""The verbs on leases: allocate, confirm, manifest, release, explain."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer, short, until
from hetero_agent.cli.verbs import (
    Verbs,
    binding_of,
    binding_options,
    lease_of,
    lease_options,
    positive,
    request_of,
    request_options,
    whole,
)

if TYPE_CHECKING:
    from hetero_agent.client import Client


#: The forms of a manifest.
FORMATS = ("env", "json", "cdi", "podman", "systemd")


def register(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = verbs.add("allocate", "lease devices, to be confirmed, used and released by hand", allocate)
    request_options(parser)
    lease_options(parser)
    binding_options(parser)
    parser.add_argument("--confirm", action="store_true", help="in use at once; no confirm needed")
    parser.add_argument(
        "--confirm-within", type=positive, metavar="SECONDS", help="ends unless confirmed in time (at most 30)"
    )
    parser.add_argument("--owner-uid", type=uid, metavar="UID", help="lease for this user (root only)")
    parser.add_argument(
        "--request-id", metavar="ID", help="the same id never leases twice: repeat a call whose answer was lost"
    )

    parser = verbs.add("confirm", "take a lease into use, bind it, or renew it", confirm)
    parser.add_argument("lease", metavar="LEASE")
    binding_options(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")

    parser = verbs.add("manifest", "print what a lease gives, in the form that its user reads", manifest)
    parser.add_argument("lease", metavar="LEASE")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="env",
        help="env (default): for sh and EnvironmentFile=; json; cdi: a specification for container runtimes;"
        " podman: arguments of run; systemd: a drop-in",
    )

    parser = verbs.add("release", "give leases back", release)
    parser.add_argument("leases", nargs="*", metavar="LEASE")
    parser.add_argument("--all", action="store_true", help="all of yours; as root, all there are")

    parser = verbs.add("explain", "say what allocate would do now, device by device", explain)
    request_options(parser)


def uid(text: str) -> int:
    """Read a user id."""
    value = whole(text)
    if value is None or not 0 <= value < 2**32 - 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a uid")
    return value


async def allocate(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Lease devices and print what is needed to use them."""
    from hetero_agent.cli import complaints  # noqa: PLC0415
    from hetero_agent.client import HeteroError, numbering  # noqa: PLC0415

    request = request_of(args)
    try:
        grant = await client.allocate(
            args.resource,
            args.count,
            request_id=args.request_id,
            confirm=args.confirm or None,
            confirm_within=args.confirm_within,
            owner_uid=args.owner_uid,
            **request,
            **lease_of(args),
            **binding_of(args),
        )
    except HeteroError as error:
        raise await complaints.about_request(client, error, args.resource, args.count, request) from error
    manifest = await numbering.here(client, grant.manifest)
    if out.as_json:
        out.document(
            {
                "lease": grant.lease,
                "path": grant.path,
                "request_id": grant.request_id,
                "manifest": manifest.raw,
                "environment": manifest.variables(),
            }
        )
        return exitcodes.OK
    out.fields(
        [
            ("lease", grant.lease),
            ("devices", " ".join(manifest.devices)),
            *((f"node {role}", path) for _, path, role, *_ in manifest.nodes),
            *(("environment", f"{key}={value}") for key, value in sorted(manifest.variables().items())),
        ]
    )
    if manifest.confirm_by_boottime:
        left = until(manifest.confirm_by_boottime)
        out.line(f"confirm within {left}: heteroctl confirm {short(grant.lease)} --pid PID")
    return exitcodes.OK


async def confirm(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Take a lease into use."""
    path = await client.lease_path(args.lease)
    await client.confirm(path, **binding_of(args))
    if args.quiet:
        return exitcodes.OK
    lease = await client.lease(path)
    if out.as_json:
        out.document(lease)
    else:
        end = f", ends in {until(lease.deadline_boottime)} unless confirmed again" if lease.deadline else ""
        out.line(f"lease {short(lease.id)} is {lease.state}{end}")
    return exitcodes.OK


async def manifest(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Print the manifest of a lease."""
    from hetero_agent.cli import forms  # noqa: PLC0415
    from hetero_agent.client import numbering  # noqa: PLC0415

    found = await client.manifest(args.lease)
    if args.format == "json" or (out.as_json and args.format == "env"):
        out.document(found.raw)
        return exitcodes.OK
    if args.format == "cdi":
        out.document(forms.cdi(found, client.address))
        return exitcodes.OK
    if args.format == "env":
        found = await numbering.here(client, found)
    make = {"env": forms.shell, "podman": forms.podman, "systemd": forms.systemd}[args.format]
    lines = make(found)
    if out.as_json:
        out.document(lines)
    else:
        for line in lines:
            out.line(line)
    return exitcodes.OK


async def release(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Give leases back."""
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415
    from hetero_agent.client.results import lease_of as lease_id_of  # noqa: PLC0415

    if bool(args.leases) == args.all:
        what = "leases or --all, not both" if args.all else "no lease to release"
        raise Complaint(exitcodes.USAGE, what, (), "heteroctl release LEASE ..., or --all", "usage")
    given = args.leases
    if args.all:
        user = os.geteuid()
        given = [one.path for one in await client.leases() if one.alive and user in (0, one.uid)]
    released = []
    for path in [await client.lease_path(name) for name in given]:  # all, before one is released
        released.append({"lease": lease_id_of(path), "changed": await client.release(path)})
    if out.as_json:
        out.document(released)
        return exitcodes.OK
    if not released:
        out.line("no leases to release")
    for one in released:
        lease = short(str(one["lease"]))
        out.line(f"lease {lease} released" if one["changed"] else f"lease {lease} had ended already")
    return exitcodes.OK


async def explain(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Say what allocate would do now; the exit code is the one that it would have."""
    answer = await client.explain(args.resource, args.count, **request_of(args))
    code = {"now": exitcodes.OK, "never": exitcodes.NEVER}.get(answer.verdict, exitcodes.BUSY)
    if out.as_json:
        out.document(answer)
        return code
    out.fields(
        [
            ("verdict", answer.verdict),
            ("because", answer.text),
            ("would take", " ".join(answer.chosen)),
            ("note", answer.note),
        ]
    )
    if answer.devices:
        out.line()
        out.table(
            ("DEVICE", "STATE", "ELIGIBLE", "REASON"),
            [(one.device, one.state, "yes" if one.eligible else "no", one.reason) for one in answer.devices],
        )
    return code
