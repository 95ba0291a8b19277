"""News of device nodes, by inotify(7): opens and closes, and that a mode, owner or ACL was changed.

It doesn't open the nodes itself.  Placing a watch walks a path, which can block on a sick file
system, so a thread does it; the loop only reads events.  What inotify can't see are copies of a
node (mknod in a container) and descriptors passed on; the periodic scan is for those.  Opens count
on a device's own nodes; changes count on all of its nodes, since a lease gives them all.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hetero_agent.core.events import Closed, NodesTouched, Opened
from hetero_agent.core.model import DeviceRecord, Instant, Role
from hetero_agent.core.ports import Submit
from hetero_agent.text import printable

_log = logging.getLogger("hetero_agent.holders")

# linux/inotify.h
_CLOSE = 0x08 | 0x10  # IN_CLOSE_WRITE | IN_CLOSE_NOWRITE
_OPEN = 0x20
#: IN_ATTRIB: mode, owner, an extended attribute (so an ACL), times; also: a link less.
_ATTRIB = 0x04
#: With IN_MOVE_SELF and IN_DELETE_SELF: the path may be another node now.
_REPLACED = _ATTRIB | 0x800 | 0x400
_OVERFLOW = 0x4000
_IGNORED = 0x8000
#: IN_MASK_ADD: a node can be one device's own and another's parent, and has one watch.
_MASK_ADD = 0x20000000
_MASK_OWN = _OPEN | _CLOSE | _REPLACED | _MASK_ADD
_MASK_OTHER = _REPLACED | _MASK_ADD
_EVENT = struct.Struct("=iIII")  # wd, mask, cookie, length of the name after it

_libc = ctypes.CDLL(None, use_errno=True)

_CHUNK = 65536
#: The kernel's queue (16,384 events of 16 bytes) is empty after as many reads.
_MOST_READS = 4
#: Seconds between two reads: a process that opens and closes in a loop makes 50 events a second.
_REST = 0.02
#: Seconds until a node that can't be watched is tried again, doubled each time.
_FIRST_RETRY, _LAST_RETRY = 0.2, 30.0
#: Why a node that is not there can't be watched.
_GONE = os.strerror(errno.ENOENT)
#: Seconds that a scan waits for new watches to be in place.
_SETTLE = 1.0


#: The paths of a device's nodes, and whether each is its own.
_Paths = Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class _Order:
    """Have DEVICE watched at exactly PATHS; WHEN is the loop's time."""

    device: str
    paths: _Paths
    when: float


@dataclass(slots=True)
class _Outcome:
    """What became of an order: what FAILED (path -> reason), and whether a node, an OWN one, was
    replaced by another since it was last placed."""

    failed: dict[str, str] = field(default_factory=dict)
    replaced: bool = False
    own: bool = False


