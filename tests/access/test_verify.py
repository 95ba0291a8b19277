"""What a grant may name: all that root's profiles list, and nothing else, whatever the agent writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_agent import config
from hetero_agent.access import verify
from hetero_agent.access.manifest import AccessError
from hetero_agent.access_helper import rules_of
from hetero_agent.discovery import profiles
from tests.access.granting import grant, row
from tests.support.console import CONSOLE, PROFILE

_OTHER_TTY = Path("/dev/tty1")

_MORE = """
schema = 1
resource = "example.com/npu"
groups = ["games"]

[[match]]
vendors = ["abcd"]

[device]
facts = ["ascend"]

[[nodes]]
path = "/dev/npu{davinci-id}"
role = "own"

[[nodes]]
path = "/dev/loop-control"
role = "control"
major-of = ["misc"]

[[nodes]]
path = "/dev/null"
role = "control"

[[nodes]]
subsystem = "misc"
pattern = "*"
role = "own"

[env]
NPU_VISIBLE = "{index}"

[[mounts]]
host = "/usr/lib/npu-{serial}/lib*.so.*"

[[mounts]]
host = "/usr/lib/npu"
container = "/opt/npu"
options = "ro,nosuid"
"""


def rules(settings: config.Config | None = None, **texts: str) -> verify.Rules:
    """The rules of the package's own profiles and two more."""
    more = {"console": PROFILE, "npu": _MORE, **texts}
    own = profiles.load(None).profiles
    parsed = [found for name, text in more.items() if (found := profiles.parse(text, f"{name}.toml"))]
    return rules_of(profiles.ProfileSet((*own, *parsed)), settings or config.Config())


RULES = rules()


def refused(*paths: Path, by: verify.Rules = RULES, **more: Any) -> str:
    with pytest.raises(AccessError) as caught:
        verify.check(grant(*paths, **more), by)
    return str(caught.value)


def test_a_device_of_a_profile() -> None:
    given = grant(CONSOLE, Path("/dev/loop-control"))
    assert verify.check(given, RULES) == given


def test_a_node_of_no_profile() -> None:
    assert "/dev/tty1 belongs to no device" in refused(CONSOLE, _OTHER_TTY)
    # the same without the profile that is the console's own
    assert str(CONSOLE) in refused(CONSOLE, by=rules_of(profiles.load(None), config.Config()))


@pytest.mark.parametrize(
    "path", ["/dev/mem", "/dev/kmsg", "/dev/null", "/dev/zero", "/dev/full", "/dev/random"]
)
def test_memory_is_nobodys_even_if_a_profile_names_it(path: str) -> None:
    if not Path(path).exists():
        # numbers alone are as good: the path is missing then, and that is said
        assert path in refused(nodes=[["npu-0", path, "own", "char", 1, 1]])
        return
    assert path in refused(Path(path))


@pytest.mark.parametrize("path", ["/dev/fuse", "/dev/net/tun", "/dev/uinput", "/dev/kvm"])
def test_misc_devices_that_hang_on_no_card(path: str) -> None:
    """Profiles take all misc nodes of their cards; these are no card's."""
    if not Path(path).exists():
        assert path in refused(nodes=[["npu-0", path, "own", "char", 10, 229]])
        return
    assert path in refused(Path(path))


def test_terminals_and_ptmx() -> None:
    for path in ("/dev/tty", "/dev/console", "/dev/ptmx"):
        if Path(path).exists():
            assert path in refused(Path(path))


@pytest.fixture
def device_file(tmp_path: Path) -> Iterator[Path]:
    """A device file in a directory that is root's all the way down."""
    directory = Path(f"/run/hetero-agent-test-{os.getpid()}")
    directory.mkdir(mode=0o755)
    path = directory / "npu0"
    path.touch()
    yield path
    path.unlink(missing_ok=True)
    directory.rmdir()


def of_a_provider(directory: Path, *subsystems: str) -> verify.Rules:
    table = config.ProviderTable(directory=str(directory), subsystems=subsystems)
    return rules(config.Config(providers={"npu": table}))


def test_a_file_of_a_provider(device_file: Path) -> None:
    by = of_a_provider(device_file.parent)
    given = grant(device_file)
    assert verify.check(given, by) == given
    assert "no provider's directory" in refused(device_file)


def test_a_file_that_its_provider_could_exchange_for_a_link_is_left_out(device_file: Path) -> None:
    by = of_a_provider(device_file.parent)
    os.chown(device_file.parent, 1000, -1)
    assert verify.check(grant(device_file), by).nodes == ()
    os.chown(device_file.parent, 0, -1)
    device_file.parent.chmod(0o775)
    assert verify.check(grant(device_file), by).nodes == ()


