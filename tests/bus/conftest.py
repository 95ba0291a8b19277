"""One bus and one service for the tests of a module that only look, or clean up themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.bus import PrivateBus
from tests.support.bus_service import Service, record


@pytest.fixture(scope="module")
def shared_bus() -> Iterator[PrivateBus]:
    """A private bus for the whole module."""
    private = PrivateBus()
    yield private
    private.close()


@pytest.fixture(scope="module")
def service(shared_bus: PrivateBus) -> Iterator[Service]:
    """The service with 16 idle devices, for the whole module."""
    with Service(shared_bus, devices=[record(number) for number in range(16)]) as one:
        yield one
