"""The form of a manifest that container runtimes read: a specification of the Container Device
Interface (github.com/cncf-tags/container-device-interface, SPEC.md and specs-go/config.go).

One specification per lease, with one device, named by the lease's id.  Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from hetero_agent import names

#: What a device is asked for by: ``--device KIND=LEASE``.
KIND: Final = "heteroagent.org/lease"

_VERB: Final = "oci-hook"

#: Seconds after which the runtime ends the hook, which gives up before that and says why.
HOOK_TIMEOUT: Final = 30

#: Anybody in the container may use its nodes: they are the container's own copies, and there are
#: no others in it than the lease's.
_NODE_MODE: Final = 0o666

#: What the vendors' own runtimes take as "add nothing", whatever the image asks for by ENV.
#: ROCm/container-toolkit, docs/container-runtime/docker-compose.rst; MindCluster, "Ascend Docker
#: Runtime"; HabanaAI/habana-container-runtime, cmd/habana-container-runtime-hook/container_config.go;
#: NVIDIA Container Toolkit, "Environment variables".
NOTHING: Final = {
    "AMD_VISIBLE_DEVICES": "none",
    "ASCEND_VISIBLE_DEVICES": "void",
    "HABANA_VISIBLE_DEVICES": "void",
    "NVIDIA_VISIBLE_DEVICES": "void",
}

_DEVICES: Final = ("char", "block")


class Hook(NamedTuple):
    """The program that confirms a lease when its container is made: its PATH, the ARGUMENTS before
    the lease's id (from argv[0] on), and its whole ENVIRONMENT, ``NAME=VALUE`` each."""

    path: str
    arguments: tuple[str, ...]
    environment: tuple[str, ...] = ()


def confirming(address: str, interpreter: str) -> Hook:
    """Return the hook that asks the agent on the bus at ADDRESS: the installed heteroctl, or this
    one by Python's INTERPRETER if we run from elsewhere, such as a checkout."""
    # a whole environment: what is set where the runtime was called has no say
    environment = (f"{names.BUS_ADDRESS_VARIABLE}={address}",)
    if __file__.startswith("/usr/lib/"):
        return Hook("/usr/bin/heteroctl", ("heteroctl", _VERB), environment)
    root = __file__.rsplit("/", 2)[0]
    # -P: it runs in the container's bundle, where nothing is ours
    arguments = (interpreter, "-P", "-m", "hetero_agent.cli.main", _VERB)
    return Hook(interpreter, arguments, (*environment, f"PYTHONPATH={root}"))


def spec(lease: str, manifest: Mapping[str, Any], hook: Hook, resolved: Callable[[str], str]) -> dict[str, Any]:
    """Return the specification of LEASE, which gives what its MANIFEST says (access/manifest.py), in
    the lowest version that has all that it uses.  RESOLVED says where a path leads to (realpath(3)); it is
    asked for paths in /dev only."""
    edits: dict[str, Any] = {
        "env": [f"{name}={value}" for name, value in sorted(_variables(manifest).items())],
        "hooks": [
            {
                "hookName": "createRuntime",
                "path": hook.path,
                "args": [*hook.arguments, lease],
                "env": list(hook.environment),
                "timeout": HOOK_TIMEOUT,
            }
        ],
    }
    # a node that several devices share stands once
    kinds: dict[str, str] = {path: kind for _, path, _, kind, *_ in manifest["nodes"]}
    # no type and no numbers: the runtime takes them from the node as it is when the container starts
    nodes = [
        {"path": path, "permissions": "rw", "fileMode": _NODE_MODE}
        for path, kind in kinds.items()
        if kind in _DEVICES
    ]
    mounts = [
        _bind(path, path, "rw,nosuid,nodev,noexec") for path, kind in kinds.items() if kind not in _DEVICES
    ]
    links = {
        host: target
        for host, *_ in manifest["mounts"]
        if host.startswith("/dev/") and kinds.get(target := resolved(host)) in _DEVICES
    }
    # a link to a node is another node: bound, it would have the host's owner and mode, and in the
    # container few are in the host's groups
    nodes += [
        {"path": container, "hostPath": links[host], "permissions": "rw", "fileMode": _NODE_MODE}
        for host, container, _ in manifest["mounts"]
        if host in links
    ]
    mounts += [_bind(*mount) for mount in manifest["mounts"] if mount[0] not in links]
    if nodes:
        edits["deviceNodes"] = nodes
    if mounts:
        edits["mounts"] = mounts
    return {
        "cdiVersion": _version(lease, bool(links)),
        "kind": KIND,
        "devices": [{"name": lease, "containerEdits": edits}],
    }


def _variables(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a program in a container goes by: only the lease's devices can be seen there."""
    return {
        **NOTHING,
        "HETERO_RESOURCE": manifest["resource"],
        **manifest["env"],
        **manifest["env-filtered"],
    }


def _bind(host: str, container: str, options: str) -> dict[str, Any]:
    given: Sequence[str] = [one for one in options.split(",") if one]
    return {"hostPath": host, "containerPath": container, "options": [*given, "bind"]}


def _version(name: str, elsewhere: bool) -> str:
    """The lowest version that allows the NAME of a device, and, if it is used, ELSEWHERE, the path of a node
    on the host (specs-go/version.go); all else that is used here is in the first version that runtimes take."""
    return "0.5.0" if elsewhere or name[0].isdigit() else "0.3.0"
