"""``tz.tools.check_step``: checks a user's step on any mesh, with processes for a few ranks.

In: ``step(mesh)``, which builds a model and trains it for one step. Out: a ``Verdict``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

from thunder_zero.spmd.axes import UNSURE, axes_of_batches, mesh_of
from thunder_zero.spmd.processes import Call, NotChecked, run_in_processes
from thunder_zero.spmd.verdict import Fault, Verdict

if TYPE_CHECKING:  # this process computes nothing
    from torch.distributed.device_mesh import DeviceMesh

TrainStep = Callable[["DeviceMesh"], Any]
OtherRun = tuple[str, str]  # an axis, and "neighbour", its next rank, or "whole", the step with one rank on it
PRIMES = (7, 11, 13, 17)  # numbers of ranks that divide little else: a factor of 2 may be that of micro-batches
RANKS = "thunder_zero.spmd.ranks"
PRELOADED = (RANKS, "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")


def check_step(
    step: TrainStep,
    mesh: Mapping[str, int] | str,
    *,
    data: Sequence[str] | None = None,
    seconds: float = 600.0,
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
            small batch of this rank, trains for one step, and returns the model, or a tuple that begins with it. It may
            return something else if it calls one model only. ``dist.init_process_group`` does nothing in it. A rank's
            batch has at least two items.
        mesh: the axes and their numbers of ranks, such as ``{"dp": 7, "tp": 2}`` or ``"dp=7,tp=2"``. Sizes that divide
            nothing else of the model, such as 7, keep factors apart.
        data: the axes whose ranks have batches of their own (default: all but those with a name of another
            parallelism, such as ``tp``, ``sp``, ``cp``, ``ep``).
        seconds: how long the other processes may take.

    Returns:
        The faults, collectives and gradients of the step. It has a printed form.

    Raises:
        ValueError: the mesh cannot be read, ``data`` names no axis of the mesh, or it is unclear which module is the
            model.
        TypeError: other processes cannot import the step.
        Exception: what the step raises, with its traceback as a note.
    """
    shape = mesh_of(mesh)
    if any(size < 1 for size in shape.values()) or prod(shape.values()) < 2:
        raise ValueError(f"the mesh {shape} has no two ranks; give axes and ranks, such as dp=7,tp=2")
    data = axes_of_batches(shape, data)
    if unknown := [axis for axis in data if axis not in shape]:
        raise ValueError(f"the mesh has no axis {', '.join(unknown)}; it has {', '.join(shape)}")
    verdict = run_ranks((f"{RANKS}:check", (step, shape, data)), step, shape, data, seconds)
    if isinstance(verdict, NotChecked):
        return Verdict(shape, (Fault("every axis", "unknown", str(verdict)),))
    other = {**shape, **dict(zip(data, PRIMES, strict=False))}
    if verdict.has_wrong_factors and not any(shape[axis] in PRIMES for axis in data):
        with suppress(Exception):  # the step may need its own number of ranks
            again = run_ranks((f"{RANKS}:check", (step, other, data)), step, other, data, seconds)
            verdict = verdict if again.has_wrong_factors else verdict.with_factors_of(again)
    return verdict  # type: ignore[no-any-return]


def run_ranks(first: Call, step: TrainStep, shape: Mapping[str, int], data: Sequence[str], seconds: float) -> Any:
    """Run a call beside those of other ranks: the next rank of each axis, and the step with one rank on an axis.

    Raises:
        Exception: what the call raises, but for ``NotChecked``.
    """
    others: dict[OtherRun, Call] = {}
    names = list(shape)
    for index, axis in enumerate(names):
        if shape[axis] > 1:
            rank = prod(shape[name] for name in names[index + 1 :])
            others[axis, "neighbour"] = f"{RANKS}:record_other_rank", (step, shape, rank)
            if axis not in data or axis.startswith(UNSURE):  # parameters may be slices on them
                others[axis, "whole"] = f"{RANKS}:record_other_rank", (step, {**shape, axis: 1}, 0)
    loaded = [name for name in ("transformers.modeling_utils",) if name in sys.modules]  # each rank would import it
    result = run_in_processes(first, others, seconds, (*PRELOADED, *loaded))
    if isinstance(result, Exception) and not isinstance(result, NotChecked):
        raise result
    return result
