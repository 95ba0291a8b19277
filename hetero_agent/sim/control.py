"""The control socket: one JSON object a line in, one out, for whoever runs the simulator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from hetero_agent.sim.commands import Command, SimError, parse
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.sim")

#: Longest request line in bytes.
LONGEST_LINE: Final = 65_536

TOO_LONG: Final = f"a request is longer than {LONGEST_LINE} bytes"

Do = Callable[[Command], Awaitable[dict[str, Any]]]


def listen(path: Path) -> socket.socket:
    """Make the socket, mode 0600 from its first moment and answering once it is there.  A socket
    left by a dead simulator is replaced.  Raises SimError."""
    new = path.with_name(f".{path.name}")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if os.path.lexists(path) and (not path.is_socket() or _alive(path)):
            raise SimError(f"control socket {printable(path)}: another simulator has it, or it is no socket")
        new.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            server.bind(str(new))
        finally:
            os.umask(before)
        server.listen(16)
        new.rename(path)
    except OSError as error:
        server.close()
        raise SimError(f"control socket {printable(path)}: {error.strerror or printable(error)}") from error
    return server


def _alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


async def serve(server: socket.socket, do: Do) -> asyncio.Server:
    """Answer requests by DO until the returned server is closed."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                while (line := await _line(reader)) != b"":
                    await _send(writer, _refusal(TOO_LONG) if line is None else await answer(line, do))
            finally:
                writer.close()

    return await asyncio.start_unix_server(client, sock=server, limit=LONGEST_LINE)


async def _line(reader: asyncio.StreamReader) -> bytes | None:
    """The next request line, b"" at the end of the connection, None for one that was too long.

    One that is too long is read to its end all the same, a piece at a time: a socket that is closed
    under a peer that still writes breaks its pipe, and the answer that says why is never read."""
    fits = True
    while True:
        try:
            line = await reader.readuntil()
        except asyncio.LimitOverrunError as error:
            fits = False
            await reader.readexactly(error.consumed)
        except asyncio.IncompleteReadError as error:
            return error.partial if fits else None
        else:
            return line if fits else None


async def _send(writer: asyncio.StreamWriter, reply: dict[str, Any]) -> None:
    writer.write(json.dumps(reply, ensure_ascii=True).encode() + b"\n")
    await writer.drain()


async def answer(line: bytes, do: Do) -> dict[str, Any]:
    """Return the reply to one request line: ``ok`` true with what DO says, or false with ``error``."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _refusal(f"not JSON: {printable(error, 120)}")
    try:
        return {"ok": True, **await do(parse(request))}
    except SimError as error:
        return _refusal(str(error))


def _refusal(text: str) -> dict[str, Any]:
    return {"ok": False, "error": text}
