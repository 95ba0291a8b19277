"""heteroctl: reads the command line, does what it says, answers with an exit code."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from hetero_agent.cli import (
    admin,
    attach,
    doctor,
    exitcodes,
    hold,
    holders,
    leasing,
    listing,
    ocihook,
    run,
    simverbs,
    watching,
)
from hetero_agent.cli.table import OutputError, Printer
from hetero_agent.cli.verbs import Formatter, Verbs, common_options
from hetero_agent.text import printable

_EPILOG = """\
exit codes: run passes the command's through (128+n: ended by signal n).  Ours: 1 failure, 2 usage, 69 agent
unreachable, 75 nothing free now, 77 not authorized, 78 never on this host, 79 lease lost while running,
124 waited in vain, 125 run failed itself, 126 command not executable, 127 command not found.
"""

#: Set it to see where a fault of heteroctl's own came from.
DEBUG_VARIABLE = "HETEROCTL_DEBUG"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    common = common_options()
    parser = argparse.ArgumentParser(
        prog="heteroctl",
        description="See, lease and look after the accelerators of this host.",
        epilog=_EPILOG,
        parents=[common],
        formatter_class=Formatter,
    )
    # without prog, argparse would format a usage text for it, which costs startup
    parsers = parser.add_subparsers(metavar="VERB", title="verbs (default: list)", prog="heteroctl")
    verbs = Verbs(parsers, common)
    for module in (listing, holders, run, leasing, attach, hold, watching, admin, doctor, ocihook, simverbs):
        module.register(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command line ARGUMENTS (default: sys.argv) and return the exit code."""
    _fill_closed_streams()
    _write_whatever_comes()
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = build_parser().parse_args(given)
    if not hasattr(args, "handler"):
        listing.as_default(args)
    args.json = getattr(args, "json", False)
    args.bus = getattr(args, "bus", None)
    out = Printer(sys.stdout, args.json)
    try:
        code = _carry_out(args, out)
        out.flush()
    except BrokenPipeError:  # the reader has seen enough
        _drop_output()
        return exitcodes.SIGNAL + 13
    except OutputError as error:
        _drop_output()
        sys.stderr.write(f"heteroctl: can't write the output: {error}\n")
        return exitcodes.FAILURE
    except KeyboardInterrupt:
        return exitcodes.SIGNAL + 2
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        what = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"heteroctl: a fault in heteroctl itself: {printable(what, 400)}\n")
        sys.stderr.write(f"  next: please report it, with what {DEBUG_VARIABLE}=1 makes it print\n")
        return exitcodes.FAILURE
    return code


def _fill_closed_streams() -> None:
    """Take the places of standard streams that were closed for us (``>&-``), lest the bus's socket gets
    their numbers, and the command of `run` the socket."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_WRONLY)
    if sys.stdout is None:  # as to a closed one, writing fails
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


def _write_whatever_comes() -> None:
    """Have characters that the terminal's encoding lacks shown by their numbers: a device may be called
    anything.  Standard error does so by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Keep the interpreter's own flush of standard output at exit from failing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _carry_out(args: argparse.Namespace, out: Printer) -> int:
    from hetero_agent.cli.complaints import Complaint  # noqa: PLC0415

    try:
        if not args.connects:
            return int(args.handler(args, out))
        import asyncio  # noqa: PLC0415

        return asyncio.run(_connected(args, out))
    except Complaint as complaint:
        return complain(complaint, out)


async def _connected(args: argparse.Namespace, out: Printer) -> int:
    from hetero_agent.cli import asking, complaints  # noqa: PLC0415
    from hetero_agent.client import Client, HeteroError  # noqa: PLC0415

    person = asking.person(args)
    try:
        with person or contextlib.nullcontext():
            async with await Client.connect(args.bus, person=person) as client:
                return int(await args.handler(client, args, out))
    except HeteroError as error:
        raise complaints.of_error(error) from error


def complain(complaint: Any, out: Printer) -> int:
    """Tell what went wrong: on stderr for a person, with --json a document too."""
    if out.as_json:
        out.document(complaint.document())
    with contextlib.suppress(BrokenPipeError):
        for line in complaint.lines():
            sys.stderr.write(printable(line, 4000) + "\n")
    return int(complaint.code)


if __name__ == "__main__":
    sys.exit(main())
