"""Ready-made devices, with sources; and the device that an argument names, by a key or a JSON file.

::

    "h100"                                             -> DEVICES["h100"]
    "laptop.json"  {"format": ..., "curves": {"matmul float32": [[131072, 2.5e-6], ...]}, ...}     -> a measured device
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType

from thunder_zero.tools.devices.device import Device, Link
from thunder_zero.tools.printing.words import folded

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

CHOICES = f"one of {', '.join(DEVICES)}, the path of a file that calibrate wrote, or a thunder_zero.tools.Device"


def device_of(device: Device | str | PathLike[str]) -> Device:
    """Return the device that an argument names.

    The argument is a device, a key of ``tz.tools.DEVICES`` such as ``"h100"`` or ``"H100"``, or the path of a JSON
    file. :func:`thunder_zero.tools.save_device` and ``thunder-zero calibrate`` write such files.

    Raises:
        ValueError: the key or the path is unknown.
        TypeError: the argument has another type.
    """
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
    """Read a device from a file that ``save_device`` or ``thunder-zero calibrate`` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has no device, or is damaged.
    """
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
    """Write a device to a file.

    Raises:
        OSError: the file cannot be written.
    """
    data = {"format": FORMAT, **asdict(device)}
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")
