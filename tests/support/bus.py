"""A real dbus-daemon of type system on a socket of its own, with our policy in force."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from xml.sax.saxutils import escape

from tests.support.process import ROOT, Program
from tests.support.wait import wait_until

POLICY = ROOT / "dbus" / "org.heteroagent.Agent1.conf"

# The rules are those of Debian's /usr/share/dbus-1/system.conf: nobody owns a name and no call
# reaches anyone unless a service's own policy file says so.
_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/>
    <deny send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Introspectable"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Properties"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Peer"/>
    <deny send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus"
          send_member="UpdateActivationEnvironment"/>
  </policy>
  <policy user="root">
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Monitoring"/>
  </policy>
{includes}
{extra}
</busconfig>
"""


class PrivateBus(Program):
    """The system bus of one test.

    POLICIES are files of ``<busconfig>`` with rules for services; ours by default.  EXTRA is put
    into the bus's own configuration (rules for a service of the test's own).
    """

    title = "bus"

    def __init__(self, policies: tuple[Path, ...] = (POLICY,), extra: str = "") -> None:
        super().__init__()
        self.socket = self.directory / "bus"
        copies = []
        for number, policy in enumerate(policies):
            if policy.exists():
                # a copy, so that a checkout that nobody else can read works too
                copy = self.directory / f"policy-{number}.conf"
                copy.write_bytes(policy.read_bytes())
                copies.append(f"  <include>{escape(str(copy))}</include>")
        self._config = self.directory / "bus.conf"
        self._config.write_text(
            _CONFIG.format(socket=escape(str(self.socket)), includes="\n".join(copies), extra=extra)
        )
        self.start()

    @property
    def address(self) -> str:
        """The address to connect to; it stays the same after `restart`."""
        return f"unix:path={self.socket}"

    @property
    def guid(self) -> str:
        """What GetId answers: another one after each `restart`."""
        name = "org.freedesktop.DBus"
        command = ["busctl", f"--address={self.address}", "call", name, "/", name, "GetId"]
        return subprocess.check_output(command, text=True).split('"')[1]

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        read_end, write_end = os.pipe()
        os.set_inheritable(write_end, True)
        with self.log_path.open("ab") as log, os.fdopen(read_end) as printed:
            self.process = subprocess.Popen(
                [
                    "dbus-daemon",
                    "--nofork",
                    "--nopidfile",
                    "--nosyslog",
                    f"--print-address={write_end}",
                    f"--config-file={self._config}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
            )
            os.close(write_end)
            line = printed.readline().strip()
        assert line, f"the bus did not start: {self.log}"
        wait_until(self.socket.exists, what="the bus's socket")

    def stop(self) -> None:
        """End the bus; every connection is cut."""
        self.terminate()

    def restart(self) -> None:
        """End the bus and start it anew at the same address with another GUID."""
        self.stop()
        self.start()
