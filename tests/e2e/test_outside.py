"""The agent as somebody else's program sees it: busctl for people, GLib for programs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from hetero_agent import names
from tests.support.agent import GROUP_GID, MEMBER, OTHER_MEMBER, OUTSIDER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V, busctl, busctl_json, receive_all
from tests.support.process import ROOT
from tests.support.vendor import RESOURCE, Vendor
from tests.support.wait import wait_until

MANAGER = (names.BUS_NAME, names.ROOT, names.MANAGER)


def test_tree_shows_root_devices_and_leases(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add("npu-0", "npu-1")
    vendor.wait_idle()
    with Client(bus) as root:
        lease, _ = root.allocate("r1", RESOURCE)
        shown = busctl(bus, "tree", "--list", names.BUS_NAME).stdout.split()
    assert {
        names.ROOT,
        names.DEVICES,
        names.device_path("npu-0"),
        names.device_path("npu-1"),
        names.LEASES,
        lease,
        names.LOG_CONTROL_PATH,
    } <= set(shown)


def test_introspection_is_our_xml(bus: PrivateBus, agent: AgentProcess) -> None:
    served = busctl(bus, "introspect", "--xml-interface", names.BUS_NAME, names.ROOT)
    assert served.returncode == 0, served.stderr
    tree = ET.fromstring(served.stdout)
    offered = {one.get("name"): one for one in tree.findall("interface")}
    ours = ET.parse(ROOT / "dbus" / f"{names.MANAGER}.xml").getroot().find("interface")
    assert ours is not None
    assert ET.canonicalize(ET.tostring(offered[names.MANAGER]), strip_text=True) == ET.canonicalize(
        ET.tostring(ours), strip_text=True
    )


def test_introspect_lists_members_with_signatures(bus: PrivateBus, agent: AgentProcess) -> None:
    table = busctl(bus, "introspect", names.BUS_NAME, names.ROOT, names.MANAGER).stdout
    rows = {line.split()[0]: line.split()[1:4] for line in table.splitlines()[1:]}
    assert rows[".Allocate"] == ["method", "ssua{sv}", "oa{sv}"]
    assert rows[".Release"] == ["method", "so", "b"]
    assert rows[".Report"][:2] == ["signal", "ustba{sa{su}}"]
    assert rows[".Ready"] == ["property", "b", "true"]


def test_busctl_allocate_twice_gives_the_same_bytes(
    bus: PrivateBus, agent: AgentProcess, vendor: Vendor
) -> None:
    vendor.add("npu-0", "npu-1")
    vendor.wait_idle()
    call = ("call", *MANAGER, "Allocate", "ssua{sv}", "busctl-1", RESOURCE, "1", "1", "label", "s", "by hand")
    first = busctl(bus, "--json=short", *call)
    second = busctl(bus, "--json=short", *call)
    assert first.returncode == 0, first.stderr
    assert re.match(r'\{"type":"oa\{sv\}","data":\["/org/heteroagent/Agent1/leases/l', first.stdout)
    assert second.stdout == first.stdout
    plain = busctl(bus, *call)
    assert plain.stdout.startswith('oa{sv} "/org/heteroagent/Agent1/leases/l')
    assert busctl_json(bus, "get-property", *MANAGER, "Leases")["data"] == 1


def test_outsider_may_look_and_not_allocate(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add("npu-0")
    vendor.wait_idle()
    with Client(bus, OUTSIDER) as outsider:
        assert outsider.device("npu-0")["State"] == "idle"
        assert outsider.manager("GetSnapshot", "u", 0)[0]["total"] == 1
        for member, signature, values in (
            ("Allocate", "ssua{sv}", ("r1", RESOURCE, 1, {})),
            ("Explain", "sua{sv}", (RESOURCE, 1, {})),
        ):
            with pytest.raises(CallError) as caught:
                outsider.manager(member, signature, *values)
            assert caught.value.name == "NotAuthorized"
        path = names.device_path("npu-0")
        for member, signature, values in (("Cordon", "ss", ("r2", "mine")), ("Uncordon", "s", ("r3",))):
            with pytest.raises(CallError) as caught:
                outsider.call(path, names.DEVICE, member, signature, *values)
            assert caught.value.name == "NotAuthorized"
        assert outsider.device("npu-0")["State"] == "idle"


def test_member_owns_the_lease_and_another_member_does_not(
    bus: PrivateBus, agent: AgentProcess, vendor: Vendor
) -> None:
    vendor.add("npu-0")
    vendor.wait_idle()
    with Client(bus, MEMBER, [GROUP_GID]) as one, Client(bus, OTHER_MEMBER, [GROUP_GID]) as other:
        lease, manifest = one.allocate("r1", RESOURCE)
        assert manifest["devices"] == ["npu-0"]
        assert manifest["nodes"][0][:2] == ["npu-0", str(vendor.file("npu-0"))]
        assert one.properties(lease, names.LEASE)["OwnerUid"] == MEMBER
        for call in (
            lambda: other.release("x1", lease),
            lambda: other.confirm("x2", lease),
            lambda: other.call(lease, names.LEASE, "GetManifest"),
            lambda: other.call(lease, names.LEASE, "GetRequest"),
            lambda: other.call(lease, names.LEASE, "GetBinding"),
        ):
            with pytest.raises(CallError) as caught:
                call()
            assert caught.value.name == "NotOwner"
        assert one.call(lease, names.LEASE, "GetManifest") == manifest
        assert one.release("r2", lease) is True


def test_hundred_requests_for_eight_devices_give_eight_leases(
    bus: PrivateBus, agent: AgentProcess, vendor: Vendor
) -> None:
    ids = [f"npu-{number}" for number in range(8)]
    vendor.add(*ids)
    vendor.wait_idle()
    clients = [Client(bus, MEMBER, [GROUP_GID]) for _ in range(10)]
    try:
        sent = [
            (
                client,
                client.send(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", f"{who}-{n}", RESOURCE, 1, {}),
            )
            for n in range(10)
            for who, client in enumerate(clients)
        ]
        good, bad = [], []
        for client, number in sent:
            some, none = receive_all(client, [number])
            good += some
            bad += none
    finally:
        for client in clients:
            client.close()
    assert len(good) == 8
    assert sorted(reply.value[1]["devices"][0] for reply in good) == ids
    assert len({reply.value[0] for reply in good}) == 8
    assert {error.name for error in bad} == {"Unavailable"}
    assert len(bad) == 92


def test_hundred_calls_with_one_id_give_one_lease(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add(*(f"npu-{number}" for number in range(8)))
    vendor.wait_idle()
    clients = [Client(bus, MEMBER, [GROUP_GID]) for _ in range(10)]
    try:
        sent = [
            (client, client.send(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", "the-one", RESOURCE, 1, {}))
            for _ in range(10)
            for client in clients
        ]
        replies = [client.receive(number) for client, number in sent]
    finally:
        for client in clients:
            client.close()
    assert len(replies) == 100
    assert len({reply.bytes for reply in replies}) == 1
    assert busctl_json(bus, "get-property", *MANAGER, "Leases")["data"] == 1
    states = [one["State"] for one in vendor.client.devices().values()]
    assert sorted(states) == ["allocating"] + ["idle"] * 7


def test_request_ids_conflict_and_are_spent(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add("npu-0", "npu-1")
    vendor.wait_idle()
    with Client(bus) as root:
        lease, _ = root.allocate("r1", RESOURCE)
        with pytest.raises(CallError) as caught:
            root.allocate("r1", RESOURCE, 2)
        assert caught.value.name == "RequestConflict"
        root.release("r2", lease)
        root.wait_for_signal(names.MANAGER, "LeaseEnded")
        with pytest.raises(CallError) as caught:
            root.allocate("r1", RESOURCE)
        assert caught.value.name == "RequestSpent"
        assert root.release("r3", lease) is False


def test_wrong_signature_and_unknown_members_get_standard_errors(bus: PrivateBus, agent: AgentProcess) -> None:
    with Client(bus) as root:
        with pytest.raises(CallError) as caught:
            root.manager("Allocate", "s", "r1")
        assert caught.value.name == "org.freedesktop.DBus.Error.InvalidArgs"
        with pytest.raises(CallError) as caught:
            root.call(names.device_path("nothing"), names.DEVICE, "GetNodes")
        assert caught.value.name == "org.freedesktop.DBus.Error.UnknownObject"
        with pytest.raises(CallError) as caught:
            root.allocate("r1", "example.com/none")
        assert caught.value.name == "NotFound"


def test_hotplug_is_signalled_from_the_object_manager(
    bus: PrivateBus, agent: AgentProcess, vendor: Vendor
) -> None:
    with Client(bus, OUTSIDER) as watcher:
        vendor.add("npu-7")
        manager = "org.freedesktop.DBus.ObjectManager"
        added = watcher.wait_for_signal(manager, "InterfacesAdded", names.ROOT)
        assert added.body[0] == names.device_path("npu-7")
        assert added.body[1][names.DEVICE]["Id"] == "npu-7"
        vendor.wait_idle()
        vendor.remove("npu-7")
        removed = watcher.wait_for_signal(manager, "InterfacesRemoved", names.ROOT)
        assert removed.body[0] == names.device_path("npu-7")
        assert names.DEVICE in removed.body[1]


def test_states_are_signalled_from_the_device(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    vendor.add("npu-0")
    vendor.wait_idle()
    path = names.device_path("npu-0")
    with Client(bus, OUTSIDER) as watcher, Client(bus) as root:
        lease, _ = root.allocate("r1", RESOURCE)
        root.confirm("r2", lease)
        root.release("r3", lease)
        root.wait_for_device("npu-0", State="idle")
        ended = watcher.wait_for_signal(names.MANAGER, "LeaseEnded")
        assert ended.body == (lease, "released")
        steps = [
            ("idle", "allocating"),
            ("allocating", "in-use"),
            ("in-use", "reclaiming"),
            ("reclaiming", "idle"),
        ]
        wait_until(
            lambda: [one.body[:2] for one in watcher.signals(names.DEVICE, "StateChanged", path)] == steps,
            what="each step",
        )
        history = root.call(path, names.DEVICE, "GetHistory", "u", 20)
    assert [(one["from"], one["to"]) for one in history][-4:] == steps
    sequence = [one["sequence"] for one in history]
    assert sequence == sorted(set(sequence))


def test_report_counts_add_up(bus: PrivateBus, agent: AgentProcess, vendor: Vendor) -> None:
    with Client(bus, OUTSIDER) as watcher, Client(bus) as root:
        vendor.add("npu-0", "npu-1", "npu-2")
        vendor.wait_idle()
        root.allocate("r1", RESOURCE, 2, {"confirm": V("b", True)})

        def counted() -> bool:
            reports = watcher.signals(names.MANAGER, "Report")
            return bool(reports) and reports[-1].body[4].get(RESOURCE, {}).get("in-use") == 2

        wait_until(counted, what="a Report with two devices in use")
        version, epoch, _, complete, resources = watcher.signals(names.MANAGER, "Report")[-1].body
        counts = dict(resources[RESOURCE])
        assert (version, complete) == (1, True)
        assert epoch == root.properties(names.ROOT, names.MANAGER)["Epoch"]
        assert counts.pop("allocatable") == 1
        assert counts.pop("total") == sum(counts.values()) == 3
        generations = [one.body[2] for one in watcher.signals(names.MANAGER, "Report")]
        assert generations == sorted(generations)
