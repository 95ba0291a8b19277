"""Errors for a person: the cause, who holds what is wanted, what to do next.  Never a traceback."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hetero_agent.cli import exitcodes
from hetero_agent.cli.table import ago, short
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client import Client, HeteroError
    from hetero_agent.client.results import Explanation

#: Devices that an error names one by one.
_NAMED = 8

#: States that a device leaves once no process has it open.
_HELD = ("reclaiming", "occupied", "faulty")

#: How the agent begins to say that devices were chosen, and something that they need is not there.
_NOT_GIVEN: Final = "the devices can't be given: "


@dataclass(eq=False)
class Complaint(Exception):
    """What goes wrong, as a person needs it, and the exit code."""

    code: int
    cause: str
    holders: tuple[str, ...] = ()
    next_step: str = ""
    name: str = ""

    def lines(self) -> list[str]:
        """Return it as lines for stderr."""
        out = [f"heteroctl: {self.cause}"]
        out += [f"  held: {one}" for one in self.holders]
        if self.next_step:
            out.append(f"  next: {self.next_step}")
        return out

    def document(self) -> dict[str, Any]:
        """Return it for --json."""
        return {
            "error": {
                "exit": self.code,
                "name": self.name,
                "cause": self.cause,
                "holders": list(self.holders),
                "next": self.next_step,
            }
        }


def next_step(error: HeteroError) -> str:
    """Return what the caller of heteroctl can do about ERROR."""
    from hetero_agent.client import errors  # noqa: PLC0415

    steps: tuple[tuple[type[HeteroError], str], ...] = (
        (
            errors.TurnedAway,
            "as a user with an entry: getent passwd shows which; in a container, give it one, or the host's",
        ),
        (
            errors.NoBus,
            "is dbus running here (systemctl status dbus)? $DBUS_SYSTEM_BUS_ADDRESS names another bus",
        ),
        (errors.NoAgent, "systemctl start hetero-agent; heteroctl doctor says what is missing"),
        (
            errors.CallTimeout,
            "systemctl status hetero-agent; journalctl -u hetero-agent says what it is doing",
        ),
        (errors.NotReady, "the agent is still looking for devices: try again in a few seconds"),
        (
            errors.AuthenticationRequired,
            "run it on a terminal, where heteroctl asks for a password (pkttyagent of polkitd), and without"
            " --no-ask-password; root is not asked",
        ),
        (
            errors.NotAuthorized,
            "root may; for leases, members of the agent's group may (hetero, unless configured:"
            " adduser NAME hetero, then log in anew)",
        ),
        (errors.NotOwner, "only the lease's owner and root may; heteroctl leases shows the owner"),
        (errors.LimitExceeded, "heteroctl status shows the limits and their use; release what is done"),
        (errors.QueueFull, "try again later"),
        (errors.InvalidArgument, "heteroctl VERB --help shows what fits"),
        (errors.NotFound, "heteroctl list and heteroctl leases show what there is"),
        (errors.RequestConflict, "use another --request-id, or the same arguments"),
        (errors.RequestSpent, "use another --request-id for another lease"),
        (errors.LeaseEnded, "allocate anew"),
        (
            errors.StoreFailed,
            "is the disk full or read-only? heteroctl doctor, journalctl -u hetero-agent",
        ),
        (errors.NotSupported, "heteroctl version shows whether both sides fit together"),
        (errors.Internal, "journalctl -u hetero-agent has the details under the id above"),
    )
    for kind, text in steps:
        if isinstance(error, kind):
            return text
    return ""


def of_error(error: HeteroError) -> Complaint:
    """Return the complaint about ERROR, without asking the agent anything more."""
    name = error.name or type(error).__name__
    return Complaint(exitcodes.of_error(error), error.text, (), next_step(error), name)


async def about_request(
    client: Client, error: HeteroError, resource: str, count: int, options: dict[str, Any]
) -> Complaint:
    """Return the complaint about a grant that was refused: whether it can ever be satisfied
    here, and if so, who has the devices now."""
    from hetero_agent.client import errors  # noqa: PLC0415

    plain = of_error(error)
    if not isinstance(
        error, (errors.Unavailable, errors.NotFound, errors.LimitExceeded, errors.InvalidArgument)
    ):
        return plain
    choosing = {key: value for key, value in options.items() if key in ("policy", "require", "devices")}
    try:
        answer = await client.explain(resource, count, **choosing)
    except errors.HeteroError:
        return plain
    if answer.verdict == "never":
        return never(answer, resource)
    if not isinstance(error, errors.Unavailable):
        return plain
    if error.text.startswith(_NOT_GIVEN):
        # nobody has them, and waiting mends no node and no mount
        step = "put that right and ask again; heteroctl explain says which other devices there are"
        return Complaint(plain.code, error.text, (), step, plain.name)
    step = "heteroctl run --wait SECONDS waits; heteroctl explain says why for each device"
    return Complaint(plain.code, error.text, await who_holds(client, answer), step, plain.name)


def never(answer: Explanation, resource: str) -> Complaint:
    """Return the complaint about what this host can't satisfy, ever."""
    cause = answer.text or f"this host can never satisfy this request for {resource}"
    step = "ask for less, or elsewhere; heteroctl list shows what this host has"
    return Complaint(exitcodes.NEVER, printable(cause, 600), (), step, "never")


async def who_holds(client: Client, answer: Explanation) -> tuple[str, ...]:
    """Return lines for each device that somebody has: why it can't be granted, whose lease has it,
    and the processes that keep it from being granted."""
    from hetero_agent.client import errors  # noqa: PLC0415

    # an idle one that does not fit is in nobody's hands
    blocked = [one for one in answer.devices if not one.eligible and one.state != "idle"]
    try:
        leases = {device: lease for lease in await client.leases() for device in lease.devices}
    except errors.HeteroError:
        leases = {}
    out = []
    for one in blocked[:_NAMED]:
        text = f"{one.device} {one.state}"
        if one.reason.startswith(one.state):  # as it does unless the device doesn't fit at all
            text = f"{one.device} {one.reason}"
        elif one.reason:
            text += f" ({one.reason})"
        lease = leases.get(one.device)
        if lease is not None:
            who = f"uid {lease.uid}" + (f", {lease.client}" if lease.client else "")
            text += f", lease {short(lease.id)} of {who}, for {ago(lease.created)}"
        out.append(printable(text, 200))
        with contextlib.suppress(errors.HeteroError):
            if one.state in _HELD:
                out += [
                    f"  by pid {process.pid} {printable(process.comm, 32)} of uid {process.uid}"
                    for process in (await client.holders(one.device))[:_NAMED]
                ]
    if len(blocked) > _NAMED:
        out.append(f"and {len(blocked) - _NAMED} more")
    return tuple(out)


def usage(text: str) -> Complaint:
    """Return the complaint about a wrong command line."""
    return Complaint(exitcodes.USAGE, text, (), "heteroctl VERB --help shows what fits", "usage")
