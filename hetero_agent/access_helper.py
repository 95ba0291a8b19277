"""hetero-agent-access, the privileged helper: makes and undoes on the host what leases give.

systemd starts it when the agent has a request, and it ends when there has been none for a while.  It
is root's, so all that it takes from outside is here and in three more files: a request of at most 256
bytes on a socket that only the agent's user may open, with no more in it than a lease id; the grant
file of that lease (access/grantfile.py); and what may stand in it (access/verify.py).  What it then
does is in access/hands.py, and what it has done in records of its own, which undo it.
"""

from __future__ import annotations

import argparse
import contextlib
import grp
import json
import logging
import os
import pwd
import socket
import struct
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hetero_agent import config, names
from hetero_agent.access import grantfile, protocol, verify
from hetero_agent.access.cdi import confirming
from hetero_agent.access.grant import Grant
from hetero_agent.access.hands import Hands
from hetero_agent.access.manifest import AccessError, each
from hetero_agent.access.namespaces import Process
from hetero_agent.access.netdev import Netdevs
from hetero_agent.access.places import specifications
from hetero_agent.discovery import profiles, sysfs
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.access")

#: The user whose requests are taken, beside root's.
AGENT: Final = "hetero-agent"

#: Seconds without a request after which it ends.
IDLE: Final = 30.0

#: Characters of an error in an answer: each can take twelve bytes there.
_SHOWN: Final = protocol.ANSWER_MAX // 12 - 8

#: The first descriptor that systemd passes (sd_listen_fds(3)).
_PASSED: Final = 3


class Places(NamedTuple):
    """Where things are: all of them root's but the agent's runtime directory."""

    config: Path
    profiles: Path
    runtime: Path
    records: Path


class Helper:
    """Carries out requests, one at a time.  OWNERS are the uids that may ask and own grant files."""

    def __init__(self, places: Places, owners: frozenset[int]) -> None:
        self._places = places
        self._owners = owners
        self._read: object = None
        self._kept = places.records / "configuration"
        self._hook = confirming(names.SYSTEM_BUS, sys.executable)
        # enough to undo: that needs no configuration, and so works with any
        self._hands = Hands(places.records, None, False, self._hook)
        self._netdevs = Netdevs(places.records, False)
        self._rules: verify.Rules

    def serve(self, listener: socket.socket, idle: float) -> None:
        """Answer one connection after the other until there is nothing to do for IDLE seconds.

        Never two at once: what was asked on one that the agent has given up is done, or found to be
        of no use, before anything that it asked later.
        """
        listener.settimeout(idle)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                return
            with connection:
                connection.settimeout(idle)
                if not self._serve_one(connection):
                    return

    def _serve_one(self, connection: socket.socket) -> bool:
        """Answer a connection until it is closed; False if it was left open and nothing came."""
        uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid not in self._owners:
            log.error("refused: uid %d may not ask", uid)
            return True
        while True:
            try:
                request = connection.recv(protocol.REQUEST_MAX + 1)
                if not request:
                    return True
                connection.sendall(self.answer(request))
            except TimeoutError:
                return False
            except OSError as error:
                log.warning("the connection was lost: %s", error.strerror)
                return True

    def answer(self, request: bytes) -> bytes:
        """Carry out REQUEST and return the answer to it."""
        try:
            self._do(request)
        except (AccessError, OSError) as error:
            log.error("refused or failed: %s", printable(error, 512))
            return json.dumps({"ok": False, "error": printable(error, _SHOWN)}).encode()
        except Exception:
            log.exception("a request failed")
            return b'{"ok": false, "error": "the access helper failed; its log says how"}'
        return b'{"ok": true}'

    def _do(self, request: bytes) -> None:
        what, lease, process = _parse(request)
        if what in ("prepare", "attach"):
            self._configure()
        if what == "attach":
            self._netdevs.attach(self._grant(lease), process)
        elif what == "prepare":
            grant = self._grant(lease)
            self._netdevs.retain(grant)
            self._hands.prepare(grant)
        elif what == "revoke":
            each(lambda: self._netdevs.detach(lease), lambda: self._hands.revoke(lease))
        else:
            self._sweep(grantfile.listed(self._places.runtime / grantfile.DIRECTORY, self._owners))

    def _grant(self, lease: str) -> Grant:
        """What the agent says that LEASE gives, found right.  Raises AccessError."""
        grants = self._places.runtime / grantfile.DIRECTORY
        told = grantfile.read(grants, lease, self._owners)
        found = verify.check(told, self._rules)
        if len(found.nodes) < len(told.nodes):
            log.info(
                "lease %s: others than root could put links in place of its files; they get no entry", lease
            )
        return found

    def _sweep(self, live: Collection[str]) -> None:
        # files that no record knows are looked for where the configuration says, if it does
        with contextlib.suppress(AccessError):
            self._configure()
        away = [lease for lease in self._netdevs.leases() if lease not in live]
        each(lambda: self._netdevs.detach(*away), lambda: self._hands.sweep(live))

    def undo_all(self) -> None:
        """Undo all that is recorded, and forget what else is kept.  Raises AccessError."""
        self._sweep(())
        self._kept.unlink(missing_ok=True)

    def _configure(self) -> None:
        """Go by root's files as they are now.  Raises AccessError if there is no good configuration."""
        places = self._places
        seen = [_version(places.config), *_versions(places.profiles)]
        if seen == self._read:
            return
        settings = self._settings()
        known = profiles.load(places.profiles)
        for problem in known.problems:
            log.warning("%s", problem)
        directory = specifications(settings.access, places.runtime)
        self._hands = Hands(places.records, directory, settings.access.acl, self._hook)
        self._netdevs = Netdevs(places.records, settings.access.move_netdevs)
        self._rules = rules_of(known, settings)
        self._read = seen

    def _settings(self) -> config.Config:
        """The configuration; while the file has an error, that of before, as it does for the agent.
        Raises AccessError if there is none of before."""
        path = self._places.config
        try:
            found = config.load(path)
        except config.ConfigError as error:
            try:
                before = config.load(self._kept, needed=True)
            except config.ConfigError:
                raise AccessError(str(error)) from error
            log.warning("%s; the configuration of before stays in force", error)
            return before
        self._places.records.mkdir(parents=True, exist_ok=True)
        self._kept.write_bytes(path.read_bytes() if path.exists() else b"")
        return found


