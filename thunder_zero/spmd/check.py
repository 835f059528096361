"""``tz.tools.check_step``: checks a user's step on any mesh, with processes for a few ranks.

In: ``step(mesh)``, which builds a model and trains it for one step. Out: a ``Verdict``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thunder_zero.spmd.axes import axes_of_batches, mesh_of
from thunder_zero.spmd.collectives import collective_kind
from thunder_zero.spmd.flow import AxisTypes, Walk
from thunder_zero.spmd.processes import Call, NotChecked, run_in_processes
from thunder_zero.spmd.record import StepRecord, StepRecorder
from thunder_zero.spmd.report import verdict_of
from thunder_zero.spmd.rules import Memo
from thunder_zero.spmd.verdict import Fault, Verdict

TrainStep = Callable[[DeviceMesh], Any]
OtherRun = tuple[str, str]  # an axis, and "neighbour", its next rank, or "whole", the step with one rank on it
Results = Callable[[], Mapping[OtherRun, Any]]
SECONDS = 600.0
PRELOADED = ("thunder_zero.spmd.check", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")


def record_step(step: TrainStep, shape: Mapping[str, int], rank: int = 0, *, keep_values: bool = True) -> StepRecord:
    """Run a step as one rank of a mesh without other processes, and return its record."""
    dist.init_process_group("fake", rank=rank, world_size=prod(shape.values()))
    try:
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        torch.manual_seed(0)
        recorder = StepRecorder(mesh, keep_values=keep_values)
        with warnings.catch_warnings(), recorder.hooks(), recorder:
            warnings.simplefilter("ignore")
            result = step(mesh)
        return recorder.record(_model_of(result))
    finally:
        dist.destroy_process_group()


def _model_of(result: Any) -> nn.Module:
    model = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(model, nn.Module):
        raise TypeError(f"step(mesh) returned {type(model).__name__}; return the model, or a tuple that begins with it")
    return model


def types_of(record: StepRecord, others: Mapping[OtherRun, StepRecord], data: Sequence[str]) -> dict[str, AxisTypes]:
    """Type a record on each axis of its mesh that has several ranks."""
    memo: Memo = {}
    walks = {
        axis: Walk(
            record,
            axis,
            others.get((axis, "neighbour")),
            others.get((axis, "whole")),
            batches_differ=axis in data,
            memo=memo,
        )
        for axis, size in record.axes.items()
        if size > 1
    }
    return {axis: walk.run() for axis, walk in walks.items()}


def check_step(
    step: TrainStep,
    mesh: Mapping[str, int] | str,
    *,
    data: Sequence[str] | None = None,
    seconds: float = SECONDS,
) -> Verdict:
    """Check what each value of a training step is on each axis of a mesh, and return what is wrong.

    The step runs on the CPU as one rank, in a process of its own, and in another process for each axis as that rank's
    neighbour. It needs no GPU and nothing of thunder_zero. The check looks at this step, on its inputs, and proves
    nothing about other steps.

    >>> def step(mesh):
    ...     model = fully_shard(build(), mesh=mesh)
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     inputs, targets = batch_of(mesh.get_local_rank("dp"))
    ...     F.cross_entropy(model(inputs), targets).backward()
    ...     optimizer.step()
    ...     return model
    >>> print(tz.tools.check_step(step, {"dp": 7}))

    Args:
        step: a function of a module that other processes can import. It takes a ``DeviceMesh``, builds the model and a
            small batch of this rank, trains for one step, and returns the model, or a tuple that begins with it. A
            rank's batch has at least two items.
        mesh: the axes and their numbers of ranks, such as ``{"dp": 7, "tp": 2}`` or ``"dp=7,tp=2"``. Sizes that divide
            nothing else of the model, such as 7, keep factors apart.
        data: the axes whose ranks have batches of their own (default: all but those with a name of another
            parallelism, such as ``tp``, ``sp``, ``cp``, ``ep``).
        seconds: how long the other processes may take.

    Returns:
        The faults, collectives and gradients of the step. It has a printed form.

    Raises:
        ValueError: the mesh cannot be read, or ``data`` names no axis of the mesh.
        TypeError: the step returns no model, or other processes cannot import it.
        Exception: what the step raises, with its traceback as a note.
    """
    shape = mesh_of(mesh)
    if any(size < 1 for size in shape.values()) or prod(shape.values()) < 2:
        raise ValueError(f"the mesh {shape} has no two ranks; give axes and ranks, such as dp=7,tp=2")
    data = axes_of_batches(shape, data)
    if unknown := [axis for axis in data if axis not in shape]:
        raise ValueError(f"the mesh has no axis {', '.join(unknown)}; it has {', '.join(shape)}")
    verdict = run_in_processes((_check, (step, shape, data)), other_calls(step, shape, data), seconds, preloaded())
    if isinstance(verdict, NotChecked):
        return Verdict(shape, (Fault("every axis", "unknown", str(verdict)),))
    if isinstance(verdict, Exception):
        raise verdict
    return verdict  # type: ignore[no-any-return]


def preloaded() -> list[str]:
    """Return the modules that each process would import: transformers only if this process has it."""
    return [*PRELOADED, *(name for name in ("transformers",) if name in sys.modules)]


def other_calls(step: TrainStep, shape: Mapping[str, int], data: Sequence[str]) -> dict[OtherRun, Call]:
    """Return the calls of other processes: as the next rank of each axis, and as the step with one rank on it."""
    result: dict[OtherRun, Call] = {}
    names = list(shape)
    for index, axis in enumerate(names):
        if shape[axis] > 1:
            rank = prod(shape[name] for name in names[index + 1 :])
            result[axis, "neighbour"] = record_other_rank, (step, shape, rank)
            if axis not in data:
                result[axis, "whole"] = record_other_rank, (step, {**shape, axis: 1}, 0)
    return result


def record_other_rank(step: TrainStep, shape: Mapping[str, int], rank: int) -> StepRecord:
    return record_step(step, shape, rank, keep_values=False).for_other_ranks()


def _check(step: TrainStep, shape: Mapping[str, int], data: Sequence[str], results: Results) -> Verdict:
    """Record a step as rank 0, and type it beside what other processes ran."""
    record = record_step(step, shape)
    others, faults = {}, list[Fault]()
    for (axis, what), result in results().items():
        if isinstance(result, StepRecord):
            others[axis, what] = result
            faults += _different_collectives(record, (axis, what), result)
        elif what == "neighbour":
            reason = result if isinstance(result, NotChecked) else f"raised {type(result).__name__}: {result}"
            faults.append(Fault(axis, "unknown", f"the neighbour on this axis: {reason}"))
    return verdict_of(record, types_of(record, others, data), data, faults)


def _different_collectives(record: StepRecord, run: OtherRun, other: StepRecord) -> Iterator[Fault]:
    """Yield a fault if the neighbour calls other collectives: the ranks would wait for each other."""
    axis, what = run
    mine = [(str(line.operator), index) for index, line in enumerate(record.lines) if line.collective is not None]
    theirs = [item.name for item in other.shadows if collective_kind(item.name) is not None]
    pairs = zip_longest(mine, theirs, fillvalue=None)
    if what != "neighbour" or [name for name, _ in mine] == theirs:
        return
    number = next(number for number, (my, their) in enumerate(pairs) if my is None or my[0] != their)
    line = mine[number][1] if number < len(mine) else 0
    where = record.lines[line].where if number < len(mine) else ""
    text = f"the ranks call different collectives: {len(mine)} and {len(theirs)}, from number {number + 1} on"
    yield Fault(axis, "error", text, where, line)
