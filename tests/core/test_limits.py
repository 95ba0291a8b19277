"""Each limit: per (uid, client), per uid, in total; and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_agent.core.effects import ErrorKind, Refuse
from tests.core.host import SECOND, Host, card, holder


def host_with(count: int = 8, **limits: Any) -> Host:
    """A host of COUNT idle devices."""
    host = Host(**limits)
    host.ready(*(card(f"d{index}", index) for index in range(count)))
    return host


def refused(host: Host, **asked: object) -> str:
    """Allocate must be refused for a limit; returns the text."""
    answer = host.answer(host.ask(**asked))  # type: ignore[arg-type]
    assert isinstance(answer, Refuse)
    assert answer.error is ErrorKind.LIMIT_EXCEEDED
    return answer.text


def test_devices_per_lease() -> None:
    host = host_with(devices_per_lease=2)
    assert refused(host, count=3) == "3 devices in one lease would be over the limit of 2"
    host.grant(count=2)


def test_leases_in_all() -> None:
    host = host_with(leases=2)
    host.grant()
    host.grant(uid=1001)
    assert refused(host, uid=1002) == "3 leases in all would be over the limit of 2"


def test_leases_per_uid_over_all_its_clients() -> None:
    host = host_with(leases_per_uid=2)
    host.grant(client="a")
    host.grant(client="b")
    assert refused(host, client="c") == "3 leases of uid 1000 would be over the limit of 2"
    host.grant(uid=1001)


@pytest.mark.parametrize("client", ["", "k", "*"])
def test_leases_per_client(client: str) -> None:
    host = host_with(leases_per_client=2)
    for _ in range(2):
        host.grant(client=client)
    assert refused(host, client=client) == "3 leases of this client of uid 1000 would be over the limit of 2"
    host.grant(client="other")
    host.grant(client=client, uid=1001)


def test_a_client_by_the_name_of_all_counts_once() -> None:
    host = host_with(leases_per_uid=3)
    for _ in range(3):
        host.grant(client="*")
    assert refused(host, client="*") == "4 leases of uid 1000 would be over the limit of 3"


def test_devices_per_client() -> None:
    host = host_with(devices_per_client=3)
    host.grant(count=2)
    assert refused(host, count=2) == "4 devices of this client of uid 1000 would be over the limit of 3"
    host.grant()
    host.grant(client="other", count=3)


def test_the_owner_is_charged_not_the_caller() -> None:
    host = host_with(leases_per_uid=1)
    host.grant(uid=0, owner_uid=1000)
    assert refused(host) == "2 leases of uid 1000 would be over the limit of 1"
    host.grant(uid=0)


def test_a_lease_counts_until_its_last_device_has_settled() -> None:
    host = host_with(leases_per_uid=1, devices_per_client=2)
    lease = host.use(count=2)
    host.release(lease.id)
    refused(host)
    host.scan({"d0": [holder(5)]})
    assert host.states()["d1"] == "idle"
    assert host.governor.world.held[1000, ""] == 1
    refused(host)
    host.scan()
    host.grant(count=2)


def test_waiting_requests_are_bounded_and_limits_hold_when_they_are_served() -> None:
    host = host_with(2, waiting=2, leases_per_uid=1)
    for one in ("d0", "d1"):
        host.opened(one)
    first, second = host.ask(), host.ask()
    assert first not in host.answers
    assert second not in host.answers
    assert host.governor.usage()["waiting"] == 2
    assert refused(host, uid=1001) == "2 requests wait already; try again later"
    host.scan()
    assert host.preparing().devices == ("d0",)
    assert host.error(second) is ErrorKind.LIMIT_EXCEEDED
    host.prepared(host.preparing().id)
    host.body(first)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"count": 0}, "count must be 1 or more"),
        ({"count": 2, "devices": ("d0",)}, "count is 2, but 1 devices are named"),
    ],
)
def test_arguments(asked: dict[str, object], text: str) -> None:
    host = host_with(2)
    answer = host.answer(host.ask(**asked))  # type: ignore[arg-type]
    assert answer == Refuse(answer.token, ErrorKind.INVALID_ARGUMENT, text)


# -- short for want of a scan ----------------------------------------------------------------------
def test_a_request_waits_for_the_scan_of_a_dirty_device() -> None:
    host = host_with(1)
    host.opened("d0")
    token = host.ask()
    assert token not in host.answers
    assert host.scans() == ["d0"]
    host.scan()
    host.prepared(host.preparing().id)
    host.body(token)


def test_it_waits_five_seconds_at_most() -> None:
    host = host_with(1)
    host.opened("d0")
    token = host.ask()
    host.ticks(4 * SECOND)
    assert token not in host.answers
    host.ticks(2 * SECOND)
    assert host.error(token) is ErrorKind.UNAVAILABLE
    assert host.governor.usage()["waiting"] == 0


def test_each_that_waits_has_its_own_deadline() -> None:
    host = host_with(2)
    host.opened("d0")
    host.opened("d1")
    first = host.ask(count=2)
    host.ticks(3 * SECOND)
    second = host.ask()
    host.ticks(2500_000)
    assert host.error(first) is ErrorKind.UNAVAILABLE
    assert second not in host.answers
    host.ticks(3 * SECOND)
    assert host.error(second) is ErrorKind.UNAVAILABLE


def test_the_retry_of_one_that_waits_joins_it() -> None:
    host = host_with(1, leases_per_uid=1)
    host.opened("d0")
    first = host.ask(request_id="a", fingerprint="f")
    again = host.ask(request_id="a", fingerprint="f")
    assert host.error(host.ask(request_id="a", fingerprint="g")) is ErrorKind.REQUEST_CONFLICT
    assert host.governor.usage()["waiting"] == 1
    host.scan()
    host.prepared(host.preparing().id)
    assert host.body(first) == host.body(again)


def test_nobody_overtakes_for_the_same_resource() -> None:
    host = Host()
    host.ready(card("d0", 0), card("d1", 1), card("x0", 2, resource="v/x"))
    host.opened("d0")
    both = host.ask(count=2)
    one = host.ask(count=1)
    assert one not in host.answers
    host.grant("v/x")
    host.scan()
    assert host.preparing().devices == ("d0", "d1")
    assert host.error(one) is ErrorKind.UNAVAILABLE
    host.prepared(host.preparing().id)
    host.body(both)


def test_those_that_wait_keep_their_order_when_an_event_is_undone() -> None:
    host = host_with(1)
    host.opened("d0")
    first, second = host.ask(), host.ask()
    started = host.later().boot
    event = host.scan_event({}, started=started)
    host.governor.handle(event)
    host.governor.undo()
    host.do(event)
    assert host.error(second) is ErrorKind.UNAVAILABLE
    host.prepared(host.preparing().id)
    host.body(first)
