"""How a verb is added to the command line, and the options that several verbs share."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from hetero_agent.cli.table import Printer

if TYPE_CHECKING:
    from hetero_agent.client import Client

#: What a verb does with a connection, and without one; both return the exit code.
Connected = Callable[["Client", argparse.Namespace, Printer], Awaitable[int]]
Unconnected = Callable[[argparse.Namespace, Printer], int]

POLICIES = ("least-allocated", "packed", "most-free-memory")

#: Keys of --require whose values are text even if they look like numbers.
_TEXT_KEYS = frozenset({"vendor", "model", "driver", "serial"})


class Formatter(argparse.HelpFormatter):
    """Help as wide as the terminal.  argparse makes one for every option it is told of, and its
    own asks shutil for the width, whose import alone is a tenth of what startup may cost."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


@functools.cache
def _columns() -> int:
    with contextlib.suppress(KeyError, ValueError):
        return max(40, int(os.environ["COLUMNS"]))
    try:
        return max(40, os.get_terminal_size(1).columns)
    except OSError:
        return 100


class Verbs:
    """The verbs of heteroctl; every one takes the COMMON options."""

    def __init__(self, parsers: Any, common: argparse.ArgumentParser) -> None:
        self._parsers = parsers
        self.common = common

    def add(self, name: str, text: str, handler: Connected) -> argparse.ArgumentParser:
        """Add a verb that speaks to the agent."""
        return self._add(name, text, handler, True)

    def add_alone(self, name: str, text: str, handler: Unconnected) -> argparse.ArgumentParser:
        """Add a verb that needs no connection, or makes its own."""
        return self._add(name, text, handler, False)

    def _add(self, name: str, text: str, handler: object, connects: bool) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            parents=[self.common],
            formatter_class=Formatter,
        )
        parser.set_defaults(handler=handler, connects=connects)
        return parser


def common_options() -> argparse.ArgumentParser:
    """Return a parser with the options of every verb; they may stand before the verb too."""
    parser = argparse.ArgumentParser(
        add_help=False, argument_default=argparse.SUPPRESS, formatter_class=Formatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document (watch: one a line)")
    parser.add_argument("--bus", metavar="ADDRESS", help="address of the bus (default: the system bus)")
    parser.add_argument(
        "--no-ask-password",
        dest="ask_password",
        action="store_false",
        help="never ask for a password on the terminal (polkit)",
    )
    return parser


def request_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add what says which devices are wanted; the resource may be left out unless REQUIRED."""
    parser.add_argument("-r", "--resource", required=required, help="resource name, such as nvidia.com/gpu")
    parser.add_argument("-n", "--count", type=positive, default=1, metavar="N", help="devices (default: 1)")
    parser.add_argument("--policy", choices=POLICIES, help="how to choose among the free devices")
    parser.add_argument(
        "--require",
        action="append",
        type=requirement,
        default=[],
        metavar="KEY=VALUE",
        help="only devices with this attribute, vendor, model, driver, numa-node or serial (numbers: at least)",
    )
    parser.add_argument(
        "-d",
        "--device",
        action="append",
        dest="devices",
        default=[],
        metavar="DEVICE",
        help="exactly these devices (repeat for each)",
    )


def lease_options(parser: argparse.ArgumentParser, *, of_process: bool = True) -> None:
    """Add what a lease is to be like; without OF_PROCESS, not what only a lease of a process has."""
    parser.add_argument("--client", metavar="NAME", help="client name: limits count by user and client")
    parser.add_argument("--label", metavar="TEXT", help="a word for the lease, for its owner")
    parser.add_argument("--on-fault", choices=("mark", "kill"), help="when a device becomes unhealthy")
    parser.add_argument("--on-end", choices=("wait", "kill"), help="what still holds a device after it")
    if of_process:
        parser.add_argument(
            "--netdev",
            choices=("keep", "move"),
            help="the devices' network interfaces: to the process's namespace",
        )
    else:
        parser.set_defaults(netdev=None)


def binding_options(parser: argparse.ArgumentParser) -> None:
    """Add what a lease's life hangs on."""
    parser.add_argument("--pid", type=positive, help="the lease ends with this process")
    parser.add_argument("--unit", help="the lease ends with this systemd unit")
    parser.add_argument(
        "--ttl", type=seconds, metavar="SECONDS", help="the lease ends after this unless confirmed again"
    )


def request_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the choosing options as the client library takes them."""
    return {
        "policy": args.policy,
        "require": dict(args.require) or None,
        "devices": [device_name(one) for one in args.devices] or None,
    }


def lease_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the lease as the client library takes them."""
    return {
        "client": args.client,
        "label": args.label,
        "on_fault": args.on_fault,
        "on_end": args.on_end,
        "netdev": args.netdev,
    }


def binding_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the binding as the client library takes it."""
    return {
        "pid": args.pid,
        "unit": args.unit,
        "ttl": None if args.ttl is None else int(args.ttl * 1_000_000),
    }


def device_name(text: str) -> str:
    """Return a device argument as an id or alias: object paths become ids."""
    from hetero_agent import names  # noqa: PLC0415

    if text.startswith("/"):
        try:
            return names.device_id_of(text)
        except ValueError:
            return text
    return text


# -- types of arguments -------------------------------------------------------------------------------
def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    value = whole(text)
    if value is None or not 1 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {2**32 - 1}")
    return value


def seconds(text: str) -> float:
    """Read a number of seconds, 0 or more, a fraction allowed."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {10**9}")
    return value


def requirement(text: str) -> tuple[str, str | int | bool]:
    """Read KEY=VALUE; whole numbers, true and false are what they look like."""
    key, found, value = text.partition("=")
    if not found or not key or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if key in _TEXT_KEYS:
        return key, value
    if value in ("true", "false"):
        return key, value == "true"
    number = whole(value)
    if number is not None and not -(2**63) <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{value} is larger than any attribute")
    return key, value if number is None else number


def whole(text: str) -> int | None:
    """Return the whole number that TEXT is, None if it is none."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None
