"""``run --unit``: the command as a transient unit of the system's service manager, which lets it use the
devices of its lease and no others.

The unit is the lease's owner before its command runs: the first process that the manager starts in it
(ExecStartPre=) confirms the lease with the unit, and if that fails there is no command.  Until then the
lease is bound to heteroctl's own process; so whoever of the two is ended, nothing is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pwd
import re
import shutil
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hetero_agent.cli import asking, complaints, exitcodes, forms
from hetero_agent.cli.command import ENDING, FORWARDED, listen
from hetero_agent.cli.complaints import Complaint
from hetero_agent.cli.obtaining import obtain
from hetero_agent.cli.table import short
from hetero_agent.cli.vigil import Vigil, say
from hetero_agent.client import Client, HeteroError
from hetero_agent.client.systemd import SERVICE, UNIT, ManagerDenied, ManagerError, Property, ServiceManager
from hetero_agent.text import printable

if TYPE_CHECKING:
    from hetero_agent.client.manifest import Manifest

#: What systemd takes as the name of a service (systemd.unit(5)).
_NAME: Final = re.compile(r"[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]*)?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SUFFIX: Final = ".service"
_LONGEST: Final = 255

#: States in which a unit runs no process any more.
_OVER: Final = ("inactive", "failed")

#: si_code of the end of a process (waitid(2)).
_EXITED: Final = 1

#: Exit statuses with which the manager's own child ends when it can't become the command
#: (systemd.exec(5), "Process Exit Codes"): from 200 on, of which 203 is EXEC.
_NOT_SET_UP: Final = 200
_NOT_EXECUTED: Final = 203
_SET_UP: Final = {
    200: "CHDIR: its user can't enter this directory",
    216: "GROUP: a group of the lease can't be had",
    217: "USER: its user can't be had",
}

_NO_RIGHT: Final = (
    "run it as root; or by polkit's action org.freedesktop.systemd1.manage-units, which is as good as root."
    " Without --unit, heteroctl run needs no such right"
)

T = TypeVar("T")


async def go(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run ARGUMENTS as ARGS say; return the exit code.  Raises Complaint."""
    name = unit_name(args.unit) if args.unit else ""
    user = _user(args.uid)
    for variable in (one.partition("=")[0] for one in args.setenv):
        if not _VARIABLE.fullmatch(variable):
            raise complaints.usage(f"--setenv: {printable(variable)!r} is no name of a variable")
    run = _UnitRun(args, arguments, _executable(arguments[0]), name, user)
    return await run.go()


