"""Traces that several tests read. They are frozen data, so a process makes each of them once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import thunder_zero as tz

from thunder.executors.torch_compile import torch_compile_ex


def fuser(frontend: str = "dynamo") -> dict[str, Any]:
    """The argument by which inductor compiles regions of a front end's traces."""
    return {"fuse": "inductor"} if frontend == "dynamo" else {"executors": [torch_compile_ex]}


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
    frontend: str = "dynamo",
) -> tz.tools.Traces:
    """Of a model on the meta device, for one input."""
    with torch.device("meta"):
        module, x = make(), torch.empty(shape, dtype=dtype)
    return tz.trace(
        module,
        x,
        policy=policy,
        world_size=world_size,
        replicas=replicas,
        synced=synced,
        frontend=frontend,
        **(fuser(frontend) if fused else {}),
    )


# Models call ``forward`` of their modules: Thunder interprets the hook handling of ``nn.Module.__call__`` as well.


class ResidualBlock(nn.Module):
    """Adds to its input what two linear layers, four times as wide between them, make of it. Its parameters and
    activations weigh about the same."""

    def __init__(self, width: int, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down.forward(self.function(self.up.forward(x)))


class Chain(nn.ModuleList):
    """Modules one after the other; each is a unit if they are alike."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module.forward(x)
        return x
