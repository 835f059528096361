"""Describes a machine: FLOP/s, memory, links, measured curves. Has ready-made devices by name.

::

    "h100"                                             -> DEVICES["h100"]
    "laptop.json"  {"format": ..., "curves": {"matmul float32": [[131072, 2.5e-6], ...]}, ...}     -> a measured device

    seconds         .            a measured curve is constant below the first size, linear between sizes,
        |       . /              and proportional to the size beyond the last size
        |___ ./
        +-------------- size
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from math import isfinite
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType

from thunder_zero.plan.amounts import folded, size, summed_up
from thunder_zero.plan.policy import is_count
from thunder_zero.tools.printing.words import ByName, count

Points = tuple[tuple[float, float], ...]  # a curve: (size, seconds) pairs, of ascending sizes that take no less time
NOTHING: Points = ((0.0, 0.0),)  # in place of a curve that was not measured


@dataclass(frozen=True, slots=True)
class Link:
    """A device's link, on which it sends and receives at the same time and at equal speeds."""

    bytes_per_second: float  # bytes that the device sends per second, over all physical links together
    latency_seconds: float = 0.0  # latency of one step of a ring

    def __post_init__(self) -> None:
        _require_positive("bytes_per_second", self.bytes_per_second)
        if not is_number(self.latency_seconds) or self.latency_seconds < 0:
            raise ValueError(f"latency_seconds is {self.latency_seconds!r}; give the seconds of one step, 0 or more")

    def seconds(self, nbytes: float, steps: int = 0) -> float:
        """Return the seconds of a ring collective in which the device sends ``nbytes`` in ``steps`` steps."""
        return self.latency_seconds * steps + nbytes / self.bytes_per_second


