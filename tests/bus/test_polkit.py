"""polkit decides on whom uid and groups do not let in: each of its answers, none, and none in time."""

from __future__ import annotations

import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest

from hetero_agent import names
from hetero_agent.bus import contract, polkit
from hetero_agent.bus.whomay import CAN, METHODS, Action
from hetero_agent.core.events import Allocate, Reap, Refused, Release, SetCordon
from hetero_agent.core.model import Holder
from tests.support.agent import GROUP_GID, MEMBER, OTHER_MEMBER, OUTSIDER
from tests.support.bus import PrivateBus
from tests.support.bus_service import RESOURCE, Service, record
from tests.support.calls import CallError, Client, V, busctl
from tests.support.polkit import POLICY, FakePolkit
from tests.support.wait import wait_until

DEVICE = names.device_path("0000:00:05.0")
NEEDED = "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired"


@pytest.fixture(scope="module")
def shared_bus() -> Iterator[PrivateBus]:
    private = PrivateBus(extra=POLICY)
    yield private
    private.close()


@pytest.fixture(scope="module")
def shared_authority(shared_bus: PrivateBus) -> Iterator[FakePolkit]:
    with FakePolkit(shared_bus) as one:
        yield one


@pytest.fixture
def authority(shared_authority: FakePolkit, service: Service) -> FakePolkit:
    """polkit, which says no to everything so far."""
    shared_authority.forget()
    service.events.clear()
    return shared_authority


@pytest.fixture
def outsider(shared_bus: PrivateBus) -> Iterator[Client]:
    with Client(shared_bus, OUTSIDER, listen=False) as one:
        yield one


@pytest.fixture(scope="module")
def member(shared_bus: PrivateBus) -> Iterator[Client]:
    with Client(shared_bus, MEMBER, [GROUP_GID], listen=False) as one:
        yield one


@pytest.fixture(scope="module")
def root(shared_bus: PrivateBus) -> Iterator[Client]:
    with Client(shared_bus, listen=False) as one:
        yield one


@pytest.fixture(autouse=True)
def no_leases_left(service: Service, root: Client) -> Iterator[None]:
    yield
    for number, lease in enumerate(list(service.engine.view.leases)):
        root.release(f"tidy-{time.monotonic_ns()}-{number}", names.lease_path(lease))
    wait_until(lambda: not service.engine.view.leases, what="no leases")


def refused(service: Service) -> list[Refused]:
    return [one for one in service.events if isinstance(one, Refused)]


def send_allocate(client: Client, request: str, interactive: bool = False) -> int:
    arguments = (request, RESOURCE, 1, {})
    return client.send(names.ROOT, names.MANAGER, "Allocate", "ssua{sv}", *arguments, interactive=interactive)


def error_of(client: Client, number: int) -> CallError:
    with pytest.raises(CallError) as caught:
        client.receive(number)
    return caught.value


# -- answers ------------------------------------------------------------------------------------
def test_yes_grants_and_the_trail_says_by_what(
    service: Service, authority: FakePolkit, outsider: Client, root: Client
) -> None:
    authority.answers[Action.ALLOCATE] = "yes"
    lease, manifest = outsider.allocate("yes", RESOURCE)
    (question,) = authority.asked
    assert question.subject == outsider.unique_name
    assert question.action == "org.heteroagent.Agent1.allocate"
    assert question.details == {"resource": RESOURCE, "count": "1"}
    assert not question.interactive
    (event,) = (one for one in service.events if isinstance(one, Allocate))
    assert (event.actor.uid, event.actor.authority) == (OUTSIDER, Action.ALLOCATE)
    path = names.device_path(manifest["devices"][0])
    granted = root.call(path, names.DEVICE, "GetHistory", "u", 1)[0]
    assert (granted["lease"], granted["uid"], granted["authority"]) == (lease, OUTSIDER, Action.ALLOCATE)
    assert authority.cancelled == []


def test_no_is_not_authorized(service: Service, authority: FakePolkit, outsider: Client) -> None:
    with pytest.raises(CallError) as caught:
        outsider.allocate("no", RESOURCE)
    assert caught.value.name == "NotAuthorized"
    assert f"uid {OUTSIDER} is not in group" in caught.value.text
    assert "polkit: no to org.heteroagent.Agent1.allocate" in caught.value.text
    (told,) = refused(service)
    assert (told.method, told.error, told.actor.uid) == ("Allocate", "NotAuthorized", OUTSIDER)
    assert told.actor.authority == ""


