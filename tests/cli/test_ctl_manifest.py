"""``heteroctl manifest``: each form used by what reads it, or by its own parser."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hetero_agent import names
from hetero_agent.cli import forms
from hetero_agent.client.manifest import DEVICE_VARIABLES, Manifest
from tests.support.agent import OUTSIDER, AgentProcess
from tests.support.ctl import Ctl

NPU = "example.com/npu"

SCENARIO = """
[[device]]
id = "npu-0"
resource = "example.com/npu"
[[device]]
id = "npu-1"
resource = "example.com/npu"
"""
DEVICES = {"npu-0", "npu-1"}


def golden(name: str) -> Manifest:
    """The manifest of the lease of two devices of a mocked host."""
    path = Path("tests/discovery/golden") / f"{name}.json"
    return Manifest.of(json.loads(path.read_text())["manifests"][-1])


def awkward() -> Manifest:
    """One whose texts have all that has a meaning to some reader."""
    return Manifest.of(
        {
            "lease": "ab" * 16,
            "resource": NPU,
            "devices": ["a:0", "b"],
            "nodes": [["a:0", "/dev/null", "own", "char", 1, 3], ["b", "/run/x/b", "own", "file", 0, 0]],
            "mounts": [["/opt/a,b", "/opt/a,b", "ro,nosuid"], ["/opt/c:d", "/opt/e", "ro"]],
            "env": {"PLAIN": "0,1", "HARD": "a 'b' \"c\" 5%n #d;", "EMPTY": ""},
            "env-filtered": {"PLAIN": "0"},
            "groups": [44, 104],
            "limits": {"memlock": 2**64 - 1, "nofile": 4096},
        }
    )


def in_shell(lines: list[str], tmp_path: Path, **inherited: str) -> dict[str, str]:
    path = tmp_path / "lease.env"
    path.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["sh", "-euc", f". {path}; exec env -0"],
        env={"PATH": os.environ["PATH"], **inherited},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if item)


@pytest.mark.parametrize("manifest", [awkward(), golden("amd"), golden("rdma")], ids=["awkward", "amd", "rdma"])
def test_env_is_read_by_sh(manifest: Manifest, tmp_path: Path) -> None:
    wanted = manifest.variables()
    inherited = {
        "HIP_VISIBLE_DEVICES": "3",
        "ASCEND_VNPU_SPECS": "vir04",
        "HETERO_DEVICES": "x",
        "OTHER": "kept",
    }
    got = in_shell(forms.shell(manifest), tmp_path, **inherited)
    assert {key: value for key, value in got.items() if key in wanted} == wanted
    assert got["OTHER"] == "kept"
    # ROCm would filter twice
    assert "HIP_VISIBLE_DEVICES" not in got
    assert "ASCEND_VNPU_SPECS" not in got


def test_a_job_has_two_leases_in_one_shell(tmp_path: Path) -> None:
    """GPUs of one and adapters of another: the second's file leaves what the first's has set."""
    cards, adapters = golden("nvidia"), golden("rdma")
    got = in_shell([*forms.shell(cards), *forms.shell(adapters)], tmp_path, HIP_VISIBLE_DEVICES="3")
    assert got.items() >= {**cards.env, **adapters.env}.items()
    assert "HIP_VISIBLE_DEVICES" not in got
    # what zsh would take for the path of a command is quoted
    assert "NCCL_IB_HCA='=mlx5_10:1,mlx5_10:2,mlx5_1:1'" in forms.shell(adapters)


def test_env_is_read_by_systemd(tmp_path: Path) -> None:
    """systemd-tmpfiles reads os-release with the parser of EnvironmentFile= (src/basic/env-file.c)
    and shows some of its values."""
    values = {
        "ID": "0,1",
        "VERSION_ID": "a 'b' \"c\" 5%n #d;",
        "BUILD_ID": "=mlx5_1:1",
    }
    manifest = Manifest.of({"lease": "ab" * 16, "env": values})
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text("\n".join(forms.shell(manifest)) + "\n")
    specifiers = {"ID": "%o", "VERSION_ID": "%w", "BUILD_ID": "%B"}
    for name, specifier in specifiers.items():
        (tmp_path / "show.conf").write_text(f"f /{name} - - - - {specifier}\n")
        command = ["systemd-tmpfiles", f"--root={tmp_path}", "--create", str(tmp_path / "show.conf")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
    assert {name: (tmp_path / name).read_text() for name in specifiers} == values


@pytest.mark.parametrize("manifest", [awkward(), golden("nvidia")], ids=["awkward", "nvidia"])
def test_systemd_finds_nothing_wrong_with_the_drop_in(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "train.service").write_text("[Unit]\nDescription=Train\n[Service]\nExecStart=/bin/true\n")
    (tmp_path / "train.service.d").mkdir()
    (tmp_path / "train.service.d/lease.conf").write_text("\n".join(forms.systemd(manifest)) + "\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "train.service")],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "debug"},
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "lease.conf" in line and "train.service.d" in line]
    assert [line for line in ours if "gnor" in line or "nvalid" in line or "nknown" in line] == []
    assert done.returncode == 0, done.stderr[-2000:]
    # it can find something: the same with a value that systemd does not take
    (tmp_path / "train.service.d/lease.conf").write_text("[Service]\nDevicePolicy=nearly\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "train.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "lease.conf:2" in done.stderr


def test_the_drop_in_word_for_word() -> None:
    lines = forms.systemd(awkward())
    lease = "ab" * 16
    at = next(number for number, line in enumerate(lines) if line.startswith("UnsetEnvironment="))
    assert lines[:at] == [
        f"# Lease {lease} of {NPU}: made by heteroctl manifest --format systemd",
        "[Service]",
        "DevicePolicy=closed",
        "DeviceAllow=/dev/null rw",
        "SupplementaryGroups=44 104",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=4096",
        'Environment="EMPTY="',
        'Environment="HARD=a \'b\' \\"c\\" 5%%n #d;"',
        'Environment="HETERO_DEVICES=a:0,b"',
        'Environment="HETERO_DEVICE_COUNT=2"',
        f'Environment="HETERO_LEASE_ID={lease}"',
        f'Environment="HETERO_RESOURCE={NPU}"',
        'Environment="PLAIN=0"',
    ]
    unset = " ".join(line.removeprefix("UnsetEnvironment=") for line in lines[at:]).split()
    assert set(unset) == DEVICE_VARIABLES
    assert max(map(len, lines[at:])) <= 100


def test_podmans_arguments() -> None:
    arguments = forms.podman(awkward())
    assert [one for one in arguments if not one.startswith("--env=")] == [
        "--device=/dev/null:/dev/null:rw",
        "--mount=type=bind,src=/run/x/b,dst=/run/x/b,rw",
        '--mount=type=bind,"src=/opt/a,b","dst=/opt/a,b",ro,nosuid',
        "--mount=type=bind,src=/opt/c:d,dst=/opt/e,ro",
        "--group-add=44",
        "--group-add=104",
        "--ulimit=memlock=-1",
        "--ulimit=nofile=4096",
    ]
    # podman reads a mount as a record of CSV
    [fields] = csv.reader([arguments[2].removeprefix("--mount=")])
    assert fields == ["type=bind", "src=/opt/a,b", "dst=/opt/a,b", "ro", "nosuid"]
    # the driver counts from 0 in there
    assert "--env=PLAIN=0" in arguments
    # a node that two devices share is given once
    both = [one for one in forms.podman(golden("nvidia")) if one.startswith("--device=/dev/nvidiactl:")]
    assert len(both) == 1


@pytest.mark.parametrize("name", ["amd", "nvidia", "ascend", "rdma"])
def test_a_container_by_podmans_arguments_gets_no_more_by_its_images_variables(name: str) -> None:
    """Vendors' hooks read these, whichever vendor's the lease is; as in the CDI specification."""
    lease = golden(name)
    given = {one.removeprefix("--env=") for one in forms.podman(lease) if one.startswith("--env=")}
    [device] = forms.cdi(lease, "unix:path=/x")["devices"]
    assert given == set(device["containerEdits"]["env"])
    asked = {one.partition("=")[0]: one.partition("=")[2] for one in given}
    own = {"ascend": {"ASCEND_VISIBLE_DEVICES": "5,10"}}.get(name, {})
    nothing = dict.fromkeys(
        ("ASCEND_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"), "void"
    )
    assert asked.items() >= {**nothing, "AMD_VISIBLE_DEVICES": "none", **own}.items()


def test_inside_a_container_the_numbers_start_at_0() -> None:
    found = golden("ascend")
    assert found.variables()["ASCEND_VISIBLE_DEVICES"] == "5,10"
    assert found.variables(filtered=True)["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"
    one = Manifest.of(json.loads(Path("tests/discovery/golden/nvidia.json").read_text())["manifests"][0])
    assert one.variables()["CUDA_VISIBLE_DEVICES"] == "1"
    assert "--env=CUDA_VISIBLE_DEVICES=0" in forms.podman(one)
    assert "CUDA_VISIBLE_DEVICES=1" in forms.shell(one)


# -- the verb -------------------------------------------------------------------------------------
def allocate(ctl: Ctl, *options: str) -> dict[str, Any]:
    return dict(ctl.json("allocate", "-r", NPU, "--confirm", *options))


def test_the_verb_prints_each_form(ctl: Ctl, tmp_path: Path) -> None:
    granted = allocate(ctl, "-n", "2")
    lease = granted["lease"]
    manifest = Manifest.of(granted["manifest"])
    for name, make in (("env", forms.shell), ("podman", forms.podman), ("systemd", forms.systemd)):
        lines = ctl("manifest", lease, "--format", name).out.splitlines()
        assert lines == make(manifest)
        shown = ctl("manifest", lease, "--format", name, "--json").json
        assert shown == (granted["manifest"] if name == "env" else lines)
    printed = ctl("manifest", lease, "--format", "cdi").json
    assert printed == forms.cdi(manifest, ctl.env[names.BUS_ADDRESS_VARIABLE])
    assert ctl("manifest", lease, "--format", "cdi", "--json").json == printed
    assert ctl("manifest", lease[:8], "--format", "json").json == granted["manifest"]
    variables = in_shell(ctl("manifest", lease).out.splitlines(), tmp_path)
    assert variables["HETERO_LEASE_ID"] == lease
    assert variables["HETERO_DEVICES"].split(",") == granted["manifest"]["devices"]
    ctl("release", lease)


def test_a_manifest_is_its_owners(ctl: Ctl, agent: AgentProcess) -> None:
    lease = allocate(ctl)["lease"]
    refused = Ctl(agent.bus.address, uid=OUTSIDER)("manifest", lease, code=77)
    assert "only that uid or root may do this" in refused.err
    assert ctl("manifest", "0000000000", code=1).out == ""
    ctl("release", lease)
