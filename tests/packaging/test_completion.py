"""Bash completion as bash does it: every verb, option and choice of the parser, and what there is."""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_agent.cli.completion import script, walk
from hetero_agent.cli.main import build_parser

PARSERS = dict(walk(build_parser(), ""))

#: What heteroctl answers while a word is completed.
STAND_IN = """
heteroctl() {
    case $1 in
        list) printf 'DEVICE  RESOURCE  STATE\\n'
              printf '%s  idle\\n' '0000:3b:00.0 nvidia.com/gpu' '0000:3c:00.0 nvidia.com/gpu' 'npu-0 a.b/npu'
              ;;
        leases) printf 'LEASE     STATE\\n00ff00ff  active\\n' ;;
        sim) printf 'ID     HEALTH\\nnpu-0  healthy\\n' ;;
    esac
}
systemctl() { printf 'a-b.service  loaded\\nc\\\\x2dd.service  loaded\\n'; }
"""

#: Completes each line that it reads and prints the words, one a line, then an empty line.
DRIVER = """
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE}
    read -ra COMP_WORDS <<<"$COMP_LINE"
    [[ $COMP_LINE == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _heteroctl
    printf '%s\\n' "${COMPREPLY[@]}" ''
done
"""


class Completer:
    """A bash with the completion in it."""

    def __init__(self, directory: Path) -> None:
        path = directory / "heteroctl"
        path.write_text(script())
        command = ["bash", "--norc", "-c", f". {path}\n{STAND_IN}\n{DRIVER}"]
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, line: str) -> list[str]:
        """Return what the words are completed to at the end of ``heteroctl LINE``."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"heteroctl {line}\n")
        self.process.stdin.flush()
        words = []
        while word := self.process.stdout.readline().rstrip("\n"):
            words.append(word)
        assert self.process.poll() is None, "bash has ended"
        return words


@pytest.fixture
def complete(tmp_path: Path) -> Iterator[Completer]:
    one = Completer(tmp_path)
    yield one
    _, errors = one.process.communicate(timeout=60)
    assert errors == ""


def test_every_verb(complete: Completer) -> None:
    for verb, parser in PARSERS.items():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                assert complete(f"{verb} ".lstrip()) == list(action.choices)
    assert complete("rel") == ["release"]
    assert complete("--json sim re") == ["remove", "recover"]


@pytest.mark.parametrize("verb", PARSERS)
def test_every_option(complete: Completer, verb: str) -> None:
    options = [option for action in PARSERS[verb]._actions for option in action.option_strings]
    assert complete(f"{verb} -".lstrip()) == options
    long = [option for option in options if option.startswith("--")]
    assert complete(f"{verb} --".lstrip()) == long


@pytest.mark.parametrize("verb", PARSERS)
def test_every_value(complete: Completer, verb: str) -> None:
    for action in PARSERS[verb]._actions:
        for option in action.option_strings:
            given = complete(f"{verb} {option} ".lstrip())
            if action.nargs == 0:
                assert given == complete(f"{verb} ".lstrip()), f"{option} takes no value"
            elif action.choices:
                assert given == list(action.choices)
            elif option == "--resource":
                assert given == ["nvidia.com/gpu", "a.b/npu"]
            elif option == "--device":
                assert given == ["0000:3b:00.0", "0000:3c:00.0", "npu-0"]
            elif option == "--unit":
                assert given == ["a-b.service", "c\\x2dd.service"]
            elif option == "--pid":
                assert str(os.getpid()) in given
            elif option == "--lease":
                assert given == ["00ff00ff"]
            elif option in ("--socket", "--env-file"):
                assert given == ["heteroctl"], "files"
            elif option == "--parent":
                assert given == ["npu-0"]
            elif action.dest not in ("resource", "devices"):
                assert given == [], option


def test_what_there_is(complete: Completer) -> None:
    assert complete("show ") == ["0000:3b:00.0", "0000:3c:00.0", "npu-0", "00ff00ff"]
    assert complete("release 00") == ["00ff00ff"]
    assert complete("cordon npu-0 np") == ["npu-0"]
    assert complete("sim fail ") == ["npu-0"]
    assert complete("status ") == []
    assert complete("allocate -r nvidia.com/gpu --policy=pa") == ["packed"]


def test_colons_of_device_ids(complete: Completer) -> None:
    """bash replaces what follows the last colon only (bash(1), COMP_WORDBREAKS)."""
    assert complete("show 0000:3") == ["3b:00.0", "3c:00.0"]
    assert complete("show 0000:3b:0") == ["00.0"]


def test_the_command_of_run(complete: Completer) -> None:
    assert "setpriv" in complete("run -r a.b/c -- setp")
    assert complete("run -r a.b/c -- cat hetero") == ["heteroctl"]
    assert complete("run -r a.b/c -- cat --re") == [], "options are the command's"
    assert complete("run -r a.b/c --re") == ["--resource", "--require"]
    # a name that may be left out
    assert complete("run --unit -r a.b/") == ["a.b/npu"]
    assert complete("run --unit --res") == ["--resource"]
    assert "setpriv" in complete("run --unit -r a.b/c -- setp")
    assert "setpriv" in complete("run -r a.b/c --unit -- setp")


def test_under_bash_at_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(script())
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve("/bin/bash", ["bash", "--norc", "-i"], {"PATH": "/usr/bin:/bin", "TERM": "dumb", "PS1": "> "})
    try:
        os.write(terminal, b". ./completion\n")
        os.write(terminal, b"heteroctl rel\t--a\t\x01echo got: \x05 end\n")
        seen = b""
        deadline = time.monotonic() + 30
        while not (done := b"\ngot: heteroctl release --all end" in seen) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                seen = (seen + os.read(terminal, 4096)).replace(b"\r", b"").replace(b"  ", b" ")
        assert done, json.dumps(seen.decode())
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
