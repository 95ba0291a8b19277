"""The forms in which a manifest is printed: what a shell, podman or systemd reads."""

from __future__ import annotations

import os.path
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client.manifest import Manifest

#: The kinds of nodes that are devices; others are the files of virtual ones.
_DEVICES: Final = ("char", "block")

#: Paths that DeviceAllow= takes as they are: below /dev, without quotes, blanks and specifiers.
_PLAIN_NODE: Final = re.compile(r"/dev(/[A-Za-z0-9._:+@-]+)+")

_LINE: Final = 100

#: The variable by which a process inside a lease knows it.
_LEASE: Final = "HETERO_LEASE_ID"


def shell(manifest: Manifest, *, filtered: bool = False) -> list[str]:
    """Return lines for ``.`` in sh, or for systemd's EnvironmentFile=, which takes the assignments
    and passes over lines without a ``=`` (systemd, src/basic/env-file.c).  FILTERED: for where only
    the lease's devices can be seen."""
    variables = manifest.variables(filtered=filtered)
    return [
        # in a lease already, they may be of that: a job has GPUs of one lease and adapters of another
        f'[ -n "${{{_LEASE}-}}" ] || unset -v {" ".join(_strangers(variables))}',
        *(f"{name}={_word(printable(value, 4096))}" for name, value in sorted(variables.items())),
        f"export {' '.join(sorted(variables))}",
    ]


def cdi(manifest: Manifest, address: str) -> dict[str, Any]:
    """Return the CDI specification as the agent on the bus at ADDRESS writes it."""
    from hetero_agent import cdispec  # noqa: PLC0415

    return cdispec.spec(
        manifest.lease, manifest.raw, cdispec.confirming(address, sys.executable), os.path.realpath
    )


def podman(manifest: Manifest) -> list[str]:
    """Return the arguments of ``podman run`` before the image."""
    from hetero_agent.cdispec import NOTHING  # noqa: PLC0415

    # a vendor's hook gives what the image asks for, also one of another vendor than the lease's
    variables = {**NOTHING, **manifest.variables(filtered=True)}
    nodes = {path: kind for _, path, _, kind, _, _ in manifest.nodes}
    found = [f"--device={path}:{path}:rw" for path, kind in nodes.items() if kind in _DEVICES]
    found += [_bind(path, path, "rw") for path, kind in nodes.items() if kind not in _DEVICES]
    found += [_bind(*mount) for mount in manifest.mounts]
    found += [f"--group-add={group}" for group in manifest.groups]
    found += [f"--ulimit={name}={_limit(value, '-1')}" for name, value in sorted(manifest.limits.items())]
    found += [f"--env={name}={value}" for name, value in sorted(variables.items())]
    return [printable(one, 8192) for one in found]


def systemd(manifest: Manifest) -> list[str]:
    """Return the lines of a drop-in for a service (systemd.exec(5), systemd.resource-control(5))."""
    variables = manifest.variables(filtered=True)
    lines = [
        f"# Lease {manifest.lease} of {manifest.resource}: made by heteroctl manifest --format systemd",
        "[Service]",
        "DevicePolicy=closed",
        *(f"DeviceAllow={device} rw" for device in allowed_devices(manifest)),
    ]
    if manifest.groups:
        lines.append(f"SupplementaryGroups={' '.join(map(str, manifest.groups))}")
    limits = sorted(manifest.limits.items())
    lines += [f"Limit{name.upper()}={_limit(value, 'infinity')}" for name, value in limits]
    lines += [f"Environment={_quoted(f'{name}={value}')}" for name, value in sorted(variables.items())]
    lines += _wrapped("UnsetEnvironment=", _strangers(variables))
    return [printable(line, 8192) for line in lines]


def allowed_devices(manifest: Manifest) -> list[str]:
    """Return what DeviceAllow= of systemd is to name: each node of the lease by its path, or, if systemd
    takes no such path (it is not below /dev, or of odd characters), by its number, which needs no file
    (src/core/cgroup.c, cgroup_device_permissions and bpf_devices_allow_list_device of systemd 252)."""
    return sorted(
        {
            path if _PLAIN_NODE.fullmatch(path) and ".." not in path else f"/dev/{kind}/{major}:{minor}"
            for _, path, _, kind, major, minor in manifest.nodes
            if kind in _DEVICES
        }
    )


def strangers(manifest: Manifest) -> list[str]:
    """Return the variables by which an inherited environment would choose other devices."""
    return _strangers(manifest.variables())


def _strangers(variables: dict[str, str]) -> list[str]:
    """The variables by which an inherited environment would choose other devices."""
    from hetero_agent.client.manifest import DEVICE_VARIABLES  # noqa: PLC0415

    return sorted(DEVICE_VARIABLES - variables.keys())


def _limit(value: int, unlimited: str) -> str:
    """A resource limit: UNLIMITED is how the reader of the form calls one that is none."""
    from hetero_agent.client.manifest import UNLIMITED  # noqa: PLC0415

    return unlimited if value == UNLIMITED else str(value)


def _word(value: str) -> str:
    """Quote for sh; also what only zsh takes for more than itself (zshexpn(1), "= expansion")."""
    return f"'{value}'" if value.startswith("=") and shlex.quote(value) == value else shlex.quote(value)


def _bind(host: str, container: str, options: str) -> str:
    """A bind mount; unlike --volume it takes paths with colons, as /dev/dri/by-path has them."""
    fields = ["type=bind", f"src={host}", f"dst={container}", *filter(None, options.split(","))]
    # a field of a CSV record (podman-run(1), --mount)
    return "--mount=" + ",".join(f'"{one}"' if "," in one else one for one in fields)


def _quoted(text: str) -> str:
    """Quote as systemd.syntax(7) reads it, with its specifiers taken literally."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _wrapped(key: str, words: list[str]) -> list[str]:
    """Return assignments of WORDS to KEY, which add up, in lines of a readable length."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < _LINE:
            lines[-1] += f" {word}"
        else:
            lines.append(key + word)
    return lines
