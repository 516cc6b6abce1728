"""Peak rates and memory sizes of devices, from data sheets and testbed sections of papers.

Values are per device: dense matmul FLOP/s by dtype (without sparsity), memory bandwidth and size,
and host memory. Link bandwidths are for one direction: inside a node (NVLink), between nodes, and
to host memory (PCIe). `torchmm.costs.operators` and `scripts/calibrate.py` define the fraction of
these rates that operators achieve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple


class LinkRanks(NamedTuple):
    """Placement of the ranks that communicate: number of nodes, and ranks on each node."""

    nodes: int = 1
    ranks_per_node: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node


WITHIN_NODE = LinkRanks()
"""Link between devices of the same node."""
BETWEEN_NODES = LinkRanks(nodes=2)
"""Link between devices of different nodes."""


USABLE_MEMORY_FRACTION = 0.9
"""Fraction of device memory that plans can use for training states and activations.

The rest is reserved for messages, collectives and fragmentation of the allocator."""

BF16_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "H800 PCIe": 756.5,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "MI300X": 1307.4,
}
"""Peak TFLOP/s of dense bfloat16 matmuls by substring of the device name; first match applies.

The source is the data sheet of the vendor. If it has only the sparse value, half of it is used. For
SXM versions of Hopper, the white paper has the dense value of 989.4. The data sheet value of 1,979
with sparsity is twice this value, rounded."""


@dataclass(frozen=True)
class Device:
    """A device and its links to other devices.

    Attributes:
        name: Name in recipes and on the command line.
        peak_flops: Peak FLOP/s of matmuls by dtype: "bfloat16", "float32", and "float8" if
            supported.
        memory_bytes_per_s: Bandwidth of the device memory.
        memory_bytes: Size of the device memory.
        node_bytes_per_s: Bandwidth to other devices of the node, one direction.
        network_bytes_per_s: Network bandwidth of a node, one direction, divided by its devices. A
            group of ranks can use only the network cards of its ranks, because other groups
            on the node communicate at the same time: n cards on g devices give each rank n / g.
        devices_per_node: Number of devices that share the fast link.
        asynchronous: Whether the host queues kernels without waiting (GPUs). If False, the overhead
            of each call is part of its time.
        source: Source of the values.
        host_bytes_per_s: Bandwidth to host memory (PCIe), one direction. 0 if the device memory is
            host memory.
        host_memory_bytes: Host memory per device.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes_per_s: float
    memory_bytes: float
    node_bytes_per_s: float
    network_bytes_per_s: float
    devices_per_node: int
    asynchronous: bool
    source: str
    host_bytes_per_s: float = 0.0
    host_memory_bytes: float = 0.0

    @property
    def type(self) -> Literal["cuda", "cpu"]:
        """Type of the torch device."""
        return "cuda" if self.asynchronous else "cpu"


_HOPPER_NETWORK = (
    "DGX H100/H200: one 400 Gb/s port per GPU, 2 TB of host memory (NVIDIA DGX H100 data sheet), "
    "PCIe 5 x16"
)
_AMPERE_NETWORK = (
    "DGX A100: one 200 Gb/s port per GPU, 2 TB of host memory (NVIDIA DGX A100 data sheet), "
    "PCIe 4 x16"
)

# Data sheets list the sum of both directions for NVLink and PCIe, so values are halved.
_H100 = Device(
    name="h100",
    peak_flops={
        "bfloat16": BF16_TFLOPS["H100"] * 1e12,
        "float32": 66.9e12,
        "float8": 1978.9e12,  # Hopper white paper, dense
    },
    memory_bytes_per_s=3350e9,
    memory_bytes=80e9,
    node_bytes_per_s=900e9 / 2,
    network_bytes_per_s=50e9,
    devices_per_node=8,
    asynchronous=True,
    source="NVIDIA H100 SXM5 data sheet and Hopper white paper; " + _HOPPER_NETWORK,
    host_bytes_per_s=128e9 / 2,
    host_memory_bytes=2e12 / 8,
)
_A100 = replace(
    _H100,
    name="a100",
    peak_flops={"bfloat16": BF16_TFLOPS["A100"] * 1e12, "float32": 19.5e12},
    memory_bytes_per_s=2039e9,
    node_bytes_per_s=600e9 / 2,
    network_bytes_per_s=25e9,
    source="NVIDIA A100 80GB SXM data sheet; " + _AMPERE_NETWORK,
    host_bytes_per_s=64e9 / 2,
)
_H800 = replace(
    _H100,
    name="h800",
    node_bytes_per_s=400e9 / 2,
    source="H100 SXM5 with NVLink cut to 400 GB/s (DeepSeek-V3, arXiv 2412.19437, and "
    "2505.09343, section 4.1); network as DGX H100",
)
_A800 = replace(
    _A100,
    name="a800",
    node_bytes_per_s=400e9 / 2,
    source="NVIDIA A800 80GB data sheet: A100 with NVLink cut to 400 GB/s; " + _AMPERE_NETWORK,
)

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _H100,
        replace(
            _H100,
            name="h200",
            memory_bytes_per_s=4800e9,
            memory_bytes=141e9,
            source="NVIDIA H200 SXM data sheet; " + _HOPPER_NETWORK,
        ),
        replace(
            _H100,
            name="h100_grand_teton",
            # Mean of H100 SXM and H100 NVL, see the source.
            peak_flops={
                "bfloat16": (BF16_TFLOPS["H100"] + BF16_TFLOPS["H100 NVL"]) / 2 * 1e12,
                "float32": 66.9e12,
                "float8": (BF16_TFLOPS["H100"] + BF16_TFLOPS["H100 NVL"]) * 1e12,
            },
            memory_bytes_per_s=2400e9,
            memory_bytes=96e9,
            source="Testbed of torchtitan: H100 with 96 GB of HBM2e, 2.4 TB/s, a power limit of "
            "500 W, 400 Gb/s of network per GPU; peak FLOP/s 'between SXM and NVL' "
            "(github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)",
        ),
        _H800,
        replace(
            _H800,
            name="h800_pipeweaver",
            network_bytes_per_s=8 * 25e9 / 8,
            host_memory_bytes=256e9 / 8,
            source="Testbed of PipeWeaver (arXiv 2504.14145, section 8): 8 H800, 200 GB/s of "
            "NVLink, 8 x 200 Gb/s RoCEv2 and 256 GB of host memory per node",
        ),
        _A100,
        _A800,
        replace(
            _A800,
            name="a800_disttrain",
            node_bytes_per_s=300e9 / 2,
            network_bytes_per_s=4 * 25e9 / 8,
            host_memory_bytes=1e12 / 8,
            source="Testbed of DistTrain (arXiv 2408.04275, section 8): 8 A800, 300 GB/s "
            "(bidirectional) of NVLink, 4 x 200 Gb/s RoCEv2 and 1 TB of host memory per node",
        ),
        Device(
            name="cpu",
            peak_flops={"float32": 96e9, "bfloat16": 96e9},
            memory_bytes_per_s=25.6e9,
            memory_bytes=16e9,
            node_bytes_per_s=2e9,
            network_bytes_per_s=1.25e9,
            devices_per_node=64,
            asynchronous=False,
            source="nominal: one core at 3 GHz with two 256-bit FMA units (32 FLOP per "
            "cycle), one channel of DDR4-3200, gloo over loopback and 10 Gb/s between "
            "hosts; CPUs differ, so run scripts/calibrate.py",
        ),
    )
}
"""Devices by name."""
