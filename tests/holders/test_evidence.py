"""What the kernel says of the use of a GPU, in the words of its drivers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero_agent.holders import evidence, proc
from hetero_agent.holders.scan import Walk
from tests.holders.holding import NOWHERE, holding

AMDGPU = """\
pos:	0
flags:	02100002
mnt_id:	28
ino:	623
drm-driver:	amdgpu
drm-client-id:	27
drm-pdev:	0000:03:00.0
pasid:	32770
drm-total-vram:	4100 KiB
drm-resident-vram:	4096 KiB
drm-memory-vram:	4096 KiB
drm-memory-gtt:	1024 KiB
drm-engine-gfx:	1500 ns
drm-engine-compute:	500 ns
"""

XE = """\
flags:	0100002
drm-driver:	xe
drm-client-id:	3
drm-pdev:	0000:4d:00.0
drm-total-system:	0
drm-resident-vram0:	2 MiB
drm-resident-vram1:	1 MiB
drm-cycles-rcs:	28257900
drm-engine-capacity-ccs:	4
"""

PLAIN = "pos:\t0\nflags:\t02\nmnt_id:\t28\n"


@pytest.fixture
def fdinfo(tmp_path: Path) -> int:
    """A directory that stands for /proc/PID; no driver here says any of this."""
    (tmp_path / "fdinfo").mkdir()
    for number, text in enumerate((AMDGPU, AMDGPU, AMDGPU.replace("id:\t27", "id:\t31"), XE, PLAIN)):
        (tmp_path / "fdinfo" / str(number)).write_text(text)
    return os.open(tmp_path, os.O_PATH)


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([4], {}),
        ([99], {}),
        (
            [0, 1, 4],  # duplicates are one client
            {
                "drm-driver": "amdgpu",
                "drm-pdev": "0000:03:00.0",
                "drm-clients": "27",
                "drm-memory": str(4096 << 10),
                "drm-busy": "2000",
            },
        ),
        (
            [0, 2],
            {
                "drm-driver": "amdgpu",
                "drm-pdev": "0000:03:00.0",
                "drm-clients": "27, 31",
                "drm-memory": str(8192 << 10),
                "drm-busy": "4000",
            },
        ),
        (
            [3],
            {
                "drm-driver": "xe",
                "drm-pdev": "0000:4d:00.0",
                "drm-clients": "3",
                "drm-memory": str(3 << 20),
                "drm-busy": "0",
            },
        ),
    ],
)
def test_what_drm_says(fdinfo: int, numbers: list[int], shown: dict[str, str]) -> None:
    try:
        assert evidence.of_descriptors(fdinfo, [f"fdinfo/{one}" for one in numbers]) == shown
    finally:
        os.close(fdinfo)


def kfd(root: Path, pid: int, memory: dict[int, int], queues: list[int]) -> evidence.Kfd:
    """A host with GPUs 11 and 22, renderD128 and renderD129, and what PID has on them."""
    for node, (gpu, minor) in enumerate(((0, 0), (11, 128), (22, 129))):
        place = root / "topology" / "nodes" / str(node)
        place.mkdir(parents=True)
        (place / "gpu_id").write_text(f"{gpu}\n")
        (place / "properties").write_text(f"cpu_cores_count 8\ndrm_render_minor {minor}\nhive_id 0\n")
    process = root / "proc" / str(pid)
    (process / "queues").mkdir(parents=True)
    (process / "pasid").write_text("32770\n")
    for gpu, size in memory.items():
        (process / f"vram_{gpu}").write_text(f"{size}\n")
    for number, gpu in enumerate(queues):
        (process / "queues" / str(number)).mkdir()
        (process / "queues" / str(number) / "gpuid").write_text(f"{gpu}\n")
    return evidence.Kfd(str(root))


RENDER = {"a": [("char", 226, 128)], "b": [("char", 226, 129)], "card": [("char", 226, 0)]}


@pytest.mark.parametrize(
    ("memory", "queues", "held"),
    [
        ({11: 0, 22: 0}, [], {}),
        ({11: 4096, 22: 0}, [], {"a": {"kfd-memory": "4096", "kfd-queues": "0"}}),
        ({11: 0, 22: 0}, [22, 22], {"b": {"kfd-memory": "0", "kfd-queues": "2"}}),
    ],
)
def test_rocm_process_that_closed_the_render_node_holds_the_gpu(
    tmp_path: Path, memory: dict[int, int], queues: list[int], held: dict[str, dict[str, str]]
) -> None:
    with holding(NOWHERE, "none") as child:
        walk = Walk(RENDER, kfd(tmp_path, child.pid, memory, queues))
        assert walk.inspect(child.pid) == dict.fromkeys(held, False)
        assert walk.kfd == held
        assert walk.inspect(os.getpid()) == {}
        assert walk.kfd == {}


def test_without_kfd_nothing_is_looked_for(tmp_path: Path) -> None:
    walk = Walk(RENDER, evidence.Kfd(str(tmp_path)))
    assert walk.inspect(os.getpid()) == {}


def test_kfd_is_only_asked_for_devices_with_a_render_node(tmp_path: Path) -> None:
    with holding(NOWHERE, "none") as child:
        walk = Walk({"x": [("char", 4, 128)]}, kfd(tmp_path, child.pid, {11: 4096}, []))
        assert walk.inspect(child.pid) == {}


def test_what_kfd_does_not_tell_makes_the_process_unreadable(tmp_path: Path) -> None:
    with holding(NOWHERE, "none") as child:
        known = kfd(tmp_path, child.pid, {11: 4096}, [])
        (tmp_path / "proc" / str(child.pid) / "vram_11").unlink()
        (tmp_path / "proc" / str(child.pid) / "vram_11").mkdir()
        with pytest.raises(OSError, match="directory"):
            Walk(RENDER, known).inspect(child.pid)


def test_fdinfo_is_not_needed_to_tell_a_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may have its device answer there, and that may hang."""
    path = tmp_path / "a"
    path.touch()
    real = proc.read

    def read(name: str, base: int) -> bytes:
        assert "fdinfo" not in name
        return real(name, base)

    monkeypatch.setattr(proc, "read", read)
    found = path.stat()
    with holding(path) as child:
        assert Walk({"a": [("file", found.st_dev, found.st_ino)]}).inspect(child.pid) == {"a": False}
