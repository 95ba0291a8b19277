"""heteroctl attach with a service manager that does what the test says: in which order, and what is undone.

That the rules hold is systemd's and the kernel's to show: tests/system/test_unit_access.py.
"""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dbus_next import Message, MessageType, Variant

from tests.support.agent import AgentProcess, SimProcess
from tests.support.bus import PrivateBus
from tests.support.ctl import Ctl
from tests.support.process import scratch
from tests.support.systemd import NAME, POLICY, FakeSystemd
from tests.support.wait import wait_until

NPU = "example.com/npu"
UNIT = "train.service"
RUN, NEXT_RUN = "0" * 31 + "1", "0" * 31 + "2"

#: As attach is called by a unit, but with a /run of its own.
_PLACE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh"]


class Manager(FakeSystemd):
    """One that tells properties of services, and keeps what is set; REFUSES is the error to that.  With
    ANEW the unit is started anew once somebody has looked at it."""

    def __init__(self, bus: PrivateBus) -> None:
        self.service: dict[str, Any] = {
            "User": Variant("s", ""),
            "PrivateDevices": Variant("b", False),
            "DevicePolicy": Variant("s", "auto"),
            "DeviceAllow": Variant("a(ss)", [["/dev/null", "rw"]]),
        }
        self.set_properties: list[tuple[str, bool, list[tuple[str, Any]]]] = []
        self.refuses = ""
        self.anew = False
        super().__init__(bus, {UNIT: ("activating", RUN)})

    def _handle(self, message: Message) -> Message | bool:
        if message.message_type is MessageType.METHOD_CALL and message.member == "GetAll":
            if message.body[0] == NAME + ".Service":
                return Message.new_method_return(message, "a{sv}", [self.service])
            invocation = Variant("ay", bytes.fromhex(self.units[UNIT][1]))
            if self.anew:
                self.units[UNIT] = ("activating", NEXT_RUN)
            return Message.new_method_return(message, "a{sv}", [{"InvocationID": invocation}])
        if message.message_type is MessageType.METHOD_CALL and message.member == "SetUnitProperties":
            if self.refuses:
                return Message.new_error(message, self.refuses, "not today")
            unit, runtime, properties = message.body
            self.set_properties.append((unit, runtime, [(name, value.value) for name, value in properties]))
            return Message.new_method_return(message)
        return super()._handle(message)


@pytest.fixture
def unit_bus() -> Iterator[PrivateBus]:
    bus = PrivateBus(extra=POLICY)
    yield bus
    bus.close()


@pytest.fixture
def manager(unit_bus: PrivateBus) -> Iterator[Manager]:
    with Manager(unit_bus) as one:
        yield one


@pytest.fixture
def ctl(unit_bus: PrivateBus, manager: Manager) -> Iterator[Ctl]:
    """heteroctl beside an agent with two virtual devices."""
    agent = AgentProcess(unit_bus)
    try:
        agent.start()
        sim = SimProcess(agent)
        try:
            sim.start()
            one = Ctl(unit_bus.address, sim=sim.socket)
            one("sim", "add", "npu", "-r", NPU, "-n", "2")
            wait_until(
                lambda: [each["state"] for each in one.json("list")["devices"]] == ["idle"] * 2,
                what="idle devices",
            )
            yield one
        finally:
            sim.close()
    finally:
        agent.close()


@pytest.fixture
def env_file() -> Iterator[Path]:
    place = scratch("attach")
    yield place / "unit.env"
    subprocess.run(["rm", "-rf", str(place)], check=True)


def attach(ctl: Ctl, env_file: Path, *options: str, code: int = 0) -> str:
    """Have a unit attach; return what it says."""
    inside = copy.copy(ctl)
    inside.command = [*_PLACE, *ctl.command]
    result = inside("attach", "--unit", UNIT, "--env-file", str(env_file), *options, code=code)
    return result.out + result.err


def test_a_unit_is_given_its_devices(ctl: Ctl, manager: Manager, env_file: Path) -> None:
    said = attach(ctl, env_file, "-r", NPU)
    (lease,) = ctl.json("leases")
    (shown,) = ctl.json("show", lease["id"])
    assert shown["binding"] == {"unit": UNIT, "invocation": RUN}
    assert shown["request"]["label"] == UNIT
    assert f"HETERO_LEASE_ID={lease['id']}\n" in env_file.read_text()
    assert said == f"{UNIT}: lease {lease['id'][:8]} of {lease['devices'][0]}\n"
    # virtual devices have files for nodes, which no rule is for; the unit's own stays
    rules = [("DeviceAllow", []), ("DeviceAllow", [["/dev/null", "rw"]]), ("DevicePolicy", "closed")]
    assert manager.set_properties == [(UNIT, True, rules)]
    # and back with the run's end
    manager.set(UNIT, "inactive", RUN)
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


