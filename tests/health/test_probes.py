"""What one look at a device finds, on directories as sysfs has them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hetero_agent.core.model import Node, Obstacle, Role
from hetero_agent.core.symptoms import Probe, Symptoms
from hetero_agent.health import probes
from hetero_agent.health.roster import spec_of
from tests.health.rig import bind, device_directory, fifo, file_node, kernel_record

ALL = Symptoms(probes=tuple(Probe))


def look(path: Path, **more: Any) -> dict[str, Any]:
    """One probe of the device at PATH, all probes on."""
    return probes.probe(spec_of(kernel_record(path, **more), ALL))


def findings(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(grade, reason) for grade, reason, _ in answer.get("findings", [])]


def test_a_device_that_is_well_has_nothing_to_tell(tmp_path: Path) -> None:
    path = device_directory(
        tmp_path,
        config="de10b023",
        current_link_width="16",
        max_link_width="16",
        aer_dev_fatal="Undefined 0\nTOTAL_ERR_FATAL 0",
        hwmon__hwmon0__temp1_input="41000",
        hwmon__hwmon0__temp1_crit="95000",
    )
    bind(path)
    assert look(path, driver="nvidia", nodes=(file_node(tmp_path / "node"),)) == {"counters": {"aer-fatal": 0}}


def test_a_device_that_is_not_in_sysfs(tmp_path: Path) -> None:
    assert look(tmp_path / "0000:3b:00.0") == {
        "findings": [["failed", "it is not in sysfs any more", {"path": str(tmp_path / "0000:3b:00.0")}]]
    }


def test_missing_files_are_no_findings(tmp_path: Path) -> None:
    path = device_directory(tmp_path)
    for name in ("power/runtime_status", "power/control", "power_state"):
        (path / name).unlink()
    assert look(path) == {"counters": {}}


# -- driver and nodes -----------------------------------------------------------------------------
def test_a_driver_that_is_not_bound_any_more(tmp_path: Path) -> None:
    path = device_directory(tmp_path)
    assert findings(look(path, driver="nvidia")) == [("failed", "its driver nvidia is not bound any more")]
    assert findings(look(path)) == []


def test_a_dangling_driver_link(tmp_path: Path) -> None:
    path = device_directory(tmp_path)
    bind(path).rmdir()
    assert findings(look(path, driver="nvidia")) == [
        ("failed", "its driver nvidia is gone, only a link is left")
    ]


def test_a_node_that_is_gone_or_another_one(tmp_path: Path) -> None:
    path = device_directory(tmp_path)
    node = file_node(tmp_path / "npu0")
    (tmp_path / "npu0").rename(tmp_path / "kept")
    assert findings(look(path, nodes=(node,))) == [("failed", f"its node {node.path} is gone")]
    (tmp_path / "npu0").touch()
    assert findings(look(path, nodes=(node,))) == [("failed", f"its node {node.path} is another one now")]
    (tmp_path / "kept").rename(tmp_path / "npu0")
    assert findings(look(path, nodes=(node,))) == []


@pytest.mark.parametrize(
    ("node", "right"),
    [
        (Node("/dev/null", Role.OWN, "char", 1, 3), True),
        (Node("/dev/null", Role.OWN, "char", 1, 5), False),
        (Node("/dev/null", Role.OWN, "block", 1, 3), False),
        (Node("/dev/null", Role.PARENT, "char", 1, 5), False),
        (Node("/dev/null", Role.CONTROL, "char", 1, 5), True),
        (Node("/dev/no-such-node", Role.CONTROL, "char", 1, 5), True),
    ],
)
def test_the_number_of_a_real_node(tmp_path: Path, node: Node, right: bool) -> None:
    path = device_directory(tmp_path)
    expected = [] if right else [("failed", "its node /dev/null is another one now")]
    assert findings(look(path, nodes=(node,))) == expected


def test_a_providers_device_is_its_nodes(tmp_path: Path) -> None:
    node = file_node(tmp_path / "npu0")
    record = kernel_record(tmp_path / "nowhere", source="vendor", driver="x", nodes=(node,))
    assert probes.probe(spec_of(record, ALL)) == {}
    Path(node.path).unlink()
    assert findings(probes.probe(spec_of(record, ALL))) == [("failed", f"its node {node.path} is gone")]


# -- power ------------------------------------------------------------------------------------------
def test_runtime_power_management_that_failed(tmp_path: Path) -> None:
    path = device_directory(tmp_path, power__runtime_status="error")
    assert findings(look(path)) == [("failed", "runtime power management failed")]
    path = device_directory(tmp_path / "b", power_state="error")
    assert findings(look(path)) == [("failed", "its power state can't be told")]


@pytest.mark.parametrize("status", ["suspended", "suspending", "resuming"])
def test_of_a_sleeping_device_only_the_state_is_read(tmp_path: Path, status: str) -> None:
    """Whatever else is read would block: everything else is a FIFO."""
    path = device_directory(tmp_path, power__runtime_status=status)
    for name in ("config", "power_state", "current_link_width", "aer_dev_fatal", "power/control"):
        fifo(path / name)
    script = (
        "import json, sys; from hetero_agent.health import probes; "
        "print(json.dumps(probes.probe(json.loads(sys.argv[1]))))"
    )
    spec = spec_of(kernel_record(path, driver="nvidia"), ALL)
    done = subprocess.run(
        ["/usr/bin/python3", "-c", script, json.dumps(spec)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert json.loads(done.stdout) == {"asleep": True}


def test_which_files_of_a_sleeping_device_are_touched(tmp_path: Path) -> None:
    """By the kernel's own account of what was opened."""
    path = device_directory(tmp_path, power__runtime_status="suspended", config="de10")
    opened = []
    real = os.open

    def spy(name: Any, *arguments: Any, **named: Any) -> int:
        opened.append(str(name))
        return real(name, *arguments, **named)

    os.open = spy  # type: ignore[assignment]
    try:
        look(path)
    finally:
        os.open = real
    assert opened == [f"{path}/power/runtime_status"]


