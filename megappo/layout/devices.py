"""What devices can do: the numbers that time and memory are reckoned with. Standard library only.

Rates are those that real kernels reach, not those of data sheets. Those of an H200 were measured; the others' are their
data sheets', times the fraction of its own data sheet that the H200 reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One kind of device in its node.

    Attributes:
        name: what people call it.
        memory_gib: as CUDA reports it, in GiB.
        matrix_tflops: of a large dense bfloat16 product, in TFLOP/s.
        memory_gb_s: of its memory, reads and writes together, in GB/s.
        host_gb_s: to and from pinned host memory, each way.
        node_gb_s: to another device of its node, each way.
        network_gb_s: of its share of the node's network, each way.
        devices_per_node: in a full node.
        host_memory_gib: of its node, in GiB; None: not known, so that what is offloaded is not compared with it.
        compute_capability: CUDA's, which products in 8 bits depend on.
        engine_step_ms, engine_sequence_us: time of the host's processor in one step of vLLM's Python scheduler and
            sampler: fixed, and for each sequence decoded. They depend on the host more than on the device.
        sources: where the numbers come from, by field.
    """

    name: str
    memory_gib: float
    matrix_tflops: float
    memory_gb_s: float
    host_gb_s: float
    node_gb_s: float
    network_gb_s: float
    devices_per_node: int = 8
    host_memory_gib: float | None = None
    compute_capability: float = 9.0
    engine_step_ms: float = 2.0
    engine_sequence_us: float = 20.0
    sources: Mapping[str, str] | None = None

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.memory_gib * (1 << 30))

    @property
    def flops(self) -> float:
        """Operations a second of a large product."""
        return self.matrix_tflops * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes of device memory a second."""
        return self.memory_gb_s * 1e9

    def link(self, between_nodes: bool) -> float:
        """Bytes a second, each way, to a device of the same or of another node."""
        return (self.network_gb_s if between_nodes else self.node_gb_s) * 1e9


NUMBERS = tuple(field.name for field in fields(DeviceProfile) if field.name not in ("name", "sources"))
"""Fields that are numbers, as a file may give them; those whose default is None may be null."""

_NETWORK = "90% of a 400 Gbit/s port for each device, not measured"
_H200 = {
    "memory_gib": "measured (CUDA's total)",
    "matrix_tflops": "measured: product of 8192 x 8192 matrices (data sheet: 989)",
    "memory_gb_s": "measured: copy on the device, bytes read and written (data sheet: 4,800)",
    "host_gb_s": "measured: copy to pinned memory",
    "node_gb_s": "measured: NCCL between two devices over NVLink (data sheet: 450)",
    "network_gb_s": _NETWORK,
    "compute_capability": "as CUDA reports it",
    "engine_step_ms": "measured: vLLM 0.26 with CUDA graphs, 11 to 25 ms a step of 512 sequences, by host",
    "engine_sequence_us": "measured: the same",
}
_SAME_CHIP = "measured on an H200, which has the same chip and links"

PROFILES: Mapping[str, DeviceProfile] = {
    "H200": DeviceProfile(
        name="H200",
        memory_gib=139.7,
        matrix_tflops=763.0,
        memory_gb_s=4200.0,
        host_gb_s=55.0,
        node_gb_s=367.0,
        network_gb_s=45.0,
        sources=_H200,
    ),
    "H100": DeviceProfile(
        name="H100",
        memory_gib=79.1,
        matrix_tflops=763.0,
        memory_gb_s=2930.0,
        host_gb_s=55.0,
        node_gb_s=367.0,
        network_gb_s=45.0,
        sources={
            **dict.fromkeys(_H200, _SAME_CHIP),
            "memory_gib": "data sheet (SXM): 80 GB, less what the driver keeps",
            "memory_gb_s": "data sheet (SXM): 3,350, at the 87.5% that an H200 reaches",
            "network_gb_s": _NETWORK,
        },
    ),
    "A100": DeviceProfile(
        name="A100",
        memory_gib=79.1,
        matrix_tflops=241.0,
        memory_gb_s=1780.0,
        host_gb_s=25.0,
        node_gb_s=245.0,
        network_gb_s=22.5,
        compute_capability=8.0,
        sources={
            **dict.fromkeys(_H200, "measured on an H200's host"),
            "memory_gib": "data sheet (SXM, 80 GB), less what the driver keeps",
            "matrix_tflops": "data sheet: 312, at the 77% that an H200 reaches",
            "memory_gb_s": "data sheet (SXM, 80 GB): 2,039, at the 87.5% that an H200 reaches",
            "host_gb_s": "PCIe 4 x16: 32, at the 80% that an H200 reaches of PCIe 5",
            "node_gb_s": "data sheet: 300, at the 82% that an H200 reaches",
            "network_gb_s": "90% of a 200 Gbit/s port for each device, not measured",
            "compute_capability": "data sheet",
        },
    ),
}
"""The devices that are known by name."""


def known_profile(device_name: str) -> DeviceProfile | None:
    """The profile of a device by CUDA's name of it, for instance "NVIDIA H200"."""
    return next((profile for name, profile in PROFILES.items() if name in device_name), None)