class _Aborted(Exception):
    """A signal ended heteroctl before there was a unit."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _UnitRun:
    """One run: obtains the lease, has the unit started, watches both."""

    def __init__(
        self,
        args: argparse.Namespace,
        arguments: Sequence[str],
        executable: str,
        name: str,
        user: pwd.struct_passwd,
    ) -> None:
        self._args = args
        self._arguments = arguments
        self._executable = executable
        self._user = user
        self._name = name
        self._status: int | None = None
        self._started = False
        #: The last signal that was passed on and may have ended it.
        self._interrupted = 0
        self._aborted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._manager: ServiceManager
        self._sending: set[asyncio.Task[None]] = set()

    async def go(self) -> int:
        taken = {one for one in FORWARDED if signal.getsignal(one) is not signal.SIG_IGN}
        signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        listen(taken, asyncio.get_running_loop().call_soon_threadsafe, self._take)
        person = asking.person(self._args)
        try:
            async with (
                await Client.connect(self._args.bus, person=person) as client,
                await ServiceManager.connect(client.address, person=person) as self._manager,
            ):
                with person or contextlib.nullcontext():
                    manifest = await self._unless_aborted(self._obtain(client))
                    async with Vigil(client, manifest, lambda: self._status) as vigil:
                        await self._unless_aborted(self._start(manifest, client.address))
                        if person is not None:  # the terminal is the command's now
                            person.leave()
                        status = await self._end()
                return vigil.code(status)
        except _Aborted as aborted:
            return exitcodes.SIGNAL + aborted.number
        except ManagerError as error:
            raise of_manager(error) from error
        except HeteroError as error:
            raise complaints.of_error(error) from error

    # -- the beginning --------------------------------------------------------------------------
    async def _unless_aborted(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what WORK gives.  Raises _Aborted if a signal ends heteroctl before."""
        task = asyncio.create_task(work)
        either: set[asyncio.Future[Any]] = {task, self._aborted}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise _Aborted(self._aborted.result())
        return task.result()

    async def _obtain(self, client: Client) -> Manifest:
        for_whom = {"owner_uid": self._user.pw_uid} if self._args.uid is not None else {}
        manifest = (await obtain(client, self._args, pid=os.getpid(), **for_whom)).manifest
        self._name = self._name or f"hetero-{short(manifest.lease)}{_SUFFIX}"
        return manifest

    async def _start(self, manifest: Manifest, address: str) -> None:
        settings = self._settings(manifest, address)
        # from here on the lease ends with us or with the unit, whatever goes wrong
        result = await self._manager.start_transient(self._name, settings, (0, 1, 2), self._begun)
        await self._manager.watch(self._name)
        if result != "done" and (complaint := await self._not_started(result)) is not None:
            if self._interrupted:
                raise _Aborted(self._interrupted)
            raise complaint

    def _begun(self) -> None:
        self._started = True

    def _settings(self, manifest: Manifest, address: str) -> list[Property]:
        """The unit's properties (org.freedesktop.systemd1(5))."""
        confirm = [
            *_heteroctl(),
            "confirm",
            "--quiet",
            "--bus",
            address,
            manifest.lease,
            f"--unit={self._name}",
        ]
        what = printable(" ".join(self._arguments), 100)
        return [
            Property("Description", "s", f"{what} (lease {short(manifest.lease)} of {manifest.resource})"),
            # started once the command is executed: what can't be is told apart from what fails
            Property("Type", "s", "exec"),
            Property("CollectMode", "s", "inactive-or-failed"),
            Property("ExecStartPre", "a(sasb)", [[confirm[0], confirm, False]]),
            # nothing in the command is a variable of the manager's
            Property("ExecStartEx", "a(sasas)", [[self._executable, list(self._arguments), ["no-env-expand"]]]),
            Property("User", "s", self._user.pw_name),
            Property("SupplementaryGroups", "as", [str(group) for group in manifest.groups]),
            Property("WorkingDirectory", "s", os.getcwd()),  # noqa: PTH109 (text is what is wanted)
            Property("UMask", "u", _umask()),
            Property("Environment", "as", self._environment(manifest)),
            Property("UnsetEnvironment", "as", forms.strangers(manifest)),
            Property("DevicePolicy", "s", "closed"),
            Property("DeviceAllow", "a(ss)", [[device, "rw"] for device in forms.allowed_devices(manifest)]),
            *(Property(f"Limit{name.upper()}", "t", value) for name, value in manifest.limits.items()),
            Property("StandardInputFileDescriptor", "h", 0),
            Property("StandardOutputFileDescriptor", "h", 1),
            Property("StandardErrorFileDescriptor", "h", 2),
        ]

    def _environment(self, manifest: Manifest) -> list[str]:
        variables = {}
        if any(os.isatty(one) for one in (0, 1, 2)) and "TERM" in os.environ:
            variables["TERM"] = os.environ["TERM"]
        for given in self._args.setenv:
            name, equals, value = given.partition("=")
            if equals or name in os.environ:
                variables[name] = value if equals else os.environ[name]
        variables |= manifest.variables(filtered=True)
        return [f"{name}={value}" for name, value in variables.items()]

    async def _not_started(self, result: str) -> Complaint | None:
        """Say why there is no command; None if there was one, over before the manager knew it had begun."""
        found = await self._manager.properties(self._name, SERVICE)
        if found["ExecMainPID"]:
            code, status = found["ExecMainCode"], found["ExecMainStatus"]
        else:
            *_, code, status = found["ExecStartPre"][0]
        not_set_up = code == _EXITED and status >= _NOT_SET_UP
        if found["ExecMainPID"] and not not_set_up:
            return None
        if found["ExecMainPID"] and status == _NOT_EXECUTED:
            cause = f"{printable(self._executable)} can't be executed"
            return Complaint(exitcodes.NOT_EXECUTABLE, cause, (), "", "not-executable")
        if not_set_up:
            what = _SET_UP.get(status, "systemd.exec(5), Process Exit Codes")
            cause = f"it could not be set up: status {status} ({what})"
            step = f"journalctl UNIT={self._name} says more"
        else:
            # 0: the lease was bound to it, and something else that it was given failed
            cause = "the lease could not be bound to it" if status else f"its start was {result}"
            step = f"journalctl -u hetero-agent; journalctl _SYSTEMD_UNIT={self._name}"
        return Complaint(exitcodes.RUN_FAILED, f"unit {self._name} did not start: {cause}", (), step, "unit")

    # -- the end ----------------------------------------------------------------------------------
    async def _end(self) -> int:
        """Wait for the unit's end and return the exit code of its command, as a shell shows it."""
        manager = self._manager
        while True:
            try:
                state = (await manager.properties(self._name, UNIT))["ActiveState"]
                if state in _OVER:
                    found = await manager.properties(self._name, SERVICE)
                    break
            except ManagerError as error:
                if not manager.connected:
                    raise Complaint(
                        exitcodes.RUN_FAILED,
                        f"lost sight of unit {self._name}: {error.text}",
                        (),
                        f"it goes on with its lease: systemctl status {self._name}",
                        error.name,
                    ) from error
                # the manager executes itself anew
            await manager.news()
        status: int = found["ExecMainStatus"]
        self._status = status if found["ExecMainCode"] == _EXITED else exitcodes.SIGNAL + status
        return self._status

    # -- signals ----------------------------------------------------------------------------------
    def _take(self, number: int, by_terminal: bool) -> None:
        if number == signal.SIGTSTP:  # the unit is no job of the terminal's: it goes on
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._started:
            self._interrupted = number if number in ENDING else self._interrupted
            task = asyncio.get_running_loop().create_task(self._send(number, by_terminal))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        elif number in ENDING and not self._aborted.done():
            self._aborted.set_result(number)

    async def _send(self, number: int, to_all: bool) -> None:
        """Send a signal to the unit's main process; what the terminal sends, to all, as it would."""
        try:
            main = (await self._manager.properties(self._name, SERVICE))["MainPID"]
            pids = await self._manager.processes(self._name)
        except ManagerError as error:
            say(f"signal {number} was not passed on: {error}")
            return
        for pid in pids if to_all or not main else [main]:
            with contextlib.suppress(ProcessLookupError):
                try:
                    _signal_in(self._name, pid, number)
                except PermissionError:
                    say(f"signal {number} was not passed on to process {pid}: it is another user's")


