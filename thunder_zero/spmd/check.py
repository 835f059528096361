"""``tz.tools.check_step``: checks a user's step on any mesh, with processes for a few ranks.

In: ``step(mesh)``, which builds a model and trains it for one step. Out: a ``Verdict``.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pickle import PicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thunder_zero.spmd.collectives import collective_kind
from thunder_zero.spmd.flow import AxisTypes, Fault, Memo, Walk
from thunder_zero.spmd.record import NotChecked, Shadow, StepRecord, StepRecorder
from thunder_zero.spmd.report import Verdict, verdict_of

TrainStep = Callable[[DeviceMesh], Any]
WITHOUT_BATCHES = ("tp", "tensor", "model", "sp", "seq", "sequence", "cp", "context", "ep", "expert", "pp", "pipe")
SECONDS = 600.0
PRELOADED = (  # what each process would import; the last only if this process has it
    *("thunder_zero.spmd.check", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("transformers",),
)


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


def types_of(
    record: StepRecord,
    neighbours: Mapping[str, Sequence[Shadow]],
    data: Sequence[str],
    wholes: Mapping[str, tuple[Sequence[Shadow], Mapping[str, tuple[int, ...]]]] | None = None,
) -> dict[str, AxisTypes]:
    """Type a record on each axis of its mesh that has several ranks."""
    memo, result = Memo(), {}
    for axis, size in record.axes.items():
        if size > 1:
            shadows, shapes = (wholes or {}).get(axis, ((), {}))
            walk = Walk(
                record,
                axis,
                neighbour=neighbours.get(axis, ()),
                whole=shadows,
                wholes=shapes,
                batches_differ=axis in data,
                memo=memo,
            )
            result[axis] = walk.run()
    return result


@dataclass(frozen=True)
class Other:
    """What another rank, or a smaller mesh, ran: its lines, and the shapes of its parameters."""

    shadows: tuple[Shadow, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


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
    data = data_axes(shape) if data is None else tuple(data)
    if unknown := [axis for axis in data if axis not in shape]:
        raise ValueError(f"the mesh has no axis {', '.join(unknown)}; it has {', '.join(shape)}")
    with Processes(step, seconds) as processes:
        checking = processes.start(_check, shape, data)
        running = [(task, processes.start(run_other_rank, task)) for task in tasks_of(shape, data)]
        others, faults = {}, []
        for task, pipe in running:
            result = processes.receive(pipe)
            if isinstance(result, Other):
                others[task.axis, task.what] = result
            elif task.what == "neighbour":
                text = f"rank {task.rank}, the neighbour on this axis, {_reason(result)}"
                faults.append(Fault(task.axis, "unknown", text, "", 0))
        with suppress(BrokenPipeError):  # it has ended, and says why
            checking.send((others, faults))
        verdict = processes.receive(checking)
    if isinstance(verdict, Exception):
        raise verdict
    if isinstance(verdict, Verdict):
        return verdict
    return Verdict(shape, (Fault("every axis", "unknown", _sentence(verdict), "", 0),), (), (), (), 0)


def _sentence(reason: object) -> str:
    """Return why a step is not checked."""
    return f"rank 0 {reason}" if str(reason).startswith(("took ", "ended ")) else str(reason)


def _reason(result: object) -> str:
    return f"raised {type(result).__name__}: {result}" if isinstance(result, Exception) else str(result)


def mesh_of(mesh: Mapping[str, int] | str) -> dict[str, int]:
    """Return the axes of a mesh, such as those of ``"dp=7,tp=2"``."""
    if isinstance(mesh, str):
        parts = [part.partition("=") for part in mesh.split(",")]
        if not all(name.strip() and size.strip().isdigit() for name, _, size in parts):
            raise ValueError(f"cannot read the mesh {mesh!r}; give axes and ranks, such as dp=7,tp=2")
        mesh = {name.strip(): int(size) for name, _, size in parts}
    if not mesh or any(size < 1 for size in mesh.values()) or prod(mesh.values()) < 2:
        raise ValueError(f"the mesh {dict(mesh)} has no two ranks; give axes and ranks, such as dp=7,tp=2")
    return dict(mesh)


def data_axes(shape: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes whose ranks have batches of their own, by their names."""
    return tuple(axis for axis in shape if not axis.startswith(WITHOUT_BATCHES))


@dataclass(frozen=True)
class RankTask:
    """What another process runs: the next rank of an axis, or the step with one rank on this axis."""

    axis: str
    what: str
    shape: Mapping[str, int]
    rank: int


