"""One walk over /proc: which processes have given nodes open or mapped.

How it looks, and why so:

- Open files: ``statx`` of each /proc/PID/fd entry, which follows the link to the very inode.
  The number (or, for files, device and inode) decides, never the path: a container, a bind
  mount, a copy made by mknod or a deleted node all show other paths.  A readlink beforehand
  would save nothing, as it costs as much as the statx.  AT_STATX_DONT_SYNC keeps a dead file
  server from being asked.  O_PATH descriptors are no use of a device and don't count; fdinfo,
  which tells these, is read only if the link's mode leaves it open, as a driver may have its
  device answer there.
- Threads that left the common descriptor table (unshare CLONE_FILES), or outlived their main
  thread, have tables of their own; kcmp(2) tells whether there is another table to read.
- Mappings: a device can be in use with every descriptor closed.  /proc/PID/maps shows the
  inode of the *node*, not its number; each inode is looked up once per walk, through map_files
  (needs CAP_CHECKPOINT_RESTORE) or else through /proc/PID/root and the path.
- Processes that appear while the walk goes on are walked too, so that a child born by one that
  was not read yet isn't missed.
- What KFD says a ROCm process has on a GPU whose node it has closed, and other evidence
  (`evidence`).

Nothing here writes, opens a node, or reads memory of a process (cmdline and environ would).
Only standard modules: this runs in the small scan worker.
"""

# pathlib would cost the worker a megabyte and the walk its speed
# ruff: noqa: PTH115, PTH116, PTH208

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from hetero_agent.holders import evidence, proc

TYPE_CHECKING = False  # typing's own would load typing: a megabyte
if TYPE_CHECKING:
    from typing import Any

#: A node as the worker gets it: ("char"|"block", major, minor) or ("file", st_dev, st_ino).
NodeKey = tuple[str, int, int]

_libc = ctypes.CDLL(None, use_errno=True)

# statx(2): flags, and the fields of struct statx that are used (linux/stat.h)
_NO_SYNC = 0x4000  # AT_STATX_DONT_SYNC
_NO_AUTOMOUNT = 0x800
_NO_FOLLOW = 0x100
_TYPE_AND_INO = 0x101  # STATX_TYPE | STATX_INO
_STATX = struct.Struct("=28xH2xQ88xIIII")  # mode, ino, rdev major and minor, dev major and minor

_KCMP_NUMBERS = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "ppc64le": 354, "s390x": 343}
_KCMP = _KCMP_NUMBERS.get(os.uname().machine)
_KCMP_FILES = 2

_MAPPING = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ (\S+ [1-9]\d* +/.*)$", re.M)
_O_PATH = 0o10000000

#: What the scan needs of others' processes, by the bits of linux/capability.h: to list descriptors
#: (CAP_DAC_OVERRIDE does it too), and to see what they are; the latter also lifts hidepid.
_NEEDED = {"CAP_DAC_READ_SEARCH": 1 << 2 | 1 << 1, "CAP_SYS_PTRACE": 1 << 19}

_GONE = (errno.ENOENT, errno.ESRCH)

#: How often the list of processes is read again for newcomers.
_ROUNDS = 8

#: Added to the pid that is announced while what is read of it is evidence only.
EVIDENCE = 1 << 40

#: Descriptors of one device that are told of one process.
_MOST_DESCRIPTORS = 16


