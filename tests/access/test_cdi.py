"""CDI specifications: valid by the public schema and by the rules of the version that they name, word
for word where it matters, and written so that no reader sees half a file.

data/cdi/ has the schema of github.com/cncf-tags/container-device-interface as published (schema/, at
278a1a2e7eb8, of 1.1.0; Apache-2.0, the CDI authors).
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hetero_agent import cdispec
from hetero_agent.access import cdi
from hetero_agent.access.grant import Grant
from hetero_agent.access.hands import Hands

DATA = Path(__file__).parent / "data" / "cdi"
GOLDEN = Path(__file__).parents[1] / "discovery" / "golden"

HOOK = cdi.Hook("/usr/bin/heteroctl", ("heteroctl", "oci-hook"), ("DBUS_SYSTEM_BUS_ADDRESS=unix:path=/x",))
LEASE = "ab" * 16

# specs-go/config.go: every field that there is, and in which version it came if not in the first
FIELDS: dict[str, dict[str, str]] = {
    "": dict.fromkeys(("cdiVersion", "kind", "devices", "containerEdits"), "0.3.0") | {"annotations": "0.6.0"},
    "devices": {"name": "0.3.0", "containerEdits": "0.3.0", "annotations": "0.6.0"},
    "containerEdits": dict.fromkeys(("env", "deviceNodes", "hooks", "mounts"), "0.3.0")
    | {"intelRdt": "0.7.0", "additionalGids": "0.7.0", "netDevices": "1.1.0"},
    "deviceNodes": dict.fromkeys(
        ("path", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"), "0.3.0"
    )
    | {"hostPath": "0.5.0"},
    "mounts": dict.fromkeys(("hostPath", "containerPath", "options"), "0.3.0") | {"type": "0.4.0"},
    "hooks": dict.fromkeys(("hookName", "path", "args", "env", "timeout"), "0.3.0"),
}


def required(spec: Mapping[str, Any]) -> str:
    """The lowest version for SPEC, as specs-go/version.go finds it.  Unknown fields are errors."""
    versions = {"0.3.0"}

    def look(where: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                assert key in FIELDS[where], f"{where}: there is no field {key}"
                versions.add(FIELDS[where][key])
                look(key, inner)
        elif isinstance(value, list):
            for inner in value:
                look(where, inner)

    look("", spec)
    if any(device["name"][0].isdigit() for device in spec["devices"]):
        versions.add("0.5.0")
    if "." in spec["kind"].partition("/")[2]:
        versions.add("0.6.0")
    return max(versions)


def validate(spec: Mapping[str, Any]) -> None:
    """Fail unless a runtime takes SPEC."""
    schema = json.loads((DATA / "schema.json").read_text())
    store = {"defs.json": json.loads((DATA / "defs.json").read_text())}
    jsonschema.Draft7Validator(schema, resolver=jsonschema.RefResolver("", schema, store)).validate(spec)
    assert spec["cdiVersion"] == required(spec)
    # pkg/cdi/container-edits.go, what the schema leaves open
    for device in spec["devices"]:
        edits = device["containerEdits"]
        assert edits, "edits of a device may not be empty"
        assert all("=" in one[1:] for one in edits["env"])
        assert all(hook["timeout"] > 0 and hook["path"].startswith("/") for hook in edits["hooks"])
        assert all(set(node["permissions"]) <= set("rwm") for node in edits.get("deviceNodes", ()))
        places = [one["containerPath"] for one in edits.get("mounts", ())]
        places += [one["path"] for one in edits.get("deviceNodes", ())]
        assert len(places) == len(set(places)), "one place, several things"


def manifest(lease: str = LEASE, **more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "lease": lease,
        "resource": "example.com/npu",
        "devices": ["a:0", "b"],
        "nodes": [
            ["a:0", "/dev/npu0", "own", "char", 4, 60],
            ["a:0", "/dev/npuctl", "control", "char", 4, 61],
            ["b", "/dev/npu1", "own", "block", 7, 1],
            ["b", "/dev/npuctl", "control", "char", 4, 61],
            ["b", "/run/vendor/b", "own", "file", 0, 0],
        ],
        "mounts": [["/opt/a,b", "/opt/a", "ro,nosuid"], ["/run/npu/socket", "/run/npu/socket", "rw"]],
        "env": {"NPUS": "3,4", "HARD": "a 'b' \"c\"=\n", "HETERO_LEASE_ID": lease},
        "env-filtered": {"NPUS": "0,1"},
        "groups": [44],
        "confirm-by": 0,
        "confirm-by-boottime": 0,
        **more,
    }


def grant(lease: str = LEASE, **more: Any) -> Grant:
    return Grant(lease, 1000, manifest(lease, **more))


def test_word_for_word() -> None:
    assert cdi.spec(grant(), HOOK) == {
        "cdiVersion": "0.3.0",
        "kind": "heteroagent.org/lease",
        "devices": [
            {
                "name": LEASE,
                "containerEdits": {
                    "env": [
                        "AMD_VISIBLE_DEVICES=none",
                        "ASCEND_VISIBLE_DEVICES=void",
                        "HABANA_VISIBLE_DEVICES=void",
                        "HARD=a 'b' \"c\"=\n",
                        f"HETERO_LEASE_ID={LEASE}",
                        "HETERO_RESOURCE=example.com/npu",
                        "NPUS=0,1",
                        "NVIDIA_VISIBLE_DEVICES=void",
                    ],
                    "hooks": [
                        {
                            "hookName": "createRuntime",
                            "path": "/usr/bin/heteroctl",
                            "args": ["heteroctl", "oci-hook", LEASE],
                            "env": ["DBUS_SYSTEM_BUS_ADDRESS=unix:path=/x"],
                            "timeout": 30,
                        }
                    ],
                    "deviceNodes": [
                        {"path": "/dev/npu0", "permissions": "rw", "fileMode": 0o666},
                        {"path": "/dev/npuctl", "permissions": "rw", "fileMode": 0o666},
                        {"path": "/dev/npu1", "permissions": "rw", "fileMode": 0o666},
                    ],
                    "mounts": [
                        {
                            "hostPath": "/run/vendor/b",
                            "containerPath": "/run/vendor/b",
                            "options": ["rw", "nosuid", "nodev", "noexec", "bind"],
                        },
                        {
                            "hostPath": "/opt/a,b",
                            "containerPath": "/opt/a",
                            "options": ["ro", "nosuid", "bind"],
                        },
                        {
                            "hostPath": "/run/npu/socket",
                            "containerPath": "/run/npu/socket",
                            "options": ["rw", "bind"],
                        },
                    ],
                },
            }
        ],
    }


def golden() -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(GOLDEN.glob("*.json")):
        for number, one in enumerate(json.loads(path.read_text())["manifests"]):
            found[f"{path.stem}-{number}"] = one
    return found


@pytest.mark.parametrize("one", golden().values(), ids=golden())
def test_every_vendors_is_valid(one: dict[str, Any]) -> None:
    spec = cdi.spec(Grant(one["lease"], 1000, one), HOOK)
    validate(spec)
    edits = spec["devices"][0]["containerEdits"]
    assert {node["path"] for node in edits["deviceNodes"]} == {path for _, path, *_ in one["nodes"]}
    assert set(one["env-filtered"].items()) <= {tuple(pair.split("=", 1)) for pair in edits["env"]}


@pytest.mark.parametrize("lease", ["0123456789abcdef" * 2, "f" * 32])
def test_virtual_devices_and_all_that_is_awkward_are_valid(lease: str) -> None:
    validate(cdi.spec(grant(lease), HOOK))
    only_files = [["b", "/run/vendor/b", "own", "file", 0, 0]]
    bare = cdi.spec(grant(lease, nodes=only_files, mounts=[], env={}), HOOK)
    validate(bare)
    assert "deviceNodes" not in bare["devices"][0]["containerEdits"]
    # an id that begins with a digit needs a later version than others
    assert bare["cdiVersion"] == ("0.5.0" if lease[0] == "0" else "0.3.0")


def test_a_link_to_a_node_is_a_node_of_its_own() -> None:
    """Other paths in /dev, and links to nodes that the lease doesn't have, are bound as they are."""
    leads = {"/dev/by-path/0": "/dev/npu0", "/dev/by-path/9": "/dev/npu9", "/dev/hugepages": "/dev/hugepages"}
    mounts = [[host, host, "ro"] for host in [*leads, "/opt/npu"]]
    made = cdispec.spec("f" * 32, manifest("f" * 32, mounts=mounts), HOOK, leads.__getitem__)
    validate(made)
    assert made["cdiVersion"] == "0.5.0"
    edits = made["devices"][0]["containerEdits"]
    assert edits["deviceNodes"][3:] == [
        {"path": "/dev/by-path/0", "hostPath": "/dev/npu0", "permissions": "rw", "fileMode": 0o666}
    ]
    assert [one["hostPath"] for one in edits["mounts"][1:]] == ["/dev/by-path/9", "/dev/hugepages", "/opt/npu"]


