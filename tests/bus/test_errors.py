"""Every error name, and what a caller never gets to see."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from hetero_agent import names
from hetero_agent.bus.codec import CodecError
from hetero_agent.bus.errors import Decided, StandardError, describe
from hetero_agent.core.effects import ErrorKind, Refusal

_NAMES = {
    ErrorKind.NOT_READY: "NotReady",
    ErrorKind.INVALID_ARGUMENT: "InvalidArgument",
    ErrorKind.NOT_FOUND: "NotFound",
    ErrorKind.UNAVAILABLE: "Unavailable",
    ErrorKind.LIMIT_EXCEEDED: "LimitExceeded",
    ErrorKind.QUEUE_FULL: "QueueFull",
    ErrorKind.NOT_AUTHORIZED: "NotAuthorized",
    ErrorKind.NOT_OWNER: "NotOwner",
    ErrorKind.REQUEST_CONFLICT: "RequestConflict",
    ErrorKind.REQUEST_SPENT: "RequestSpent",
    ErrorKind.LEASE_ENDED: "LeaseEnded",
    ErrorKind.TIMEOUT: "Timeout",
    ErrorKind.PROTOCOL_UNSUPPORTED: "ProtocolUnsupported",
    ErrorKind.NOT_SUPPORTED: "NotSupported",
    ErrorKind.STORE_FAILED: "StoreFailed",
    ErrorKind.INTERNAL: "Internal",
}


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_name_of_every_error(kind: ErrorKind) -> None:
    assert kind in _NAMES
    expected = ("org.heteroagent.Agent1.Error." + _NAMES[kind], "do this")
    assert describe(Refusal(kind, "do this"), "x") == expected
    assert describe(Decided(Refusal(kind, "do this")), "x") == expected


def test_standard_errors() -> None:
    assert describe(StandardError("UnknownMethod", "no"), "x") == (
        "org.freedesktop.DBus.Error.UnknownMethod",
        "no",
    )
    assert describe(CodecError("too long"), "x")[0] == "org.freedesktop.DBus.Error.InvalidArgs"


def test_what_was_not_foreseen_shows_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "hetero_agent.bus"):
        name, text = describe(KeyError("secret-detail"), "Manager.Allocate")
    assert name == names.ERROR_PREFIX + "Internal"
    assert "secret" not in text
    assert "KeyError" not in text
    found = re.search(r"[0-9a-f]{16}", text)
    assert found is not None
    assert found.group(0) in caplog.text
    assert "secret-detail" in caplog.text


def test_a_cancelled_call_is_answered() -> None:
    name, text = describe(asyncio.CancelledError(), "x")
    assert name == names.ERROR_PREFIX + "Internal"
    assert "stops" in text
