"""Request ids: the same call twice has the same answer, a spent id grants nothing."""

from __future__ import annotations

from dataclasses import replace

from hetero_agent.core.effects import ErrorKind, Refusal, Reply
from hetero_agent.core.events import Token
from hetero_agent.core.model import Instant, RequestKey, RequestRecord
from hetero_agent.core.world import World

#: How long an id is remembered after its lease ended (or, without a lease, its answer): 24 h.
MEMORY = 24 * 3600 * 1_000_000

#: Confirm ids remembered per live lease; a later retry of an older one only binds again.
CONFIRMS = 64

#: Purges are done at whole minutes, so that a busy day does not have one for each lease.
_GRID = 60_000_000

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
    same(key, record.fingerprint, fingerprint)
    return record


def repeated(world: World, key: RequestKey, fingerprint: str, token: Token) -> bool:
    """Whether a call with this id was answered before: then this one gets the same answer.  Raises Refusal
    as `replay` does."""
    record = replay(world, key, fingerprint)
    if record is not None:
        world.effect(Reply(token, record.body))
    return record is not None


def same(key: RequestKey, before: str, now: str) -> None:
    """Raises Refusal if two calls with one id have not the same arguments."""
    if before != now:
        raise Refusal(
            ErrorKind.REQUEST_CONFLICT,
            f"request id {key.request_id} was used with other arguments; use a new request id",
        )


def remember(
    world: World,
    key: RequestKey,
    fingerprint: str,
    body: str,
    at: Instant,
    lease: str = "",
    *,
    ended: bool = False,
) -> None:
    """Store the answer to a call, so that a retry gets the same.  ENDED: LEASE is over already."""
    world.put_request(RequestRecord(key, fingerprint, body, lease, ended, boot=at.boot))
    if key.method == "Confirm":
        _keep_confirms(world, lease, CONFIRMS - 1, key)
    if ended or not lease:
        purge_at(world, at.boot + MEMORY)


def _keep_confirms(world: World, lease_id: str, most: int, last: RequestKey | None = None) -> None:
    """Forget the Confirm ids of a lease but for LAST and the newest MOST of the others."""
    confirms = [one for one in world.by_lease.get(lease_id, ()) if one.method == "Confirm" and one != last]
    confirms.sort(key=lambda one: (world.requests[one].boot, str(one)))
    for old in confirms[: max(0, len(confirms) - most)]:
        world.drop_request(old)


def room(world: World, uid: int) -> None:
    """Raises Refusal if no more request ids of UID can be remembered."""
    have, limit = world.remembered[uid], world.settings.requests_per_uid
    if have >= limit:
        raise Refusal(
            ErrorKind.LIMIT_EXCEEDED,
            f"{have} request ids of uid {uid} are remembered for a day, the most allowed",
        )


def spend(world: World, lease_id: str, at: Instant) -> None:
    """The lease is over: its ids stay remembered, for a day from now, as spent; of its renewals the
    last one, so that many of them don't use up what may be remembered of a uid."""
    _keep_confirms(world, lease_id, 1)
    for key in sorted(world.by_lease.get(lease_id, ()), key=str):
        world.put_request(replace(world.requests[key], ended=True, boot=at.boot))
    purge_at(world, at.boot + MEMORY)


def purge_at(world: World, boot: int) -> None:
    """Have a purge at the first whole minute from BOOT on."""
    world.alarm(-(-boot // _GRID) * _GRID, "purge", "")


def purge(world: World, at: Instant) -> None:
    """Forget what is older than a day and belongs to no live lease."""
    oldest = None
    for key, record in list(world.requests.items()):
        if record.lease in world.leases:
            continue
        if record.boot + MEMORY <= at.boot:
            world.drop_request(key)
        elif oldest is None or record.boot < oldest:
            oldest = record.boot
    if oldest is not None:
        purge_at(world, oldest + MEMORY)
