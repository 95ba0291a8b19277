"""Who may be bound: what is wholly one's own, by uid or by the kernel's user namespaces."""

from __future__ import annotations

import pytest

from hetero_agent.core import rights
from hetero_agent.core.model import ProcessRef
from hetero_agent.core.ports import ProcessFacts

REF = ProcessRef(42, 1)


@pytest.mark.parametrize(
    ("actor", "uids", "owner", "may"),
    [
        (1000, (1000,) * 4, 0, True),
        (1000, (1001,) * 4, 0, False),
        (1000, (1000, 0, 0, 0), 0, False),
        (1000, (1000, 1000, 0, 1000), 0, False),
        # in a rootless container of the caller's, of another user's, and where it can't be told
        (1000, (100_999,) * 4, 1000, True),
        (1000, (100_999,) * 4, 1001, False),
        (1000, (100_999,) * 4, -1, False),
        (0, (1001,) * 4, 1001, True),
    ],
)
def test_whose_process_may_be_bound(actor: int, uids: tuple[int, int, int, int], owner: int, may: bool) -> None:
    why_not = rights.may_bind_pid(actor, ProcessFacts(REF, uids, owner=owner))
    assert (why_not == "") is may
    assert may or "42" in why_not