class NodeWatch:
    """Submits Opened, Closed and NodesTouched, at most one of each per device and read."""

    def __init__(self, submit: Submit, now: Callable[[], Instant]) -> None:
        self._submit = submit
        self._now = now
        self._fd = -1
        self._desired: dict[str, _Paths] = {}
        self._pending = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._failed: dict[tuple[str, str], str] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._retry_delay = _FIRST_RETRY
        self._rest: asyncio.TimerHandle | None = None
        self.overflows = 0
        # shared with the thread, under the lock
        self._lock = threading.Lock()
        self._devices: dict[int, dict[str, bool]] = {}
        self._dead: set[int] = set()
        # the thread's own
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._placed: dict[str, dict[str, int]] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin.  Raises OSError if there is no inotify instance to be had."""
        fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"inotify: {os.strerror(code)}")
        self._fd = fd
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, self._readable)
        self._thread = threading.Thread(target=self._place_all, args=(loop, fd), name="watches", daemon=True)
        self._thread.start()
        for device in self._desired:
            self._order(device)

    def watch(self, device: str, record: DeviceRecord | None) -> None:
        """Watch the nodes of RECORD, as they are now at their paths; None: no more."""
        paths: dict[str, bool] = {}
        for node in record.nodes if record else ():
            paths[node.path] = paths.get(node.path, False) or node.role is Role.OWN
        if paths:
            self._desired[device] = paths
        elif self._desired.pop(device, None) is None:
            return
        if self._fd >= 0:
            self._order(device)

    async def settled(self) -> None:
        """Wait until the watches asked for are in place, but no longer than a second."""
        try:
            async with asyncio.timeout(_SETTLE):
                await self._settled.wait()
        except TimeoutError:
            _log.warning("placing the watches of device nodes blocks")

    def drain(self) -> None:
        """Submit what the kernel has told of until now."""
        self._take()

    @property
    def watched(self) -> int:
        """How many nodes are watched for opens."""
        with self._lock:
            return sum(any(devices.values()) for devices in self._devices.values())

    @property
    def unwatched(self) -> dict[str, str]:
        """The nodes that can't be watched, and why."""
        return {path: reason for (_, path), reason in self._failed.items()}

    @property
    def blocked(self) -> bool:
        """Whether watches are still being placed."""
        return self._pending > 0

    def close(self) -> None:
        """Stop; the thread ends after what it is at."""
        if self._fd < 0:
            return
        for timer in (self._retry, self._rest):
            if timer is not None:
                timer.cancel()
        asyncio.get_running_loop().remove_reader(self._fd)
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(0.2)
            if self._thread.is_alive():
                # it may still use the number: better leak the descriptor than hit another one
                _log.warning("the thread that places watches is blocked")
            else:
                os.close(self._fd)
        self._fd = -1

    # -- the loop -----------------------------------------------------------------------------
    def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        self._take()
        loop.remove_reader(self._fd)
        self._rest = loop.call_later(_REST, self._resume)

    def _resume(self) -> None:
        self._rest = None
        asyncio.get_running_loop().add_reader(self._fd, self._readable)

    def _take(self) -> None:
        if self._fd < 0:
            return
        opened: set[str] = set()
        closed: set[str] = set()
        touched: set[str] = set()
        replaced: set[str] = set()
        for _ in range(_MOST_READS):
            try:
                data = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                break
            self._sort(data, opened, closed, touched, replaced)
        at = self._now()
        for device in sorted(opened):
            self._submit(Opened(at, device))
        for device in sorted(closed):
            self._submit(Closed(at, device))
        for device in sorted(touched):
            self._submit(NodesTouched(at, device))
        for device in sorted(replaced):
            self._order(device)

    def _sort(
        self, data: bytes, opened: set[str], closed: set[str], touched: set[str], replaced: set[str]
    ) -> None:
        offset = 0
        while offset < len(data):
            wd, mask, _, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + length
            if mask & _OVERFLOW:
                self.overflows += 1
                # any node may be another one now, too
                for news in (opened, closed, touched, replaced):
                    news.update(self._desired)
                continue
            with self._lock:
                found = self._devices.get(wd, {})
                devices = self._desired.keys() & found.keys()
                own = {device for device in devices if found[device]}
                if mask & _IGNORED:
                    self._devices.pop(wd, None)
                    self._dead.add(wd)
            if mask & _OPEN:
                opened |= own
            if mask & _CLOSE:
                closed |= own
            if mask & _ATTRIB:
                touched |= devices
            if mask & (_REPLACED | _IGNORED):
                replaced |= devices

    def _order(self, device: str) -> None:
        self._pending += 1
        self._settled.clear()
        now = asyncio.get_running_loop().time()
        self._orders.put(_Order(device, self._desired.get(device, {}), now))

    def _done(self, order: _Order, outcome: _Outcome) -> None:
        """An order was carried out."""
        self._pending -= 1
        if not self._pending:
            self._settled.set()
            with self._lock:
                # nothing is being placed, so no end of a watch can come before its beginning
                self._dead.clear()
        if self._fd < 0 or order.paths != self._desired.get(order.device, {}):
            return  # closed, or a later order follows
        loop = asyncio.get_running_loop()
        before = {path for device, path in self._failed if device == order.device}
        for path in before - outcome.failed.keys():
            del self._failed[order.device, path]
            outcome.replaced = True
            outcome.own |= order.paths.get(path, False)
        for path, reason in outcome.failed.items():
            if path not in before:
                # a node that goes is what an unplug looks like from here; the device tells of it
                level = logging.DEBUG if reason == _GONE else logging.INFO
                _log.log(level, "node %s can't be watched: %s", printable(path), reason)
            self._failed[order.device, path] = reason
        late = loop.time() - order.when > _SETTLE
        if outcome.own or (late and any(order.paths.values())):
            # opens may have been missed
            self._submit(Opened(self._now(), order.device))
        if outcome.replaced or late:
            self._submit(NodesTouched(self._now(), order.device))
        if not self._failed:
            self._retry_delay = _FIRST_RETRY
        elif self._retry is None:
            self._retry = loop.call_later(self._retry_delay, self._try_again)
            self._retry_delay = min(self._retry_delay * 2, _LAST_RETRY)

    def _try_again(self) -> None:
        self._retry = None
        for device in sorted({device for device, _ in self._failed}):
            if device in self._desired:
                self._order(device)

    # -- the thread ---------------------------------------------------------------------------
    def _place_all(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        while (order := self._orders.get()) is not None:
            outcome = self._place(fd, order)
            try:
                loop.call_soon_threadsafe(self._done, order, outcome)
            except RuntimeError:
                return  # the loop is closed

    def _place(self, fd: int, order: _Order) -> _Outcome:
        """Make the watches of one device what ORDER says."""
        placed = self._placed.setdefault(order.device, {})
        outcome = _Outcome()
        failed = outcome.failed
        stale: list[int] = []
        for path in [path for path in placed if path not in order.paths]:
            stale.append(placed.pop(path))
        for path, own in order.paths.items():
            wd = _libc.inotify_add_watch(fd, os.fsencode(path), _MASK_OWN if own else _MASK_OTHER)
            if wd < 0:
                code = ctypes.get_errno()
                failed[path] = (
                    "fs.inotify.max_user_watches is exhausted" if code == errno.ENOSPC else os.strerror(code)
                )
                # an old watch stays: the node may be open still, under no name
                continue
            earlier = placed.get(path)
            if earlier is not None and earlier != wd:
                outcome.replaced = True
                outcome.own |= own
            placed[path] = wd
            with self._lock:
                self._devices.setdefault(wd, {})[order.device] = own
                if wd in self._dead:
                    # deleted between the two calls: the end of this watch was read already
                    del self._devices[wd]
                    failed[path] = "the node was replaced"
        if not order.paths:
            del self._placed[order.device]
        for wd in stale:
            if wd not in placed.values():
                self._release(fd, wd, order.device)
        return outcome

    def _release(self, fd: int, wd: int, device: str) -> None:
        with self._lock:
            devices = self._devices.get(wd)
            if devices is None:
                return
            devices.pop(device, None)
            if devices:
                return
            del self._devices[wd]
        _libc.inotify_rm_watch(fd, wd)
