"""What a caller gets when a call fails: one of our error names, a standard one, or Internal."""

from __future__ import annotations

import asyncio
import logging
import secrets

from hetero_agent import names
from hetero_agent.bus.codec import CodecError
from hetero_agent.core.effects import ErrorKind, Refusal

log = logging.getLogger("hetero_agent.bus")

_STANDARD = "org.freedesktop.DBus.Error."
#: The standard error for what polkit would allow after an authentication, without its prefix.
AUTHENTICATION_NEEDED = "InteractiveAuthorizationRequired"


class StandardError(Exception):
    """An error of the D-Bus specification: NAME without its prefix (``UnknownMethod``), TEXT."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = _STANDARD + name
        self.text = text


class AuthenticationNeeded(StandardError):
    """The caller may, once somebody has authenticated, and nobody could be asked."""

    def __init__(self, text: str) -> None:
        super().__init__(AUTHENTICATION_NEEDED, text)


class Decided(Exception):
    """A refusal by the governor, which has put it into the audit already."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


def invalid(text: str) -> Refusal:
    """An InvalidArgument; TEXT says which argument and what fits."""
    return Refusal(ErrorKind.INVALID_ARGUMENT, text)


def name_of(kind: ErrorKind) -> str:
    """The D-Bus name of an error."""
    return names.ERROR_PREFIX + kind


def kind_of(refusal: Refusal | AuthenticationNeeded) -> str:
    """The name of a refusal without its prefix."""
    return AUTHENTICATION_NEEDED if isinstance(refusal, AuthenticationNeeded) else str(refusal.kind)


def describe(error: BaseException, member: str) -> tuple[str, str]:
    """Return name and text of the error reply for whatever a handler of MEMBER raised.

    What we did not foresee becomes Internal with an id; the id and the traceback are in our
    log and nowhere else.
    """
    if isinstance(error, Decided):
        error = error.refusal
    if isinstance(error, Refusal):
        return name_of(error.kind), error.text
    if isinstance(error, StandardError):
        return error.name, error.text
    if isinstance(error, CodecError):
        return _STANDARD + "InvalidArgs", f"the arguments can't be read: {error}"
    if isinstance(error, asyncio.CancelledError):
        return name_of(ErrorKind.INTERNAL), "the call was given up because the agent stops; ask again later"
    number = secrets.token_hex(8)
    log.error("call of %s failed, error id %s", member, number, exc_info=error)
    return name_of(ErrorKind.INTERNAL), f"internal error {number}; the agent's log says more"
