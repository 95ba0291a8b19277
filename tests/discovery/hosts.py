"""Mocked hosts with two devices of one vendor each, as its driver shows them in /sys, /proc and /dev."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tests.support.umock import Bed


def drm(mock: Bed, path: str, number: int) -> None:
    """The DRM nodes of a card, with udev's links to them."""
    mock.child(path, "drm", f"card{number}", f"dri/card{number}", f"226:{number}")
    mock.child(path, "drm", f"renderD{128 + number}", f"dri/renderD{128 + number}", f"226:{128 + number}")


def kfd_node(mock: Bed, number: int, gpu_id: int, location: int, minor: int, domain: int = 0) -> None:
    """A node of the KFD topology; GPU_ID 0 is a CPU."""
    base = f"/sys/class/kfd/kfd/topology/nodes/{number}"
    mock.file(f"{base}/gpu_id", f"{gpu_id}\n")
    mock.file(
        f"{base}/properties",
        f"cpu_cores_count {0 if gpu_id else 64}\nsimd_count {440 if gpu_id else 0}\ndrm_render_minor {minor}\n"
        f"location_id {location}\ndomain {domain}\ngfx_target_version 90402\n",
    )


def nvidia_driver(mock: Bed) -> None:
    """What NVIDIA's driver has once per host."""
    mock.file(
        "/proc/devices",
        "Character devices:\n195 nvidia\n195 nvidiactl\n226 drm\n508 nvidia-uvm\n510 nvidia-caps\n\n"
        "Block devices:\n  7 loop\n",
    )
    mock.file("/sys/module/nvidia/version", "535.54.03\n")
    for name, number in (
        ("nvidiactl", "195:255"),
        ("nvidia-modeset", "195:254"),
        ("nvidia-uvm", "508:0"),
        ("nvidia-uvm-tools", "508:1"),
    ):
        mock.node(name, number, 0o666)


