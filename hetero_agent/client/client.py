"""The library that speaks to the agent.

::

    async with await Client.connect() as client:
        grant = await client.allocate("nvidia.com/gpu", 2, pid=os.getpid(), confirm=True)
        environment = grant.manifest.environment(os.environ)
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from hetero_agent import names
from hetero_agent.client import events, wire
from hetero_agent.client.contract import METHODS, OBJECT_MANAGER, PROPERTIES
from hetero_agent.client.errors import AgentError, InvalidArgument, NotFound, UnexpectedReply
from hetero_agent.client.manifest import Manifest
from hetero_agent.client.results import (
    Device,
    Explanation,
    Grant,
    Holder,
    Lease,
    Node,
    NodeAccess,
    Registration,
    ReportAnswer,
    Snapshot,
    Status,
    Verdict,
)
from hetero_agent.client.session import CALL_TIMEOUT, Session, Watch, new_request_id
from hetero_agent.text import printable

#: How often a snapshot is begun anew because a device changed between two pages.
_SNAPSHOT_TRIES: Final = 5

#: Least characters of a lease id that stand for the whole.
SHORTEST_PREFIX: Final = 4


class Client:
    """A link to the agent.  Not for use from several event loops.

    Every method may raise `Unreachable`, `CallTimeout`, and the agent's error as named in its
    own description; all are `HeteroError`.  Methods that change something take REQUEST_ID: the
    same id with the same arguments never does it twice, whoever retries.  None makes a new one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @classmethod
    async def connect(
        cls,
        address: str | None = None,
        within: float = 5.0,
        *,
        person: Callable[[], Awaitable[bool]] | None = None,
    ) -> Client:
        """Connect to the bus at ADDRESS, else $DBUS_SYSTEM_BUS_ADDRESS, else the system bus.

        The agent need not be there yet: `agent_present` tells, calls raise NoAgent.  Raises
        NoBus if there is no bus within WITHIN seconds.

        With PERSON, polkit may ask somebody for a password, and such calls take their time.  It is
        called when polkit has no authentication agent to ask with: it brings one, and returns
        whether it did.  Without, calls that need it raise AuthenticationRequired at once.
        """
        session = Session(address, within, person)
        await session.start()
        return cls(session)

    async def close(self) -> None:
        """End the connection."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def agent_present(self) -> bool:
        """Whether the agent is on the bus now."""
        return bool(self._session.owner)

    @property
    def address(self) -> str:
        """The address of the bus."""
        return self._session.address

    def watch(self, *kinds: type[events.Event], path: str = "") -> Watch:
        """Return the agent's signals of these KINDS (none: all), of the object at PATH only if
        given: ``async with client.watch(StateChanged) as news: async for event in news``.

        `AgentChanged` and `Missed` come in every watch.  Only what the name's current owner
        sends is taken.
        """
        return Watch(self._session, kinds or events.SIGNALS, path)

    # -- reading ------------------------------------------------------------------------------
    async def status(self) -> Status:
        """Return the Manager's properties."""
        got = await self._properties(names.ROOT, names.MANAGER)
        with _well_formed():
            return Status.of_properties(got)

    async def snapshot(self) -> Snapshot:
        """Return all devices, read at one generation if they hold still for it."""
        for attempt in range(_SNAPSHOT_TRIES):
            devices: dict[str, Device] = {}
            first: Mapping[str, Any] = {}
            page = 0
            while True:
                try:
                    header, rows = await self._manager("GetSnapshot", page)
                except InvalidArgument:
                    if not page:
                        raise
                    break  # fewer pages than there were
                with _well_formed():
                    first = first or header
                    if header["generation"] != first["generation"] and attempt < _SNAPSHOT_TRIES - 1:
                        break
                    devices.update((device.id, device) for device in map(Device.of_row, rows))
                    page += 1
                    if page >= header["pages"]:
                        found = tuple(devices.values())
                        return Snapshot(header["epoch"], header["generation"], header["complete"], found)
        raise UnexpectedReply("the devices changed faster than they could be read")

    async def device(self, name: str) -> Device:
        """Return the device with this id, alias or object path.  Raises NotFound."""
        path = await self.device_path(name)
        got = await self._properties(path, names.DEVICE)
        with _well_formed():
            return Device.of_properties(path, got)

    async def device_path(self, name: str) -> str:
        """Return the object path for an id, alias or object path.  Raises NotFound."""
        if name.startswith(names.DEVICES + "/"):
            return name
        if names.DEVICE_ID.fullmatch(name):
            path = names.device_path(name)
            with contextlib.suppress(AgentError):
                await self._session.call(path, PROPERTIES, "Get", names.DEVICE, "Id")
                return path
        folded = name.casefold()
        for device in (await self.snapshot()).devices:
            if device.id == folded or folded in map(str.casefold, device.aliases):
                return device.path
        raise NotFound(f"no device {printable(name)!r}")

    async def nodes(self, name: str) -> tuple[Node, ...]:
        """Return the nodes of a device."""
        (rows,) = await self._device(name, "GetNodes")
        return tuple(Node(*row) for row in rows)

    async def access(self, name: str) -> tuple[NodeAccess, ...]:
        """Return who may open the nodes of a device now."""
        (rows,) = await self._device(name, "GetAccess")
        with _well_formed():
            return tuple(NodeAccess.of(row) for row in rows)

    async def history(self, name: str, most: int = 20) -> list[dict[str, Any]]:
        """Return the last transitions of a device, oldest first, as the agent names them."""
        (rows,) = await self._device(name, "GetHistory", most)
        return list(rows)

    async def holders(self, name: str) -> tuple[Holder, ...]:
        """Return the processes that have a device open.  Raises NotAuthorized."""
        (rows,) = await self._device(name, "GetHolders")
        with _well_formed():
            return tuple(Holder.of(row) for row in rows)

    async def leases(self) -> list[Lease]:
        """Return all leases, oldest first."""
        (objects,) = await self._session.call(names.ROOT, OBJECT_MANAGER, "GetManagedObjects")
        with _well_formed():
            found = [
                Lease.of_properties(path, interfaces[names.LEASE])
                for path, interfaces in objects.items()
                if names.LEASE in interfaces
            ]
        return sorted(found, key=lambda lease: (lease.created, lease.id))

    async def lease(self, name: str) -> Lease:
        """Return the lease with this id, unique beginning of an id, or object path."""
        path = await self.lease_path(name)
        got = await self._properties(path, names.LEASE)
        with _well_formed():
            return Lease.of_properties(path, got)

    async def lease_path(self, name: str) -> str:
        """Return the object path for a lease's id, the unique beginning of one (at least four
        characters), or its path.  Raises NotFound, InvalidArgument if several begin so."""
        if name.startswith(names.LEASES + "/"):
            return name
        if names.LEASE_ID.fullmatch(name):
            return names.lease_path(name)
        if len(name) < SHORTEST_PREFIX:
            raise InvalidArgument(f"{printable(name)!r} is too short for a lease: 4 characters at least")
        fitting = [lease for lease in await self.leases() if lease.id.startswith(name.lower())]
        if not fitting:
            raise NotFound(f"no lease {printable(name)!r}")
        if len(fitting) > 1:
            shown = ", ".join(lease.id for lease in fitting[:4])
            raise InvalidArgument(f"{printable(name)!r} stands for {len(fitting)} leases: {shown}")
        return fitting[0].path

    async def manifest(self, lease: str) -> Manifest:
        """Return the manifest of a lease.  Raises NotOwner, NotFound."""
        (raw,) = await self._lease(lease, "GetManifest")
        return Manifest.of(raw)

    async def request(self, lease: str) -> dict[str, Any]:
        """Return what was asked for.  Raises NotOwner, NotFound."""
        (raw,) = await self._lease(lease, "GetRequest")
        return dict(raw)

    async def binding(self, lease: str) -> dict[str, Any]:
        """Return what the lease's life hangs on.  Raises NotOwner, NotFound."""
        (raw,) = await self._lease(lease, "GetBinding")
        return dict(raw)

    async def explain(self, resource: str, count: int = 1, **options: Any) -> Explanation:
        """Say what `allocate` with these arguments would do now; grants nothing."""
        summary, rows = await self._manager(
            "Explain", resource, count, wire.packed(_dashed(options), wire.OPTIONS, "Explain")
        )
        return Explanation(
            verdict=summary.get("verdict", ""),
            text=summary.get("text", ""),
            chosen=tuple(summary.get("chosen", ())),
            note=summary.get("note", ""),
            devices=tuple(Verdict(*row) for row in rows),
        )

    # -- leases -------------------------------------------------------------------------------
    async def allocate(
        self,
        resource: str,
        count: int = 1,
        *,
        request_id: str | None = None,
        within: float = CALL_TIMEOUT,
        **options: Any,
    ) -> Grant:
        """Have COUNT devices of RESOURCE granted, all or none.

        OPTIONS are those of the contract with underscores for dashes (``on_fault="kill"``,
        ``ttl`` in microseconds).  Raises NotReady, Unavailable, NotFound, LimitExceeded,
        NotAuthorized, InvalidArgument, RequestConflict, RequestSpent, StoreFailed.
        """
        request_id = _named(request_id)
        path, raw = await self._manager(
            "Allocate",
            request_id,
            resource,
            count,
            wire.packed(_dashed(options), wire.OPTIONS, "Allocate"),
            within=within,
        )
        with _well_formed():
            return Grant(names.lease_id_of(path), path, Manifest.of(raw), request_id)

    async def confirm(self, lease: str, *, request_id: str | None = None, **binding: Any) -> None:
        """Take a lease into use; a BINDING (pid, unit, connection, ttl) replaces the earlier one.

        Raises NotFound, NotOwner, LeaseEnded, NotAuthorized, InvalidArgument.
        """
        path = await self.lease_path(lease)
        packed = wire.packed(_dashed(binding), wire.BINDING, "a binding")
        await self._manager("Confirm", _named(request_id), path, packed)

    async def release(self, lease: str, *, request_id: str | None = None) -> bool:
        """Give a lease back; False if it had ended already.  Raises NotFound, NotOwner."""
        path = await self.lease_path(lease)
        (changed,) = await self._manager("Release", _named(request_id), path)
        return bool(changed)

    # -- administration -----------------------------------------------------------------------
    async def cordon(self, device: str, reason: str, *, request_id: str | None = None) -> None:
        """Keep a device from being granted.  Raises NotAuthorized, NotFound, StoreFailed."""
        await self._device(device, "Cordon", _named(request_id), reason)

    async def uncordon(self, device: str, *, request_id: str | None = None) -> None:
        """Lift a cordon, also by the id of a device that is not there.  Raises NotAuthorized, NotFound,
        StoreFailed."""
        try:
            path = await self.device_path(device)
        except NotFound:
            if not names.DEVICE_ID.fullmatch(device):
                raise
            path = names.device_path(device)
        await self._session.call(path, names.DEVICE, "Uncordon", _named(request_id))

    async def reap(
        self, device: str, processes: Sequence[tuple[int, int]], *, request_id: str | None = None
    ) -> int:
        """End holders of a device, each named by pid and start time (`Holder`); return how many
        were signalled.  Raises NotAuthorized, NotFound."""
        path = await self.device_path(device)
        named = [list(process) for process in processes]
        (ended,) = await self._manager("Reap", _named(request_id), path, named)
        return int(ended)

    async def can(self, what: str) -> str:
        """Tell whether this caller may: ``yes``, ``no``, or ``challenge`` (after an authentication).
        WHAT is allocate, release-others, cordon or reap.  Raises Unavailable if polkit hangs."""
        member = "Can" + what.title().replace("-", "")
        if (names.MANAGER, member) not in METHODS:
            raise InvalidArgument(f"{printable(what)!r} is nothing that could be allowed")
        (answer,) = await self._manager(member)
        return str(answer)

    # -- control planes -----------------------------------------------------------------------
    async def register(
        self, name: str, *, protocol_version: int = 1, request_id: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Open a control plane's session.  Raises ProtocolUnsupported, NotAuthorized, NotSupported."""
        packed = wire.guessed(_dashed(options), "Register")
        (session,) = await self._manager("Register", _named(request_id), protocol_version, name, packed)
        return dict(session)

    async def reconcile(
        self,
        ledger: Mapping[str, Sequence[str]],
        *,
        page: int = 0,
        pages: int = 1,
        request_id: str | None = None,
    ) -> list[events.Conflict]:
        """Compare a control plane's ledger (lease id to device ids) with the agent's."""
        paths = {
            names.lease_path(lease): [names.device_path(device) for device in devices]
            for lease, devices in ledger.items()
        }
        (rows,) = await self._manager("Reconcile", _named(request_id), page, pages, paths)
        return [events.Conflict.of("", row) for row in rows]

    async def conflicts(self) -> list[events.Conflict]:
        """Return the disagreements that are not resolved yet.  Raises NotAuthorized."""
        (rows,) = await self._manager("GetConflicts")
        return [events.Conflict.of("", row) for row in rows]

    # -- providers ----------------------------------------------------------------------------
    async def register_provider(
        self, name: str, *, protocol_version: int = 1, request_id: str | None = None, **options: Any
    ) -> Registration:
        """Begin to report devices as provider NAME; again after every `AgentChanged`.

        Raises NotAuthorized, ProtocolUnsupported, LimitExceeded.
        """
        packed = wire.guessed(_dashed(options), "RegisterProvider")
        (got,) = await self._providers("RegisterProvider", _named(request_id), protocol_version, name, packed)
        with _well_formed():
            return Registration(got["protocol-version"], got["epoch"], got["page-size"], got["grace"])

    async def report_devices(
        self,
        version: int,
        devices: Sequence[Mapping[str, Any]],
        *,
        page_size: int = 64,
        request_id: str | None = None,
    ) -> ReportAnswer:
        """Report the full list under VERSION, which grows with every report, in pages
        of PAGE_SIZE devices (at most what `register_provider` said).

        A device is a mapping with the keys of docs/providers.md.  Returns the last page's
        answer, or the first that was not accepted.  Raises NotAuthorized (register first),
        InvalidArgument, LimitExceeded.
        """
        request_id = _named(request_id)
        rows = [wire.packed(device, wire.REPORTED, "a device") for device in devices]
        pages = [rows[start : start + page_size] for start in range(0, len(rows), page_size)] or [[]]
        answer = ReportAnswer(False, version, "")
        for number, page in enumerate(pages):
            (got,) = await self._providers(
                "ReportDevices", f"{request_id}-{number}", version, number, len(pages), page
            )
            with _well_formed():
                answer = ReportAnswer(got["accepted"], got["version"], got.get("reason", ""))
            if not answer.accepted:
                break
        return answer

    async def report_health(
        self,
        device: str,
        health: str,
        reason: str = "",
        evidence: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
    ) -> None:
        """State the health of one of the provider's devices, by id: healthy, suspect, unhealthy,
        unknown.  Raises NotAuthorized, NotFound, InvalidArgument."""
        packed = wire.guessed(evidence or {}, "evidence")
        await self._providers("ReportHealth", _named(request_id), device, health, reason, packed)

    # -- how ----------------------------------------------------------------------------------
    async def _manager(self, member: str, *body: Any, within: float = CALL_TIMEOUT) -> list[Any]:
        return await self._session.call(names.ROOT, names.MANAGER, member, *body, within=within)

    async def _providers(self, member: str, *body: Any) -> list[Any]:
        return await self._session.call(names.ROOT, names.PROVIDERS, member, *body)

    async def _device(self, name: str, member: str, *body: Any) -> list[Any]:
        return await self._session.call(await self.device_path(name), names.DEVICE, member, *body)

    async def _lease(self, name: str, member: str) -> list[Any]:
        return await self._session.call(await self.lease_path(name), names.LEASE, member)

    async def _properties(self, path: str, interface: str) -> dict[str, Any]:
        (got,) = await self._session.call(path, PROPERTIES, "GetAll", interface)
        return dict(got)


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    """Signatures are checked already; what is missing inside an a{sv} is an `UnexpectedReply` too."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise UnexpectedReply(f"the agent's answer lacks something: {error!r}") from error


def _dashed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Python's keyword arguments as the contract's keys; None is the same as not given."""
    return {key.replace("_", "-"): value for key, value in values.items() if value is not None}


def _named(request_id: str | None) -> str:
    """Return the request id given, or a new one; an empty one is the agent's to refuse, not ours to replace."""
    return new_request_id() if request_id is None else request_id
