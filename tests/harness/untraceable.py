"""An autograd function that dynamo cannot trace. Importing it does not import thunder_zero."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor


class Tiled(torch.autograd.Function):
    """A product written into a slice of a buffer, and a call that dynamo refuses. Backward reads the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        ctx.save_for_backward(x, weight)
        buffer = x.new_empty(len(x), 2 * len(weight))
        torch.mm(x, weight.t(), out=buffer[:, : len(weight)])
        return buffer[:, : len(weight)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight * 2, grad.t() @ x * 3
