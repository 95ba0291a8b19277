"""The simulator's conversation with the agent: register, report what changed, again after a restart."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any, Final

from hetero_agent.client import Client, HeteroError, NoBus
from hetero_agent.client.errors import InvalidArgument, LimitExceeded, NotAuthorized, NotFound
from hetero_agent.client.events import AgentChanged
from hetero_agent.sim.commands import (
    Add,
    Command,
    Fail,
    Hang,
    ListDevices,
    Recover,
    Remove,
    SimError,
)
from hetero_agent.sim.devices import Stock
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.sim")

#: Seconds that the answer to a command waits for the agent to have taken the change.
REPORT_WITHIN: Final = 5.0
#: Seconds until something that failed is tried again: the first time, and the most.
_FIRST_DELAY: Final = 0.1
_LONGEST_DELAY: Final = 5.0
#: Seconds without news after which the session is put to the proof.
_PROOF: Final = 5.0

# The agent takes no body over 64 KiB; OVERHEAD is what types and padding add to one device, at most.
_PAGE_BYTES: Final = 60_000
_OVERHEAD: Final = 300


@dataclass(slots=True)
class _Report:
    """A state of the devices, by its number, and what the agent said of it ("": took it)."""

    number: int = 0
    refusal: str = ""


class Engine:
    """Carries out commands on STOCK and keeps the agent at ADDRESS told, as provider NAME."""

    def __init__(self, stock: Stock, name: str, address: str | None) -> None:
        self._stock = stock
        self._name = name
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._one_at_a_time = asyncio.Lock()
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._wanted = 1
        self._attempt = 0
        self._told = _Report()
        self._hung_until = 0.0
        self._client: Client | None = None
        self._page_size = 0
        self._version = 0
        self._known_health: dict[str, tuple[str, str]] = {}
        self._known_list: list[dict[str, Any]] | None = None
        self._tried = False
        self._failure = ""
        self._proof_at = 0.0

    # -- commands ---------------------------------------------------------------------------------
    async def do(self, command: Command) -> dict[str, Any]:
        """Carry out a command and return what to answer.  Raises SimError; nothing has changed then."""
        if isinstance(command, ListDevices):
            return self._listed()
        async with self._one_at_a_time:
            answer = self._change(command)
            reported = await self._publish()
            if self._told.refusal and isinstance(command, Add):
                refusal = self._told.refusal
                self._stock.remove(command.ids)
                await self._publish()
                raise SimError(f"the agent refuses the device: {refusal}")
            answer["reported"] = reported
            if not reported:
                answer["note"] = self._why_untold()
            return answer

    def _change(self, command: Command) -> dict[str, Any]:
        now = self._loop.time()
        stock = self._stock
        match command:
            case Add():
                return {"devices": list(stock.add(command))}
            case Remove():
                stock.remove([command.id])
            case Fail():
                stock.set_health(command.id, "unhealthy", command.reason)
            case Recover(id=""):
                self._hung_until = 0.0
            case Recover():
                stock.set_health(command.id, "healthy", "")
                stock.freeze(command.id, 0.0, now)
            case Hang():
                until = now + command.seconds if command.seconds else math.inf
                if command.id:
                    stock.freeze(command.id, until, now)
                else:
                    self._hung_until = until
        return {"devices": [command.id] if not isinstance(command, ListDevices) and command.id else []}

    def _listed(self) -> dict[str, Any]:
        now = self._loop.time()
        return {
            "devices": [device.listed(now) for device in self._stock.devices.values()],
            "reported": self._told.number == self._wanted and not self._why_untold(),
            "note": self._why_untold(),
        }

    def _why_untold(self) -> str:
        """Why the agent does not know the devices as they are; "" if it does, or soon will."""
        if self._loop.time() < self._hung_until:
            return "the provider hangs, as it was told to"
        if self._tried and (self._client is None or not self._client.agent_present):
            return self._failure or "the agent is not there"
        return self._told.refusal or self._failure

    async def _publish(self) -> bool:
        """Have the devices as they are now reported; tell whether the agent took it in time."""
        self._wanted += 1
        self._told.refusal = ""
        self._wake.set()
        try:
            async with asyncio.timeout(REPORT_WITHIN):
                while self._told.number < self._wanted and not self._why_untold():
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            return False
        return self._told.number >= self._wanted and not self._told.refusal

    # -- the agent --------------------------------------------------------------------------------
    async def run(self) -> None:
        """Keep the agent told until cancelled."""
        delay = _FIRST_DELAY
        while True:
            try:
                client = await Client.connect(self._address)
                break
            except NoBus as error:
                self._fail(error.text)
                self._tried = True
                await asyncio.sleep(delay)
                delay = min(delay * 2, _LONGEST_DELAY)
        self._client, self._failure, self._tried = client, "", True
        async with client, client.watch(AgentChanged) as news, asyncio.TaskGroup() as group:
            group.create_task(self._tell_for_ever())
            async for event in news:
                if isinstance(event, AgentChanged):
                    log.info("the agent is %s", "there" if event.owner else "gone")
                    self._page_size, self._failure = 0, ""
                    self._wake.set()
                    self._answered.set()

    def _fail(self, text: str) -> None:
        if text != self._failure:
            log.warning("not reporting: %s", printable(text))
        self._failure = text
        self._answered.set()

    async def _tell_for_ever(self) -> None:
        assert self._client is not None
        delay = _FIRST_DELAY
        while True:
            self._wake.clear()
            again = min(self._next_thaw() or _PROOF, _PROOF)
            if self._client.agent_present and self._loop.time() >= self._hung_until:
                try:
                    await self._tell(self._client)
                    delay, self._failure = _FIRST_DELAY, ""
                except HeteroError as error:
                    self._failed(error)
                    again, delay = delay, min(delay * 2, _LONGEST_DELAY)
            try:
                async with asyncio.timeout(again):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _failed(self, error: HeteroError) -> None:
        content = isinstance(error, (InvalidArgument, LimitExceeded)) and self._page_size
        if content:
            # the agent's last word about this list; telling it again would change nothing
            log.warning("the agent refuses the report: %s", error.text)
            self._told = _Report(self._attempt, error.text)
            self._answered.set()
            return
        if isinstance(error, NotAuthorized):
            self._page_size = 0
        self._fail(error.text)

    def _next_thaw(self) -> float | None:
        """Seconds until a hang ends by itself, None if none does."""
        now = self._loop.time()
        ends = [device.frozen_until for device in self._stock.devices.values()]
        coming = [end - now for end in (*ends, self._hung_until) if now < end < math.inf]
        return min(coming, default=None)

    async def _tell(self, client: Client) -> None:
        """Tell the agent what it does not know yet.  Raises HeteroError."""
        if not self._page_size:
            registration = await client.register_provider(self._name)
            self._page_size = registration.page_size
            self._version = 0
            self._known_list, self._known_health = None, {}
            self._told.refusal = ""
            log.info("registered as provider %s", self._name)
        if self._told.refusal and self._told.number == self._wanted:
            return
        number = self._attempt = self._wanted
        now = self._loop.time()
        entries = self._stock.entries(now)
        health = {device.id: device.told(now) for device in self._stock.devices.values()}
        timeless = [
            {key: value for key, value in one.items() if key not in ("health", "reason")} for one in entries
        ]
        if timeless != self._known_list:
            await self._report(client, entries)
            self._known_list = timeless
        else:
            news = [one for one in health.items() if self._known_health.get(one[0]) != one[1]]
            if not news and health and now >= self._proof_at:
                # said again: an agent that has forgotten this session (its table was gone for a
                # while) refuses it, and the next attempt registers anew
                news = [next(iter(health.items()))]
            for device, (word, reason) in news:
                await self._report_health(client, device, word, reason)
        self._proof_at = now + _PROOF
        self._known_health = health
        self._told = _Report(number)
        self._answered.set()
        if number != self._wanted:
            self._wake.set()

    async def _report(self, client: Client, entries: list[dict[str, Any]]) -> None:
        largest = max((len(str(entry).encode()) for entry in entries), default=0) + _OVERHEAD
        page_size = max(1, min(self._page_size, _PAGE_BYTES // largest))
        while True:
            self._version += 1
            answer = await client.report_devices(self._version, entries, page_size=page_size)
            if answer.accepted:
                return
            self._version = max(self._version, answer.version)

    async def _report_health(self, client: Client, device: str, health: str, reason: str) -> None:
        try:
            await client.report_health(device, health, reason, {"source": "simulator"})
        except NotFound:
            self._known_list = None  # the agent has another list than we believe
            raise
