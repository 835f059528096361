"""Runs an optimizer's step on shards without values, for its state and its temporaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from thunder_zero.tools.forecast.kinds import Holds
from thunder_zero.tools.forecast.watch import NoForecast, Watch

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def optimizer_at_rest(
    make: MakeOptimizer, shards: Mapping[str, nn.Parameter], watch: Watch, *, foreach: bool
) -> torch.optim.Optimizer:
    """An optimizer of these shards, by path, that has made its state in a first step.

    Args:
        make: makes it.
        shards: without values.
        watch: sees what it allocates.
        foreach: torch chooses foreach for the real shards, as for plain tensors on CUDA; not for DTensors.

    Raises:
        TypeError: not a class of optimizers, nor a function that makes one of parameters.
        NoForecast: it does not run without values, or needs a closure.
    """
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        raise TypeError(
            f"optimizer is of type {type(make).__name__}; give a class, such as torch.optim.AdamW, or a function from "
            f"parameters to an optimizer: lambda params: torch.optim.SGD(params, 0.1)"
        )
    watch.kind = Holds.OPTIMIZER
    try:
        optimizer = _made(make, shards.values())
        for group in optimizer.param_groups:
            if foreach and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # of meta tensors torch does not know better
        take_step(optimizer, {path: torch.empty_like(shard) for path, shard in shards.items()}, shards)
        _name_state(optimizer, shards, watch)
    except NoForecast:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise NoForecast(
            f"cannot forecast the optimizer: it does not run on tensors without values "
            f"({str(error).partition(chr(10))[0]}); leave out fused=True, or give its bytes as reserve="
        ) from error
    return optimizer


def _made(make: MakeOptimizer, shards: Iterable[Tensor]) -> torch.optim.Optimizer:
    try:
        optimizer = make(shards)
    except TypeError as error:
        raise TypeError(
            f"optimizer= was called with the parameters and raised {error}; give a class, such as torch.optim.AdamW, "
            f"or a function from parameters to an optimizer: lambda params: torch.optim.SGD(params, 0.1)"
        ) from error
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise NoForecast(
            f"cannot forecast the optimizer: the step of {type(optimizer).__name__} needs a closure, which runs "
            f"forward and backward again; leave out optimizer=, and give its bytes as reserve="
        )
    return optimizer


def _name_state(optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter], watch: Watch) -> None:
    """``blocks.0.up.weight: exp_avg``; what is nobody's own belongs to all."""
    for path, shard in shards.items():
        for name, value in optimizer.state.get(shard, {}).items():
            for tensor in tree_iter(value):
                if isinstance(tensor, Tensor) and (allocation := watch.see(tensor)).kind is Holds.OPTIMIZER:
                    allocation.name = allocation.name or f"{path}: {name}"
    watch.name_new("all parameters")


def take_step(
    optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor], shards: Mapping[str, nn.Parameter]
) -> None:
    """Step with these gradients, by path, and let go of them."""
    for path, gradient in gradients.items():
        shards[path].grad = gradient
    optimizer.step()
    optimizer.zero_grad()
