"""The unit file and its companions, as systemd's own tools see them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.namespace import run_in_mount_namespace
from tests.support.process import ROOT

SYSTEMD = ROOT / "systemd"


def service() -> dict[str, list[str]]:
    """The settings of [Service]; each may be given more than once."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (SYSTEMD / "hetero-agent.service").read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_systemd_analyze_has_nothing_to_say() -> None:
    """With a stand-in where the package puts the program, in an overlay on /usr/bin."""
    out = run_in_mount_namespace(
        """
        import subprocess

        mount("-t", "tmpfs", "tmpfs", "/mnt")
        for name in ("upper", "work", "unit"):
            Path(f"/mnt/{name}").mkdir()
        layers = "lowerdir=/usr/bin,upperdir=/mnt/upper,workdir=/mnt/work"
        mount("-t", "overlay", "overlay", "-o", layers, "/usr/bin")
        program = Path("/usr/bin/hetero-agent")
        program.write_text("#!/bin/sh\\n")
        program.chmod(0o755)
        unit = Path("/mnt/unit/hetero-agent.service")
        unit.write_bytes(Path(sys.argv[1]).read_bytes())
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
        print(done.returncode, done.stdout, done.stderr, sep="|")
        """,
        str(SYSTEMD / "hetero-agent.service"),
    )
    assert out == "0||\n"


def test_the_unit_says_what_the_design_asks() -> None:
    unit = service()
    for name, value in {
        "Type": "notify",
        "NotifyAccess": "main",
        "ExecStart": "/usr/bin/hetero-agent",
        "ExecReload": "/bin/kill -HUP $MAINPID",
        "WatchdogSec": "30s",
        "Restart": "on-failure",
        "RuntimeDirectory": "hetero-agent",
        "RuntimeDirectoryPreserve": "yes",
        "StateDirectory": "hetero-agent",
        "LogRateLimitIntervalSec": "0",
    }.items():
        assert unit[name] == [value], name


def test_what_breaks_the_agent_is_not_confined() -> None:
    unit = service()
    for name in (
        "PrivateNetwork",  # udev's netlink events
        "PrivateDevices",  # device nodes
        "DevicePolicy",
        "PrivateUsers",  # the holder scan
        "ProtectProc",
        "ProcSubset",
        "PrivateTmp",  # file-backed devices
        "User",
    ):
        assert name not in unit, name
    capabilities = " ".join(unit["CapabilityBoundingSet"]).split()
    assert {"CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE", "CAP_KILL", "CAP_CHECKPOINT_RESTORE"} <= set(capabilities)
    assert "AF_NETLINK" in unit["RestrictAddressFamilies"][0].split()


def test_sysusers_makes_the_group(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / name).touch()
    done = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", str(SYSTEMD / "hetero-agent.sysusers")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in (tmp_path / "etc/group").read_text().splitlines()] == ["hetero"]


def test_tmpfiles_makes_the_directory_that_the_unit_may_write(tmp_path: Path) -> None:
    done = subprocess.run(
        ["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(SYSTEMD / "hetero-agent.tmpfiles")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/cdi").stat().st_mode & 0o7777 == 0o755
    assert service()["ReadWritePaths"] == ["-/run/cdi"]