def test_a_challenge_without_the_flag_is_told_at_once(
    service: Service, authority: FakePolkit, outsider: Client
) -> None:
    authority.answers[Action.ALLOCATE] = "challenge"
    error = error_of(outsider, send_allocate(outsider, "challenge"))
    assert error.name == NEEDED
    assert "the call does not allow to ask" in error.text
    assert [one.interactive for one in authority.asked] == [False]
    assert authority.cancelled == []
    assert [(one.error, one.request_id) for one in refused(service)] == [
        ("InteractiveAuthorizationRequired", "challenge")
    ]


def test_with_the_flag_a_person_is_asked(authority: FakePolkit, outsider: Client) -> None:
    authority.answers[Action.ALLOCATE] = "hold"
    number = send_allocate(outsider, "person", interactive=True)
    question = authority.wait_asked()
    assert question.interactive
    authority.answer(question.ticket, "yes")
    lease, _ = outsider.receive(number).value
    assert outsider.properties(lease, names.LEASE)["OwnerUid"] == OUTSIDER


def test_a_person_dismisses(authority: FakePolkit, outsider: Client) -> None:
    authority.answers[Action.ALLOCATE] = "hold"
    number = send_allocate(outsider, "dismiss", interactive=True)
    authority.answer(authority.wait_asked().ticket, "dismissed")
    error = error_of(outsider, number)
    assert error.name == "NotAuthorized"
    assert "the authentication was dismissed" in error.text


def test_there_is_nobody_to_ask(authority: FakePolkit, outsider: Client) -> None:
    authority.answers[Action.ALLOCATE] = "challenge"
    error = error_of(outsider, send_allocate(outsider, "nobody", interactive=True))
    assert error.name == NEEDED
    assert "nobody to ask" in error.text


@pytest.mark.parametrize(
    ("answer", "text"), [("error", "polkit has a cold"), ("nonsense", "polkit's answer can't be read")]
)
def test_polkit_fails(authority: FakePolkit, outsider: Client, answer: str, text: str) -> None:
    authority.answers[Action.ALLOCATE] = answer
    error = error_of(outsider, send_allocate(outsider, answer))
    assert error.name == "NotAuthorized"
    assert text in error.text


def test_busctl_says_whether_to_ask(shared_bus: PrivateBus, authority: FakePolkit) -> None:
    authority.answers[Action.CORDON] = "challenge"
    for flag, asked in (("no", False), ("yes", True)):
        call = ["call", names.BUS_NAME, DEVICE, names.DEVICE, "Cordon", "ss", f"busctl-{flag}", "fan"]
        done = busctl(shared_bus, f"--allow-interactive-authorization={flag}", *call, uid=OUTSIDER)
        assert done.returncode != 0
        assert authority.asked[-1].interactive is asked


# -- who is never asked about -------------------------------------------------------------------
def test_root_and_the_group_never_ask(
    authority: FakePolkit, member: Client, root: Client, outsider: Client
) -> None:
    for number, client in enumerate((member, root)):
        lease, _ = client.allocate(f"known-{number}", RESOURCE)
        assert client.manager("Explain", "sua{sv}", RESOURCE, 1, {})[0]["verdict"] == "now"
        assert client.manager("CanAllocate") == "yes"
        assert root.release(f"known-{number}", lease) is True
    root.call(DEVICE, names.DEVICE, "Cordon", "ss", "known", "fan")
    root.call(DEVICE, names.DEVICE, "Uncordon", "s", "known")
    assert root.manager("CanReap") == "yes"
    assert outsider.call(DEVICE, names.DEVICE, "GetNodes") == []
    assert authority.asked == []


@pytest.mark.parametrize("member_name", ["Confirm", "Register", "GetManifest"])
def test_what_has_no_action_is_not_asked(
    authority: FakePolkit, member: Client, outsider: Client, member_name: str
) -> None:
    authority.answers = dict.fromkeys(Action, "yes")
    lease, _ = member.allocate(f"plain-{member_name}", RESOURCE)
    calls = {
        "Confirm": (names.ROOT, names.MANAGER, "soa{sv}", ("r", lease, {})),
        "Register": (names.ROOT, names.MANAGER, "susa{sv}", ("r", 1, "k", {})),
        "GetManifest": (lease, names.LEASE, "", ()),
    }
    path, interface, signature, values = calls[member_name]
    with pytest.raises(CallError) as caught:
        outsider.call(path, interface, member_name, signature, *values)
    assert caught.value.name in ("NotOwner", "NotAuthorized")
    assert authority.asked == []


