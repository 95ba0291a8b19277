"""The providers that are connected, what each has reported, and what that changes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hetero_agent import names
from hetero_agent.config import Config, LimitsTable, ProviderTable
from hetero_agent.core.effects import ErrorKind, Refusal
from hetero_agent.core.events import Event, HealthSeen, Observed, ProviderGone
from hetero_agent.core.model import Actor, DeviceRecord, Health, Instant, Node, Obstacle, Role
from hetero_agent.providers import nodes, report
from hetero_agent.text import is_printable, printable

#: Requests of one session of a provider whose answers are remembered for retries.
REMEMBERED: Final = 64
#: Seconds that looking at the nodes of one report may take.
INSPECTION_DEADLINE: Final = 5.0
KERNEL: Final = "kernel"

#: What a claimed node turned out to be; None: it does not exist.
Nodes = Mapping[tuple[str, Role], Node | None]
Answer = dict[str, Any]


@dataclass(slots=True)
class _Assembly:
    """The pages of one version that have come so far."""

    version: int
    pages: int
    got: dict[int, tuple[report.Entry, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Provider:
    """One provider name.  BUS_NAME is "" while it is not connected; VERSION is that of the list in
    force since it registered, 0 before the first."""

    name: str
    bus_name: str = ""
    uid: int = 0
    version: int = 0
    records: dict[str, DeviceRecord] = field(default_factory=dict)
    assembly: _Assembly | None = None
    answers: dict[tuple[str, str], tuple[str, asyncio.Future[Answer]]] = field(default_factory=dict)
    inspection: asyncio.Future[Nodes] | None = None
    timer: asyncio.TimerHandle | None = None
    told_gone: bool = False


class Registry:
    """Takes the calls of the Providers interface and submits what they change.

    PROVIDERS and LIMITS are the tables of the configuration; EPOCH is this life of the agent;
    OWNER_OF names the source that a device id (or alias) belongs to now, "" for none.  All methods
    run on the loop; those that take calls raise Refusal.
    """

    def __init__(
        self,
        providers: Mapping[str, ProviderTable],
        limits: LimitsTable,
        submit: Callable[[Event], None],
        now: Callable[[], Instant],
        epoch: str,
        owner_of: Callable[[str], str],
    ) -> None:
        self._tables = providers
        self._limits = limits
        self._submit = submit
        self._now = now
        self._epoch = epoch
        self._owner_of = owner_of
        self._providers: dict[str, _Provider] = {}

    # -- calls ------------------------------------------------------------------------------------
    async def register(
        self, actor: Actor, bus_name: str, name: str, protocol_version: int, options: Mapping[str, object]
    ) -> Answer:
        """RegisterProvider: begin a session of provider NAME on this connection; its version numbers
        start anew.  The same connection may ask again and gets the same answer."""
        if options:
            report.refuse(f"options: unknown option {printable(next(iter(options)), 48)}; there are none")
        if not self.may_provide(actor.uid, name):
            raise Refusal(ErrorKind.NOT_AUTHORIZED, self._why_not(actor.uid, name))
        low, high = min(names.PROTOCOL_VERSIONS), max(names.PROTOCOL_VERSIONS)
        if protocol_version not in names.PROTOCOL_VERSIONS:
            raise Refusal(
                ErrorKind.PROTOCOL_UNSUPPORTED,
                f"protocol version {protocol_version} is not spoken here; this agent speaks {low} to {high}",
            )
        provider = self._providers.get(name) or _Provider(name)
        if provider.bus_name != bus_name:
            self._begin(provider, bus_name, actor.uid)
        return {
            "protocol-version": protocol_version,
            "epoch": self._epoch,
            "page-size": report.PAGE_SIZE,
            "grace": int(self._tables[name].grace * 1_000_000),
        }

    async def report_devices(
        self,
        actor: Actor,
        bus_name: str,
        request_id: str,
        version: int,
        page: int,
        pages: int,
        devices: object,
    ) -> Answer:
        """ReportDevices: take one page of list VERSION; with its last page the list replaces the one
        in force.  Returns ``accepted``, ``version`` (the one in force) and ``reason``."""
        provider = self._session(actor, bus_name)
        return await self._once(
            provider,
            "ReportDevices",
            request_id,
            [version, page, pages, devices],
            lambda: self._take_page(provider, bus_name, version, page, pages, devices),
        )

    async def report_health(
        self,
        actor: Actor,
        bus_name: str,
        request_id: str,
        device: str,
        health: str,
        reason: str,
        evidence: Mapping[str, object],
    ) -> None:
        """ReportHealth: state the health of one device of the list in force."""
        provider = self._session(actor, bus_name)

        async def take() -> Answer:
            seen, why, facts = report.decode_health(health, reason, evidence)
            record = provider.records.get(device)
            if record is None:
                raise Refusal(
                    ErrorKind.NOT_FOUND,
                    f"{printable(device, 80)} is not in the list of provider {provider.name}; report it first",
                )
            provider.records[device] = replace(record, health=seen, health_reason=why)
            self._submit(HealthSeen(self._now(), provider.name, device, seen, why, facts))
            return {}

        await self._once(provider, "ReportHealth", request_id, [device, health, reason, evidence], take)

    # -- news from outside ------------------------------------------------------------------------
    def connection_lost(self, bus_name: str) -> None:
        """A connection has left the bus; if it was a provider's, its grace time begins."""
        for provider in self._providers.values():
            if provider.bus_name == bus_name:
                self._end(provider)

    def expect(self, records: Iterable[DeviceRecord]) -> None:
        """Take over devices that the ledger knows from before a restart: their providers have the
        grace time to register again; those of providers no longer configured are gone."""
        orphans: dict[str, list[str]] = {}
        for record in records:
            if record.source == KERNEL:
                continue
            if record.source in self._tables:
                provider = self._providers.setdefault(record.source, _Provider(record.source))
                provider.records.setdefault(record.id, record)
            else:
                orphans.setdefault(record.source, []).append(record.id)
        for provider in self._providers.values():
            if not provider.bus_name and provider.timer is None:
                self._start_grace(provider)
        for source, ids in orphans.items():
            self._submit(Observed(self._now(), source, gone=tuple(ids)))

    def reload(self, config: Config) -> None:
        """Use another configuration.  A provider whose table is gone has no devices any more; one
        whose uid may no longer provide loses its session."""
        self._tables, self._limits = config.providers, config.limits
        for name, provider in list(self._providers.items()):
            if name not in self._tables:
                self._cancel_grace(provider)
                provider.bus_name = ""
                del self._providers[name]
                if provider.records:
                    self._submit(Observed(self._now(), name, gone=tuple(provider.records)))
            elif provider.bus_name and not self.may_provide(provider.uid, name):
                self._end(provider)

    def close(self) -> None:
        """Forget all timers; the devices stay as they are."""
        for provider in self._providers.values():
            self._cancel_grace(provider)

    # -- to read ----------------------------------------------------------------------------------
    def may_provide(self, uid: int, name: str) -> bool:
        """Whether UID may report as NAME: root and the configured uid, if NAME is configured."""
        table = self._tables.get(name)
        return table is not None and uid in (0, table.uid)

    def usage(self) -> dict[str, int]:
        """What is in use of the limits that are kept here: ``providers``, connected ones."""
        return {"providers": sum(bool(provider.bus_name) for provider in self._providers.values())}

    # -- sessions ---------------------------------------------------------------------------------
    def _why_not(self, uid: int, name: str) -> str:
        shown = printable(name, 64)
        if name not in self._tables:
            return f"no provider {shown} is configured; add [providers.{shown}] and reload the agent"
        return f"provider {shown} is for uid {self._tables[name].uid} and root, not for uid {uid}"

    def _begin(self, provider: _Provider, bus_name: str, uid: int) -> None:
        if provider.bus_name:
            raise Refusal(
                ErrorKind.LIMIT_EXCEEDED,
                f"provider {provider.name} is connected already as {provider.bus_name}; end that one first",
            )
        for other in self._providers.values():
            if other.bus_name == bus_name:
                report.refuse(f"this connection is provider {other.name} already; use one connection for each")
        if self.usage()["providers"] >= self._limits.providers:
            raise Refusal(
                ErrorKind.LIMIT_EXCEEDED, f"{self._limits.providers} providers are connected, the most allowed"
            )
        self._cancel_grace(provider)
        provider.bus_name, provider.uid = bus_name, uid
        # its list begins anew, so no answer about an earlier one may stand for it
        provider.version, provider.assembly, provider.answers = 0, None, {}
        self._providers[provider.name] = provider

    def _end(self, provider: _Provider) -> None:
        provider.bus_name, provider.assembly = "", None
        self._start_grace(provider)

    def _start_grace(self, provider: _Provider) -> None:
        self._cancel_grace(provider)
        grace = self._tables[provider.name].grace
        provider.timer = asyncio.get_running_loop().call_later(grace, self._grace_over, provider)

    def _grace_over(self, provider: _Provider) -> None:
        provider.timer = None
        if not provider.told_gone:
            provider.told_gone = True
            self._submit(ProviderGone(self._now(), provider.name))

    @staticmethod
    def _cancel_grace(provider: _Provider) -> None:
        if provider.timer is not None:
            provider.timer.cancel()
            provider.timer = None

    def _session(self, actor: Actor, bus_name: str) -> _Provider:
        for provider in self._providers.values():
            if provider.bus_name == bus_name and self.may_provide(actor.uid, provider.name):
                return provider
        raise Refusal(
            ErrorKind.NOT_AUTHORIZED,
            "no provider is registered on this connection; call RegisterProvider first",
        )

    async def _once(
        self,
        provider: _Provider,
        method: str,
        request_id: str,
        arguments: list[object],
        take: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        """Run TAKE once for this request id; a retry, even a concurrent one, gets the same answer.
        Refusals are not remembered."""
        if not is_printable(request_id, 1, 128):
            report.refuse("request_id: expected 1 to 128 printable characters")
        fingerprint = _fingerprint(arguments)
        key = (method, request_id)
        known = provider.answers.get(key)
        if known is not None:
            if known[0] != fingerprint:
                raise Refusal(
                    ErrorKind.REQUEST_CONFLICT, f"request id {request_id} was used for another {method}"
                )
            return await asyncio.shield(known[1])
        while len(provider.answers) >= REMEMBERED:
            del provider.answers[next(iter(provider.answers))]
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        provider.answers[key] = (fingerprint, future)
        try:
            answer = await take()
        except BaseException as error:
            if provider.answers.get(key, ("", None))[1] is future:
                del provider.answers[key]
            if isinstance(error, Refusal):
                future.set_exception(error)
                future.exception()  # nobody may be waiting for it
            else:
                future.cancel()
            raise
        future.set_result(answer)
        return answer

    # -- device lists -----------------------------------------------------------------------------
    async def _take_page(
        self, provider: _Provider, bus_name: str, version: int, page: int, pages: int, devices: object
    ) -> Answer:
        if not 1 <= pages <= self._limits.devices_per_provider or not 0 <= page < pages:
            report.refuse(
                f"page {page} of {pages}: pages are counted from 0, and there are 1 to"
                f" {self._limits.devices_per_provider} of them"
            )
        stale = self._stale(provider, version)
        if stale is not None:
            return stale
        assembly = provider.assembly
        if assembly is None or assembly.version != version:
            assembly = _Assembly(version, pages)
        provider.assembly = None  # a page that is refused takes its version with it
        if assembly.pages != pages:
            report.refuse(f"version {version} began with {assembly.pages} pages and has {pages} now")
        assembly.got[page] = report.decode_page(devices, page)
        if sum(map(len, assembly.got.values())) > self._limits.devices_per_provider:
            raise Refusal(
                ErrorKind.LIMIT_EXCEEDED,
                f"more than {self._limits.devices_per_provider} devices, the most that a provider can have",
            )
        if len(assembly.got) < pages:
            provider.assembly = assembly
            reason = f"{len(assembly.got)} of {pages} pages of version {version} are here"
            return {"accepted": True, "version": provider.version, "reason": reason}
        entries = [entry for _, part in sorted(assembly.got.items()) for entry in part]
        self._check(provider, entries)
        found = await self._inspect(provider, bus_name, entries)
        self._check_session(provider, bus_name)
        stale = self._stale(provider, version)
        if stale is not None:
            return stale
        self._check(provider, entries)  # other sources went on meanwhile
        return self._replace(provider, version, entries, found)

    @staticmethod
    def _stale(provider: _Provider, version: int) -> Answer | None:
        newest = provider.version
        if provider.assembly is not None:
            newest = max(newest, provider.assembly.version - 1)
        if version > newest:
            return None
        reason = f"version {version} is dropped: it is not newer than version {newest}"
        return {"accepted": False, "version": provider.version, "reason": reason}

    def _check(self, provider: _Provider, entries: list[report.Entry]) -> None:
        """Compare a list with the configuration and with what others have.  Raises Refusal."""
        allowed = self._tables[provider.name].resources
        others = {
            device_id: other.name
            for other in self._providers.values()
            if other is not provider
            for device_id in other.records
        }
        report.check_family(entries, lambda device_id: self._owner_of(device_id) == KERNEL)
        for entry in entries:
            if allowed and entry.resource not in allowed:
                report.refuse(
                    f"device {entry.id}: resource {entry.resource} is not one of those configured for provider"
                    f" {provider.name}: {', '.join(allowed)}"
                )
            for name in (entry.id, *entry.aliases):
                owner = others.get(name) or self._owner_of(name)
                if owner not in ("", provider.name):
                    report.refuse(f"device {entry.id}: {name} is a device of {printable(owner, 64)} already")

    @staticmethod
    def _check_session(provider: _Provider, bus_name: str) -> None:
        """Raise Refusal if the session has ended while something was waited for."""
        if provider.bus_name != bus_name:
            raise Refusal(ErrorKind.NOT_AUTHORIZED, "the session ended meanwhile; call RegisterProvider again")

    async def _inspect(self, provider: _Provider, bus_name: str, entries: list[report.Entry]) -> Nodes:
        """Look at the claimed nodes in a thread of their own: one for each provider at a time, so that
        a node that hangs costs one thread and this provider's reports, nothing else."""
        loop = asyncio.get_running_loop()
        end = loop.time() + INSPECTION_DEADLINE
        while provider.inspection is not None and not provider.inspection.done():
            await self._finished(provider.inspection, end - loop.time())
        self._check_session(provider, bus_name)
        table = self._tables[provider.name]
        claims = list(dict.fromkeys((node.path, node.role) for entry in entries for node in entry.nodes))
        future: asyncio.Future[Nodes] = loop.create_future()

        def settle(result: Nodes | None, error: Exception | None) -> None:
            if error is not None:
                future.set_exception(error)
                future.exception()  # the call may have timed out
            elif result is not None:
                future.set_result(result)

        def work() -> None:
            result: Nodes | None = None
            failure: Exception | None = None
            try:
                result = nodes.inspect(claims, table.subsystems, table.directory)
            except Exception as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has closed: the agent stops
                loop.call_soon_threadsafe(settle, result, failure)

        provider.inspection = future
        threading.Thread(target=work, name=f"nodes of {provider.name}", daemon=True).start()
        await self._finished(future, end - loop.time())
        return future.result()

    @staticmethod
    async def _finished(future: asyncio.Future[Nodes], seconds: float) -> None:
        await asyncio.wait([future], timeout=max(0, seconds))
        if not future.done():
            raise Refusal(
                ErrorKind.TIMEOUT,
                f"looking at the reported nodes takes more than {INSPECTION_DEADLINE:g} s; one of them hangs",
            )

    def _replace(self, provider: _Provider, version: int, entries: list[report.Entry], found: Nodes) -> Answer:
        before = provider.records
        after = {entry.id: _record(entry, provider.name, found, before.get(entry.id)) for entry in entries}
        first = provider.version == 0
        changed = tuple(one for one in after.values() if first or before.get(one.id) != one)
        gone = tuple(device_id for device_id in before if device_id not in after)
        provider.records, provider.version = after, version
        now = self._now()
        if provider.told_gone:
            # back with the list, not before: until then nobody knows how its devices are
            provider.told_gone = False
            self._submit(ProviderGone(now, provider.name, back=True))
        if first or changed or gone:
            self._submit(Observed(now, provider.name, changed, gone, complete=first))
        for record in changed:
            old = before.get(record.id)
            if old is not None and (old.health, old.health_reason) != (record.health, record.health_reason):
                self._submit(HealthSeen(now, provider.name, record.id, record.health, record.health_reason))
        missing = [path for (path, _), node in found.items() if node is None]
        reason = ""
        if missing:
            reason = (
                f"accepted, but {len(missing)} nodes do not exist, such as {missing[0]}; their devices are"
                " offline until a later version finds them"
            )
        return {"accepted": True, "version": version, "reason": reason}


def _record(entry: report.Entry, source: str, found: Nodes, before: DeviceRecord | None) -> DeviceRecord:
    existing = [found[claim.path, claim.role] for claim in entry.nodes]
    present = tuple(node for node in existing if node is not None)
    complete = len(present) == len(existing) and any(node.role is Role.OWN for node in present)
    if entry.health is not None:
        health, reason = entry.health, entry.reason
    elif before is not None:
        health, reason = before.health, before.health_reason
    else:
        health, reason = Health.UNKNOWN, entry.reason
    return DeviceRecord(
        id=entry.id,
        resource=entry.resource,
        source=source,
        parent=entry.parent,
        aliases=entry.aliases,
        vendor=entry.vendor,
        model=entry.model,
        driver=entry.driver,
        serial=entry.serial,
        numa_nodes=entry.numa_nodes,
        nodes=present,
        attributes=entry.attributes or {},
        # without a node of its own nothing could prove that it came back
        obstacle=Obstacle.NONE if complete else Obstacle.NO_NODE,
        health=health,
        health_reason=reason,
        env=entry.env or {},
    )


def _fingerprint(arguments: list[object]) -> str:
    text = json.dumps(arguments, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
