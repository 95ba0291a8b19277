"""The unit file and its companions, as systemd's own tools see them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hetero_agent import names
from tests.support.namespace import run_in_mount_namespace
from tests.support.process import ROOT

SYSTEMD = ROOT / "systemd"


HELPER = "hetero-agent-access.service"


def service(name: str = "hetero-agent.service", wanted: str = "[Service]") -> dict[str, list[str]]:
    """The settings of a section of a unit; each may be given more than once."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (SYSTEMD / name).read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == wanted and "=" in line and not line.startswith("#"):
            setting, _, value = line.partition("=")
            found.setdefault(setting, []).append(value)
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
        units = [Path("/mnt/unit", Path(one).name) for one in sys.argv[1:]]
        for unit, source in zip(units, sys.argv[1:]):
            unit.write_bytes(Path(source).read_bytes())
        command = ["systemd-analyze", "--man=no", "verify", *map(str, units)]
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.returncode, done.stdout, done.stderr, sep="|")
        """,
        *(str(SYSTEMD / name) for name in ("hetero-agent.service", HELPER, "hetero-agent-access.socket")),
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
        "PrivateUsers",  # the holder scan
        "ProcSubset",
        "ProtectProc",  # has no effect on a process with CAP_SYS_PTRACE
    ):
        assert name not in unit, name
    assert "AF_NETLINK" in unit["RestrictAddressFamilies"][0].split()
    # without these inotify_add_watch(2) on a node is refused
    assert unit["DeviceAllow"] == ["char-* r", "block-* r"]


def test_its_own_user_with_four_capabilities() -> None:
    unit = service()
    assert unit["User"] == ["hetero-agent"]
    needed = {"CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE", "CAP_CHECKPOINT_RESTORE", "CAP_KILL"}
    for name in ("AmbientCapabilities", "CapabilityBoundingSet"):
        assert set(" ".join(unit[name]).split()) == needed, name


def _allowed(unit: str) -> set[str]:
    """What a unit's filter leaves, taken from systemd's own list of groups, in the order of the lines."""
    allowed: set[str] = set()
    for line in service(unit)["SystemCallFilter"]:
        words = line.removeprefix("~").split()
        named = set().union(*(_system_calls(word) for word in words))
        allowed = allowed - named if line.startswith("~") else allowed | named
    return allowed


def test_no_system_call_that_writes_another_process() -> None:
    allowed = _allowed("hetero-agent.service")
    dangerous = {
        "ptrace", "process_vm_writev", "process_vm_readv", "pidfd_getfd", "process_madvise", "kexec_load",
        "setuid", "chown", "mount", "bpf", "init_module", "io_uring_setup", "userfaultfd", "perf_event_open",
    }  # fmt: skip
    assert not allowed & dangerous
    # the scan, its worker, signals and watches
    assert {"kcmp", "statx", "memfd_create", "pidfd_open", "pidfd_send_signal", "inotify_add_watch"} <= allowed


def _system_calls(word: str) -> set[str]:
    """Return the system calls of a group, those of the groups in it too."""
    if not word.startswith("@"):
        return {word}
    lines = subprocess.check_output(["systemd-analyze", "syscall-filter", word], text=True).splitlines()
    inside = [line.strip() for line in lines[1:] if line.strip() and not line.strip().startswith("#")]
    return set().union(*(_system_calls(one) for one in inside))


@pytest.mark.parametrize(("unit", "most"), [("hetero-agent.service", 1.8), (HELPER, 1.1)])
def test_exposure(unit: str, most: float) -> None:
    options = ["--offline=true", "--threshold=20", "--no-pager"]
    done = subprocess.run(
        ["systemd-analyze", "security", *options, str(SYSTEMD / unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    score = re.search(rf"exposure level for {re.escape(unit)}: ([0-9.]+)", done.stdout)
    assert score is not None
    assert float(score[1]) <= most


def test_the_helper_is_started_by_its_socket_which_only_the_agent_may_open() -> None:
    socket = service("hetero-agent-access.socket", "[Socket]")
    assert socket == {
        "ListenSequentialPacket": [names.ACCESS_SOCKET],
        "DirectoryMode": ["0755"],
        "SocketUser": ["root"],
        "SocketGroup": ["hetero-agent"],
        "SocketMode": ["0660"],
    }
    main = service(wanted="[Unit]")
    assert "hetero-agent-access.socket" in main["Wants"]
    assert "hetero-agent-access.socket" in main["After"]
    helper = service(HELPER, "[Unit]")
    assert helper["Requires"] == helper["After"] == ["hetero-agent-access.socket"]
    # a crash is no reason to give up the socket
    assert helper["StartLimitIntervalSec"] == ["0"]
    # what it made outlives it
    assert service(HELPER)["RuntimeDirectoryPreserve"] == ["yes"]
    assert service(HELPER)["RuntimeDirectory"] == ["hetero-agent-access cdi"]


def test_the_helper_has_one_capability_and_no_way_to_others() -> None:
    unit = service(HELPER)
    assert unit["CapabilityBoundingSet"] == ["CAP_FOWNER"]
    assert "User" not in unit
    # no socket but the one that it was given
    assert unit["RestrictAddressFamilies"] == ["none"]
    assert unit["PrivateNetwork"] == ["yes"]
    # no node is opened; PrivateDevices would hide them
    assert unit["DevicePolicy"] == ["closed"]
    assert "DeviceAllow" not in unit
    assert "PrivateDevices" not in unit
    allowed = _allowed(HELPER)
    assert {"setxattr", "getxattr", "removexattr", "chmod", "rename", "accept4", "recvfrom"} <= allowed
    assert not allowed & {
        "ptrace", "process_vm_writev", "mount", "bpf", "init_module", "chown", "fchownat", "setuid",
        "setgroups", "kexec_load", "open_by_handle_at", "pidfd_getfd", "io_uring_setup", "reboot", "swapon",
    }  # fmt: skip


def test_sysusers_makes_the_user_and_the_group(tmp_path: Path) -> None:
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
    (user,) = (tmp_path / "etc/passwd").read_text().splitlines()
    name, _, uid, gid, _, home, shell = user.split(":")
    assert (name, home, shell) == ("hetero-agent", "/", "/usr/sbin/nologin")
    assert int(uid) < 1000
    groups = [line.split(":") for line in (tmp_path / "etc/group").read_text().splitlines()]
    assert {group[0]: group[3] for group in groups} == {"hetero": "", "hetero-agent": ""}
    assert [group[2] for group in groups if group[0] == "hetero-agent"] == [gid]


def test_tmpfiles_makes_the_directory_of_cdi(tmp_path: Path) -> None:
    done = subprocess.run(
        ["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(SYSTEMD / "hetero-agent.tmpfiles")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/cdi").stat().st_mode & 0o7777 == 0o755
    assert "ReadWritePaths" not in service()