def rules_of(known: profiles.ProfileSet, settings: config.Config) -> verify.Rules:
    """Return what grants may name by the profiles KNOWN and the SETTINGS."""
    paths = [
        verify.PathRule(verify.pattern(rule.path), rule.major_of)
        for one in known.profiles
        for rule in one.nodes
        if rule.path
    ]
    if any("nvidia-mig" in one.facts for one in known.profiles):
        # discovery/parts.py
        paths.append(verify.PathRule(verify.pattern("/dev/nvidia-caps/nvidia-cap*"), ("nvidia-caps",)))
    variables = {name for one in known.profiles for name in one.env}
    variables |= {name for one in known.profiles if one.parts for name in one.parts.env}
    providers = settings.providers.values()
    return verify.Rules(
        listed=lambda path, subsystem, node: sysfs.lists_node(path, subsystem, node, known),
        paths=tuple(paths),
        subsystems=frozenset(one for provider in providers for one in provider.subsystems),
        directories=tuple(os.path.normpath(one.directory) for one in providers if one.directory),
        mounts=tuple(
            verify.MountRule(
                verify.pattern(one.host),
                verify.pattern(one.container) if one.container else None,
                one.options,
            )
            for profile in known.profiles
            for one in profile.mounts
        ),
        variables=frozenset(variables),
        groups=frozenset(_gids({name for one in known.profiles for name in one.groups})),
    )


def _gids(wanted: set[str]) -> set[int]:
    """The gids of the groups that exist here.  Groups of devices are the system's own, in /etc/group:
    no name service can be asked from in here."""
    found = set()
    for name in wanted:
        try:
            found.add(grp.getgrnam(name).gr_gid)
        except KeyError:
            continue
    return found


def _versions(directory: Path) -> Sequence[object]:
    """What changes with any file in DIRECTORY."""
    try:
        return sorted((entry.name, _version(entry)) for entry in os.scandir(directory))
    except OSError:
        return []


def _version(file: Path | os.DirEntry[str]) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def _parse(request: bytes) -> tuple[str, str, Process | None]:
    """Return what a request asks, for which lease, and for which process if it names one.  Raises
    AccessError."""
    if len(request) > protocol.REQUEST_MAX:
        raise AccessError(f"a request of more than {protocol.REQUEST_MAX} bytes")
    try:
        data = json.loads(request.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise AccessError("a request that is not JSON in ASCII") from error
    if not isinstance(data, dict) or data.get("version") != protocol.VERSION:
        raise AccessError(f"a request of another version than {protocol.VERSION}")
    what, lease = data.get("do"), data.get("lease", "")
    fits = not lease if what == "sweep" else isinstance(lease, str) and names.LEASE_ID.fullmatch(lease)
    process = {"pid", "start"} if what == "attach" else set()
    numbers: list[Any] = [data.get(key) for key in ("pid", "start") if process]
    if (
        what not in ("prepare", "attach", "revoke", "sweep")
        or not fits
        or not data.keys() - process <= {"version", "do", "lease"}
        or not all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    ):
        raise AccessError("a request that makes no sense")
    return what, lease, Process(*numbers) if any(numbers) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point: with the socket from systemd, or to undo everything; the exit status."""
    parser = argparse.ArgumentParser(prog="hetero-agent-access", description="The helper of hetero-agent.")
    parser.add_argument("--config", type=Path, default=Path(names.CONFIG_FILE))
    parser.add_argument("--profiles", type=Path, default=Path(names.PROFILES_DIR))
    parser.add_argument("--runtime-dir", type=Path, default=Path(names.RUNTIME_DIR))
    parser.add_argument("--records", type=Path, default=Path(names.ACCESS_DIR))
    parser.add_argument("--user", default=AGENT, help="who may ask, beside root")
    parser.add_argument("--idle", type=float, default=IDLE, help="seconds without a request until it ends")
    parser.add_argument("--undo-all", action="store_true", help="undo what was made for all leases, and end")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    places = Places(given.config, given.profiles, given.runtime_dir, given.records)
    try:
        if given.undo_all:
            Helper(places, frozenset({0})).undo_all()
            return 0
        owners = frozenset({0, pwd.getpwnam(given.user).pw_uid})
        if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
            raise AccessError("there is no socket from systemd: start hetero-agent-access.socket")
        with socket.socket(fileno=_PASSED) as listener:
            Helper(places, owners).serve(listener, given.idle)
    except (AccessError, OSError, KeyError) as error:
        log.error("%s", printable(error, 512))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
