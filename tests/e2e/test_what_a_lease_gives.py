"""A lease of a real kernel device with all that its profile says: mounts, variables, groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_agent import names
from tests.support.agent import AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE, RESOURCE
from tests.support.ctl import Ctl


def profile(directory: Path) -> str:
    return (
        PROFILE.replace(
            'CONSOLE = "{node}"', 'CONSOLE = { value = "{index}", prefix = "=", renumbered = true }'
        )
        + f"""
[[mounts]]
host = "{directory}/firmware-{{kernel-names}}"
container = "/lib/firmware"
required = true

[[mounts]]
host = "{directory}/lib*.so"

[[mounts]]
host = "{directory}/absent"
"""
    )


def test_mounts_are_looked_for_at_each_grant(bus: PrivateBus, tmp_path: Path) -> None:
    agent = AgentProcess(bus, profiles={"console.toml": profile(tmp_path)}, sources="kernel")
    firmware = tmp_path / f"firmware-{CONSOLE.name}"
    try:
        agent.start()
        with Client(bus) as root:
            root.wait_for_device(DEVICE_ID, State="idle")
            with pytest.raises(CallError) as caught:
                root.allocate("r1", RESOURCE)
            assert caught.value.name == "Unavailable"
            assert f"mount {firmware}: {DEVICE_ID} needs it" in caught.value.text
            # nothing is left of the attempt
            root.wait_for_device(DEVICE_ID, State="idle")

            firmware.mkdir()
            (tmp_path / "libnpu.so").touch()
            lease, manifest = root.allocate("r2", RESOURCE, options={"confirm": V("b", True)})
            assert manifest["mounts"] == [
                [str(firmware), "/lib/firmware", "ro"],
                [f"{tmp_path}/libnpu.so", f"{tmp_path}/libnpu.so", "ro"],
            ]
            assert manifest["env"]["CONSOLE"] == "=0"
            assert manifest["env-filtered"] == {"CONSOLE": "=0"}

            ctl = Ctl(bus.address)
            assert "CONSOLE==0" in ctl("manifest", lease).out.splitlines()
            arguments = ctl("manifest", lease, "--format", "podman").out.splitlines()
            assert f"--device={CONSOLE}:{CONSOLE}:rw" in arguments
            assert f"--mount=type=bind,src={firmware},dst=/lib/firmware,ro" in arguments
            assert f"DeviceAllow={CONSOLE} rw" in ctl("manifest", lease, "--format", "systemd").out.splitlines()

            # what was granted is what is told, whatever became of the host since
            firmware.rmdir()
            again = root.call(lease, names.LEASE, "GetManifest")
            assert {key: again[key] for key in ("mounts", "env", "env-filtered", "nodes")} == {
                key: manifest[key] for key in ("mounts", "env", "env-filtered", "nodes")
            }
    finally:
        agent.close()
