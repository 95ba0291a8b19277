"""What heteroctl says when something is wrong: cause, holder, next step, exit code; and doctor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dbus_next import Variant

from hetero_agent import names
from hetero_agent.access.remote import Remote
from hetero_agent.cli import doctor, hostchecks, listing, main
from hetero_agent.client import CallTimeout
from hetero_agent.core.effects import ErrorKind
from tests.support.bus import PrivateBus
from tests.support.ctl import Ctl
from tests.support.process import ROOT
from tests.support.standin import (
    MANAGER_PROPERTIES,
    Problem,
    StandIn,
    device_row,
    lease_properties,
    snapshot,
)
from tests.support.wait import wait_until

LEASE = "0123456789abcdef0123456789abcdef"

CODES = {
    ErrorKind.NOT_READY: 75,
    ErrorKind.INVALID_ARGUMENT: 2,
    ErrorKind.NOT_FOUND: 1,
    ErrorKind.UNAVAILABLE: 75,
    ErrorKind.LIMIT_EXCEEDED: 75,
    ErrorKind.QUEUE_FULL: 75,
    ErrorKind.NOT_AUTHORIZED: 77,
    ErrorKind.NOT_OWNER: 77,
    ErrorKind.REQUEST_CONFLICT: 1,
    ErrorKind.REQUEST_SPENT: 1,
    ErrorKind.LEASE_ENDED: 1,
    ErrorKind.TIMEOUT: 124,
    ErrorKind.PROTOCOL_UNSUPPORTED: 1,
    ErrorKind.NOT_SUPPORTED: 1,
    ErrorKind.STORE_FAILED: 1,
    ErrorKind.INTERNAL: 1,
}


@pytest.fixture
def standin(bus: PrivateBus) -> Iterator[StandIn]:
    one = StandIn(bus.address)
    yield one.start()
    one.close()


@pytest.fixture
def ctl(bus: PrivateBus) -> Ctl:
    return Ctl(bus.address)


def explanation(verdict: str, text: str = "", *rows: list[Any]) -> Any:
    summary = {"verdict": Variant("s", verdict), "text": Variant("s", text)}
    return "a{sv}a(ssbs)", [summary, list(rows)]


# -- nobody there ---------------------------------------------------------------------------------
VERBS = [
    [],
    ["list"],
    ["status"],
    ["show", "x"],
    ["leases"],
    ["holders", "x"],
    ["history", "x"],
    ["watch"],
    ["explain", "-r", "a.b/c"],
    ["allocate", "-r", "a.b/c"],
    ["confirm", LEASE],
    ["release", LEASE],
    ["cordon", "x"],
    ["uncordon", "x"],
    ["reap", "x", "--all"],
    ["run", "-r", "a.b/c", "--", "true"],
]


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_no_bus_is_69_for_every_verb(tmp_path: Path, arguments: list[str]) -> None:
    result = Ctl(f"unix:path={tmp_path}/bus")(*arguments, code=69)
    assert result.out == ""
    first, second = result.err.splitlines()
    assert first == f"heteroctl: no bus at unix:path={tmp_path}/bus: No such file or directory"
    assert second.startswith("  next: ")


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_no_agent_is_69_for_every_verb(ctl: Ctl, arguments: list[str]) -> None:
    first, second = ctl(*arguments, code=69).err.splitlines()
    assert "org.heteroagent.Agent1) is not on the bus" in first
    assert "systemctl start hetero-agent" in second


def test_the_bus_option_names_the_bus(bus: PrivateBus, standin: StandIn, tmp_path: Path) -> None:
    elsewhere = Ctl(f"unix:path={tmp_path}/bus")
    assert elsewhere.json("--bus", bus.address, "status")["version"] == "9.9"
    assert elsewhere.json("status", "--bus", bus.address)["version"] == "9.9"


def test_no_simulator_is_69(tmp_path: Path) -> None:
    result = Ctl("unix:path=/x", sim=tmp_path / "none")("sim", "list", code=69)
    assert result.err.startswith(f"heteroctl: no answer from the simulator at {tmp_path}/none")
    assert "(there is none at this path)" in result.err


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b'{"ok": false, "error": "no\\u001b[31m"}\n', "the simulator refuses: no\\x1b[31m"),
        (b"hello\n", "the simulator's answer is not JSON"),
        (b"[1]\n", "the simulator's answer is not an object"),
        (b"", "the simulator's answer is not JSON"),
    ],
)
def test_a_simulator_that_refuses_or_babbles_is_1(tmp_path: Path, answer: bytes, text: str) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        got: list[bytes] = []

        def serve() -> None:
            link, _ = server.accept()
            with link:
                got.append(link.recv(1000))
                link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        # --socket goes before $HETERO_SIM_SOCKET
        ctl = Ctl("unix:path=/x", sim=tmp_path / "none")
        result = ctl("sim", "--socket", str(path), "fail", "npu-0", "--reason", "hot", code=1)
        thread.join(5)
    assert result.err.splitlines()[0] == f"heteroctl: {text}"
    assert json.loads(got[0]) == {"verb": "fail", "id": "npu-0", "reason": "hot"}


def test_a_simulator_of_another_user_is_77(tmp_path: Path) -> None:
    path = Path("/tmp") / f"hetero-agent-ctl-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o600)
        try:
            result = Ctl("unix:path=/x", uid=65534, sim=path)("sim", "list", code=77)
        finally:
            path.unlink()
    assert "only the simulator's own user and root may" in result.err


# -- errors by name -------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_error_has_cause_next_step_and_exit_code(standin: StandIn, ctl: Ctl, kind: ErrorKind) -> None:
    standin.answers["Release"] = Problem(kind.value, "the cause\x07")
    result = ctl("release", LEASE, code=CODES[kind])
    assert result.err.splitlines()[0] == "heteroctl: the cause\\x07"
    documents = ctl("release", LEASE, "--json", code=CODES[kind])
    error = documents.json["error"]
    assert error["cause"] == "the cause\\x07"
    assert error["exit"] == CODES[kind]
    assert error["name"] == names.ERROR_PREFIX + kind.value
    assert documents.err == result.err
    if kind not in (ErrorKind.TIMEOUT, ErrorKind.UNAVAILABLE, ErrorKind.PROTOCOL_UNSUPPORTED):
        assert result.err.splitlines()[1] == f"  next: {error['next']}"


@pytest.mark.parametrize(
    "kind", [kind for kind in ErrorKind if CODES[kind] == 1 and kind is not ErrorKind.NOT_FOUND]
)
def test_failures_of_run_are_125(standin: StandIn, ctl: Ctl, kind: ErrorKind) -> None:
    standin.answers["Allocate"] = Problem(kind.value)
    ctl("run", "-r", "a.b/c", "--", "true", code=125)


def test_who_holds_what_is_wanted_is_said(standin: StandIn, ctl: Ctl) -> None:
    standin.answers["Allocate"] = Problem("Unavailable", "1 of 2 free")
    standin.answers["Explain"] = explanation(
        "later",
        "1 of 2 are free",
        ["npu-0", "in-use", False, "in-use"],
        ["npu-1", "idle", True, ""],
        ["npu-2", "occupied", False, "occupied (held by 1 process)"],
        ["npu-3", "idle", False, "not on NUMA node 1"],
        ["npu-4", "in-use", False, "not on NUMA node 1"],
    )
    path = names.lease_path(LEASE)
    leases = {path: {names.LEASE: lease_properties(LEASE, uid=1000, client="train")}}
    standin.answers["GetManagedObjects"] = ("a{oa{sa{sv}}}", [leases])
    for verb in (["allocate", "-r", "a.b/c", "-n", "2"], ["run", "-r", "a.b/c", "-n", "2", "--", "true"]):
        lines = ctl(*verb, code=75).err.splitlines()
        assert lines[0] == "heteroctl: 1 of 2 free"
        assert lines[1].startswith("  held: npu-0 in-use, lease 01234567 of uid 1000, train, for ")
        assert lines[2] == "  held: npu-2 occupied (held by 1 process)"
        assert lines[3] == "  held: npu-4 in-use (not on NUMA node 1)"
        assert "--wait" in lines[4]


@pytest.mark.parametrize("error", ["Unavailable", "NotFound", "LimitExceeded", "InvalidArgument"])
def test_what_this_host_never_has_is_78_at_once(standin: StandIn, ctl: Ctl, error: str) -> None:
    standin.answers["Allocate"] = Problem(error)
    standin.answers["Explain"] = explanation("never", "this host has 2 of a.b/c, not 9")
    for verb in (["allocate", "-r", "a.b/c"], ["run", "-r", "a.b/c", "--wait", "300", "--", "true"]):
        result = ctl(*verb, code=78)
        assert result.err.splitlines()[0] == "heteroctl: this host has 2 of a.b/c, not 9"


def test_waiting_in_vain_is_124_with_the_same_request_id(standin: StandIn, ctl: Ctl) -> None:
    standin.answers["Allocate"] = Problem("Unavailable", "none free")
    standin.answers["Explain"] = explanation("later", "none free")
    process = ctl.spawn("run", "-r", "a.b/c", "--wait", "5", "--", "true")
    wait_until(lambda: "Allocate" in standin.members())
    for _ in range(3):  # each report is a reason to try again
        before = standin.members().count("Allocate")
        wait_until(lambda before=before: _reported(standin) and standin.members().count("Allocate") > before)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 124
    assert err.splitlines()[0] == "heteroctl: waited 5 s in vain: none free"
    assert len({call.body[0] for call in standin.calls if call.member == "Allocate"}) == 1


def _reported(standin: StandIn) -> bool:
    standin.emit(names.ROOT, names.MANAGER, "Report", "ustba{sa{su}}", 1, "e", 1, True, {})
    return True


def test_a_uid_that_the_user_database_lacks_is_told_so(bus: PrivateBus) -> None:
    lines = Ctl(bus.address, uid=54321)("status", code=69).err.splitlines()
    assert lines[0] == (
        f"heteroctl: the bus at {bus.address} lets uid 54321 not on: the user database has no such user"
    )
    assert lines[1].startswith("  next: as a user with an entry")


def test_a_call_without_an_answer_can_be_interrupted(
    standin: StandIn, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its deadline, 20 s, which the library's own test has."""
    standin.answers["Release"] = None
    process = ctl.spawn("release", LEASE)
    wait_until(lambda: "Release" in standin.members())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_fault_of_our_own_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("of our own\n")

    monkeypatch.setattr(listing, "version", broken)
    assert main.main(["version"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "heteroctl: a fault in heteroctl itself: RuntimeError: of our own\\x0a",
        "  next: please report it, with what HETEROCTL_DEBUG=1 makes it print",
    ]
    monkeypatch.setenv("HETEROCTL_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main.main(["version"])


def test_short_and_ambiguous_lease_names(standin: StandIn, ctl: Ctl) -> None:
    other = "0123" + "f" * 28
    objects = {names.lease_path(one): {names.LEASE: lease_properties(one)} for one in (LEASE, other)}
    standin.answers["GetManagedObjects"] = ("a{oa{sa{sv}}}", [objects])
    standin.answers["Release"] = ("b", [True])
    assert "is too short for a lease" in ctl("release", "012", code=2).err
    assert "'0123' stands for 2 leases" in ctl("release", "0123", code=2).err
    assert "'0123' stands for 2 leases" in ctl("show", "0123", code=2).err
    assert "no lease 'ffff'" in ctl("release", "ffff", code=1).err
    assert ctl("release", "0123F").out == "lease 0123ffff released\n"
    standin.answers["Release"] = ("b", [False])
    assert ctl("release", names.lease_path(LEASE)).out == "lease 01234567 had ended already\n"


# -- doctor ---------------------------------------------------------------------------------------
def findings(ctl: Ctl, code: int = 1) -> dict[str, list[tuple[str, str, str]]]:
    """Subject -> (level, text, next) of each finding."""
    document = ctl.json("doctor", code=code)
    assert document["well"] is (code == 0)
    found: dict[str, list[tuple[str, str, str]]] = {}
    for one in document["findings"]:
        found.setdefault(one["subject"], []).append((one["level"], one["text"], one["next"]))
    return found


def test_doctor_without_a_bus(tmp_path: Path) -> None:
    level, text, step = findings(Ctl(f"unix:path={tmp_path}/bus"))["bus"][0]
    assert (level, text) == ("wrong", f"no bus at unix:path={tmp_path}/bus: No such file or directory")
    assert "systemctl status dbus" in step


def test_doctor_without_an_agent(ctl: Ctl) -> None:
    found = findings(ctl)
    assert found["bus"][0][0] == "ok"
    assert found["agent"] == [("wrong", "it is not on the bus", "systemctl start hetero-agent")]
    assert found["bus policy"][0][0] in ("ok", "wrong")


def test_doctor_says_who_may_not_lease(standin: StandIn, ctl: Ctl) -> None:
    for name in ("CanAllocate", "CanReleaseOthers", "CanCordon", "CanReap"):
        standin.answers[name] = ("s", ["no"])
    standin.answers["Explain"] = Problem("NotAuthorized", "uid 5 is not in group hetero")
    ((level, text, step),) = findings(ctl)["rights"]
    assert (level, text) == ("wrong", "you may not lease devices: uid 5 is not in group hetero")
    assert "adduser" in step


def test_doctor_says_what_polkit_would_allow(standin: StandIn, ctl: Ctl) -> None:
    for name in ("CanAllocate", "CanCordon", "CanReap"):
        standin.answers[name] = ("s", ["challenge"])
    assert [one[:2] for one in findings(ctl)["rights"]] == [
        ("note", "you may lease devices once you have authenticated"),
        ("ok", "you may end others' leases"),
        ("ok", "once you have authenticated you may cordon devices, see and end holders"),
    ]
    standin.answers["CanReap"] = Problem("Unavailable", "CanReap: polkit did not answer within 5 s")
    assert findings(ctl)["rights"] == [
        ("wrong", "CanReap: polkit did not answer within 5 s", "systemctl status polkit")
    ]


def test_doctor_says_why_there_are_no_devices(standin: StandIn, ctl: Ctl) -> None:
    found = findings(ctl)
    assert found["rights"][0][:2] == ("ok", "you may lease devices")
    level, text, _ = found["devices"][0]
    assert level == "wrong"
    assert text.startswith("none: ")
    standin.answers["GetSnapshot"] = snapshot(complete=False)
    standin.answers["GetAll"] = ("a{sv}", [{**MANAGER_PROPERTIES, "Ready": Variant("b", False)}])
    found = findings(ctl)
    assert found["devices"][0][1] == "none: the agent is still looking"
    assert found["agent"][1][1] == "it has not seen all devices yet; nothing can be leased"


def test_doctor_looks_at_states_nodes_and_limits(standin: StandIn, ctl: Ctl, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.touch()
    standin.answers["Explain"] = Problem("NotFound")
    standin.answers["GetSnapshot"] = snapshot(
        device_row("npu-0"),
        device_row("npu-1", "faulty", reason="reclaim-timeout"),
        device_row("npu-2", "occupied", reason="pid 5"),
        device_row("npu-3", "offline", reason="vfio"),
        device_row("npu-4", "lost", lease=LEASE),
    )
    nodes = [
        [str(good), "own", "char", 1, 4],
        [str(tmp_path / "no-control"), "control", "char", 1, 2],
        [str(tmp_path / "gone"), "own", "char", 1, 5],
    ]
    remarks = [["wrong", "/dev/npu0 is open to every user (0666)"], ["note", "user 1000 sits at seat0"]]
    access = {
        "path": Variant("s", str(good)),
        "role": Variant("s", "own"),
        "mode": Variant("u", 0o666),
        "uid": Variant("u", 0),
        "gid": Variant("u", 0),
        "entries": Variant("a{us}", {1000: "rw-"}),
        "remarks": Variant("a(ss)", remarks),
    }
    # two devices have the node, and one of them vanished
    standin.answers["GetAccess"] = Problem("NotFound")
    for name in ("npu-0", "npu-1"):
        standin.answers[names.device_path(name), "GetAccess"] = ("aa{sv}", [[access]])
    standin.answers["GetNodes"] = ("a(sssuu)", [[]])
    standin.answers[names.device_path("npu-0"), "GetNodes"] = ("a(sssuu)", [nodes])
    limits = {"MaxLeases": Variant("u", 10), "Leases": Variant("u", 9)}
    standin.answers["GetAll"] = ("a{sv}", [{**MANAGER_PROPERTIES, **limits}])
    found = findings(ctl)
    assert [text for level, text, _ in found["node"] if level == "wrong"] == [
        f"{tmp_path}/gone of npu-0 does not exist"
    ]
    assert [one[:2] for one in found["access"]] == [(level, text) for level, text in remarks]
    assert found["limits"][0][:2] == ("wrong", "Leases are nearly used up: 9 of 10")
    assert found["faulty"][0][:2] == ("wrong", "1: npu-1 (reclaim-timeout)")
    assert found["occupied"][0][:2] == ("wrong", "1: npu-2 (pid 5)")
    assert found["lost"][0][0] == "wrong"
    assert found["offline"][0][:2] == ("note", "1: npu-3 (vfio)")
    text = ctl("doctor", code=1).out
    assert f"wrong  node: {tmp_path}/gone of npu-0 does not exist\n       next: udevadm settle" in text
    assert text.splitlines()[-1].endswith(" things are wrong")


def test_doctor_keeps_what_it_has_when_one_question_is_not_answered() -> None:
    async def silent(*_: object) -> None:
        raise CallTimeout("it was not answered within 25.0 s")

    async def none(*_: object) -> tuple[()]:
        return ()

    class Agent:
        """Answers nothing but what it is; of one device not even that."""

        nodes = staticmethod(none)
        snapshot = staticmethod(silent)
        can = staticmethod(silent)

        async def status(self) -> SimpleNamespace:
            return SimpleNamespace(version="1", epoch="e", ready=True, limits={"Leases": (9, 10)})

        async def access(self, path: str) -> tuple[()]:
            return await (silent() if path == "a" else none())

    devices = [SimpleNamespace(id=name, path=name) for name in ("a", "b")]
    looked = asyncio.run(doctor._nodes(Agent(), SimpleNamespace(devices=devices)))
    assert [(one.level, one.text) for one in looked] == [("wrong", "a: it was not answered within 25.0 s")]
    found: list[hostchecks.Finding] = []
    with pytest.raises(CallTimeout):
        asyncio.run(doctor._agent(Agent(), found))
    assert [(one.level, one.subject) for one in found] == [("ok", "agent"), ("wrong", "limits")]


# -- what doctor looks at on the host -------------------------------------------------------------
def test_udev(tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    assert hostchecks.udev(tmp_path / "control").level == "ok"
    finding = hostchecks.udev(tmp_path / "none")
    assert (finding.level, finding.next) == (
        "wrong",
        "start systemd-udevd; in a container mount /run/udev read-only",
    )


def test_policy(tmp_path: Path) -> None:
    policy = tmp_path / "policy.conf"
    assert hostchecks.policy([policy]).level == "wrong"
    policy.touch()
    assert hostchecks.policy([policy]).level == "ok"


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        (
            "LoadState=loaded\\nActiveState=active\\nSubState=running\\nStatusText=4 devices",
            "ok",
            "active (running): 4 devices",
        ),
        ("LoadState=loaded\\nActiveState=failed\\nSubState=failed", "wrong", "failed (failed)"),
        ("LoadState=not-found\\nActiveState=inactive", "wrong", "hetero-agent.service is not installed"),
    ],
)
def test_unit(tmp_path: Path, answer: str, level: str, text: str) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
    systemctl.chmod(0o755)
    finding = hostchecks.unit(str(systemctl), tmp_path)
    assert finding is not None
    assert (finding.level, finding.text) == (level, text)
    assert bool(finding.next) is (level == "wrong")
    assert hostchecks.unit(str(systemctl), tmp_path / "none") is None


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        ("LoadState=loaded\\nActiveState=active", "ok", "hetero-agent-access.socket is active"),
        (
            "LoadState=loaded\\nActiveState=failed",
            "wrong",
            "hetero-agent-access.socket is failed: leases give no",
        ),
        ("LoadState=masked\\nActiveState=inactive", "note", "hetero-agent-access.socket is masked"),
        ("LoadState=not-found\\nActiveState=inactive", "", ""),
    ],
)
def test_helper(tmp_path: Path, answer: str, level: str, text: str) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
    systemctl.chmod(0o755)
    finding = hostchecks.helper(str(systemctl), tmp_path)
    assert (finding.level if finding else "") == level
    assert (finding.text if finding else "").startswith(text)
    assert (finding.next if finding else "") == (
        "systemctl enable --now hetero-agent-access.socket" if level == "wrong" else ""
    )


