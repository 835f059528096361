"""Compares values of ranks with those of the plain module: a row for each, with a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.plan.amounts import summed_up
from thunder_zero.spmd.error_shapes import TOLERANCE, find_slices, is_close, join, name_error, on_ranks, relative_error
from thunder_zero.spmd.steps import RankStep, Step, Steps, names_of

NAN = float("nan")
FLOOR = 1e-8  # of the norm of all gradients: what remains where the true gradient is zero, as of a bias of keys
Causes = Iterable[tuple[str, Sequence[Tensor]]]  # sentences, each with the wrong values that it would explain


@dataclass(frozen=True, repr=False)
class ComparedValue:
    """A value of the parallel model, compared with that of the plain module.

    Attributes:
        name: the parameter's name in the plain module, "loss" or "total norm".
        error: the norm of the difference divided by the norm of the true value: the largest of all ranks. It is NaN
            if a value is missing.
        factor: the value divided by the true value, if all ranks have one multiple of it.
        sentence: what is wrong, or an empty string.
    """

    name: str
    error: float
    factor: float | None = None
    sentence: str = ""

    def __repr__(self) -> str:
        return summed_up(self, f"{self.name}: {self.sentence or 'right'}, error {self.error:.1e}")


@dataclass(frozen=True)
class Comparison:
    """Steps that have run. ``true`` is the plain module's step on the whole batch."""

    steps: Steps
    true: Step
    ranks: Sequence[RankStep]

    @cached_property
    def parts(self) -> list[Step]:
        """The plain module's step on each part of the batch. They run only to name an error."""
        return self.steps.run_parts()

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters of the plain module. A tied parameter has its first name."""
        return dict(self.steps.module.named_parameters())

    @cached_property
    def squares(self) -> dict[str, Tensor]:
        """The square of the norm of each true gradient."""
        return {name: self.true.grads[name].square().sum() for name in self.params}

    @cached_property
    def true_norm(self) -> Tensor:
        """The norm of all true gradients."""
        return torch.stack([*self.squares.values()]).sum().sqrt()

    def rows(self) -> Iterator[ComparedValue]:
        """Yield a row for the loss, one for each parameter, and one for the norm, if all ranks have one."""
        yield self._loss_row()
        for name in self.params:
            problem = self._problem(name)
            yield ComparedValue(name, NAN, None, problem) if problem else self._param_row(name)
        for name in self.ranks[0].values.keys() - self.true.grads.keys():
            yield ComparedValue(name, NAN, None, "the plain module has no parameter of this name")
        norms = [rank.norm for rank in self.ranks if rank.norm is not None]
        if len(norms) == len(self.ranks):
            yield self._row("total norm", norms, self.true_norm, self._try_whole_parameters())

    def _row(
        self, name: str, values: Sequence[Tensor], true: Tensor, causes: Causes = (), floor: float = 0.0
    ) -> ComparedValue:
        """Compare values that all have the true shape. Differences below ``floor`` are rounding errors."""
        error = max(relative_error(value, true) for value in values)
        allowed = TOLERANCE * true.norm() + floor
        if all((value - true).norm() <= allowed for value in values):
            return ComparedValue(name, error)
        for sentence, wrong in causes:
            if all(map(is_close, values, wrong)):
                return ComparedValue(name, error, None, sentence)
        sentence, factor = name_error(values, true, self.steps.axes)
        return ComparedValue(name, error, factor, sentence)

    def _loss_row(self) -> ComparedValue:
        """Compare the mean of the losses over the data axes. If their sum is the true loss, it is right as well."""
        on_mesh = torch.stack([rank.loss for rank in self.ranks]).reshape(*self.steps.axes.values())
        for dim, name in enumerate(self.steps.axes):
            if name in self.steps.data_axes:
                on_mesh = on_mesh.mean(dim, keepdim=True).expand_as(on_mesh)
        means, count, true = on_mesh.flatten(), self.steps.data_ranks, self.true.loss
        if all(is_close(mean * count, true) for mean in means):
            means = means * count
        row = self._row("loss", [*means], true, chain(self._try_parts(lambda step: step.loss), self._try_biases()))
        return replace(row, sentence=row.sentence and f"{row.sentence}; forward differs, so gradients do")

    def _problem(self, name: str) -> str:
        """Return why a parameter or its gradient cannot be compared, or an empty string."""
        if missing := [index for index, rank in enumerate(self.ranks) if name not in rank.values]:
            return f"the parallel model has no such parameter on {on_ranks(missing)}"
        param, parallel = self.params[name], self.ranks[0].params
        for other, tied in names_of(self.steps.module).items():
            if tied is param and parallel.get(other, parallel[name]) is not parallel[name]:
                return f"tied to {other} in the plain module, but no longer"
        without = [index for index, rank in enumerate(self.ranks) if name not in rank.grads]
        has_true = bool(self.squares[name])
        if without and (has_true or len(without) < len(self.ranks)):
            has = "one" if has_true else "none, or zeros"
            return f"no gradient on {on_ranks(without)}; the plain module has {has}"
        return ""

    def _param_row(self, name: str) -> ComparedValue:
        """Compare a parameter's value before the step, then its gradient: if one is in slices, both are."""
        plain, axes = self.params[name].detach(), self.steps.axes
        values = [rank.values[name] for rank in self.ranks]
        slices = find_slices(values, plain, axes)
        values = join(values, slices, axes)
        if wrong := [tuple(value.shape) for value in values if value.shape != plain.shape]:
            shapes = f"{wrong[0]} on ranks and {tuple(plain.shape)} in the plain module"
            return ComparedValue(name, NAN, None, f"the shape is {shapes}, and ranks have no equal slices of it")
        row = self._row(name, values, plain)
        if row.sentence:
            return replace(row, sentence=f"not the gradient, but its value before the step is wrong: {row.sentence}")
        if name not in self.ranks[0].grads:
            return ComparedValue(name, 0.0)
        grads = join([rank.grads[name] for rank in self.ranks], slices, axes)
        causes, floor = self._try_parts(lambda step: step.grads[name]), FLOOR * float(self.true_norm)
        return self._row(name, grads, self.true.grads[name], causes, floor)

    # causes of wrong values

    def _try_parts(self, value_of: Callable[[Step], Tensor]) -> Causes:
        """Yield the values that the plain module gives on the parts of the batch, if their mean is not the true one."""
        parts, true = [value_of(step) for step in self.parts], value_of(self.true)
        data, mean = " x ".join(self.steps.data_axes), torch.stack(parts).mean(0)
        if not is_close(mean, true):  # else the error's own shape says as much
            means = f"the mean of means over the parts of {data}: each rank divides by its own count, and counts differ"
            yield means, [mean] * len(self.ranks)
            own = f"each rank's value is that of its own part of the batch; it is not averaged over {data}"
            yield own, [parts[self.steps.part_of(rank)] for rank in range(len(self.ranks))]

    def _try_biases(self) -> Causes:
        """Yield the losses of the plain module if biases, alike in all layers, count several times."""
        biases = [name for name in self.params if name.endswith("bias")]
        for _, alike in groupby(sorted(biases, key=_without_numbers), _without_numbers):
            names = [*alike]
            for axis, size in self.steps.axes.items():
                module = deepcopy(self.steps.module)
                with torch.no_grad():
                    for name in names:
                        module.get_parameter(name).mul_(size)
                    loss = self.steps.loss(module, self.steps.batch)
                counts = f"{names[0]!r} counts {size} times: a bias added on each rank of {axis}"
                yield counts, [loss] * len(self.ranks)

    def _try_whole_parameters(self) -> Causes:
        """Yield the norms of all gradients if parameters that are whole on each rank of an axis count on each."""
        for axis, size in self.steps.axes.items():
            whole = [square for name, square in self.squares.items() if self._is_whole_along(axis, name)]
            norm = (self.true_norm.square() + (size - 1) * sum(whole)).sqrt()
            yield f"counts parameters that are whole on each rank of {axis} {size} times", [norm] * len(self.ranks)

    def _is_whole_along(self, axis: str, name: str) -> bool:
        """Return whether each rank along an axis has the whole parameter."""
        param = self.ranks[0].params.get(name)
        if isinstance(param, DTensor):
            placements = zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=False)
            return not any(placement.is_shard() for dim, placement in placements if dim == axis)
        return param is not None and param.shape == self.params[name].shape


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)
