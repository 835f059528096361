"""``tz.tools.wire_error``: measures the errors of formats in gathered weights and in gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan, sqrt

import torch
from torch import Tensor

from thunder_zero.capture.zero_module import zero_module
from thunder_zero.comm import agree
from thunder_zero.comm.small_collectives import all_gather_object
from thunder_zero.plan.params import Param
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.sharded_model import tagged
from thunder_zero.sharded.state import State

from thunder.core.module import ThunderModule

Sums = tuple[float, float, float]  # the sums of x * x, y * y and x * y


@dataclass(frozen=True, repr=False)
class WireError:
    """The errors that formats cause in a parameter's weights and gradient.

    Attributes:
        path: path of the parameter.
        formats: the formats (gathers, reductions), such as ``"int8/128"``; "" for an exact message.
        gather: norm of the error of the gathered weights, divided by the norm of the weights.
        gradient: norm of the gradient's error, divided by the norm of the exact gradient. NaN if the exact gradient is
            zero or missing.
        cosine: cosine similarity of the exact and the rounded gradient. NaN if a gradient is zero or missing.
    """

    path: str
    formats: tuple[str, str]
    gather: float
    gradient: float
    cosine: float

    def __repr__(self) -> str:
        return "  ".join(self.cells())

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the parameter's row in a table."""
        formats = ", ".join(format_name or "exact" for format_name in self.formats)
        return self.path, formats, f"{self.gather:.2e}", f"{self.gradient:.2e}", f"{self.cosine:.6f}"


class WireErrors(tuple[WireError, ...]):
    """The errors of all parameters. They print as a table."""

    def __repr__(self) -> str:
        heads = "parameter", "gathers, reductions", "gather", "gradient", "cosine"
        rows = [heads, *(error.cells() for error in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@tagged("wire_error")
def wire_error(model: ThunderModule, step: Callable[[], object]) -> WireErrors:
    """Measure the errors that ``Policy.gather_format`` and ``Policy.reduce_format`` cause in a step.

    Every rank must call this function. ``step`` runs once with the formats and once without. Then the gradients are
    restored. Other effects of ``step`` are not undone.

    >>> print(tz.tools.wire_error(model, lambda: loss_of(model, batch).backward()))
    parameter      gathers, reductions  gather    gradient  cosine
    blocks.0.up.weight  int8/128, int8/128   6.51e-03  9.84e-03  0.999952
    ...

    Args:
        model: a model with ZeroTransform.
        step: a function that runs forward and backward of ``model`` on one batch, without an optimizer's step.

    Returns:
        An entry for each parameter that is trained or has a format, in the order of the plan.

    Raises:
        TypeError: ``model`` is not sharded, or ``step`` is not a function.
        ValueError: the policy has no formats, or ``step`` gives no gradients.
        RuntimeError: ``no_sync`` has deferred gradients, which the step would reduce.
    """
    state = zero_module(model).state
    params = [param for param in state.plan.params if param.requires_grad or param.gather_format]
    with agree.all_or_none(state.group, "its arguments"):
        if not callable(step):
            raise TypeError(f"step is {step!r}; give a function that runs one forward and backward of the model")
        if not any(param.gather_format or param.reduce_format for param in params):
            raise ValueError("no row or gradient is written as bytes; give the model gather_format= or reduce_format=")
        state.require_reduced("measure what formats change")
    old_grads = {param: param.shard.grad for param in state.params.values()}
    try:
        with state.wire.uncounted():
            rounded = _gradients(state, step)
            with state.exact():
                exact = _gradients(state, step)
        with agree.all_or_none(state.group, "its step"):
            if not exact and any(param.requires_grad for param in params):
                raise ValueError(f"step gave no parameter of {state.name} a gradient; run its forward and backward")
    finally:
        for sharded_param, grad in old_grads.items():
            sharded_param.shard.grad = grad
    sums = {
        param.path: (
            _sums(state.params[param.path].rows, _arrived(state, param)),
            _sums(_gradient(exact, param), _gradient(rounded, param)),
        )
        for param in params
    }
    ranks_sums = all_gather_object(sums, state.group)
    return WireErrors(_error(param, [rank_sums[param.path] for rank_sums in ranks_sums]) for param in params)


def _gradients(state: State, step: Callable[[], object]) -> dict[str, Tensor]:
    """Run a step, and return a mapping from paths to this rank's rows of the gradients."""
    for param in state.params.values():
        param.shard.grad = None
    with torch.random.fork_rng():  # both runs get equal random numbers, and training is not affected
        step()
    grads = {path: param.shard.grad for path, param in state.params.items()}
    return {path: local(grad) for path, grad in grads.items() if grad is not None}


def _gradient(gradients: dict[str, Tensor], param: Param) -> Tensor:
    return gradients.get(param.path, torch.zeros(0))


def _arrived(state: State, param: Param) -> Tensor:
    """Return this rank's rows with the rounding of a gather."""
    return state.wire.read_by_all(state.params[param.path].rows, param)


def _sums(x: Tensor, y: Tensor) -> Sums:
    x, y = x.detach().double(), y.detach().double()
    return (x * x).sum().item(), (y * y).sum().item(), (x * y).sum().item()


def _error(param: Param, ranks_sums: list[tuple[Sums, Sums]]) -> WireError:
    """Return a parameter's error from the sums of all ranks."""
    weights, gradients = ([sum(parts) for parts in zip(*sums, strict=True)] for sums in zip(*ranks_sums, strict=True))
    formats = str(param.gather_format or ""), str(param.reduce_format or "")
    product = sqrt(gradients[0] * gradients[1])
    return WireError(
        param.path, formats, _relative(weights), _relative(gradients), gradients[2] / product if product else nan
    )


def _relative(sums: list[float]) -> float:
    """Return the norm of y - x divided by the norm of x; NaN if x is zero."""
    xx, yy, xy = sums
    return sqrt(max(xx + yy - 2 * xy, 0.0) / xx) if xx else nan
