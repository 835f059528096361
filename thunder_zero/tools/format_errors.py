"""``tz.tools.wire_error``: measures the errors of formats in gathered weights and in gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor

from thunder_zero.capture.zero_module import zero_module
from thunder_zero.comm import agree
from thunder_zero.comm.small_collectives import all_gather_object
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.sharded_model import tagged
from thunder_zero.sharded.state import State
from thunder_zero.tools.printing.words import PrintedRows

from thunder.core.module import ThunderModule

EXPONENT = "{:.2e}".format


class WireErrors(PrintedRows):
    """The errors that formats cause: for each parameter that is trained or has a format a row. They print as a table.

    ``"gather"`` is the norm of the error of the gathered weights, divided by the norm of the weights. ``"gradient"`` is
    the same for gradients, and ``"cosine"`` compares the exact and the rounded gradient. Both are NaN without one.
    """

    forms: ClassVar = {
        "parameter": str,
        "gathers, reductions": str,
        "gather": EXPONENT,
        "gradient": EXPONENT,
        "cosine": "{:.6f}".format,
    }


@tagged("wire_error")
def wire_error(model: ThunderModule, step: Callable[[], object]) -> WireErrors:
    """Measure the errors that ``Policy.gather_format`` and ``Policy.reduce_format`` cause in a step.

    Every rank must call this function. ``step`` runs once with the formats and once without. Then the gradients are
    restored. Other effects of ``step`` are not undone.

    >>> print(tz.tools.wire_error(model, lambda: loss_of(model, batch).backward()))
    parameter           gathers, reductions  gather    gradient  cosine
    blocks.0.up.weight  int8/128, int8/128   6.51e-03  9.84e-03  0.999952

    ``step`` runs forward and backward of ``model`` on one batch, without an optimizer's step.
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
    shards = {param: state.params[param.path].rows for param in params}
    weights = ((rows, state.wire.read_by_all(rows, param)) for param, rows in shards.items())
    none = torch.zeros(0)
    gradients = ((exact.get(param.path, none), rounded.get(param.path, none)) for param in params)
    formats = [f"{param.gather_format or 'exact'}, {param.reduce_format or 'exact'}" for param in params]
    gathers, _ = _errors(weights, state)
    rows = zip([param.path for param in params], formats, gathers, *_errors(gradients, state), strict=True)
    return WireErrors(dict(zip(WireErrors.forms, row, strict=True)) for row in rows)


def _gradients(state: State, step: Callable[[], object]) -> dict[str, Tensor]:
    """Run a step, and return a mapping from paths to this rank's rows of the gradients."""
    for param in state.params.values():
        param.shard.grad = None
    with torch.random.fork_rng():  # both runs get equal random numbers, and training is not affected
        step()
    grads = {path: param.shard.grad for path, param in state.params.items()}
    return {path: local(grad) for path, grad in grads.items() if grad is not None}


def _errors(pairs: Iterable[tuple[Tensor, Tensor]], state: State) -> tuple[list[float], list[float]]:
    """Return, for each pair (x, y) of rows, the norm of y - x divided by that of x, and their cosine similarity."""
    doubles = ((x.detach().double(), y.detach().double()) for x, y in pairs)
    sums = torch.stack([torch.stack([(x * x).sum(), (y * y).sum(), (x * y).sum()]).cpu() for x, y in doubles])
    xx, yy, xy = torch.stack(all_gather_object(sums, state.group)).sum(0).unbind(1)
    return ((xx + yy - 2 * xy).clamp(min=0) / xx).sqrt().tolist(), (xy / (xx * yy).sqrt()).tolist()
