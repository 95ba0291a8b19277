"""The service's sandbox: taken off, so that what it does can be compared, and tried from inside."""

from __future__ import annotations

import json

from tests.support.process import PYTHON, ROOT
from tests.system.agent import UNIT
from tests.system.machine import Machine

SHIPPED = (ROOT / "systemd" / UNIT).read_text()

#: Settings that have no place in a unit that runs once and says what it found.
_OF_THE_DAEMON = ("Type", "NotifyAccess", "BusName", "Exec", "WatchdogSec", "Restart", "RuntimeDirectory")


def bare() -> str:
    """Return the unit as it would be without the whole section on confinement: root's, unlimited."""
    before, _, rest = SHIPPED.partition("# -- confinement")
    assert rest, "the unit has no section on confinement any more"
    return before + rest[rest.index("[Install]") :]


def attempts(machine: Machine, unit: str, node: str) -> dict[str, str]:
    """Try in the sandbox of UNIT (its text) what nobody should, and what must go on working; return
    for each ``ok`` or why it failed (an errno's name, else text).

    The process that is tried to be harmed is root's, outside; so is what listens on a socket there.
    Its memory in the end is under ``the victim``: ``untouched`` or ``overwrite``.  NODE is one that the
    unit's own user could not open.
    """
    kept = [line for line in unit.splitlines() if not line.startswith(_OF_THE_DAEMON)]
    command = f"ExecStart={PYTHON} -I /run/probe/attempts.py $PID $ADDRESS {node}"
    begin = kept.index("[Service]") + 1
    kept[begin:begin] = ["Type=oneshot", "EnvironmentFile=/run/probe/victim", command]
    for name, text in (("attempts.py", _ATTEMPTS), ("victim.py", _VICTIM)):
        machine.write(f"/run/probe/{name}", text)
    machine.write("/run/systemd/system/probe.service", "\n".join(kept))
    try:
        machine.shell(_RUN)
        output = machine.run("journalctl", "--unit=probe", "--output=cat").stdout
        found: dict[str, str] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
        found["the victim"] = _memory(machine)
    finally:
        machine.shell(_TIDY)
    return found


def _memory(machine: Machine) -> str:
    known = dict(line.split("=") for line in machine.read("/run/probe/victim").splitlines())
    with machine.path(f"/proc/{known['PID']}/mem").open("rb", 0) as file:
        file.seek(int(known["ADDRESS"]))
        return file.read(9).decode()


_RUN = """
mknod -m 600 /dev/probe-disk b 7 1
systemd-run --quiet --unit=job-victim --service-type=notify /usr/bin/python3 -I /run/probe/victim.py
systemctl daemon-reload
systemctl start probe.service
journalctl --sync
"""

_TIDY = """
systemctl stop job-victim.service
rm -rf /dev/probe-disk /run/probe /run/systemd/system/probe.service
systemctl daemon-reload
systemctl reset-failed
"""

# Root's, with a place in its memory, and a socket as a privileged helper of the agent's would have.
_VICTIM = """
import ctypes, os, socket, struct, sys
place = ctypes.create_string_buffer(b"untouched", 16)
with open("/run/probe/victim", "w") as file:
    file.write(f"PID={os.getpid()}\\nADDRESS={ctypes.addressof(place)}\\n")
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.bind("/run/probe/door")
os.chmod("/run/probe/door", 0o666)
door.listen()
ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ready.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", "\\0"))
while True:
    client, _ = door.accept()
    _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    client.send(str(uid).encode())
    client.close()
"""

