"""The verb attach: devices for a service that starts, called by the service itself (ExecStartPre=+).

The lease belongs to this run of the unit and ends with it.  Which devices the unit may use is told to
the service manager, by its own SetUnitProperties, so that it stays so when that reads its files again.
"""

from __future__ import annotations

import argparse
import os
import pwd
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer, short
from hetero_agent.cli.verbs import Verbs, lease_options, request_options, seconds

if TYPE_CHECKING:
    from hetero_agent.client import Client
    from hetero_agent.client.manifest import Manifest
    from hetero_agent.client.systemd import ServiceManager

#: Seconds to wait for devices, such as those that the unit's last run had and that are being taken
#: back; less than a unit may take to start (TimeoutStartSec=, 90).
_WAIT: Final = 30.0

#: The cgroup of a user's own service manager (systemd, "user@UID.service").
_USER_MANAGER: Final = "/user@"

_BY_HAND: Final = "ExecStartPre=+/usr/bin/heteroctl attach ...: the + makes it root's"

Rules = list[tuple[str, str]]


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add("attach", "lease devices for a unit that starts (its ExecStartPre=+)", attach)
    parser.add_argument("--unit", required=True, help="the unit; %%n in its own file")
    request_options(parser, required=False)
    parser.add_argument("--lease", metavar="LEASE", help="allow the devices of this lease; nothing is leased")
    lease_options(parser, of_process=False)
    parser.add_argument("--env-file", metavar="PATH", help="write the lease's variables there")
    parser.add_argument(
        "--env-only",
        action="store_true",
        help="leave the unit's device rules alone: for containers",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=_WAIT,
        metavar="SECONDS",
        help=f"wait so long for devices to be free (default: {_WAIT:g})",
    )


async def attach(client: Client, args: argparse.Namespace, out: Printer) -> int:
    """Lease devices for a run of a unit, or take a lease that is there, and let the unit use them."""
    from hetero_agent.cli import envfile  # noqa: PLC0415
    from hetero_agent.cli.complaints import usage  # noqa: PLC0415
    from hetero_agent.cli.unitrun import of_manager, unit_name  # noqa: PLC0415
    from hetero_agent.client.systemd import ManagerError, ServiceManager  # noqa: PLC0415

    if bool(args.resource) == bool(args.lease):
        raise usage("either --resource or --lease")
    unit = unit_name(args.unit)
    _check_caller(unit)
    if args.env_file:
        envfile.remove(args.env_file)  # the last run's
    try:
        async with await ServiceManager.connect(client.address) as manager:
            manifest = await _attach(client, manager, args, unit)
    except ManagerError as error:
        raise of_manager(error) from error
    if out.as_json:
        out.document({"lease": manifest.lease, "unit": unit, "manifest": manifest.raw})
    else:
        out.line(f"{unit}: lease {short(manifest.lease)} of {' '.join(manifest.devices)}")
    return exitcodes.OK


async def _attach(client: Client, manager: ServiceManager, args: argparse.Namespace, unit: str) -> Manifest:
    """Do it all, or nothing.  Raises Complaint, HeteroError."""
    from hetero_agent.cli import envfile, forms  # noqa: PLC0415
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415

    if args.lease:
        if not (await client.lease(args.lease)).alive:
            raise Complaint(exitcodes.FAILURE, f"lease {args.lease} has ended", (), "", "ended")
        manifest = await client.manifest(args.lease)
    else:
        manifest = await _lease(client, manager, args, unit)
    try:
        if args.env_file:
            envfile.write(args.env_file, forms.shell(manifest, filtered=not args.env_only))
        if not args.env_only:
            await _allow(manager, unit, forms.allowed_devices(manifest))
    except BaseException:
        if args.env_file:
            envfile.remove(args.env_file)
        if not args.lease:
            await client.release(manifest.lease)
        raise
    return manifest


