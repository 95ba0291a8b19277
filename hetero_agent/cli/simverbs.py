"""The verb sim: tells the simulator to add, remove and upset virtual devices.

It speaks to the simulator's own socket, which only the simulator's user can open: one JSON object
a line each way.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any

from hetero_agent import names
from hetero_agent.cli import exitcodes
from hetero_agent.cli.complaints import Complaint
from hetero_agent.cli.table import Printer
from hetero_agent.cli.verbs import Formatter, Verbs, positive, seconds, whole
from hetero_agent.text import printable

SOCKET_VARIABLE = "HETERO_SIM_SOCKET"

#: Seconds that the simulator has to answer, and the most that it may say.
_TIMEOUT = 25.0
_LARGEST = 16 << 20


def register(verbs: Verbs) -> None:
    """Add the verb with its own verbs."""
    parser = verbs.add_alone("sim", "add, remove and upset virtual devices", sim)
    parser.add_argument(
        "--socket",
        metavar="PATH",
        default=os.environ.get(SOCKET_VARIABLE) or names.SIM_SOCKET,
        help="the simulator's socket (default: $HETERO_SIM_SOCKET, else the service's)",
    )
    what = parser.add_subparsers(dest="action", required=True, metavar="ACTION", prog="heteroctl sim")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = what.add_parser(
            name, help=text, parents=[verbs.common], formatter_class=Formatter
        )
        return made

    add = action("add", "add a device")
    add.add_argument("id")
    add.add_argument("-r", "--resource", required=True, help="its resource name")
    add.add_argument("-n", "--count", type=positive, help="so many, numbered after the id")
    add.add_argument("--model", help="its model")
    add.add_argument("--memory", type=positive, metavar="BYTES", help="its memory")
    add.add_argument("--parent", metavar="ID", help="the card that it is a part of")
    add.add_argument("--numa", type=node, metavar="NODE", help="its NUMA node")
    add.add_argument("--serial", help="its serial number (default: made from the id)")

    action("remove", "take a device away, as if unplugged").add_argument("id")

    fail = action("fail", "make a device unhealthy")
    fail.add_argument("id")
    fail.add_argument("--reason", help="what is reported (default: simulated-fault)")

    recover = action("recover", "make a device healthy, end its hang")
    recover.add_argument("id", nargs="?", help="default: end the hang of the whole simulator")

    hang = action("hang", "report nothing of a device any more")
    hang.add_argument("id", nargs="?", help="default: report nothing at all")
    hang.add_argument("--seconds", type=seconds, help="for so long (default: until recover)")

    action("list", "list the virtual devices")


def node(text: str) -> int:
    """Read the number of a NUMA node."""
    value = whole(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a NUMA node")
    return value


def sim(args: argparse.Namespace, out: Printer) -> int:
    """Carry out one action."""
    fields = ("id", "resource", "count", "model", "memory", "parent", "numa", "serial", "reason", "seconds")
    given = {key: getattr(args, key, None) for key in fields}
    request = {"verb": args.action, **{key: value for key, value in given.items() if value is not None}}
    reply = _ask(args.socket, request)
    if not reply.pop("ok", False):
        raise Complaint(
            exitcodes.FAILURE,
            f"the simulator refuses: {printable(reply.get('error', 'no reason given'), 400)}",
            (),
            "heteroctl sim list shows its devices",
        )
    if out.as_json:
        out.document(reply)
        return exitcodes.OK
    devices = reply.get("devices")
    if args.action == "list" and isinstance(devices, list):
        _table(devices, out)
    else:
        named = devices if isinstance(devices, list) and devices else [getattr(args, "id", None) or "all"]
        out.line(f"{args.action}: {' '.join(printable(one, 80) for one in named)}")
    return exitcodes.OK


def _table(devices: list[Any], out: Printer) -> None:
    rows = [device for device in devices if isinstance(device, dict)]
    if not rows:
        out.line("no virtual devices")
        return
    heads = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], (dict, list))))
    out.table([head.upper() for head in heads], [[row.get(head, "") for head in heads] for row in rows])


def _ask(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send one request, return the reply.  Raises Complaint."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(_TIMEOUT)
            link.connect(path)
            link.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n") and len(answer) < _LARGEST:
                piece = link.recv(65536)
                if not piece:
                    break
                answer += piece
    except OSError as error:
        denied = isinstance(error, PermissionError)
        step = (
            "only the simulator's own user and root may"
            if denied
            else "is the simulator running? --socket or $HETERO_SIM_SOCKET names its socket"
            + ("" if Path(path).exists() else " (there is none at this path)")
        )
        raise Complaint(
            exitcodes.NOT_AUTHORIZED if denied else exitcodes.UNREACHABLE,
            f"no answer from the simulator at {printable(path)}: {printable(error.strerror or error)}",
            (),
            step,
        ) from error
    try:
        reply = json.loads(answer)
    except ValueError as error:
        raise Complaint(exitcodes.FAILURE, "the simulator's answer is not JSON") from error
    if not isinstance(reply, dict):
        raise Complaint(exitcodes.FAILURE, "the simulator's answer is not an object")
    return reply
