"""The command of `run`: a child that waits until it is told to become the command, and the signals
that pass through heteroctl to it."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NoReturn

from hetero_agent.cli import exitcodes
from hetero_agent.cli.vigil import say
from hetero_agent.text import printable

#: What is passed on.  Of these, what the terminal sends reaches the child without our help.
FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
    signal.SIGTSTP,
)

#: Of these, what ends heteroctl while there is no command yet.
ENDING: Final = FORWARDED[:6]

#: What the kernel sends to the leader of a session only, and not to the terminal's foreground group, when
#: the terminal is gone (tty_signal_session_leader() in the kernel's tty_jobctrl.c).
_HANGING_UP: Final = (signal.SIGHUP, signal.SIGCONT)

#: si_code of a signal that the kernel itself sent, such as the terminal's (siginfo.h).
_SI_KERNEL: Final = 0x80

#: Stops that job control makes: heteroctl stops as well, so that the shell sees its job stop.
_JOB_STOPS: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

_LENGTH: Final = struct.Struct("=Q")


class Command:
    """A child process that is to become ARGUMENTS.  Until `start` it does nothing, and if
    heteroctl ends before, so does it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.status: int | None = None
        self.started = False
        # an inherited SIG_IGN would have the kernel reap the child behind our back
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        #: What we inherited as ignored: passed on all the same, since the command may have asked for it.
        #: (What is blocked is not thrown away, see sig_ignored() in the kernel's signal.c.)
        self.ignored = {one for one in FORWARDED if signal.getsignal(one) is signal.SIG_IGN}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
        read_end, self._gate = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._gate)
            self._become(read_end, arguments)
        os.close(read_end)

    def _become(self, gate: int, arguments: Sequence[str]) -> NoReturn:
        """In the child: wait for the environment, then execute."""
        code = exitcodes.RUN_FAILED
        try:
            environment = _receive(gate)
            if environment is not None:
                for one in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the command does not
                    signal.signal(one, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
                code = _execute(arguments, environment)
        finally:
            os._exit(code)

    def start(self, environment: Mapping[str, str]) -> None:
        """Let the child become the command, with this environment."""
        packed = b"\0".join(os.fsencode(key) + b"=" + os.fsencode(value) for key, value in environment.items())
        data = memoryview(_LENGTH.pack(len(packed)) + packed)
        self.started = True
        with contextlib.suppress(BrokenPipeError):  # it was killed; its status will say so
            while data:
                data = data[os.write(self._gate, data) :]
        os.close(self._gate)

    def abandon(self) -> None:
        """End a child that never started."""
        if not self.started:
            self.started = True
            os.close(self._gate)
            if self.status is None:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def send(self, number: int) -> None:
        """Send a signal to the command if it still runs; say so if it became another user's (sudo)."""
        if self.status is None:
            try:
                os.kill(self.pid, number)
            except PermissionError:
                say(f"signal {number} was not passed on: the command is another user's")

    def in_our_group(self) -> bool:
        """Tell whether what the terminal sends to us reaches the command too."""
        return self.status is None and os.getpgid(self.pid) == os.getpgrp()

    def look(self) -> int | None:
        """Take news of the child after SIGCHLD; return the signal that job control stopped it with.

        Sets `status`, the exit code as a shell shows it, once it has ended.
        """
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return None
            if os.WIFSTOPPED(status):
                number = os.WSTOPSIG(status)
                if number in _JOB_STOPS:
                    return number
            elif os.WIFSIGNALED(status):
                self.status = exitcodes.SIGNAL + os.WTERMSIG(status)
            elif os.WIFEXITED(status):
                self.status = os.WEXITSTATUS(status)
        return None


class Relay:
    """Passes signals on to a command, from a thread that waits for them with their origin.

    POST hands a function to the event loop; ENDED is called there once the command has ended,
    ABORTED with the number of a signal that ends heteroctl before the command started.
    """

    def __init__(
        self,
        command: Command,
        post: Callable[..., object],
        ended: Callable[[], None],
        aborted: Callable[[int], None],
    ) -> None:
        self._command = command
        self._ended = ended
        self._aborted = aborted
        listen({*FORWARDED, signal.SIGCHLD}, post, self._take)

    def _take(self, number: int, by_terminal: bool) -> None:
        command = self._command
        if number == signal.SIGCHLD:
            if command.look() is not None:
                os.kill(os.getpid(), signal.SIGSTOP)
            if command.status is not None:
                self._ended()
        elif not command.started:
            if number in command.ignored:
                return
            if number in ENDING:
                self._aborted(number)
            elif number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
        elif not (by_terminal and command.in_our_group()) or (number in _HANGING_UP and _leads_session()):
            command.send(number)


def listen(numbers: Collection[int], post: Callable[..., object], take: Callable[[int, bool], None]) -> None:
    """Have TAKE called with each of the signals NUMBERS, which must be blocked, and whether the
    terminal sent it.  POST hands a function to the event loop."""

    def wait() -> None:
        while True:
            info = signal.sigwaitinfo(numbers)
            try:
                post(take, info.si_signo, info.si_code == _SI_KERNEL)
            except RuntimeError:  # the loop is closed: all is over
                return

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _leads_session() -> bool:
    return os.getsid(0) == os.getpid()


def _receive(gate: int) -> dict[bytes, bytes] | None:
    """Read the environment; None if heteroctl ended before it was all there."""
    data = b""
    with os.fdopen(gate, "rb") as stream:
        head = stream.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack(head)
        data = stream.read(size)
    if len(data) < size:
        return None
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {key: value for key, _, value in pairs}


def _execute(arguments: Sequence[str], environment: Mapping[bytes, bytes]) -> int:
    """Become the command, or say why not and return the shell's exit code for it."""
    try:
        if not arguments[0]:  # which execvpe refuses in another way
            raise FileNotFoundError
        os.execvpe(arguments[0], list(arguments), environment)  # noqa: S606 (that is what run is for)
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        text = "command not found" if missing else f"can't be executed: {error.strerror}"
        sys.stderr.write(f"heteroctl: {printable(arguments[0]) or repr('')}: {text}\n")
        sys.stderr.flush()
        return exitcodes.NOT_FOUND if missing else exitcodes.NOT_EXECUTABLE
