"""What discovery tells of health: wedged devices, and a second look where something has changed."""

from __future__ import annotations

import asyncio

import pytest

from hetero_agent.core.symptoms import COMMON, Probe
from hetero_agent.core.verdict import Fault
from hetero_agent.discovery import profiles, symptoms
from hetero_agent.discovery.tables import ProfileError
from tests.discovery.observe import watching
from tests.discovery.test_topologies import amd_card
from tests.support.umock import Bed, bed, in_umockdev
from tests.support.wait import wait_until_async

CARD = "0000:03:00.0"
ROOT = 'schema = 1\nresource = "example.org/npu"\n[[match]]\nvendors = ["1e52"]\n'
NODES = '[[nodes]]\nsubsystem = "accel"\npattern = "accel*"\nrole = "own"\n'


@in_umockdev()
def test_a_wedged_device_is_told_with_the_way_out() -> None:
    async def body(mock: Bed) -> None:
        path = amd_card(mock, CARD, 0)
        told: list[tuple[str, str]] = []
        async with watching(wedged=lambda where, how: told.append((where, how))) as seen:
            mock._bed.set_property(f"{path}/drm/card0", "WEDGED", "rebind,bus-reset")
            mock.uevent(f"{path}/drm/card0", "change")
            await wait_until_async(lambda: told, what="the news")
            assert told[0] == (f"{path}/drm/card0", "rebind,bus-reset")
            assert set(told) == {told[0]}
            told.clear()
            mock.uevent(f"{path}/drm/card0", "add")
            mock._bed.set_property(path, "WEDGED", "rebind")
            mock.uevent(path, "change")
            await seen.until(lambda records: CARD in records, "the card")
            await asyncio.sleep(0.1)
            assert told == []

    with bed() as mock:
        asyncio.run(body(mock))


@in_umockdev()
def test_a_second_look_finds_what_no_event_told() -> None:
    async def body(mock: Bed) -> None:
        path = amd_card(mock, CARD, 0)
        async with watching() as seen:
            assert seen.records[CARD].driver == "amdgpu"
            mock.unbind(path)
            seen.source.look("/sys/devices/unknown")
            seen.source.look(path)
            await seen.until(lambda records: records[CARD].driver == "", "the driver's absence")

    with bed() as mock:
        asyncio.run(body(mock))


def test_a_profile_without_a_word_gets_what_all_have() -> None:
    profile = profiles.parse(ROOT + NODES, "npu.toml")
    assert profile is not None
    assert profile.symptoms.probes == COMMON
    assert profile.symptoms.messages == symptoms.EVERYWHERE
    assert profile.symptoms.correctable == 60


def test_its_own_words_come_first() -> None:
    text = """
    [health]
    probes = ["link", "rdma-port"]
    correctable-per-minute = 5
    [[kernel-log]]
    pattern = 'npu (?P<name>npu\\d+): fault (?P<code>\\d+)'
    class = "needs-reset"
    codes = [1, 2]
    text = "fault {code}"
    """
    profile = profiles.parse(ROOT + NODES + text, "npu.toml")
    assert profile is not None
    assert profile.symptoms.probes == (Probe.LINK, Probe.RDMA_PORT)
    assert profile.symptoms.correctable == 5
    first = profile.symptoms.messages[0]
    assert (first.fault, first.codes, first.text) == (Fault.NEEDS_RESET, (1, 2), "fault {code}")
    assert profile.symptoms.messages[1:] == symptoms.EVERYWHERE
    none = profiles.parse(ROOT + NODES + "[health]\nprobes = []\n", "npu.toml")
    assert none is not None
    assert none.symptoms.probes == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[health]\nprobes = ["smell"]', "[health] probes: expected config, aer, link"),
        ("[health]\ncorrectable-per-minute = 0", "correctable-per-minute: expected an integer from 1"),
        ("[health]\ninterval = 3", "[health] has no key interval"),
        ("[[kernel-log]]\nclass = 'fatal'", "number 1 pattern: missing"),
        ("[[kernel-log]]\npattern = 'x'", "number 1 class: missing"),
        ("[[kernel-log]]\npattern = 'x'\nclass = 'bad'", "class: expected application, degraded, needs-reset"),
        ("[[kernel-log]]\npattern = '('\nclass = 'fatal'", "pattern: not a regular expression"),
        ("[[kernel-log]]\npattern = 'a{99999999999}'\nclass = 'fatal'", "pattern: not a regular expression"),
        ("[[kernel-log]]\npattern = '(?P<what>x)'\nclass = 'fatal'", "no group is called what"),
        ("[[kernel-log]]\npattern = 'x'\nclass = 'fatal'\ncodes = [1]", "codes: the pattern has no group"),
        ("[[kernel-log]]\npattern = 'x'\nclass = 'fatal'\ntext = '{code}'", "text: {code} is unknown here"),
        ("[[kernel-log]]\npattern = 'x'\nclass = 'fatal'\ntext = '{'", "braces stand only around a name"),
        ("[[kernel-log]]\npattern = 'x'\nclass = 'fatal'\ncolour = 'red'", "has no key colour"),
        (f"[[kernel-log]]\npattern = '{'x' * 257}'\nclass = 'fatal'", "up to 256 characters"),
    ],
)
def test_what_is_wrong_is_said(text: str, complaint: str) -> None:
    with pytest.raises(ProfileError) as caught:
        profiles.parse(ROOT + NODES + text, "npu.toml")
    assert complaint in str(caught.value)