def test_the_group_of_a_file_is_given_if_it_is_roots_to_choose(device_file: Path) -> None:
    by = of_a_provider(device_file.parent)
    os.chown(device_file, 0, 12345)
    given = grant(device_file, groups=[12345])
    assert verify.check(given, by) == given
    os.chown(device_file, 1000, 12345)
    assert verify.check(given, by).manifest["groups"] == []
    os.chown(device_file, 0, 12345)
    os.chown(device_file.parent, 1000, -1)
    assert verify.check(given, by).manifest["groups"] == []
    assert "group 42" in refused(device_file, by=by, groups=[42])


def test_files_that_are_none(device_file: Path) -> None:
    by = of_a_provider(device_file.parent)
    nodes = grant(device_file).manifest["nodes"]
    second = device_file.with_name("second")
    second.hardlink_to(device_file)
    assert "one name" in refused(nodes=nodes, by=by)
    second.unlink()
    device_file.unlink()
    device_file.symlink_to("/etc/shadow")
    assert "no regular file" in refused(nodes=nodes, by=by)
    device_file.unlink()
    assert "No such file" in refused(nodes=nodes, by=by)
    for path in (f"{device_file.parent}/../passwd", f"{device_file.parent}//npu0", f"{device_file.parent}"):
        refused(nodes=[["npu-0", path, "own", "file", 0, 0]], by=by)


def test_a_providers_node() -> None:
    """By subsystem; but never terminals, even if the configuration has them."""
    assert verify.check(grant(Path("/dev/loop-control")), rules_of(profiles.ProfileSet(), _providing("misc")))
    assert "/dev/tty1" in refused(_OTHER_TTY, by=rules_of(profiles.ProfileSet(), _providing("tty")))
    assert "/dev/null" in refused(Path("/dev/null"), by=rules_of(profiles.ProfileSet(), _providing("mem")))


def _providing(subsystem: str) -> config.Config:
    return config.Config(providers={"npu": config.ProviderTable(subsystems=(subsystem,))})


def test_disks(tmp_path: Path) -> None:
    node = tmp_path / "disk"
    os.mknod(node, stat.S_IFBLK | 0o600, os.makedev(7, 250))
    assert "no character node" in refused(node)
    loop = Path("/dev/loop0")
    if loop.exists():
        assert "no character node" in refused(loop, by=rules_of(profiles.ProfileSet(), _providing("block")))


def test_copies_of_a_node_elsewhere(tmp_path: Path) -> None:
    number = CONSOLE.stat().st_rdev
    copy = tmp_path / "copy"
    os.mknod(copy, stat.S_IFCHR | 0o600, number)
    assert "not in /dev" in refused(copy)
    for directory in ("/dev/shm", "/dev/mqueue"):
        if not Path(directory).is_dir():
            continue
        other = Path(directory) / f"hetero-agent-test-{os.getpid()}"
        os.mknod(other, stat.S_IFCHR | 0o600, number)
        try:
            assert "another file system" in refused(other)
        finally:
            other.unlink()


def test_links_in_dev_and_other_numbers() -> None:
    device, path, role, kind, major, minor = row(CONSOLE)
    assert "not 4:250" in refused(nodes=[[device, path, role, kind, major, 250]])
    assert refused(nodes=[[device, "/dev/fd/0", role, kind, major, minor]])
    assert refused(nodes=[[device, "/dev/stdin", role, kind, major, minor]])


@pytest.mark.parametrize(
    "path",
    ["/dev/../dev/null", "//dev/null", "/dev/./null", "dev/null", "", "/", "/dev/", "/dev/a\nb", None, 5],
)
def test_paths_that_are_none(path: Any) -> None:
    refused(nodes=[["npu-0", path, "own", "char", 1, 3]])


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {},
        "x",
        [None],
        [[]],
        [["npu-0", "/dev/null", "own", "char", 1]],
        [["NPU", "/dev/null", "own", "char", 1, 3]],
        [["npu-0", "/dev/null", "none", "char", 1, 3]],
        [["npu-0", "/dev/null", ["own"], "char", 1, 3]],
        [["npu-0", "/dev/null", "own", "fifo", 1, 3]],
        [["npu-0", "/dev/null", "own", None, 1, 3]],
        [["npu-0", "/dev/null", "own", "char", -1, 3]],
        [["npu-0", "/dev/null", "own", "char", True, 3]],
        [["npu-0", "/dev/null", "own", "char", 1.0, 3]],
        [["npu-0", "/dev/null", "own", "char", 2**64, 3]],
        [["npu-0", "/dev/null", "own", "char", 2**31, 3]],
        [["npu-0", "/dev/null", "own", "char", 1, 2**31]],
        [["npu-0", "/dev/null", "own", "char", 1, 3]] * 10_000,
    ],
)
def test_rows_that_are_none(rows: Any) -> None:
    refused(nodes=rows)


