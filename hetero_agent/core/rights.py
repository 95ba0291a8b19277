"""Who may be bound, whose a holder is, and who may be signalled (design section 5).

A lease bound to somebody else's process, with "kill" on its end, would be a weapon; so would a
file descriptor passed to a service or inherited by a setuid program.  Hence: one may bind only
what is wholly one's own, and the agent signals only what is wholly the lease's.
"""

from __future__ import annotations

from collections.abc import Collection

from hetero_agent.core.containers import within
from hetero_agent.core.model import Binding, Holder, Lease, ProcessRef
from hetero_agent.core.ports import ProcessFacts


def may_bind_pid(actor_uid: int, facts: ProcessFacts) -> str:
    """Return "" if a caller with this uid may bind the process, else the reason why not.

    A process in a user namespace of the caller's is the caller's whatever its uids: the kernel gives
    whoever made the namespace every right over it (user_namespaces(7)).  So is that of a rootless
    container, whose first process has one of the uids that the caller was lent.
    """
    if actor_uid == 0 or all(uid == actor_uid for uid in facts.uids) or facts.owner == actor_uid:
        return ""
    return f"process {facts.ref.pid} does not run wholly as uid {actor_uid}; bind one that does"


def may_bind_unit(actor_uid: int, caller_unit: str, unit: str) -> str:
    """Return "" if a caller running in CALLER_UNIT may bind UNIT, else the reason why not."""
    if actor_uid == 0 or (unit and unit == caller_unit):
        return ""
    return "only root may bind a unit that the caller does not run in"


def bound_to(holder: Holder, binding: Binding, known: Collection[ProcessRef]) -> bool:
    """Tell whether HOLDER is in the process tree, the container or the unit of BINDING.  KNOWN are
    processes that were seen in its tree before (a daemon's parent may have gone since)."""
    if binding.unit is not None and holder.unit == binding.unit.name:
        return True
    if binding.cgroup and within(holder.cgroup, binding.cgroup):
        return True
    if binding.pid is None:
        return False
    return (
        holder.ref == binding.pid
        or binding.pid in holder.ancestors
        or holder.ref in known
        or any(ref in known for ref in holder.ancestors)
    )


def names_processes(binding: Binding) -> bool:
    """Tell whether BINDING says which processes are the lease's; else its uid has to."""
    return binding.pid is not None or binding.unit is not None


def belongs(holder: Holder, lease: Lease, known: Collection[ProcessRef]) -> bool:
    """Tell whether HOLDER is the lease's: `bound_to` its binding, or of its uid if that names no
    processes; never one that has nothing of a user's uid."""
    if lease.uid != 0 and lease.uid not in holder.uids:
        return False
    if not names_processes(lease.binding):
        return lease.uid in holder.uids
    return bound_to(holder, lease.binding, known)


def is_system(holder: Holder, units: Collection[str]) -> bool:
    """Tell whether the system itself keeps HOLDER: its cgroup is that of one of UNITS in
    system.slice, and it runs as root or as the unit's main process does.

    Only the service manager places processes there, so the cgroup is proof where the path of
    an executable would be none; but a service may run the programs of others (as cron does), which
    have their uids.
    """
    return (
        holder.unit in units
        and holder.cgroup.startswith("/system.slice/")
        and {0, holder.service_uid}.issuperset(holder.uids)
    )


def may_signal(holder: Holder, lease_uid: int | None, own_kin: bool = False) -> str:
    """Return "" if HOLDER may be ended for a lease of LEASE_UID (None: as an orphan, whoever's it
    is), else the reason why not.

    OWN_KIN says that it is `bound_to` the lease's binding, which is what a root lease goes by.
    The edge checks again, at the moment of the signal, that it still is that process and still
    holds the device, and spares pid 1, kernel threads, the agent and its bus.
    """
    if holder.pid <= 1:
        return "pid 1 is never ended"
    if lease_uid == 0:
        return "" if own_kin else f"process {holder.pid} is not in the lease's tree or unit"
    if 0 in holder.uids:
        return f"process {holder.pid} has uid 0 among its uids"
    whose = holder.uids[0] if lease_uid is None else lease_uid
    if any(uid != whose for uid in holder.uids):
        return f"process {holder.pid} does not run wholly as uid {whose}"
    return ""


def may_reap(holder: Holder, lease_uid: int | None) -> str:
    """Return "" if an administrator's Reap may end HOLDER, else the reason why not.

    LEASE_UID is the uid of the lease that the device comes back from, None for none: a uid-0
    process is never ended for another's lease.
    """
    if holder.pid <= 1:
        return "pid 1 is never ended"
    if lease_uid not in (None, 0) and 0 in holder.uids:
        return f"process {holder.pid} has uid 0 and the lease had not"
    return ""
