"""The norm of all gradients of a sharded model, and clipping by it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from thunder_zero.runtime.state import State


def clip(state: State, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``; returns the norm before that.

    Raises:
        RuntimeError: there is no gradient here yet; gradients wait for a reduction; the norm is NaN or Inf, and that is
            not wanted (on every rank).
    """
    if path := state.open_accumulation(state.shards.values()):
        raise RuntimeError(
            f"gradients of parameter {path!r} that no_sync deferred were not reduced yet, so there is no norm to clip; "
            f"run forward and backward of the last micro-batch outside of no_sync first"
        )
    shards = [shard for shard in state.shards.values() if shard.grad is not None]
    if not shards:
        raise RuntimeError("no parameter has a gradient, so there is nothing to clip; call it after backward")
    norm = total_norm(state, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}; lower the learning rate, scale the loss, or pass "
            f"error_if_nonfinite=False to go on"
        )
    clip_grads_with_norm_(shards, max_norm, norm)
    return norm


def total_norm(state: State, norm_type: float) -> Tensor:
    """The norm of all gradients as of one vector, the same bits on every rank; one small collective.

    Rows of sharded parameters count where they are, replicated parameters once. Padding is zero and adds nothing.
    """
    grads: dict[bool, list[Tensor]] = {True: [], False: []}  # sharded, replicated
    for param in state.plan.params:
        grad = state.shards[param.path].grad
        if grad is not None:
            grads[param.sharded].append(grad)
    norms = [get_total_norm(grads[sharded], norm_type) for sharded in (True, False)]
    dtype = torch.promote_types(torch.float32, torch.promote_types(*(norm.dtype for norm in norms)))
    mine, everywhere = (norm.to(state.device, dtype) for norm in norms)
    parts = [torch.empty_like(mine) for _ in range(state.plan.world_size)]
    dist.all_gather(parts, mine, group=state.ranks.inside)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([*parts, everywhere]), norm_type)
    return norm