class Walk:
    """The search for one set of nodes; keeps what it learned about inodes between processes.

    After each process that was inspected, DESCRIPTORS has the descriptors that it holds each
    device by ("fd/7", "task/12/fd/7"), and KFD what it has of each by KFD."""

    def __init__(self, targets: Mapping[str, Sequence[NodeKey]], kfd: evidence.Kfd | None = None) -> None:
        self.descriptors: dict[str, list[str]] = {}
        self.kfd: dict[str, dict[str, str]] = {}
        self._kfd = evidence.Kfd() if kfd is None else kfd
        self._wanted: dict[NodeKey, list[str]] = {}
        for device, nodes in targets.items():
            for kind, first, second in nodes:
                self._wanted.setdefault((kind, first, second), []).append(device)
        self._by_render = {
            minor: devices
            for (kind, major, minor), devices in self._wanted.items()
            if (kind, major) == ("char", evidence.DRM_MAJOR) and minor >= evidence.FIRST_RENDER
        }
        if self._by_render and not self._kfd.there:
            self._by_render = {}
        self._inodes: dict[bytes, NodeKey | None] = {}
        self._map_files = True
        self._buffer = ctypes.create_string_buffer(256)

    def inspect(self, pid: int) -> dict[str, bool]:
        """Return the devices that PID holds; the value says that only a mapping holds it.

        Raises FileNotFoundError or ProcessLookupError if it has ended, another OSError if it
        can't be read (so it may hold anything).
        """
        with proc.opened(pid) as base:
            return self.inspect_open(pid, base)

    def inspect_open(self, pid: int, base: int) -> dict[str, bool]:
        """Like `inspect`, for an open descriptor of /proc/PID."""
        opened: set[str] = set()
        mapped: set[str] = set()
        self.descriptors = {}
        self._table(base, "", opened)
        alive = ""
        # two links more than threads: "." and ".."
        if os.stat("task", dir_fd=base).st_nlink > 3:
            alive = self._threads(pid, base, opened)
        self._mappings(base, alive, mapped)
        self.kfd = {}
        for minor, uses in self._kfd.uses(pid).items() if self._by_render else ():
            self.kfd.update(dict.fromkeys(self._by_render.get(minor, ()), uses))
        opened.update(self.kfd.keys() - mapped)
        return {device: device not in opened for device in opened | mapped}

    def _table(self, base: int, task: str, found: set[str]) -> None:
        """Add the devices in one descriptor table, of the process or a TASK ("task/12/")."""
        table = os.open(f"{task}fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
        try:
            for number in os.listdir(table):
                error = self._statx(table, number.encode(), 0)
                if error:
                    if error in (errno.EACCES, errno.EPERM):
                        # ours to read the link, but not the file behind it: a user's FUSE
                        # mount, which can't hold device nodes (nodev).  Else this raises.
                        os.readlink(number, dir_fd=table)
                    continue
                devices = self._wanted.get(self._key())
                if devices and _really_open(table, base, f"{task}fdinfo/{number}", number):
                    found.update(devices)
                    for device in devices:
                        self.descriptors.setdefault(device, []).append(f"{task}fd/{number}")
        except FileNotFoundError:
            # readlink of a descriptor that was closed meanwhile
            return
        finally:
            os.close(table)

    def _threads(self, pid: int, base: int, found: set[str]) -> str:
        """Add what threads with tables of their own hold; return the last of them."""
        last = pid
        alive = ""
        # through our own descriptor the path stays bound to that process
        for name in os.listdir(f"/proc/self/fd/{base}/task"):
            thread = int(name)
            if thread == pid or _same_table(last, thread):
                continue
            try:
                self._table(base, f"task/{name}/", found)
            except (FileNotFoundError, ProcessLookupError):
                continue
            last, alive = thread, name
        return alive

    def _mappings(self, base: int, thread: str, found: set[str]) -> None:
        for _ in range(3):
            lines = {key: place for place, key in _MAPPING.findall(proc.read("maps", base))}
            if not lines and thread:
                # an ended main thread has no memory any more, its threads have
                memory = proc.read(f"task/{thread}/maps", base)
                lines = {key: place for place, key in _MAPPING.findall(memory)}
            vanished = False
            for key, place in lines.items():
                if key not in self._inodes:
                    vanished |= not self._look_up(base, thread, key, place)
                node = self._inodes.get(key)
                if node:
                    found.update(self._wanted[node])
            if not vanished:
                return
        raise OSError(errno.EAGAIN, "mappings change faster than they can be read")

    def _look_up(self, base: int, thread: str, key: bytes, place: bytes) -> bool:
        """Learn what inode KEY of a maps line is; False if the mapping has gone meanwhile."""
        if self._map_files:
            low, high = place.split(b"-")
            # the names in map_files have no leading zeros, the lines of maps may
            name = b"%x-%x" % (int(low, 16), int(high, 16))
            error = self._statx(base, b"map_files/" + name, 0)
            if error in _GONE and thread:
                error = self._statx(base, b"../" + thread.encode() + b"/map_files/" + name, 0)
            if error in _GONE:
                return False
            if error != errno.EPERM:
                # another error is the file's own (a dead file server, a user's FUSE mount)
                node = None if error else self._key()
                self._inodes[key] = node if node in self._wanted else None
                return True
            self._map_files = False
        return self._look_up_by_path(base, key)

    def _look_up_by_path(self, base: int, key: bytes) -> bool:
        """The way without CAP_CHECKPOINT_RESTORE: the path, seen from the process's own root."""
        numbers, _, path = key.partition(b"/")
        device, inode = numbers.split()
        major, minor = (int(part, 16) for part in device.split(b":"))
        same: NodeKey = ("file", os.makedev(major, minor), int(inode))
        if same in self._wanted:
            self._inodes[key] = same
            return True
        error = self._statx(base, b"root/" + path.replace(b"\\012", b"\n"), _NO_FOLLOW)
        if not error:
            _, number, _, _, dev_major, dev_minor = _STATX.unpack_from(self._buffer)
            if (number, dev_major, dev_minor) == (int(inode), major, minor):
                node = self._key()
                self._inodes[key] = node if node in self._wanted else None
                return True
        if path.startswith(b"dev/") and not path.startswith((b"dev/shm/", b"dev/zero")):
            raise OSError(errno.EACCES, "a mapped node can't be told without CAP_CHECKPOINT_RESTORE")
        self._inodes[key] = None
        return True

    def _statx(self, base: int, name: bytes, flags: int) -> int:
        """Fill the buffer; return 0 or the errno."""
        if _libc.statx(base, name, flags | _NO_SYNC | _NO_AUTOMOUNT, _TYPE_AND_INO, self._buffer):
            return ctypes.get_errno()
        return 0

    def _key(self) -> NodeKey:
        mode, inode, major, minor, dev_major, dev_minor = _STATX.unpack_from(self._buffer)
        kind = stat.S_IFMT(mode)
        if kind == stat.S_IFCHR:
            return "char", major, minor
        if kind == stat.S_IFBLK:
            return "block", major, minor
        return "file", os.makedev(dev_major, dev_minor), inode


def _same_table(first: int, second: int) -> bool:
    """Whether two threads share one descriptor table; False also if that can't be told."""
    return _KCMP is not None and _libc.syscall(_KCMP, first, second, _KCMP_FILES, 0, 0) == 0


def _really_open(table: int, base: int, info: str, number: str) -> bool:
    """Whether a descriptor can be used at all: one of O_PATH only names the node.  The link's mode
    shows whether it may read or write, which O_PATH never may (proc_pid_fd(5))."""
    try:
        if os.lstat(number, dir_fd=table).st_mode & (stat.S_IRUSR | stat.S_IWUSR):
            return True
        text = proc.read(info, base)
    except FileNotFoundError:
        return False
    for line in text.splitlines():
        if line.startswith(b"flags:"):
            return not int(line.split()[1], 8) & _O_PATH
    return True


def boottime() -> int:
    """Return CLOCK_BOOTTIME in microseconds."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def pids() -> list[int]:
    """Return the processes that /proc lists."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def blindness(contained: bool = False) -> str:
    """Return why /proc can't show every process of the host, or, if CONTAINED, of the agent's own
    pid namespace; "" if nothing says so.

    0xEFFFFFFC is the inode of the initial pid namespace (PROC_PID_INIT_INO, linux/nsfs.h).
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return "/proc belongs to another pid namespace than the agent"
        if not contained and os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
            return (
                "the agent runs in a pid namespace: processes outside can't be seen; if no other process"
                ' can reach its devices, set pid-namespace = "own" in [reclaim]'
            )
        with proc.opened(os.getpid()) as base:
            lacking = _lacking(proc.read("status", base))
    except OSError as error:
        return f"/proc can't be read: {error}"
    if lacking:
        return f"the agent lacks {' and '.join(lacking)}: other users' processes can't be looked into"
    return ""


def _lacking(status: bytes) -> list[str]:
    """Return those of `_NEEDED` that the text of /proc/PID/status shows not to be effective."""
    for line in status.splitlines():
        if line.startswith(b"CapEff:"):
            effective = int(line.split()[1], 16)
            return [name for name, bits in _NEEDED.items() if not effective & bits]
    return list(_NEEDED)


def describe(
    pid: int, base: int, devices: Mapping[str, bool], shown: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return what is told about a holder, SHOWN being the evidence by device.  Raises OSError if it
    has ended."""
    facts = proc.stat(base)
    _, uids = proc.status(base)
    path = proc.cgroup(base)
    try:
        exe = os.fsencode(os.readlink("exe", dir_fd=base)).decode("utf-8", "backslashreplace")
    except OSError:
        exe = ""  # a kernel thread, or none any more
    return {
        "pid": pid,
        "start": facts.start,
        "uids": uids,
        "exe": exe,
        "comm": facts.comm,
        "unit": proc.unit_of(path),
        "cgroup": path,
        "session": facts.session,
        "ancestors": proc.ancestors(facts.parent),
        "devices": dict(devices),
        "evidence": {device: dict(shown.get(device, {})) for device in devices},
    }


def _evidence(walk: Walk, base: int, devices: Collection[str], plain: bool) -> dict[str, dict[str, str]]:
    """Return, by device, how the process just inspected uses it: ``path`` (as the process calls it),
    ``descriptors`` (how many), and what `evidence` knows, unless PLAIN.  What can't be read is left
    out: it proves nothing."""
    found = {}
    for device in devices:
        names = walk.descriptors.get(device, [])
        shown = found[device] = dict(walk.kfd.get(device, {}))
        if not names:
            continue
        shown["descriptors"] = str(len(names))
        try:
            path = os.fsencode(os.readlink(names[0], dir_fd=base))
            shown["path"] = path.decode("utf-8", "backslashreplace")
            if not plain:
                infos = [name.replace("fd/", "fdinfo/") for name in names[:_MOST_DESCRIPTORS]]
                shown.update(evidence.of_descriptors(base, infos))
        except OSError:
            continue
    return found


def scan(
    targets: Mapping[str, Sequence[NodeKey]],
    skip: Collection[int] = (),
    announce: Callable[[int], None] = lambda _: None,
    contained: bool = False,
    plain: Collection[int] = (),
) -> dict[str, Any]:
    """Walk all processes but this one and those of SKIP; call ANNOUNCE with each pid before, and
    with `EVIDENCE` added before evidence of a holder is read, which isn't done for those of PLAIN.
    CONTAINED: those of this pid namespace are all.

    Returns ``started`` (boot µs, before the first look), ``processes`` (see `describe`),
    ``uninspected`` (pid and uid of those that can't be read), ``seen`` (how many were looked
    at), ``blind`` (why the whole is incomplete, "" if it isn't) and ``took`` (µs).
    """
    started = boottime()
    walk = Walk(targets)
    processes: list[dict[str, Any]] = []
    uninspected: list[tuple[int, int]] = []
    seen: set[int] = {os.getpid(), *skip}
    passed = len(seen)
    for _ in range(_ROUNDS):
        fresh = [pid for pid in pids() if pid not in seen]
        if not fresh:
            break
        seen.update(fresh)
        for pid in fresh:
            announce(pid)
            try:
                with proc.opened(pid) as base:
                    devices = walk.inspect_open(pid, base)
                    if devices:
                        announce(pid + EVIDENCE)
                        shown = _evidence(walk, base, devices, pid in plain)
                        processes.append(describe(pid, base, devices, shown))
            except (FileNotFoundError, ProcessLookupError):
                continue
            except OSError:
                uninspected.append((pid, uid_of(pid)))
    announce(0)
    return {
        "started": started,
        "processes": processes,
        "uninspected": uninspected,
        "seen": len(seen) - passed,
        "blind": blindness(contained),
        "took": boottime() - started,
    }


def uid_of(pid: int) -> int:
    """Return the real uid of PID, the owner of /proc/PID if that can't be read, else 0."""
    try:
        with proc.opened(pid) as base:
            return proc.status(base)[1][0]
    except OSError:
        try:
            return os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return 0
