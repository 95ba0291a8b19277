"""May this caller do this: by uid and groups, which is known at once, else by what polkit says."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_agent import names
from hetero_agent.bus.calls import Call, Entry, Result, Table
from hetero_agent.bus.errors import AuthenticationNeeded
from hetero_agent.bus.polkit import NoAnswer, NoPolkit, Polkit, Verdict
from hetero_agent.bus.whomay import CAN, Guard, Rule
from hetero_agent.core.effects import ErrorKind, Refusal


class Authorizer:
    """Applies the who-may table, and asks polkit for those whom it does not let in."""

    def __init__(self, guard: Guard, polkit: Polkit) -> None:
        self._guard = guard
        self._polkit = polkit

    def table(self) -> Table:
        """The rows of the dispatcher for the methods Can... of the Manager."""
        return {f"{names.MANAGER}.{name}": Entry(self._can) for name in CAN}

    def refusal(self, rule: Rule, call: Call, subject: object) -> Refusal | None:
        """What the table says to CALL; None if the caller may.  If the rule names an action, a
        refusal is not the last word: `ask`."""
        try:
            self._guard.check(rule.who, call.caller, call.method, subject)
        except Refusal as refusal:
            return refusal
        return None

    async def ask(self, rule: Rule, call: Call, about: Mapping[str, str], refusal: Refusal) -> None:
        """Have polkit decide on a call that the table answers with REFUSAL, and note its yes in the
        call.  Raises Refusal, AuthenticationNeeded."""
        assert rule.action is not None
        interactive = call.message.may_ask and not rule.could
        try:
            answer = await self._polkit.check(call.caller, rule.action, about, interactive)
        except NoPolkit:
            raise refusal from None
        except NoAnswer as error:
            raise Refusal(refusal.kind, f"{refusal.text}; {error}") from None
        if answer.verdict is Verdict.YES:
            call.authority = rule.action
        elif answer.verdict is Verdict.CHALLENGE:
            if rule.could:
                return
            why = "polkit has nobody to ask there" if interactive else "the call does not allow to ask"
            raise AuthenticationNeeded(
                f"{call.method}: uid {call.caller.uid} may once it has authenticated for {rule.action}, "
                f"but {why}"
            )
        else:
            no = "the authentication was dismissed" if answer.dismissed else f"polkit: no to {rule.action}"
            raise Refusal(refusal.kind, f"{refusal.text}; {no}")

    async def _can(self, call: Call) -> Result:
        """Answer yes, no or challenge.  Raises Refusal if polkit does not answer."""
        rule = CAN[call.method]
        if self.refusal(rule, call, None) is None:
            return (str(Verdict.YES),)
        assert rule.action is not None
        try:
            answer = await self._polkit.check(call.caller, rule.action, {})
        except NoPolkit:
            return (str(Verdict.NO),)
        except NoAnswer as error:
            raise Refusal(ErrorKind.UNAVAILABLE, f"{call.method}: {error}; ask again later") from None
        return (str(answer.verdict),)