def mig(
    mock: Bed, minor: int, gpu_instance: int, compute_instance: int, first: int, nodes: bool = True
) -> None:
    """A MIG compute instance with its GPU instance; their capabilities are FIRST and the next."""
    base = f"/proc/driver/nvidia/capabilities/gpu{minor}/mig/gi{gpu_instance}"
    for path, number in ((base, first), (f"{base}/ci{compute_instance}", first + 1 + compute_instance)):
        mock.file(f"{path}/access", f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
        if nodes:
            mock.node(f"nvidia-caps/nvidia-cap{number}", f"510:{number}", 0o444)


def nvidia(mock: Bed) -> None:
    nvidia_driver(mock)
    for index, address in enumerate(("0000:17:00.0", "0000:65:00.0")):
        path = mock.pci(address, "10de:2330", "030200", "nvidia", numa_node=str(index))
        mock.nvidia(address, 1 - index, f"GPU-0000000{index}-1111-2222-3333-444444444444")
        drm(mock, path, index)


def nvidia_mig(mock: Bed) -> None:
    nvidia_driver(mock)
    mock.pci("0000:17:00.0", "10de:2330", "030200", "nvidia")
    mock.nvidia("0000:17:00.0", 0, "GPU-00000000-1111-2222-3333-444444444444")
    mig(mock, 0, 1, 0, 12)
    mig(mock, 0, 2, 0, 21)
    mig(mock, 0, 2, 1, 21)


def amd(mock: Bed) -> None:
    mock.child(None, "kfd", "kfd", "kfd", "235:0")
    kfd_node(mock, 0, 0, 0, 0)
    for index, bus in enumerate((0x0C, 0x22)):
        address = f"0000:{bus:02x}:00.0"
        path = mock.pci(
            address, "1002:740f", "038000", "amdgpu", unique_id=f"feed00000000000{index}",
            mem_info_vram_total="68702699520\n", mem_info_vram_used="10960896\n",
            current_compute_partition="SPX\n",
        )  # fmt: skip
        drm(mock, path, index)
        kfd_node(mock, 1 + index, 4001 + index, bus << 8, 128 + index)


def amd_partitions(mock: Bed) -> None:
    mock.child(None, "kfd", "kfd", "kfd", "235:0")
    card = mock.pci(
        "0000:0c:00.0", "1002:74a1", "120000", "amdgpu", unique_id="feed000000000001",
        current_compute_partition="CPX\n", current_memory_partition="NPS4\n",
    )  # fmt: skip
    drm(mock, card, 0)
    kfd_node(mock, 0, 0, 0, 0)
    kfd_node(mock, 1, 4001, 0x0C << 8, 128)
    platform = mock.child(None, "platform", "amdgpu_xcp_1")
    mock.child(platform, "drm", "renderD129", "dri/renderD129", "226:129")
    kfd_node(mock, 2, 4002, 1 << 28 | 0x0C << 8, 129)


def intel(mock: Bed) -> None:
    # the integrated one has the lowest address, so it is number 0
    drm(mock, mock.pci("0000:00:02.0", "8086:7d55", "030000", "xe", boot_vga="1"), 0)
    for number, address in ((1, "0000:03:00.0"), (2, "0000:a3:00.0")):
        drm(mock, mock.pci(address, "8086:56c0", "038000", "i915"), number)
        for name in ("card", "render"):
            mock.node(f"dri/by-path/pci-{address}-{name}", f"226:{number + (128 if name == 'render' else 0)}")


def npus(mock: Bed) -> None:
    for number, (address, ids, code, driver) in enumerate(
        (
            ("0000:00:0b.0", "8086:7d1d", "120000", "intel_vpu"),
            ("0000:c5:00.1", "1022:17f0", "118000", "amdxdna"),
        )
    ):
        path = mock.pci(address, ids, code, driver)
        mock.child(path, "accel", f"accel{number}", f"accel/accel{number}", f"261:{number}")


def ascend(mock: Bed) -> None:
    for name, number in (("davinci_manager", "236:0"), ("devmm_svm", "237:0"), ("hisi_hdc", "238:0")):
        mock.child(None, "davinci", name, name, number)
    table = "0000:c1:00.0 ---> 5\n0000:81:00.0 ---> 10\n"
    # the numbers go another way than the addresses
    for address, number in (("0000:81:00.0", 10), ("0000:c1:00.0", 5)):
        mock.pci(address, "19e5:d802", "120000", "devdrv_device_driver", devdrv_sysfs_bdf_to_devid=table)
        mock.child(None, "davinci", f"davinci{number}", f"davinci{number}", f"236:{number + 1}")


def habana(mock: Bed) -> None:
    for number, address in enumerate(("0000:19:00.0", "0000:33:00.0")):
        path = mock.pci(address, "1da3:1020", "120000", "habanalabs", module_id=f"{7 - number}\n")
        mock.child(path, "accel", f"accel{number}", f"accel/accel{number}", f"261:{2 * number}")
        name = f"accel_controlD{number}"
        mock.child(path, "accel", name, f"accel/{name}", f"261:{2 * number + 1}")
        mock.child(path, "infiniband", f"hbl_{number}")
        mock.child(
            path, "infiniband_verbs", f"uverbs{number}", f"infiniband/uverbs{number}", f"231:{192 + number}"
        )


def xilinx(mock: Bed) -> None:
    mock.pci("0000:3b:00.0", "10ee:5000", "120000", "xclmgmt")
    user = mock.pci("0000:3b:00.1", "10ee:5001", "120000", "xocl")
    mock.child(user, "drm", "renderD128", "dri/renderD128", "226:128")
    dma = mock.pci("0000:5e:00.0", "10ee:903f", "070001", "xdma")
    for minor, name in enumerate(("xdma0_user", "xdma0_h2c_0", "xdma0_c2h_0")):
        mock.child(dma, "xdma", name, name, f"235:{minor}")


def dfl(mock: Bed) -> None:
    for number, address in enumerate(("0000:af:00.0", "0000:d8:00.0")):
        card = mock.pci(address, "8086:0b30", "120000", "dfl-pci")
        region = mock.child(card, "fpga_region", f"region{number}")
        mock.file(f"{region}/compat_id", "f3c9941350814aadbced07eb84a6d0bb\n")
        for kind, minor in (("fme", 2 * number), ("port", 2 * number + 1)):
            mock.bus_device(region, "platform", f"dfl-{kind}.{number}", f"dfl-{kind}.{number}", f"240:{minor}")
        mock.file(f"{region}/dfl-port.{number}/afu_id", "d8424dc4a4a3c413f89e433683f9040b\n")


def rdma(mock: Bed) -> None:
    mock.node("infiniband/rdma_cm", "10:121", 0o666)
    for number, (address, name) in enumerate((("0000:3b:00.0", "mlx5_1"), ("0000:5e:00.0", "mlx5_10"))):
        path = mock.pci(address, "15b3:1021", "020700", "mlx5_core")
        ib = mock.child(path, "infiniband", name)
        mock.file(f"{ib}/node_guid", f"b83f:d203:00aa:000{number}\n")
        for port in range(1, 2 + number):
            mock.file(f"{ib}/ports/{port}/state", "1: DOWN\n" if port == 2 else "4: ACTIVE\n")
            mock.file(f"{ib}/ports/{port}/link_layer", "InfiniBand\n")
            rate = "10 Gb/sec (4X SDR)" if port == 2 else "400 Gb/sec (4X NDR)"
            mock.file(f"{ib}/ports/{port}/rate", f"{rate}\n")
        for port in range(1 + number):
            link = mock.child(path, "net", f"ibs{number}p{port}")
            mock.file(f"{link}/operstate", "up\n")
            mock.file(f"{link}/speed", "400000\n")
        verbs, mad = f"uverbs{number}", f"umad{number}"
        mock.child(path, "infiniband_verbs", verbs, f"infiniband/{verbs}", f"231:{192 + number}")
        mock.child(path, "infiniband_mad", mad, f"infiniband/{mad}", f"231:{number}")


def generic(mock: Bed) -> None:
    for number, address in enumerate(("0000:21:00.0", "0000:22:00.0")):
        path = mock.pci(address, "1e52:401e", "120000", "tenstorrent")
        mock.child(path, "accel", f"accel{number}", f"accel/accel{number}", f"261:{number}")


#: Hosts by the name of their golden file.
HOSTS: Final[Mapping[str, Callable[[Bed], None]]] = {
    "nvidia": nvidia,
    "nvidia-mig": nvidia_mig,
    "amd": amd,
    "amd-partitions": amd_partitions,
    "intel": intel,
    "npus": npus,
    "ascend": ascend,
    "habana": habana,
    "xilinx": xilinx,
    "dfl": dfl,
    "rdma": rdma,
    "generic": generic,
}
