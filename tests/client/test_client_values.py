"""What the library sends and reads, compared with the contract; the manifest's environment."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from dbus_next import Variant

from hetero_agent import names
from hetero_agent.client import Manifest, contract, errors, events, wire
from hetero_agent.client.errors import UnexpectedReply
from hetero_agent.client.manifest import chooses_devices
from hetero_agent.client.results import Status
from hetero_agent.core.effects import ErrorKind
from hetero_agent.providers import report
from tests.support.process import PYTHON, ROOT


def interfaces() -> dict[str, ET.Element]:
    """The interfaces of dbus/*.xml by name."""
    return {
        one.attrib["name"]: one
        for path in sorted((ROOT / "dbus").glob("*.xml"))
        for one in ET.parse(path).getroot().iter("interface")
    }


def signatures(member: ET.Element) -> tuple[str, str]:
    args = member.findall("arg")
    return (
        "".join(arg.attrib["type"] for arg in args if arg.get("direction", "in") == "in"),
        "".join(arg.attrib["type"] for arg in args if arg.get("direction") == "out"),
    )


def test_every_method_of_the_contract_is_called_by_its_signature() -> None:
    written = {
        (name, method.attrib["name"]): signatures(method)
        for name, one in interfaces().items()
        if name.startswith(names.BUS_NAME)
        for method in one.findall("method")
    }
    ours = {key: value for key, value in contract.METHODS.items() if key[0].startswith(names.BUS_NAME)}
    assert ours == written


def test_every_signal_of_the_contract_is_a_type() -> None:
    written = {
        (name, signal.attrib["name"])
        for name, one in interfaces().items()
        if name.startswith(names.BUS_NAME)
        for signal in one.findall("signal")
    }
    ours = {(one.interface, one.member) for one in events.SIGNALS if one.interface.startswith(names.BUS_NAME)}
    # declared for registered control planes, not sent in this version
    assert ours == written - {(names.MANAGER, "DeviceList")}


def test_one_exception_per_error_name() -> None:
    assert set(errors._BY_SHORT) == {kind.value for kind in ErrorKind}


def test_a_device_can_be_reported_with_every_key_that_the_agent_takes() -> None:
    assert set(wire.REPORTED) == set(report._FIELDS)


def test_what_is_packed_has_the_types_of_the_contract() -> None:
    packed = wire.packed(
        {"require": {"memory": 5, "ecc": True, "model": "x", "below": -1}, "ttl": 3, "devices": ("a", "b")},
        wire.OPTIONS,
        "Allocate",
    )
    assert packed["ttl"] == Variant("t", 3)
    assert packed["devices"] == Variant("as", ["a", "b"])
    assert packed["require"].value == {
        "memory": Variant("t", 5),
        "ecc": Variant("b", True),
        "model": Variant("s", "x"),
        "below": Variant("x", -1),
    }
    reported = wire.packed(
        {"nodes": [("/dev/a", "own")], "numa-nodes": (), "env": {"A": "1"}}, wire.REPORTED, "a device"
    )
    assert reported["nodes"] == Variant("a(ss)", [["/dev/a", "own"]])
    assert reported["numa-nodes"] == Variant("au", [])
    assert wire.plain(reported) == {"nodes": [["/dev/a", "own"]], "numa-nodes": [], "env": {"A": "1"}}


def test_limits_are_paired_with_their_use() -> None:
    status = Status.of_properties({"MaxLeases": 10, "Leases": 3, "MaxLeasesPerUid": 4})
    assert status.limits == {"Leases": (3, 10), "LeasesPerUid": (None, 4)}


# -- the manifest ---------------------------------------------------------------------------------
MANIFEST = Manifest.of(
    {
        "version": 1,
        "lease": "ab" * 16,
        "resource": "nvidia.com/gpu",
        "devices": ["0000:3b:00.0", "0000:5e:00.0"],
        "nodes": [["0000:3b:00.0", "/dev/nvidia0", "own", "char", 195, 0]],
        "env": {"CUDA_VISIBLE_DEVICES": "0,1", "HETERO_DEVICE_COUNT": "2"},
        "groups": [44],
        "confirm-by": 7,
        "confirm-by-boottime": 5,
        "of-a-later-version": 1,
    }
)


def test_the_environment_replaces_inherited_choices_of_devices() -> None:
    inherited = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "7",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "ROCR_VISIBLE_DEVICES": "3",
        "HETERO_LEASE_ID": "of the outer run",
        "HETERO_DEVICES": "x",
        "HETERO_AGENT_ANYTHING": "kept",
    }
    assert MANIFEST.environment(inherited) == {
        "PATH": "/bin",
        "HETERO_AGENT_ANYTHING": "kept",
        "HETERO_LEASE_ID": "ab" * 16,
        "HETERO_RESOURCE": "nvidia.com/gpu",
        "HETERO_DEVICES": "0000:3b:00.0,0000:5e:00.0",
        "HETERO_DEVICE_COUNT": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }


CHOOSING = """
CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
ZE_AFFINITY_MASK ONEAPI_DEVICE_SELECTOR ASCEND_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES ASCEND_VNPU_SPECS
HABANA_VISIBLE_DEVICES HABANA_VISIBLE_MODULES HETERO_LEASE_ID HETERO_DEVICES HETERO_DEVICE_COUNT
"""


@pytest.mark.parametrize("variable", CHOOSING.split())
def test_variables_that_choose_devices_are_known(variable: str) -> None:
    assert chooses_devices(variable)


@pytest.mark.parametrize("variable", ["PATH", "CUDA_HOME", "ASCEND_HOME_PATH", "HABANA_LOGS", "NCCL_IB_HCA"])
def test_other_variables_are_left_alone(variable: str) -> None:
    assert not chooses_devices(variable)


def test_unknown_keys_of_a_manifest_stay_in_the_raw_one() -> None:
    assert MANIFEST.raw["of-a-later-version"] == 1
    assert MANIFEST.nodes == (("0000:3b:00.0", "/dev/nvidia0", "own", "char", 195, 0),)
    assert (MANIFEST.groups, MANIFEST.confirm_by_boottime) == ((44,), 5)


def test_importing_the_library_imports_no_device_library() -> None:
    code = "import hetero_agent.client, sys; print(*sorted(sys.modules))"
    loaded = subprocess.check_output([PYTHON, "-c", code], text=True, cwd=ROOT).split()
    heavy = {"pyroute2", "pyudev", "systemd", "sqlite3", "hetero_agent.core"}
    assert not heavy & set(loaded)


@pytest.mark.parametrize("key", ["env", "env-filtered"])
@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "OPENSSL_CONF",
        "CUDA_INJECTION64_PATH",
        "PATH",
        "HETERO_AGENT_BUS",
        "A;reboot;B",
        "A B",
        "A=B",
        "",
        "1",
        "A\n",
    ],
)
def test_an_agent_that_was_taken_over_sets_no_variable_that_runs_code(name: str, key: str) -> None:
    with pytest.raises(UnexpectedReply):
        Manifest.of({key: {"NPU": "0", name: "/tmp/x"}})


def test_a_profile_of_roots_may_name_such_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "PROFILES_DIR", str(tmp_path))
    (tmp_path / "npu.toml").write_text('[env]\nLD_LIBRARY_PATH = "/opt/npu/lib"\n[parts.env]\nPYTHONX = "1"\n')
    (tmp_path / "broken.toml").write_text("[env")
    given = {"LD_LIBRARY_PATH": "/opt/npu/lib", "PYTHONX": "1"}
    assert Manifest.of({"env": given}).env == given
    with pytest.raises(UnexpectedReply, match="LD_PRELOAD"):
        Manifest.of({"env": {"LD_PRELOAD": "/tmp/x"}})