def tasks_of(shape: Mapping[str, int], data: Sequence[str]) -> list[RankTask]:
    """Return what other processes run for a mesh."""
    tasks, names = [], list(shape)
    for index, axis in enumerate(names):
        if shape[axis] > 1:
            tasks.append(RankTask(axis, "neighbour", shape, prod(shape[name] for name in names[index + 1 :])))
            if axis not in data:
                tasks.append(RankTask(axis, "whole", {**shape, axis: 1}, 0))
    return tasks


class Processes:
    """Runs a step as several ranks, each in a process of its own, as DTensor's caches keep the first mesh."""

    def __init__(self, step: TrainStep, seconds: float) -> None:
        self._step, self._ends, self._seconds = step, time.monotonic() + seconds, seconds
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:  # a process that has imported torch, and computed nothing, is forked for each rank
            modules = [name for name in PRELOADED if name != "transformers" or name in sys.modules]
            self._context.set_forkserver_preload(modules)
        self._running: list[tuple[Any, Any]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *raised: object) -> None:
        for process, pipe in self._running:  # only those that this object started
            pipe.close()
            process.kill()
            process.join()

    def start(self, function: Callable[..., None], *args: Any) -> Any:
        """Call ``function(step, *args, pipe)`` in a new process, and return the other end of the pipe."""
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=function, args=(self._step, *args, theirs), daemon=True)
        try:
            process.start()
        except (AttributeError, TypeError, PicklingError) as error:
            text = f"another process cannot import {self._step!r}; define step at the top of a file"
            raise TypeError(text) from error
        finally:
            theirs.close()
        self._running.append((process, mine))
        return mine

    def receive(self, pipe: Any) -> Any:
        """Return what a process sends, or why it sends nothing."""
        if not pipe.poll(max(self._ends - time.monotonic(), 0)):
            return f"took over {self._seconds:.0f} s"
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return "ended without a result"


def _check(step: TrainStep, shape: Mapping[str, int], data: Sequence[str], pipe: Any) -> None:
    """StepRecord a step as rank 0, type it beside what other processes ran, and send the verdict."""
    try:
        record = record_step(step, shape)
        others, faults = pipe.recv()
        pipe.send(_verdict(record, data, others, faults))
    except NotChecked as error:
        pipe.send(str(error))
    except Exception as error:
        _send_error(error, pipe)


def _verdict(
    record: StepRecord, data: Sequence[str], others: Mapping[tuple[str, str], Other], faults: list[Fault]
) -> Verdict:
    neighbours = {axis: others.get((axis, "neighbour"), Other()).shadows for axis in record.axes}
    wholes = {axis: others.get((axis, "whole"), Other()) for axis in record.axes}
    types = types_of(record, neighbours, data, {axis: (item.shadows, item.shapes) for axis, item in wholes.items()})
    different = [fault for axis, other in neighbours.items() for fault in _different_collectives(record, axis, other)]
    return verdict_of(record, types, data, [*faults, *different])


def run_other_rank(step: TrainStep, task: RankTask, pipe: Any) -> None:
    """StepRecord a step as another rank, and send its shadow."""
    try:
        record = record_step(step, task.shape, task.rank, keep_values=False)
        pipe.send(Other(record.shadows, {item.path: item.ref.shape for item in record.parameters}))
    except Exception as error:
        _send_error(error, pipe)


def _send_error(error: Exception, pipe: Any) -> None:
    """Send an error with its traceback as a note, or a plain error in place of one that cannot be sent."""
    note = "".join(traceback.format_exception(error))
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    copied.add_note(note)
    pipe.send(copied)


def _different_collectives(record: StepRecord, axis: str, other: Sequence[Shadow]) -> list[Fault]:
    """Return a fault if the neighbour calls other collectives: the ranks would wait for each other."""
    mine = [line for line in record.lines if line.collective is not None]
    theirs = [item.name for item in other if item.name.startswith(("c10d.", "_c10d_functional."))]
    theirs = [name for name in theirs if collective_kind(name) is not None]
    names = [str(line.operator) for line in mine]
    if not other or names == theirs:
        return []
    pairs = enumerate(zip(names, theirs, strict=False))
    index = next((index for index, (name, their) in pairs if name != their), min(len(names), len(theirs)))
    where = mine[index].where if index < len(mine) else ""
    text = f"the ranks call different collectives: {len(names)} and {len(theirs)}, from number {index + 1} on"
    return [Fault(axis, "error", text, where, record.lines.index(mine[index]) if index < len(mine) else 0)]
