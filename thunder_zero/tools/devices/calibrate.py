"""``tz.tools.calibrate``: measures this machine, and the collectives of the calling ranks.

::

    round 1, 2, ...   measures each point of measures.py in seconds, on all ranks at the same time
    device            takes the median over rounds, then the mean over ranks, as curves over sizes

Other work may run between rounds. ``thunder-zero calibrate`` writes the device to a file.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.lost_ranks import speaks_gloo
from thunder_zero.comm.small_collectives import all_gather_object, barrier, broadcast_object_from_rank_0
from thunder_zero.tools.devices.calibrated import Calibrated, CollectiveCurves, Curve
from thunder_zero.tools.devices.device import Link
from thunder_zero.tools.devices.measures import (
    BURST,
    SIZES,
    TIMES,
    Collectives,
    enough_times,
    measures,
    seconds_of,
)
from thunder_zero.tools.devices.named import save_device
from thunder_zero.tools.printing.progress import show_status

DTYPES = (torch.float32, torch.bfloat16)
Key = tuple[Any, ...]  # the key of a measurement, such as ("launch", "gather", bytes sent)
LEAST_ROUNDS = 3


def calibrate(
    seconds: float = 30.0, *, process_group: ProcessGroup | None = None, dtypes: Sequence[torch.dtype] = DTYPES
) -> Calibrated:
    """Measure times of compute and communication on this machine, as curves over sizes, for ``tz.tools.estimate``.

    Without a process group, only this CPU is measured. In a group, every rank calls this function. All ranks compute at
    the same time, since they share caches and memory. Collectives use the same transports as a training step. All ranks
    return equal devices. Use as many torch threads as in training. Nothing else should run on the machine.

    >>> device = tz.tools.calibrate(seconds=10)
    >>> tz.tools.estimate(traces, device, loss=loss, optimizer=torch.optim.AdamW).seconds

    Args:
        seconds: how long to measure. There are at least three rounds, so that a median can ignore a disturbed round.
        process_group: a group of the gloo backend (default: the default group, if any).
        dtypes: dtypes of matrix products.

    Raises:
        ValueError: ``seconds`` is not above 0, ``dtypes`` is empty, or the group does not use gloo for CPU tensors.
    """
    group = _group(process_group)
    if group is None:
        _require(seconds, dtypes)
        return _measure(Calibration(None, dtypes), seconds, lambda go_on: go_on)
    with doing("calibrate"):
        with all_or_none(group, "to calibrate"):
            _require(seconds, dtypes)
            if not speaks_gloo(group):
                raise ValueError("calibrate measures CPUs on gloo; give a process group of gloo")
        return _measure(Calibration(group, dtypes), seconds, lambda go_on: broadcast_object_from_rank_0(go_on, group))


def _group(requested: ProcessGroup | None) -> ProcessGroup | None:
    """Return the requested group, or else the default group; None for a single rank."""
    if requested is None and not has_groups():
        return None
    group = process_group(requested)
    return group if group.size() > 1 else None


def _require(seconds: float, dtypes: Sequence[torch.dtype]) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not isfinite(seconds) or seconds <= 0:
        raise ValueError(f"seconds is {seconds!r}; give how long to measure, a number above 0")
    if not dtypes or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"dtypes is {dtypes!r}; give floating-point dtypes, such as [torch.float32]")


def _measure(calibration: Calibration, seconds: float, agree: Callable[[bool], bool]) -> Calibrated:
    """Run rounds for ``seconds``. ``agree`` makes all ranks run an equal number of rounds."""
    rounds, end = 0, monotonic() + seconds
    with show_status("calibrating:") as show:
        while agree(rounds < LEAST_ROUNDS or monotonic() < end):
            rounds += 1
            show(f"round {rounds}, {max(end - monotonic(), 0):.0f} s left")
            calibration.round()
    return calibration.device()


class Calibration:
    """Measurements of one process, or of the ranks of a gloo group. Every rank must call each method."""

    def __init__(self, group: ProcessGroup | None = None, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._measures = tuple(measures(dtypes))
        self._times = [enough_times(measure.run) for measure in self._measures]
        self._collectives = None if self._group is None else Collectives(self._group)
        self._seconds: dict[Key, list[float]] = defaultdict(list)

    def round(self) -> None:
        """Measure each point once."""
        for measure, times in zip(self._measures, self._times, strict=True):
            if self._group is not None:
                barrier(self._group)  # ranks share caches and memory, so they compute at the same time
            key = ("compute", str(measure.work), measure.dtype, measure.size)
            self._seconds[key].append(seconds_of(measure.run, times) / measure.lines)
        if self._collectives is not None:
            self._round_of_collectives(self._collectives)

    def _round_of_collectives(self, collectives: Collectives) -> None:
        for kind, sent in collectives.points:
            for name, seconds in collectives.time(kind, sent).items():
                self._seconds[name, kind, sent].append(seconds)
        for kind in TIMES:
            self._seconds["tensor", kind].append(collectives.seconds_a_tensor(kind))
            launch, finish, burst = (
                median(self._seconds[name, kind, SIZES[-1]]) for name in ("launch", "finish", "burst")
            )
            slowdown = collectives.time_slowdown(kind, burst / BURST, launch + finish)
            self._seconds["taken", kind].append(slowdown)

    def device(self) -> Calibrated:
        """Return the device from medians over rounds, averaged over ranks. All ranks return equal devices."""
        if not self._seconds:
            raise RuntimeError("there is no round of measurements yet; call round() first")
        seconds = {key: median(rounds) for key, rounds in self._seconds.items()}
        if self._group is not None:
            ranks_seconds = all_gather_object(seconds, self._group)
            seconds = {key: mean(rank_seconds[key] for rank_seconds in ranks_seconds) for key in ranks_seconds[0]}
        ranks = 1 if self._group is None else self._group.size()
        return _measured_device(seconds, ranks, {"backend": "none" if self._group is None else "gloo", **about()})


def _measured_device(seconds: Mapping[Key, float], ranks: int, about: Mapping[str, str]) -> Calibrated:
    products: dict[str, dict[str, Curve]] = defaultdict(dict)
    traffic: dict[str, Curve] = {}
    for work, dtype in dict.fromkeys(key[1:3] for key in seconds if key[0] == "compute"):
        curve = Curve.measured((key[3], seconds[key]) for key in seconds if key[:3] == ("compute", work, dtype))
        if dtype:
            products[work][dtype] = curve
        else:
            traffic[work] = curve
    collectives = {kind: _collective(kind, seconds) for kind in TIMES if ("taken", kind) in seconds}
    return Calibrated(
        name=about["cpu"],
        flops_per_second={dtype: _best_rate(curve) for dtype, curve in products["matmul"].items()},
        memory_bytes_per_second=_best_rate(traffic["pointwise"]),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks,
        intra_node=_link(collectives),
        devices_per_node=ranks,
        products=products,
        traffic=traffic,
        collectives=collectives,
        ranks=ranks,
        about=about,
    )


def _collective(kind: str, seconds: Mapping[Key, float]) -> CollectiveCurves:
    """Return the curves of a kind of collective from measured seconds."""

    def curve(name: str) -> Curve:
        return Curve.measured((sent, seconds[name, kind, sent]) for sent in SIZES)

    slowdown = max(seconds["taken", kind], 0.0)
    wires = []
    for sent in SIZES:
        launch, finish, burst = (seconds[name, kind, sent] for name in ("launch", "finish", "burst"))
        wires.append((sent, wire_seconds(burst, launch + finish, slowdown * sent / SIZES[-1], BURST)))
    proportional = Curve(((0.0, 0.0), (SIZES[-1], slowdown)))
    return CollectiveCurves(
        curve("launch"), Curve.measured(wires), curve("finish"), proportional, seconds["tensor", kind]
    )


def wire_seconds(elapsed: float, held: float, taken: float, burst: int) -> float:
    """Return a collective's seconds on the wire, measured in a burst of ``burst`` collectives.

    The burst takes ``elapsed`` seconds. A collective's launch and wait together use the core for ``held`` seconds. Its
    transfer uses the core for ``taken`` seconds. Every launch and wait except one pair overlap with a transfer. Each
    overlapping pair delays the transfer by ``held * taken / wire`` seconds.

    >>> wire_seconds(11.0, held=1.0, taken=0.0, burst=2), wire_seconds(12.0, held=1.0, taken=5.0, burst=2)
    (5.0, 5.0)
    """
    wire = elapsed / burst
    for _ in range(20):
        load = min(taken / wire, 1.0) if wire > 0 else 1.0
        wire = (elapsed - held - load * (burst - 1) * held) / burst
    return max(wire, 0.0)


def _best_rate(curve: Curve) -> float:
    return max(size / seconds for size, seconds in curve.points if size and seconds)


def _link(collectives: Mapping[str, CollectiveCurves]) -> Link:
    """Return the link that matches the curve of gathers at the largest size."""
    if not collectives:
        return Link(1e9)
    wire = collectives["gather"].wire
    return Link(1 / max(wire.seconds_per_unit, 1e-15), wire.points[0][1])


def about() -> dict[str, str]:
    """Return the versions of the software and a description of the machine."""
    names = ("torch", "lightning-thunder", "thunder-zero")
    return {
        "cpu": _cpu(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def calibrate_to(path: Path, seconds: float) -> None:
    """Measure a device, write it for :func:`thunder_zero.tools.load_device`, and print it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    with _ranks():
        device = calibrate(seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_device(device, path)
            print(f"{path}: {device}")


@contextmanager
def _ranks() -> Iterator[None]:
    """Temporarily make a process group if torchrun has set its environment variables."""
    if "RANK" not in os.environ:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