def test_a_policy_that_is_stricter_stays(ctl: Ctl, manager: Manager, env_file: Path) -> None:
    manager.service["DevicePolicy"] = Variant("s", "strict")
    attach(ctl, env_file, "-r", NPU)
    ((_, _, rules),) = manager.set_properties
    assert "DevicePolicy" not in dict(rules)


def test_containers_have_rules_of_their_own(ctl: Ctl, manager: Manager, env_file: Path) -> None:
    attach(ctl, env_file, "-r", NPU, "--env-only")
    assert manager.set_properties == []
    assert "HETERO_LEASE_ID=" in env_file.read_text()


@pytest.mark.parametrize("error", ["org.freedesktop.DBus.Error.AccessDenied", NAME + ".NoSuchUnit"])
def test_a_manager_that_refuses_leaves_nothing(ctl: Ctl, manager: Manager, env_file: Path, error: str) -> None:
    manager.refuses = error
    said = attach(ctl, env_file, "-r", NPU, code=77 if error.endswith("Denied") else 1)
    assert "not today" in said
    assert not env_file.exists()
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


def test_a_file_that_can_not_be_written_leaves_nothing(ctl: Ctl, manager: Manager, env_file: Path) -> None:
    said = attach(ctl, Path("/proc/none/unit.env"), "-r", NPU, code=1)
    assert "can't write" in said
    assert manager.set_properties == []
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


@pytest.mark.parametrize(("owner", "mode"), [(0, 0o1777), (0, 0o775), (1000, 0o755)])
def test_a_file_that_others_could_exchange_is_not_written(
    ctl: Ctl, manager: Manager, env_file: Path, owner: int, mode: int
) -> None:
    os.chown(env_file.parent, owner, 0)
    env_file.parent.chmod(mode)
    assert "others than root may put files into" in attach(ctl, env_file, "-r", NPU, code=1)
    assert list(env_file.parent.iterdir()) == []
    assert manager.set_properties == []
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


def test_a_unit_that_is_not_running_has_no_lease(ctl: Ctl, manager: Manager, env_file: Path) -> None:
    env_file.write_text("HETERO_LEASE_ID=of the last run\n")
    manager.units[UNIT] = ("inactive", RUN)
    assert "is inactive; start it first" in attach(ctl, env_file, "-r", NPU, code=2)
    assert not env_file.exists()
    assert ctl.json("leases") == []


def test_a_run_does_not_lease_for_the_next(ctl: Ctl, manager: Manager, env_file: Path) -> None:
    manager.anew = True
    assert "was started anew meanwhile" in attach(ctl, env_file, "-r", NPU, code=1)
    assert manager.set_properties == []
    assert not env_file.exists()
    wait_until(lambda: ctl.json("leases") == [], what="the lease's end")


def test_a_lease_that_something_else_holds(ctl: Ctl, manager: Manager, env_file: Path) -> None:
    lease = ctl.json("allocate", "-r", NPU, "--confirm", "--ttl", "600")["lease"]
    attach(ctl, env_file, "--lease", lease)
    assert [one["id"] for one in ctl.json("leases")] == [lease]
    assert list(ctl.json("show", lease)[0]["binding"]) == ["ttl"]
    assert len(manager.set_properties) == 1
    # what fails now does not end it
    manager.refuses = NAME + ".NoSuchUnit"
    attach(ctl, env_file, "--lease", lease, code=1)
    assert ctl.json("leases")[0]["state"] == "active"
    ctl("release", lease)


def test_a_user_that_is_nobody(ctl: Ctl, manager: Manager, env_file: Path) -> None:
    manager.service["User"] = Variant("s", "no-such-user")
    assert "the service manager" in attach(ctl, env_file, "-r", NPU, code=1)
    assert ctl.json("leases") == []
    manager.service["PrivateDevices"] = Variant("b", True)
    assert "PrivateDevices=yes" in attach(ctl, env_file, "-r", NPU, code=78)
