"""A program on a terminal of its own, which it has as its controlling one."""

from __future__ import annotations

import os
import pty
import select
import signal
from collections.abc import Mapping, Sequence

from tests.support.wait import wait_until


class OnTerminal:
    """COMMAND on a pseudo-terminal.  `read` gives what it has shown so far, `close` ends it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.code: int | None = None
        self._shown = b""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            try:
                os.chdir("/")
                os.execvpe(command[0], list(command), dict(env))
            finally:
                os._exit(127)

    def read(self) -> str:
        """Return all that it has shown."""
        while select.select([self._terminal], [], [], 0)[0]:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # nobody has the terminal open any more
                break
            if not data:
                break
            self._shown += data
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def type(self, text: str) -> None:
        """Type at it."""
        os.write(self._terminal, text.encode())

    def shows(self, text: str, timeout: float = 30) -> str:
        """Wait until it shows TEXT; return all that it has shown."""
        try:
            wait_until(lambda: text in self.read(), timeout, f"{text!r} on the terminal")
        except AssertionError as error:
            raise AssertionError(f"{error}; it shows: {self.read()}") from None
        return self.read()

    def wait(self, timeout: float = 30) -> tuple[int, str]:
        """Wait for its end; return the exit code and what it has shown."""
        wait_until(self._ended, timeout, "the end of the program on the terminal")
        assert self.code is not None
        return self.code, self.read()

    def _ended(self) -> bool:
        self.read()
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def close(self) -> None:
        """End it."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        os.close(self._terminal)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
