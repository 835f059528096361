"""Counts what a step does beside forward and backward: the traffic of the loss and of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from thunder_zero.plan import Plan
from thunder_zero.tools.forecast.around import Operators

TRAFFIC = 7  # shards: AdamW reads parameter, gradient and two averages, and writes all but the gradient, in one pass
STATE = 3  # shards that rest: parameter and two averages


def loss_traffic(
    module: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype | None, loss: Callable[[Any], Tensor]
) -> int:
    """Bytes of memory that the loss and its gradient read and write, operator by operator, as eager torch computes
    them. Nothing is allocated.

    Args:
        module: the model; it may have fewer blocks, of which the shape of its output does not depend.
        inputs: of its forward.
        dtype: of compute; None: as the parameters are.
        loss: from what it returns to the loss.
    """

    def without_values(tensor: Tensor) -> Tensor:
        cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=cast, device="meta")

    named = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        output = functional_call(
            module,
            {name: without_values(tensor) for name, tensor in named.items()},
            tree_map_only(Tensor, without_values, inputs),
        )
    given = tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), output)
    with Operators("loss") as operators:
        loss(given).backward()
    return sum(value.nbytes for value in operators.values.values())


def adamw_traffic(plan: Plan) -> int:
    """Bytes of memory that a fused AdamW reads and writes on a rank."""
    return TRAFFIC * trained_bytes(plan)


def state_bytes(plan: Plan) -> int:
    """Bytes of trained parameters and of AdamW's averages that a rank holds between steps."""
    return STATE * trained_bytes(plan)


def trained_bytes(plan: Plan) -> int:
    """Bytes of a rank's shards of the parameters that are trained."""
    trained = [param for param in plan.params if param.requires_grad]
    return sum(prod(plan.shard_shape(param)) * param.dtype.itemsize for param in trained)
