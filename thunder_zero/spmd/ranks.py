"""What the processes of a check run: they record a step as one rank, and the first one types it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from thunder_zero.compat.private import replaced
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
        ignoring = warnings.catch_warnings(action="ignore")
        with ignoring, is_fused, as_torchrun(rank, mesh.size()), recorder.hooks(), recorder:
            result = step(mesh)
        return recorder.record(_model_of(result, recorder.outermost))
    finally:
        dist.destroy_process_group()


@contextmanager
def as_torchrun(rank: int, ranks: int) -> Iterator[None]:
    """Set what torchrun sets. A script's own calls that begin and end the group do nothing."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    with ExitStack() as stack:
        stack.enter_context(replaced(os, "environ", {**os.environ, **{name: str(n) for name, n in numbers.items()}}))
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(replaced(dist, name, lambda *_, **__: None))
        yield


def _model_of(result: Any, outermost: Sequence[nn.Module]) -> nn.Module:
    """Return the model that a step returned, or else the only module with parameters to train that it called."""
    model = result[0] if isinstance(result, tuple) and result else result
    if isinstance(model, nn.Module):
        return model
    trained = [
        module for module in dict.fromkeys(outermost) if any(param.requires_grad for param in module.parameters())
    ]
    inside = {part for module in trained for part in module.modules() if part is not module}
    match [module for module in trained if module not in inside]:
        case [only]:
            return only
        case called:
            names = ", ".join(type(module).__name__ for module in called) or "no module"
            raise ValueError(
                f"the step returned {type(model).__name__}, and called {names} with parameters to train; return the "
                f"model, or a tuple that begins with it"
            )


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