def unit_name(given: str) -> str:
    """Return GIVEN as the full name of a service.  Raises Complaint."""
    name = given.removesuffix(_SUFFIX)
    if not _NAME.fullmatch(name) or len(name) + len(_SUFFIX) > _LONGEST:
        raise complaints.usage(f"{printable(given)!r} is no name of a service (systemd.unit(5))")
    if name.rpartition(".")[2] in ("scope", "slice", "socket", "target", "timer", "mount", "path", "swap"):
        raise complaints.usage(f"{given} is no service: devices are for services only")
    return name + _SUFFIX


def of_manager(error: ManagerError) -> Complaint:
    """Return the complaint about what the service manager answered."""
    if isinstance(error, ManagerDenied):
        cause = f"the service manager does not let you: {error.text}"
        return Complaint(exitcodes.NOT_AUTHORIZED, cause, (), _NO_RIGHT, error.name)
    step = ""
    if error.name.endswith(".UnitExists"):
        step = "give --unit another name, or none; systemctl reset-failed forgets one that has failed"
    return Complaint(exitcodes.FAILURE, f"the service manager: {error.text}", (), step, error.name)


def _user(given: str | None) -> pwd.struct_passwd:
    """Whom the command is to run as.  Raises Complaint."""
    if given is not None and os.geteuid() != 0:
        cause = "--uid: only root may run a command for another user"
        raise Complaint(exitcodes.NOT_AUTHORIZED, cause, (), "leave it out, or use sudo", "uid")
    name = str(os.geteuid()) if given is None else given
    try:
        return pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        raise complaints.usage(f"there is no user {printable(name)!r} here, which a unit needs") from None


def _executable(command: str) -> str:
    """The absolute path of COMMAND.  Raises Complaint, with the shell's exit codes."""
    found = shutil.which(command) if command else None
    if found is not None:
        return os.path.abspath(found)  # noqa: PTH100 (what the user typed, links and all)
    name = printable(command) or repr("")
    if "/" in command and os.path.exists(command):  # noqa: PTH110
        raise Complaint(exitcodes.NOT_EXECUTABLE, f"{name}: can't be executed", (), "", "command")
    raise Complaint(exitcodes.NOT_FOUND, f"{name}: command not found", (), "", "command")


def _heteroctl() -> list[str]:
    """How to call this program from the unit: the installed one, or this one of a checkout."""
    if __file__.startswith("/usr/lib/"):
        return ["/usr/bin/heteroctl"]
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from hetero_agent.cli.main import main; sys.exit(main())"
    return [sys.executable, "-Ic", code]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _signal_in(unit: str, pid: int, number: int) -> None:
    """Send a signal to PID if it is (still) a process of UNIT.  Raises ProcessLookupError,
    PermissionError."""
    descriptor = os.pidfd_open(pid)
    try:
        # read once the descriptor stands: this is the process that gets the signal
        try:
            groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii", errors="replace")
        except OSError:
            return
        if f"/{unit}" in groups:
            signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
