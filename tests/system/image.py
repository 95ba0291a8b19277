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


#: Runs in a mount namespace of its own: apt in BASE, which writes into UPPER.
_ADD = """
set -eu
base=$1 upper=$2 work=$3 root=$4
shift 4
mount -t overlay overlay -o "lowerdir=$base,upperdir=$upper,workdir=$work" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs none "$root/run"
cp /etc/resolv.conf "$root/run/resolv.conf"
touch "$root/etc/resolv.conf"
mount --bind "$root/run/resolv.conf" "$root/etc/resolv.conf"
export DEBIAN_FRONTEND=noninteractive
chroot "$root" apt-get --quiet update
chroot "$root" apt-get --quiet --assume-yes --no-install-recommends install "$@"
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb
"""


def layer(base: Path, *more: str) -> Path:
    """Return a layer to lie on BASE in which apt has installed MORE packages, for those few tests that
    need them; make it if it is not there.  Raises CalledProcessError."""
    name = hashlib.sha256("\n".join([base.name, *more]).encode()).hexdigest()[:16]
    upper = CACHE / f"{SUITE}-layer-{name}"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not upper.exists():
            fresh, work, root = (CACHE / f"{upper.name}.{one}" for one in ("new", "work", "root"))
            for path in (fresh, work, root):
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
            words = [str(path) for path in (base, fresh, work, root)]
            command = ["unshare", "--mount", "sh", "-c", _ADD, "layer", *words, *more]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=600, capture_output=True)
            shutil.rmtree(work)
            root.rmdir()
            fresh.rename(upper)
    return upper


def _sources() -> list[str]:
    facts = Path("/etc/os-release").read_text()
    if f"VERSION_CODENAME={SUITE}" not in facts.splitlines():
        return []
    return [str(path) for path in _SOURCES if path.exists() and "deb" in path.read_text()][:1]
