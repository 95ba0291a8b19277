"""A spare virtual console as a device: a real character node that every kernel with VTs has, that
can be opened by whoever may, and that nobody uses."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from pathlib import Path

_claims: list[socket.socket] = []


def spare() -> Path:
    """Claim another one for this process, so that runs at the same time don't meet on it.

    High numbers: logins and X servers begin at 1.  The claim is an abstract socket, which goes
    with the process and leaves no file.
    """
    for number in range(60, 40, -1):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0hetero-agent-tests-tty{number}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        path = Path(f"/dev/tty{number}")
        _close(path)  # a run that was killed could not
        atexit.register(_close, path)
        return path
    raise RuntimeError("every spare console is claimed by another run")


def _close(path: Path) -> None:
    """Take back what leases gave on it that no agent lived to take back."""
    with contextlib.suppress(OSError):
        os.removexattr(path, "system.posix_acl_access")
        path.chmod(0o600)


CONSOLE = spare()
DEVICE_ID = f"tty-{CONSOLE.name}"
RESOURCE = "example.com/console"

#: The profile that makes it a device.  The attribute is one that root can change in sysfs.
PROFILE = f"""
schema = 1
resource = "{RESOURCE}"

[[match]]
subsystem = "tty"
names = ["{CONSOLE.name}"]

[[nodes]]
subsystem = "tty"
pattern = "{CONSOLE.name}"
role = "own"

[attributes]
power-policy = {{ read = "power/control" }}

[env]
CONSOLE = "{{node}}"
"""

#: The directory of the device in sysfs.
SYSFS = Path("/sys/class/tty") / CONSOLE.name
