"""Every row of the who-may table, with real callers of other uids."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from hetero_agent import names
from hetero_agent.bus import dispatcher
from hetero_agent.bus.whomay import CAN, METHODS, Action, Rule, Who
from hetero_agent.core.events import Refused
from hetero_agent.core.model import Holder
from tests.support.agent import GROUP_GID, MEMBER, OTHER_MEMBER, OUTSIDER
from tests.support.bus import PrivateBus
from tests.support.bus_service import CONTROL_PLANE, PROVIDER, RESOURCE, Service
from tests.support.calls import CallError, Client, V

DEVICE = names.device_path("0000:00:05.0")
HELD = "0000:00:06.0"


class _Cast:
    """One client of each circle, and a lease of the member's."""

    def __init__(self, bus: PrivateBus) -> None:
        self.clients = {
            "root": Client(bus, listen=False),
            "member": Client(bus, MEMBER, [GROUP_GID], listen=False),
            "other member": Client(bus, OTHER_MEMBER, [GROUP_GID], listen=False),
            "outsider": Client(bus, OUTSIDER, listen=False),
            "control plane": Client(bus, CONTROL_PLANE, [GROUP_GID], listen=False),
            "provider": Client(bus, PROVIDER, listen=False),
        }
        self.lease, _ = self.clients["member"].allocate("cast", RESOURCE, 1, {"client": V("s", "mine")})
        self.plane_lease, manifest = self.clients["control plane"].allocate(
            "cast", RESOURCE, 1, {"client": V("s", "plane"), "confirm": V("b", True)}
        )
        self.plane_device = names.device_path(manifest["devices"][0])


@pytest.fixture(scope="module")
def cast(service: Service) -> Iterator[_Cast]:
    service.hold(HELD, Holder(pid=4242, start=7, uids=(OUTSIDER,) * 4, comm="x", since=1))
    one = _Cast(service.bus)
    yield one
    for client in one.clients.values():
        client.close()


ALL = {"root", "member", "other member", "outsider", "control plane", "provider"}
GROUP = {"root", "member", "other member", "control plane"}

#: What each method is called with; "{lease}" and the like are the cast's.
CALLS: dict[str, tuple[str, str, list[Any]]] = {
    f"{names.MANAGER}.Register": (names.ROOT, "susa{sv}", ["r", 1, "k", {}]),
    f"{names.MANAGER}.GetSnapshot": (names.ROOT, "u", [0]),
    f"{names.MANAGER}.Allocate": (names.ROOT, "ssua{sv}", ["r", "example.com/none", 1, {}]),
    f"{names.MANAGER}.Confirm": (names.ROOT, "soa{sv}", ["r", "{lease}", {}]),
    f"{names.MANAGER}.Release": (names.ROOT, "so", ["r", "{lease}"]),
    f"{names.MANAGER}.Explain": (names.ROOT, "sua{sv}", [RESOURCE, 1, {}]),
    f"{names.MANAGER}.Reconcile": (names.ROOT, "suua{oao}", ["r", 0, 1, {}]),
    f"{names.MANAGER}.GetConflicts": (names.ROOT, "", []),
    f"{names.MANAGER}.Reap": (names.ROOT, "soa(ut)", ["r", "{plane_device}", [(4242, 7)]]),
    **{f"{names.MANAGER}.{name}": (names.ROOT, "", []) for name in CAN},
    f"{names.DEVICE}.GetNodes": (DEVICE, "", []),
    f"{names.DEVICE}.GetAccess": (DEVICE, "", []),
    f"{names.DEVICE}.GetHistory": (DEVICE, "u", [20]),
    f"{names.DEVICE}.GetHolders": (names.device_path(HELD), "", []),
    f"{names.DEVICE}.Cordon": (DEVICE, "ss", ["r", "why"]),
    f"{names.DEVICE}.Uncordon": (DEVICE, "s", ["r2"]),
    f"{names.LEASE}.GetManifest": ("{lease}", "", []),
    f"{names.LEASE}.GetRequest": ("{lease}", "", []),
    f"{names.LEASE}.GetBinding": ("{lease}", "", []),
    f"{names.PROVIDERS}.RegisterProvider": (names.ROOT, "susa{sv}", ["r", 1, "sim", {}]),
    f"{names.PROVIDERS}.ReportDevices": (names.ROOT, "stuuaa{sv}", ["r", 1, 0, 1, []]),
    f"{names.PROVIDERS}.ReportHealth": (names.ROOT, "ssssa{sv}", ["r", "d", "healthy", "", {}]),
    "org.freedesktop.DBus.Peer.Ping": (names.ROOT, "", []),
    "org.freedesktop.DBus.Peer.GetMachineId": (names.ROOT, "", []),
    "org.freedesktop.DBus.Introspectable.Introspect": (names.ROOT, "", []),
    "org.freedesktop.DBus.Properties.Get": (names.ROOT, "ss", [names.MANAGER, "Epoch"]),
    "org.freedesktop.DBus.Properties.GetAll": (names.ROOT, "s", [names.MANAGER]),
    "org.freedesktop.DBus.Properties.Set": (
        names.LOG_CONTROL_PATH,
        "ssv",
        [names.LOG_CONTROL, "LogLevel", V("s", "debug")],
    ),
    "org.freedesktop.DBus.ObjectManager.GetManagedObjects": (names.ROOT, "", []),
}