@pytest.mark.parametrize("power", ["D3hot", "D3cold"])
def test_a_device_that_is_not_in_d0_is_not_asked_for_its_config_space(tmp_path: Path, power: str) -> None:
    path = device_directory(
        tmp_path, power_state=power, config="ffff", current_link_width="1", max_link_width="16"
    )
    assert findings(look(path)) == []


def test_sensors_of_a_device_that_may_sleep_are_left_alone(tmp_path: Path) -> None:
    hot = {"hwmon__hwmon0__temp1_input": "99000", "hwmon__hwmon0__temp1_crit": "95000"}
    assert findings(look(device_directory(tmp_path, power__control="auto", **hot))) == []
    assert findings(look(device_directory(tmp_path / "b", power__control="on", **hot))) == [
        ("degraded", "temp1 is 99 °C, critical is 95 °C")
    ]


# -- PCI ----------------------------------------------------------------------------------------
def test_a_device_off_the_bus_answers_all_ones(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="ffffffff", current_link_width="255", max_link_width="16")
    answer = look(path)
    assert answer["findings"] == [
        ["failed", "off the bus: its config space reads 0xffff", {"config": "0xffff"}]
    ]
    assert answer["counters"] == {}


def test_a_virtual_function_has_all_ones_for_its_vendor_by_design(tmp_path: Path) -> None:
    path = device_directory(tmp_path, config="ffffffff 0600 1000 00020801")
    (path / "physfn").symlink_to("../0000:3b:00.0")
    assert findings(look(path)) == []
    (path / "config").write_bytes(b"\xff" * 64)
    assert findings(look(path)) == [("failed", "off the bus: its config space reads 0xffff")]


def test_counters_are_taken_from_their_totals(tmp_path: Path) -> None:
    path = device_directory(
        tmp_path,
        aer_dev_correctable="RxErr 3\nBadTLP 0\nTOTAL_ERR_COR 17",
        aer_dev_nonfatal="Undefined 0\nTOTAL_ERR_NONFATAL 2",
        aer_dev_fatal="Undefined 0\nTOTAL_ERR_FATAL 1",
        ras__umc_err_count="ue: 1\nce: 5",
        ras__gfx_err_count="ue: 2\nce: 0",
        ras__features="ue: 99",
    )
    assert look(path) == {
        "counters": {"aer-correctable": 17, "aer-nonfatal": 2, "aer-fatal": 1, "ras-ue": 3, "ras-ce": 5}
    }


@pytest.mark.parametrize(
    ("now", "most", "above", "narrow"),
    [
        ("16", "16", "16", ""),
        ("4", "16", "16", "its link is x4 of x16"),
        ("8", "16", "8", ""),
        ("4", "16", "8", "its link is x4 of x8"),
        ("8", "16", "", "its link is x8 of x16"),
        ("0", "16", "16", ""),
        ("Unknown", "16", "16", ""),
        ("4", "255", "255", ""),
        ("4", "0", "", ""),
    ],
)
def test_a_link_narrower_than_card_and_slot_can(
    tmp_path: Path, now: str, most: str, above: str, narrow: str
) -> None:
    port = device_directory(tmp_path, "0000:3a:00.0", **({"max_link_width": above} if above else {}))
    path = device_directory(port, current_link_width=now, max_link_width=most)
    assert findings(look(path)) == ([("degraded", narrow)] if narrow else [])


