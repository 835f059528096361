"""needed while: torch shares what a scaler finds by the first gradient alone, sharded or not.

A scaler skips a step, and lowers its scale, if gradients have NaN or Inf. ``torch.amp.GradScaler``, and all that is
built on it, look at the gradients of a device and dtype with one operator, for which DTensor has a handler. Where the
first gradient is replicated, torch's shares nothing: ranks would find 0 and 1, step apart, and scale apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def share_found_inf() -> None:
    """From now on, for the life of the process, ranks share what they find in any gradient; again is no change."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[UNSCALE] = _unscale


def _unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch's operator on local tensors; then the flag is the largest of all ranks of each mesh that a gradient is
    sharded over, which takes one small collective for each of its dimensions.

    Args:
        operator: the operator.
        args: the gradients, of which some may be plain; the flag, one element; the inverse scale, one element.
        kwargs: none.
    """
    grads, found, inverse = args
    local = [_local(of) for of in (found, inverse)]
    operator([_local(grad) for grad in grads], *local, **kwargs)
    parts = [grad for grad in grads if isinstance(grad, DTensor) and any(map(_is_cut, grad.placements))]
    for mesh in {grad.device_mesh: None for grad in parts}:
        for dim in range(mesh.ndim):
            dist.all_reduce(local[0], dist.ReduceOp.MAX, group=mesh.get_group(dim))


def _is_cut(placement: Placement) -> bool:
    return not isinstance(placement, Replicate)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
