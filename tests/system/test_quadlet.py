"""Leases of containers that systemd runs: the quadlet example, as the unit that podman makes of it.

Debian 12 has podman 4.3, which makes no units of .container files (that came with 4.4).  What podman 5.4.2
(Debian 13) makes of the example stands here word for word, and is run with the machine's own podman.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import PYTHON, ROOT
from tests.system.accelerators import RESOURCE, Accelerators
from tests.system.agent import Agent
from tests.system.machine import Machine
from tests.system.podman import with_podman

EXAMPLE = ROOT / "examples/quadlet/model.container"

#: What ``/usr/libexec/podman/quadlet -dryrun`` of podman 5.4.2 adds to the example's own settings.
_BEFORE = """\
[Unit]
Wants=network-online.target
After=network-online.target
"""
_UNIT = """\
SourcePath=/etc/containers/systemd/model.container
RequiresMountsFor=%t/containers
"""
_SERVICE = """\
Environment=PODMAN_SYSTEMD_UNIT=%n
KillMode=mixed
ExecStop=/usr/bin/podman rm -v -f -i --cidfile=%t/%N.cid
ExecStopPost=-/usr/bin/podman rm -v -f -i --cidfile=%t/%N.cid
Delegate=yes
Type=notify
NotifyAccess=all
SyslogIdentifier=%N
ExecStart=/usr/bin/podman run --name systemd-%N --cidfile=%t/%N.cid --replace --rm --cgroups=split \
--sdnotify=conmon -d {device} {image} {command}
"""


def generated(text: str) -> str:
    """The unit of a .container file, as the generator makes it of the keys that the example has."""
    sections: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif "=" in line and not line.startswith("#"):
            sections.setdefault(name, []).append(line)
    container = dict(line.split("=", 1) for line in sections["Container"])
    assert set(container) == {"Image", "AddDevice", "Exec"}, (
        "what the generator makes of other keys is not here"
    )
    service = _SERVICE.format(
        device=f"--device {container['AddDevice']}", image=container["Image"], command=container["Exec"]
    )
    unit = _BEFORE + "\n".join(sections["Unit"]) + "\n" + _UNIT
    return f"{unit}\n[Service]\n" + "\n".join(sections["Service"]) + f"\n{service}"


@pytest.fixture(scope="module")
def machine(layers: list[Path], base: Path) -> Iterator[Machine]:
    with with_podman(layers, base) as one:
        yield one


# Says what it may open: its own node, a copy of another's number; then holds its own.
_PROBE = """
import os, stat, sys, time
node, major, minor = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.mknod("/tmp/other", stat.S_IFCHR | 0o666, os.makedev(major, minor))
try:
    os.open("/tmp/other", os.O_RDWR | os.O_NOCTTY)
    other = "opened"
except OSError as error:
    other = error.strerror
held = os.open(node, os.O_RDWR | os.O_NOCTTY)
print("held", sorted(os.listdir("/dev/accel")), other, os.environ["HETERO_DEVICES"], flush=True)
time.sleep(3600)
"""


def test_the_example(machine: Machine, agent: Agent, hardware: Accelerators) -> None:
    one, other = hardware.plug(2)
    agent.wait_states({one.id: "idle", other.id: "idle"})
    unit = "lab-model.service"
    machine.write("/usr/lab-probe.py", _PROBE)
    text = generated(EXAMPLE.read_text())
    major, minor = other.device_number
    for old, new in {
        "nvidia.com/gpu": f"{RESOURCE} -d {one.id}",
        "docker.io/library/debian:stable-slim": "--network none -v /usr:/usr:ro --cap-add MKNOD localhost/lab",
        "sleep infinity": f"{PYTHON} -IS /usr/lab-probe.py {one.node} {major} {minor}",
        # which a later podman removes with the container
        "Delegate=yes": "Delegate=yes\nExecStartPre=-rm -f %t/%N.cid",
        "After=network-online.target": "",
        "Wants=network-online.target": "",
    }.items():
        assert old in text
        text = text.replace(old, new)
    machine.write(f"/run/systemd/system/{unit}", text)
    machine.run("systemctl", "daemon-reload")
    try:
        started = machine.run("systemctl", "start", unit, timeout=90, check=False)
        said = machine.run("journalctl", "--output=cat", f"--unit={unit}").stdout
        assert started.returncode == 0, said
        says = f"held ['accel{one.number}'] Operation not permitted {one.id}\n"
        machine.wait(lambda: machine.run("podman", "logs", "systemd-lab-model").stdout == says, 30, says)
        agent.wait_states({one.id: "in-use", other.id: "idle"})
        (lease,) = agent.leases()
        pid = machine.run("podman", "inspect", "--format={{.State.Pid}}", "systemd-lab-model").stdout.strip()
        bound = agent.call(lease, "org.heteroagent.Agent1.Lease", "GetBinding")
        assert str(bound["pid"]["data"]) == pid
        # ended by whomever, it starts anew with a lease of its own
        machine.run("kill", "-KILL", pid)
        machine.wait(
            lambda: agent.unit("NRestarts", unit) == "1" and agent.unit("ActiveState", unit) == "active",
            30,
            "another container",
        )
        agent.wait_states({one.id: "in-use", other.id: "idle"})
        assert list(agent.leases()) not in ([], [lease])
        machine.run("systemctl", "stop", unit)
        agent.wait_states({one.id: "idle", other.id: "idle"})
    finally:
        machine.shell(f"systemctl stop {unit}; rm /run/systemd/system/{unit}; systemctl daemon-reload")
