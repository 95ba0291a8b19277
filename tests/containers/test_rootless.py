"""Containers that users start for themselves: their lease opens the node to them, and to nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hetero_agent import names
from tests.containers.conftest import CONSOLES, Station
from tests.containers.test_podman import device
from tests.support.agent import GROUP_GID, MEMBER, OTHER_MEMBER
from tests.support.ctl import Ctl
from tests.support.podman import Podman
from tests.support.wait import wait_until


class User:
    """A member of the agent's group, at a shell, with a podman of their own."""

    def __init__(self, station: Station, uid: int) -> None:
        self.ctl = Ctl(station.agent.bus.address, uid, [GROUP_GID])
        self.podman = Podman(station.specifications, uid)


@contextmanager
def users(station: Station, *uids: int) -> Iterator[list[User]]:
    with ExitStack() as stack:
        found = []
        for uid in uids:
            found.append(User(station, uid))
            stack.enter_context(found[-1].podman)
        yield found


def test_a_users_own_container(station: Station) -> None:
    with users(station, MEMBER) as [member]:
        lease = member.ctl.json("allocate", "-r", CONSOLES)["lease"]
        path = member.ctl("manifest", lease, "--format", "json").json["nodes"][0][1]
        name = f"tty-{path.removeprefix('/dev/')}"
        pid = member.podman.start("train", device(lease), script=f"exec 3<>{path}; exec sleep 3600")
        station.root.wait_for_device(name, State="in-use")
        holders = wait_until(
            lambda: station.root.call(names.device_path(name), names.DEVICE, "GetHolders"), what="the holder"
        )
        assert [(one["pid"], one["uid"], one["role"]) for one in holders] == [(pid, MEMBER, "lease")]
        member.podman.ok("stop", "--time=0", "train")
        station.agent.wait_for_log(f"lease {lease} of uid {MEMBER} ends: owner-gone (its pid ended)")
        station.root.wait_for_device(name, State="idle")


def test_another_users_lease_is_of_no_use(station: Station) -> None:
    """Everybody can read the specification; the agent knows whose the lease is."""
    with users(station, MEMBER, OTHER_MEMBER) as [member, other]:
        lease = member.ctl.json("allocate", "-r", CONSOLES)["lease"]
        done = other.podman.run(device(lease), script="echo started")
        assert done.returncode != 0
        assert "only the lease's owner and root may" in done.stderr
        assert "started" not in done.stdout
        [one] = station.ctl.json("leases")
        assert (one["id"], one["state"]) == (lease, "pending")
        # while its owner's container starts
        done = member.podman.run(device(lease), script="echo started")
        assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_another_user_in_a_users_own_container(station: Station) -> None:
    """The node is the host's, open to the owner's uid: inside, whoever has that."""
    with users(station, MEMBER) as [member]:
        for options, may in ((["--userns=keep-id"], True), (["--user=1000"], False)):
            lease = member.ctl.json("allocate", "-r", CONSOLES)["lease"]
            path = member.ctl("manifest", lease, "--format", "json").json["nodes"][0][1]
            done = member.podman.run(device(lease), *options, script=f"id -u; exec 3<>{path} && echo used")
            assert done.stdout == (f"{MEMBER}\nused\n" if may else "1000\n"), done.stderr
            assert ("Permission denied" in done.stderr) is not may
            station.wait_idle()
