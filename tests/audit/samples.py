"""One audit record of each kind, and an outbox in memory that behaves as the ledger's."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_agent.core.model import Actor, AuditKind, AuditRecord, Instant

DEVICE = "0000:3b:00.0"
LEASE = "0123456789abcdef0123456789abcdef"


def audit(sequence: int, kind: AuditKind = AuditKind.TRANSITION, **changes: object) -> AuditRecord:
    given: dict[str, object] = {
        "message": f"{DEVICE}: idle -> allocating",
        "device": DEVICE,
        "serial": "SN1",
        "lease": LEASE,
        "from_state": "idle",
        "to_state": "allocating",
        "trigger": "granted",
        "reason": "because",
        "actor": Actor(1000, 77, "user@1000.service", ":1.7", "slurm", "a.polkit.action"),
        "request_id": "request 1",
        "took": 1234,
        **changes,
    }
    return AuditRecord(sequence, sequence * 10, Instant(5_000_000, 1_700_000_000_000_000), kind, **given)  # type: ignore[arg-type]


class MemoryOutbox:
    """The ledger's outbox as a dict."""

    def __init__(self, *records: AuditRecord) -> None:
        self.rows = {record.sequence: record for record in records}
        self.pulls = 0
        self.broken = ""

    @property
    def backlog(self) -> int:
        return len(self.rows)

    def put(self, *records: AuditRecord) -> None:
        self.rows.update({record.sequence: record for record in records})

    def outbox(self, after: int, limit: int) -> list[AuditRecord]:
        self.pulls += 1
        if self.broken:
            raise OSError(self.broken)
        return [self.rows[key] for key in sorted(self.rows) if key > after][:limit]

    def taken(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            del self.rows[sequence]
