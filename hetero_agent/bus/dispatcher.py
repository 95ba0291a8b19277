"""One way in for every call: known member, signature, caller, decode, authorize, limits, act."""

from __future__ import annotations

import asyncio
import types
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

from hetero_agent.bus import codec, contract, errors
from hetero_agent.bus.authorize import Authorizer
from hetero_agent.bus.calls import Call, Entry, Result, Table
from hetero_agent.bus.errors import AuthenticationNeeded, StandardError
from hetero_agent.bus.objects import Objects
from hetero_agent.bus.transport import Connection, Incoming
from hetero_agent.bus.whomay import METHODS, Caller, Rule
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.events import Event, Refused
from hetero_agent.core.model import Actor, Instant
from hetero_agent.text import printable

#: Refusals of these kinds go into the audit.
_AUDITED = frozenset(
    {
        ErrorKind.NOT_AUTHORIZED,
        ErrorKind.NOT_OWNER,
        ErrorKind.LIMIT_EXCEEDED,
        errors.AUTHENTICATION_NEEDED,
    }
)
#: Seconds after which a call is answered whatever happens; callers commonly give up after 25.
CALL_DEADLINE = 20.0
#: Refusals of one uid that the audit hears of at once, and seconds until it hears of one more.
_BURST = 8
_REFILL = 5.0
#: Uids whose refusals are counted.
_COUNTED = 1024


class _Meter:
    """Refusals of one uid: how many more are told, since when, and how many were not."""

    __slots__ = ("left", "since", "suppressed")

    def __init__(self, now: float) -> None:
        self.left = float(_BURST)
        self.since = now
        self.suppressed = 0


class Refusals:
    """Submits Refused events for the audit, rate limited by uid; what was left out is counted in
    the next one."""

    def __init__(self, submit: Callable[[Event], None], now: Callable[[], Instant]) -> None:
        self._submit = submit
        self._now = now
        self._meters: OrderedDict[int, _Meter] = OrderedDict()

    def tell(self, actor: Actor, method: str, refusal: Refusal | AuthenticationNeeded, request_id: str) -> None:
        """A call was refused here, not by the governor."""
        kind = errors.kind_of(refusal)
        if kind not in _AUDITED:
            return
        seconds = asyncio.get_running_loop().time()
        meter = self._meters.get(actor.uid)
        if meter is None:
            meter = self._meters[actor.uid] = _Meter(seconds)
            while len(self._meters) > _COUNTED:
                self._meters.popitem(last=False)
        meter.left = min(_BURST, meter.left + (seconds - meter.since) / _REFILL)
        meter.since = seconds
        if meter.left < 1:
            meter.suppressed += 1
            return
        meter.left -= 1
        suppressed, meter.suppressed = meter.suppressed, 0
        text, shown = printable(refusal.text), printable(request_id, 128)
        self._submit(Refused(self._now(), actor, method, kind, text, shown, suppressed))


