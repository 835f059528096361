"""Describes a machine: FLOP/s, memory, links. Defines ready-made devices, with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType

from thunder_zero.plan.amounts import size
from thunder_zero.tools.printing.words import count, folded, summed_up


@dataclass(frozen=True, slots=True)
class Link:
    """A device's link, on which it sends and receives at the same time and at equal speeds.

    Attributes:
        bytes_per_second: bytes that the device sends per second, over all physical links together.
        latency_seconds: latency of one step of a ring.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        _require_positive("bytes_per_second", self.bytes_per_second)
        if not _is_number(self.latency_seconds) or not isfinite(self.latency_seconds) or self.latency_seconds < 0:
            raise ValueError(f"latency_seconds is {self.latency_seconds!r}; give the seconds of one step, 0 or more")

    def seconds(self, nbytes: float, steps: int = 0) -> float:
        """Return the seconds of a ring collective in which the device sends ``nbytes`` in ``steps`` steps."""
        return self.latency_seconds * steps + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """The time that a collective takes."""

    seconds: float  # time on the wire
    launch_seconds: float = 0.0  # time that the launch takes from compute
    finish_seconds: float = 0.0  # time that the wait takes from compute, after all messages have arrived
    taken_seconds: float = 0.0  # time that the collective takes from compute while it is in flight


