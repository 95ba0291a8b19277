"""Every name that another program could also spell: bus, paths, errors, message ids, files."""

from __future__ import annotations

import re
from typing import Final

# -- the bus --------------------------------------------------------------------------------
BUS_NAME: Final = "org.heteroagent.Agent1"
ROOT: Final = "/org/heteroagent/Agent1"
DEVICES: Final = ROOT + "/devices"
LEASES: Final = ROOT + "/leases"
NO_LEASE: Final = "/"
LOG_CONTROL_PATH: Final = "/org/freedesktop/LogControl1"

MANAGER: Final = BUS_NAME + ".Manager"
DEVICE: Final = BUS_NAME + ".Device"
LEASE: Final = BUS_NAME + ".Lease"
PROVIDERS: Final = BUS_NAME + ".Providers"
LOG_CONTROL: Final = "org.freedesktop.LogControl1"
ERROR_PREFIX: Final = BUS_NAME + ".Error."

#: Versions of the protocol with control planes and providers that this agent speaks.
PROTOCOL_VERSIONS: Final = (1,)

# -- files ----------------------------------------------------------------------------------
CONFIG_FILE: Final = "/etc/hetero-agent/hetero-agent.conf"
PROFILES_DIR: Final = "/etc/hetero-agent/profiles.d"
RUNTIME_DIR: Final = "/run/hetero-agent"
STATE_DIR: Final = "/var/lib/hetero-agent"
LEDGER_FILE: Final = "ledger.sqlite"
LASTING_FILE: Final = "lasting.sqlite"
#: The privileged helper's: its socket, and its records of what it has made.
ACCESS_DIR: Final = "/run/hetero-agent-access"
ACCESS_SOCKET: Final = ACCESS_DIR + "/socket"
#: Where container runtimes look for specifications of what does not last.
CDI_DIR: Final = "/run/cdi"
SIM_SOCKET: Final = "/run/hetero-agent-sim/control.sock"

#: The system's bus, where nothing else is said.
SYSTEM_BUS: Final = "unix:path=/run/dbus/system_bus_socket"
#: The environment variable that names the bus for the agent, heteroctl and the simulator.
BUS_ADDRESS_VARIABLE: Final = "DBUS_SYSTEM_BUS_ADDRESS"

# -- ids ------------------------------------------------------------------------------------
#: A device id (design section 2): the device's place.
DEVICE_ID: Final = re.compile(r"[a-z0-9][a-z0-9_.:-]{0,62}")
#: ``vendor/class``: vendor a DNS name, class a C-like word (what CDI and Kubernetes both take).
RESOURCE: Final = re.compile(
    r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
#: A lease id: 128 random bits in lower-case hex.
LEASE_ID: Final = re.compile(r"[0-9a-f]{32}")
#: The name of a network interface (net/core/dev.c, dev_valid_name), less what is not ASCII.
INTERFACE: Final = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")

#: Variables by which whoever sets them runs code in, or redirects, the program that inherits them.
#: A provider's uid need not be root, and the lease's owner may be.
FORBIDDEN_VARIABLE: Final = re.compile(
    r"(LD_|HETERO_|BASH_|GLIBC_|GCONV_|MALLOC_|PYTHON|PERL|RUBY|NODE_|JAVA_|DBUS_|XDG_|SYSTEMD_|SSH_|GIT_"
    r"|OPENSSL_|SSL_|_JAVA_|JDK_|DOTNET_|CORECLR_|COMPlus_|LUA_|R_|JULIA_|TCL|GTK_|GIO_|QT_|VK_|OCL_ICD_).*"
    # libraries that vendors' runtimes load because a variable names them
    r"|.*(PRELOAD|_INJECTION(32|64)?_PATH|_TOOLS_LIB|_NET_PLUGIN|_TUNER_PLUGIN|_MODULE_DIR)|IBV_DRIVERS"
    r"|PATH|HOME|USER|LOGNAME|SHELL|IFS|ENV|CDPATH|TMPDIR|LOCPATH|NLSPATH|HOSTALIASES|LOCALDOMAIN|RES_OPTIONS"
    r"|EDITOR|VISUAL|PAGER|TERMINFO|TERMCAP|NOTIFY_SOCKET|LISTEN_FDS|LISTEN_PID|PS4|PROMPT_COMMAND|BASHOPTS|SHELLOPTS"
    r"|CLASSPATH|ZDOTDIR|INPUTRC"
)

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9]*")


def escape_element(text: str) -> str:
    """Return TEXT as one element of an object path, as systemd's sd_bus_path_encode(3) does."""
    if not text:
        return "_"
    if _PLAIN.fullmatch(text):
        return text
    parts = []
    for index, byte in enumerate(text.encode()):
        char = chr(byte)
        plain = byte < 128 and char.isalnum() and (index > 0 or char.isalpha())
        parts.append(char if plain else f"_{byte:02x}")
    return "".join(parts)


def unescape_element(element: str) -> str:
    """Undo `escape_element`.  Raises ValueError for what it can't have produced."""
    if element == "_":
        return ""
    raw = bytearray()
    index = 0
    while index < len(element):
        if element[index] == "_":
            raw.append(int(element[index + 1 : index + 3], 16))
            index += 3
        else:
            raw += element[index].encode()
            index += 1
    return raw.decode()


def device_path(device_id: str) -> str:
    """Return the object path of a device."""
    return f"{DEVICES}/{escape_element(device_id)}"


def lease_path(lease_id: str) -> str:
    """Return the object path of a lease, ``/`` for none."""
    return f"{LEASES}/l{lease_id}" if lease_id else NO_LEASE


def lease_id_of(path: str) -> str:
    """Return the lease id in an object path.  Raises ValueError if PATH is not a lease's."""
    prefix = LEASES + "/l"
    lease_id = path.removeprefix(prefix)
    if not path.startswith(prefix) or not LEASE_ID.fullmatch(lease_id):
        raise ValueError("not the path of a lease")
    return lease_id


def device_id_of(path: str) -> str:
    """Return the device id in an object path.  Raises ValueError if PATH is not a device's."""
    element = path.removeprefix(DEVICES + "/")
    if not path.startswith(DEVICES + "/") or "/" in element:
        raise ValueError("not the path of a device")
    device_id = unescape_element(element)
    if not DEVICE_ID.fullmatch(device_id):
        raise ValueError("not the path of a device")
    return device_id