def test_the_owner_uid_stays_roots(authority: FakePolkit, outsider: Client) -> None:
    authority.answers[Action.ALLOCATE] = "yes"
    with pytest.raises(CallError) as caught:
        outsider.allocate("other", RESOURCE, 1, {"owner-uid": V("u", MEMBER)})
    assert caught.value.name == "NotAuthorized"


def test_what_is_wrong_is_said_before_anybody_is_asked(authority: FakePolkit, outsider: Client) -> None:
    with pytest.raises(CallError) as caught:
        outsider.allocate("wrong", "no resource")
    assert caught.value.name == "InvalidArgument"
    with pytest.raises(CallError) as caught:
        outsider.manager("Reap", "soa(ut)", "r", names.device_path("0000:99:00.0"), [(4242, 7)])
    assert caught.value.name == "NotFound"
    assert authority.asked == []


# -- time, silence, absence ---------------------------------------------------------------------
def test_a_polkit_that_hangs_is_given_up_and_holds_up_nobody(
    authority: FakePolkit, outsider: Client, member: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polkit, "WITHIN", 60.0)
    authority.answers[Action.ALLOCATE] = "hold"
    number = send_allocate(outsider, "hang")
    question = authority.wait_asked()
    lease, _ = member.allocate("meanwhile", RESOURCE)
    assert outsider.call(DEVICE, names.DEVICE, "GetNodes") == []
    assert authority.cancelled == [], "others were answered while it was still waited for"
    authority.answer(question.ticket, "no")
    assert error_of(outsider, number).name == "NotAuthorized"
    monkeypatch.setattr(polkit, "WITHIN", 0.5)
    number = send_allocate(outsider, "hang longer")
    question = authority.wait_asked(2)
    error = error_of(outsider, number)
    assert error.name == "NotAuthorized"
    assert "polkit did not answer within 0.5 s" in error.text
    wait_until(lambda: authority.cancelled == [question.ticket], what="the question taken back")
    assert member.release("meanwhile", lease) is True


def test_a_person_that_does_not_answer_is_given_up(
    authority: FakePolkit, outsider: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polkit, "WITHIN_FOR_A_PERSON", 0.5)
    authority.answers[Action.ALLOCATE] = "hold"
    number = send_allocate(outsider, "away", interactive=True)
    question = authority.wait_asked()
    error = error_of(outsider, number)
    assert error.name == "NotAuthorized"
    assert "nobody has authenticated within 0.5 s" in error.text
    wait_until(lambda: authority.cancelled == [question.ticket], what="the question taken back")


def test_a_caller_that_leaves_gets_nothing(
    shared_bus: PrivateBus, service: Service, authority: FakePolkit
) -> None:
    authority.answers[Action.ALLOCATE] = "hold"
    with Client(shared_bus, OUTSIDER, listen=False) as client:
        send_allocate(client, "leaves", interactive=True)
        question = authority.wait_asked()
        client.kill()
    wait_until(lambda: authority.cancelled == [question.ticket], what="the question taken back")
    authority.answer(question.ticket, "yes")
    assert service.do(lambda: service.service._polkit._open) == {}
    assert not [one for one in service.events if isinstance(one, Allocate)]


def test_a_polkit_that_dies_in_mid_question(authority: FakePolkit, outsider: Client) -> None:
    authority.answers[Action.ALLOCATE] = "hold"
    number = send_allocate(outsider, "dies")
    authority.wait_asked()
    authority.leave()
    error = error_of(outsider, number)
    authority.come()
    assert error.name == "NotAuthorized"


def test_without_polkit_all_is_as_if_there_never_was_one(authority: FakePolkit, outsider: Client) -> None:
    authority.leave()
    try:
        error = error_of(outsider, send_allocate(outsider, "absent", interactive=True))
        assert error.name == "NotAuthorized"
        assert f"uid {OUTSIDER} is not in group" in error.text
        assert "polkit" not in error.text
        assert outsider.manager("CanAllocate") == "no"
        with pytest.raises(CallError) as caught:
            outsider.call(DEVICE, names.DEVICE, "Cordon", "ss", "absent", "fan")
        assert caught.value.name == "NotAuthorized"
    finally:
        authority.come()


