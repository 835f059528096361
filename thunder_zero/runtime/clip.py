"""The norm of all gradients of a sharded model, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from thunder_zero.comm.peers import all_gather_tensor
from thunder_zero.runtime.sharded_model import sharded_model
from thunder_zero.runtime.state import State

READY, NO_GRADIENT, OPEN = range(3)  # what a rank tells the others beside its norm


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the global norm of a sharded model's gradients, as ``torch.nn.utils.clip_grad_norm_`` does on one process.

    A collective: all ranks must call it, after the backward that reduces. One small message a rank. A tied parameter
    counts once; padding does not count.

    >>> norm = tz.clip_grad_norm_(model, max_norm=1.0)

    Args:
        model: a model with ZeroTransform.
        max_norm: what the norm is brought down to, where it is larger.
        norm_type: p of the p-norm, more than 0; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or Inf; otherwise such gradients become NaN or 0, as torch's do.

    Returns:
        The norm before clipping: 0-dim, equal on all ranks.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: ``max_norm`` or ``norm_type`` is out of its range.
        RuntimeError: there is no gradient yet; an accumulation is open; the norm is NaN or Inf, if asked for.
    """
    state = sharded_model(model).state
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; give a number, 0 or more")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type!r}; give a number above 0, or math.inf")
    return clip(state, float(max_norm), float(norm_type), error_if_nonfinite)


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
    norms_of_all, statuses = torch.stack(all_gather_tensor(told, state.group)).unbind(1)
    parts = norms_of_all[: state.plan.world_size]  # of the first copy; the others have the same
    norm: Tensor = torch.linalg.vector_norm(torch.cat([parts, everywhere[None]]), norm_type)
    return norm, [int(status) for status in statuses.tolist()]
