"""A lease for what is about to begin: asked for again and again, if its user will wait for devices."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.verbs import lease_of, request_of

if TYPE_CHECKING:
    from hetero_agent.cli.complaints import Complaint
    from hetero_agent.client import Client
    from hetero_agent.client.errors import HeteroError
    from hetero_agent.client.results import Grant

#: Seconds between attempts while waiting, unless a report comes sooner.
_RETRY: Final = 2.0


async def obtain(client: Client, args: argparse.Namespace, **options: Any) -> Grant:
    """Lease what ARGS say, in use at once, with further OPTIONS of Allocate (the binding); wait
    ``args.wait`` seconds for devices to be free.  Raises Complaint."""
    from hetero_agent.cli import complaints  # noqa: PLC0415
    from hetero_agent.client import errors, events  # noqa: PLC0415
    from hetero_agent.client.session import new_request_id  # noqa: PLC0415

    end = time.monotonic() + args.wait
    request = request_of(args)
    request_id = new_request_id()

    async def attempt() -> Grant:
        return await client.allocate(
            args.resource,
            args.count,
            request_id=request_id,
            confirm=True,
            **request,
            **lease_of(args),
            **options,
        )

    async def complaint(error: HeteroError) -> Complaint:
        return await complaints.about_request(client, error, args.resource, args.count, request)

    try:
        return await attempt()
    except errors.HeteroError as error:
        found = await complaint(error)
        if found.code != exitcodes.BUSY or not args.wait:
            raise found from error
    async with client.watch(events.Report) as reports:
        while True:
            left = end - time.monotonic()
            if left <= 0:
                found.code = exitcodes.TIMED_OUT
                found.cause = f"waited {args.wait:g} s in vain: {found.cause}"
                raise found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_RETRY, left)):
                    await anext(reports)
            try:
                return await attempt()
            except errors.HeteroError as error:
                found = await complaint(error)
                if found.code != exitcodes.BUSY:
                    raise found from error
