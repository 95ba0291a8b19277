"""hetero-agent as its users get it: the Debian package, put on a machine by apt."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.process import ROOT
from tests.system.machine import Machine

#: A package to test instead of that of the checkout.
GIVEN = "HETERO_AGENT_DEB"


def package() -> Path:
    """Return the package's file, built of the checkout as it is."""
    if os.environ.get(GIVEN):
        return Path(os.environ[GIVEN]).resolve()
    done = subprocess.run(
        ["make", "--no-print-directory", "deb"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"make deb failed:\n{done.stdout[-8000:]}"
    (found,) = ROOT.glob("dist/hetero-agent_*_all.deb")
    return found


def install(machine: Machine, deb: Path, *options: str) -> str:
    """Have apt install or upgrade to DEB on MACHINE; return its output."""
    shutil.copy(deb, machine.path(f"/root/{deb.name}"))
    command = ["apt-get", "--quiet", "--assume-yes", "--no-install-recommends", *options]
    return machine.run(*command, "install", f"/root/{deb.name}", env=_QUIET, timeout=120).stdout


def remove(machine: Machine, purge: bool = False) -> str:
    """Have apt remove or purge it; return its output."""
    verb = "purge" if purge else "remove"
    return machine.run(
        "apt-get", "--quiet", "--assume-yes", verb, "hetero-agent", env=_QUIET, timeout=120
    ).stdout


_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}


def newer(deb: Path, directory: Path) -> Path:
    """Make a package of DEB in DIRECTORY that differs in its version only, a later one."""
    tree = directory / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", str(deb), str(tree)], check=True)
    control = tree / "DEBIAN" / "control"
    lines = control.read_text().splitlines()
    (version,) = (line for line in lines if line.startswith("Version: "))
    control.write_text("\n".join(f"{line}+lab1" if line == version else line for line in lines) + "\n")
    made = directory / f"{deb.stem}+lab1.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", "-Znone", str(tree), str(made)], check=True)
    return made