# Each in a process of its own, which may change what it likes of itself.
_ATTEMPTS = r"""
import ctypes, errno, json, mmap, os, socket, struct, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)
victim, address, node = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
state = os.environ["STATE_DIRECTORY"]
found = {}


def attempt(name):
    def run(work):
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                work()
                result = "ok"
            except OSError as error:
                result = errno.errorcode.get(error.errno, str(error))
            except subprocess.CalledProcessError as error:
                result = error.stderr.strip()
            except BaseException as error:
                result = repr(error)
            os.write(writing, result.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            found[name] = file.read()
        os.wait()
    return run


def check(status):
    if status < 0:
        raise OSError(ctypes.get_errno(), "")


def opening(path, flags):
    return lambda: os.open(path, flags | os.O_NOCTTY | os.O_NONBLOCK)


def making(path, change=lambda path: None):
    def work():
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o700))
        try:
            change(path)
        finally:
            os.unlink(path)
    return work


def memory(flags, access):
    return lambda: access(os.open(f"/proc/{victim}/mem", flags))


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def vectors(call):
    mine = ctypes.create_string_buffer(b"overwrite")
    here, there = Vector(ctypes.addressof(mine), 9), Vector(address, 9)
    return lambda: check(call(victim, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))


attempt("write another's memory by /proc")(memory(os.O_RDWR, lambda fd: os.pwrite(fd, b"overwrite", address)))
attempt("write another's memory by process_vm_writev")(vectors(libc.process_vm_writev))
attempt("read another's memory by process_vm_readv")(vectors(libc.process_vm_readv))
attempt("read another's memory by /proc")(memory(os.O_RDONLY, lambda fd: os.pread(fd, 9, address)))
attempt("ptrace")(lambda: check(libc.ptrace(0x4206, victim, None, None)))  # PTRACE_SEIZE


@attempt("have systemd run a command as root")
def _():
    command = ["systemd-run", "--no-ask-password", "--quiet", "--wait", "true"]
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


attempt("systemd's private socket")(lambda: socket.socket(socket.AF_UNIX).connect("/run/systemd/private"))
for directory in ("/etc", "/usr", "/run", "/run/cdi", "/etc/udev/rules.d", "/dev", "/var/lib",
                  "/proc/1/root/etc", "/proc/1/root/run/cdi"):
    attempt(f"make a file in {directory}")(making(f"{directory}/probe-file"))
attempt("make a file of another owner")(making(f"{state}/other", lambda path: os.chown(path, 1, 1)))
attempt("make a setuid file")(making(f"{state}/setuid", lambda path: os.chmod(path, 0o4755)))


@attempt("make a device node")
def _():
    os.mknod(f"{state}/node", 0o20600, os.makedev(1, 3))
    os.unlink(f"{state}/node")


attempt("open a node for writing")(opening(node, os.O_RDWR))
attempt("open a disk for writing")(opening("/dev/probe-disk", os.O_RDWR))
attempt("become another user")(lambda: os.setresuid(1, 1, 1))
attempt("a user namespace")(lambda: check(libc.unshare(0x10000000)))
attempt("a mount namespace")(lambda: check(libc.unshare(0x00020000)))
attempt("the host's mount namespace")(lambda: check(libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0)))


@attempt("mount")
def _():
    check(libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None))
    check(libc.umount2(b"/mnt", 0))


attempt("an internet socket")(lambda: socket.socket(socket.AF_INET))
attempt("a packet socket")(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))


@attempt("configure a network interface")
def _():  # RTM_NEWLINK: lo up
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        route.settimeout(5)
        route.send(struct.pack("=IHHIIBxHiII", 32, 16, 5, 1, 0, 0, 0, 1, 1, 1))
        status = struct.unpack_from("=i", route.recv(4096), 16)[0]
        if status:
            raise OSError(-status, "")


attempt("write a sysctl")(opening("/proc/sys/kernel/hostname", os.O_WRONLY))
attempt("write to sysfs")(opening("/sys/class/mem/null/uevent", os.O_WRONLY))
attempt("write to a control group")(opening("/sys/fs/cgroup/systemd/cgroup.procs", os.O_WRONLY))
attempt("a higher priority")(lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
attempt("code that can be written")(lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC))

attempt("read a file that only root may")(opening("/etc/shadow", os.O_RDONLY))
attempt("list another's descriptors")(lambda: os.listdir(f"/proc/{victim}/fd"))
attempt("see what they are")(lambda: os.stat(f"/proc/{victim}/fd/0"))
attempt("read another's mappings")(lambda: open(f"/proc/{victim}/maps").read())


@attempt("follow a mapping")
def _():
    places = f"/proc/{victim}/map_files"
    os.stat(f"{places}/{os.listdir(places)[0]}")


attempt("signal another's process")(lambda: os.kill(victim, 0))
attempt("watch a node")(
    lambda: check(libc.inotify_add_watch(libc.inotify_init1(0), node.encode(), 0x20))  # IN_OPEN
)


@attempt("speak to a helper that knows who speaks")
def _():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.connect("/run/probe/door")
        assert int(door.recv(64)) == os.getuid()


print(json.dumps(found))
"""
