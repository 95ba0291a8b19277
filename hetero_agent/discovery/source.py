"""The kernel as a source of devices: monitor, enumerate, then news of what changed.

All state lives on the loop's thread; reading is done by `Readers`.  Each device has at most one
read under way, so a sick one costs one thread and delays nobody.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from hetero_agent.config import DiscoveryTable
from hetero_agent.core import address
from hetero_agent.core.events import Event, Observed
from hetero_agent.core.model import DeviceRecord, Instant, Obstacle
from hetero_agent.core.symptoms import Symptoms
from hetero_agent.discovery import correlate, monitor, profiles, reader, sysfs, vendors
from hetero_agent.discovery.facts import DeviceFacts
from hetero_agent.discovery.links import LinkNews
from hetero_agent.discovery.readers import NoReaderError, Readers, ReadTimeoutError
from hetero_agent.text import printable

log = logging.getLogger("hetero_agent.discovery")

#: Seconds for which uevents are gathered before their devices are read.
COALESCE: Final = 0.002
#: Seconds until the port of an adapter whose interface has news has followed that.
_PORT_FOLLOWS: Final = 0.5
#: Seconds that reading one device may take.
READ_DEADLINE: Final = 3.0
#: Seconds between looks at the monitor, and at the nodes of devices that lack one.
HEARTBEAT: Final = 2.0

_PLATFORM: Final = "/sys/devices/platform/"


class KernelSource:
    """Devices of the kernel.  SUBMIT gets `Observed` events on the loop's thread, WEDGED the path
    of a DRM device that its driver gave up and how it could be recovered."""

    def __init__(
        self,
        table: DiscoveryTable,
        profiles_dir: Path | None,
        submit: Callable[[Event], None],
        now: Callable[[], Instant],
        *,
        wedged: Callable[[str, str], None] | None = None,
        read_deadline: float = READ_DEADLINE,
        buffer_sizes: tuple[int, ...] = monitor.BUFFER_SIZES,
    ) -> None:
        self._table = table
        self._profiles_dir = profiles_dir
        self._submit = submit
        self._now = now
        self._wedged = wedged
        self._deadline = read_deadline
        self._buffer_sizes = buffer_sizes
        self._profiles = profiles.ProfileSet()
        self._monitor: monitor.Monitor | None = None
        self._links = LinkNews(self._link_changed)
        self._readers = Readers()
        self._source_problem = ""
        self._listing = sysfs.Listing((), 0)
        self._facts: dict[str, DeviceFacts] = {}
        self._correlated: dict[str, correlate.Correlated] = {}
        self._records: dict[str, DeviceRecord] = {}
        self._dirty: set[str] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._stuck: set[str] = set()
        self._unread: set[str] = set()
        self._failed: set[str] = set()
        self._lack = ""
        self._kfd_generation = ""
        self._flush_timer: asyncio.TimerHandle | None = None
        self._resync_reason = ""
        self._resync_task: asyncio.Task[None] | None = None
        self._beat_task: asyncio.Task[None] | None = None
        self._started = False
        self._stopped = False

    # -- life -----------------------------------------------------------------------------------
    async def start(self) -> None:
        """Listen, enumerate, and submit what is there (`Observed` with COMPLETE).

        Raises OSError if no uevent monitor can be made at all.
        """
        self._profiles = await asyncio.to_thread(profiles.load, self._profiles_dir)
        self._listen()
        await self._enumerate("", complete=True)
        self._started = True
        if self._resync_reason:
            self.resync(self._resync_reason)
        self._schedule()
        self._beat_task = asyncio.create_task(self._beat(), name="discovery-heartbeat")

    async def reload(self, profiles_dir: Path | None = None) -> None:
        """Read the profiles again (of another directory, if given) and compare everything.

        A profile that is wrong is left out and shows in `problems`; nothing is raised for it.
        Raises OSError, with the old monitor still listening, if no new one can be made.
        """
        if profiles_dir is not None:
            self._profiles_dir = profiles_dir
        self._profiles = await asyncio.to_thread(profiles.load, self._profiles_dir)
        known = {profile.name for profile in self._profiles.profiles}
        self._facts = {path: facts for path, facts in self._facts.items() if facts.profile in known}
        self._listen()
        self.resync("profiles-reloaded")

    def configure(self, table: DiscoveryTable) -> None:
        """Go by another ``[discovery]`` table; `reload` then listens anew."""
        self._table = table

    async def stop(self) -> None:
        """Stop listening and reading; nothing is submitted afterwards."""
        self._stopped = True
        self._links.stop()
        if self._monitor is not None:
            self._monitor.stop()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        tasks = [task for task in (self._beat_task, self._resync_task, *self._reading.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._readers.close()

    @property
    def symptoms(self) -> dict[str, Symptoms]:
        """What the profiles in force say of health, by the profile's name."""
        return {profile.name: profile.symptoms for profile in self._profiles.profiles}

    @property
    def open_to_all(self) -> frozenset[str]:
        """The paths of the nodes that are everybody's, as the profiles in force mean it."""
        return frozenset().union(*(one.open_to_all for one in self._correlated.values()))

    def look(self, path: str) -> None:
        """Read the device at PATH again: somebody saw it change without an event."""
        if path in self._facts:
            self._dirty.add(path)
            self._schedule()

    def resync(self, reason: str) -> None:
        """Compare with the whole of /sys soon; REASON is for the audit."""
        self._resync_reason = self._resync_reason or reason
        if self._started and self._resync_task is None and not self._stopped:
            self._resync_task = asyncio.create_task(self._resync(), name="discovery-resync")

    def progress(self) -> float:
        """Look at the monitor's socket; return when (time.monotonic) it could last be read.

        A stuck read of a device doesn't count: it is a problem of that device.
        """
        if self._monitor is None:
            return 0.0
        # now and not at the next heartbeat, which may be further away than the watchdog's interval
        self._monitor.check()
        return self._monitor.last_alive

    def problems(self) -> list[str]:
        """Return what an administrator should know, each with what to do about it."""
        found = list(self._profiles.problems)
        if self._source_problem:
            found.append(self._source_problem)
        if self._monitor is not None and self._monitor.problem:
            found.append(self._monitor.problem)
        found += [
            f"{path.rsplit('/', 1)[-1]}: reading {path} does not return; its last known state is kept"
            for path in sorted(self._stuck)
        ]
        found += [
            f"{path}: reading it failed, see the log; its last known state is kept" for path in self._failed
        ]
        if self._lack:
            found.append(f"devices can't be read: {self._lack}; their last known state is kept")
        elif self._unread:
            found.append(
                f"{self._readers.stuck} reads of devices don't return, so {len(self._unread)} devices"
                " can't be read at all; restart the host or remove the sick devices"
            )
        found += [problem for one in self._correlated.values() for problem in one.problems]
        if self._started and not self._records:
            found.append(self._why_none())
        return [printable(problem, 400) for problem in found]

    def _why_none(self) -> str:
        if not self._listing.anchors:
            return (
                f"no device: {sysfs.PCI_DEVICES} lists nothing and no class device fits a profile;"
                " is /sys mounted and readable here?"
            )
        names = ", ".join(profile.name for profile in self._profiles.profiles)
        return (
            f"no device: {self._listing.pci_seen} PCI devices seen, none fits a profile ({names});"
            f" a TOML file in {self._profiles_dir} adds others"
        )

    # -- uevents --------------------------------------------------------------------------------
    def _listen(self) -> None:
        """Start the monitor for the profiles' subsystems, before the old one (if any) stops, and the news
        of network interfaces if they are among them."""
        source, self._source_problem = monitor.choose_source(self._table.udev_source)
        wanted = self._profiles.class_subsystems | self._profiles.node_subsystems | {"pci", "kfd", "platform"}
        fresh = monitor.Monitor(source, wanted, self._on_events, self.resync, self._buffer_sizes)
        fresh.start()
        if self._monitor is not None:
            self._monitor.stop()
        self._monitor = fresh
        if "net" in wanted:
            self._links.start()
        log.info("listening to uevents of %s: %s", source, ", ".join(sorted(wanted)))

    def _on_events(self, events: list[monitor.Uevent]) -> None:
        for event in events:
            log.debug("uevent %s %s", printable(event.action, 32), printable(event.path))
            if self._wedged and event.wedged and event.action == "change" and event.subsystem == "drm":
                self._wedged(event.path, event.wedged)
            for path in filter(None, (event.path, event.old_path)):
                if event.subsystem == "kfd" or self._is_part_platform(path):
                    self._dirty.update(self._with_kfd())
                anchor = self._anchor(path, event.subsystem)
                if anchor is None:
                    continue
                if event.action == "remove" and anchor == path:
                    self._dirty.update(self._physical_function_of(anchor))
                if event.action == "remove" and anchor == path and anchor in self._stuck:
                    # it is gone, whatever the read of it still waits for; another may come here
                    self._stuck.discard(anchor)
                    self._take(anchor, None)
                    self._publish()
                self._dirty.add(anchor)
        self._schedule()

    def _link_changed(self, name: str | None) -> None:
        """An interface has news, or (None) some may have: read the devices that have one; and once more
        when its adapter has taken note, too."""
        for path, facts in self._facts.items():
            if any(one.subsystem == "net" and name in (one.name, None) for one in facts.children):
                self._dirty.add(path)
                asyncio.get_running_loop().call_later(_PORT_FOLLOWS, self.look, path)
        self._schedule()

    def _anchor(self, path: str, subsystem: str) -> str | None:
        """Return the known device at or above PATH, else where one could be, None for nowhere."""
        above = path
        while above.count("/") > 2:
            if above in self._facts:
                return above
            above, _, name = above.rpartition("/")
            if address.COMPONENT.fullmatch(name):
                break  # a PCI device is one of its own, whatever it is behind
        if address.last_in(path) or subsystem in self._profiles.class_subsystems:
            return sysfs.anchor_of(path, subsystem)
        return None

    def _is_part_platform(self, path: str) -> bool:
        if not path.startswith(_PLATFORM):
            return False
        name = path.removeprefix(_PLATFORM).split("/", 1)[0]
        return any(one.parts and fnmatchcase(name, one.parts.platform) for one in self._profiles.profiles)

    def _with_kfd(self) -> list[str]:
        """Return the devices whose records depend on the KFD topology, which all of them share."""
        return [path for path, facts in self._facts.items() if "kfd" in self._profile_of(facts).facts]

    def _physical_function_of(self, anchor: str) -> list[str]:
        """Return the device that ANCHOR is a virtual function of: when the last one goes it counts
        itself again, and the kernel (6.1) says nothing of that."""
        name = self._facts[anchor].links.get("physfn") if anchor in self._facts else None
        return [path for path, facts in self._facts.items() if name and facts.identity.name == name]

    def _profile_of(self, facts: DeviceFacts) -> profiles.Profile:
        return self._profiles.named(facts.profile)

    def _schedule(self) -> None:
        if self._dirty and self._flush_timer is None and not self._stopped:
            self._flush_timer = asyncio.get_running_loop().call_later(COALESCE, self._flush)

    def _flush(self) -> None:
        """Read what changed; a device that is being read waits for the end of that."""
        self._flush_timer = None
        if self._started:
            for anchor in self._dirty - self._reading.keys() - self._stuck:
                self._dirty.discard(anchor)
                self._begin(anchor, publish=True)

    # -- reading --------------------------------------------------------------------------------
    def _begin(self, anchor: str, publish: bool) -> asyncio.Task[None]:
        task = asyncio.create_task(self._reread(anchor, publish), name=f"discovery-read {anchor}")
        self._reading[anchor] = task
        return task

    async def _reread(self, anchor: str, publish: bool) -> None:
        try:
            if await self._read(anchor) and publish:
                self._publish()
        finally:
            self._reading.pop(anchor, None)
            self._schedule()

    async def _read(self, anchor: str) -> bool:
        """Read one device and take what was read; False if that was not possible."""
        chosen = self._profiles
        work = functools.partial(sysfs.read_device, anchor, chosen)
        try:
            facts = await self._readers.call(work, self._deadline, lambda: self._unstuck(anchor))
            if chosen is not self._profiles:
                self._dirty.add(anchor)
                return False
            self._take(anchor, facts)
        except ReadTimeoutError:
            self._stuck.add(anchor)
            log.warning("reading %s does not return; its last known state is kept", printable(anchor))
            return False
        except NoReaderError:
            self._unread.add(anchor)
            return False
        except OSError as error:
            self._lacking(error)
            self._unread.add(anchor)
            return False
        except Exception:
            # what one device answers must not cost the others theirs
            log.exception("reading %s failed; its last known state is kept", printable(anchor))
            self._failed.add(anchor)
            return False
        self._failed.discard(anchor)
        self._unread.discard(anchor)
        self._lack = ""
        return True

    def _lacking(self, error: OSError) -> None:
        """Something of this process is wanting; the heartbeat tries again."""
        if not self._lack:
            log.warning("devices can't be read: %s; their last known state is kept", error.strerror)
        self._lack = error.strerror or "error"

    def _unstuck(self, anchor: str) -> None:
        """An abandoned read came back: read again, now that it is possible."""
        self._stuck.discard(anchor)
        log.info("reading %s returned at last", printable(anchor))
        self._dirty.add(anchor)
        self._schedule()

    def _take(self, anchor: str, facts: DeviceFacts | None) -> None:
        earlier = self._facts.get(anchor)
        if facts is None:
            self._facts.pop(anchor, None)
            self._correlated.pop(anchor, None)
        else:
            facts = facts.with_memory_of(earlier) if earlier else facts
            self._facts[anchor] = facts
            self._correlated[anchor] = correlate.correlate(facts, self._profile_of(facts))
        others = {one.kfd for one in (earlier, facts) if one}
        if len(others) > 1 or (earlier is None) is not (facts is None):
            self._dirty.update(path for path in self._with_kfd() if path != anchor and others != {()})

    def _publish(self, resync: str = "", complete: bool = False) -> None:
        """Submit the difference between what is known now and what was submitted last."""
        if self._stopped:
            return
        records = correlate.finish(self._correlated.values())
        changed = tuple(record for key, record in records.items() if self._records.get(key) != record)
        gone = tuple(key for key in self._records if key not in records)
        self._records = records
        if changed or gone or resync or complete:
            self._submit(Observed(self._now(), "kernel", changed, gone, resync=resync, complete=complete))

    # -- the whole of /sys --------------------------------------------------------------------
    async def _resync(self) -> None:
        try:
            while self._resync_reason:
                reason, self._resync_reason = self._resync_reason, ""
                await self._enumerate(reason, complete=False)
        finally:
            self._resync_task = None
            self._schedule()

    async def _enumerate(self, reason: str, complete: bool) -> None:
        try:
            work = functools.partial(sysfs.list_anchors, self._profiles)
            self._listing = await self._readers.call(
                work, self._deadline, lambda: self.resync("listing-returned")
            )
        except (ReadTimeoutError, NoReaderError):
            log.error("listing /sys does not return; devices are as last known")
            self._publish(reason, complete)
            return
        except OSError as error:
            if complete:
                raise
            self._lacking(error)
            self._resync_reason = self._resync_reason or reason
            await asyncio.sleep(HEARTBEAT)
            return
        wanted = self._correlated.keys() | set(self._listing.anchors)
        for anchor in self._stuck.intersection(self._correlated).difference(self._listing.anchors):
            self._stuck.discard(anchor)
            self._take(anchor, None)
        self._dirty.update(wanted & self._reading.keys())
        idle = sorted(wanted - self._reading.keys() - self._stuck)
        await asyncio.gather(*(self._begin(anchor, publish=False) for anchor in idle))
        self._publish(reason, complete)

    async def _beat(self) -> None:
        """Prove that the monitor can be read, look for what comes without a uevent, and resync now and
        then."""
        resynced = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT)
            self._check_monitor()
            try:
                self._dirty.update(self._with_late_nodes(), self._with_other_topology(), self._unread)
            except OSError as error:
                # what this process lacks, as descriptors: all is read once it has them again
                self._lacking(error)
                self.resync("reading-failed")
            self._schedule()
            if time.monotonic() >= resynced + self._table.resync_interval:
                resynced = time.monotonic()
                self.resync("periodic")

    def _check_monitor(self) -> None:
        """Look at the socket, or listen to the other source if udevd came or went."""
        if self._monitor is None:
            return
        if monitor.choose_source(self._table.udev_source)[0] == self._monitor.source:
            self._monitor.check()
            return
        try:
            self._listen()
        except OSError as error:
            log.warning("can't listen to the other uevent source: %s", printable(error))
            return
        self.resync("source-changed")

    def _with_other_topology(self) -> Iterable[str]:
        """Return the cards in the KFD topology if that has changed: another compute partition mode
        comes without a uevent, since the render nodes of all partitions are there all the time
        (kernel: drivers/gpu/drm/amd/amdgpu/amdgpu_xcp.c, amdgpu_xcp_dev_register)."""
        cards = self._with_kfd()
        if not cards:
            return ()
        before, self._kfd_generation = self._kfd_generation, vendors.kfd_generation()
        return cards if self._kfd_generation != before else ()

    def _with_late_nodes(self) -> Iterable[str]:
        """Return the devices with a node which has come, or become another, without a uevent (nvidia-modprobe
        makes its nodes by mknod, that of nvidia-uvm at the first use of CUDA), and the cards whose MIG
        instances came or went."""
        look = functools.cache(reader.node)  # a host's cards have most of them in common
        for anchor, facts in self._facts.items():
            whole, *units = self._correlated[anchor].drafts or (None,)
            profile = self._profile_of(facts)
            waits = any(one and one.record.obstacle is Obstacle.NO_NODE for one in units or (whole,))
            if (
                sysfs.named_node_changed(facts, profile, look)
                or (waits and sysfs.missing_node_changed(facts, profile))
                or ("nvidia-mig" in profile.facts and sysfs.instances_changed(facts))
            ):
                yield anchor
