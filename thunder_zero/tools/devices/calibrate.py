"""``tz.tools.calibrate``: measures this machine, and the collectives of the ranks that call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from time import monotonic

import torch
from torch.distributed import ProcessGroup

from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.comm.lost_ranks import speaks_gloo
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0
from thunder_zero.tools.devices.calibrated import Calibrated
from thunder_zero.tools.devices.rounds import DTYPES, Calibration
from thunder_zero.tools.report.progress import show_status

LEAST_ROUNDS = 3


def calibrate(
    seconds: float = 30.0, *, process_group: ProcessGroup | None = None, dtypes: Sequence[torch.dtype] = DTYPES
) -> Calibrated:
    """Measure how long this machine computes and communicates, as curves over sizes, for ``tz.tools.estimate``.

    In a process alone: compute on the CPU. With a process group: a collective, in which all ranks compute at the same
    time, since they share caches and memory, and send through the transports that carry a step. Every rank gets the
    same device. Threads are torch's: set them as in training. Nothing else should run on the machine.

    >>> device = tz.tools.calibrate(seconds=10)
    >>> tz.tools.estimate(traces, device, loss=loss, optimizer=torch.optim.AdamW).seconds

    Args:
        seconds: how long to measure; at least three rounds, so that medians can leave out what was disturbed.
        process_group: of gloo; default: the default one, or none if there is none.
        dtypes: of products.

    Raises:
        ValueError: ``seconds`` is not above 0, there is no dtype, or the group's CPU tensors do not travel over gloo.
    """
    group = _group(process_group)
    if group is None:
        _require(seconds, dtypes)
        return _measured(Calibration(None, dtypes), seconds, lambda go_on: go_on)
    with doing("calibrate"):
        with all_or_none(group, "to calibrate"):
            _require(seconds, dtypes)
            if not speaks_gloo(group):
                raise ValueError("calibrate measures CPUs on gloo; give a process group of gloo")
        return _measured(Calibration(group, dtypes), seconds, lambda go_on: broadcast_object_from_rank_0(go_on, group))


def _group(given: ProcessGroup | None) -> ProcessGroup | None:
    if given is None and not has_groups():
        return None
    group = process_group(given)
    return group if group.size() > 1 else None


def _require(seconds: float, dtypes: Sequence[torch.dtype]) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not isfinite(seconds) or seconds <= 0:
        raise ValueError(f"seconds is {seconds!r}; give how long to measure, a number above 0")
    if not dtypes or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"dtypes is {dtypes!r}; give floating-point dtypes, such as [torch.float32]")


def _measured(calibration: Calibration, seconds: float, agreed: Callable[[bool], bool]) -> Calibrated:
    rounds, end = 0, monotonic() + seconds
    with show_status("calibrating:") as show:
        while agreed(rounds < LEAST_ROUNDS or monotonic() < end):
            rounds += 1
            show(f"round {rounds}, {max(end - monotonic(), 0):.0f} s left")
            calibration.round()
    return calibration.device()
