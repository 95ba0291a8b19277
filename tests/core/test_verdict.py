"""Verdicts: when a device is suspect, unhealthy, healthy again; the latch; flapping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_agent.core.model import Health, Opinion
from hetero_agent.core.verdict import (
    SEVERITY,
    Fault,
    Finding,
    Grade,
    Rules,
    Standing,
    combine,
    doubted,
    needed,
    probed,
    reset,
    told,
)

SECOND = 1_000_000
RULES = Rules()
H = Health

WORDS = {
    "g": Finding(Grade.GOOD),
    "d": Finding(Grade.DEGRADED, "link is narrow", {"width": "4"}),
    "f": Finding(Grade.FAILED, "off the bus", {"vendor": "0xffff"}),
    "b": Finding(Grade.BROKEN, "fatal AER", {"fatal": "1"}),
    "u": Finding(Grade.UNKNOWN, "no worker"),
}


def after(probes: str, standing: Standing | None = None, every: int = 8 * SECOND) -> Standing:
    """The standing after PROBES, one letter each."""
    standing = standing or Standing()
    for number, letter in enumerate(probes, 1):
        standing = probed(standing, WORDS[letter], number * every, RULES)
    return standing


@pytest.mark.parametrize(
    ("probes", "health"),
    [
        ("", H.UNKNOWN),
        ("g", H.HEALTHY),
        ("u", H.UNKNOWN),
        ("gu", H.UNKNOWN),
        ("gug", H.HEALTHY),
        ("f", H.SUSPECT),
        ("gf", H.SUSPECT),
        ("gff", H.SUSPECT),
        ("gfff", H.UNHEALTHY),
        ("gffuf", H.UNHEALTHY),
        ("gfg", H.HEALTHY),
        ("gffgff", H.SUSPECT),
        ("gfffu", H.UNHEALTHY),
        ("gfffgg", H.UNHEALTHY),
        ("gfffggg", H.HEALTHY),
        ("gfffggfggg", H.HEALTHY),
        ("gfffggfgg", H.UNHEALTHY),
        ("gb", H.UNHEALTHY),
        ("gbggg", H.HEALTHY),
        ("gd", H.SUSPECT),
        ("gddddddd", H.SUSPECT),
        ("gdg", H.HEALTHY),
        ("gdddg", H.SUSPECT),
        ("gdddggg", H.HEALTHY),
        ("gfffd", H.UNHEALTHY),
        ("gfffddd", H.SUSPECT),
        ("gfffgdg", H.SUSPECT),
        ("gfffgdggg", H.HEALTHY),
    ],
)
def test_what_a_row_of_probes_makes(probes: str, health: Health) -> None:
    assert after(probes).health is health


def test_a_first_sign_is_being_confirmed_and_a_confirmed_one_is_not() -> None:
    assert after("gf").confirming
    assert after("gff").confirming
    assert not after("gfff").confirming
    assert after("gdd").confirming
    assert not after("gddd").confirming
    assert not after("gfffggg").confirming


@pytest.mark.parametrize(
    ("probes", "urgent"),
    [("g", False), ("gf", True), ("gff", True), ("gfff", False), ("gd", True), ("gddd", False), ("gfg", False)],
)
def test_only_what_is_to_be_confirmed_is_urgent(probes: str, urgent: bool) -> None:
    assert after(probes).urgent(RULES) is urgent


def test_the_verdict_has_reason_and_evidence_and_health_has_none() -> None:
    assert after("gfff").probes == Opinion(H.UNHEALTHY, "off the bus", {"vendor": "0xffff"})
    assert after("gfffggg").probes == Opinion(H.HEALTHY)


def test_a_flapping_device_needs_ever_more_good_probes_and_says_so() -> None:
    standing = after("g" + "fggg" * RULES.flaps)
    assert standing.health is H.HEALTHY
    standing = after("fg", standing)
    assert (standing.health, standing.confirming) == (H.SUSPECT, False)
    assert standing.reason == (
        "off the bus; flapping: 4 times within 10 min, so 6 good probes in a row are needed"
    )
    assert after("gggg", standing).health is H.SUSPECT
    well = after("ggggg", standing)
    assert (well.health, well.reason) == (H.HEALTHY, "")
    assert needed(after("f", well), RULES) == 12


def test_a_flapping_device_that_was_unhealthy_is_suspect_on_its_way_back() -> None:
    standing = after("g" + "fggg" * RULES.flaps + "fffggg")
    assert standing.health is H.SUSPECT
    assert standing.reason.startswith("was unhealthy (off the bus); flapping: 4 times")
    assert after("ggg", standing).health is H.HEALTHY


def test_flaps_of_long_ago_are_forgiven() -> None:
    standing = after("g" + "fggg" * 8)
    assert standing.health is not H.HEALTHY
    standing = probed(standing, WORDS["g"], RULES.window * 10, RULES)
    assert standing.left == ()
    assert (standing.health, standing.reason) == (H.HEALTHY, "")


def said(standing: Standing, fault: Fault, text: str = "", at: int = 0) -> Standing:
    return told(standing, fault, text or f"it is {fault}", {"line": "x"}, at, RULES)


def test_the_users_own_fault_changes_nothing() -> None:
    standing = after("g")
    assert said(standing, Fault.APPLICATION) == standing


def test_a_doubt_is_over_after_good_probes() -> None:
    standing = said(after("g"), Fault.DEGRADED)
    assert standing.kernel == Opinion(H.SUSPECT, "it is degraded", {"line": "x"})
    assert after("gg", standing).kernel.health is H.SUSPECT
    assert after("ggg", standing).kernel == Opinion(H.HEALTHY)
    assert after("ggfgg", standing).kernel.health is H.SUSPECT


@pytest.mark.parametrize("fault", [Fault.NEEDS_RESET, Fault.FATAL])
def test_a_fault_latches_until_good_probes_after_a_reset(fault: Fault) -> None:
    standing = said(after("g"), fault)
    assert standing.kernel.health is H.UNHEALTHY
    assert standing.probes.health is H.HEALTHY
    assert after("g" * 50, standing).kernel.health is H.UNHEALTHY
    standing = reset(standing)
    assert standing.urgent(RULES)
    assert after("gg", standing).kernel.health is H.UNHEALTHY
    assert after("ggfgg", standing).kernel.health is H.UNHEALTHY
    assert after("ggg", standing).kernel == Opinion(H.HEALTHY)
    assert after("ggg", said(said(after("g"), fault), Fault.RECOVERED)).latch is None


def test_a_milder_fault_never_takes_the_place_of_a_worse_one() -> None:
    standing = said(after("g"), Fault.FATAL)
    for milder in (Fault.APPLICATION, Fault.DEGRADED, Fault.NEEDS_RESET):
        standing = said(standing, milder)
        assert standing.kernel.reason == "it is fatal"
    assert said(standing, Fault.FATAL, "again").kernel.reason == "again"
    worse = said(said(after("g"), Fault.NEEDS_RESET), Fault.FATAL)
    assert worse.kernel.reason == "it is fatal"


def test_a_fault_after_the_reset_needs_another_reset() -> None:
    standing = said(reset(said(after("g"), Fault.FATAL)), Fault.NEEDS_RESET)
    assert after("g" * 50, standing).kernel == Opinion(H.UNHEALTHY, "it is fatal", {"line": "x"})


def test_after_a_sleep_one_good_probe_is_enough() -> None:
    standing = doubted(after("g"), "the machine slept")
    assert standing.probes == Opinion(H.SUSPECT, "the machine slept", {}, True)
    assert after("g", standing).probes == Opinion(H.HEALTHY)
    assert standing.left == ()
    assert doubted(after("gfff"), "the machine slept").reason == "off the bus"


@pytest.mark.parametrize(
    ("opinions", "expected"),
    [
        ([], Opinion(H.UNKNOWN)),
        ([Opinion(H.HEALTHY), Opinion(H.UNKNOWN, "?")], Opinion(H.UNKNOWN, "?")),
        (
            [Opinion(H.SUSPECT, "a", {"x": "1"}), Opinion(H.HEALTHY, "fine")],
            Opinion(H.SUSPECT, "a", {"x": "1"}),
        ),
        (
            [
                Opinion(H.UNHEALTHY, "a", {"x": "1"}),
                Opinion(H.SUSPECT, "s"),
                Opinion(H.UNHEALTHY, "b", {"x": "2"}),
            ],
            Opinion(H.UNHEALTHY, "a; b", {"x": "1"}),
        ),
        ([Opinion(H.SUSPECT, "a", {}, True), Opinion(H.SUSPECT, "b")], Opinion(H.SUSPECT, "a; b")),
        ([Opinion(H.SUSPECT, "a", {}, True), Opinion(H.HEALTHY)], Opinion(H.SUSPECT, "a", {}, True)),
        (
            [Opinion(H.SUSPECT, "port 1 is DOWN"), Opinion(H.SUSPECT, "its card c: port 1 is DOWN")],
            Opinion(H.SUSPECT, "its card c: port 1 is DOWN"),
        ),
    ],
)
def test_the_worst_opinion_counts(opinions: list[Opinion], expected: Opinion) -> None:
    assert combine(opinions) == expected


letters = st.text(alphabet="gggdfbu", max_size=60)


@given(letters, letters)
def test_three_failures_always_make_it_unhealthy_and_patience_always_brings_it_back(one: str, two: str) -> None:
    standing = after("fff", after(one + two))
    assert standing.health is H.UNHEALTHY
    assert after("g" * RULES.patience, standing).health is H.HEALTHY


@given(letters)
def test_never_unhealthy_without_three_failures_in_a_row_or_a_certain_one(probes: str) -> None:
    standing, row, was_bad = Standing(), 0, False
    for number, letter in enumerate(probes):
        standing = after(letter, standing, every=number * SECOND)
        row = row + 1 if letter == "f" else row if letter == "u" else 0
        bad = standing.health is H.UNHEALTHY
        if bad and not was_bad:
            assert letter == "b" or row >= RULES.failures
        was_bad = bad
        assert bad or not standing.confirming or standing.health is H.SUSPECT
        assert (standing.reason == "") is (standing.health is H.HEALTHY or standing == Standing())


@given(
    st.lists(st.one_of(st.sampled_from("gdfu"), st.sampled_from(list(Fault)), st.just("reset")), max_size=40)
)
def test_the_latch_only_rises_until_it_is_cleared(history: list[object]) -> None:
    """Nothing but good probes after a reset (or, for a doubt, good probes) takes a latch away."""
    standing, order = Standing(), list(Fault)
    for number, word in enumerate(history, 1):
        before = standing.latch
        if isinstance(word, Fault):
            standing = said(standing, word, at=number * SECOND)
        elif word == "reset":
            standing = reset(standing)
        else:
            standing = probed(standing, WORDS[str(word)], number * SECOND, RULES)
        if before is None:
            continue
        if standing.latch is None:
            assert word == "g"
            assert before.reset or before.fault is Fault.DEGRADED
        else:
            assert order.index(standing.latch.fault) >= order.index(before.fault)


@given(st.lists(st.sampled_from(list(Health)), min_size=1, max_size=5))
def test_no_combination_is_better_than_its_worst(healths: list[Health]) -> None:
    combined = combine([Opinion(one, str(one)) for one in healths])
    assert SEVERITY[combined.health] == max(SEVERITY[one] for one in healths)
