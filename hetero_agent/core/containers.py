"""Which container a control group is: known by the names that runtimes give to their groups.

What these names look like, with systemd's cgroup driver and with cgroupfs:

- Docker, Moby: ``/system.slice/docker-ID.scope``, ``/docker/ID``;
- podman, also of users: ``…/libpod-ID.scope``, ``/libpod_parent/libpod-ID`` (conmon, which only
  watches a container, is ``libpod-conmon-ID.scope`` and in none);
- CRI of Kubernetes: ``/kubepods.slice/…-podUID.slice/cri-containerd-ID.scope`` (containerd),
  ``crio-ID.scope`` (CRI-O), ``/kubepods/burstable/podUID/ID`` (cgroupfs, whichever runtime);
- nerdctl: ``/system.slice/nerdctl-ID.scope``;
- systemd-nspawn and machined: ``/machine.slice/systemd-nspawn@NAME.service``,
  ``machine-NAME.scope`` (escaped as systemd.unit(5) says);
- LXC: ``/lxc.payload.NAME``, ``/lxc/NAME``; Slurm: ``…/job_ID``.

Only the kernel and whoever a part of the tree was delegated to place processes, so a path is
proof of where a process is; but a user can name a group of his own part as he likes, so the name
of a container is shown and proves nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Container(NamedTuple):
    """A container: RUNTIME and ID (64 hex digits, or a name), the uid of its Kubernetes POD (""
    for none), and PATH, the control group that holds all its processes."""

    runtime: str
    id: str
    pod: str
    path: str

    @property
    def name(self) -> str:
        """RUNTIME:ID."""
        return f"{self.runtime}:{self.id}"


_ID = r"(?P<id>[0-9a-f]{64})"
_NAMES = tuple(
    (runtime, re.compile(pattern))
    for runtime, pattern in (
        ("docker", rf"docker-{_ID}\.scope"),
        ("podman", rf"libpod-{_ID}(\.scope)?"),
        ("containerd", rf"cri-containerd-{_ID}\.scope"),
        ("cri-o", rf"crio-{_ID}(\.scope)?"),
        ("nerdctl", rf"nerdctl-{_ID}\.scope"),
        ("nspawn", r"systemd-nspawn@(?P<id>[^/]+)\.service"),
        ("machine", r"machine-(?P<id>[^/]+)\.scope"),
        ("lxc", r"lxc\.payload\.(?P<id>[^/]+)"),
        ("slurm", r"job_(?P<id>\d+)"),
    )
)
#: A bare id says whose it is by the group above it.
_BARE = re.compile(_ID)
_ABOVE = {"docker": "docker", "lxc": "lxc", "libpod_parent": "podman"}
_POD = re.compile(r"(?:kubepods.*-)?pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")


@lru_cache(maxsize=1024)
def container_of(cgroup: str) -> Container | None:
    """Return the outermost container that the path lies in, None for none."""
    parts = cgroup.split("/")
    pod = ""
    for index, part in enumerate(parts):
        here = _POD.fullmatch(part)
        if here:
            pod = here["uid"].replace("_", "-")
            continue
        found = _named(part, parts[index - 1] if index else "", pod)
        if found is not None:
            runtime, identifier = found
            return Container(runtime, identifier, pod, "/".join(parts[: index + 1]))
    return None


def _named(part: str, above: str, pod: str) -> tuple[str, str] | None:
    for runtime, pattern in _NAMES:
        found = pattern.fullmatch(part)
        if found:
            return runtime, _ESCAPED.sub(lambda code: chr(int(code[1], 16)), found["id"])
    if pod and _BARE.fullmatch(part):
        return "kubernetes", part
    runtime = _ABOVE.get(above, "")
    if runtime and (runtime == "lxc" or _BARE.fullmatch(part)):
        return runtime, part
    return None


def within(cgroup: str, group: str) -> bool:
    """Tell whether a process in CGROUP is in GROUP or below it."""
    return cgroup == group or cgroup.startswith(group + "/")
