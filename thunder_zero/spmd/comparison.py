"""Compares values of ranks with those of the plain module: a row for each, with a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thunder_zero.plan.amounts import summed_up
from thunder_zero.spmd.error_shapes import is_close, name_error, on_ranks, relative_error
from thunder_zero.spmd.steps import RankValues, Step, Steps, first_names, names_of

NAN = float("nan")
TOLERANCE = 1e-5  # some models compute parts in float32
FLOOR = 1e-8  # of the norm of all gradients: what remains where the true gradient is zero, as of a bias of keys


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
    ranks: Sequence[RankValues]

    @cached_property
    def parts(self) -> list[Step]:
        """The plain module's step on each part of the batch. They run only to name an error."""
        return self.steps.run_parts()

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters of the plain module, by all their names."""
        return names_of(self.steps.module)

    @cached_property
    def true_grads(self) -> dict[str, Tensor]:
        """The true gradients. A tied parameter has its first name."""
        names = [name for name, first in first_names(self.params).items() if name == first]
        return {name: grad for name in names if (grad := self.true.grads[name]) is not None}

    @cached_property
    def true_norm(self) -> Tensor:
        """The norm of all true gradients."""
        squares = [grad.square().sum() for grad in self.true_grads.values()]
        return torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum().sqrt()

    def rows(self) -> Iterator[ComparedValue]:
        """Yield a row for the loss, one for each parameter, and one for the norm, if all ranks have one."""
        yield self._loss_row()
        firsts = first_names(self.params)
        for name, first in firsts.items():
            if name == first:
                yield self._param_row(name)
        for name in self.ranks[0].values.keys() - firsts.keys():
            yield ComparedValue(name, NAN, None, "the plain module has no parameter of this name")
        norms = [rank.norm for rank in self.ranks if rank.norm is not None]
        if len(norms) == len(self.ranks):
            yield self._norm_row(norms)

    def _row(self, name: str, values: Sequence[Tensor], true: Tensor, floor: float = 0.0) -> ComparedValue:
        """Compare values that all have the true shape. Differences below ``floor`` are rounding errors."""
        error = max(relative_error(value, true) for value in values)
        allowed = TOLERANCE * true.norm() + floor
        if all((value - true).norm() <= allowed for value in values):
            return ComparedValue(name, error)
        sentence, factor = name_error(values, true, self.steps.axes, is_bias=name.endswith("bias"))
        return ComparedValue(name, error, factor, sentence)

    def _loss_row(self) -> ComparedValue:
        """Compare the mean of the losses over the data axes. If their sum is the true loss, it is right as well."""
        on_mesh = torch.stack([rank.step.loss for rank in self.ranks]).reshape(*self.steps.axes.values())
        for dim, name in enumerate(self.steps.axes):
            if name in self.steps.data_axes:
                on_mesh = on_mesh.mean(dim, keepdim=True).expand_as(on_mesh)
        means = [*on_mesh.flatten()]
        row = self._row("loss", means, self.true.loss)
        sums = self._row("loss", [mean * self.steps.data_ranks for mean in means], self.true.loss)
        if not row.sentence or not sums.sentence:
            return sums if row.sentence else row
        sentence = self._of_parts(means, [part.loss for part in self.parts], self.true.loss)
        sentence = sentence or self._of_biases(means[0]) or row.sentence
        return replace(row, sentence=f"{sentence}; forward differs, so gradients do")

    def _param_row(self, name: str) -> ComparedValue:
        """Compare a parameter's value before the step, then its gradient."""
        plain = self.params[name].detach()
        if missing := [index for index, rank in enumerate(self.ranks) if name not in rank.values]:
            return ComparedValue(name, NAN, None, f"the parallel model has no such parameter on {on_ranks(missing)}")
        if other := self.ranks[0].untied.get(name):
            return ComparedValue(name, NAN, None, f"tied to {other} in the plain module, but no longer")
        values = [rank.values[name] for rank in self.ranks]
        slices = find_slices(values, plain, self.steps.axes)
        values = put_together(values, slices, self.steps.axes)
        if wrong := next((value for value in values if value.shape != plain.shape), None):
            shapes = f"{tuple(wrong.shape)} on ranks and {tuple(plain.shape)} in the plain module"
            return ComparedValue(name, NAN, None, f"the shape is {shapes}, and ranks have no equal slices of it")
        row = self._row(name, values, plain)
        if row.sentence:
            return replace(row, sentence=f"not the gradient, but its value before the step is wrong: {row.sentence}")
        return self._grad_row(name, slices)

    def _grad_row(self, name: str, slices: Slices | None) -> ComparedValue:
        """Compare a gradient. The gradient of a parameter in slices has slices as well."""
        grads = [rank.step.grads.get(name) for rank in self.ranks]
        true = self.true_grads.get(name)
        without = [rank for rank, grad in enumerate(grads) if grad is None]
        has_true = true is not None and bool(true.any())
        if len(without) == len(grads) and not has_true:
            return ComparedValue(name, 0.0)
        if without:
            has = "has one" if has_true else "has none, or zeros"
            return ComparedValue(name, NAN, None, f"no gradient on {on_ranks(without)}; the plain module {has}")
        values = put_together([grad for grad in grads if grad is not None], slices, self.steps.axes)
        floor = FLOOR * float(self.true_norm)
        if true is None:
            row = self._row(name, values, torch.zeros_like(values[0]), floor)
            return replace(row, sentence=row.sentence and "a gradient; the plain module has none")
        row = self._row(name, values, true, floor)
        if not row.sentence:
            return row
        parts = [torch.zeros_like(true) if (grad := part.grads[name]) is None else grad for part in self.parts]
        return replace(row, sentence=self._of_parts(values, parts, true) or row.sentence)

    def _of_parts(self, values: Sequence[Tensor], parts: Sequence[Tensor], true: Tensor) -> str:
        """Name values that come from the plain module's values on the ranks' parts of the batch."""
        data, mean = " x ".join(self.steps.data_axes), torch.stack([*parts]).mean(0)
        if _is_equal(mean, true):  # then the error's own shape says as much
            return ""
        if all(_is_equal(value, mean) for value in values):
            return f"the mean of means over the parts of {data}: each rank divides by its own count, and counts differ"
        if all(_is_equal(value, parts[self.steps.part_of(rank)]) for rank, value in enumerate(values)):
            return f"each rank's value is that of its own part of the batch; it is not averaged over {data}"
        return ""

    def _of_biases(self, loss: Tensor) -> str:
        """Name the biases that count several times in a wrong loss."""
        for pattern in dict.fromkeys(_pattern(name) for name in self.params if name.endswith("bias")):
            for axis, size in self.steps.axes.items():
                module = deepcopy(self.steps.module)
                biases = {name: param for name, param in names_of(module).items() if _pattern(name) == pattern}
                with torch.no_grad():
                    for bias in biases.values():
                        bias.mul_(size)
                    if size > 1 and _is_equal(self.steps.loss(module, self.steps.batch), loss):
                        names = [*biases]
                        return f"{names[0]!r} counts {size} times: a bias added on each rank of {axis}"
        return ""

    def _norm_row(self, norms: Sequence[Tensor]) -> ComparedValue:
        """Compare the norm of all gradients."""
        row = self._row("total norm", norms, self.true_norm)
        if not row.sentence:
            return row
        whole_along = self.ranks[0].whole_along
        for axis, size in self.steps.axes.items():
            square = torch.zeros((), dtype=torch.float64)
            for name, grad in self.true_grads.items():
                square += grad.square().sum() * (size if axis in whole_along.get(name, ()) else 1)
            if size > 1 and all(_is_equal(norm, square.sqrt()) for norm in norms):
                return replace(row, sentence=f"counts parameters that are whole on each rank of {axis} {size} times")
        return row


