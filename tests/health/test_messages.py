"""Kernel messages: what the shipped rules make of real ones, and what they don't fall for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_agent.core.symptoms import MessageRule
from hetero_agent.core.verdict import Fault
from hetero_agent.discovery import profiles
from hetero_agent.health import messages

PROFILES = {one.name: one.symptoms.messages for one in profiles.load(None).profiles}

#: Profile, message, class, address, text.  As the kernel and the drivers print them.
KNOWN = [
    (
        "nvidia",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        Fault.FATAL,
        "0000:3b:00",
        "Xid 79",
    ),
    (
        "nvidia",
        "NVRM: Xid (PCI:0000:3b:00): 48, pid=1234, DBE (double bit error)",
        Fault.FATAL,
        "0000:3b:00",
        "Xid 48",
    ),
    (
        "nvidia",
        "NVRM: Xid (PCI:0000:AF:00): 64, pid=0, Row Remapper",
        Fault.NEEDS_RESET,
        "0000:AF:00",
        "Xid 64",
    ),
    ("nvidia", "NVRM: Xid (PCI:10000:01:00): 63, pid=0", Fault.DEGRADED, "10000:01:00", "Xid 63"),
    *(
        ("nvidia", f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=7", Fault.APPLICATION, "0000:3b:00", f"Xid {code}")
        for code in (13, 31, 43, 45, 68, 109, 9999)
    ),
    (
        "nvidia",
        "NVRM: GPU at PCI:0000:3b:00 has fallen off the bus.",
        Fault.FATAL,
        "0000:3b:00",
        "fallen off the bus",
    ),
    (
        "nvidia",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        Fault.FATAL,
        "0000:3b:00.0",
        "fallen off the bus",
    ),
    (
        "nvidia",
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x56:1474)",
        Fault.NEEDS_RESET,
        "0000:3b:00.0",
        "the driver can't initialise it",
    ),
    (
        "amd",
        "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!",
        Fault.NEEDS_RESET,
        "0000:03:00.0",
        "GPU reset begun",
    ),
    ("amd", "amdgpu 0000:03:00.0: amdgpu: GPU reset(2) succeeded!", Fault.RECOVERED, "0000:03:00.0", None),
    (
        "amd",
        "amdgpu 0000:03:00.0: amdgpu: GPU reset end with ret = -22",
        Fault.FATAL,
        "0000:03:00.0",
        "GPU reset failed",
    ),
    (
        "amd",
        "amdgpu 0000:03:00.0: amdgpu: 3 uncorrectable hardware errors detected in umc block",
        Fault.NEEDS_RESET,
        "0000:03:00.0",
        "3 uncorrectable hardware errors (RAS)",
    ),
    (
        "amd",
        "amdgpu 0000:03:00.0: amdgpu: {12}1 new uncorrectable hardware errors detected in gfx block",
        Fault.NEEDS_RESET,
        "0000:03:00.0",
        "1 uncorrectable hardware errors (RAS)",
    ),
    (
        "amd",
        "amdgpu 0000:03:00.0: amdgpu: 2 correctable hardware errors detected in umc block",
        Fault.DEGRADED,
        "0000:03:00.0",
        "2 correctable hardware errors (RAS)",
    ),
    (
        "rdma",
        "mlx5_core 0000:17:00.0: poll_health:825:(pid 0): Fatal error 3 detected",
        Fault.FATAL,
        "0000:17:00.0",
        "firmware: fatal error",
    ),
    (
        "rdma",
        "mlx5_core 0000:17:00.0: poll_health:801:(pid 0): device's health compromised - reached miss count",
        Fault.FATAL,
        "0000:17:00.0",
        "firmware: fatal error",
    ),
    (
        "rdma",
        "mlx5_core 0000:17:00.0: mlx5_health_try_recover:368:(pid 7): health recovery succeeded",
        Fault.RECOVERED,
        "0000:17:00.0",
        None,
    ),
    (
        "rdma",
        "mlx5_core 0000:17:00.0: Port module event[error]: module 0, Cable error, High Temperature",
        Fault.DEGRADED,
        "0000:17:00.0",
        None,
    ),
    (
        "generic",
        "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0",
        Fault.NEEDS_RESET,
        "0000:01:00.0",
        "PCIe: uncorrectable fatal error",
    ),
    (
        "generic",
        "pcieport 0000:00:01.0: AER: Multiple Uncorrectable (Fatal) error message received from 0000:01:00.0",
        Fault.NEEDS_RESET,
        "0000:01:00.0",
        "PCIe: uncorrectable fatal error",
    ),
    (
        "generic",
        "pcieport 0000:00:01.0: AER: Uncorrected (Non-Fatal) error received: 0000:01:00.0",
        Fault.DEGRADED,
        "0000:01:00.0",
        "PCIe: uncorrectable error",
    ),
    (
        "generic",
        "vendor 0000:01:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
        Fault.NEEDS_RESET,
        "0000:01:00.0",
        "PCIe: uncorrectable fatal error",
    ),
    (
        "generic",
        "pcieport 0000:00:01.0: AER: device recovery failed",
        Fault.FATAL,
        "0000:00:01.0",
        "PCIe: recovery failed",
    ),
    (
        "generic",
        "pcieport 0000:00:01.0: AER: device recovery successful",
        Fault.RECOVERED,
        "0000:00:01.0",
        None,
    ),
    (
        "nvidia",
        "nvidia 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible",
        Fault.FATAL,
        "0000:01:00.0",
        "inaccessible: it does not leave its sleep",
    ),
    (
        "generic",
        "xe 0000:03:00.0: [drm] CRITICAL: Xe has declared device 0000:03:00.0 as wedged.",
        Fault.NEEDS_RESET,
        "0000:03:00.0",
        "declared wedged by its driver",
    ),
]

#: What must not be taken for a fault, though it looks like one.
HARMLESS = [
    "usb 1-1: Product: NVRM: Xid (PCI:0000:3b:00): 79",
    'audit: type=1400 comm="x" name="NVRM: Xid (PCI:0000:3b:00): 79, "',
    " NVRM: Xid (PCI:0000:3b:00): 79",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.54.03",
    "NVRM: Xid (PCI:0000:3b:00): unknown",
    "amdgpu 0000:03:00.0: amdgpu: 0 correctable hardware errors detected in umc block",
    "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0",
    "mlx5_core 0000:17:00.0: Port module event: module 0, Cable plugged",
    "",
]


def rules(profile: str) -> tuple[messages.Rules, tuple[MessageRule, ...]]:
    known = PROFILES[profile]
    rows = [[one.pattern, list(one.codes), one.fault is Fault.RECOVERED] for one in known]
    return messages.Rules(rows), known


@pytest.mark.parametrize(("profile", "line", "fault", "address", "text"), KNOWN)
def test_what_the_shipped_rules_make_of_it(
    profile: str, line: str, fault: Fault, address: str, text: str | None
) -> None:
    compiled, known = rules(profile)
    found = compiled.match(line)
    assert found is not None
    number, where, _, code = found
    assert (known[number].fault, where) == (fault, address)
    if text is not None:
        assert known[number].text.replace("{code}", code) == text


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("line", HARMLESS)
def test_what_is_none(profile: str, line: str) -> None:
    assert rules(profile)[0].match(line) is None


@given(st.text(max_size=2000))
def test_no_text_is_too_odd(line: str) -> None:
    for profile in PROFILES:
        rules(profile)[0].match(line)


def test_only_the_beginning_of_a_long_line_is_looked_at() -> None:
    compiled = messages.Rules([["a*b", [], False]])
    assert compiled.match("a" * 2000 + "b") is None
    assert compiled.match("a" * 100 + "b") == (0, "", "", "")


def test_a_name_and_no_group_at_all() -> None:
    compiled = messages.Rules([["npu (?P<name>npu[0-9]+): dead", [], False], ["vendor: dead", [], False]])
    assert compiled.match("npu npu7: dead") == (0, "", "npu7", "")
    assert compiled.match("vendor: dead") == (1, "", "", "")
    assert messages.Rules([]).match("anything") is None


@pytest.mark.parametrize(
    ("pattern", "line", "address"),
    [
        (r"(?i)npu (?P<address>\S+): DEAD", "NPU 0000:01:00.0: dead", "0000:01:00.0"),
        (r"(npu|vpu)\d \1 (?P<address>\S+): dead", "vpu7 vpu 0000:01:00.0: dead", "0000:01:00.0"),
        (r"npu (?P<address>\S+) (?P=address): dead", "npu 0000:01:00.0 0000:01:00.0: dead", "0000:01:00.0"),
        (r"npu( at)? (?P<address>\S+)(?(1): dead|: gone)", "npu at 0000:01:00.0: dead", "0000:01:00.0"),
        (r"npu \(?P<a>(?P<address>\S+): dead", "npu (P<a>0000:01:00.0: dead", "0000:01:00.0"),
    ],
)
def test_a_pattern_means_the_same_beside_others(pattern: str, line: str, address: str) -> None:
    others = [[r"(a|b) (?P<address>\S+) (?P<code>\d+): dead", [], False], [r"vendor: (?P<code>\d+)", [], False]]
    assert messages.Rules([[pattern, [], False]]).match(line) == (0, address, "", "")
    compiled = messages.Rules([*others, [pattern, [], False]])
    assert compiled.match(line) == (2, address, "", "")
    assert compiled.match("vendor: 7") == (1, "", "", "7")
    assert compiled.match("something else") is None


def test_the_same_message_passes_once_a_second_and_another_at_once() -> None:
    throttle = messages.Throttle()
    fault, well = (0, "79"), (1, "")
    assert throttle.passes("a", fault, False, 10.0) == (True, 0)
    assert throttle.passes("a", fault, False, 10.1) == (False, 0)
    assert throttle.passes("b", fault, False, 10.1) == (True, 0)
    assert throttle.passes("a", fault, False, 10.9) == (False, 0)
    assert throttle.passes("a", well, True, 10.95) == (True, 0)
    assert throttle.passes("a", fault, False, 10.96) == (True, 0)
    assert throttle.passes("a", fault, False, 11.5) == (False, 0)
    assert throttle.passes("a", fault, False, 12.0) == (True, 1)


def test_a_flood_of_different_messages_is_bounded() -> None:
    throttle = messages.Throttle()
    passed = sum(throttle.passes("a", (0, str(one)), False, 10.0)[0] for one in range(10_000))
    assert passed == 64
    assert throttle.passes("a", (0, "9999"), False, 11.1) == (True, 0)


@given(st.lists(st.sampled_from("fgh"), max_size=300))
def test_however_fast_it_changes_the_last_word_that_passes_is_never_too_good(words: list[str]) -> None:
    """Bad news that is left out was told before, with no good news since."""
    throttle = messages.Throttle()
    told: list[str] = []
    for number, word in enumerate(words):
        if throttle.passes("a", (ord(word), ""), word == "g", 10 + number / 1000)[0]:
            told.append(word)
        elif word != "g":
            assert told[-1] != "g"
            assert word in told
    assert len(told) <= messages.MOST + 4


def test_the_throttle_remembers_only_so_many_devices() -> None:
    throttle = messages.Throttle()
    for number in range(20_000):
        assert throttle.passes(str(number), (0, ""), False, 10.0) == (True, 0)
    assert len(throttle._devices) == 4096
