"""What the processes of a check run: they record a step as one rank, and the first one types it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from thunder_zero.spmd.check import OtherRun, TrainStep
from thunder_zero.spmd.collectives import collective_kind
from thunder_zero.spmd.draw import picture_of
from thunder_zero.spmd.flow import AxisTypes, Walk
from thunder_zero.spmd.lines import StepRecord
from thunder_zero.spmd.processes import NotChecked
from thunder_zero.spmd.record import StepRecorder
from thunder_zero.spmd.report import verdict_of
from thunder_zero.spmd.rules import Memo
from thunder_zero.spmd.verdict import Fault, Verdict


def record_step(step: TrainStep, shape: Mapping[str, int], rank: int = 0, *, keep_values: bool = True) -> StepRecord:
    """Run a step as one rank of a mesh without other processes, and return its record."""
    dist.init_process_group("fake", rank=rank, world_size=prod(shape.values()))
    try:
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        torch.manual_seed(0)
        recorder = StepRecorder(mesh, keep_values=keep_values)
        is_fused = torch.backends.mkldnn.flags(enabled=False)  # its operators of RNNs have no float64
        with warnings.catch_warnings(action="ignore"), is_fused, recorder.hooks(), recorder:
            result = step(mesh)
        model = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(model, nn.Module):
            returned = type(model).__name__
            raise TypeError(f"step(mesh) returned {returned}; return the model, or a tuple that begins with it")
        return recorder.record(model)
    finally:
        dist.destroy_process_group()


def record_other_rank(step: TrainStep, shape: Mapping[str, int], rank: int) -> StepRecord:
    return record_step(step, shape, rank, keep_values=False).for_other_ranks()


def types_of(
    record: StepRecord, others: Mapping[OtherRun, StepRecord], data: Sequence[str], memo: Memo | None = None
) -> dict[str, AxisTypes]:
    """Type a record on each axis of its mesh that has several ranks. ``memo`` has outcomes of equal lines."""
    memo = {} if memo is None else memo
    result = {}
    for axis in (axis for axis, size in record.axes.items() if size > 1):
        neighbour, whole = others.get((axis, "neighbour")), others.get((axis, "whole"))
        result[axis] = Walk(record, axis, neighbour, whole, batches_differ=axis in data, memo=memo).run()
    return result


def check(
    step: TrainStep, shape: Mapping[str, int], data: Sequence[str], results: Callable[[], Mapping[OtherRun, Any]]
) -> Verdict:
    """Record a step as rank 0, and type it beside what other processes ran."""
    record = record_step(step, shape)
    others: dict[OtherRun, StepRecord] = {}
    faults: list[Fault] = []
    for (axis, what), result in results().items():
        if isinstance(result, StepRecord):
            others[axis, what] = result
            faults += _different_collectives(record, axis, result) if what == "neighbour" else ()
        elif what == "neighbour":
            reason = result if isinstance(result, NotChecked) else f"raised {type(result).__name__}: {result}"
            faults.append(Fault(axis, "unknown", f"the neighbour on this axis: {reason}"))
    types = types_of(record, others, data)
    verdict = verdict_of(record, types, data, faults)
    return replace(verdict, step=picture_of(record, {axis: found.lines for axis, found in types.items()}, data))


def _different_collectives(record: StepRecord, axis: str, neighbour: StepRecord) -> Iterator[Fault]:
    """Yield a fault if the neighbour calls other collectives: the ranks would wait for each other."""
    mine = [(str(line.operator), index) for index, line in enumerate(record.lines) if line.collective is not None]
    theirs = [item.name for item in neighbour.shadows if collective_kind(item.name) is not None]
    pairs = enumerate(zip_longest(mine, theirs, fillvalue=None))
    number = next((number for number, (my, their) in pairs if my is None or my[0] != their), None)
    if number is not None:
        line = mine[number][1] if number < len(mine) else 0
        where = record.lines[line].where if number < len(mine) else ""
        text = f"the ranks call different collectives: {len(mine)} and {len(theirs)}, from number {number + 1} on"
        yield Fault(axis, "error", text, where, line)
