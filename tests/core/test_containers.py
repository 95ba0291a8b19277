"""Containers by the names of their control groups, as the runtimes write them."""

from __future__ import annotations

import pytest

from hetero_agent.core.containers import container_of, within

ID = "0123456789abcdef" * 4
OTHER = "f" * 64
POD = "12345678-9abc-def0-1234-56789abcdef0"
POD_SLICE = "kubepods-burstable-pod12345678_9abc_def0_1234_56789abcdef0.slice"


@pytest.mark.parametrize(
    ("cgroup", "name", "pod", "path"),
    [
        (f"/system.slice/docker-{ID}.scope", f"docker:{ID}", "", f"/system.slice/docker-{ID}.scope"),
        (f"/docker/{ID}", f"docker:{ID}", "", f"/docker/{ID}"),
        (f"/docker/{ID}/init", f"docker:{ID}", "", f"/docker/{ID}"),
        (
            f"/machine.slice/libpod-{ID}.scope/container",
            f"podman:{ID}",
            "",
            f"/machine.slice/libpod-{ID}.scope",
        ),
        (f"/libpod_parent/libpod-{ID}", f"podman:{ID}", "", f"/libpod_parent/libpod-{ID}"),
        (
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
            f"podman:{ID}",
            "",
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope",
        ),
        (
            f"/kubepods.slice/kubepods-burstable.slice/{POD_SLICE}/cri-containerd-{ID}.scope",
            f"containerd:{ID}",
            POD,
            f"/kubepods.slice/kubepods-burstable.slice/{POD_SLICE}/cri-containerd-{ID}.scope",
        ),
        (
            f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope",
            f"cri-o:{ID}",
            POD,
            f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope",
        ),
        (
            f"/kubepods/besteffort/pod{POD}/{ID}",
            f"kubernetes:{ID}",
            POD,
            f"/kubepods/besteffort/pod{POD}/{ID}",
        ),
        (f"/system.slice/nerdctl-{ID}.scope", f"nerdctl:{ID}", "", f"/system.slice/nerdctl-{ID}.scope"),
        (
            "/machine.slice/systemd-nspawn@lab.service/payload/init.scope",
            "nspawn:lab",
            "",
            "/machine.slice/systemd-nspawn@lab.service",
        ),
        (
            r"/machine.slice/machine-my\x2dlab.scope",
            "machine:my-lab",
            "",
            r"/machine.slice/machine-my\x2dlab.scope",
        ),
        ("/lxc.payload.web/init.scope", "lxc:web", "", "/lxc.payload.web"),
        ("/lxc/web", "lxc:web", "", "/lxc/web"),
        (
            "/system.slice/slurmstepd.scope/job_42/step_0/user/task_0",
            "slurm:42",
            "",
            "/system.slice/slurmstepd.scope/job_42",
        ),
        # docker in docker: the host's own is the outer one
        (f"/docker/{ID}/docker/{OTHER}", f"docker:{ID}", "", f"/docker/{ID}"),
    ],
)
def test_container_of_a_group(cgroup: str, name: str, pod: str, path: str) -> None:
    found = container_of(cgroup)
    assert found is not None
    assert (found.name, found.pod, found.path) == (name, pod, path)


@pytest.mark.parametrize(
    "cgroup",
    [
        "",
        "/",
        "/system.slice/docker.service",
        "/system.slice/containerd.service",
        f"/machine.slice/libpod-conmon-{ID}.scope",
        f"/somewhere/{ID}",
        "/system.slice/docker-0123.scope",
        "/user.slice/user-1000.slice/session-3.scope",
        f"/kubepods.slice/{POD_SLICE}",
    ],
)
def test_no_container(cgroup: str) -> None:
    assert container_of(cgroup) is None


@pytest.mark.parametrize(
    ("cgroup", "inside"), [("/a/b", True), ("/a/b/c", True), ("/a/bc", False), ("/a", False), ("", False)]
)
def test_within(cgroup: str, inside: bool) -> None:
    assert within(cgroup, "/a/b") is inside
