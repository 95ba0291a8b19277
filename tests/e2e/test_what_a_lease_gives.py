"""A lease of a real kernel device with all that its profile says: mounts, variables, groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_agent import names
from tests.support.agent import CONFIG, GROUP_GID, MEMBER, AgentProcess
from tests.support.bus import PrivateBus
from tests.support.calls import CallError, Client, V
from tests.support.console import CONSOLE, DEVICE_ID, PROFILE, RESOURCE
from tests.support.ctl import Ctl
from tests.support.fakesys import FakeSys, in_own_mounts
from tests.support.process import PYTHON
from tests.support.wait import wait_until


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
            told = Ctl(bus.address)("allocate", "-r", RESOURCE, code=75).err
            assert f"mount {firmware}: {DEVICE_ID} needs it" in told
            assert "next: put that right and ask again" in told
            assert "held:" not in told
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
            assert "CONSOLE='=0'" in ctl("manifest", lease).out.splitlines()
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


@in_own_mounts
def test_a_node_that_changed_without_a_uevent_fails_one_grant_and_no_more() -> None:
    """As when a driver is loaded anew and its tool makes the nodes: nobody is told."""
    accelerator, first, second = "heteroagent.org/accelerator", "0000:3b:00.0", "0000:af:00.0"
    machine = FakeSys()
    paths = {address: machine.npu(address) for address in (first, second)}
    bus = PrivateBus()
    # the next probe would see it, too
    agent = AgentProcess(bus, config=f"{CONFIG}\n[health]\ninterval = 600\n", sources="kernel")
    try:
        agent.start()
        with Client(bus) as root:

            def refused(device: str, request: str) -> str:
                root.wait_for_device(device, State="idle")
                with pytest.raises(CallError) as caught:
                    root.allocate(request, accelerator, options={"devices": V("as", [device])})
                assert caught.value.name == "Unavailable"
                return caught.value.text

            def counts() -> dict[str, int]:
                return dict(root.properties(names.ROOT, names.MANAGER)["Resources"][accelerator])

            for device in paths:
                root.wait_for_device(device, State="idle", Health="healthy")
            node, before = machine.renumber(paths[first], 50)
            assert f"node {node}: expected char node 4:{before}, found char node 4:50" in refused(first, "r1")
            assert counts()["total"] == 2

            def number() -> list[int]:
                nodes = root.call(names.device_path(first), names.DEVICE, "GetNodes")
                return [row[-1] for row in nodes if row[0] == node]

            wait_until(lambda: number() == [50], what="the node under its new number")
            root.wait_for_device(first, State="idle")
            lease, manifest = root.allocate("r2", accelerator, options={"devices": V("as", [first])})
            assert manifest["nodes"] == [[first, node, "own", "char", 4, 50]]
            root.release("r3", lease)

            gone = next((paths[second] / "accel").iterdir()).name
            Path(f"/dev/accel/{gone}").unlink()
            assert f"node /dev/accel/{gone}: expected char node" in (text := refused(second, "r4"))
            assert "found nothing" in text
            # it is not offered to the next
            root.wait_for_device(second, State="offline", Reason="no-node")
            assert counts()["total"] == 2
    finally:
        agent.close()
        bus.close()


NUMBERED = """
schema = 1
resource = "example.org/numbered"
[[match]]
classes = ["1200"]
[[nodes]]
subsystem = "accel"
pattern = "accel*"
role = "own"
[env.NUMBERED_VISIBLE]
value = "{index}"
renumbered = true
"""


@in_own_mounts
def test_a_run_inside_a_lease_keeps_the_numbers_of_the_place_where_it_is() -> None:
    """In a unit or a container the driver counts from 0, whatever number the device has on the host."""
    machine = FakeSys()
    for address in ("0000:3b:00.0", "0000:af:00.0"):
        machine.npu(address)
    bus = PrivateBus()
    agent = AgentProcess(bus, profiles={"numbered.toml": NUMBERED}, sources="kernel")
    try:
        agent.start()
        with Client(bus) as root:
            root.wait_for_device("0000:af:00.0", State="idle", Health="healthy")
        ctl = Ctl(bus.address)
        inner = f"{' '.join(ctl.command)} run -r example.org/numbered -- sh -c 'echo $NUMBERED_VISIBLE'"
        # a unit's or a container's manager has put the other number in
        script = f"echo $NUMBERED_VISIBLE; {inner}; NUMBERED_VISIBLE=0 {inner}; unset NUMBERED_VISIBLE; {inner}"
        run = ctl("run", "-r", "example.org/numbered", "-d", "0000:af:00.0", "--", "sh", "-c", script)
        assert run.out.split() == ["1", "1", "0", "1"]
    finally:
        agent.close()
        bus.close()


@in_own_mounts
def test_level_zero_counts_the_cards_that_its_user_can_open() -> None:
    """A lease's user is in no group of the nodes and has an entry on those of the leased card alone."""
    machine = FakeSys()
    cards = ["0000:00:02.0", "0000:03:00.0", "0000:a3:00.0"]
    for address in cards:
        machine.gpu(address, "8086:56c0", "i915")
    bus = PrivateBus()
    agent = AgentProcess(bus, sources="kernel")
    try:
        agent.start()
        with Client(bus) as root:
            for card in cards:
                root.wait_for_device(card, State="idle", Health="healthy")
        video = Path("/dev/dri/renderD128").stat().st_gid
        member, grouped = Ctl(bus.address, MEMBER, [GROUP_GID]), Ctl(bus.address, MEMBER, [GROUP_GID, video])
        show = ("sh", "-c", "echo $ZE_AFFINITY_MASK $ZE_ENABLE_PCI_ID_DEVICE_ORDER")

        def mask(ctl: Ctl, lease: str) -> str:
            return next(line for line in ctl("manifest", lease).out.splitlines() if "ZE_AFF" in line[:6])

        last = member.json("allocate", "-r", "intel.com/gpu", "-d", cards[2], "--confirm")
        assert last["environment"]["ZE_AFFINITY_MASK"] == "0"
        # the agent doesn't know what its user can open
        assert last["manifest"]["env"]["ZE_AFFINITY_MASK"] == "2"
        assert mask(member, last["lease"]) == "ZE_AFFINITY_MASK=0"
        for everything in (Ctl(bus.address), grouped):
            assert mask(everything, last["lease"]) == "ZE_AFFINITY_MASK=2"
        # and a second lease's card
        assert member("run", "-r", "intel.com/gpu", "--", *show).out.split() == ["0", "1"]
        assert grouped("run", "-r", "intel.com/gpu", "--", *show).out.split() == ["1", "1"]
        inner = f"{PYTHON} -m hetero_agent.cli.main manifest {last['lease']} | grep ^ZE_AFF"
        run = member("run", "-r", "intel.com/gpu", "--wait", "30", "--", "sh", "-c", inner)
        assert run.out.split() == ["ZE_AFFINITY_MASK=1"]
    finally:
        agent.close()
        bus.close()