@dataclass(frozen=True, repr=False)
class Device:
    """A device of a machine, and its links to other devices.

    Attributes:
        name: the name in messages and tables.
        flops_per_second: FLOP/s of dense matrix products, keyed by dtype name (``"bfloat16"``).
        memory_bytes_per_second: speed of reading and writing the device's memory.
        memory_bytes: size of the device's memory.
        intra_node: the link to the other devices of the node.
        inter_node: the link to other nodes, if any.
        devices_per_node: number of devices of a node.
        overlaps: True if collectives run while the device computes. Otherwise compute waits at each launch.

    Raises:
        ValueError: a number is not above 0.
    """

    name: str
    flops_per_second: Mapping[str, float] = field(hash=False)
    memory_bytes_per_second: float
    memory_bytes: int
    intra_node: Link
    inter_node: Link | None = None
    devices_per_node: int = 8
    overlaps: bool = True

    def __post_init__(self) -> None:
        for dtype, flops in self.flops_per_second.items():
            _require_positive(f"flops_per_second of {dtype!r}", flops)
        for name in ("memory_bytes_per_second", "memory_bytes", "devices_per_node"):
            _require_positive(name, getattr(self, name))
        object.__setattr__(self, "flops_per_second", dict(self.flops_per_second))

    def __repr__(self) -> str:
        return summed_up(self, str(self))

    def __str__(self) -> str:
        links = {"in a node": self.intra_node, "between nodes": self.inter_node}
        parts = [
            f"{self.name}: {size(self.memory_bytes)} at {count(self.memory_bytes_per_second)}B/s",
            *(f"{dtype} {count(flops)}FLOP/s" for dtype, flops in self.flops_per_second.items()),
            f"{self.devices_per_node} in a node",
            *(f"{count(link.bytes_per_second)}B/s {place}" for place, link in links.items() if link),
        ]
        return folded(", ".join(parts))

    def seconds(self, flops: float, dtype: str, traffic_bytes: float, work: str = "") -> float:
        """Return the seconds of an operation: the larger of the seconds for its FLOPs and for its memory traffic.

        ``work``, the class of work, matters only for calibrated devices.

        Raises:
            ValueError: the device has no FLOP/s for the dtype.
        """
        flop_seconds = flops / self.peak(dtype) if flops else 0.0
        return max(flop_seconds, traffic_bytes / self.memory_bytes_per_second)

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products in a dtype.

        Raises:
            ValueError: the device has no FLOP/s for the dtype.
        """
        if dtype not in self.flops_per_second:
            known = ", ".join(self.flops_per_second) or "no dtype"
            raise ValueError(
                f"{self.name} has FLOP/s for {known}, but the step computes in {dtype!r}; add it to flops_per_second, "
                f"or train in another dtype"
            )
        return self.flops_per_second[dtype]

    def collective(self, kind: str, ranks: int, stride: int, nbytes: float, steps: int, tensors: int) -> CollectiveTime:
        """Return the time of a ring collective in which the device sends ``nbytes`` in ``steps`` steps.

        ``kind`` (``"gather"``, ``"scatter"``, ``"all_reduce"``) and ``tensors``, the number of tensors in the bucket,
        matter only for calibrated devices.

        Raises:
            ValueError: the ring leaves the node, and the device has no link to other nodes.
        """
        return CollectiveTime(self.ring(ranks, stride).seconds(nbytes, steps))

    def ring(self, ranks: int, stride: int = 1) -> Link:
        """Return a device's link in a ring of ranks that are ``stride`` apart. Successive ranks share a node.

        A ring that leaves the node uses the ``inter_node`` links of all members in the node, up to the speed of
        ``intra_node``. This is the speed of parallel rings that leave the node over separate links. The latency is the
        mean over the ring's steps. Steps out of a node have the latency of ``inter_node``, and all other steps have the
        latency of ``intra_node``.

        Raises:
            ValueError: the ring leaves the node, and the device has no link to other nodes.
        """
        if (ranks - 1) * stride < self.devices_per_node:
            return self.intra_node
        if self.inter_node is None:
            raise ValueError(
                f"{self.name} has no link to other nodes, but {ranks} ranks {stride} apart need more than the "
                f"{self.devices_per_node} devices of one; give Device.inter_node"
            )
        members = max(1, self.devices_per_node // stride)
        fastest = min(self.intra_node.bytes_per_second, members * self.inter_node.bytes_per_second)
        leaving = -(-ranks // members) - 1  # number of the ring's ranks - 1 steps that leave a node
        on_the_way = (ranks - 1 - leaving) * self.intra_node.latency_seconds + leaving * self.inter_node.latency_seconds
        return Link(fastest, on_the_way / (ranks - 1))


def _require_positive(name: str, value: float) -> None:
    if not _is_number(value) or not isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}; give a number above 0")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


MiB, GiB = 1 << 20, 1 << 30

# Latency of a step of a ring: in NCCL's model 3.4 us over NVLink and 14 us over a network (hwLat, ring, simple
# protocol, in src/graph/tuning.cc); in the scaling book about 1 us a hop of a TPU's links.
NVLINK, NETWORK, ICI = 3.4e-6, 14e-6, 1e-6  # seconds

# float32 is torch's default, without TF32. NVLink's 600 and 900 GB/s are the sums of both directions.
A100 = Device(
    # https://www.nvidia.com/en-us/data-center/a100 (data sheet, SXM 80 GB), without sparsity; a DGX A100 has a
    # network card of 200 Gbit/s for each GPU; memory as nvidia-smi reports it for "A100-SXM4-80GB"
    name="A100",
    flops_per_second={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
    memory_bytes_per_second=2.039e12,
    memory_bytes=81_920 * MiB,
    intra_node=Link(300e9, NVLINK),
    inter_node=Link(25e9, NETWORK),
)
H100 = Device(
    # https://www.nvidia.com/en-us/data-center/h100 (data sheet, SXM), without sparsity; a DGX H100 has a network card
    # of 400 Gbit/s for each GPU; memory as nvidia-smi reports it for "H100 80GB HBM3"
    name="H100",
    flops_per_second={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12},
    memory_bytes_per_second=3.35e12,
    memory_bytes=81_559 * MiB,
    intra_node=Link(450e9, NVLINK),
    inter_node=Link(50e9, NETWORK),
)
H200 = Device(
    # https://www.nvidia.com/en-us/data-center/h200 (data sheet, SXM): an H100 with more memory, of the size that
    # nvidia-smi reports
    name="H200",
    flops_per_second=H100.flops_per_second,
    memory_bytes_per_second=4.8e12,
    memory_bytes=143_771 * MiB,
    intra_node=H100.intra_node,
    inter_node=H100.inter_node,
)
TPU_V2 = Device(
    # A chip: Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, 2020: four links of
    # 496 Gbit/s each way, 16 GiB at 700 GB/s, a pod of 256; Google's announcement: 180 TFLOP/s for four chips
    name="TPU v2",
    flops_per_second={"bfloat16": 4.5e13},
    memory_bytes_per_second=7e11,
    memory_bytes=16 * GiB,
    intra_node=Link(2.48e11, ICI),
    devices_per_node=256,
)
TPU_V5P = Device(
    # A chip: https://cloud.google.com/tpu/docs/v5p; the links of one of its three axes, in both directions:
    # https://jax-ml.github.io/scaling-book/tpus; 50 Gbit/s a chip between pods of 8,960
    name="TPU v5p",
    flops_per_second={"bfloat16": 4.59e14},
    memory_bytes_per_second=2.765e12,
    memory_bytes=95 * GiB,
    intra_node=Link(1.8e11, ICI),
    inter_node=Link(6.25e9, NETWORK),
    devices_per_node=8960,
)


class Devices(dict[str, Device]):
    """Devices keyed by name. The text form has a line for each device."""

    def __repr__(self) -> str:
        return "\n" + "\n".join(folded(f"{name!r}: {device}") for name, device in self.items())


DEVICES: Mapping[str, Device] = MappingProxyType(
    Devices({"a100": A100, "h100": H100, "h200": H200, "tpu-v2": TPU_V2, "tpu-v5p": TPU_V5P})
)