#: Who is let through by each rule of the table; the others get the error of `REFUSAL`.
ALLOWED = {
    Who.EVERYONE: ALL,
    Who.GROUP: GROUP,
    Who.OWNER: {"root", "member"},
    Who.HOLDER: GROUP | {"outsider"},
    Who.CONTROL_PLANE: {"root", "control plane"},
    Who.REAPER: {"root", "control plane"},
    Who.PROVIDER: {"root", "provider"},
    Who.ROOT: {"root"},
}


def test_the_table_is_the_design() -> None:
    rows = {member.removeprefix(names.BUS_NAME + "."): rule for member, rule in METHODS.items()}
    ours = {member: rule for member, rule in rows.items() if not member.startswith("org.")}
    assert {member: rule.who for member, rule in ours.items()} == {
        "Manager.Register": Who.CONTROL_PLANE,
        "Manager.GetSnapshot": Who.EVERYONE,
        "Manager.Allocate": Who.GROUP,
        "Manager.Confirm": Who.OWNER,
        "Manager.Release": Who.OWNER,
        "Manager.Explain": Who.GROUP,
        "Manager.Reconcile": Who.CONTROL_PLANE,
        "Manager.GetConflicts": Who.CONTROL_PLANE,
        "Manager.Reap": Who.REAPER,
        "Manager.CanAllocate": Who.EVERYONE,
        "Manager.CanReleaseOthers": Who.EVERYONE,
        "Manager.CanCordon": Who.EVERYONE,
        "Manager.CanReap": Who.EVERYONE,
        "Device.GetNodes": Who.EVERYONE,
        "Device.GetAccess": Who.EVERYONE,
        "Device.GetHistory": Who.EVERYONE,
        "Device.GetHolders": Who.HOLDER,
        "Device.Cordon": Who.ROOT,
        "Device.Uncordon": Who.ROOT,
        "Lease.GetManifest": Who.OWNER,
        "Lease.GetRequest": Who.OWNER,
        "Lease.GetBinding": Who.OWNER,
        "Providers.RegisterProvider": Who.PROVIDER,
        "Providers.ReportDevices": Who.EVERYONE,
        "Providers.ReportHealth": Who.EVERYONE,
    }
    assert {member: rule[1:] for member, rule in ours.items() if rule.action} == {
        "Manager.Allocate": (Action.ALLOCATE, False),
        "Manager.Release": (Action.RELEASE_OTHERS, False),
        "Manager.Explain": (Action.ALLOCATE, True),
        "Manager.Reap": (Action.REAP, False),
        "Device.GetHolders": (Action.REAP, False),
        "Device.Cordon": (Action.CORDON, False),
        "Device.Uncordon": (Action.CORDON, False),
    }
    assert dict(CAN) == {
        "CanAllocate": Rule(Who.GROUP, Action.ALLOCATE),
        "CanReleaseOthers": Rule(Who.ROOT, Action.RELEASE_OTHERS),
        "CanCordon": Rule(Who.ROOT, Action.CORDON),
        "CanReap": Rule(Who.ROOT, Action.REAP),
    }
    assert CALLS.keys() == METHODS.keys()


@pytest.mark.parametrize("member", [one for one in METHODS if not one.endswith(".Release")])
def test_who_may(cast: _Cast, member: str) -> None:
    interface, _, method = member.rpartition(".")
    path, signature, values = CALLS[member]
    known = {"{lease}": cast.lease, "{plane_device}": cast.plane_device}
    path = known.get(path, path)
    values = [known.get(one, one) if isinstance(one, str) else one for one in values]
    refused = {}
    texts: list[str] = []
    for who, client in cast.clients.items():
        try:
            client.call(path, interface, method, signature, *values)
        except CallError as error:
            if error.name in ("NotAuthorized", "NotOwner"):
                refused[who] = error.name
                texts.append(error.text)
    if method in ("ReportDevices", "ReportHealth"):
        # the registry lets in the one connection that has registered, if any has
        assert refused.keys() >= ALL - {"root", "provider"}
        return
    assert all(method in text for text in texts), texts
    who = METHODS[member].who
    expected = "NotOwner" if who is Who.OWNER else "NotAuthorized"
    assert refused == dict.fromkeys(ALL - ALLOWED[who], expected)


