"""Counts what a step does beside forward and backward: the traffic of the loss and of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from thunder_zero.plan import Plan

ADAMW = 7  # reads the shard, its gradient and two averages, and writes all but the gradient, in one pass (fused=True)


class _Counting(TorchDispatchMode):
    """Counts the bytes that operators read and write; those that return views do neither."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_iter(out) if isinstance(one, Tensor)]
        storages = {one.untyped_storage()._cdata for one in given}
        if any(one.untyped_storage()._cdata not in storages for one in made):
            self.nbytes += sum(one.nbytes for one in (*given, *made))
        return out


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
    with _Counting() as counting:
        loss(given).backward()
    return int(counting.nbytes)


def adamw_traffic(plan: Plan) -> int:
    """Bytes of memory that a fused AdamW reads and writes on a rank."""
    trained = [param for param in plan.params if param.requires_grad]
    return ADAMW * sum(prod(plan.shard_shape(param)) * param.dtype.itemsize for param in trained)