@in_own_mounts
def test_a_run_inside_a_lease_of_something_else_keeps_what_that_gives() -> None:
    machine = FakeSys()
    machine.gpu("0000:03:00.0", "8086:56c0", "i915")
    machine.npu("0000:af:00.0")
    bus = PrivateBus()
    agent = AgentProcess(bus, sources="kernel")
    try:
        agent.start()
        with Client(bus) as root:
            for device in ("0000:03:00.0", "0000:af:00.0"):
                root.wait_for_device(device, State="idle", Health="healthy")
        ctl = Ctl(bus.address, env={"ROCR_VISIBLE_DEVICES": "7"})
        inner = [*ctl.command, "run", "-r", "heteroagent.org/accelerator", "--"]
        show = ["sh", "-c", "echo $HETERO_DEVICES/$ZE_AFFINITY_MASK/$ROCR_VISIBLE_DEVICES/"]
        got = ctl("run", "-r", "intel.com/gpu", "--", *inner, *show).out
        assert got == "0000:af:00.0/0//\n"
        # another's choice, or one whose lease is over, is none
        ctl.env |= {"ZE_AFFINITY_MASK": "5", "HETERO_LEASE_ID": "0" * 32}
        again = ("run", "-r", "heteroagent.org/accelerator", "--wait", "30")  # it has to come back first
        assert ctl(*again, "--", *show).out == "0000:af:00.0///\n"
    finally:
        agent.close()
        bus.close()
