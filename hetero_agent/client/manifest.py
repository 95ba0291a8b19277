"""What the owner of a lease needs to use it, and the environment made from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hetero_agent import names
from hetero_agent.client.errors import UnexpectedReply
from hetero_agent.text import printable

#: Variables by which vendors' runtimes choose devices: an inherited one speaks of devices that
#: are not the lease's, so it is removed before the manifest's own are set.  (Vendors' manuals;
#: the makers' container toolkits.)
DEVICE_VARIABLES: Final = frozenset(
    {
        "AMD_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "ASCEND_VISIBLE_DEVICES",
        "ASCEND_VNPU_SPECS",
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "FURIOSA_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "HABANA_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "HIP_VISIBLE_DEVICES",
        "MLU_VISIBLE_DEVICES",
        "MUSA_VISIBLE_DEVICES",
        "NEURON_RT_NUM_CORES",
        "NEURON_RT_VISIBLE_CORES",
        "NVIDIA_VISIBLE_DEVICES",
        "ONEAPI_DEVICE_SELECTOR",
        "RBLN_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "SYCL_DEVICE_FILTER",
        "TPU_VISIBLE_CHIPS",
        "TPU_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
    }
)
#: A resource limit that is none.
UNLIMITED: Final = 2**64 - 1

_FAMILIES = re.compile(r"ASCEND_(.*_)?VISIBLE_DEVICES|HABANA_VISIBLE_.+|HETERO_(LEASE|DEVICE|RESOURCE).*")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
#: Of the agent's own, which no profile and no provider may set.
_OURS: Final = frozenset({"HETERO_LEASE_ID", "HETERO_RESOURCE", "HETERO_DEVICES", "HETERO_DEVICE_COUNT"})


def chooses_devices(variable: str) -> bool:
    """Tell whether an environment variable chooses devices."""
    return variable in DEVICE_VARIABLES or bool(_FAMILIES.fullmatch(variable))


@dataclass(frozen=True)
class Manifest:
    """The manifest of a lease (design section 7).

    NODES are (device, path, role, kind, major, minor); MOUNTS (host, container, options);
    ENV_FILTERED are the variables of ENV that have other values where a device filter hides all
    devices but the lease's.  LIMITS are resource limits that its user needs, by setrlimit(2)'s names,
    `UNLIMITED` for none.  CONFIRM_BY_BOOTTIME is microseconds of CLOCK_BOOTTIME, 0 once
    confirmed.  RAW is the whole of it.
    """

    lease: str
    resource: str
    devices: tuple[str, ...]
    nodes: tuple[tuple[str, str, str, str, int, int], ...]
    mounts: tuple[tuple[str, str, str], ...]
    env: Mapping[str, str]
    env_filtered: Mapping[str, str]
    groups: tuple[int, ...]
    limits: Mapping[str, int]
    confirm_by_boottime: int
    raw: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Manifest:
        """Read a decoded manifest; unknown keys are kept in RAW only.  Raises UnexpectedReply for
        variables by which whoever sets them would run code as us."""
        return cls(
            lease=raw.get("lease", ""),
            resource=raw.get("resource", ""),
            devices=tuple(raw.get("devices", ())),
            nodes=tuple(tuple(node) for node in raw.get("nodes", ())),
            mounts=tuple(tuple(mount) for mount in raw.get("mounts", ())),
            env=_checked(raw.get("env", {})),
            env_filtered=_checked(raw.get("env-filtered", {})),
            groups=tuple(raw.get("groups", ())),
            limits=dict(raw.get("limits", {})),
            confirm_by_boottime=raw.get("confirm-by-boottime", 0),
            raw=raw,
        )

    def variables(self, *, filtered: bool = False) -> dict[str, str]:
        """Return the variables that say what the lease is, and those of its devices' vendor.
        FILTERED: for a container or unit in which only the lease's devices can be seen."""
        return {
            "HETERO_LEASE_ID": self.lease,
            "HETERO_RESOURCE": self.resource,
            "HETERO_DEVICES": ",".join(self.devices),
            "HETERO_DEVICE_COUNT": str(len(self.devices)),
            **self.env,
            **(self.env_filtered if filtered else {}),
        }

    def environment(
        self, base: Mapping[str, str], *, inside: bool = False, outer: Manifest | None = None
    ) -> dict[str, str]:
        """Return BASE without inherited choices of devices, with the lease's own.  INSIDE: BASE is of a
        process of the lease, and who made that process knew which devices can be seen where it runs.
        OUTER is another live lease that BASE is of a process of: its choices are no strangers'."""
        given = outer.env.keys() if outer is not None else ()
        kept = {key: value for key, value in base.items() if key in given or not chooses_devices(key)}
        known = {key: base[key] for key in self.env_filtered if key in base} if inside else {}
        return {**kept, **self.variables(), **known}


def _checked(variables: Mapping[str, str]) -> dict[str, str]:
    """Return VARIABLES.  Raises UnexpectedReply.

    The agent is a user of its own and we are root often enough: it must not be able to say LD_PRELOAD
    once it was taken over.  Nor may a name be more than one, since shells read it.
    """
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise UnexpectedReply(f"the agent gives a variable of the name {printable(name, 64)!r}")
        if name not in _OURS and names.FORBIDDEN_VARIABLE.fullmatch(name) and name not in _of_profiles():
            raise UnexpectedReply(
                f"the agent gives {name}, by which code can be run, and no profile in {names.PROFILES_DIR}"
                " names it: was it taken over?"
            )
    return dict(variables)


def _of_profiles() -> set[str]:
    """The variables that root's profiles name; the package's own name none that is asked for here."""
    import tomllib  # noqa: PLC0415 (costs startup, and is needed once in a blue moon)
    from pathlib import Path  # noqa: PLC0415

    found: set[str] = set()
    for path in sorted(Path(names.PROFILES_DIR).glob("*.toml")):
        try:
            profile = tomllib.loads(path.read_text(encoding="utf-8"))
            found |= profile.get("env", {}).keys() | profile.get("parts", {}).get("env", {}).keys()
        except (OSError, ValueError, AttributeError):
            continue  # the agent says what is wrong with it
    return found
