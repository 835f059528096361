"""Runs the plain module and the ranks of a parallel model, and compares their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from thunder_zero.spmd.error_shapes import is_close, name_error, on_ranks, relative_error
from thunder_zero.spmd.plain_module import cut, full, names_of
from thunder_zero.spmd.slices import Slices, find_slices, put_together

NAN = float("nan")
TOLERANCE = 1e-5  # some models compute parts in float32
FLOOR = 1e-8  # of the norm of all gradients: what remains where the true gradient is zero, as of a bias of keys
Loss = Callable[[Any, Any], Tensor]  # of model and batch
Clip = Callable[[Any, float], Any]  # of model and max_norm; returns the norm
Parallelize = Callable[[Any, DeviceMesh], Any]  # of model and mesh; returns the parallel model, or None


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Step:
    """What one forward and backward gave: full tensors."""

    loss: Tensor
    grads: dict[str, Tensor | None]


@dataclass(frozen=True)
class RankValues:
    """What one rank has of a parallel model. ``values`` are the parameters before the step."""

    step: Step
    values: dict[str, Tensor]
    norm: Tensor | None
    note: str  # why there is no norm
    untied: dict[str, str]  # pairs of names that are one parameter in the plain module, and two here
    replicated: dict[str, set[str]]  # the axes along which each rank has the whole parameter


@dataclass
class Comparison:
    """One plain module, one batch and one parallel model. Ranks call :meth:`run_rank`."""

    module: nn.Module
    batch: Any
    axes: Mapping[str, int]
    data_axes: Sequence[str]
    loss: Loss
    parallelize: Parallelize
    clip: Clip | None
    max_norm: float
    lock: Any = field(default_factory=Lock)
    has_grad: list[set[str]] = field(default_factory=list)  # on each rank, in any order
    true: Step = field(init=False)  # of the plain module on the whole batch

    def __post_init__(self) -> None:
        cut(self.batch, 0, self.data_ranks)  # raises before ranks start
        self.true = self._plain_step(self.batch)
        with torch.no_grad():
            again = full(self.loss(deepcopy(self.module), self.batch)).reshape(())
        if not torch.equal(self.true.loss, again):
            first, second = float(self.true.loss), float(again)
            raise ValueError(f"the plain module's loss is random: {first:.6g}, then {second:.6g}; turn that off")

    @cached_property
    def parts(self) -> list[Step]:
        """The loss and the gradients of the plain module on the part of each rank of the data axes."""
        count = self.data_ranks
        return [self._plain_step(cut(self.batch, index, count)) for index in range(count)]

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters of the plain module, by all their names."""
        return names_of(self.module)

    @property
    def data_ranks(self) -> int:
        return prod(self.axes[name] for name in self.data_axes)

    @cached_property
    def true_norm(self) -> Tensor:
        names = [name for name, first in first_names(self.params).items() if name == first]
        return _norm(self.true.grads[name] for name in names)

    def part_of(self, rank: int) -> int:
        """Return the index of the part of the batch that a rank has."""
        shape = [size if name in self.data_axes else 1 for name, size in self.axes.items()]
        parts = torch.arange(self.data_ranks).reshape(shape).expand(*self.axes.values())
        return int(parts.flatten()[rank])

    def _plain_step(self, batch: Any) -> Step:
        module = deepcopy(self.module)
        params = names_of(module)
        loss = self._backward(module, batch)
        return Step(loss, {name: None if param.grad is None else param.grad for name, param in params.items()})

    def _backward(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"the loss is {getattr(loss, 'shape', loss)!r}; return a tensor with one element")
        loss.backward()
        return full(loss).reshape(())

    # on each rank

    def run_rank(self, rank: int) -> RankValues:
        """Run the parallel model's step on this thread's rank."""
        everyone = dist.new_group([*range(prod(self.axes.values()))])  # so that no collective of the user meets ours
        mesh = init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))
        with self.lock:
            plain = deepcopy(self.module)
        model = self.parallelize(plain, mesh)
        model = plain if model is None else model
        dist.barrier(everyone)
        params = names_of(model)
        values = {name: full(param) for name, param in params.items()}
        loss = self._backward(model, cut(self.batch, self.part_of(rank), self.data_ranks))
        step = Step(loss, self._gradients(names_of(model), everyone))
        norm, note = self._clip(model)
        dist.barrier(everyone)
        replicated = {
            name: _replicated_axes(param, self.params[name], mesh)
            for name, param in params.items()
            if name in self.params
        }
        return RankValues(step, values, norm, note, _untied(self.params, params), replicated)

    def _gradients(self, params: Mapping[str, nn.Parameter], everyone: dist.ProcessGroup) -> dict[str, Tensor | None]:
        """Return full gradients. Gradients that some ranks lack are not gathered: the others would wait forever."""
        with self.lock:
            self.has_grad.append({name for name, param in params.items() if param.grad is not None})
        dist.barrier(everyone)
        everywhere = set.intersection(*self.has_grad)
        grads: dict[str, Tensor | None] = {}
        for name, param in params.items():
            if param.grad is not None:
                grads[name] = full(param.grad) if name in everywhere else param.grad
        return grads

    def _clip(self, model: nn.Module) -> tuple[Tensor | None, str]:
        """Clip the gradients. Return their norm before, or why there is none."""
        if self.clip is not None:
            return full(torch.as_tensor(self.clip(model, self.max_norm))), ""
        try:
            return full(nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)), ""
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            return None, f"the norm is not compared: torch's clip_grad_norm_ raises {type(error).__name__}: {reason}"

    # on the results

    def rows(self, ranks: Sequence[RankValues]) -> Iterator[ComparedValue]:
        """Yield a row for the loss, one for each parameter, and one for the norm, if all ranks have one."""
        yield self._loss_row([rank.step.loss for rank in ranks])
        firsts = first_names(self.params)
        for name, first in firsts.items():
            if name == first:
                yield self._param_row(name, ranks)
        for name in ranks[0].values.keys() - firsts.keys():
            yield ComparedValue(name, NAN, None, "the plain module has no parameter of this name")
        norms = [rank.norm for rank in ranks if rank.norm is not None]
        if len(norms) == len(ranks):
            yield self._norm_row(norms, ranks[0])

    def _row(self, name: str, values: Sequence[Tensor], true: Tensor) -> ComparedValue:
        """Compare values that all have the true shape."""
        error = max(relative_error(value, true) for value in values)
        allowed = TOLERANCE * true.norm() + FLOOR * self.true_norm
        if all((value - true).norm() <= allowed for value in values):
            return ComparedValue(name, error)
        sentence, factor = name_error(values, true, self.axes, is_bias=name.endswith("bias"))
        return ComparedValue(name, error, factor, sentence)

    def _loss_row(self, losses: Sequence[Tensor]) -> ComparedValue:
        """Compare the mean of the losses over the data axes."""
        on_mesh = torch.stack([*losses]).reshape(*self.axes.values())
        for dim, name in enumerate(self.axes):
            if name in self.data_axes:
                on_mesh = on_mesh.mean(dim, keepdim=True).expand_as(on_mesh)
        means = [*on_mesh.flatten()]
        row = self._row("loss", means, self.true.loss)
        if not row.sentence:
            return row
        sentence = self._of_parts(means, [part.loss for part in self.parts], self.true.loss)
        sentence = sentence or self._of_biases(means[0]) or row.sentence
        return replace(row, sentence=f"{sentence}; forward differs, so gradients do")

    def _param_row(self, name: str, ranks: Sequence[RankValues]) -> ComparedValue:
        """Compare a parameter's value before the step, then its gradient."""
        plain, true = self.params[name].detach(), self.true.grads[name]
        if missing := [index for index, rank in enumerate(ranks) if name not in rank.values]:
            return ComparedValue(name, NAN, None, f"the parallel model has no such parameter on {on_ranks(missing)}")
        if other := ranks[0].untied.get(name):
            return ComparedValue(name, NAN, None, f"tied to {other} in the plain module, but no longer")
        values = [rank.values[name] for rank in ranks]
        slices = find_slices(values, plain, self.axes)
        values = put_together(values, slices, self.axes)
        if wrong := next((value for value in values if value.shape != plain.shape), None):
            shapes = f"{tuple(wrong.shape)} on ranks and {tuple(plain.shape)} in the plain module"
            return ComparedValue(name, NAN, None, f"the shape is {shapes}, and ranks have no equal slices of it")
        row = self._row(name, values, plain)
        if row.sentence:
            return replace(row, sentence=f"not the gradient, but its value before the step is wrong: {row.sentence}")
        return self._grad_row(name, true, [rank.step.grads.get(name) for rank in ranks], slices)

    def _grad_row(
        self, name: str, true: Tensor | None, grads: Sequence[Tensor | None], slices: Slices | None
    ) -> ComparedValue:
        """Compare a gradient. The gradient of a parameter in slices has slices as well."""
        without = [rank for rank, grad in enumerate(grads) if grad is None]
        has_true = true is not None and bool(true.any())
        if len(without) == len(grads) and not has_true:
            return ComparedValue(name, 0.0)
        if without:
            has = "has one" if has_true else "has none, or zeros"
            return ComparedValue(name, NAN, None, f"no gradient on {on_ranks(without)}; the plain module {has}")
        values = put_together([grad for grad in grads if grad is not None], slices, self.axes)
        if true is None:
            row = self._row(name, values, torch.zeros_like(values[0]))
            return replace(row, sentence=row.sentence and "a gradient; the plain module has none")
        row = self._row(name, values, true)
        if not row.sentence:
            return row
        parts = [torch.zeros_like(true) if (grad := part.grads[name]) is None else grad for part in self.parts]
        return replace(row, sentence=self._of_parts(values, parts, true) or row.sentence)

    def _of_parts(self, values: Sequence[Tensor], parts: Sequence[Tensor], true: Tensor) -> str:
        """Name values that come from the plain module's values on the ranks' parts of the batch."""
        data, mean = " x ".join(self.data_axes), torch.stack([*parts]).mean(0)
        if is_close(mean, true):  # else the error's own shape says as much
            return ""
        if all(is_close(value, mean) for value in values):
            return f"the mean of means over the parts of {data}: each rank divides by its own count, and counts differ"
        if all(is_close(value, parts[self.part_of(rank)]) for rank, value in enumerate(values)):
            return f"each rank's value is that of its own part of the batch; it is not averaged over {data}"
        return ""

    def _of_biases(self, loss: Tensor) -> str:
        """Name the biases that count several times in a wrong loss."""
        for pattern in dict.fromkeys(_pattern(name) for name in self.params if name.endswith("bias")):
            for axis, size in self.axes.items():
                module = deepcopy(self.module)
                names = [name for name in self.params if _pattern(name) == pattern]
                with torch.no_grad():
                    for name in names:
                        names_of(module)[name].mul_(size)
                    if size > 1 and relative_error(self.loss(module, self.batch), loss) < TOLERANCE:
                        return f"{names[0]!r} counts {size} times: a bias added on each rank of {axis}"
        return ""

    def _norm_row(self, norms: Sequence[Tensor], rank: RankValues) -> ComparedValue:
        """Compare the norm. ``rank`` tells which parameters are whole on each rank."""
        row = self._row("total norm", norms, self.true_norm)
        if not row.sentence:
            return row
        firsts = first_names(self.params)
        grads = {name: grad for name, grad in self.true.grads.items() if grad is not None and firsts[name] == name}
        squares = {name: grad.square().sum() for name, grad in grads.items() if name in rank.replicated}
        for axis, size in self.axes.items():
            counts = {name: size if axis in rank.replicated[name] else 1 for name in squares}
            counted = sum((counts[name] * square for name, square in squares.items()), torch.zeros(())).sqrt()
            if size > 1 and all(is_close(norm, counted) for norm in norms):
                return replace(row, sentence=f"counts parameters that are whole on each rank of {axis} {size} times")
        return row


def _pattern(name: str) -> str:
    """Return a name without the numbers of layers."""
    return re.sub(r"\d+", "*", name)


def _norm(grads: Iterable[Tensor | None]) -> Tensor:
    norms = [grad.norm() for grad in grads if grad is not None]
    result: Tensor = torch.stack([torch.zeros((), dtype=torch.float64), *norms]).norm()
    return result


def first_names(params: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return a mapping from names to the first name of the parameter. A tied parameter has several names."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(param), name) for name, param in params.items()}


def _untied(plain: Mapping[str, nn.Parameter], params: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return pairs of names that are one parameter in the plain module, and several in the parallel model."""
    return {
        first: name
        for name, first in first_names(plain).items()
        if name in params and first in params and params[name] is not params[first]
    }


def _replicated_axes(param: Tensor, plain: Tensor, mesh: DeviceMesh) -> set[str]:
    """Return the axes along which each rank has the whole parameter."""
    axes = set(mesh.mesh_dim_names or ())
    if not isinstance(param, DTensor):
        return axes if param.shape == plain.shape else set()
    placements = zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=False)
    return axes - {name for name, placement in placements if placement.is_shard()}
