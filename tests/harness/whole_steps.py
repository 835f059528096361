"""Gradients set by hand for steps of ``tz.whole``, and odd optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from thunder_zero.plan.rows import local_rows
from thunder_zero.sharded.sharded_model import sharded_model


def make_gradients(module: nn.Module, step: int) -> dict[str, Tensor]:
    """Return full gradients of many scales.

    In step 1 every third parameter has no gradient. An empty parameter never has a gradient, because torch's Adafactor
    divides by its size.
    """
    generator = torch.Generator().manual_seed(step)
    grads = {
        name: (torch.randn(param.shape, generator=generator) * 10.0 ** (index % 5 - 2)).to(param.dtype)
        for index, (name, param) in enumerate(module.named_parameters())
    }
    return {name: grad for index, (name, grad) in enumerate(grads.items()) if grad.numel() and (step != 1 or index % 3)}


def set_gradients(model: Any, grads: Mapping[str, Tensor]) -> None:
    """Set this rank's rows of full gradients."""
    state = sharded_model(model).state
    for path, param in state.params.items():
        if param.shard.requires_grad:
            rows = local_rows(grads[path], param.planned, state.plan) if path in grads else None
            param.shard.grad = None if rows is None else param.gradient(rows.clone())


class CustomOptimizer(optim.Optimizer):
    """An optimizer that passes each group, and its parameters with gradients, to ``change``."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.change(group, [param for param in group["params"] if param.grad is not None])

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        for param in params:
            param -= group["lr"] * param.grad


class CoupledIfAsked(CustomOptimizer):
    """Divides by the norm of all gradients if the option ``norm`` is true. Counts steps in a tensor in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, norm=0.0, count=torch.zeros(()))

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        group["count"] += 1
        norm = torch.stack([param.grad.norm() for param in params]).norm() if group["norm"] and params else 1.0
        for param in params:
            param -= group["lr"] / group["count"] * param.grad / norm