def test_release_is_for_the_owner_and_root(cast: _Cast) -> None:
    lease, _ = cast.clients["member"].allocate("to-release", RESOURCE)
    for who in ALL - {"root", "member"}:
        with pytest.raises(CallError) as caught:
            cast.clients[who].release("r", lease)
        assert caught.value.name == "NotOwner"
    assert cast.clients["member"].release("r", lease) is True
    lease, _ = cast.clients["member"].allocate("to-release-2", RESOURCE)
    assert cast.clients["root"].release("r", lease) is True


def test_only_root_allocates_for_others(cast: _Cast) -> None:
    for who in ("member", "control plane"):
        with pytest.raises(CallError) as caught:
            cast.clients[who].allocate("owner", RESOURCE, 1, {"owner-uid": V("u", OUTSIDER)})
        assert caught.value.name == "NotAuthorized"
    lease, _ = cast.clients["root"].allocate("owner", RESOURCE, 1, {"owner-uid": V("u", OUTSIDER)})
    assert cast.clients["outsider"].properties(lease, names.LEASE)["OwnerUid"] == OUTSIDER
    assert cast.clients["outsider"].release("r9", lease) is True


def test_a_control_plane_reaps_only_for_leases_of_its_own(cast: _Cast) -> None:
    members = cast.clients["root"].properties(cast.lease, names.LEASE)["Devices"][0]
    with pytest.raises(CallError) as caught:
        cast.clients["control plane"].manager("Reap", "soa(ut)", "reap", members, [(4242, 7)])
    assert caught.value.name == "NotAuthorized"


def test_a_holder_outside_the_group_sees_only_its_own(service: Service, cast: _Cast) -> None:
    mine = Holder(pid=4242, start=7, uids=(OUTSIDER,) * 4, comm="x", since=1)
    container = "0123456789abcdef" * 4
    theirs = Holder(
        pid=4243,
        start=8,
        uids=(MEMBER,) * 4,
        exe="/bin/y",
        comm="y",
        cgroup=f"/docker/{container}",
        since=2,
        mapped=True,
        evidence={"path": "/dev/x"},
    )
    service.hold(HELD, mine, theirs)
    path = names.device_path(HELD)
    seen = cast.clients["outsider"].call(path, names.DEVICE, "GetHolders")
    assert [one["pid"] for one in seen] == [4242]
    seen = cast.clients["member"].call(path, names.DEVICE, "GetHolders")
    assert [one["pid"] for one in seen] == [4242, 4243]
    assert {**seen[1], "since": 0} == {
        "pid": 4243,
        "start": 8,
        "uid": MEMBER,
        "exe": "/bin/y",
        "comm": "y",
        "unit": "",
        "container": f"docker:{container}",
        "pod": "",
        "since": 0,
        "mapped": True,
        "role": "outsider",
        "lease": "/",
        "evidence": {"path": "/dev/x"},
    }


def test_history_hides_who_from_outsiders(cast: _Cast) -> None:
    path = cast.clients["root"].properties(cast.lease, names.LEASE)["Devices"][0]
    for who, sees in (("root", True), ("member", True), ("outsider", False), ("provider", False)):
        history = cast.clients[who].call(path, names.DEVICE, "GetHistory", "u", 20)
        granted = next(one for one in history if one["to"] == "allocating")
        assert granted["trigger"] == "granted"
        assert granted["lease"] == cast.lease
        assert ("uid" in granted) is sees
        if sees:
            assert granted["uid"] == MEMBER
            assert granted["pid"] == cast.clients["member"].pid
            assert granted["bus-name"] == cast.clients["member"].unique_name
            assert granted["client"] == "mine"


def test_refusals_reach_the_audit_and_a_flood_of_them_is_counted(service: Service, cast: _Cast) -> None:
    client = cast.clients["provider"]
    meters = service.service._dispatcher._refusals._meters
    service.do(lambda: meters.pop(PROVIDER, None))
    service.events.clear()
    begun = time.monotonic()
    for number in range(40):
        with pytest.raises(CallError):
            client.allocate(f"flood-{number}", RESOURCE)
    took = time.monotonic() - begun
    told = [one for one in service.events if isinstance(one, Refused)]
    # a burst, and one more every few seconds on a machine where the calls take that long
    assert 1 <= len(told) <= dispatcher._BURST + took / dispatcher._REFILL + 1
    assert told[0].error == "NotAuthorized"
    assert told[0].method == "Allocate"
    assert told[0].actor.uid == PROVIDER
    assert told[0].actor.pid == client.pid
    service.do(lambda: setattr(meters[PROVIDER], "left", 1.0))
    with pytest.raises(CallError):
        client.allocate("flood-last", RESOURCE)
    told = [one for one in service.events if isinstance(one, Refused)]
    assert told[-1].request_id == "flood-last"
    assert len(told) + sum(one.suppressed for one in told) == 41
