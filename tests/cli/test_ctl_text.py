"""What heteroctl prints: tables, colour, times, its manual; how it reads its command line."""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

import hetero_agent
from hetero_agent.cli import exitcodes, table
from hetero_agent.cli.main import build_parser
from hetero_agent.cli.verbs import requirement
from hetero_agent.client import errors
from tests.support.ctl import Ctl
from tests.support.process import PYTHON, ROOT

MANUAL = ROOT / "docs" / "heteroctl.1"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


# -- tables ---------------------------------------------------------------------------------------
def test_columns_are_aligned_and_empty_ones_left_out() -> None:
    stream = io.StringIO()
    table.Printer(stream, False).table(
        ("DEVICE", "STATE", "LEASE", "MODEL"), [("a", "idle", "", "x"), ("longer", "in-use", "", "")]
    )
    assert stream.getvalue() == "DEVICE  STATE   MODEL\na       idle    x\nlonger  in-use  -\n"


def test_wide_characters_take_two_columns() -> None:
    stream = io.StringIO()
    table.Printer(stream, False).table(("A", "B"), [("加速", "x"), ("e\u0301", "y"), ("abcd", "z")])
    assert stream.getvalue().splitlines() == ["A     B", "加速  x", "e\u0301     y", "abcd  z"]


def test_foreign_text_can_not_steer_the_terminal() -> None:
    stream = io.StringIO()
    out = table.Printer(stream, False)
    out.table(("A",), [("\x1b[2J\n\u202eevil",)])
    out.fields([("name", "\x07bell")])
    assert stream.getvalue() == "A\n\\x1b[2J\\x0a\\u202eevil\nname: \\x07bell\n"


@pytest.mark.parametrize(
    ("no_color", "term", "coloured"),
    [(None, "xterm", True), ("", "xterm", True), ("1", "xterm", False), (None, "dumb", False)],
)
def test_colour_is_for_terminals_without_no_color(
    monkeypatch: pytest.MonkeyPatch, no_color: str | None, term: str, coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        table.Printer(stream, False).table(("A", "B"), [("idle", "x")])
    assert ("\x1b[32midle\x1b[0m  x" in terminal.getvalue()) is coloured
    assert pipe.getvalue() == "A     B\nidle  x\n"


def test_json_has_no_colour_and_is_one_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pipe, terminal = io.StringIO(), Terminal()
    table.Printer(pipe, True).document({"a": ("idle", {"b": 1})})
    table.Printer(terminal, True).document({"a": 1})
    assert pipe.getvalue() == '{"a": ["idle", {"b": 1}]}\n'
    assert terminal.getvalue() == '{\n  "a": 1\n}\n'


@pytest.mark.parametrize(
    ("microseconds", "shown"),
    [
        (0, "0ms"),
        (999_999, "999ms"),
        (119_000_000, "119s"),
        (120_000_000, "2min"),
        (7_200_000_000, "2h"),
        (172_800_000_000, "2d"),
    ],
)
def test_durations_in_their_largest_whole_unit(microseconds: int, shown: str) -> None:
    assert table.span(microseconds) == shown


def test_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert table.moment(1_700_000_000_123_456) == "2023-11-14 22:13:20.123"
    now = time.time_ns() // 1000
    assert (table.moment(0), table.ago(0), table.until(0)) == ("", "", "")
    assert table.ago(now + 10**9) == "0ms"
    # so long that it does not matter how long these lines take
    days = 60 * 3600 * 10**6
    assert table.ago(now - days) == "2d"
    # deadlines run on the boot clock: a jump of the wall clock doesn't show
    assert table.until(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000 + days) == "2d"


# -- the command line -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("memory=80", ("memory", 80)),
        ("ecc=true", ("ecc", True)),
        ("ecc=false", ("ecc", False)),
        ("model=100", ("model", "100")),
        ("serial=0042", ("serial", "0042")),
        ("firmware=1.2=x", ("firmware", "1.2=x")),
        ("offset=-5", ("offset", -5)),
        ("memory=16G", ("memory", "16G")),
    ],
)
def test_requirements_are_what_they_look_like(text: str, read: tuple[str, object]) -> None:
    assert requirement(text) == read


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["list", "--state", "tired"],
        ["run"],
        ["run", "-r", "a.b/c"],
        ["run", "-r", "a.b/c", "--"],
        ["run", "-r", "a.b/c", "-n", "0", "--", "true"],
        ["run", "-r", "a.b/c", "--wait", "-1", "--", "true"],
        ["run", "-r", "a.b/c", "--require", "novalue", "--", "true"],
        ["allocate", "-r", "a.b/c", "--owner-uid", "-5"],
        ["allocate", "-r", "a.b/c", "--policy", "best"],
        ["reap", "npu-0"],
        ["reap", "npu-0", "--all", "--pid", "1"],
        ["history"],
        ["sim"],
        ["sim", "explode"],
        ["--json"],
    ],
)
def test_a_wrong_command_line_is_2(arguments: list[str]) -> None:
    ctl = Ctl("unix:path=/nonexistent/bus")
    if arguments == ["--json"]:  # no verb is a right one: list
        assert ctl(*arguments, code=exitcodes.UNREACHABLE).json["error"]["exit"] == 69
    else:
        result = ctl(*arguments, code=exitcodes.USAGE)
        assert "heteroctl" in result.err


