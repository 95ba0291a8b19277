"""What of an audit record gets into the journal, and in which form."""

from __future__ import annotations

import json

import pytest

from hetero_agent.audit.catalog import MESSAGE_IDS
from hetero_agent.audit.fields import fields_of, line_of
from hetero_agent.core.model import AGENT, AuditKind
from tests.audit.samples import DEVICE, LEASE, audit


def test_all_fields() -> None:
    assert fields_of(audit(7, priority=4)) == {
        "MESSAGE": f"{DEVICE}: idle -> allocating",
        "MESSAGE_ID": MESSAGE_IDS[AuditKind.TRANSITION],
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "hetero-agent",
        "HETERO_KIND": "transition",
        "HETERO_SEQUENCE": "7",
        "HETERO_GENERATION": "70",
        "HETERO_TIME_REALTIME": "1700000000000000",
        "HETERO_TIME_BOOTTIME": "5000000",
        "HETERO_TOOK_USEC": "1234",
        "HETERO_ACTOR_UID": "1000",
        "HETERO_ACTOR_PID": "77",
        "HETERO_ACTOR_UNIT": "user@1000.service",
        "HETERO_ACTOR_BUS_NAME": ":1.7",
        "HETERO_ACTOR_CLIENT": "slurm",
        "HETERO_ACTOR_AUTHORITY": "a.polkit.action",
        "HETERO_DEVICE": DEVICE,
        "HETERO_SERIAL": "SN1",
        "HETERO_LEASE": LEASE,
        "HETERO_FROM": "idle",
        "HETERO_TO": "allocating",
        "HETERO_TRIGGER": "granted",
        "HETERO_REASON": "because",
        "HETERO_RESULT": "",
        "HETERO_REQUEST_ID": "request 1",
    }


def test_the_end_of_a_lease_says_how_beside_why() -> None:
    fields = fields_of(audit(1, reason="its pid ended", extra={"RESULT": "owner-gone"}))
    assert (fields["HETERO_RESULT"], fields["HETERO_REASON"]) == ("owner-gone", "its pid ended")


def test_the_agents_own_doing_has_uid_minus_one() -> None:
    assert fields_of(audit(1, actor=AGENT))["HETERO_ACTOR_UID"] == "-1"


def test_foreign_text_is_one_printable_line() -> None:
    evil = "a\nMESSAGE_ID=forged\x1b[2J\u202e" + "x" * 5000
    record = audit(1, message=evil, reason=evil, request_id=evil, extra={"evidence": evil})
    for name, value in fields_of(record).items():
        assert value.isprintable(), name
        assert len(value) <= 2048, name
    assert "\n" not in line_of(record)
    assert json.loads(line_of(record))["HETERO_EVIDENCE"].startswith("a\\x0aMESSAGE_ID=forged\\x1b[2J\\u202e")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("evidence", "HETERO_EVIDENCE"),
        ("xid-code", "HETERO_XID_CODE"),
        ("Größe!", "HETERO_GR_SSE_"),
        ("", "HETERO_"),
    ],
)
def test_extra_fields_get_names_that_journald_takes(name: str, field: str) -> None:
    assert fields_of(audit(1, extra={name: "1"}))[field] == "1"


def test_extra_fields_override_nothing() -> None:
    fields = fields_of(audit(1, extra={"device": "forged", "actor-uid": "0", "sequence": "9" * 999}))
    assert (fields["HETERO_DEVICE"], fields["HETERO_ACTOR_UID"], fields["HETERO_SEQUENCE"]) == (
        DEVICE,
        "1000",
        "1",
    )
    assert len(next(name for name in fields_of(audit(1, extra={"x" * 999: "1"})) if "XX" in name)) <= 64
