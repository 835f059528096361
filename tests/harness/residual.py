"""A block whose parameters and activations weigh about the same, for forecasts of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Adds to its input what two linear layers, four times as wide between them, make of it."""

    def __init__(self, width: int, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.function(self.up(x)))
        return y
