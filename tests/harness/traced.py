"""Traces that several tests read. Traces are frozen, so a process makes each at most once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

import thunder_zero as tz


@cache
def traced(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    policy: tz.Policy | int = tz.ZERO3,
    *,
    world_size: int = 2,
    replicas: int = 1,
    synced: bool = True,
    fused: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tz.tools.Traces:
    """Trace a model on the meta device for an input of this shape."""
    with torch.device("meta"):
        module, x = make(), torch.empty(shape, dtype=dtype)
    return tz.trace(
        module,
        x,
        policy=policy,
        world_size=world_size,
        replicas=replicas,
        synced=synced,
        fuse="inductor" if fused else None,
    )


class ResidualBlock(nn.Module):
    """A residual MLP, four times as wide inside. Its parameters and activations have about as many bytes."""

    def __init__(self, width: int, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down.forward(self.function(self.up.forward(x)))


class Chain(nn.ModuleList):
    """A sequence of modules. Each is a unit if all are of one kind."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module.forward(x)
        return x


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()
