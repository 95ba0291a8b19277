"""What virtual devices are on the bus, and the manifests of their leases, word for word.

``HETERO_GOLDEN=update`` writes the file anew; read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hetero_agent import names
from tests.support.agent import GROUP_GID, MEMBER, AgentProcess, SimProcess
from tests.support.calls import Client, V
from tests.support.sim import tell

GOLDEN = Path(__file__).parent / "golden" / "virtual.json"

#: Properties that say when and how often, or are another at each start.
_FLEETING = ("Since", "SinceBoottime", "AllocationCount")


def text_of(got: Any, directory: Path, lease: str = "") -> str:
    """GOT as JSON, with names in place of the directory and of the lease's id."""
    text = json.dumps(got, indent=1, sort_keys=True)
    text = text.replace(str(directory), "DIRECTORY")
    return text.replace(lease, "LEASE") if lease else text


def test_records_and_manifests(agent: AgentProcess, sim: SimProcess) -> None:
    tell(
        sim.socket, "add", id="npu", resource="example.com/npu", count=2,
        model="N1", memory=1 << 34, numa=1, serial="S",
    )  # fmt: skip
    tell(sim.socket, "add", id="card", resource="example.com/fpga")
    tell(sim.socket, "add", id="card-p0", resource="example.com/npu", parent="card")
    ids = ["card", "card-p0", "npu-0", "npu-1"]
    got: dict[str, Any] = {"records": {}, "manifests": []}
    with Client(agent.bus) as root, Client(agent.bus, MEMBER, [GROUP_GID]) as member:
        for one in ids:
            shown = root.wait_for_device(one, State="idle", Health="healthy")
            nodes = root.call(names.device_path(one), names.DEVICE, "GetNodes")
            got["records"][one] = {
                **{key: value for key, value in shown.items() if key not in _FLEETING},
                "nodes": nodes,
            }
        # the order of a lease is not that of the devices
        for number, devices in enumerate((["npu-1"], ["npu-1", "npu-0"], ["card-p0"])):
            options = {"devices": V("as", devices), "confirm": V("b", True)}
            resource = root.device(devices[0])["Resource"]
            lease, manifest = member.allocate(f"a{number}", resource, len(devices), options)
            got["manifests"].append(
                json.loads(text_of(manifest, agent.sim_directory, names.lease_id_of(lease)))
            )
            member.release(f"r{number}", lease)
            for one in devices:
                root.wait_for_device(one, State="idle")
    text = text_of(got, agent.sim_directory) + "\n"
    if os.environ.get("HETERO_GOLDEN") == "update":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert json.loads(text) == json.loads(GOLDEN.read_text())
