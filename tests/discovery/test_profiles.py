"""The profile files: what is refused and how it is said, and whose file wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_agent import names
from hetero_agent.core.model import Joining, Role
from hetero_agent.discovery import profiles
from hetero_agent.discovery.profiles import Identity
from hetero_agent.discovery.tables import ProfileError

GOOD = """\
schema = 1
resource = "example.org/npu"
groups = ["render"]

[[match]]
vendors = ["1e52"]
classes = ["1200"]

[device]
vendor = "Example"
drivers = ["npu"]

[[nodes]]
subsystem = "accel"
pattern = "accel*"
role = "own"
required = true

[attributes]
memory-total = { read = "memory/total", number = true }

[env]
NPU_VISIBLE = "{index}"

[[mounts]]
host = "/opt/npu"
"""


def test_a_good_profile_is_read_whole() -> None:
    profile = profiles.parse(GOOD, "npu.toml")
    assert profile is not None
    assert (profile.name, profile.resource, profile.priority) == ("npu", "example.org/npu", 50)
    assert profile.matches == (profiles.Match(vendors=("1e52",), classes=("1200",)),)
    assert profile.nodes == (profiles.NodeRule(Role.OWN, "accel", "accel*", required=True),)
    assert profile.attributes == {"memory-total": profiles.AttributeRule(read="memory/total", number=True)}
    assert profile.env == {"NPU_VISIBLE": "{index}"}
    assert profile.mounts == (profiles.Mount("/opt/npu", "/opt/npu", "ro"),)
    assert (profile.vendor, profile.drivers, profile.groups) == ("Example", ("npu",), ("render",))


def test_variables_and_mounts_say_more_in_tables() -> None:
    text = GOOD.replace('"{index}"', '{ value = "{index}", prefix = "=", renumbered = true }')
    text += 'required = true\n[[mounts]]\nhost = "/lib/npu-{firmware-version}/*"\n'
    text = text.replace("[env]", 'firmware-version = { read = "fw" }\n\n[env]\nORDER = "PCI"')
    profile = profiles.parse(text, "npu.toml")
    assert profile is not None
    assert profile.env == {"ORDER": "PCI", "NPU_VISIBLE": "{index}"}
    assert profile.joining == {"NPU_VISIBLE": Joining("=", True)}
    assert profile.mounts == (
        profiles.Mount("/opt/npu", "/opt/npu", "ro", required=True),
        profiles.Mount("/lib/npu-{firmware-version}/*", "", "ro"),
    )


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("schema = 1", "schema = 2", "npu.toml: schema: expected an integer from 1 to 1, got 2"),
        (
            "schema = 1",
            "schema = 1\ncolour = 1",
            "npu.toml: has no key colour; the keys are attributes, device,",
        ),
        ("schema = 1", "schema =", "npu.toml: not TOML: Invalid value"),
        ("schema = 1", f"schema = {'9' * 5000}", "npu.toml: not TOML: Exceeds the limit"),
        ("schema = 1", f"schema = {'[' * 5000}", "npu.toml: not TOML: maximum recursion depth"),
        (
            '"example.org/npu"',
            '"npu"',
            "npu.toml: resource: expected vendor/class, as in nvidia.com/gpu, got npu",
        ),
        ('resource = "example.org/npu"', "", "npu.toml: resource: missing; expected vendor/class"),
        (
            'vendors = ["1e52"]',
            'vendors = ["1E52"]',
            "[[match]] number 1 vendors: expected four hex digits, lower",
        ),
        (
            'vendors = ["1e52"]',
            'vendors = "1e52"',
            "[[match]] number 1 vendors: expected a list: four hex digits",
        ),
        (
            'vendors = ["1e52"]',
            'vendor = ["1e52"]',
            "[[match]] number 1 has no key vendor; the keys are classes,",
        ),
        (
            'vendors = ["1e52"]',
            'subsystem = "tty"',
            "number 1 names: missing; a match in subsystem tty needs it",
        ),
        (
            'vendors = ["1e52"]',
            "exclude-functions = [8]",
            "exclude-functions: expected an integer from 0 to 7, got 8",
        ),
        (
            'classes = ["1200"]',
            'classes = ["12000"]\nintegrated = 1',
            "integrated: expected true or false, got 1",
        ),
        (
            'drivers = ["npu"]',
            "drivers = [1]",
            "npu.toml: [device] drivers: expected names of kernel drivers, got 1",
        ),
        (
            'drivers = ["npu"]',
            'facts = ["npu"]',
            "[device] facts: expected nvidia-proc or nvidia-mig or ascend or kfd or rdma, got npu",
        ),
        (
            '["render"]',
            '["render"]\n[limits]\nmemlock = "much"',
            '[limits] memlock: expected "unlimited", or a',
        ),
        ('["render"]', '["render"]\n[limits]\ncore = "1"', "[limits] has no key core; the keys are memlock"),
        ('role = "own"', 'role = "mine"', "[[nodes]] number 1 role: expected own, parent or control, got mine"),
        ('role = "own"', 'role = "control"', '[[nodes]] needs at least one with role = "own"'),
        (
            'pattern = "accel*"',
            'path = "/dev/x"',
            "[[nodes]] number 1 has either subsystem and pattern, or path",
        ),
        ('pattern = "accel*"', "", "[[nodes]] number 1 has either subsystem and pattern, or path"),
        (
            'subsystem = "accel"\npattern = "accel*"',
            'path = "/etc/x"',
            "path: expected a path below /dev, got /etc/x",
        ),
        ('subsystem = "accel"\npattern = "accel*"', 'path = "/dev/../x"', "path: expected a path below /dev"),
        (
            'subsystem = "accel"\npattern = "accel*"',
            'path = "/dev/npu{number}"',
            "path: {number} is not given by the facts of [device] (there are none)",
        ),
        (
            '"memory/total"',
            '"../other"',
            "[attributes.memory-total] read: expected a path below the device's directory",
        ),
        ('"memory/total"', '"/etc/shadow"', "[attributes.memory-total] read: expected a path below"),
        ('read = "memory/total", number', "number", "[attributes.memory-total] has either read or name-of"),
        ("memory-total =", "Memory =", "[attributes] Memory: a name is lower-case letters, digits and -"),
        (
            '"{index}"',
            '"{place}"',
            "npu.toml: [env] NPU_VISIBLE: {place} is unknown; there are boot-vga, class, cpus,",
        ),
        ('"{index}"', '"{index"', "[env] NPU_VISIBLE: braces stand only around a name, as in {index}"),
        ('"{index}"', '"a\\u0007b"', "[env] NPU_VISIBLE: expected up to 256 printable characters, got a\\x07b"),
        ("NPU_VISIBLE =", '"NPU=X" =', "[env] NPU=X: not a name of an environment variable"),
        ('"/opt/npu"', '"opt/npu"', "[[mounts]] number 1 host: expected an absolute path, got opt/npu"),
        ('"/opt/npu"', '"/opt/../etc"', "[[mounts]] number 1 host: expected an absolute path"),
        ('"/opt/npu"', '"/opt/{place}"', "[[mounts]] number 1 host: {place} is unknown"),
        (
            '"/opt/npu"',
            '"/opt/*"\ncontainer = "/x"',
            "[[mounts]] number 1 container: none where host has a *",
        ),
        ('"{index}"', "{ prefix = '=' }", "[env.NPU_VISIBLE] value: missing; expected up to 256 printable"),
        ('"{index}"', "{ value = 'a', sep = ';' }", "[env.NPU_VISIBLE] has no key sep"),
        (
            '"/opt/npu"',
            '"/opt"\noptions = "rw bind"',
            "[[mounts]] number 1 options: expected mount options, as in ro",
        ),
        ("[env]", "[shared]\nslots = 1\n[env]", "[shared] slots: expected an integer from 2 to 64, got 1"),
        ("[env]", "[shared]\n[env]", "[shared] slots: missing"),
        ("[env]", '[parts]\nresource = "a.org/b"\n[env]', "[parts] has either subsystem and pattern, or facts"),
        (
            "[env]",
            '[parts]\nresource = "a.org/b"\nfacts = "nvidia-mig"\n[env]',
            "[parts] facts: nvidia-mig is not among the facts of [device]",
        ),
        ('drivers = ["npu"]', 'index-by = "colour"', "[device] index-by: expected the name of an attribute"),
        ('["render"]', '["a b"]', "npu.toml: groups: expected names of groups, got a b"),
    ],
)
def test_what_is_wrong_is_named_with_what_fits(old: str, new: str, wrong: str) -> None:
    assert old in GOOD
    with pytest.raises(ProfileError) as caught:
        profiles.parse(GOOD.replace(old, new), "npu.toml")
    assert wrong in str(caught.value)
    assert str(caught.value).startswith("npu.toml: ")


def test_missing_tables_are_named() -> None:
    head = 'schema = 1\nresource = "a.org/b"\n'
    with pytest.raises(ProfileError, match=r"\[\[match\]\] is missing"):
        profiles.parse(head, "x.toml")
    with pytest.raises(ProfileError, match="needs one of vendors, classes, drivers or require"):
        profiles.parse(head + "[[match]]\n", "x.toml")
    with pytest.raises(ProfileError, match="the file's name must be lower-case"):
        profiles.parse(GOOD, "../x.toml")


def test_shipped_profiles_are_good_and_tried_in_order_of_priority() -> None:
    found = profiles.load(None)
    assert found.problems == ()
    assert [profile.name for profile in found.profiles] == [
        "intel-integrated", "amd", "amd-npu", "ascend", "dfl", "habana", "intel", "intel-npu", "nvidia",
        "rdma", "xilinx", "generic",
    ]  # fmt: skip
    assert all(names.RESOURCE.fullmatch(profile.resource) for profile in found.profiles)


def test_a_file_of_the_same_name_wins_unless_it_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "generic.toml").write_text(GOOD)
    (tmp_path / "extra.toml").write_text(GOOD.replace("schema = 1", "schema = 1\npriority = 90"))
    (tmp_path / "nvidia.toml").write_text("resource = 1\n")
    (tmp_path / "off.toml").write_text("nonsense")
    (tmp_path / "rdma.toml").write_text(GOOD.replace("schema = 1", "schema = 1\nenabled = false"))
    (tmp_path / "large.toml").write_bytes(b"#" * (64 * 1024 + 1))
    (tmp_path / "bytes.toml").write_bytes(b"# \xff\n")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "README").write_text("not a profile")
    found = profiles.load(tmp_path)
    order = [profile.name for profile in found.profiles]
    assert order[:3] == ["extra", "intel-integrated", "amd"]
    # the one that took its place has the default priority, and the one switched off is gone
    assert order.index("generic") < order.index("habana")
    assert "rdma" not in order
    assert found.named("generic").resource == "example.org/npu"
    assert found.named("nvidia").resource == "nvidia.com/gpu"
    prefix = f"{tmp_path}/"
    assert all(problem.startswith(prefix) for problem in found.problems)
    endings = {one.removeprefix(prefix).split(":")[0]: one.rsplit("; ", 1)[1] for one in found.problems}
    assert endings == {
        "bytes.toml": "it is left out",
        "folder.toml": "it is left out",
        "large.toml": "it is left out",
        "nvidia.toml": "the shipped profile stays in force",
        "off.toml": "it is left out",
    }
    assert f"{tmp_path}/large.toml: larger than 65536 bytes; it is left out" in found.problems


def test_no_directory_is_no_problem(tmp_path: Path) -> None:
    assert profiles.load(tmp_path / "none").problems == ()


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        (Identity("pci", "0000:01:00.0", "10de", "2330", "030200"), "nvidia"),
        (Identity("pci", "0000:01:00.0", "10de", "1eb8", "030000"), "nvidia"),
        (Identity("pci", "0000:01:00.1", "10de", "10f8", "040300"), ""),
        (Identity("pci", "0000:01:00.0", "1002", "740f", "038000"), "amd"),
        (Identity("pci", "0000:01:00.0", "1002", "74a1", "120000"), "amd"),
        (Identity("pci", "0000:01:00.0", "1002", "164e", "030000"), ""),
        (Identity("pci", "0000:01:00.0", "1da3", "1020", "120000"), "habana"),
        (Identity("pci", "0000:01:00.0", "1e52", "401e", "120000"), "generic"),
        (Identity("pci", "0000:03:00.0", "8086", "56c0", "038000"), "intel"),
        (Identity("pci", "0000:00:02.0", "8086", "7d55", "030000"), "intel-integrated"),
        (Identity("pci", "0000:00:0b.0", "8086", "7d1d", "120000"), "intel-npu"),
        (Identity("pci", "0000:c5:00.1", "1022", "1502", "118000", driver="amdxdna"), "amd-npu"),
        (Identity("pci", "0000:c5:00.1", "1022", "1502", "118000"), ""),
        (Identity("pci", "0000:c1:00.0", "19e5", "d802", "120000"), "ascend"),
        (Identity("pci", "0000:01:00.1", "10ee", "5001", "120000", driver="xocl"), "xilinx"),
        (Identity("pci", "0000:01:00.0", "10ee", "5000", "120000", driver="xclmgmt"), "generic"),
        (Identity("pci", "0000:01:00.0", "8086", "0b30", "120000", driver="dfl-pci"), "dfl"),
        (Identity("pci", "0000:01:00.0", "15b3", "1021", "020700"), "rdma"),
        (Identity("pci", "0000:01:00.0", "15b3", "101d", "020000"), ""),
        (Identity("pci", "0000:01:00.0", "15b3", "101d", "020000", entries=frozenset(["infiniband"])), "rdma"),
        (Identity("pci", "0000:01:00.0", "1a03", "2000", "030000"), ""),
        (Identity("pci", "0000:01:00.0", "1af4", "1050", "038000"), ""),
        (Identity("tty", "tty60"), ""),
    ],
)
def test_what_counts_as_which_device(identity: Identity, name: str) -> None:
    found = profiles.load(None).choose(identity)
    assert (found.name if found else "") == name


def test_each_key_of_match_decides() -> None:
    def fits(extra: str, **named: object) -> bool:
        text = GOOD.replace('classes = ["1200"]', extra)
        profile = profiles.parse(text, "npu.toml")
        assert profile is not None
        base = {"vendor": "1e52", "device": "0001", "class_code": "120000", "driver": "npu", "function": 0}
        identity = Identity("pci", "0000:01:00.0", **{**base, **named})  # type: ignore[arg-type]
        return profiles.ProfileSet((profile,)).choose(identity) is profile

    assert fits("")
    assert not fits("", vendor="1e53")
    assert fits('devices = ["0001"]')
    assert not fits('devices = ["0002"]')
    assert fits('drivers = ["npu"]')
    assert not fits('drivers = ["npu"]', driver="")
    assert fits('names = ["0000:01:*"]')
    assert not fits('names = ["0000:02:*"]')
    assert not fits('require = ["infiniband"]')
    assert fits('require = ["infiniband"]', entries=frozenset(["infiniband", "net"]))
    assert not fits('exclude-vendors = ["1e52"]')
    assert not fits('exclude-devices = ["0001"]')
    assert not fits("exclude-functions = [1, 2]", function=2)
    assert fits("exclude-functions = [1, 2]", function=0)
    assert fits("integrated = false")
    assert not fits("integrated = true")


def test_filling_leaves_out_what_is_unknown() -> None:
    assert profiles.fill("{a}:{b}", {"a": 0, "b": "x"}) == "0:x"
    assert profiles.fill("{a}:{b}", {"a": 0, "b": ""}) is None
    assert profiles.fill("{a}", {}) is None
    assert profiles.fill("plain", {}) == "plain"
