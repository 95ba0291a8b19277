"""What systemd and logind tell of the host reaches the agent, and what others forge does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dbus_next import Message, MessageType

from hetero_agent import names
from hetero_agent.bus.transport import Incoming
from tests.support.bus import PrivateBus
from tests.support.bus_service import Service
from tests.support.raw import RawClient
from tests.support.systemd import LOGIND, POLICY, FakeSystemd
from tests.support.wait import wait_until

#: Lets signals reach the agent, which its policy does not.
OPEN = f"""
<policy context="default"><allow send_destination="{names.BUS_NAME}" send_type="signal"/></policy>
"""


@pytest.fixture
def host_bus() -> Iterator[PrivateBus]:
    private = PrivateBus(extra=POLICY)
    yield private
    private.close()


def test_reload_and_sleep_are_told(host_bus: PrivateBus) -> None:
    with FakeSystemd(host_bus) as host, Service(host_bus) as service:
        told: list[tuple[str, bool]] = []
        service.do(lambda: setattr(service.service, "host_news", lambda *news: told.append(news)))
        wait_until(lambda: host.subscribed, what="the subscription")
        host.reloading(True)
        host.reloading(False)
        host.prepare_for_sleep(True)
        host.prepare_for_sleep(False)
        wait_until(lambda: len(told) == 4, what="the news")
        assert told == [("reload", True), ("reload", False), ("sleep", True), ("sleep", False)]


def test_who_comes_to_the_bus_later_is_heard_too(host_bus: PrivateBus) -> None:
    with Service(host_bus) as service:
        told: list[tuple[str, bool]] = []
        service.do(lambda: setattr(service.service, "host_news", lambda *news: told.append(news)))
        for _ in range(2):
            with FakeSystemd(host_bus) as host:
                wait_until(lambda host=host: host.subscribed, what="the subscription")
                told.clear()
                host.reloading(True)
                wait_until(lambda: told == [("reload", True)], what="the news")


@pytest.mark.parametrize("here", [True, False], ids=["with the real ones", "without"])
def test_a_forged_signal_is_nobodys(here: bool) -> None:
    """Sent to the agent itself, which no match rule of the bus keeps out."""
    bus = PrivateBus(extra=POLICY + OPEN)
    host = FakeSystemd(bus) if here else None
    try:
        with Service(bus) as service, RawClient(bus) as attacker:
            told: list[tuple[str, bool]] = []
            service.do(lambda: setattr(service.service, "host_news", lambda *news: told.append(news)))
            connection = service.service._connection
            handle = connection.on_signal
            senders: list[str] = []

            def spy(message: Incoming) -> None:
                senders.append(message.sender)
                handle(message)

            connection.on_signal = spy
            for path, interface, member in (
                ("/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager", "Reloading"),
                ("/org/freedesktop/login1", LOGIND + ".Manager", "PrepareForSleep"),
            ):
                attacker.send(path, interface, member, "b", [True], kind=MessageType.SIGNAL)
            attacker.call(names.ROOT, "org.freedesktop.DBus.Peer", "Ping")
            assert senders.count(attacker.unique_name) == 2
            assert told == []
    finally:
        if host is not None:
            host.close()
        bus.close()


def test_odd_arguments_are_nobodys_either(host_bus: PrivateBus) -> None:
    with FakeSystemd(host_bus) as host, Service(host_bus) as service:
        told: list[tuple[str, bool]] = []
        service.do(lambda: setattr(service.service, "host_news", lambda *news: told.append(news)))
        wait_until(lambda: host.subscribed, what="the subscription")
        interface = LOGIND + ".Manager"
        for signature, body in (("s", ["yes"]), ("", []), ("bb", [True, True])):
            host.send(Message.new_signal("/x", interface, "PrepareForSleep", signature, body))
        host.prepare_for_sleep(False)
        wait_until(lambda: told, what="the news")
        assert told == [("sleep", False)]
