"""The host topologies that discovery must get right, each as the kernel shows it in /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero_agent.core.model import UNLIMITED, Node, Obstacle, Role
from hetero_agent.discovery import reader
from tests.discovery.observe import enumerate_once
from tests.support.umock import WITHOUT_SYS_ADMIN, Bed, bed, in_umockdev

PROC_DEVICES = (
    "Character devices:\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n226 drm\n\nBlock devices:\n  7 loop\n"
)


def amd_card(
    mock: Bed, address: str, number: int, device: str = "744c", parent: str = "", **attributes: str
) -> str:
    """An AMD card with amdgpu and its DRM nodes."""
    path = mock.pci(address, f"1002:{device}", "030000", "amdgpu", parent, **attributes)
    mock.child(path, "drm", f"card{number}", f"dri/card{number}", f"226:{number}")
    mock.child(path, "drm", f"renderD{128 + number}", f"dri/renderD{128 + number}", f"226:{128 + number}")
    return path


def kfd_node(mock: Bed, number: int, gpu_id: int, location: int, minor: int, domain: int = 0) -> None:
    base = f"/sys/class/kfd/kfd/topology/nodes/{number}"
    mock.file(f"{base}/gpu_id", f"{gpu_id}\n")
    mock.file(
        f"{base}/properties",
        f"cpu_cores_count {0 if gpu_id else 64}\nsimd_count {440 if gpu_id else 0}\ndrm_render_minor {minor}\n"
        f"location_id {location}\ndomain {domain}\ngfx_target_version 90402\n",
    )


@in_umockdev()
def test_eight_compute_gpus_without_drm() -> None:
    with bed() as mock:
        mock.file("/proc/devices", PROC_DEVICES)
        for name, number in (("nvidiactl", "195:255"), ("nvidia-uvm", "511:0"), ("nvidia-uvm-tools", "511:1")):
            mock.node(name, number, 0o666)
        # the driver numbers its nodes in another order than the bus
        for index in range(8):
            address = f"0000:{0x18 + 0x10 * index:02x}:00.0"
            mock.pci(address, "10de:2330", "030200", "nvidia", numa_node=str(index // 4))
            mock.nvidia(address, 7 - index)
        records = enumerate_once()
    assert list(records) == [f"0000:{0x18 + 0x10 * index:02x}:00.0" for index in range(8)]
    first = records["0000:18:00.0"]
    assert first.nodes == (
        Node("/dev/nvidia7", Role.OWN, "char", 195, 7, mode=0o666, gid=44),
        Node("/dev/nvidiactl", Role.CONTROL, "char", 195, 255, mode=0o666, gid=44),
        Node("/dev/nvidia-uvm", Role.CONTROL, "char", 511, 0, mode=0o666, gid=44),
        Node("/dev/nvidia-uvm-tools", Role.CONTROL, "char", 511, 1, mode=0o666, gid=44),
    )
    assert (first.resource, first.vendor, first.model) == ("nvidia.com/gpu", "NVIDIA", "NVIDIA H100 80GB HBM3")
    assert first.serial == "GPU-00000007"
    assert first.aliases == ("GPU-00000007", "00000000:18:00.0", "18:00.0")
    assert first.attributes["firmware"] == "96.00.89.00.01"
    assert [record.env["CUDA_VISIBLE_DEVICES"] for record in records.values()] == list("01234567")
    assert first.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert [record.numa_nodes for record in records.values()] == [(0,)] * 4 + [(1,)] * 4
    assert {record.obstacle for record in records.values()} == {Obstacle.NONE}


@in_umockdev()
def test_integrated_gpu_discrete_gpu_and_bmc_display(tmp_path: Path) -> None:
    with bed() as mock:
        amd_card(mock, "0000:c4:00.0", 0, device="164e", boot_vga="1")
        mock.pci("0000:c4:00.1", "1002:1640", "040300", "snd_hda_intel")
        card = amd_card(
            mock, "0000:03:00.0", 1, boot_vga="0",
            mem_info_vram_total="25753026560\n", mem_info_vram_used="1048576\n", unique_id="a1b2c3d4e5f60718\n",
            current_link_speed="16.0 GT/s PCIe\n", current_link_width="16\n", max_link_width="16\n",
            vbios_version="113-D7020100-102\n",
        )  # fmt: skip
        mock.pci("0000:03:00.1", "1002:ab30", "040300", "snd_hda_intel")
        mock.pci("0000:03:00.2", "1002:7446", "0c0330", "xhci_hcd")
        bmc = mock.pci("0000:02:00.0", "1a03:2000", "030000", "ast")
        mock.child(bmc, "drm", "card2", "dri/card2", "226:2")
        virtio = mock.pci("0000:05:00.0", "1af4:1050", "038000", "virtio-pci")
        mock.child(virtio, "drm", "renderD130", "dri/renderD130", "226:130")
        records = enumerate_once()
        # a site may say otherwise
        text = Path("hetero_agent/profiles/amd.toml").read_text().replace("integrated = false\n", "")
        (tmp_path / "amd.toml").write_text(text)
        with_integrated = enumerate_once(tmp_path)
    assert list(records) == ["0000:03:00.0"]
    record = records["0000:03:00.0"]
    assert record.path == card
    assert [(node.path, node.role, node.minor) for node in record.nodes] == [
        ("/dev/dri/renderD129", Role.OWN, 129),
        ("/dev/dri/card1", Role.OWN, 1),
    ]
    assert record.attributes["memory-total"] == 25753026560
    assert record.attributes["memory-free"] == 25753026560 - 1048576
    assert record.attributes["firmware"] == "113-D7020100-102"
    assert (record.attributes["link-speed"], record.attributes["link-width"]) == ("16.0 GT/s PCIe", 16)
    assert record.attributes["max-link-width"] == 16
    assert (record.attributes["integrated"], record.attributes["boot-vga"]) == (False, False)
    assert record.attributes["kernel-names"] == "card1,renderD129"
    assert record.serial == "a1b2c3d4e5f60718"
    # kernel names swap between boots, so they name nothing
    assert record.aliases == ("a1b2c3d4e5f60718", "00000000:03:00.0", "03:00.0")
    assert list(with_integrated) == ["0000:03:00.0", "0000:c4:00.0"]
    assert with_integrated["0000:c4:00.0"].attributes["integrated"] is True
    assert with_integrated["0000:c4:00.0"].attributes["boot-vga"] is True


@in_umockdev()
def test_vfio_bound_driverless_and_nodeless_cards() -> None:
    with bed() as mock:
        mock.pci("0000:01:00.0", "10de:2330", "030200", "vfio-pci")
        mock.pci("0000:02:00.0", "10de:2330", "030200")
        nouveau = mock.pci("0000:03:00.0", "10de:2330", "030000", "nouveau")
        mock.child(nouveau, "drm", "renderD128", "dri/renderD128", "226:128")
        mock.pci("0000:04:00.0", "1002:744c", "030000", "amdgpu")
        # the neighbour's node is not for the card without one
        amd_card(mock, "0000:05:00.0", 1)
        mock.pci("0000:06:00.0", "1e52:401e", "120000", "tenstorrent")
        missing = mock.pci("0000:07:00.0", "1002:744c", "030000", "amdgpu")
        mock.child(missing, "drm", "renderD131", "dri/renderD131", "226:131")
        mock.real("/dev/dri/renderD131").unlink()
        wrong = mock.pci("0000:08:00.0", "1002:744c", "030000", "amdgpu")
        mock.child(wrong, "drm", "renderD132", "dri/renderD132", "226:132")
        mock.node("dri/renderD132", "226:129")
        records = enumerate_once()
    assert {key: record.obstacle for key, record in records.items()} == {
        "0000:01:00.0": Obstacle.VFIO,
        "0000:02:00.0": Obstacle.NO_DRIVER,
        "0000:03:00.0": Obstacle.NO_DRIVER,
        "0000:04:00.0": Obstacle.NO_NODE,
        "0000:05:00.0": Obstacle.NONE,
        "0000:06:00.0": Obstacle.NO_NODE,
        "0000:07:00.0": Obstacle.NO_NODE,
        "0000:08:00.0": Obstacle.NO_NODE,
    }
    assert records["0000:04:00.0"].nodes == ()
    assert records["0000:08:00.0"].nodes == ()
    assert records["0000:02:00.0"].driver == ""
    assert records["0000:06:00.0"].resource == "heteroagent.org/accelerator"
    assert (records["0000:06:00.0"].vendor, records["0000:06:00.0"].model) == ("Tenstorrent", "1e52:401e")
    # cards that the driver doesn't know get no index, so nothing is off by one
    assert "CUDA_VISIBLE_DEVICES" not in records["0000:01:00.0"].env


@in_umockdev()
def test_partitions_that_share_one_address() -> None:
    with bed() as mock:
        mock.node("kfd", "235:0")
        card = mock.pci(
            "0000:0c:00.0", "1002:74a1", "120000", "amdgpu", unique_id="feed000000000001",
            current_compute_partition="CPX\n", mem_info_vram_total="206158430208\n",
        )  # fmt: skip
        mock.child(card, "drm", "card1", "dri/card1", "226:1")
        mock.child(card, "drm", "renderD128", "dri/renderD128", "226:128")
        location = 0x0C << 8
        kfd_node(mock, 0, 0, 0, 0)
        kfd_node(mock, 1, 4001, location, 128)
        for part in (1, 2):
            platform = mock.child(None, "platform", f"amdgpu_xcp_{part}")
            mock.child(platform, "drm", f"renderD{128 + part}", f"dri/renderD{128 + part}", f"226:{128 + part}")
            kfd_node(mock, 1 + part, 4001 + part, part << 28 | location, 128 + part)
        # one that the topology gives to nobody is nobody's
        stray = mock.child(None, "platform", "amdgpu_xcp_9")
        mock.child(stray, "drm", "renderD140", "dri/renderD140", "226:140")
        other = amd_card(mock, "0000:0d:00.0", 5)
        kfd_node(mock, 4, 5001, 0x0D << 8, 133)
        records = enumerate_once()
    assert list(records) == [
        "0000:0c:00.0",
        "0000:0c:00.0-p0",
        "0000:0c:00.0-p1",
        "0000:0c:00.0-p2",
        "0000:0d:00.0",
    ]
    whole = records["0000:0c:00.0"]
    assert (whole.resource, whole.obstacle, whole.attributes["parts"]) == ("amd.com/gpu", Obstacle.NO_NODE, 3)
    assert [(node.path, node.role) for node in whole.nodes] == [
        ("/dev/dri/card1", Role.PARENT),
        ("/dev/kfd", Role.CONTROL),
    ]
    for part in range(3):
        record = records[f"0000:0c:00.0-p{part}"]
        assert record.parent == "0000:0c:00.0"
        assert record.resource == "amd.com/gpu.cpx"
        assert record.serial == f"feed000000000001-p{part}"
        assert record.obstacle is Obstacle.NONE
        assert [(node.path, node.role) for node in record.nodes] == [
            (f"/dev/dri/renderD{128 + part}", Role.OWN),
            ("/dev/kfd", Role.CONTROL),
        ]
        assert record.env == {"ROCR_VISIBLE_DEVICES": str(part)}
        assert "memory-total" not in record.attributes
    assert records["0000:0d:00.0"].path == other
    assert records["0000:0d:00.0"].env == {"ROCR_VISIBLE_DEVICES": "3"}
    assert records["0000:0d:00.0"].parent == ""


@in_umockdev()
def test_roce_and_infiniband_adapters() -> None:
    with bed() as mock:
        mock.node("infiniband/rdma_cm", "10:121", 0o666)
        roce = mock.pci("0000:3b:00.0", "15b3:101d", "020000", "mlx5_core", numa_node="1")
        hca = mock.pci("0000:5e:00.0", "15b3:1021", "020700", "mlx5_core")
        for index, (path, layer) in enumerate(((roce, "Ethernet"), (hca, "InfiniBand"))):
            ib = mock.child(path, "infiniband", f"mlx5_{index}")
            mock.child(
                path, "infiniband_verbs", f"uverbs{index}", f"infiniband/uverbs{index}", f"231:{192 + index}"
            )
            mock.child(path, "infiniband_mad", f"umad{index}", f"infiniband/umad{index}", f"231:{index}")
            mock.child(path, "infiniband_mad", f"issm{index}", f"infiniband/issm{index}", f"231:{64 + index}")
            mock.file(f"{ib}/node_guid", f"b83f:d203:00aa:000{index}\n")
            mock.file(f"{ib}/fw_ver", "22.36.1010\n")
            mock.file(f"{ib}/ports/1/state", "4: ACTIVE\n")
            mock.file(f"{ib}/ports/1/link_layer", f"{layer}\n")
        mock.file(f"{hca}/infiniband/mlx5_1/ports/2/state", "1: DOWN\n")
        mock.file(f"{hca}/infiniband/mlx5_1/ports/2/link_layer", "InfiniBand\n")
        mock.child(roce, "net", "ens1f0np0")
        for number in range(20):
            mock.child(hca, "net", f"ibs2f0np{number:02}")
        # Ethernet without RDMA is none of ours; an InfiniBand card without driver is
        mock.pci("0000:61:00.0", "8086:1572", "020000", "i40e")
        mock.pci("0000:62:00.0", "15b3:1021", "020700")
        records = enumerate_once()
    assert list(records) == ["0000:3b:00.0", "0000:5e:00.0", "0000:62:00.0"]
    record = records["0000:3b:00.0"]
    assert (record.resource, record.vendor, record.numa_nodes) == ("rdma/hca", "Mellanox", (1,))
    assert [(node.path, node.role, node.major, node.minor) for node in record.nodes] == [
        ("/dev/infiniband/uverbs0", Role.OWN, 231, 192),
        ("/dev/infiniband/umad0", Role.OWN, 231, 0),
        ("/dev/infiniband/rdma_cm", Role.CONTROL, 10, 121),
    ]
    assert record.serial == "b83f:d203:00aa:0000"
    assert record.env == {"UCX_NET_DEVICES": "mlx5_0:1", "NCCL_IB_HCA": "mlx5_0:1"}
    wanted = {"firmware": "22.36.1010", "port-state": "4: ACTIVE", "link-layer": "Ethernet", "net": "ens1f0np0"}
    assert {key: record.attributes[key] for key in wanted} == wanted
    assert "port-1-state" not in record.attributes
    assert (record.attributes["ports"], record.limits) == (1, {"memlock": UNLIMITED})
    both = records["0000:5e:00.0"]
    assert both.env == {"UCX_NET_DEVICES": "mlx5_1:1,mlx5_1:2", "NCCL_IB_HCA": "mlx5_1:1,mlx5_1:2"}
    wanted = {
        "ports": 2,
        "port-state": "4: ACTIVE, 1: DOWN",
        "port-2-state": "1: DOWN",
        "link-layer": "InfiniBand",
    }
    assert {key: both.attributes[key] for key in wanted} == wanted
    # what does not fit is left out whole
    assert both.attributes["net"] == ",".join(f"ibs2f0np{number:02}" for number in range(11))
    assert "mlx5_0" not in record.aliases
    assert records["0000:62:00.0"].obstacle is Obstacle.NO_DRIVER


@in_umockdev()
def test_numa_minus_one_and_a_six_digit_domain() -> None:
    with bed() as mock:
        amd_card(mock, "10af3b:01:00.0", 0, numa_node="-1")
        amd_card(mock, "d1f4:00:00.0", 1, numa_node="garbage")
        path = amd_card(mock, "0000:00:05.0", 2)
        mock.real(f"{path}/numa_node").unlink()
        records = enumerate_once()
    assert list(records) == ["0000:00:05.0", "d1f4:00:00.0", "10af3b:01:00.0"]
    assert {record.numa_nodes for record in records.values()} == {()}
    assert all("numa-node" not in record.attributes for record in records.values())
    assert records["10af3b:01:00.0"].attributes["pcie-root"] == "pci10af3b:00"
    assert records["10af3b:01:00.0"].aliases == ("0010af3b:01:00.0",)


@in_umockdev()
def test_suspended_laptop_gpu_is_left_asleep(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    opened: list[str] = []
    with bed() as mock:
        path = amd_card(
            mock, "0000:03:00.0", 0, power__runtime_status="suspended\n", power_state="D3cold\n",
            current_link_speed="2.5 GT/s PCIe\n", mem_info_vram_total="1\n", unique_id="1\n", boot_vga="0\n",
            config="\0" * 64,
        )  # fmt: skip
        # whoever reads these hangs: nobody ever writes into them
        for name in ("current_link_speed", "mem_info_vram_total", "mem_info_vram_used", "unique_id", "config"):
            mock.real(f"{path}/{name}").unlink(missing_ok=True)
            os.mkfifo(mock.real(f"{path}/{name}"))
        real_open = os.open
        monkeypatch.setattr(os, "open", lambda name, *rest: opened.append(str(name)) or real_open(name, *rest))
        records = enumerate_once()
    record = records["0000:03:00.0"]
    assert record.obstacle is Obstacle.NONE
    assert [node.path for node in record.own_nodes] == ["/dev/dri/renderD128", "/dev/dri/card0"]
    assert record.attributes["runtime-status"] == "suspended"
    assert record.attributes["power-state"] == "D3cold"
    assert record.attributes.keys().isdisjoint({"link-speed", "memory-total", "boot-vga"})
    of_device = {
        name.removeprefix(f"{path}/") for name in opened if name.startswith(path) and "/drm/" not in name
    }
    assert of_device == {
        "vendor", "device", "class", "subsystem_vendor", "subsystem_device", "numa_node",
        "power/runtime_status", "power_state",
    }  # fmt: skip


@in_umockdev(*WITHOUT_SYS_ADMIN)
def test_sysfs_that_answers_ebusy_and_eio() -> None:
    import fcntl
    import termios

    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCEXCL)
    busy = os.ttyname(slave)
    with bed() as mock:
        path = amd_card(
            mock, "0000:03:00.0", 0, current_link_width="8\n", mem_info_vram_total="1000\n", vbios_version="v\n"
        )
        amd_card(mock, "0000:04:00.0", 1)
        # reading another process's memory at address 0 is EIO; opening an exclusive terminal EBUSY
        for name in ("current_link_speed", "numa_node", "unique_id", "mem_info_vram_used"):
            mock.link(f"{path}/{name}", "/proc/self/mem")
        for name in ("max_link_speed", "vbios_version", "boot_vga"):
            mock.link(f"{path}/{name}", busy)
        errors = {}
        for name in ("current_link_speed", "vbios_version"):
            try:
                with open(f"{path}/{name}", "rb", buffering=0) as file:
                    file.read(1)
            except OSError as error:
                errors[name] = os.strerror(error.errno or 0)
        assert errors == {
            "current_link_speed": "Input/output error",
            "vbios_version": "Device or resource busy",
        }
        records = enumerate_once()
    os.close(master)
    os.close(slave)
    assert list(records) == ["0000:03:00.0", "0000:04:00.0"]
    record = records["0000:03:00.0"]
    assert record.obstacle is Obstacle.NONE
    assert (record.attributes["link-width"], record.attributes["memory-total"]) == (8, 1000)
    assert record.numa_nodes == ()
    assert record.serial == ""
    assert record.attributes.keys().isdisjoint(
        {"link-speed", "max-link-speed", "firmware", "memory-free", "boot-vga", "numa-node"}
    )


@in_umockdev()
def test_sriov_virtual_functions_stand_for_the_physical_one() -> None:
    with bed() as mock:
        physical = amd_card(mock, "0000:03:00.0", 0)
        for number in (0, 1):
            virtual = amd_card(mock, f"0000:03:02.{number}", 1 + number)
            mock.link(f"{virtual}/physfn", "../0000:03:00.0")
            mock.link(f"{physical}/virtfn{number}", f"../0000:03:02.{number}")
        records = enumerate_once()
    assert list(records) == ["0000:03:02.0", "0000:03:02.1"]
    assert records["0000:03:02.0"].parent == "0000:03:00.0"
    assert records["0000:03:02.0"].attributes["physical-function"] == "0000:03:00.0"


@in_umockdev()
def test_class_devices_below_a_child_device_and_without_pci(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text(
        'schema = 1\nresource = "example.org/console"\n'
        '[[match]]\nsubsystem = "tty"\nnames = ["tty60"]\n'
        '[[nodes]]\nsubsystem = "tty"\npattern = "tty*"\nrole = "own"\nrequired = true\n'
    )
    (tmp_path / "npu.toml").write_text(
        'schema = 1\nresource = "example.org/npu"\n'
        '[[match]]\nsubsystem = "accel"\nnames = ["accel*"]\n'
        '[[nodes]]\nsubsystem = "accel"\npattern = "*"\nrole = "own"\n'
        '[[nodes]]\nsubsystem = "drm"\npattern = "renderD*"\nrole = "own"\n'
    )
    with bed() as mock:
        mock.child(None, "tty", "tty59", "tty59", "4:59")
        mock.child(None, "tty", "tty60", "tty60", "4:60")
        platform = mock.child(None, "platform", "fdab0000.npu")
        mock.child(platform, "accel", "accel0", "accel/accel0", "261:0")
        mock.child(platform, "drm", "renderD128", "dri/renderD128", "226:128")
        virtio = mock.pci("0000:02:00.0", "1af4:1042", "120000", "virtio-pci")
        mock.child(mock.child(virtio, "virtio", "virtio0"), "accel", "accel1", "accel/accel1", "261:1")
        records = enumerate_once(tmp_path)
    assert sorted(records) == ["0000:02:00.0", "accel-accel0", "tty-tty60"]
    console = records["tty-tty60"]
    assert console.nodes == (Node("/dev/tty60", Role.OWN, "char", 4, 60, mode=0o660, gid=44),)
    assert (console.stable_id, console.resource, console.obstacle) == (
        False,
        "example.org/console",
        Obstacle.NONE,
    )
    assert [node.path for node in records["accel-accel0"].nodes] == ["/dev/accel/accel0", "/dev/dri/renderD128"]
    assert [node.path for node in records["0000:02:00.0"].nodes] == ["/dev/accel/accel1"]


@in_umockdev()
def test_a_serial_that_two_devices_claim_names_neither() -> None:
    with bed() as mock:
        for number in (0, 1):
            amd_card(mock, f"0000:0{3 + number}:00.0", number, unique_id="0123456789abcdef\n")
        amd_card(mock, "0000:05:00.0", 2, unique_id="0000000000000000\n")
        records = enumerate_once()
    assert [record.serial for record in records.values()] == ["", "", ""]
    assert all("0123456789abcdef" not in record.aliases for record in records.values())


def test_only_sys_and_proc_are_opened() -> None:
    with pytest.raises(ValueError, match="only /sys and /proc"):
        reader.text("/dev/null")