async def _lease(client: Client, manager: ServiceManager, args: argparse.Namespace, unit: str) -> Manifest:
    """Lease for this run of UNIT, in the name of its user.  Raises Complaint."""
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415
    from hetero_agent.cli.obtaining import obtain  # noqa: PLC0415
    from hetero_agent.client.systemd import SERVICE, UNIT  # noqa: PLC0415
    from hetero_agent.text import printable  # noqa: PLC0415

    service = await manager.properties(unit, SERVICE)
    if service["PrivateDevices"]:
        cause = f"{unit} has PrivateDevices=yes, so that no device node is in its /dev"
        raise Complaint(exitcodes.NEVER, cause, (), "take it out: attach lets it use its own only", "unit")
    uid = await _uid_of(manager, str(service["User"]))
    run = _own_run(unit) or bytes((await manager.properties(unit, UNIT))["InvocationID"]).hex()
    if args.label is None:
        args.label = printable(unit, 64)
    grant = await obtain(client, args, unit=unit, owner_uid=uid or None)
    # a service can be stopped and started anew while we wait: that run leases its own
    if (await client.binding(grant.lease)).get("invocation") != run:
        await client.release(grant.lease)
        raise Complaint(exitcodes.FAILURE, f"{unit} was started anew meanwhile", (), "", "unit")
    return grant.manifest


async def _uid_of(manager: ServiceManager, user: str) -> int:
    """Return the uid that the unit's processes have."""
    if not user:
        return 0
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return await manager.dynamic_uid(user)


async def _allow(manager: ServiceManager, unit: str, devices: Sequence[str]) -> None:
    """Let UNIT use DEVICES beside what its own files allow, and nothing else."""
    from hetero_agent.cli import envfile  # noqa: PLC0415
    from hetero_agent.client.systemd import SERVICE, Property  # noqa: PLC0415

    service = await manager.properties(unit, SERVICE)
    # what was set at run time stays until the next boot: of these, ours are known by our own record
    record = f"{envfile.DIRECTORY}/{unit}.allowed"
    before = _recorded(record)
    own = unit_rules(service, before)
    ours = [device for device in devices if (device, "rw") not in own]
    envfile.write(record, sorted({*before, *ours}))  # whichever of them we are killed with
    rules = [Property("DeviceAllow", "a(ss)", [])]
    rules.append(Property("DeviceAllow", "a(ss)", [*map(list, own), *([device, "rw"] for device in ours)]))
    if service["DevicePolicy"] == "auto":  # strict stays strict
        rules.append(Property("DevicePolicy", "s", "closed"))
    await manager.set_runtime(unit, rules)
    envfile.write(record, ours)


def unit_rules(service: Mapping[str, Any], ours: Sequence[str]) -> Rules:
    """Return the DeviceAllow= of a unit, by its properties, without OURS."""
    return [(path, rights) for path, rights in service["DeviceAllow"] if path not in ours]


def _recorded(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (pathlib costs startup)
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _check_caller(unit: str) -> None:
    """Raise Complaint if this can't work for who calls, or where."""
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415

    if _own_unit() == unit and _USER_MANAGER in _own_cgroup():
        cause = f"{unit} is a unit of a user's service manager, for which no kernel keeps it from other devices"
        step = "ExecStart=heteroctl run -r RESOURCE -- COMMAND there; or a unit of the system with User="
        raise Complaint(exitcodes.NEVER, cause, (), step, "user-manager")
    if os.geteuid() != 0:
        cause = "only root may lease for a unit and say what it may use"
        raise Complaint(exitcodes.NOT_AUTHORIZED, cause, (), _BY_HAND, "not-root")


def _own_run(unit: str) -> str:
    """The invocation id of the run of UNIT that this process is of, "" if of none (systemd.exec(5))."""
    return os.environ.get("INVOCATION_ID", "") if _own_unit() == unit else ""


def _own_unit() -> str:
    """The innermost unit that this process runs in."""
    return next((part for part in reversed(_own_cgroup().split("/")) if part.endswith(".service")), "")


def _own_cgroup() -> str:
    """This process's group in systemd's hierarchy, or in the only one (cgroups(7))."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            lines = file.read().splitlines()
    except OSError:
        return ""
    fields = [line.split(":", 2) for line in lines]
    named = [path for _, kind, path in fields if kind == "name=systemd"]
    return (named or [path for _, kind, path in fields if kind == ""] or [""])[0]
