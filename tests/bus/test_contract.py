"""Interface files, dispatch table, who-may table and policy file name the same members."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET

import pytest

from hetero_agent import names
from hetero_agent.bus import contract
from hetero_agent.bus.whomay import METHODS
from tests.support.bus import POLICY, PrivateBus
from tests.support.bus_service import Service
from tests.support.calls import busctl

_OURS = (names.MANAGER, names.DEVICE, names.LEASE, names.PROVIDERS)


def _declared() -> set[str]:
    return {
        f"{interface.name}.{method}" for interface in contract.load().values() for method in interface.methods
    }


def test_policy_lists_exactly_the_methods_of_the_interfaces() -> None:
    root = ET.parse(POLICY).getroot()
    default = [one for one in root.findall("policy") if one.get("context") == "default"]
    assert len(default) == 1
    allowed = set()
    for rule in default[0].findall("allow"):
        assert rule.attrib.keys() == {"send_destination", "send_type", "send_interface", "send_member"}
        assert rule.get("send_destination") == names.BUS_NAME
        assert rule.get("send_type") == "method_call"
        allowed.add(f"{rule.get('send_interface')}.{rule.get('send_member')}")
    assert allowed == _declared()
    assert [rule.attrib for rule in default[0].findall("deny")] == [
        {"send_destination": names.BUS_NAME, "send_type": "method_call"},
        {"send_destination": names.BUS_NAME, "send_type": "signal", "send_broadcast": "false"},
    ]
    owners = [one for one in root.findall("policy") if one.find("allow[@own]") is not None]
    assert {one.get("user") for one in owners} - {"hetero-agent"} == {"root"}


def test_who_may_table_has_a_row_for_every_method() -> None:
    assert METHODS.keys() == _declared()


def test_dispatch_table_has_a_row_for_every_method(service: Service) -> None:
    rows = {f"{interface}.{member}" for interface, member in service.service._dispatcher._methods}
    assert rows == _declared()
    for (interface, member), (_, method, _) in service.service._dispatcher._methods.items():
        assert contract.load()[interface].methods[member] is method


def test_every_member_is_documented() -> None:
    for interface in contract.load().values():
        assert interface.doc, interface.name
        for member in (
            *interface.methods.values(),
            *interface.signals.values(),
            *interface.properties.values(),
        ):
            assert member.doc.endswith("."), f"{interface.name}.{member.name}: {member.doc!r}"
        for method in interface.methods.values():
            assert all(one.name for one in (*method.inputs, *method.outputs))


def test_signatures_of_the_design() -> None:
    takes = {
        f"{name.rpartition('.')[2]}.{method.name}": (method.takes, method.gives)
        for name in _OURS
        for method in contract.load()[name].methods.values()
    }
    assert takes == {
        "Manager.Register": ("susa{sv}", "a{sv}"),
        "Manager.GetSnapshot": ("u", "a{sv}a(osssssbota{sv})"),
        "Manager.Allocate": ("ssua{sv}", "oa{sv}"),
        "Manager.Confirm": ("soa{sv}", ""),
        "Manager.Release": ("so", "b"),
        "Manager.Explain": ("sua{sv}", "a{sv}a(ssbs)"),
        "Manager.Reconcile": ("suua{oao}", "a(sooss)"),
        "Manager.GetConflicts": ("", "a(sooss)"),
        "Manager.Reap": ("soa(ut)", "u"),
        "Manager.CanAllocate": ("", "s"),
        "Manager.CanReleaseOthers": ("", "s"),
        "Manager.CanCordon": ("", "s"),
        "Manager.CanReap": ("", "s"),
        "Device.GetNodes": ("", "a(sssuu)"),
        "Device.GetAccess": ("", "aa{sv}"),
        "Device.GetHistory": ("u", "aa{sv}"),
        "Device.GetHolders": ("", "aa{sv}"),
        "Device.Cordon": ("ss", ""),
        "Device.Uncordon": ("s", ""),
        "Lease.GetManifest": ("", "a{sv}"),
        "Lease.GetRequest": ("", "a{sv}"),
        "Lease.GetBinding": ("", "a{sv}"),
        "Providers.RegisterProvider": ("susa{sv}", "a{sv}"),
        "Providers.ReportDevices": ("stuuaa{sv}", "a{sv}"),
        "Providers.ReportHealth": ("ssssa{sv}", ""),
    }
    signals = {
        one.name: one.signature
        for name in (names.MANAGER, names.DEVICE)
        for one in contract.load()[name].signals.values()
    }
    assert signals == {
        "Report": "ustba{sa{su}}",
        "DeviceList": "stuua(oos)",
        "HealthEvent": "ossoa{sv}",
        "Conflict": "sooss",
        "LeaseEnded": "os",
        "OrphanFound": "ou",
        "StateChanged": "sssa{sv}",
    }


def _introspect(bus: PrivateBus, path: str) -> str:
    command = ["busctl", f"--address={bus.address}", "--json=short", "call", names.BUS_NAME, path]
    done = subprocess.run(
        [*command, contract.INTROSPECTABLE, "Introspect"], capture_output=True, text=True, check=True
    )
    return str(json.loads(done.stdout)["data"][0])


@pytest.mark.parametrize(
    ("path", "interfaces"),
    [
        (names.ROOT, (names.MANAGER, names.PROVIDERS, contract.OBJECT_MANAGER)),
        (names.device_path("0000:00:00.0"), (names.DEVICE,)),
        (names.LOG_CONTROL_PATH, (names.LOG_CONTROL,)),
        ("/org", ()),
    ],
)
def test_introspection_is_the_interface_file(service: Service, path: str, interfaces: tuple[str, ...]) -> None:
    text = _introspect(service.bus, path)
    ET.fromstring(text)
    for name in interfaces:
        source = (contract.directory() / f"{name}.xml").read_text()
        element = source[source.index("  <interface ") : source.index("</node>")]
        assert element in text
    shown = {one.get("name") for one in ET.fromstring(text).findall("interface")}
    standard = {contract.PEER, contract.INTROSPECTABLE}
    assert shown == standard | set(interfaces) | ({contract.PROPERTIES} if interfaces else set())


def test_busctl_tree_shows_every_object(service: Service) -> None:
    done = busctl(service.bus, "tree", "--list", names.BUS_NAME)
    assert done.stderr == ""
    paths = set(done.stdout.split())
    assert {names.device_path(f"0000:00:{number:02x}.0") for number in range(16)} <= paths
    assert {names.ROOT, names.DEVICES, names.LEASES, names.LOG_CONTROL_PATH} <= paths


def test_a_broken_interface_file_is_named() -> None:
    with pytest.raises(contract.ContractError, match=r"bad\.xml"):
        contract.parse("<node>", "bad.xml")
    with pytest.raises(contract.ContractError, match="not one type"):
        contract.parse(
            '<node>\n  <interface name="a.b"><property name="P" type="ss" access="read"/></interface>\n</node>',
            "bad.xml",
        )
