"""A file system whose server takes every request and never answers: whoever touches it waits in the
kernel, in state D, and not even SIGKILL ends that wait (kernel: fs/fuse/dev.c, request_wait_answer)."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
import threading
from pathlib import Path
from types import TracebackType

_libc = ctypes.CDLL(None, use_errno=True)

# linux/fuse.h
_INIT = 26
_HEADER = struct.Struct("=IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, ...
_ANSWER = struct.Struct("=IiQ")  # length, error, unique
_INIT_ANSWER = struct.Struct("=IIIIHHIIHHII24x")
_MNT_DETACH = 2


class StuckMount:
    """The file system, mounted at PATH until `close`, which lets all who wait go with an error."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="hetero-agent-stuck-", dir="/tmp"))
        self.path.chmod(0o755)
        self._server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._server},rootmode=40755,user_id=0,group_id=0,allow_other"
        if _libc.mount(b"stuck", os.fsencode(self.path), b"fuse.stuck", 0, options.encode()):
            code = ctypes.get_errno()
            raise OSError(code, f"mount: {os.strerror(code)}")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Answer the greeting only; take the rest, so that it can't be called back."""
        while True:
            try:
                request = os.read(self._server, 1 << 20)
            except OSError:
                return
            _, opcode, unique, *_ = _HEADER.unpack_from(request)
            if opcode == _INIT:
                body = _INIT_ANSWER.pack(7, 31, 0, 0, 0, 0, 4096, 1, 1, 0, 0, 0)
                os.write(self._server, _ANSWER.pack(_ANSWER.size + len(body), 0, unique) + body)

    def close(self) -> None:
        """Unmount it; what waits gets ENOTCONN."""
        # without a path that could be asked of the server: the mount itself knows the way out
        if _libc.umount2(os.fsencode(self.path), _MNT_DETACH | 1):
            code = ctypes.get_errno()
            raise OSError(code, f"umount: {os.strerror(code)}")
        self._thread.join(10)
        os.close(self._server)
        self.path.rmdir()

    def __enter__(self) -> StuckMount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
