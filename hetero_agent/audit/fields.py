"""An audit record as journal fields, and as a line of JSON for where there is no journal."""

from __future__ import annotations

import json
import re
from typing import Final

from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.core.model import AuditRecord
from hetero_agent.text import printable

IDENTIFIER: Final = "hetero-agent"

#: What journald takes as a field name (systemd.journal-fields(7)), after our prefix.
_NOT_IN_NAMES = re.compile(r"[^A-Z0-9_]")
_NAME_LIMIT: Final = 48
_MESSAGE_LIMIT: Final = 2048
_TEXT_LIMIT: Final = 512
_EXTRA_LIMIT: Final = 32


def fields_of(record: AuditRecord) -> dict[str, str]:
    """Return the journal fields of RECORD, MESSAGE among them; all of them one printable line.

    The text fields that the catalog's entries name are there even if they are empty.
    """
    actor = record.actor
    fields = {
        "MESSAGE": printable(record.message, _MESSAGE_LIMIT),
        "MESSAGE_ID": MESSAGE_IDS[record.kind],
        "PRIORITY": str(min(7, max(0, record.priority))),
        "SYSLOG_IDENTIFIER": IDENTIFIER,
        "HETERO_KIND": str(record.kind),
        "HETERO_SEQUENCE": str(record.sequence),
        "HETERO_GENERATION": str(record.generation),
        "HETERO_TIME_REALTIME": str(record.at.real),
        "HETERO_TIME_BOOTTIME": str(record.at.boot),
        "HETERO_TOOK_USEC": str(record.took),
        "HETERO_ACTOR_UID": str(actor.uid),
        "HETERO_ACTOR_PID": str(actor.pid),
    }
    for name, text in (
        ("DEVICE", record.device),
        ("SERIAL", record.serial),
        ("LEASE", record.lease),
        ("FROM", record.from_state),
        ("TO", record.to_state),
        ("TRIGGER", record.trigger),
        ("REASON", record.reason),
        ("RESULT", record.extra.get("RESULT", "")),
        ("REQUEST_ID", record.request_id),
        ("ACTOR_UNIT", actor.unit),
        ("ACTOR_BUS_NAME", actor.bus_name),
        ("ACTOR_CLIENT", actor.client),
        ("ACTOR_AUTHORITY", actor.authority),
    ):
        fields[f"HETERO_{name}"] = printable(text, _TEXT_LIMIT)
    for name, text in list(record.extra.items())[:_EXTRA_LIMIT]:
        # A name of ours is never overridden: a provider may choose the names of its evidence.
        key = "HETERO_" + _NOT_IN_NAMES.sub("_", name.upper())[:_NAME_LIMIT]
        fields.setdefault(key, printable(text, _TEXT_LIMIT))
    return fields


def line_of(record: AuditRecord) -> str:
    """Return the same fields as one line of JSON."""
    return json.dumps(fields_of(record), ensure_ascii=True, separators=(",", ":"))
