"""Runs an optimizer's step on shards without values, for its state and its temporaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from thunder_zero.forecast.kinds import Holds
from thunder_zero.forecast.watch import Watch

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def optimizer_at_rest(make: MakeOptimizer, shards: Mapping[str, nn.Parameter], watch: Watch) -> torch.optim.Optimizer:
    """An optimizer of these shards, by path, that has made its state in a first step."""
    optimizer = make(shards.values())
    watch.kind = Holds.OPTIMIZER
    take_step(optimizer, {path: torch.empty_like(shard) for path, shard in shards.items()}, shards)
    return optimizer


def take_step(
    optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor], shards: Mapping[str, nn.Parameter]
) -> None:
    """Step with these gradients, by path, and let go of them."""
    for path, gradient in gradients.items():
        shards[path].grad = gradient
    optimizer.step()
    optimizer.zero_grad()