def test_every_verb_has_help() -> None:
    ctl = Ctl("unix:path=/nonexistent/bus")
    assert "exit codes" in ctl("--help").out
    for verb in parsers():
        assert ctl(*verb.split(), "--help").out.startswith(f"usage: heteroctl {verb} ")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every verb ("sim add" is one) and its parser."""
    found: dict[str, argparse.ArgumentParser] = {}

    def walk(parser: argparse.ArgumentParser, prefix: str) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    found[f"{prefix}{name}"] = child
                    walk(child, f"{prefix}{name} ")

    walk(build_parser(), "")
    return found


def options(parser: argparse.ArgumentParser) -> set[str]:
    common = {"-h", "--help", "--json", "--bus", "--no-ask-password"}
    return {option for action in parser._actions for option in action.option_strings} - common


def documented() -> dict[str, set[str]]:
    """Verb -> options, as the manual has them."""
    found: dict[str, set[str]] = {}
    section, verb = "", ""
    for line in MANUAL.read_text().splitlines():
        words = line.replace("\\-", "-").split()
        if line.startswith(".Sh"):
            section, verb = line[4:], ""
        elif line.startswith(".Ss") and section == "VERBS":
            verb = " ".join(_until_arguments(words[1:]))
            found[verb] = set()
        elif line.startswith(".It Fl") and verb:
            found[verb] |= {"-" + words[at + 1] for at, word in enumerate(words) if word == "Fl"}
    return found


def _until_arguments(words: list[str]) -> list[str]:
    return words[: next((at for at, word in enumerate(words) if word in ("Fl", "Ar", "Op")), len(words))]


def test_the_manual_has_every_verb_and_option_and_no_others() -> None:
    written = {verb: {_plain(option) for option in some} for verb, some in documented().items()}
    assert written == {verb: options(parser) for verb, parser in parsers().items()}


def _plain(option: str) -> str:
    return option.rstrip(",")


def test_the_manual_has_every_exit_code() -> None:
    section = MANUAL.read_text().partition(".Sh EXIT STATUS")[2].partition(".Sh")[0]
    written = {int(code) for code in re.findall(r"^\.It (\d+)$", section, re.MULTILINE)}
    ours = {value for name, value in vars(exitcodes).items() if name.isupper() and isinstance(value, int)}
    assert written == ours - {exitcodes.SIGNAL}


def test_the_manual_has_no_complaints() -> None:
    done = subprocess.run(
        ["groff", "-mandoc", "-Tutf8", "-wall", str(MANUAL)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert max(len(re.sub(r".\x08|\x1b\[[0-9;]*m", "", line)) for line in done.stdout.splitlines()) <= 80


# -- exit codes -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.NoBus, 69),
        (errors.NoAgent, 69),
        (errors.CallTimeout, 69),
        (errors.NotReady, 75),
        (errors.Unavailable, 75),
        (errors.LimitExceeded, 75),
        (errors.QueueFull, 75),
        (errors.NotAuthorized, 77),
        (errors.NotOwner, 77),
        (errors.InvalidArgument, 2),
        (errors.Timeout, 124),
        (errors.NotFound, 1),
        (errors.RequestConflict, 1),
        (errors.RequestSpent, 1),
        (errors.LeaseEnded, 1),
        (errors.ProtocolUnsupported, 1),
        (errors.NotSupported, 1),
        (errors.StoreFailed, 1),
        (errors.Internal, 1),
        (errors.UnexpectedReply, 1),
    ],
)
def test_every_error_has_its_exit_code(kind: type[errors.HeteroError], code: int) -> None:
    assert exitcodes.of_error(kind("x")) == code


# -- startup --------------------------------------------------------------------------------------
def test_startup_loads_nothing_heavy() -> None:
    code = "import hetero_agent.cli.main as m, sys; m.build_parser(); print(*sorted(sys.modules))"
    loaded = set(subprocess.check_output([PYTHON, "-c", code], text=True, cwd=ROOT).split())
    heavy = {"shutil", "dbus_next", "pyroute2", "pyudev", "systemd", "sqlite3"}
    assert not heavy & loaded, "verbs import what they need when they are carried out"


def test_version_needs_no_agent() -> None:
    ctl = Ctl("unix:path=/nonexistent/bus")
    result = ctl("version")
    assert result.out.splitlines()[0] == f"heteroctl {hetero_agent.__version__}"
    assert result.out.splitlines()[1].startswith("agent unknown: no bus at")
    assert ctl.json("version") == {"heteroctl": hetero_agent.__version__, "agent": None}


def test_output_that_cannot_be_written_is_said() -> None:
    ctl = Ctl("unix:path=/nonexistent/bus")
    for arguments in (["version"], ["version", "--json"], ["doctor"]):
        with Path("/dev/full").open("w") as full:
            process = ctl.spawn(*arguments, stdout=full)
            _, err = process.communicate(timeout=60)
        says = "heteroctl: can't write the output: No space left on device\n"
        assert (process.returncode, err) == (1, says)


def test_an_encoding_that_lacks_a_character_is_no_fault() -> None:
    ctl = Ctl("unix:path=/nonexistent/b\u00fcs")
    done = subprocess.run(
        [*ctl.command, "version"],
        env={**ctl.env, "PYTHONIOENCODING": "ascii"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "agent unknown: no bus at unix:path=/nonexistent/b\\xfcs: " in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        ("<&-", "agent unknown: ", ""),
        (">&-", "", "heteroctl: can't write the output: Bad file descriptor\n"),
        ("2>&-", "agent unknown: ", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_closed_streams(closed: str, out: str, err: str) -> None:
    ctl = Ctl("unix:path=/nonexistent/bus")
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *ctl.command, "version"]
    done = subprocess.run(shell, env=ctl.env, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert out in done.stdout
    assert bool(out) == bool(done.stdout)
    assert (done.returncode, done.stderr) == (0 if out else 1, err)


def test_a_reader_that_leaves_early_is_no_failure_of_ours() -> None:
    ctl = Ctl("unix:path=/nonexistent/bus")
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = ctl.spawn("version", stdout=write_end)
    os.close(write_end)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + 13, "")