def test_mounts_of_profiles() -> None:
    mounts = [
        ["/usr/lib/npu-X1/libnpu.so.1", "/usr/lib/npu-X1/libnpu.so.1", "ro"],
        ["/usr/lib/npu", "/opt/npu", "ro,nosuid"],
    ]
    given = grant(CONSOLE, mounts=mounts)
    assert verify.check(given, RULES) == given


@pytest.mark.parametrize(
    "mount",
    [
        ["/etc/shadow", "/etc/shadow", "ro"],
        ["/", "/host", "ro"],
        ["/usr/lib/npu", "/opt/npu", "rw,nosuid"],
        ["/usr/lib/npu", "/opt/npu", "ro,nosuid,rbind"],
        ["/usr/lib/npu", "/usr/bin", "ro,nosuid"],
        ["/usr/lib/npu-/../../../etc/lib.so.1", "/usr/lib/npu-/../../../etc/lib.so.1", "ro"],
        ["/usr/lib/npu-../libnpu.so.1/../../../../etc", "/etc", "ro"],
        ["/usr/lib/npu-a/b/lib.so.1", "/usr/lib/npu-a/b/lib.so.1", "ro"],
        ["/usr/lib/npu-X1/libnpu.so.1", "/bin/sh", "ro"],
        ["/usr/lib/npu/", "/opt/npu", "ro,nosuid"],
        ["/usr/lib/npu\n", "/opt/npu", "ro,nosuid"],
        ["/usr/lib/npu", "/opt/npu"],
        ["/usr/lib/npu", "/opt/npu", None],
        "/usr/lib/npu",
    ],
)
def test_mounts_of_nobody(mount: Any) -> None:
    refused(CONSOLE, mounts=[mount])


def test_variables() -> None:
    given = grant(CONSOLE, env={"NPU_VISIBLE": "0", "HETERO_DEVICES": "npu-0", "VENDORS_OWN": "1"})
    assert verify.check(given, RULES) == given


@pytest.mark.parametrize(
    "env",
    [
        {"LD_PRELOAD": "/tmp/x.so"},
        {"HETERO_ELSE": "x"},
        {"PYTHONPATH": "/tmp"},
        {"PATH": "/tmp"},
        {"A=B": "x"},
        {"": "x"},
        {"NPU_VISIBLE": "0\nLD_PRELOAD=/tmp/x.so"},
        {"NPU_VISIBLE": 5},
        {"NPU_VISIBLE": None},
        [],
        None,
    ],
)
@pytest.mark.parametrize("key", ["env", "env-filtered"])
def test_variables_of_nobody(env: Any, key: str) -> None:
    refused(CONSOLE, **{key: env})


def test_groups_are_the_profiles_or_the_nodes_own() -> None:
    games = 60
    own = CONSOLE.stat().st_gid
    given = grant(CONSOLE, groups=sorted({own, games}))
    assert verify.check(given, RULES) == given
    # shadow, disk; 0 is the console's own on some hosts
    for group in {42, 6} - {own}:
        assert f"group {group}" in refused(CONSOLE, groups=[group])
    refused(CONSOLE, groups=[-1])
    refused(CONSOLE, groups=[True])
    refused(CONSOLE, groups=["games"])


@pytest.mark.parametrize(
    "change",
    [
        {"hooks": [{"hookName": "createRuntime", "path": "/bin/sh"}]},
        {"version": 2},
        {"resource": "x"},
        {"resource": "example.com/npu\n"},
        {"devices": ["../x"]},
        {"devices": "npu-0"},
        {"confirm-by": -1},
        {"confirm-by-boottime": "1"},
        {"limits": {"../x": 1}},
        {"limits": []},
        {"netdevs": [["npu-0", "../../etc"]]},
    ],
)
def test_other_parts_of_a_manifest(change: dict[str, Any]) -> None:
    refused(CONSOLE, **change)


def test_another_leases_manifest() -> None:
    other = grant(CONSOLE, lease="b" * 32)
    with pytest.raises(AccessError, match="another version or lease"):
        verify.check(type(other)("a" * 32, other.uid, other.manifest), RULES)


def test_a_part_that_is_missing() -> None:
    given = grant(CONSOLE)
    for key in given.manifest:
        manifest = {name: value for name, value in given.manifest.items() if name != key}
        with pytest.raises(AccessError, match="other keys"):
            verify.check(type(given)(given.lease, given.uid, manifest), RULES)
