"""Grants as the door makes them, and what they have made on the host."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import posix1e

from hetero_agent.access.cdi import Hook
from hetero_agent.access.grant import Grant

LEASE, OTHER = "a" * 32, "b" * 32
UID, OTHER_UID = 1000, 1001
HOOK = Hook("/usr/bin/heteroctl", ("heteroctl", "oci-hook"))


def row(path: Path, role: str = "own", device: str = "npu-0") -> list[Any]:
    """One row of a manifest's nodes: PATH as it is."""
    found = path.stat()
    if stat.S_ISREG(found.st_mode):
        return [device, str(path), role, "file", 0, 0]
    kind = "char" if stat.S_ISCHR(found.st_mode) else "block"
    return [device, str(path), role, kind, os.major(found.st_rdev), os.minor(found.st_rdev)]


def grant(*paths: Path, lease: str = LEASE, uid: int = UID, **more: Any) -> Grant:
    """A grant of a device with the nodes PATHS; MORE are other parts of the manifest (_ for -)."""
    manifest = {
        "version": 1,
        "lease": lease,
        "resource": "example.com/npu",
        "devices": ["npu-0"],
        "nodes": [row(path) for path in paths],
        "mounts": [],
        "env": {"HETERO_LEASE_ID": lease, "HETERO_DEVICES": "npu-0", "HETERO_DEVICE_COUNT": "1"},
        "env-filtered": {},
        "groups": [],
        "limits": {},
        "netdevs": [],
        "confirm-by": 0,
        "confirm-by-boottime": 0,
    }
    manifest |= {name.replace("_", "-"): value for name, value in more.items()}
    return Grant(lease, uid, manifest)


def entries(path: Path) -> set[int]:
    """The uids that have an entry of their own on PATH."""
    return {one.qualifier for one in posix1e.ACL(file=str(path)) if one.tag_type == posix1e.ACL_USER}
