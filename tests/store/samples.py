"""Records to store, and the clock and shorthand that the store's tests share."""

from __future__ import annotations

import time

from hetero_agent.core.effects import Changes
from hetero_agent.core.model import (
    Actor,
    AuditKind,
    AuditRecord,
    Binding,
    Cordon,
    Debt,
    DeviceRecord,
    Instant,
    Lease,
    LeaseState,
    Node,
    ProcessRef,
    RequestKey,
    RequestRecord,
    Role,
)

DEVICE = "0000:3b:00.0"


def now() -> Instant:
    return Instant(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000, time.time_ns() // 1000)


def request_key(number: int, method: str = "Allocate") -> RequestKey:
    return RequestKey(1000, "slurm", method, f"request {number}")


def lease(number: int) -> Lease:
    return Lease(
        id=f"{number:032x}",
        key=request_key(number),
        resource="nvidia.com/gpu",
        devices=(DEVICE,),
        uid=1000,
        client="slurm",
        label="",
        state=LeaseState.ACTIVE,
        created=Instant(number, number),
        granted=True,
        binding=Binding(pid=ProcessRef(77, 88)),
        manifest={"lease": f"{number:032x}", "nodes": [[DEVICE, "/dev/nvidia0", "own", "char", 195, 0]]},
    )


def request(number: int, **changes: object) -> RequestRecord:
    given = {"lease": f"{number:032x}", "body": f'{{"lease":"{number:032x}"}}', "boot": now().boot, **changes}
    return RequestRecord(request_key(number), "fingerprint", **given)  # type: ignore[arg-type]


def debt(number: int, device: str = DEVICE) -> Debt:
    return Debt(device, f"{number:032x}", 1000, 5, 6, nodes=(Node("/dev/nvidia0", Role.OWN, major=195),))


def record(device: str = DEVICE) -> DeviceRecord:
    return DeviceRecord(device, "nvidia.com/gpu", attributes={"memory": 85899345920, "integrated": False})


def cordon(device: str = DEVICE, reason: str = "fan") -> Cordon:
    return Cordon(device, "SN1", reason, 0, 7)


def audit(sequence: int, device: str = DEVICE, **changes: object) -> AuditRecord:
    given = {"kind": AuditKind.TRANSITION, "message": f"{device}: idle -> allocating", **changes}
    return AuditRecord(
        sequence=sequence,
        generation=sequence * 10,
        at=Instant(sequence, sequence),
        device=device,
        from_state="idle",
        to_state="allocating",
        trigger="granted",
        actor=Actor(1000, 77, "user@1000.service", ":1.7", "slurm"),
        **given,  # type: ignore[arg-type]
    )


def changes(*audits: AuditRecord, **tables: object) -> Changes:
    last = audits[-1].sequence if audits else 0
    return Changes(audits=list(audits), sequence=last, generation=last * 10, **tables)  # type: ignore[arg-type]
