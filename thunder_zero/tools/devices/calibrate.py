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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import mean, median
from time import monotonic

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.lost_ranks import speaks_gloo
from thunder_zero.comm.small_collectives import all_gather_object, barrier, broadcast_object_from_rank_0
from thunder_zero.tools.devices.device import Device, Link, Points, is_number, rising, seconds_at
from thunder_zero.tools.devices.measures import BURST, SIZES, TIMES, Collectives, enough_times, measures, seconds_of
from thunder_zero.tools.devices.named import save_device
from thunder_zero.tools.printing.progress import show_status

DTYPES = (torch.float32, torch.bfloat16)
Key = tuple[str, float]  # a curve's name and a size, such as ("gather launch", bytes sent)
LEAST_ROUNDS = 3


def calibrate(
    seconds: float = 30.0, *, process_group: ProcessGroup | None = None, dtypes: Sequence[torch.dtype] = DTYPES
) -> Device:
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
    with doing("calibrate"):
        with nullcontext() if group is None else all_or_none(group, "to calibrate"):
            _require(seconds, dtypes, group)
        calibration, rounds, end = Calibration(group, dtypes), 0, monotonic() + seconds
        with show_status("calibrating:") as show:
            while _of_rank_0(rounds < LEAST_ROUNDS or monotonic() < end, group):
                rounds += 1
                show(f"round {rounds}, {max(end - monotonic(), 0):.0f} s left")
                calibration.round()
        return calibration.device()


def _group(requested: ProcessGroup | None) -> ProcessGroup | None:
    """Return the requested group, or else the default group; None for a single rank."""
    if requested is None and not has_groups():
        return None
    group = process_group(requested)
    return group if group.size() > 1 else None


def _require(seconds: float, dtypes: Sequence[torch.dtype], group: ProcessGroup | None) -> None:
    if not is_number(seconds) or seconds <= 0:
        raise ValueError(f"seconds is {seconds!r}; give how long to measure, a number above 0")
    if not dtypes or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"dtypes is {dtypes!r}; give floating-point dtypes, such as [torch.float32]")
    if group is not None and not speaks_gloo(group):
        raise ValueError("calibrate measures CPUs on gloo; give a process group of gloo")


def _of_rank_0(go_on: bool, group: ProcessGroup | None) -> bool:
    """Return rank 0's answer, so that all ranks run an equal number of rounds."""
    return go_on if group is None else broadcast_object_from_rank_0(go_on, group)


class Calibration:
    """Measurements of one process, or of the ranks of a gloo group. Every rank must call each method."""

    def __init__(self, group: ProcessGroup | None = None, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self._group = group
        self._measures = [(measure, enough_times(measure[2])) for measure in measures(dtypes)]
        self._collectives = None if group is None else Collectives(group)
        self._seconds: dict[Key, list[float]] = defaultdict(list)

    def round(self) -> None:
        """Measure each point once."""
        for (name, work, run, lines), times in self._measures:
            if self._group is not None:
                barrier(self._group)  # ranks share caches and memory, so they compute at the same time
            self._seconds[name, work].append(seconds_of(run, times) / lines)
        if self._collectives is not None:
            self._round_of_collectives(self._collectives)

    def _round_of_collectives(self, collectives: Collectives) -> None:
        most = SIZES[-1]
        for kind, sent in collectives.points:
            for name, seconds in collectives.time(kind, sent).items():
                self._seconds[f"{kind} {name}", sent].append(seconds)
        for kind in TIMES:
            self._seconds[f"{kind} tensor", 1].append(collectives.seconds_a_tensor(kind))
            launch, finish, burst = (
                median(self._seconds[f"{kind} {name}", most]) for name in ("launch", "finish", "burst")
            )
            slowdown = collectives.time_slowdown(kind, burst / BURST, launch + finish)
            self._seconds[f"{kind} taken", most].append(slowdown)

    def device(self) -> Device:
        """Return the device from medians over rounds, averaged over ranks. All ranks return equal devices."""
        seconds = {key: median(rounds) for key, rounds in self._seconds.items()}
        of_ranks = [seconds] if self._group is None else all_gather_object(seconds, self._group)
        return _measured_device({key: mean(rank[key] for rank in of_ranks) for key in seconds}, len(of_ranks))


def _measured_device(seconds: Mapping[Key, float], ranks: int) -> Device:
    points: dict[str, dict[float, float]] = defaultdict(dict)
    for (name, work), measured in seconds.items():
        points[name][work] = measured
    for kind in TIMES if ranks > 1 else ():
        for name in ("taken", "tensor"):
            points[f"{kind} {name}"][0] = 0.0  # these are proportional
        taken, burst = rising(points[f"{kind} taken"].items()), points.pop(f"{kind} burst")
        held = {sent: points[f"{kind} launch"][sent] + points[f"{kind} finish"][sent] for sent in burst}
        points[f"{kind} wire"] = {
            sent: wire_seconds(elapsed, held[sent], seconds_at(taken, sent), BURST) for sent, elapsed in burst.items()
        }
    curves = {name: rising(curve.items()) for name, curve in points.items()}
    wire = curves.get("gather wire", ((0.0, 0.0), (1e9, 1.0)))
    products = {name.removeprefix("matmul "): curve for name, curve in curves.items() if name.startswith("matmul ")}
    return Device(
        name=_cpu(),
        flops_per_second={dtype: _best_rate(curve) for dtype, curve in products.items()},
        memory_bytes_per_second=_best_rate(curves["pointwise"]),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks,
        intra_node=Link(wire[-1][0] / max(wire[-1][1], 1e-9), wire[0][1]),
        devices_per_node=ranks,
        curves=curves,
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


def _best_rate(curve: Points) -> float:
    return max(work / seconds for work, seconds in curve if work and seconds)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def calibrate_to(path: Path, seconds: float) -> None:
    """Measure a device, write it for :func:`thunder_zero.tools.load_device`, and print it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    with ExitStack() as stack:
        if "RANK" in os.environ:  # torchrun sets it
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        device = calibrate(seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_device(device, path)
            print(f"{path}: {device}")