def test_the_evidence_of_a_narrow_link_has_the_speed_too(tmp_path: Path) -> None:
    path = device_directory(
        tmp_path,
        current_link_width="4",
        max_link_width="16",
        current_link_speed="2.5 GT/s PCIe",
        max_link_speed="32.0 GT/s PCIe",
    )
    [(_, _, evidence)] = look(path)["findings"]
    assert evidence == {
        "link-width": "4",
        "max-link-width": "16",
        "link-speed": "2.5 GT/s PCIe",
        "max-link-speed": "32.0 GT/s PCIe",
    }


def test_a_low_speed_alone_is_how_drivers_save_power(tmp_path: Path) -> None:
    path = device_directory(
        tmp_path,
        current_link_width="16",
        max_link_width="16",
        current_link_speed="2.5 GT/s PCIe",
        max_link_speed="32.0 GT/s PCIe",
    )
    assert findings(look(path)) == []


@pytest.mark.parametrize(
    ("files", "hot"),
    [
        ({"input": "94999", "crit": "95000"}, ""),
        ({"input": "95000", "crit": "95000"}, "temp1 is 95 °C, critical is 95 °C"),
        ({"input": "96500", "crit": "95000", "label": "junction"}, "junction is 96.5 °C, critical is 95 °C"),
        ({"input": "90000", "crit": "95000", "crit_alarm": "1"}, "temp1 is 90 °C, critical is 95 °C"),
        ({"input": "90000", "crit": "95000", "crit_alarm": "0"}, ""),
        ({"input": "96500"}, ""),
        ({"crit": "95000"}, ""),
        ({"input": "96500", "crit": "0"}, ""),
        ({"input": "hot", "crit": "95000"}, ""),
    ],
)
def test_temperatures(tmp_path: Path, files: dict[str, str], hot: str) -> None:
    given = {f"hwmon__hwmon3__temp1_{name}": text for name, text in files.items()}
    path = device_directory(tmp_path, **given)
    assert findings(look(path)) == ([("degraded", hot)] if hot else [])


def test_a_temperature_among_very_many_sensors(tmp_path: Path) -> None:
    path = device_directory(
        tmp_path,
        **{f"hwmon__hwmon0__in{number}_input": "900" for number in range(100)},
        hwmon__hwmon0__temp1_input="99000",
        hwmon__hwmon0__temp1_crit="95000",
    )
    assert findings(look(path)) == [("degraded", "temp1 is 99 °C, critical is 95 °C")]


# -- vendors --------------------------------------------------------------------------------------
def test_rdma_ports_that_do_not_work(tmp_path: Path) -> None:
    path = device_directory(
        tmp_path,
        infiniband__mlx5_0__ports__1__state="4: ACTIVE",
        infiniband__mlx5_0__ports__2__state="1: DOWN",
    )
    assert look(path)["findings"] == [["degraded", "port mlx5_0/2 is DOWN", {"port": "mlx5_0/2"}]]
    soft = tmp_path / "rxe0"
    (soft / "ports" / "1").mkdir(parents=True)
    (soft / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert look(soft)["findings"] == [["degraded", "port rxe0/1 is DOWN", {"port": "rxe0/1"}]]
    (path / "infiniband/mlx5_0/ports/2/state").write_text("4: ACTIVE\n")
    assert findings(look(path)) == []


def test_an_nvidia_card_that_its_driver_has_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = device_directory(tmp_path)
    bind(path)
    assert findings(look(path, driver="nvidia")) == []  # no such driver in /proc here
    proc = tmp_path / "gpus"
    (proc / "0000:3b:00.0").mkdir(parents=True)
    monkeypatch.setattr(probes, "NVIDIA_GPUS", str(proc))
    assert findings(look(path, driver="nvidia")) == []
    (proc / "0000:3b:00.0").rmdir()
    assert findings(look(path, driver="nvidia")) == [
        ("failed", "the driver has no entry for it in /proc any more")
    ]


@pytest.mark.parametrize(("driver", "obstacle"), [("vfio-pci", Obstacle.VFIO), ("nouveau", Obstacle.NO_DRIVER)])
def test_a_card_of_another_driver_is_not_missed_by_nvidias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, obstacle: Obstacle
) -> None:
    path = device_directory(tmp_path)
    bind(path, driver)
    (tmp_path / "gpus" / "0000:5e:00.0").mkdir(parents=True)
    monkeypatch.setattr(probes, "NVIDIA_GPUS", str(tmp_path / "gpus"))
    assert findings(look(path, driver=driver, obstacle=obstacle)) == []
    assert findings(look(path, driver=driver))  # in doubt it is looked for


def test_only_the_probes_of_the_profile_are_made(tmp_path: Path) -> None:
    path = device_directory(
        tmp_path,
        config="ffff",
        current_link_width="1",
        max_link_width="16",
        infiniband__mlx5_0__ports__1__state="1: DOWN",
        aer_dev_fatal="TOTAL_ERR_FATAL 1",
    )
    spec = spec_of(kernel_record(path), Symptoms(probes=()))
    assert probes.probe(spec) == {"counters": {}}
