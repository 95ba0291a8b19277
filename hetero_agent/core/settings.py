"""What the governor goes by: durations and limits, as the configuration gives them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What the governor goes by; durations in microseconds, limits as in the configuration.

    PROBES: devices are probed, so a new one waits for its first probe."""

    confirm_within: int = 30_000_000
    reclaim_deadline: int = 60_000_000
    kill_after: int = 10_000_000
    occupied_after: int = 2_000_000
    park: int = 5_000_000
    orphans_kill: bool = False
    probes: bool = False
    system_holders: tuple[str, ...] = ()
    leases: int = 4096
    leases_per_uid: int = 1024
    leases_per_client: int = 256
    devices_per_lease: int = 64
    devices_per_client: int = 1024
    requests_per_uid: int = 50_000
    waiting: int = 256
