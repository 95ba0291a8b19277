"""PCI addresses in all the spellings that tools have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_agent.core import address
from hetero_agent.discovery import sysfs


@pytest.mark.parametrize(
    ("given_text", "normal"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("0000:3B:00.0", "0000:3b:00.0"),
        ("3b:00.0", "0000:3b:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00", "0000:3b:00.0"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("0010AF3B:01:00.0", "10af3b:01:00.0"),
        ("d1f4:00:1f.7\n", "d1f4:00:1f.7"),
    ],
)
def test_normalise(given_text: str, normal: str) -> None:
    assert address.normalise(given_text) == normal


@pytest.mark.parametrize(
    "text", ["", "3b", "000:3b:00.0", "000000000:3b:00.0", "0000:3b:20.0", "0000:3b:00.8", "x:y"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="not a PCI address"):
        address.normalise(text)


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_the_kernels_own_spelling_is_kept(domain: int, bus: int, device: int, function: int) -> None:
    text = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    assert address.normalise(text) == text
    assert address.COMPONENT.fullmatch(text)
    assert address.order(text) == (domain, bus, device, function)
    assert address.devfn(text) == bus << 8 | device << 3 | function


@pytest.mark.parametrize(
    ("path", "subsystem", "anchor"),
    [
        (
            "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0",
            "pci",
            "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0",
        ),
        ("/sys/devices/pci0000:00/0000:00:02.0/drm/card0", "drm", "/sys/devices/pci0000:00/0000:00:02.0"),
        ("/sys/devices/virtual/tty/tty60", "tty", "/sys/devices/virtual/tty/tty60"),
        ("/sys/devices/virtual/block/loop0", "block", "/sys/devices/virtual/block/loop0"),
        ("/sys/devices/platform/fdab.npu/accel/accel0", "accel", "/sys/devices/platform/fdab.npu"),
        ("/sys/devices/platform/fdab.npu", "platform", "/sys/devices/platform/fdab.npu"),
    ],
)
def test_anchors(path: str, subsystem: str, anchor: str) -> None:
    assert sysfs.anchor_of(path, subsystem) == anchor
