"""``tz.tools.compare_gradients``: compares a parallel model with the plain module, in float64.

::

    plain module, whole batch ----------------> loss, gradients, norm ---+
    parallel model, rank 0, its part of batch -> loss, gradients, norm --+--> a row for each value that differs
    parallel model, rank 1, its part of batch -> loss, gradients, norm --+
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from textwrap import wrap
from typing import Any

import torch
from torch import nn

from thunder_zero.compat.torch.threaded_group import run_ranks
from thunder_zero.plan.amounts import WIDTH, summed_up
from thunder_zero.spmd.axes import axes_of_batches, unknown_axes
from thunder_zero.spmd.comparison import ComparedValue, Comparison
from thunder_zero.spmd.steps import Clip, Loss, Parallelize, Steps, mean_loss, plain_module

MOST = 6  # rows of one sentence in the printed form


@dataclass(frozen=True, repr=False)
class GradientComparison:
    """The loss, the gradients and their norm on all ranks, compared with those of the plain module. Prints as a table.

    Attributes:
        mesh_shape: the sizes of the axes.
        rows: a row for the loss, one for each parameter in the order of the plain module, and one for the norm.
        notes: what was changed for the comparison, or could not be compared.
    """

    mesh_shape: dict[str, int]
    rows: tuple[ComparedValue, ...]
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[ComparedValue, ...]:
        """The rows of wrong values."""
        return tuple(row for row in self.rows if row.sentence)

    @property
    def right(self) -> bool:
        """True if all compared values are right."""
        return not self.wrong

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as data: ``pandas.DataFrame(comparison.as_dicts())``."""
        return [asdict(row) for row in self.rows]

    def __repr__(self) -> str:
        return summed_up(self, self._title())

    def __str__(self) -> str:
        """Return a table: each error with the first 6 values that have it, and their relative errors."""
        return "\n".join(self._lines())

    def _title(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        verdict = f"{len(self.wrong)} of {len(self.rows)} values wrong" if self.wrong else "all values right"
        return f"{mesh} against one process: {verdict}"

    def _lines(self) -> Iterator[str]:
        yield self._title()
        for sentence in dict.fromkeys(row.sentence for row in self.wrong):
            yield from wrap(sentence, WIDTH)
            rows = [row for row in self.wrong if row.sentence == sentence]
            yield from (f"  {row.error:<9.1e}{row.name}" for row in rows[:MOST])
            if len(rows) > MOST:
                yield f"  and {len(rows) - MOST} more: .wrong has them"
        for note in self.notes:
            yield from wrap(f"note: {note}", WIDTH, subsequent_indent="  ")


def compare_gradients(
    build: Callable[[], nn.Module],
    parallelize: Parallelize,
    batch: Any,
    mesh_shape: Mapping[str, int],
    *,
    loss: Loss = mean_loss,
    clip: Clip | None = None,
    max_norm: float = 1.0,
    data_axes: Sequence[str] | None = None,
    timeout: float = 300.0,
) -> GradientComparison:
    """Compare the loss, each gradient and the norm of a parallel model with those of the plain module.

    The ranks are threads of this process, on CPUs and in float64. The comparison needs no launcher, and leaves process
    groups and torch's random generator as they are. Noise is added to the parameters of the copies, so that zeros and
    ones hide no error. Dropout is turned off.

    >>> print(tz.tools.compare_gradients(build, lambda model, mesh: fully_shard(model, mesh=mesh), (x,), {"dp": 2}))
    dp=2 against one process: all values right

    Args:
        build: a function that returns the plain module.
        parallelize: a function of a copy of the module and the mesh. It returns the parallel model, or None if it
            changed the module in place.
        batch: the whole batch: a tensor, or a tuple or dict of arguments of forward. Each rank gets its part of the
            first dimension of each tensor.
        mesh_shape: the sizes of the mesh's axes by name, such as ``{"dp": 2, "tp": 2}``.
        loss: a function of model and batch that returns a rank's loss. By default it is ``.loss`` of the output, or
            the mean square of an output tensor.
        clip: a function of model and ``max_norm`` that clips gradients and returns their norm before. By default it is
            ``torch.nn.utils.clip_grad_norm_``.
        max_norm: the norm to which gradients are clipped.
        data_axes: the axes along which ranks have different parts of the batch. By default these are the axes with
            names that begin with dp, ddp, fsdp, hsdp, data, replicate or shard. Axes of other parallelisms, such as
            tp, sp and cp, do not cut the batch.
        timeout: seconds after which ranks that still run are an error.

    Raises:
        ValueError: an axis has an unknown name, the batch cannot be cut, or the loss is no finite number or differs
            between two calls.
        RuntimeError: a rank raised, or ranks wait for each other. The error names the ranks.
    """
    axes = _checked(mesh_shape, data_axes)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        module, batch, notes = plain_module(build, batch)
        steps = Steps(module, batch, axes, axes_of_batches(axes, data_axes), loss, parallelize, clip, max_norm)
        true = steps.run_plain()
        ranks = run_ranks(prod(axes.values()), steps.run_rank, timeout)
        rows = tuple(Comparison(steps, true, ranks).rows())
    return GradientComparison(axes, rows, (*notes, *dict.fromkeys(rank.note for rank in ranks if rank.note)))


def _checked(axes: Mapping[str, int], data_axes: Sequence[str] | None) -> dict[str, int]:
    """Return the sizes of the axes. Raise if they are wrong, or do not say along which axes the batch is cut."""
    if not isinstance(axes, Mapping) or not axes:
        raise TypeError(f'mesh_shape is {axes!r}; give the sizes of axes by name, such as {{"dp": 2, "tp": 2}}')
    for name, size in axes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"axis {name!r} has the size {size!r}; give a positive number of ranks")
    if data_axes is None and (unknown := unknown_axes(axes)):
        raise ValueError(f"does axis {unknown[0]!r} cut the batch? Give the axes that do as data_axes=")
    if lacking := [name for name in data_axes or () if name not in axes]:
        raise ValueError(f"data_axes has {lacking[0]!r}, which mesh_shape lacks; its axes are {', '.join(axes)}")
    return dict(axes)
