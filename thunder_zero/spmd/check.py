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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from math import prod
from pickle import PicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thunder_zero.spmd.axes import axes_of_batches, mesh_of
from thunder_zero.spmd.collectives import collective_kind
from thunder_zero.spmd.flow import AxisTypes, Fault, Memo, Walk
from thunder_zero.spmd.record import NotChecked, StepRecord, StepRecorder
from thunder_zero.spmd.report import Verdict, verdict_of

TrainStep = Callable[[DeviceMesh], Any]
OtherRun = tuple[str, str]  # an axis, and "neighbour", its next rank, or "whole", the step with one rank on it
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
    with Processes(step, seconds) as processes:
        checking = processes.start(_check, shape, data)
        others, faults = {}, []
        for (axis, what), result in run_others(processes, shape, data).items():
            if isinstance(result, StepRecord):
                others[axis, what] = result
            elif what == "neighbour":
                reason = result if isinstance(result, NotChecked) else f"raised {type(result).__name__}: {result}"
                faults.append(Fault(axis, "unknown", f"the neighbour on this axis: {reason}"))
        with suppress(BrokenPipeError):  # it has ended, and says why
            checking.send((others, faults))
        verdict = processes.receive(checking)
    if isinstance(verdict, NotChecked):
        return Verdict(shape, (Fault("every axis", "unknown", str(verdict)),), (), (), (), 0)
    if isinstance(verdict, Exception):
        raise verdict
    return verdict  # type: ignore[no-any-return]


def other_runs(shape: Mapping[str, int], data: Sequence[str]) -> dict[OtherRun, tuple[Mapping[str, int], int]]:
    """Return the meshes and ranks of other processes: the next rank of each axis, and the step with one rank on it."""
    result: dict[OtherRun, tuple[Mapping[str, int], int]] = {}
    names = list(shape)
    for index, axis in enumerate(names):
        if shape[axis] > 1:
            result[axis, "neighbour"] = shape, prod(shape[name] for name in names[index + 1 :])
            if axis not in data:
                result[axis, "whole"] = {**shape, axis: 1}, 0
    return result


def run_others(
    processes: Processes, shape: Mapping[str, int], data: Sequence[str]
) -> dict[OtherRun, StepRecord | Exception]:
    """Run the step in other processes, and return their records, or why there are none."""
    pipes = {run: processes.start(_run_other_rank, *where) for run, where in other_runs(shape, data).items()}
    return {run: processes.receive(pipe) for run, pipe in pipes.items()}


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
        """Return what a process sends, or an exception that says why it sends nothing."""
        if not pipe.poll(max(self._ends - time.monotonic(), 0)):
            return NotChecked(f"a rank took over {self._seconds:.0f} s")
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return NotChecked("a rank ended without a result")


def _check(step: TrainStep, shape: Mapping[str, int], data: Sequence[str], pipe: Any) -> None:
    """Record a step as rank 0, type it beside what other processes ran, and send the verdict."""
    try:
        record = record_step(step, shape)
        others, faults = pipe.recv()
        faults += [fault for run, other in others.items() for fault in _different_collectives(record, run, other)]
        pipe.send(verdict_of(record, types_of(record, others, data), data, faults))
    except Exception as error:
        _send_error(error, pipe)


def _run_other_rank(step: TrainStep, shape: Mapping[str, int], rank: int, pipe: Any) -> None:
    """Record a step as another rank, and send the record."""
    try:
        pipe.send(record_step(step, shape, rank, keep_values=False).for_other_ranks())
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
