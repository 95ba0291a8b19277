"""The rules for the variables of a lease, from what breaks in practice: each against what the shipped
profiles make of each vendor's host (golden/)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_agent.access.door import Door
from hetero_agent.client.manifest import DEVICE_VARIABLES, Manifest, chooses_devices
from tests.discovery.hosts import nvidia
from tests.discovery.observe import enumerate_once
from tests.discovery.test_golden import GOLDEN, lease
from tests.support.umock import bed, in_umockdev

#: Variables that choose among the devices of one vendor, each set of which only that vendor's have.
VENDORS = {
    "nvidia": {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"},
    "amd": {"ROCR_VISIBLE_DEVICES"},
    "intel": {"ZE_AFFINITY_MASK", "ZE_ENABLE_PCI_ID_DEVICE_ORDER", "ZE_FLAT_DEVICE_HIERARCHY"},
    "ascend": {"ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"},
    "habana": {"HABANA_VISIBLE_MODULES"},
    "rdma": {"NCCL_IB_HCA", "UCX_NET_DEVICES"},
    "xilinx": {"XILINX_XRT"},
}


def manifests(host: str = "*") -> Iterator[tuple[str, dict[str, Any]]]:
    """The vendor and each manifest of the golden files of HOST."""
    for path in sorted(GOLDEN.glob(f"{host}.json")):
        for one in json.loads(path.read_text())["manifests"]:
            yield path.stem.partition("-")[0], one


def values(host: str, variable: str) -> list[str]:
    """The variable in a lease of the last device of HOST, and in one of the two first in reverse."""
    return [one["env"][variable] for _, one in manifests(host)]


def test_every_lease_says_which_it_is_and_of_what() -> None:
    for _, one in manifests():
        env = one["env"]
        assert env["HETERO_LEASE_ID"] == one["lease"]
        assert env["HETERO_DEVICES"] == ",".join(one["devices"])
        assert env["HETERO_DEVICE_COUNT"] == str(len(one["devices"]))


def test_a_lease_has_its_vendors_variables_and_no_others_not_even_to_say_none() -> None:
    for vendor, one in manifests():
        ours = {name for name in one["env"] if not name.startswith("HETERO_")}
        assert ours == VENDORS.get(vendor, set()), vendor
        assert set(one["env-filtered"]) <= ours


def test_what_was_inherited_is_replaced_or_gone() -> None:
    inherited = {**dict.fromkeys(DEVICE_VARIABLES, "all"), "HETERO_DEVICES": "x", "HOME": "/root"}
    for _, one in manifests():
        made = Manifest.of(one).environment(inherited)
        assert made["HOME"] == "/root"
        chosen = {name: value for name, value in made.items() if chooses_devices(name)}
        assert chosen.items() <= {**one["env"], "HETERO_RESOURCE": one["resource"]}.items()


def test_nvidia_numbers_in_pci_order_unless_a_filter_hides_the_rest() -> None:
    assert values("nvidia", "CUDA_VISIBLE_DEVICES") == ["1", "0,1"]
    assert set(values("nvidia", "CUDA_DEVICE_ORDER")) == {"PCI_BUS_ID"}
    assert [one["env-filtered"]["CUDA_VISIBLE_DEVICES"] for _, one in manifests("nvidia")] == ["0", "0,1"]
    # the container runtime adds nothing of its own
    assert set(values("nvidia", "NVIDIA_VISIBLE_DEVICES")) == {"void"}


def test_mig_instances_by_uuid_everywhere() -> None:
    for _, one in manifests("nvidia-mig"):
        named = one["env"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(named) == len(one["devices"])
        assert all(name.startswith("MIG-GPU-") for name in named)
        assert one["env-filtered"] == {}


@in_umockdev()
def test_nvidia_cards_by_uuid_on_request(tmp_path: Path) -> None:
    text = Path("hetero_agent/profiles/nvidia.toml").read_text()
    by_number = '[env.CUDA_VISIBLE_DEVICES]\nvalue = "{index}"\nrenumbered = true\n'
    assert by_number in text
    (tmp_path / "nvidia.toml").write_text(
        text.replace(by_number, '[env.CUDA_VISIBLE_DEVICES]\nvalue = "{uuid}"\n').replace(
            "required = true\n\n[[mounts]]", "\n[[mounts]]"
        )
    )
    with bed() as mock:
        nvidia(mock)
        found = enumerate_once(tmp_path)
        got = asyncio.run(Door().prepare(lease(list(found.values())), list(found.values())))
    assert got["env"]["CUDA_VISIBLE_DEVICES"] == (  # type: ignore[index]
        "GPU-00000000-1111-2222-3333-444444444444,GPU-00000001-1111-2222-3333-444444444444"
    )
    assert got["env-filtered"] == {}


def test_amd_has_exactly_one_since_two_filter_twice() -> None:
    for host in ("amd", "amd-partitions"):
        for _, one in manifests(host):
            assert [name for name in one["env"] if name.endswith("VISIBLE_DEVICES")] == ["ROCR_VISIBLE_DEVICES"]


def test_intel_has_a_mask_or_a_selector_never_both() -> None:
    for _, one in manifests("intel"):
        assert len({"ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"} & one["env"].keys()) == 1


def test_intel_counts_cards_whatever_tiles_they_have() -> None:
    assert set(values("intel", "ZE_FLAT_DEVICE_HIERARCHY")) == {"COMPOSITE"}


def test_ascend_ascending_and_by_the_numbers_of_the_nodes() -> None:
    assert values("ascend", "ASCEND_RT_VISIBLE_DEVICES") == ["0", "0,1"]
    for _, one in manifests("ascend"):
        paths = [path for _, path, role, *_ in one["nodes"] if role == "own"]
        numbers = one["env"]["ASCEND_VISIBLE_DEVICES"].split(",")
        assert sorted(paths) == sorted(f"/dev/davinci{number}" for number in numbers)


def test_gaudi_by_modules_which_stay() -> None:
    assert values("habana", "HABANA_VISIBLE_MODULES") == ["6", "6,7"]
    for _, one in manifests("habana"):
        assert "HABANA_VISIBLE_DEVICES" not in one["env"]


def test_rdma_by_port_and_exactly() -> None:
    # mlx5_1 alone would be mlx5_10, too
    assert values("rdma", "UCX_NET_DEVICES") == ["mlx5_10:1,mlx5_10:2", "mlx5_10:1,mlx5_10:2,mlx5_1:1"]
    assert [one[0] for one in values("rdma", "NCCL_IB_HCA")] == ["=", "="]


@pytest.mark.parametrize(
    "name", ["FURIOSA_DEVICES", "RBLN_DEVICES", "NEURON_RT_VISIBLE_CORES", "TPU_VISIBLE_CHIPS"]
)
def test_other_vendors_choices_are_known_as_such(name: str) -> None:
    assert chooses_devices(name)
