"""The MESSAGE_ID of each kind of audit record (journald.conf's sd-id128 form, 32 hex digits).

They are forever: programs filter by them (``journalctl MESSAGE_ID=…``), and the entries of
``systemd/hetero-agent.catalog`` that ``journalctl -x`` shows hang on them.
"""

from __future__ import annotations

from typing import Final

from hetero_agent.core.model import AuditKind

MESSAGE_IDS: Final[dict[AuditKind, str]] = {
    AuditKind.TRANSITION: "227effd7b34344b2986e825ea0354c9f",
    AuditKind.APPEARED: "1dcab79a1af9404a801d801e134a4109",
    AuditKind.REPLACED: "8ab76747f7b24c3abe068edb652add38",
    AuditKind.GONE: "5608f4de1e5e4e8a9f612dc7216af3b0",
    AuditKind.GRANTED: "429fa3e5f7894047827f70b367f9c6bf",
    AuditKind.CONFIRMED: "3c63199bbeb44322bd39e52cf7bf046c",
    AuditKind.ENDED: "d992005f64e34133b99b7f77485381c9",
    AuditKind.EXPIRED: "c8374dc1444248c9a313324b5a2c8fbb",
    AuditKind.REFUSED: "6d5be2680ba84c8786c6cf3d4ee636a2",
    AuditKind.CORDON: "08b06831c6a647089dcfac43836e0601",
    AuditKind.HEALTH: "b81da8bbfe3d4b868cbadad8de8a0d3a",
    AuditKind.INTRUDER: "248e148f3a7347f0be204fd3cf207bd1",
    AuditKind.ORPHAN: "aa5afa285ad3467ba4e12ae4da7745ad",
    AuditKind.SIGNALLED: "88049317a07d4f1c83f65201dfa5a9c3",
    AuditKind.PROVIDER: "b00b079f191a4e18a8be8611adbb648e",
    AuditKind.RESYNC: "aa6135a8eb5f462fa78e90227b464583",
    AuditKind.STARTED: "ca77b06e8b844c47b347d7267c78bdc2",
    AuditKind.STOPPED: "616de70279be4457b14b73739a276b70",
    AuditKind.STORE: "88411149fa1a4a6ca0bcce6c5cfe61f4",
    AuditKind.RELOADED: "48b0b98dd59a4f70af5a4369c9695da9",
    AuditKind.CORRELATION: "866e9f7c3abf42d9a9b0616c256585e5",
    AuditKind.APPLICATION_FAULT: "e9ea1b7d4ae340f39562ab6514c542c8",
    AuditKind.ACCESS: "b1cb418d85ef43618340d143107073e8",
    AuditKind.EXPOSURE: "2d6d777481aa478dbd52939775793d16",
}