def test_a_helper_that_the_agent_cannot_reach(tmp_path: Path) -> None:
    problem = Remote(tmp_path / "socket", tmp_path / "grants", 8).problem
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        "#!/bin/sh\n"
        "printf 'LoadState=loaded\\nActiveState=active\\n'\n"
        f"echo 'StatusText=4 devices; {problem}; something else: x'\n"
    )
    systemctl.chmod(0o755)
    finding = hostchecks.helper(str(systemctl), tmp_path)
    assert finding is not None
    assert (finding.level, finding.next) == ("wrong", "systemctl enable --now hetero-agent-access.socket")
    assert finding.text.startswith("no access helper")
    assert finding.text.endswith("no CDI files")


_RIGHTS = (
    "CapabilityBoundingSet=cap_net_admin cap_sys_admin cap_sys_ptrace\\nPrivateNetwork=no\\nPrivateMounts=no"
)
_PLAIN = "CapabilityBoundingSet=cap_fowner\\nPrivateNetwork=yes\\nPrivateMounts=yes"


@pytest.mark.parametrize(
    ("config", "answer", "level", "text"),
    [
        (
            "move-netdevs = true",
            f"LoadState=loaded\\n{_RIGHTS}",
            "ok",
            "has what moving network interfaces needs",
        ),
        (
            "move-netdevs = true",
            f"LoadState=loaded\\n{_PLAIN}",
            "wrong",
            "lacks CapabilityBoundingSet=CAP_NET_ADMIN CAP_SYS_ADMIN CAP_SYS_PTRACE, PrivateNetwork=no,"
            " PrivateMounts=no: leases with netdev=move are refused",
        ),
        (
            "move-netdevs = true",
            f"LoadState=loaded\\n{_RIGHTS.replace('=no', '=yes', 1)}",
            "wrong",
            "lacks PrivateNetwork=no: leases",
        ),
        ("move-netdevs = true", "LoadState=not-found", "", ""),
        ("move-netdevs = false", f"LoadState=loaded\\n{_PLAIN}", "", ""),
        ("move-netdevs = 1", f"LoadState=loaded\\n{_PLAIN}", "", ""),
        ("]", f"LoadState=loaded\\n{_PLAIN}", "", ""),
    ],
)
def test_the_rights_to_move_network_interfaces(
    tmp_path: Path, config: str, answer: str, level: str, text: str
) -> None:
    systemctl, file = tmp_path / "systemctl", tmp_path / "conf"
    systemctl.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
    systemctl.chmod(0o755)
    file.write_text(f"[access]\n{config}\n")
    finding = hostchecks.network(str(systemctl), tmp_path, file)
    assert (finding.level if finding else "") == level
    assert text in (finding.text if finding else "")
    # the remedy is what the documentation says
    assert ("/access-network.conf" in (finding.next if finding else "")) is (level == "wrong")
    assert hostchecks.network(str(systemctl), tmp_path / "none", file) is None
    assert hostchecks.network(str(systemctl), tmp_path, tmp_path / "none") is None


