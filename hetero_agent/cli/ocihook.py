"""The verb oci-hook: called by a container runtime as the createRuntime hook of a lease's CDI
specification (OCI runtime-spec, config.md, "POSIX-platform Hooks").

The container's processes do not exist yet, but the one that is to become the first does: the lease
is confirmed with its pid, so that the container's end gives the devices back.  If that fails, the
runtime gives up the container and shows what we say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import Printer
from hetero_agent.cli.verbs import Verbs

if TYPE_CHECKING:
    from hetero_agent.client import Client

#: Seconds that the agent has to answer.  With those for the connection, fewer than the runtime waits
#: (cdispec.HOOK_TIMEOUT), so that it is we who say what is wrong.
_ANSWER: Final = 20.0

#: Bytes of a state: annotations are in it, which may be many.
_LARGEST: Final = 1 << 20


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add("oci-hook", "confirm a lease with a container (called by its runtime)", oci_hook)
    parser.add_argument("lease", metavar="LEASE")


async def oci_hook(client: Client, args: argparse.Namespace, _: Printer) -> int:
    """Confirm the lease with the container's first process."""
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415

    # without standard input (``<&-``) there is no stream
    pid = container_pid(sys.stdin.buffer.read(_LARGEST) if sys.stdin is not None else b"")
    try:
        async with asyncio.timeout(_ANSWER):
            await _refuse_if_lost(client, args.lease)
            await client.confirm(args.lease, pid=pid)
    except TimeoutError as error:
        cause = f"the agent does not answer within {_ANSWER:g} s"
        step = "systemctl status hetero-agent; journalctl -u hetero-agent says what it is doing"
        raise Complaint(exitcodes.UNREACHABLE, cause, (), step, "Timeout") from error
    return exitcodes.OK


async def _refuse_if_lost(client: Client, name: str) -> None:
    """Raise Complaint if a device of the lease was unplugged: what is found under the names of its
    nodes by now is another, or the same in the hands of another lease."""
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415
    from hetero_agent.client.errors import NotFound  # noqa: PLC0415

    try:
        lease = await client.lease(name)
    except NotFound:
        return  # confirm knows what became of it
    if lease.lost:
        cause = f"the lease has lost {', '.join(lease.lost)}: unplugged, or without its driver"
        raise Complaint(exitcodes.LEASE_LOST, cause, (), "release it and allocate anew", "LeaseLost")


def container_pid(data: bytes) -> int:
    """Return the pid in a container's state (OCI runtime-spec, runtime.md, "State").  Raises
    Complaint."""
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415

    state: Any
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        state = None
    pid = state.get("pid") if isinstance(state, dict) else None
    # 0 is a virtual machine's, whose processes are none of this host's
    if type(pid) is not int or pid <= 0:
        cause = "no container's state with a pid on standard input"
        step = "container runtimes call this; with a pid at hand: heteroctl confirm LEASE --pid PID"
        raise Complaint(exitcodes.USAGE, cause, (), step, "usage")
    return pid