class Dispatcher:
    """The table of members and the one order in which each call is looked at.

    SETTLE() is called before a call is acted on and before its reply, to have the signals that these
    rest on go out first; ``done(sender)`` (to be set) once a call is answered.  Raises ValueError at once
    if the table, the interface files and the who-may table do not name the same members.
    """

    def __init__(
        self,
        connection: Connection,
        objects: Objects,
        table: Table,
        authorizer: Authorizer,
        refusals: Refusals,
        settle: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._objects = objects
        self._authorizer = authorizer
        self._refusals = refusals
        self.done: Callable[[str], None] = _nobody
        self._settle = settle
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods: dict[tuple[str, str], tuple[str, contract.Method, Entry]] = {}
        declared = {
            f"{interface.name}.{method.name}": (interface.name, method)
            for interface in contract.load().values()
            for method in interface.methods.values()
        }
        if not declared.keys() == table.keys() == METHODS.keys():
            odd = (declared.keys() ^ table.keys()) | (declared.keys() ^ METHODS.keys())
            raise ValueError(f"interface files, handlers and who-may table differ: {sorted(odd)}")
        for member, (interface, method) in declared.items():
            self._methods[interface, method.name] = member, method, table[member]

    def close(self) -> None:
        """Give up the calls under way; each gets its error reply."""
        for task in self._tasks:
            task.cancel()

    # -- the way in -----------------------------------------------------------------------------
    def dispatch(self, message: Incoming, caller: Caller) -> None:
        """Handle one call.  Never raises; every call that wants an answer gets one."""
        member = message.member
        call = None
        try:
            member, method, entry = self._find(message)
            if message.signature != method.takes:
                raise StandardError(
                    "InvalidArgs",
                    f"{method.name} takes signature '{method.takes}', not '{printable(message.signature, 64)}'",
                )
            call = Call(message, caller, member, message.arguments() if method.takes else [])
            call.request = entry.prepare(call)
            rule = METHODS[member]
            refusal = self._authorizer.refusal(rule, call, entry.subject(call))
            if refusal is None:
                # what a reply is made of must not be older than the news that goes before it
                self._settle()
                result = entry.act(call)
            elif rule.action is None:
                raise refusal
            else:
                result = self._by_polkit(call, rule, entry, refusal)
        except BaseException as error:
            self._fail(message, caller, member, call, error)
            return
        if isinstance(result, types.CoroutineType):
            self._begin(result, call, method, entry.own_task)
        else:
            self._answer(message, caller, member, method, call, result)  # type: ignore[arg-type]

    async def _by_polkit(self, call: Call, rule: Rule, entry: Entry, refusal: Refusal) -> Result:
        """Do what the caller may only if polkit says so."""
        about = entry.about(call)
        await self._authorizer.ask(rule, call, about, refusal)
        # the answer is about what was there when it was asked for
        self._find(call.message)
        if entry.about(call) != about:
            raise Refusal(
                ErrorKind.UNAVAILABLE,
                f"{call.method}: what it is about changed while polkit was asked; look, and ask again",
            )
        result = entry.act(call)
        return await result if isinstance(result, types.CoroutineType) else result  # type: ignore[return-value]

    def too_many(self, message: Incoming, caller: Caller | None) -> None:
        """The caller has too many calls without an answer."""
        refusal = Refusal(
            ErrorKind.LIMIT_EXCEEDED, "too many calls without an answer yet; wait for answers before the next"
        )
        if caller is not None:
            self._refusals.tell(caller.actor(), message.member, refusal, "")
        self._connection.error(message, errors.name_of(refusal.kind), refusal.text)

    def nameless(self, message: Incoming) -> None:
        """The bus does not say who sent it."""
        text = "the bus does not say who you are; connect anew"
        self._connection.error(message, errors.name_of(ErrorKind.NOT_AUTHORIZED), text)

    def _find(self, message: Incoming) -> tuple[str, contract.Method, Entry]:
        path, interface, member = message.path, message.interface, message.member
        here = self._objects.interfaces(path)
        if not here:
            about = self._methods.get((interface, member))
            if interface == contract.PEER:
                here = (contract.PEER,)
            elif about is not None and about[2].absent and self._objects.is_of_a_device(path):
                here = (interface,)
            else:
                raise StandardError("UnknownObject", f"no object {printable(path, 128)}")
        if not interface:
            # allowed by the specification: then the member alone says what is meant
            interface = next((one for one in here if (one, member) in self._methods), here[0])
        if interface not in here:
            raise StandardError(
                "UnknownInterface", f"no interface {printable(interface, 96)} at {printable(path, 128)}"
            )
        found = self._methods.get((interface, member))
        if found is None:
            raise StandardError("UnknownMethod", f"no method {printable(member, 64)} in {interface}")
        return found

    # -- the way out ----------------------------------------------------------------------------
    def _answer(
        self,
        message: Incoming,
        caller: Caller,
        member: str,
        method: contract.Method,
        call: Call,
        result: Result,
    ) -> None:
        try:
            body = result if isinstance(result, bytes) else codec.encode(method.gives, result)
        except codec.CodecError as error:
            # our own fault, not the caller's: what does not fit the contract is Internal
            self._fail(message, caller, member, call, RuntimeError(f"reply does not fit: {error}"))
            return
        if call.answered:
            return
        call.answered = True
        self._settle()
        self._connection.reply(message, method.gives, body)
        self._connection.flush()
        self.done(message.sender)

    def _fail(
        self, message: Incoming, caller: Caller, member: str, call: Call | None, error: BaseException
    ) -> None:
        if call is not None:
            if call.answered:
                return
            call.answered = True
        name, text = errors.describe(error, member)
        # who knows that it was refused finds it in the trail
        if isinstance(error, (Refusal, AuthenticationNeeded)):
            request_id = call.request_id if call is not None else ""
            self._refusals.tell(caller.actor(), member.rpartition(".")[2], error, request_id)
        self._connection.error(message, name, text)
        self._connection.flush()
        self.done(message.sender)

    # -- calls that take time -------------------------------------------------------------------
    def _begin(
        self, work: Coroutine[Any, Any, Result], call: Call, method: contract.Method, own_task: bool
    ) -> None:
        if not own_task:
            try:
                pending = work.send(None)
            except StopIteration as stop:
                self._answer(call.message, call.caller, call.member, method, call, stop.value)
                return
            except BaseException as error:
                self._fail(call.message, call.caller, call.member, call, error)
                return
            waiting: Awaitable[Result] = _resumed(work, pending)
        else:
            waiting = work
        loop = asyncio.get_running_loop()
        timer = loop.call_later(CALL_DEADLINE, self._expire, call)
        task = loop.create_task(self._finish(waiting, call, method))
        task.add_done_callback(lambda _: timer.cancel())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _expire(self, call: Call) -> None:
        """The call takes too long: its caller gets an answer, the work goes on to its end."""
        text = f"not done within {CALL_DEADLINE:g} s; ask again with the same request id"
        error = Refusal(ErrorKind.TIMEOUT, text)
        self._fail(call.message, call.caller, call.member, call, error)

    async def _finish(self, work: Awaitable[Result], call: Call, method: contract.Method) -> None:
        try:
            result = await work
        except BaseException as error:
            self._fail(call.message, call.caller, call.member, call, error)
            if not isinstance(error, (Exception, asyncio.CancelledError)):
                raise
            return
        self._answer(call.message, call.caller, call.member, method, call, result)


@types.coroutine
def _resumed(work: Coroutine[Any, Any, Result], pending: Any) -> Generator[Any, Any, Result]:
    """Go on with WORK, which has run up to its first wait, PENDING, without a task of its own."""
    while True:
        try:
            value = yield pending
        except BaseException as error:
            step = partial(work.throw, error)
        else:
            step = partial(work.send, value)
        try:
            pending = step()
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


def _nobody(sender: str) -> None:
    """Whom to tell that a call of SENDER is answered, until somebody is named."""
    del sender
