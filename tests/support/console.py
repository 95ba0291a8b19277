"""A spare virtual console as a device: a real character node that every kernel with VTs has, that
can be opened by whoever may, and that nobody uses."""

from __future__ import annotations

from pathlib import Path

#: One that no login and no X server takes: they begin at 1.
CONSOLE = Path("/dev/tty60")
DEVICE_ID = "tty-tty60"
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