class Lane(StrEnum):
    """A resource that runs one operation at a time."""

    COMPUTE = "compute"
    SHARD = "shard"  # the wire of the shard group
    REPLICATE = "replicate"  # the wire of the replicate group
    TENSOR = "tensor"  # the wire of torch's tensor parallelism
    SITE = "site"  # the link between sites


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one operation."""

    flops: int = 0  # FLOPs of matrix products, attention and convolutions in the operation
    # bytes of reads and writes of memory. For a launch, these are reads and writes of encodings.
    traffic_bytes: int = 0
    busiest_bytes: int = 0  # bytes that the busiest rank sends
    seconds: float = 0.0  # time on the compute lane
    lane: Lane | None = None  # the wire of a launch, or None if no bytes are sent
    wire_seconds: float = 0.0  # time on the wire
    load: float = 0.0  # share of the CPU core that a launch in flight takes from compute
    launch_seconds: float = 0.0  # time on the compute lane before a launch begins
    finish_seconds: float = 0.0  # time on the compute lane after all messages of a launch have arrived


@dataclass(frozen=True, repr=False)
class Device:
    """A device of a machine, and its links to other devices.

    A machine that :func:`thunder_zero.tools.calibrate` measured has ``curves``. Then FLOP/s, memory and link have the
    best rates, and ``devices_per_node`` is the number of measured ranks. The seconds of products over FLOPs are keyed
    by ``"matmul float32"``, of other work over bytes of memory traffic by ``"pointwise"``, of int8 on the wire by
    ``"encode"`` and ``"decode"``, and of collectives over the bytes that the busiest rank sends by ``"gather"``,
    ``"scatter"`` or ``"all_reduce"`` with ``"launch"`` and ``"finish"`` (the launch and the wait on the compute lane),
    ``"wire"``, ``"taken"`` (compute's loss while it is in flight), and ``"tensor"`` (the launch of each further tensor
    of a bucket).
    """

    name: str  # the name in messages and tables
    flops_per_second: Mapping[str, float] = field(hash=False)  # of dense products, keyed by dtype name (``"bfloat16"``)
    memory_bytes_per_second: float  # speed of reading and writing the device's memory
    memory_bytes: int  # size of the device's memory
    intra_node: Link  # the link to the other devices of the node
    inter_node: Link | None = None  # the link to other nodes, if any
    devices_per_node: int = 8
    overlaps: bool = True  # True if collectives run while the device computes. Otherwise compute waits at each launch.
    curves: Mapping[str, Points] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for dtype, flops in self.flops_per_second.items():
            _require_positive(f"flops_per_second of {dtype!r}", flops)
        for name in ("memory_bytes_per_second", "memory_bytes"):
            _require_positive(name, getattr(self, name))
        if not is_count(self.devices_per_node) or not self.devices_per_node:
            raise ValueError(
                f"devices_per_node is {self.devices_per_node!r}; give the number of devices of a node, at least 1"
            )
        for name, curve in self.curves.items():
            _require_curve(name, curve)
        needed = {"pointwise", *(f"matmul {dtype}" for dtype in self.flops_per_second)}
        if self.is_measured and (missing := needed - set(self.curves)):
            raise ValueError(f"it has no curve of {min(missing)} work")
        object.__setattr__(self, "flops_per_second", dict(self.flops_per_second))

    @property
    def is_measured(self) -> bool:
        """True if :func:`thunder_zero.tools.calibrate` measured the device. It is then a CPU."""
        return bool(self.curves)

    def __repr__(self) -> str:
        return summed_up(self, str(self))

    def __str__(self) -> str:
        flops = [f"{dtype} {count(rate)}FLOP/s" for dtype, rate in self.flops_per_second.items()]
        memory = f"{count(self.memory_bytes_per_second)}B/s"
        if self.is_measured:
            last = {name.removesuffix(" wire"): curve[-1] for name, curve in self.curves.items() if "wire" in name}
            wires = [f"{kind} {count(8 * nbytes / seconds)}bit/s" for kind, (nbytes, seconds) in last.items()]
            processes = "one process" if self.devices_per_node == 1 else _ranks(self.devices_per_node)
            return folded(f"{self.name}, {processes}, each {', '.join([*flops, f'memory {memory}', *wires])}")
        links = {"in a node": self.intra_node, "between nodes": self.inter_node}
        parts = [f"{self.name}: {size(self.memory_bytes)} at {memory}", *flops, f"{self.devices_per_node} in a node"]
        parts += [f"{count(link.bytes_per_second)}B/s {place}" for place, link in links.items() if link]
        return folded(", ".join(parts))

    def seconds(self, flops: float, dtype: str, traffic_bytes: float, work: str = "") -> float:
        """Return the seconds of an operation: the larger of the seconds for its FLOPs and for its memory traffic.

        On a measured device, these are the seconds of its class of work, from its FLOPs if it has FLOPs.
        """
        flops_per_second = self.peak(dtype) if flops else 1.0
        if not self.is_measured:
            return max(flops / flops_per_second, traffic_bytes / self.memory_bytes_per_second)
        if flops:
            return seconds_at(self.curves.get(f"{work} {dtype}", self.curves[f"matmul {dtype}"]), flops)
        return seconds_at(self.curves.get(work, self.curves["pointwise"]), traffic_bytes)

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products in a dtype. Raise ValueError if the device has none for it."""
        if dtype not in self.flops_per_second:
            known = ", ".join(self.flops_per_second) or "no dtype"
            raise ValueError(
                f"{self.name} has FLOP/s for {known}, but the step computes in {dtype!r}; add it to flops_per_second, "
                f"or train in another dtype"
            )
        return self.flops_per_second[dtype]

    def collective(self, kind: str, ranks: int, stride: int, nbytes: float, steps: int, tensors: int) -> Cost:
        """Return the times of a ring collective in which the device sends ``nbytes`` in ``steps`` steps.

        ``kind`` (``"gather"``, ``"scatter"``, ``"all_reduce"``) and ``tensors``, the number of tensors in the bucket,
        matter only for measured devices. Between nodes a byte takes of the core what it took when it was measured.
        """
        if not self.is_measured:
            return Cost(wire_seconds=self.ring(ranks, stride).seconds(nbytes, steps))
        wire, launch, finish, taken = (
            seconds_at(self.curves.get(f"{kind} {name}", NOTHING), nbytes)
            for name in ("wire", "launch", "finish", "taken")
        )
        if self.inter_node is not None and (leaving := self.leaving(ranks, stride, nbytes)):  # to all peers at once
            wire = self.inter_node.seconds(leaving / self._members(stride), steps // (ranks - 1))
        elif ranks != self.devices_per_node or stride != 1 or f"{kind} wire" not in self.curves:
            raise ValueError(
                f"{self.name} was calibrated with collectives of {_ranks(self.devices_per_node)}, but the step has one "
                f"of {_ranks(ranks)}{f', {stride} apart' if stride > 1 else ''}; calibrate under torchrun with as many"
            )
        return Cost(
            wire_seconds=wire,
            load=min(taken / wire, 1.0) if wire else 0.0,
            launch_seconds=launch + seconds_at(self.curves.get(f"{kind} tensor", NOTHING), tensors - 1),
            finish_seconds=finish,
        )

    def ring(self, ranks: int, stride: int = 1) -> Link:
        """Return a device's link in a ring of ranks that are ``stride`` apart. Successive ranks share a node.

        A ring that leaves the node uses the ``inter_node`` links of all members in the node, up to the speed of
        ``intra_node``. This is the speed of parallel rings that leave the node over separate links. The latency is the
        mean over the ring's steps. Steps out of a node have the latency of ``inter_node``, and all other steps have the
        latency of ``intra_node``.
        """
        if (ranks - 1) * stride < self.devices_per_node:
            return self.intra_node
        if self.inter_node is None:
            raise ValueError(
                f"{self.name} has no link to other nodes, but {ranks} ranks {stride} apart need more than the "
                f"{self.devices_per_node} devices of one; give Device.inter_node"
            )
        members, inside, outside = self._members(stride), self.intra_node, self.inter_node
        leaving = -(-ranks // members) - 1  # number of the ring's ranks - 1 steps that leave a node
        seconds = (ranks - 1 - leaving) * inside.latency_seconds + leaving * outside.latency_seconds
        return Link(min(inside.bytes_per_second, members * outside.bytes_per_second), seconds / (ranks - 1))

    def leaving(self, ranks: int, stride: int, nbytes: float) -> float:
        """Return the bytes of a collective that leave a node, if each rank sends ``nbytes``: those of one rank in a
        ring, and on a measured device, which is a CPU, those from each rank to each other node's ranks."""
        if (ranks - 1) * stride < self.devices_per_node:
            return 0.0
        members = self._members(stride)
        return nbytes * members * (ranks - members) / (ranks - 1) if self.is_measured else nbytes

    def _members(self, stride: int) -> int:
        return max(1, self.devices_per_node // stride)


def rising(points: Iterable[tuple[float, float]]) -> Points:
    """Return a curve through measured points. Noise that makes a larger size faster is removed."""
    sizes, seconds = zip(*sorted(points), strict=True)
    return tuple(zip(sizes, accumulate(seconds, max), strict=True))


def seconds_at(curve: Points, work: float) -> float:
    index = bisect_left(curve, work, key=lambda point: point[0])
    if index == 0:
        return curve[0][1]
    left, left_seconds = curve[index - 1]
    if index == len(curve):
        return left_seconds * (work / left if left else 1.0)
    right, right_seconds = curve[index]
    return left_seconds + (right_seconds - left_seconds) * (work - left) / (right - left)


def _require_curve(name: str, curve: Points) -> None:
    numbers = [number for point in curve for number in point]
    falls = any(later[0] <= point[0] or later[1] < point[1] for point, later in pairwise(curve))
    if not numbers or falls or not all(is_number(number) and number >= 0 for number in numbers):
        raise ValueError(f"the curve {name!r} has the points {curve}; give ascending sizes that take no less time")


def _require_positive(name: str, value: float) -> None:
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}; give a number above 0")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _ranks(number: int) -> str:
    return "one rank alone" if number == 1 else f"{number} ranks"


MiB, GiB = 1 << 20, 1 << 30

# Latency of a step of a ring: in NCCL's model 3.4 us over NVLink, 5.7 us over PCIe and 14 us over a network (hwLat,
# ring, simple protocol, in src/graph/tuning.cc); in the scaling book about 1 us a hop of a TPU's links.
NVLINK, PCIE, NETWORK, ICI = 3.4e-6, 5.7e-6, 14e-6, 1e-6  # seconds

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
# https://www.nvidia.com/en-us/data-center/h200 (data sheet, SXM): an H100 with more memory, of the size that nvidia-smi
# reports
H200 = replace(H100, name="H200", memory_bytes_per_second=4.8e12, memory_bytes=143_771 * MiB)
# GeForce: tables of NVIDIA's white papers on GA102 (Ampere), Ada and RTX Blackwell: FLOP/s of tensor cores without
# sparsity, sums in float32; float64 is 1/64 of float32. PCIe has 16 lanes. One GPU in a machine, with the Ethernet of
# 1 Gbit/s that boards have. Memory as nvidia-smi reports it.
RTX3090 = Device(
    # https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf
    name="RTX 3090",
    flops_per_second={"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12, "float64": 0.556e12},
    memory_bytes_per_second=936e9,
    memory_bytes=24_576 * MiB,
    intra_node=Link(31.5e9, PCIE),  # PCIe 4.0
    inter_node=Link(125e6, NETWORK),
    devices_per_node=1,
)
RTX4090 = replace(
    RTX3090,  # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    name="RTX 4090",
    flops_per_second={"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12, "float64": 1.29e12},
    memory_bytes_per_second=1.008e12,
    memory_bytes=24_564 * MiB,
)
RTX5090 = replace(
    RTX3090,  # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    name="RTX 5090",
    flops_per_second={"bfloat16": 209.5e12, "float16": 209.5e12, "float32": 104.8e12, "float64": 1.64e12},
    memory_bytes_per_second=1.792e12,
    memory_bytes=32_607 * MiB,
    intra_node=Link(63e9, PCIE),  # PCIe 5.0
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


DEVICES: Mapping[str, Device] = MappingProxyType(
    ByName(
        {"a100": A100, "h100": H100, "h200": H200, "rtx3090": RTX3090, "rtx4090": RTX4090, "rtx5090": RTX5090}
        | {"tpu-v2": TPU_V2, "tpu-v5p": TPU_V5P}
    )
)

CHOICES = f"one of {', '.join(DEVICES)}, the path of a file that calibrate wrote, or a thunder_zero.tools.Device"


def device_of(device: Device | str | PathLike[str]) -> Device:
    """Return the device that an argument names, by a key of ``DEVICES`` such as ``"H100"``, or a JSON file's path."""
    if isinstance(device, Device):
        return device
    if not isinstance(device, str | PathLike):
        raise TypeError(f"device is of type {type(device).__name__}; give {CHOICES}")
    name = fspath(device)
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if not Path(name).is_file():
        raise ValueError(f"there is no device {name!r}; give {CHOICES}")
    return load_device(name)


FORMAT = "thunder_zero device 2"


def load_device(path: str | Path) -> Device:
    """Read a device from a file that ``save_device`` or ``thunder-zero calibrate`` has written."""
    text = Path(path).read_text(errors="replace")
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT!r}")
        links = {name: Link(**data[name]) for name in ("intra_node", "inter_node") if data[name] is not None}
        curves = {name: tuple(map(tuple, curve)) for name, curve in data["curves"].items()}
        return Device(**(data | links | {"curves": curves}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fault = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is no device, or damaged: {fault}; calibrate this machine again") from None


def save_device(device: Device, path: str | Path) -> None:
    """Write a device to a file."""
    data = {"format": FORMAT, **asdict(device)}
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")