def _is_equal(value: Tensor, true: Tensor) -> bool:
    return relative_error(value, true) < TOLERANCE


def _pattern(name: str) -> str:
    """Return a name without the numbers of layers."""
    return re.sub(r"\d+", "*", name)


# plain tensors of which ranks have slices


class Slices(NamedTuple):
    """Ranks along the axis have slices of a tensor along one of its dimensions."""

    axis: str
    dim: int


def find_slices(values: Sequence[Tensor], whole: Tensor, axes: Mapping[str, int]) -> Slices | None:
    """Return how the ranks' values are slices of a tensor, or None if they are not."""
    shape = values[0].shape
    if shape == whole.shape or len(shape) != whole.ndim or any(value.shape != shape for value in values):
        return None
    differing = [dim for dim in range(whole.ndim) if shape[dim] != whole.shape[dim]]
    for axis, size in axes.items():
        if len(differing) == 1 and shape[differing[0]] * size == whole.shape[differing[0]]:
            slices = Slices(axis, differing[0])
            if all(is_close(value, whole) for value in put_together(values, slices, axes)):
                return slices
    return None


def put_together(values: Sequence[Tensor], slices: Slices | None, axes: Mapping[str, int]) -> list[Tensor]:
    """Return, for each rank, the concatenated slices of the ranks along the axis."""
    if slices is None:
        return [*values]
    ranks = torch.arange(len(values)).reshape(*axes.values())
    groups = ranks.movedim([*axes].index(slices.axis), -1).reshape(-1, axes[slices.axis])
    result = [*values]
    for group in groups.tolist():
        whole = torch.cat([values[rank] for rank in group], slices.dim)
        for rank in group:
            result[rank] = whole
    return result
