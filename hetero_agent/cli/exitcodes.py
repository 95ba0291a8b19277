"""The exit codes of heteroctl, the same for every verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hetero_agent.client.errors import HeteroError

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
#: The agent or its bus can't be reached (EX_UNAVAILABLE of sysexits.h).
UNREACHABLE: Final = 69
#: Nothing is free now; later it may be (EX_TEMPFAIL).
BUSY: Final = 75
#: The caller may not (EX_NOPERM).
NOT_AUTHORIZED: Final = 77
#: This host can never satisfy the request (EX_CONFIG).
NEVER: Final = 78
#: The lease ended, or lost a device, while the command ran.
LEASE_LOST: Final = 79
#: Waited in vain (timeout(1)'s).
TIMED_OUT: Final = 124
#: `run` itself failed (timeout(1), env(1), chroot(1)).
RUN_FAILED: Final = 125
#: The command was found and can't be executed, or was not found (the shell's).
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
#: Added to the number of the signal that ended something (the shell's).
SIGNAL: Final = 128


def of_error(error: HeteroError) -> int:
    """Return the exit code for what the client library raised."""
    from hetero_agent.client import errors  # noqa: PLC0415 (only once something is wrong)

    table: tuple[tuple[type[HeteroError] | tuple[type[HeteroError], ...], int], ...] = (
        ((errors.Unreachable, errors.CallTimeout), UNREACHABLE),
        ((errors.NotReady, errors.Unavailable, errors.LimitExceeded, errors.QueueFull), BUSY),
        ((errors.NotAuthorized, errors.NotOwner), NOT_AUTHORIZED),
        (errors.InvalidArgument, USAGE),
        (errors.Timeout, TIMED_OUT),
    )
    for kinds, code in table:
        if isinstance(error, kinds):
            return code
    return FAILURE