def test_the_example_gives_what_doctor_asks_for() -> None:
    lines = (ROOT / "examples/access-network.conf").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    for key, wanted in hostchecks._MOVING.items():
        assert set(wanted) <= set(given[key].split()), key


def test_clock() -> None:
    assert hostchecks.clock(0).text == "the wall clock says 1970"
    assert hostchecks.clock(0).level == "wrong"
    assert hostchecks.clock().level == "ok"


def test_pci_devices_without_driver(tmp_path: Path) -> None:
    def add(place: str, kind: str, vendor: str, driver: str = "") -> None:
        device = tmp_path / "bus/pci/devices" / place
        device.mkdir(parents=True)
        (device / "class").write_text(kind + "\n")
        (device / "vendor").write_text(vendor + "\n")
        if driver:
            (tmp_path / driver).mkdir(exist_ok=True)
            (device / "driver").symlink_to(tmp_path / driver)

    add("0000:01:00.0", "0x030200", "0x10de")
    add("0000:02:00.0", "0x120000", "0x1d0f", "neuron")
    add("0000:03:00.0", "0x120000", "0x9999")
    add("0000:04:00.0", "0x030000", "0x1a03")  # a server's console
    add("0000:05:00.0", "0x020000", "0x8086")  # a network card
    add("0000:06:00.0", "0x038000", "0x1002", "vfio-pci")
    found = [(one.level, one.text, one.next) for one in hostchecks.pci_without_driver(tmp_path)]
    assert found == [
        (
            "wrong",
            "0000:01:00.0, a 3D controller of vendor 10de, has no driver",
            "install and load its driver (nvidia)",
        ),
        (
            "wrong",
            "0000:03:00.0, a processing accelerator of vendor 9999, has no driver",
            "install and load its driver",
        ),
        (
            "note",
            "0000:06:00.0, a display controller of vendor 1002, is given to virtual machines (vfio-pci)",
            "",
        ),
    ]
    assert hostchecks.pci_accelerators(tmp_path) == 4
    assert hostchecks.pci_accelerators(tmp_path / "none") == 0


def test_directories(tmp_path: Path) -> None:
    good, damaged = tmp_path / "run", tmp_path / "state"
    good.mkdir()
    damaged.mkdir()
    (damaged / "lasting.sqlite.corrupt-1").touch()
    found = list(hostchecks.directories([good, damaged, tmp_path / "none"]))
    assert [(one.level, one.text) for one in found] == [
        ("ok", f"{good} is writable and has room"),
        ("wrong", f"{damaged} holds files that were set aside as unusable: lasting.sqlite.corrupt-1"),
    ]
