"""The forms in which a manifest is printed: what a shell, podman or systemd reads.  No I/O."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client.manifest import Manifest

#: The kinds of nodes that are devices; others are the files of virtual ones.
_DEVICES: Final = ("char", "block")

_LINE: Final = 100


def shell(manifest: Manifest) -> list[str]:
    """Return lines for ``.`` in sh, or for systemd's EnvironmentFile=, which takes the assignments
    and passes over lines without a ``=`` (systemd, src/basic/env-file.c)."""
    variables = manifest.variables()
    return [
        f"unset -v {' '.join(_strangers(variables))}",
        *(f"{name}={shlex.quote(printable(value, 4096))}" for name, value in sorted(variables.items())),
        f"export {' '.join(sorted(variables))}",
    ]


def cdi(manifest: Manifest, address: str) -> dict[str, Any]:
    """Return the CDI specification as the agent on the bus at ADDRESS writes it."""
    from hetero_agent import cdispec  # noqa: PLC0415

    return cdispec.spec(manifest.raw, cdispec.confirming(address, sys.executable))


def podman(manifest: Manifest) -> list[str]:
    """Return the arguments of ``podman run`` before the image."""
    nodes = {path: kind for _, path, _, kind, _, _ in manifest.nodes}
    found = [f"--device={path}:{path}:rw" for path, kind in nodes.items() if kind in _DEVICES]
    found += [_bind(path, path, "rw") for path, kind in nodes.items() if kind not in _DEVICES]
    found += [_bind(*mount) for mount in manifest.mounts]
    found += [f"--group-add={group}" for group in manifest.groups]
    found += [f"--env={name}={value}" for name, value in sorted(manifest.variables(filtered=True).items())]
    return [printable(one, 8192) for one in found]


def systemd(manifest: Manifest) -> list[str]:
    """Return the lines of a drop-in for a service (systemd.exec(5), systemd.resource-control(5))."""
    variables = manifest.variables(filtered=True)
    devices = sorted({path for _, path, _, kind, _, _ in manifest.nodes if kind in _DEVICES})
    lines = [
        f"# Lease {manifest.lease} of {manifest.resource}: made by heteroctl manifest --format systemd",
        "[Service]",
        "DevicePolicy=closed",
        # systemd takes no other paths, and specifiers are not expanded in them
        *(f"DeviceAllow={path} rw" for path in devices if path.startswith("/dev/")),
    ]
    if manifest.groups:
        lines.append(f"SupplementaryGroups={' '.join(map(str, manifest.groups))}")
    lines += [f"Environment={_quoted(f'{name}={value}')}" for name, value in sorted(variables.items())]
    lines += _wrapped("UnsetEnvironment=", _strangers(variables))
    return [printable(line, 8192) for line in lines]


def _strangers(variables: dict[str, str]) -> list[str]:
    """The variables by which an inherited environment would choose other devices."""
    from hetero_agent.client.manifest import DEVICE_VARIABLES  # noqa: PLC0415

    return sorted(DEVICE_VARIABLES - variables.keys())


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
