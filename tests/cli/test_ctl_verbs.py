"""Every verb and option of heteroctl against the agent and the simulator."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hetero_agent import names
from tests.cli.conftest import Station
from tests.support.agent import GROUP_GID, MEMBER, OUTSIDER, AgentProcess
from tests.support.ctl import Ctl
from tests.support.wait import wait_until

NPU = "example.com/npu"

#: Four devices in two NUMA nodes, one of another resource, one with parts.
SCENARIO = """
[[device]]
id = "npu-0"
resource = "example.com/npu"
numa = 0
memory = 1000
serial = "SER-0"

[[device]]
id = "npu-1"
resource = "example.com/npu"
numa = 1
memory = 2000
model = "Big one"

[[device]]
id = "npu-2"
resource = "example.com/npu"
numa = 1
memory = 2000
model = "Big one"

[[device]]
id = "fpga-0"
resource = "example.com/fpga"
"""


def states(ctl: Ctl) -> dict[str, str]:
    return {one["id"]: one["state"] for one in ctl.json("list")["devices"]}


def device(ctl: Ctl, name: str) -> dict[str, Any]:
    (one,) = ctl.json("show", name)
    return dict(one)


def lease(ctl: Ctl, name: str) -> dict[str, Any]:
    (one,) = ctl.json("show", name)
    return dict(one)


def allocate(ctl: Ctl, *options: str, code: int = 0) -> dict[str, Any]:
    return dict(ctl.json("allocate", "-r", NPU, *options, code=code))


def wait_state(ctl: Ctl, name: str, state: str, timeout: float = 30) -> None:
    wait_until(lambda: states(ctl).get(name) == state, timeout, f"{name} {state}")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


# -- showing --------------------------------------------------------------------------------------
def test_list_is_the_default_and_filters(ctl: Ctl) -> None:
    text = ctl().out
    assert [row.split()[:3] for row in text.splitlines()] == [
        row.split()[:3] for row in ctl("list").out.splitlines()
    ]
    head, *rows = text.splitlines()
    assert head.split()[:4] == ["DEVICE", "RESOURCE", "STATE", "HEALTH"]
    assert [row.split()[0] for row in rows] == ["fpga-0", "npu-0", "npu-1", "npu-2"]
    assert "\x1b" not in text
    document = ctl.json("list", "-r", "example.com/fpga")
    assert [one["id"] for one in document["devices"]] == ["fpga-0"]
    assert document["complete"] is True
    ctl("cordon", "npu-0")
    assert [one["id"] for one in ctl.json("list", "--state", "offline")["devices"]] == ["npu-0"]
    assert [one["id"] for one in ctl.json("list", "-s", "idle", "--resource", NPU)["devices"]] == [
        "npu-1",
        "npu-2",
    ]
    assert ctl("list", "-s", "faulty").out == "no such devices; heteroctl list shows all\n"


def test_status(ctl: Ctl) -> None:
    allocate(ctl)
    document = ctl.json("status")
    assert document["ready"] is True
    assert document["resources"][NPU]["total"] == 3
    assert document["resources"][NPU]["allocatable"] == 2
    assert document["limits"]["Leases"][0] == 1
    text = ctl("status").out
    assert "ready:" in text
    (row,) = [line for line in text.splitlines() if line.startswith("example.com/npu")]
    assert row.split()[1:3] == ["3", "2"]


def test_show_takes_ids_aliases_paths_and_leases(ctl: Ctl) -> None:
    granted = allocate(ctl, "-d", "npu-0", "--client", "tests", "--label", "mine")
    for name in ("npu-0", "SER-0", "ser-0", names.device_path("npu-0")):
        one = device(ctl, name)
        assert (one["kind"], one["id"], one["state"], one["lease"]) == (
            "device",
            "npu-0",
            "allocating",
            granted["lease"],
        )
        assert [node["role"] for node in one["nodes"]] == ["own"]
    for name in (granted["lease"], granted["lease"][:6], granted["path"]):
        one = lease(ctl, name)
        assert (one["kind"], one["id"], one["devices"], one["client"]) == (
            "lease",
            granted["lease"],
            ["npu-0"],
            "tests",
        )
        assert one["request"]["label"] == "mine"
    text = ctl("show", "npu-1", granted["lease"][:8]).out
    assert "\n\nlease:" in text
    assert "Big one" in text
    assert "no device or lease 'npu-77'" in ctl("show", "npu-77", code=1).err
    ctl("show", names.device_path("npu-77"), code=1)
    ctl("show", names.lease_path("0" * 32), code=1)


def test_what_is_private_of_a_lease_is_for_its_owner(ctl: Ctl, agent: AgentProcess) -> None:
    granted = allocate(ctl, "--label", "secret")
    stranger = Ctl(agent.bus.address, uid=OUTSIDER)
    one = lease(stranger, granted["lease"])
    assert one["uid"] == 0
    assert not {"request", "binding", "manifest"} & set(one)
    assert "secret" not in stranger("show", granted["lease"]).out


def test_leases(ctl: Ctl, agent: AgentProcess) -> None:
    assert ctl("leases").out == "no leases\n"
    mine = allocate(ctl, "--client", "mine")["lease"]
    member = Ctl(agent.bus.address, uid=MEMBER, groups=[GROUP_GID])
    theirs = member.json("allocate", "-r", "example.com/fpga")["lease"]
    assert [one["id"] for one in ctl.json("leases")] == [mine, theirs]
    assert [one["id"] for one in ctl.json("leases", "--mine")] == [mine]
    assert [one["id"] for one in member.json("leases", "--mine")] == [theirs]
    assert [one["id"] for one in ctl.json("leases", "--resource", NPU)] == [mine]
    head, row = ctl("leases", "-r", NPU).out.splitlines()
    assert head.split()[:3] == ["LEASE", "RESOURCE", "STATE"]
    assert row.split()[:4] == [mine[:8], NPU, "pending", "0"]


def test_history(ctl: Ctl) -> None:
    granted = allocate(ctl, "-d", "npu-0", "--confirm")
    rows = ctl.json("history", "npu-0")
    assert [(row["from"], row["to"]) for row in rows][-1] == ("idle", "in-use")
    assert rows[-1]["request-id"] == granted["request_id"]
    assert ctl.json("history", "SER-0", "-n", "1") == rows[-1:]
    assert len(ctl.json("history", "npu-0", "--max", "1")) == 1
    assert ctl("history", "npu-0").out.splitlines()[-1].split()[2:4] == ["idle", "in-use"]


def test_version_of_both_sides(ctl: Ctl) -> None:
    document = ctl.json("version")
    assert document["agent"] == document["heteroctl"]
    assert ctl("version").out == f"heteroctl {document['heteroctl']}\nagent {document['agent']}\n"


# -- leasing --------------------------------------------------------------------------------------
def test_allocate_confirm_release(ctl: Ctl) -> None:
    text = ctl("allocate", "-r", NPU, "-n", "2").out
    lines = dict(line.split(":", 1) for line in text.splitlines() if not line.startswith("environment"))
    name = lines["lease"].strip()
    assert len(lines["devices"].split()) == 2
    assert f"heteroctl confirm {name[:8]} --pid PID" in text
    assert f"HETERO_LEASE_ID={name}" in text
    assert lease(ctl, name)["state"] == "pending"
    assert ctl("confirm", name[:8]).out == f"lease {name[:8]} is active\n"
    assert ctl.json("confirm", name)["state"] == "active"
    assert ctl("release", name[:8]).out == f"lease {name[:8]} released\n"
    wait_until(lambda: ctl.json("leases") == [], what="the lease to be gone")
    assert ctl.json("release", name) == [{"lease": name, "changed": False}]


def test_allocate_with_one_request_id_is_one_lease(ctl: Ctl) -> None:
    first = allocate(ctl, "--request-id", "once")
    assert allocate(ctl, "--request-id", "once") == first
    assert len(ctl.json("leases")) == 1
    assert "RequestConflict" in allocate(ctl, "--request-id", "once", "-n", "2", code=1)["error"]["name"]
    ctl("release", first["lease"])
    wait_until(lambda: ctl.json("leases") == [])
    assert "RequestSpent" in allocate(ctl, "--request-id", "once", code=1)["error"]["name"]


def test_an_empty_request_id_is_no_request_for_another(ctl: Ctl) -> None:
    assert "request_id: expected 1 to 128" in ctl("allocate", "-r", NPU, "--request-id", "", code=2).err
    assert ctl.json("leases") == []


def test_allocate_chooses_as_told(ctl: Ctl) -> None:
    def chosen(*options: str) -> list[str]:
        granted = allocate(ctl, *options)
        ctl("release", granted["lease"])
        wait_until(lambda: set(states(ctl).values()) == {"idle"})
        return list(granted["manifest"]["devices"])

    assert chosen("--device", "npu-2") == ["npu-2"]
    assert sorted(chosen("-d", "SER-0", "-d", names.device_path("npu-1"), "-n", "2")) == ["npu-0", "npu-1"]
    assert chosen("--require", "model=Big one", "--require", "memory-total=1500") in (["npu-1"], ["npu-2"])
    assert chosen("--require", "serial=SER-0") == ["npu-0"]
    assert sorted(chosen("-n", "2", "--policy", "packed")) == ["npu-1", "npu-2"]
    assert chosen("--policy", "most-free-memory") in (["npu-1"], ["npu-2"])
    counts = {one["id"]: one["allocation_count"] for one in ctl.json("list", "-r", NPU)["devices"]}
    (least,) = chosen("--policy", "least-allocated")
    assert counts[least] == min(counts.values())


def test_allocate_binds_to_a_process(ctl: Ctl, sleeper: subprocess.Popen[bytes]) -> None:
    granted = allocate(ctl, "--pid", str(sleeper.pid), "--confirm")
    shown = lease(ctl, granted["lease"])
    assert (shown["state"], shown["binding"]["pid"]) == ("active", sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    wait_until(lambda: ctl.json("leases") == [], what="the lease to end with its process")


def test_confirm_binds_to_a_process_and_renews(ctl: Ctl, sleeper: subprocess.Popen[bytes]) -> None:
    granted = allocate(ctl, "--ttl", "100")
    ctl("confirm", granted["lease"], "--pid", str(sleeper.pid), "--ttl", "500.5")
    binding = lease(ctl, granted["lease"])["binding"]
    assert (binding["pid"], binding["ttl"]) == (sleeper.pid, 500_500_000)
    assert ", ends in 8min unless confirmed again" in ctl("confirm", granted["lease"]).out


def test_a_ttl_ends_a_lease(ctl: Ctl) -> None:
    allocate(ctl, "--ttl", "0.5", "--confirm")
    wait_until(lambda: ctl.json("leases") == [], what="the ttl to be over")


def test_confirm_within_ends_an_unconfirmed_lease(ctl: Ctl) -> None:
    allocate(ctl, "--confirm-within", "1")
    began = time.monotonic()
    wait_until(lambda: ctl.json("leases") == [], what="the lease to expire")
    assert time.monotonic() - began < 25
    assert allocate(ctl, "--confirm-within", "31", code=2)["error"]["exit"] == 2


def test_a_unit_needs_systemd(ctl: Ctl) -> None:
    """Bound to units by the same option; without systemd the agent says so."""
    granted = allocate(ctl)
    for arguments in (["allocate", "-r", NPU], ["confirm", granted["lease"]]):
        result = ctl(*arguments, "--unit", "none-such.service", code=None)
        assert result.code in (1, 2, 77)
        assert result.err.startswith("heteroctl: ")


def test_options_of_the_lease_reach_the_agent(ctl: Ctl) -> None:
    granted = allocate(
        ctl, "--client", "c", "--label", "l", "--on-fault", "kill", "--on-end", "kill", "--owner-uid", "1234"
    )
    shown = lease(ctl, granted["lease"])
    assert (shown["uid"], shown["client"]) == (1234, "c")
    asked = shown["request"]
    assert (asked["label"], asked["on-fault"], asked["on-end"]) == ("l", "kill", "kill")


def test_who_may_allocate(ctl: Ctl, agent: AgentProcess) -> None:
    outsider = Ctl(agent.bus.address, uid=OUTSIDER)
    for verb in ("allocate", "explain", "run"):
        more = ["--", "true"] if verb == "run" else []
        result = outsider(verb, "-r", NPU, *more, code=77)
        assert "adduser" in result.err
    member = Ctl(agent.bus.address, uid=MEMBER, groups=[GROUP_GID])
    theirs = member.json("allocate", "-r", NPU)["lease"]
    assert "owner" in outsider("release", theirs, code=77).err
    assert "group" in outsider("holders", "npu-0", code=77).err
    assert member.json("allocate", "-r", NPU, "--owner-uid", "0", code=77)["error"]["exit"] == 77


def test_nothing_free_is_75_and_says_who_has_it(ctl: Ctl) -> None:
    held = allocate(ctl, "-n", "3", "--client", "greedy")["lease"]
    lines = ctl("allocate", "-r", NPU, code=75).err.splitlines()
    assert any(
        line.startswith("  held: npu-0 ") and f"lease {held[:8]} of uid 0, greedy" in line for line in lines
    )
    assert lines[-1].startswith("  next: ")


@pytest.mark.parametrize(
    "request_",
    [["-r", NPU, "-n", "4"], ["-r", "example.com/none"], ["-r", NPU, "--require", "memory-total=99999"]],
    ids=" ".join,
)
def test_what_can_never_be_is_78(ctl: Ctl, request_: list[str]) -> None:
    allocate(ctl, "-n", "3")
    for verb in (["allocate"], ["explain"], ["run", "--wait", "300"]):
        began = time.monotonic()
        ctl(*verb, *request_, *(["--", "true"] if verb[0] == "run" else []), code=78)
        assert time.monotonic() - began < 60, "answered at once"


def test_explain(ctl: Ctl) -> None:
    answer = ctl.json("explain", "-r", NPU, "-n", "2", "--policy", "packed")
    assert (answer["verdict"], sorted(answer["chosen"])) == ("now", ["npu-1", "npu-2"])
    answer = ctl.json("explain", "-r", NPU, "--require", "model=Big one", "-d", "npu-1")
    assert answer["chosen"] == ["npu-1"]
    assert ctl.json("leases") == []
    allocate(ctl, "-n", "2")
    answer = ctl.json("explain", "-r", NPU, "-n", "2", code=75)
    assert answer["verdict"] == "later"
    assert sorted(one["eligible"] for one in answer["devices"]) == [False, False, True]
    text = ctl("explain", "-r", NPU, "-n", "2", code=75).out
    assert text.startswith("verdict:")
    assert "DEVICE" in text


# -- holders, reap --------------------------------------------------------------------------------
def test_holders_and_reap(ctl: Ctl) -> None:
    (node,) = device(ctl, "npu-0")["nodes"]
    assert ctl("holders", "npu-0").out == "nobody has it open\n"
    assert ctl("holders", "npu-0", "npu-1").out == "nobody has them open\n"
    assert ctl("reap", "npu-0", "--all").out == "nobody has it open\n"
    holders = [subprocess.Popen(["sleep", "1000"], stdin=open(node["path"])) for _ in range(3)]  # noqa: SIM115
    try:
        wait_state(ctl, "npu-0", "occupied")
        wanted = {("npu-0", one.pid, 0, "root", "sleep", "outsider") for one in holders}

        def three() -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = ctl.json("holders", "npu-0", "npu-1")
            keys = ("device", "pid", "uid", "user", "comm", "role")
            return rows if {tuple(row[key] for key in keys) for row in rows} == wanted else []

        # before they have executed their program they go by another name
        rows = wait_until(three, what="the three holders")
        assert [row["evidence"] for row in rows] == [{"descriptors": "1", "path": node["path"]}] * 3
        heads, *lines = ctl("holders", "npu-0").out.splitlines()
        assert heads.split() == ["DEVICE", "PID", "USER", "ROLE", "COMMAND", "EXECUTABLE", "SINCE"]
        assert {tuple(line.split()[:5]) for line in lines} == {
            ("npu-0", str(one.pid), "root", "outsider", "sleep") for one in holders
        }
        shown = ctl("holders", "npu-0", "--evidence").out
        assert f"npu-0, pid {holders[0].pid}:\n  descriptors: 1\n  path: {node['path']}\n" in shown
        wrong = ctl("reap", "npu-0", "--pid", str(os.getpid()), code=1)
        assert f"no holder of npu-0 has pid {os.getpid()}" in wrong.err
        assert f"held: pid {holders[0].pid} sleep of uid 0" in wrong.err
        assert all(one.poll() is None for one in holders)
        document = ctl.json("reap", "npu-0", "--pid", str(holders[0].pid))
        assert [one["pid"] for one in document["named"]] == [holders[0].pid]
        assert holders[0].wait(30) == -signal.SIGTERM
        wait_until(lambda: len(ctl.json("holders", "npu-0")) == 2)
        refused = ctl("allocate", "-r", NPU, "-d", "npu-0", code=75).err
        assert f"held:   by pid {holders[1].pid} sleep of uid 0" in refused
        assert "npu-1" not in refused
        assert "of 2 processes told to end" in ctl("reap", "npu-0", "--all").out
        assert [one.wait(30) for one in holders[1:]] == [-signal.SIGTERM] * 2
    finally:
        for one in holders:
            one.kill()
            one.wait()
    wait_state(ctl, "npu-0", "idle")


# -- cordon ---------------------------------------------------------------------------------------
def test_one_wrong_name_changes_nothing(ctl: Ctl) -> None:
    held = allocate(ctl)["lease"]
    assert "no lease 'nope'" in ctl("release", held, "nope", code=1).err
    assert lease(ctl, held)["state"] == "pending"
    assert "no device 'nope'" in ctl("cordon", "npu-1", "nope", code=1).err
    ctl("cordon", "npu-1")
    assert "no device 'nope'" in ctl("uncordon", "npu-1", "nope", code=1).err
    assert device(ctl, "npu-1")["cordoned"] is True
    ctl("uncordon", "npu-1")


def test_cordon_and_uncordon(ctl: Ctl, agent: AgentProcess) -> None:
    granted = allocate(ctl, "-d", "npu-1", "--confirm")
    text = ctl("cordon", "npu-0", "npu-1", "--reason", "fan").out
    assert text.splitlines() == [
        "npu-0 is cordoned (offline)",
        "npu-1 is cordoned (in-use, offline once its lease has ended)",
    ]
    one = device(ctl, "npu-0")
    assert (one["cordoned"], one["state"]) == (True, "offline")
    ctl("release", granted["lease"])
    wait_state(ctl, "npu-1", "offline")
    assert [one["cordoned"] for one in ctl.json("cordon", "npu-2")] == [True]
    for verb in ("cordon", "uncordon"):
        assert Ctl(agent.bus.address, uid=MEMBER, groups=[GROUP_GID])(verb, "npu-0", code=77).out == ""
    assert ctl("uncordon", "npu-0", "npu-1").out.splitlines()[0].startswith("npu-0 is not cordoned any more")
    assert [one["cordoned"] for one in ctl.json("uncordon", "npu-2")] == [False]
    ctl("cordon", "npu-1", "--reason", "not the fan")
    assert re.search(r"^cordoned: +not the fan \(by root, .*\)$", ctl("show", "npu-1").out, re.MULTILINE)
    assert device(ctl, "npu-1")["cordon"]["reason"] == "not the fan"
    ctl("uncordon", "npu-1")
    assert device(ctl, "npu-1")["cordon"] == {}
    assert set(states(ctl).values()) == {"idle"}


def test_the_cordon_of_a_card_is_its_parts_too(ctl: Ctl) -> None:
    for name, more in (("card", ()), ("part", ("--parent", "card"))):
        ctl("sim", "add", name, "-r", NPU, *more)
    wait_state(ctl, "part", "idle")
    ctl("cordon", "card", "--reason", "fan")
    one = device(ctl, "part")
    assert (one["state"], one["cordoned"], one["cordon"]["card"]) == ("offline", True, "card")
    assert re.search(
        r"^cordoned: +fan \(by root, .*, with its card card\)$", ctl("show", "part").out, re.MULTILINE
    )
    assert ctl("uncordon", "part").out == ("part is not cordoned any more (offline); its card card still is\n")
    assert ctl("uncordon", "card").out == "card is not cordoned any more (idle)\n"
    assert device(ctl, "part")["state"] == "idle"
    ctl("sim", "remove", "part")  # before its card


def test_uncordon_of_a_device_that_is_not_there(ctl: Ctl) -> None:
    ctl("sim", "add", "away", "-r", NPU)
    wait_until(lambda: "away" in states(ctl))
    ctl("cordon", "away")
    ctl("sim", "remove", "away")
    wait_until(lambda: "away" not in states(ctl))
    assert "no device 'nope'" in ctl("uncordon", "nope", "away", code=1).err
    assert ctl("uncordon", "away", "npu-0").out.splitlines() == [
        "away is not cordoned any more (not there)",
        "npu-0 is not cordoned any more (idle)",
    ]
    assert "no device 'away'" in ctl("uncordon", "away", code=1).err


# -- watch ----------------------------------------------------------------------------------------
def test_watch_prints_what_happens(own: Station) -> None:
    ctl, agent = own.ctl(), own.agent
    log = agent.directory / "watched"
    with log.open("w") as out:
        process = ctl.spawn("watch", "--json", stdout=out)

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def seen(event: str) -> int:
        return [one["event"] for one in lines()].count(event)

    def lease_and_release() -> bool:
        ctl("release", str(allocate(ctl, "-d", "npu-2")["lease"]))
        wait_state(ctl, "npu-2", "idle")
        return min(map(seen, ("InterfacesAdded", "InterfacesRemoved", "LeaseEnded", "StateChanged"))) > 0

    try:
        wait_until(lease_and_release, 30, "the watch to hear of a lease's whole life")
        ctl("sim", "fail", "fpga-0")
        wait_until(lambda: seen("HealthEvent"))
        agent.restart()
        wait_until(lambda: seen("AgentChanged") == 2, what="the agent to be gone and back")
        assert [bool(one["owner"]) for one in lines() if one["event"] == "AgentChanged"] == [False, True]
        assert all(one["time"] > 1_600_000_000_000_000 for one in lines())
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_watch_of_one_device_as_text_with_an_end(ctl: Ctl) -> None:
    process = ctl.spawn("watch", "--device", "npu-1", "-n", "4")
    assert process.stdout is not None

    def poke() -> bool:
        ctl("cordon", "npu-0", "npu-1")
        ctl("uncordon", "npu-0", "npu-1")
        return process.poll() is not None

    wait_until(poke, 60, "four events")
    assert process.returncode == 0
    out, _ = process.communicate()
    rows = [line.split("  ", 2) for line in out.splitlines()]
    assert [row[1] for row in rows] == ["npu-1"] * 4
    assert any("idle -> offline" in row[2] for row in rows)


def test_watch_of_reports(ctl: Ctl) -> None:
    process = ctl.spawn("watch", "--reports", "--max", "12")

    def poke() -> bool:
        ctl("cordon", "npu-0")
        ctl("uncordon", "npu-0")
        return process.poll() is not None

    wait_until(poke, 60, "reports")
    out, _ = process.communicate()
    assert "report " in out
    assert "example.com/npu " in out


# -- doctor, sim ----------------------------------------------------------------------------------
def test_doctor_with_an_agent(ctl: Ctl, agent: AgentProcess) -> None:
    result = ctl("doctor", "--json", code=None)
    found = {(one["subject"], one["level"]) for one in result.json["findings"]}
    assert {("agent", "ok"), ("bus", "ok"), ("rights", "ok"), ("devices", "ok")} <= found
    assert result.code == (0 if result.json["well"] else 1)
    outsider = Ctl(agent.bus.address, uid=OUTSIDER).json("doctor", code=1)
    assert ("rights", "wrong") in {(one["subject"], one["level"]) for one in outsider["findings"]}
    ctl("sim", "fail", "npu-0", "--reason", "too hot")
    wait_state(ctl, "npu-0", "faulty")
    assert "too hot" in ctl("doctor", code=1).out


def test_sim(ctl: Ctl) -> None:
    ctl("sim", "add", "gpu", "-r", "example.com/npu", "-n", "2", "--model", "M", "--memory", "5")
    ctl("sim", "add", "part", "--resource", "example.com/fpga", "--parent", "gpu-0", "--numa", "1")
    ctl("sim", "add", "one", "-r", "example.com/npu", "--serial", "S-1")
    wait_until(lambda: {"gpu-0", "gpu-1", "part", "one"} <= set(states(ctl)))
    assert device(ctl, "gpu-1")["model"] == "M"
    assert device(ctl, "gpu-1")["attributes"]["memory-total"] == 5
    assert (device(ctl, "part")["parent"], device(ctl, "part")["numa_nodes"]) == ("gpu-0", [1])
    assert device(ctl, "S-1")["id"] == "one"
    listed = ctl.json("sim", "list")["devices"]
    assert {"gpu-0", "gpu-1", "part", "one"} <= {one["id"] for one in listed}
    assert "gpu-1" in ctl("sim", "list").out
    assert ctl("sim", "fail", "one", "--reason", "hot").out == "fail: one\n"
    wait_state(ctl, "one", "faulty")
    assert "hot" in device(ctl, "one")["reason"]
    assert ctl("sim", "recover", "one").out == "recover: one\n"
    wait_state(ctl, "one", "idle")
    ctl("sim", "hang", "one")
    ctl("sim", "recover", "one")
    ctl("sim", "hang", "--seconds", "0.1")
    ctl("sim", "recover")
    ctl("sim", "remove", "one")
    ctl("sim", "remove", "part")
    wait_until(lambda: "one" not in states(ctl))
    assert "heteroctl: the simulator refuses: " in ctl("sim", "remove", "one", code=1).err
