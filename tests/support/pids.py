"""Processes under a pid of one's choice: what the kernel does by itself once the numbers wrap."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tests.support.process import PYTHON

# clone3(2) with set_tid; the child executes the command at once, as it may be any thread's copy.
_SPAWN = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
wanted = ctypes.c_int(int(sys.argv[1]))
arguments = struct.pack("=11Q", 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(wanted), 1, 0)
buffer = ctypes.create_string_buffer(arguments, len(arguments))
pid = libc.syscall(435, buffer, len(arguments))
if pid < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
if pid == 0:
    os.execvp(sys.argv[2], sys.argv[2:])
os.waitpid(pid, 0)
"""


def spawn_as(pid: int, command: Sequence[str]) -> subprocess.Popen[str]:
    """Start COMMAND as process PID, which must be free; returns its parent, whose stdin and stdout
    it shares.  The parent ends with it."""
    return subprocess.Popen(
        [PYTHON, "-ISc", _SPAWN, str(pid), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
