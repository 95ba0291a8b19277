"""What a newcomer starts with works: the demo shows what it says, the bench measures."""

from __future__ import annotations

import re
import subprocess

from tests.support.process import PYTHON, ROOT


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_demo_shows_each_of_its_acts() -> None:
    done = run("examples/demo.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for act in (
        "Discovery.",
        "A lease",
        "The real device.",
        "A stranger",
        "A fault",
        "What was it?",
        "That was it",
    ):
        assert re.search(rf"^{re.escape(act)}", done.stdout, re.MULTILINE), act
    assert "$ heteroctl run -r " in done.stdout


def test_bench_prints_every_line_with_a_verdict() -> None:
    done = run("bench/run.py", "--rounds", "2", "--idle", "1", "--many", "32", "--crowd", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = re.findall(r"<= [\d.]+ \S+ +(ok|OVER)", done.stdout)
    assert len(verdicts) == 18