def test_questions_of_one_uid_are_few(
    shared_bus: PrivateBus, service: Service, authority: FakePolkit, outsider: Client
) -> None:
    authority.answers[Action.ALLOCATE] = "hold"
    with Client(shared_bus, OUTSIDER, listen=False) as second:
        numbers = [send_allocate(outsider, f"few-{number}") for number in range(polkit.MAX_OF_UID - 1)]
        authority.wait_asked(polkit.MAX_OF_UID - 1)
        last = send_allocate(second, "few-last")
        authority.wait_asked(polkit.MAX_OF_UID)
        error = error_of(outsider, send_allocate(outsider, "one-more"))
        assert error.name == "LimitExceeded"
        assert f"for uid {OUTSIDER}" in error.text
        # another uid has its own
        with Client(shared_bus, OTHER_MEMBER, listen=False) as other:
            another = send_allocate(other, "mine")
            question = authority.wait_asked(polkit.MAX_OF_UID + 1)
            authority.answer(question.ticket, "no")
            assert error_of(other, another).name == "NotAuthorized"
        for question in authority.asked[:-1]:
            authority.answer(question.ticket, "no")
        assert error_of(second, last).name == "NotAuthorized"
    assert {error_of(outsider, number).name for number in numbers} == {"NotAuthorized"}
    assert service.do(lambda: (service.service._polkit._open, service.service._polkit._of_uid)) == ({}, {})


def test_questions_in_all_are_bounded(
    shared_bus: PrivateBus, authority: FakePolkit, outsider: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polkit, "MAX_IN_ALL", 2)
    authority.answers[Action.ALLOCATE] = "hold"
    with Client(shared_bus, OTHER_MEMBER, listen=False) as other:
        numbers = [send_allocate(outsider, f"all-{number}") for number in range(2)]
        authority.wait_asked(2)
        error = error_of(other, send_allocate(other, "all"))
    assert (error.name, "in all" in error.text) == ("LimitExceeded", True)
    for question in authority.asked:
        authority.answer(question.ticket, "no")
    assert [error_of(outsider, number).name for number in numbers] == ["NotAuthorized"] * 2


# -- what polkit may allow ----------------------------------------------------------------------
def test_release_of_anothers_lease(
    service: Service, authority: FakePolkit, member: Client, outsider: Client
) -> None:
    lease, _ = member.allocate("theirs", RESOURCE)
    with pytest.raises(CallError) as caught:
        outsider.release("others", lease)
    assert caught.value.name == "NotOwner"
    assert "polkit: no to" in caught.value.text
    authority.answers[Action.RELEASE_OTHERS] = "yes"
    assert outsider.release("others", lease) is True
    assert authority.asked[-1].details == {
        "lease": names.lease_id_of(lease),
        "owner": str(MEMBER),
        "resource": RESOURCE,
    }
    (event,) = (one for one in service.events if isinstance(one, Release))
    assert (event.actor.uid, event.actor.authority) == (OUTSIDER, Action.RELEASE_OTHERS)
    wait_until(lambda: names.lease_id_of(lease) not in service.engine.view.leases, what="the lease's end")
    # a retry whose answer was lost has it from memory
    assert outsider.release("others", lease) is True


def test_a_lease_that_ends_while_polkit_thinks(
    service: Service, authority: FakePolkit, member: Client, outsider: Client
) -> None:
    lease, _ = member.allocate("brief", RESOURCE)
    authority.answers[Action.RELEASE_OTHERS] = "hold"
    number = outsider.send(names.ROOT, names.MANAGER, "Release", "so", "late", lease)
    question = authority.wait_asked()
    assert member.release("mine", lease) is True
    wait_until(lambda: names.lease_id_of(lease) not in service.engine.view.leases, what="the lease's end")
    authority.answer(question.ticket, "yes")
    error = error_of(outsider, number)
    assert error.name == "Unavailable"
    assert "changed while polkit was asked" in error.text


def test_cordon_and_uncordon(service: Service, authority: FakePolkit, outsider: Client, root: Client) -> None:
    authority.answers[Action.CORDON] = "yes"
    outsider.call(DEVICE, names.DEVICE, "Cordon", "ss", "c", "fan")
    assert root.device("0000:00:05.0")["Cordoned"] is True
    outsider.call(DEVICE, names.DEVICE, "Uncordon", "s", "u")
    assert root.device("0000:00:05.0")["Cordoned"] is False
    assert {one.action for one in authority.asked} == {Action.CORDON}
    assert authority.asked[0].details == {"device": "0000:00:05.0", "resource": RESOURCE}
    events = [one for one in service.events if isinstance(one, SetCordon)]
    assert [one.actor.authority for one in events] == [Action.CORDON] * 2


