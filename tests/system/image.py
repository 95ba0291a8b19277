"""The root file system of the lab's machines, built once by mmdebstrap and kept.

It lies in /var/cache/hetero-agent-lab (or $HETERO_AGENT_LAB_CACHE) under a name with a hash of all
that decides what is in it, so another list of packages gives another one.  It is never booted
itself: machines have it as the lower layer of an overlay.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SUITE = "bookworm"
CACHE = Path(os.environ.get("HETERO_AGENT_LAB_CACHE", "/var/cache/hetero-agent-lab"))

_PACKAGES = Path(__file__).with_name("packages")
#: The host's own archive, with its mirror and keys, if it is of the same release.
_SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
_OPTIONS = (
    "--variant=minbase",
    "--mode=root",
    '--aptopt=Acquire::Languages "none"',
    "--dpkgopt=path-exclude=/usr/share/locale/*",
)


def packages() -> list[str]:
    """Return the packages of the list."""
    lines = (line.partition("#")[0].strip() for line in _PACKAGES.read_text().splitlines())
    return [line for line in lines if line]


def build() -> Path:
    """Return the directory of the root file system; make it if it is not there (half a minute,
    from the network).  Raises CalledProcessError with mmdebstrap's last words."""
    recipe = "\n".join([SUITE, *_OPTIONS, *packages()])
    root = CACHE / f"{SUITE}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            for old in CACHE.glob(f"{SUITE}-*"):
                shutil.rmtree(old)
            fresh = root.with_name(f"{root.name}.new")
            command = [
                "mmdebstrap",
                "--quiet",
                *_OPTIONS,
                f"--include={','.join(packages())}",
                SUITE,
                str(fresh),
            ]
            subprocess.run(command + _sources(), check=True, stdin=subprocess.DEVNULL, timeout=600)
            fresh.rename(root)
    return root


def _sources() -> list[str]:
    facts = Path("/etc/os-release").read_text()
    if f"VERSION_CODENAME={SUITE}" not in facts.splitlines():
        return []
    return [str(path) for path in _SOURCES if path.exists() and "deb" in path.read_text()][:1]
