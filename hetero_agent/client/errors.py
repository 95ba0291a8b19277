"""What can go wrong when speaking to the agent: one exception per error name of the bus."""

from __future__ import annotations

from typing import ClassVar, Final

from hetero_agent import names
from hetero_agent.text import printable

#: Characters kept of an error's text: an agent's text may list devices and reasons.
_TEXT_LIMIT: Final = 2000


class HeteroError(Exception):
    """Anything this library raises on purpose.  `text` says the cause and the next step."""

    def __init__(self, text: str, name: str = "") -> None:
        self.text = printable(text, _TEXT_LIMIT)
        #: The full D-Bus error name as it came, "" if no error message was involved.
        self.name = printable(name)
        super().__init__(self.text)


class Unreachable(HeteroError):
    """There is no bus at the address, or no agent on the bus, or it went away and didn't return."""


class NoBus(Unreachable):
    """There is no bus to connect to."""


class TurnedAway(NoBus):
    """The bus doesn't let us on, because the user database has no entry of our uid."""


class NoAgent(Unreachable):
    """The bus is there; the agent is not on it."""


class CallTimeout(HeteroError):
    """The agent is there and did not answer in time.  The call may have been carried out:
    make it again with the same request id to learn the answer."""


class AgentError(HeteroError):
    """The agent (or the bus on its behalf) answered with an error."""

    #: The error's name without the common prefix, "" for classes that aren't one.
    short: ClassVar[str] = ""


class NotReady(AgentError):
    """The agent has not seen all devices yet."""

    short = "NotReady"


class InvalidArgument(AgentError):
    """An argument has no meaning; the text says which and what fits."""

    short = "InvalidArgument"


class NotFound(AgentError):
    """There is no such device, lease or resource."""

    short = "NotFound"


class Unavailable(AgentError):
    """Not enough devices are free now."""

    short = "Unavailable"


class LimitExceeded(AgentError):
    """One of the limits would be passed."""

    short = "LimitExceeded"


class QueueFull(AgentError):
    """Too many requests wait already."""

    short = "QueueFull"


class NotAuthorized(AgentError):
    """The caller may not do this at all."""

    short = "NotAuthorized"


class AuthenticationRequired(NotAuthorized):
    """The caller may, once somebody has authenticated, and nobody could be asked."""


class NotOwner(AgentError):
    """The lease is someone else's."""

    short = "NotOwner"


class RequestConflict(AgentError):
    """The request id was used with other arguments."""

    short = "RequestConflict"


class RequestSpent(AgentError):
    """The request id belongs to a lease that has ended; it never grants again."""

    short = "RequestSpent"


class LeaseEnded(AgentError):
    """The lease has ended."""

    short = "LeaseEnded"


class Timeout(AgentError):
    """The request waited in the queue for as long as a call may."""

    short = "Timeout"


class ProtocolUnsupported(AgentError):
    """The agent does not speak this version of the protocol."""

    short = "ProtocolUnsupported"


class NotSupported(AgentError):
    """This agent does not do that."""

    short = "NotSupported"


class StoreFailed(AgentError):
    """The agent could not store the change; nothing was done."""

    short = "StoreFailed"


class Internal(AgentError):
    """A fault in the agent; the text has an id to look for in its log."""

    short = "Internal"


class UnexpectedReply(AgentError):
    """An error of another family, or a reply of another shape than the contract says."""


_BY_SHORT: dict[str, type[AgentError]] = {
    kind.short: kind for kind in AgentError.__subclasses__() if kind.short
}

#: The bus's own errors, as what they mean here (D-Bus specification, "Standard error names").
_STANDARD: dict[str, type[AgentError]] = {
    "AccessDenied": NotAuthorized,
    "InteractiveAuthorizationRequired": AuthenticationRequired,
    "UnknownObject": NotFound,
    "InvalidArgs": InvalidArgument,
    "LimitsExceeded": LimitExceeded,
    "NotSupported": NotSupported,
    "UnknownMethod": NotSupported,
    "UnknownInterface": NotSupported,
    "UnknownProperty": NotSupported,
}

STANDARD_PREFIX: Final = "org.freedesktop.DBus.Error."

#: Standard errors that mean that nobody owns the agent's name, or that it went away in mid-call.
GONE: Final = frozenset(
    STANDARD_PREFIX + name
    for name in ("ServiceUnknown", "NameHasNoOwner", "NoReply", "Disconnected", "Timeout", "TimedOut")
)


def from_reply(name: str, text: str) -> AgentError:
    """Return the exception for the error reply NAME with TEXT."""
    if name.startswith(names.ERROR_PREFIX):
        kind = _BY_SHORT.get(name.removeprefix(names.ERROR_PREFIX), UnexpectedReply)
    elif name.startswith(STANDARD_PREFIX):
        kind = _STANDARD.get(name.removeprefix(STANDARD_PREFIX), UnexpectedReply)
    else:
        kind = UnexpectedReply
    if kind is UnexpectedReply:
        text = f"{name}: {text}"
    return kind(text, name)