def test_a_device_that_goes_while_polkit_thinks(
    service: Service, authority: FakePolkit, outsider: Client
) -> None:
    brief = record(77)
    everything = [one.record for one in service.engine.view.devices.values()]
    service.do(service.observe, *everything, brief)
    authority.answers[Action.CORDON] = "hold"
    path = names.device_path(brief.id)
    number = outsider.send(path, names.DEVICE, "Cordon", "ss", "gone", "fan")
    question = authority.wait_asked()
    service.do(service.observe, *everything, gone=[brief.id])
    wait_until(lambda: brief.id not in service.engine.view.devices, what="its end")
    authority.answer(question.ticket, "yes")
    assert error_of(outsider, number).name == "org.freedesktop.DBus.Error.UnknownObject"
    assert not [one for one in service.events if isinstance(one, SetCordon)]


def test_looking_at_holders_and_ending_them(
    service: Service, authority: FakePolkit, member: Client, outsider: Client
) -> None:
    lease, manifest = member.allocate("held", RESOURCE)
    device = manifest["devices"][0]
    service.hold(device, Holder(pid=4242, start=7, uids=(MEMBER,) * 4, comm="x", since=1))
    path = names.device_path(device)
    with pytest.raises(CallError) as caught:
        outsider.call(path, names.DEVICE, "GetHolders")
    assert caught.value.name == "NotAuthorized"
    authority.answers[Action.REAP] = "yes"
    assert [one["pid"] for one in outsider.call(path, names.DEVICE, "GetHolders")] == [4242]
    with pytest.raises(CallError) as caught:
        outsider.manager("Reap", "soa(ut)", "reap", path, [(4242, 7)])
    assert caught.value.name == "Unavailable"
    assert authority.asked[-1].details == {
        "device": device,
        "resource": RESOURCE,
        "lease": names.lease_id_of(lease),
        "owner": str(MEMBER),
    }
    (event,) = (one for one in service.events if isinstance(one, Reap))
    assert event.actor.authority == Action.REAP
    service.hold(device)


def test_explain_is_for_those_who_could(authority: FakePolkit, outsider: Client) -> None:
    with pytest.raises(CallError) as caught:
        outsider.manager("Explain", "sua{sv}", RESOURCE, 1, {}, interactive=True)
    assert caught.value.name == "NotAuthorized"
    for answer in ("challenge", "yes"):
        authority.answers[Action.ALLOCATE] = answer
        summary, _ = outsider.manager("Explain", "sua{sv}", RESOURCE, 1, {}, interactive=True)
        assert summary["verdict"] == "now"
    assert not any(one.interactive for one in authority.asked)


# -- Can... -------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer", ["yes", "no", "challenge"])
@pytest.mark.parametrize("name", CAN)
def test_can(authority: FakePolkit, outsider: Client, root: Client, name: str, answer: str) -> None:
    action = CAN[name].action
    assert action is not None
    authority.answers[action] = answer
    assert outsider.manager(name, interactive=True) == answer
    assert [(one.action, one.details, one.interactive) for one in authority.asked] == [(action, {}, False)]
    assert root.manager(name) == "yes"
    assert len(authority.asked) == 1


def test_can_says_when_polkit_does_not(
    authority: FakePolkit, outsider: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polkit, "WITHIN", 0.3)
    authority.answers[Action.REAP] = "hold"
    with pytest.raises(CallError) as caught:
        outsider.manager("CanReap")
    assert caught.value.name == "Unavailable"
    assert "polkit did not answer" in caught.value.text


# -- the actions --------------------------------------------------------------------------------
def test_the_policy_file_is_well_formed() -> None:
    done = subprocess.run(
        ["xmllint", "--noout", "--nonet", str(_file())], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_policy_file_has_the_actions_of_the_table() -> None:
    found = {one.get("id"): one for one in ET.parse(_file()).getroot().findall("action")}
    assert found.keys() == set(Action)
    assert {rule.action for rule in METHODS.values() if rule.action} == set(Action)
    assert {rule.action for rule in CAN.values()} == set(Action)
    kept = ("auth_admin_keep",) * 3
    assert {
        name: tuple(str(one.findtext(f"defaults/allow_{who}")) for who in ("any", "inactive", "active"))
        for name, one in found.items()
    } == {**dict.fromkeys(Action, kept), Action.ALLOCATE: (*kept[:2], "yes")}
    for one in found.values():
        assert one.findtext("description")
        assert str(one.findtext("message")).startswith("Authentication is required to ")
        # without it the agent, which is not root, could not ask about others
        (owner,) = one.findall("annotate")
        assert (owner.get("key"), owner.text) == ("org.freedesktop.policykit.owner", "unix-user:hetero-agent")


def _file() -> str:
    return str(contract.directory() / f"{names.BUS_NAME}.policy")
