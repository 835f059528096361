"""``thunder-zero calibrate``: one process measures, or all ranks under torchrun; writes the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from thunder_zero.tools.devices.calibrate import calibrate
from thunder_zero.tools.devices.calibrated import Calibrated
from thunder_zero.tools.devices.device_file import save_device


def calibrate_to(path: Path, seconds: float) -> None:
    """Measure, write a file that :func:`thunder_zero.tools.load_device` reads, and print what came out.

    Raises:
        OSError: the file cannot be written; nothing was measured then.
        ValueError: ``seconds`` is not above 0.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    with _ranks():
        device = calibrate(seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_device(device, path)
            print(summary(device, path))


@contextmanager
def _ranks() -> Iterator[None]:
    """The process group that torchrun's variables describe; none without them."""
    if "RANK" not in os.environ:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def summary(device: Calibrated, path: Path) -> str:
    """The best of the curves, in words."""
    rates = [f"{dtype} {rate / 1e9:.3g} GFLOP/s" for dtype, rate in device.flops_per_second.items()]
    rates.append(f"memory {device.memory_bytes_per_second / 1e9:.3g} GB/s")
    rates += [
        f"{kind} {1 / one.wire.seconds_per_unit * 8 / 1e9:.3g} Gbit/s" for kind, one in device.collectives.items()
    ]
    who = "one process" if device.ranks == 1 else f"{device.ranks} ranks"
    return f"{path}: {device.name}, {who}, each {', '.join(rates)}"