def test_what_is_wrong_is_found() -> None:
    """The check can fail: a type that is none, a field of a later version, one that there is not."""
    good = cdi.spec(grant(), HOOK)
    for change in (
        lambda spec: spec["devices"][0].pop("name"),
        lambda spec: spec["devices"][0]["containerEdits"]["hooks"][0].update(timeout="10"),
        lambda spec: spec["devices"][0]["containerEdits"]["mounts"][0].update(type="bind"),
        lambda spec: spec["devices"][0]["containerEdits"]["deviceNodes"][0].update(mode=0o666),
        lambda spec: spec.update(cdiVersion="0.5.0"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises((jsonschema.ValidationError, AssertionError)):
            validate(bad)
    validate(good)


def test_a_lease_of_one_vendor_keeps_the_runtimes_of_the_others_still() -> None:
    nvidia = golden()["nvidia-0"]
    variables = cdi.spec(Grant(LEASE, 0, nvidia), HOOK)["devices"][0]["containerEdits"]["env"]
    assert "NVIDIA_VISIBLE_DEVICES=void" in variables
    assert "CUDA_VISIBLE_DEVICES=0" in variables
    ascend = golden()["ascend-1"]
    variables = cdi.spec(Grant(LEASE, 0, ascend), HOOK)["devices"][0]["containerEdits"]["env"]
    # the profile has a say of its own: Ascend's runtime adds what else its devices need
    assert "ASCEND_VISIBLE_DEVICES=5,10" in variables
    assert "NVIDIA_VISIBLE_DEVICES=void" in variables


def test_the_hook_of_a_checkout_and_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cdi.confirming("unix:path=/bus", "/usr/bin/python3")
    root = Path(cdispec.__file__).parents[1]
    assert here == (
        "/usr/bin/python3",
        ("/usr/bin/python3", "-P", "-m", "hetero_agent.cli.main", "oci-hook"),
        ("DBUS_SYSTEM_BUS_ADDRESS=unix:path=/bus", f"PYTHONPATH={root}"),
    )
    monkeypatch.setattr(cdispec, "__file__", "/usr/lib/python3/dist-packages/hetero_agent/cdispec.py")
    assert cdi.confirming("unix:path=/bus", "/usr/bin/python3") == (
        "/usr/bin/heteroctl",
        ("heteroctl", "oci-hook"),
        ("DBUS_SYSTEM_BUS_ADDRESS=unix:path=/bus",),
    )


# -- the file -----------------------------------------------------------------------------------------
def test_the_file(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "cdi"
    before = os.umask(0o077)
    try:
        path = cdi.write(directory, grant(), HOOK)
    finally:
        os.umask(before)
    assert path == directory / f"heteroagent.org-lease_{LEASE}.json"
    assert json.loads(path.read_text()) == cdi.spec(grant(), HOOK)
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(directory) == [path.name]

    # the same again: the very file; another content: another file
    first = path.stat()
    cdi.write(directory, grant(), HOOK)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    cdi.write(directory, grant(env={"NEW": "1"}), HOOK)
    assert "NEW=1" in path.read_text()
    # as is one that somebody made unreadable or broke
    path.chmod(0o600)
    cdi.write(directory, grant(env={"NEW": "1"}), HOOK)
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_bytes(b"\xff\x00")
    cdi.write(directory, grant(), HOOK)
    assert json.loads(path.read_text()) == cdi.spec(grant(), HOOK)

    cdi.remove(directory, LEASE)
    assert os.listdir(directory) == []
    cdi.remove(directory, LEASE)


def test_the_directory_is_one_that_all_can_read(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        cdi.write(tmp_path / "cdi", grant(), HOOK)
    finally:
        os.umask(before)
    assert (tmp_path / "cdi").stat().st_mode & 0o777 == 0o755


def test_what_is_there_to_be_removed(tmp_path: Path) -> None:
    other = "cd" * 16
    cdi.write(tmp_path, grant(), HOOK)
    # what a crash between two steps leaves, and what others have there
    left = tmp_path / f"heteroagent.org-lease_{other}.json.new"
    left.write_text("{")
    strangers = [
        tmp_path / "nvidia.com-gpu.json",
        tmp_path / "heteroagent.org-lease_x.json",
        tmp_path / f"other-lease_{other}.json",
    ]
    for one in strangers:
        one.write_text("{}")
    assert cdi.listed(tmp_path) == {LEASE, other}
    cdi.remove(tmp_path, other)
    cdi.remove(tmp_path, LEASE)
    assert cdi.listed(tmp_path) == set()
    assert sorted(tmp_path.iterdir()) == sorted(strangers)
    assert cdi.listed(tmp_path / "missing") == set()


def test_what_a_crash_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / f"{cdi.file_name(LEASE)}.new").write_text("{")
    path = cdi.write(tmp_path, grant(), HOOK)
    assert os.listdir(tmp_path) == [path.name]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cdi.write(tmp_path, grant(), HOOK)
    old = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(OSError, match="No space"):
        cdi.write(tmp_path, grant(env={"NEW": "1"}), HOOK)
    assert path.read_text() == old


def test_no_reader_sees_half_a_file(tmp_path: Path) -> None:
    path = cdi.write(tmp_path, grant(env={"N": "0" * 20_000}), HOOK)
    done = threading.Event()
    seen: list[str] = []

    def read() -> None:
        while not done.is_set():
            json.loads(path.read_text())
            seen.extend(name for name in os.listdir(tmp_path) if name != path.name and name.endswith(".json"))

    reader = threading.Thread(target=read)
    failures: list[object] = []
    monkey, threading.excepthook = threading.excepthook, lambda args: failures.append(args.exc_value)
    try:
        reader.start()
        for number in range(100):
            cdi.write(tmp_path, grant(env={"N": f"{number}" * 20_000}), HOOK)
    finally:
        done.set()
        reader.join()
        threading.excepthook = monkey
    assert failures == []
    assert seen == []


def test_a_specification_that_no_record_knows_is_swept(tmp_path: Path) -> None:
    directory, other, stray = tmp_path / "cdi", "cd" * 16, "ef" * 16
    hands = Hands(tmp_path / "records", directory, False, HOOK)
    for one in (LEASE, other):
        hands.prepare(grant(one))
    cdi.write(directory, grant(stray), HOOK)
    (directory / "nvidia.com-gpu.json").write_text("{}")
    hands.sweep({LEASE})
    assert sorted(os.listdir(directory)) == [cdi.file_name(LEASE), "nvidia.com-gpu.json"]
