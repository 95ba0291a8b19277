"""Request ids: the same call twice has the same answer, a spent id grants nothing."""

from __future__ import annotations

from dataclasses import replace

from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.model import Instant, RequestKey, RequestRecord
from hetero_agent.core.world import World

#: How long an id is remembered after its lease ended (or, without a lease, its answer): 24 h.
MEMORY = 24 * 3600 * 1_000_000

#: Confirm ids remembered per lease; a later retry of an older one only binds again.
CONFIRMS = 64

#: Methods whose id is spent when the lease they concern has ended.
_SPENT_WITH_LEASE = frozenset({"Allocate", "Confirm"})


def replay(world: World, key: RequestKey, fingerprint: str) -> RequestRecord | None:
    """Return the record of an earlier call with this id, None for a new one.

    Raises Refusal: RequestSpent if its lease has ended, RequestConflict if the arguments differ.
    """
    record = world.requests.get(key)
    if record is None:
        return None
    if key.method in _SPENT_WITH_LEASE and record.lease:
        lease = world.leases.get(record.lease)
        if record.ended or lease is None or not lease.alive:
            raise Refusal(
                ErrorKind.REQUEST_SPENT,
                f"the lease of request id {key.request_id} has ended; use a new request id",
            )
    if record.fingerprint != fingerprint:
        raise Refusal(
            ErrorKind.REQUEST_CONFLICT,
            f"request id {key.request_id} was used with other arguments; use a new request id",
        )
    return record


def remember(world: World, key: RequestKey, fingerprint: str, body: str, at: Instant, lease: str = "") -> None:
    """Store the answer to a call, so that a retry gets the same."""
    world.put_request(RequestRecord(key, fingerprint, body, lease, boot=at.boot))
    if key.method == "Confirm":
        confirms = sorted(
            (world.requests[one].boot, one) for one in world.by_lease[lease] if one.method == "Confirm"
        )
        for _, old in confirms[:-CONFIRMS]:
            world.drop_request(old)
    if not lease:
        world.alarm(at.boot + MEMORY, "purge", "")


def spend(world: World, lease_id: str, at: Instant) -> None:
    """The lease is over: its ids stay remembered, for a day from now, as spent."""
    for key in sorted(world.by_lease.get(lease_id, ()), key=str):
        world.put_request(replace(world.requests[key], ended=True, boot=at.boot))
    world.alarm(at.boot + MEMORY, "purge", "")


def purge(world: World, at: Instant) -> None:
    """Forget what is older than a day and belongs to no live lease."""
    for key, record in list(world.requests.items()):
        if record.boot + MEMORY <= at.boot and record.lease not in world.leases:
            world.drop_request(key)
