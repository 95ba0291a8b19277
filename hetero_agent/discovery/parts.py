"""Cards that are split or shared: the units they have instead.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from hetero_agent import names
from hetero_agent.core.model import Attribute, Node, Obstacle, Role
from hetero_agent.discovery.draft import Draft, Nodes
from hetero_agent.discovery.facts import ClassDevice, DeviceFacts, MigInstance
from hetero_agent.discovery.profiles import Parts, Profile, Shared, fill

#: The driver that owns MIG's capability nodes, by its name in /proc/devices.
MIG_DRIVER: Final = "nvidia-caps"

#: What is true of the card only.
_OF_THE_CARD: Final = ("memory-free", "memory-total")


def units_of(facts: DeviceFacts, profile: Profile, whole: Draft, nodes: Nodes) -> tuple[Draft, ...]:
    """Return the units of a card that is split now, else the slots of one that is shared."""
    rule = profile.parts
    units: tuple[Draft, ...] = ()
    if rule is not None and rule.facts:
        units = tuple(_mig_unit(one, facts, profile, rule, whole) for one in facts.mig)
    elif rule is not None:
        units = _class_units(facts, profile, rule, whole, nodes)
    if units or profile.shared is None:
        return units
    return tuple(_slot(number, whole, profile.shared) for number in range(profile.shared.slots))


def partitioned(whole: Draft, units: tuple[Draft, ...]) -> Draft:
    """Return the card without nodes of its own: its units have them.

    What is left is shared by the units (role ``parent``), so an open proves nothing of the card,
    and with nothing of its own to grant it is offline while it is partitioned.
    """
    taken = {node.path for unit in units for node in unit.record.own_nodes}
    nodes = tuple(_shared(node) for node in whole.record.nodes if node.path not in taken)
    attributes = {**whole.record.attributes, "parts": len(units)}
    obstacle = whole.record.obstacle or Obstacle.NO_NODE
    record = replace(whole.record, nodes=nodes, attributes=attributes, obstacle=obstacle)
    # where each class device is a unit the driver counts these; NVIDIA's counts cards, MIG or not
    return replace(whole, record=record, counted=whole.counted and "part" not in units[0].values)


def _shared(node: Node) -> Node:
    return replace(node, role=Role.PARENT) if node.role is Role.OWN else node


def _unit(
    whole: Draft,
    number: str,
    nodes: tuple[Node, ...],
    attributes: Mapping[str, Attribute],
    profile: Profile,
    rule: Parts,
) -> Draft:
    """Return the unit NUMBER of a card; without an own node it is offline."""
    own = [node for node in nodes if node.role is Role.OWN]
    kept = {key: value for key, value in whole.record.attributes.items() if key not in _OF_THE_CARD}
    attributes = {**kept, **attributes}
    blocked = whole.record.obstacle in (Obstacle.VFIO, Obstacle.NO_DRIVER)
    record = replace(
        whole.record,
        id=f"{whole.record.id}-p{number}",
        resource=_resource(rule.resource, attributes, profile),
        parent=whole.record.id,
        aliases=(),
        serial=f"{whole.record.serial}-p{number}" if whole.record.serial else "",
        nodes=nodes,
        attributes=attributes,
        obstacle=whole.record.obstacle if blocked else Obstacle.NONE if own else Obstacle.NO_NODE,
    )
    values = {**whole.values, **attributes, "id": record.id, "serial": record.serial}
    values["node"] = own[0].path if own else ""
    return Draft(record, values, {**whole.env, **rule.env}, counted=False)


def _slot(number: int, whole: Draft, shared: Shared) -> Draft:
    """Make a slot of a shared device: it has all that the device has, as the other slots do."""
    kept = {key: value for key, value in whole.record.attributes.items() if key not in _OF_THE_CARD}
    record = replace(
        whole.record,
        id=f"{whole.record.id}-s{number}",
        resource=shared.resource,
        parent=whole.record.id,
        aliases=(),
        serial=f"{whole.record.serial}-s{number}" if whole.record.serial else "",
        attributes={**kept, "slot": number},
    )
    values = {**whole.values, **record.attributes, "id": record.id, "serial": record.serial}
    return Draft(record, values, whole.env, counted=False)


def _resource(template: str, attributes: Mapping[str, Attribute], profile: Profile) -> str:
    filled = (fill(template, attributes) or f"{profile.resource}.part").lower()
    return filled if names.RESOURCE.fullmatch(filled) else f"{profile.resource}.part"


# -- class devices ------------------------------------------------------------------------------
def _class_units(
    facts: DeviceFacts, profile: Profile, rule: Parts, whole: Draft, nodes: Nodes
) -> tuple[Draft, ...]:
    """Make a unit of each class device of a card that has several; the card's place, its number
    in the KFD topology, else in the order of minors, is the id."""
    here = [
        child
        for child in (*facts.children, *facts.part_children)
        if child.subsystem == rule.subsystem and fnmatchcase(child.name, rule.pattern)
    ]
    if len(here) < 2:
        return ()
    kfd = {node.render_minor: node for node in facts.kfd if node.render_minor}
    partitions = {kfd[child.minor].partition for child in here if child.minor in kfd}
    numbered = len(partitions) == len(here)
    controls = tuple(one for one in whole.record.nodes if one.role is Role.CONTROL)

    def unit(order: int, child: ClassDevice) -> Draft:
        topology = kfd.get(child.minor)
        number = topology.partition if numbered and topology else order
        attributes: dict[str, Attribute] = {"part": number, "kernel-names": child.name}
        if topology:
            attributes |= {"kfd-index": topology.index, "kfd-gpu-id": topology.gpu_id}
        node = nodes.by_child.get(child.path)
        return _unit(whole, str(number), ((node,) if node else ()) + controls, attributes, profile, rule)

    return tuple(unit(*one) for one in enumerate(sorted(here, key=lambda one: one.minor)))


# -- MIG ----------------------------------------------------------------------------------------
def _mig_unit(one: MigInstance, facts: DeviceFacts, profile: Profile, rule: Parts, whole: Draft) -> Draft:
    """Make a unit of a compute instance.  Its user opens the capability nodes of the compute
    instance and of the GPU instance around it, which is the unit's own if nothing else is in it,
    and the card's node, which all its instances share."""
    alone = Counter(other.gpu_instance for other in facts.mig)[one.gpu_instance] == 1
    capabilities = [
        (one.compute_capability, Role.OWN),
        (one.gpu_capability, Role.OWN if alone else Role.PARENT),
    ]
    found = []
    for minor, role in capabilities:
        stat = facts.nodes.get(one.node(minor))
        if stat and stat.minor == minor and stat.major in facts.majors.get(MIG_DRIVER, ()):
            found.append(
                Node(one.node(minor), role, stat.kind, stat.major, minor, mode=stat.mode, gid=stat.gid)
            )
    if len(found) < len(capabilities) or whole.record.obstacle is Obstacle.NO_NODE:
        # without both it can't be used at all
        found = []
    attributes: dict[str, Attribute] = {
        "gpu-instance": one.gpu_instance,
        "compute-instance": one.compute_instance,
    }
    nodes = (*found, *(_shared(node) for node in whole.record.nodes))
    number = f"{one.gpu_instance}.{one.compute_instance}"
    return _unit(whole, number, nodes, attributes, profile, rule)
