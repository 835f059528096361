"""The norm of all gradients of a sharded model, and clipping by it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from thunder_zero.comm.peers import answered
from thunder_zero.runtime.state import State

READY, NO_GRADIENT, OPEN = range(3)  # what a rank tells the others beside its norm


def clip(state: State, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``; returns the norm before that.

    Raises:
        RuntimeError: a rank has no gradient yet, or gradients that wait for a reduction; the norm is NaN or Inf, and
            that is not wanted. On every rank.
    """
    norm, statuses = total_norm(state, norm_type)
    if OPEN in statuses:
        path = state.open_accumulation(state.shards.values())
        where = f"rank {statuses.index(OPEN)}" if path is None else f"parameter {path!r}"
        raise RuntimeError(
            f"gradients of {where} that no_sync deferred were not reduced yet, so there is no norm to clip; run "
            f"forward and backward of the last micro-batch outside of no_sync first"
        )
    if NO_GRADIENT in statuses:
        raise RuntimeError(
            f"no parameter has a gradient (on rank {statuses.index(NO_GRADIENT)}), so there is nothing to clip; call "
            f"it after backward"
        )
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}; lower the learning rate, scale the loss, or pass "
            f"error_if_nonfinite=False to go on"
        )
    clip_grads_with_norm_([shard for shard in state.shards.values() if shard.grad is not None], max_norm, norm)
    return norm


def total_norm(state: State, norm_type: float) -> tuple[Tensor, list[int]]:
    """The norm of all gradients as of one vector, the same bits on every rank, and each rank's status; one small
    collective.

    Rows of sharded parameters count where they are, once for all copies; replicated parameters once. Padding is zero
    and adds nothing.
    """
    grads: dict[bool, list[Tensor]] = {True: [], False: []}  # sharded, replicated
    for param in state.plan.params:
        grad = state.shards[param.path].grad
        if grad is not None:
            grads[param.sharded].append(grad)
    norms = [get_total_norm(grads[sharded], norm_type) for sharded in (True, False)]
    dtype = torch.float32  # or more, and the same on ranks that have no gradient
    for param in state.plan.params:
        dtype = torch.promote_types(dtype, param.dtype.to_real())
    mine, everywhere = (norm.to(state.device, dtype) for norm in norms)
    status = NO_GRADIENT if not any(grads.values()) else READY
    if state.open_accumulation(state.shards.values()):
        status = OPEN
    told = torch.stack([mine, torch.full_like(mine, status)])
    of_all = [torch.empty_like(told) for _ in range(state.plan.ranks)]
    with answered(state.group):
        dist.all_gather(of_all, told, group=state.group)
    norms_of_all, statuses = torch.stack(of_all).unbind(1)
    parts = norms_of_all[: state.plan.world_size]  # of the first copy; the others have the same
    norm: Tensor = torch.linalg.vector_norm(torch.cat([parts, everywhere[None]]), norm_type)
    return norm, [int(status) for status in statuses.tolist()]
