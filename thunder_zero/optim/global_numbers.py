"""Clips gradients by their norm over all ranks. Computes a loss in which all items weigh the same.

Each rank sends one small message::

    clip_grad_norm_    norm of this rank's rows     -> all ranks' norms -> one norm -> gradients scaled in place
    global_mean        number of this rank's items  -> their sum        -> total * ranks / sum
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from thunder_zero.comm.small_collectives import all_gather_tensor, all_reduce_sum
from thunder_zero.plan.policy import is_count
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.sharded_model import sharded_model, tagged
from thunder_zero.sharded.state import State, unreduced
from thunder_zero.sharded.unsliced import require_equal_gradients_once

READY, NO_GRADIENT, UNREDUCED = range(3)  # a rank's status, which is sent with its norm


@tagged("clip_grad_norm_")
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the global norm of a sharded model's gradients, as ``torch.nn.utils.clip_grad_norm_`` does.

    You may also call torch's function, which returns a DTensor. ``tz.clip_grad_norm_`` returns a plain tensor, and
    raises if ``no_sync`` holds unreduced gradients. It leaves out parameters that the policy ignores.

    A collective: all ranks must call it, after the backward that reduces the gradients. Each rank sends one small
    message. A tied parameter is counted once.

    >>> norm = tz.clip_grad_norm_(model, max_norm=1.0)

    ``norm_type`` is the p of the p-norm; ``math.inf`` selects the largest absolute value. Return the norm before
    clipping, equal on all ranks.

    All ranks raise if a rank has no gradient, or if ``error_if_nonfinite`` is True and the norm is NaN or Inf.
    """
    state = sharded_model(model).state
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; give a number, 0 or more")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type!r}; give a number above 0, or math.inf")
    return clip(state, float(max_norm), float(norm_type), error_if_nonfinite)


def clip(state: State, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Clip as :func:`clip_grad_norm_` does. If a rank raises, all ranks do."""
    require_equal_gradients_once(state, state.params.values())
    norm, statuses = total_norm(state, norm_type)
    if UNREDUCED in statuses:
        param = next(iter(state.deferred), None)
        where = f"on rank {statuses.index(UNREDUCED)}" if param is None else f"of parameter {param.path!r}"
        raise unreduced("clip", where)
    if NO_GRADIENT in statuses:
        raise RuntimeError(
            f"nothing to clip: no parameter has a gradient on rank {statuses.index(NO_GRADIENT)}; call clip_grad_norm_ "
            f"after backward"
        )
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}; lower the learning rate, scale the loss, or pass "
            f"error_if_nonfinite=False to go on"
        )
    parts = []
    for param in state.params.values():
        if param.shard.grad is not None:
            part = local(param.shard).detach()
            part.grad = local(param.shard.grad)
            parts.append(part)
    clip_grads_with_norm_(parts, max_norm, norm)
    return norm


def total_norm(state: State, norm_type: float) -> tuple[Tensor, list[int]]:
    """Return the norm of all gradients as one vector, and each rank's status. This is one small collective.

    The norm has equal bits on every rank. Each element is counted once: a replicated parameter on its owner or the
    first rank of a replica, a parameter that is not tensor-parallel on the first rank of the ``tensor`` axis.
    """
    # torch's function on DTensors hangs for an infinite norm_type if a rank has no rows.
    params = state.params.values()
    present = {param.planned: local(param.shard.grad) for param in params if param.shard.grad is not None}
    mesh = state.plan.mesh
    counted = [
        rows
        for param, rows in present.items()
        if rows.numel()
        and (param.sharded or mesh.shard.place == (param.owner or 0))
        and (param.sliced is not None or mesh.tensor.place == 0)
    ]
    dtype = torch.float32  # or a larger dtype; equal on ranks that have no gradient
    for param in state.plan.params:
        dtype = torch.promote_types(dtype, param.dtype.to_real())
    local_norm = get_total_norm(counted, norm_type).to(state.device, dtype)
    status = UNREDUCED if state.deferred else READY if present else NO_GRADIENT
    message = torch.stack([local_norm, torch.full_like(local_norm, status)])
    norms, statuses = torch.stack(all_gather_tensor(message, state.group)).unbind(1)
    norm: Tensor = torch.linalg.vector_norm(norms[list(state.ranks.first_copy)], norm_type)  # all copies are equal
    return norm, [int(status) for status in statuses.tolist()]


@tagged("global_mean")
def global_mean(model: nn.Module, total: Tensor, count: int) -> Tensor:
    """Return a loss whose mean over ranks is the mean over all items. Ranks may have different numbers of items.

    Gradients are averaged over ranks. With local means, an item (such as a token) on a rank with few items would have a
    larger weight. The loss is ``total * W / (count of all ranks)``: its mean over the W ranks is the mean over all
    items. ``Policy.shares`` does not change this mean. A collective: all ranks must call it, and each rank sends one
    small message.

    >>> losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    >>> tz.global_mean(model, losses, int((targets != -100).sum())).backward()

    ``total`` is the sum of the losses of this rank's items, ``count`` their number in all micro-batches of the step.
    All ranks raise if no rank has an item.
    """
    state = sharded_model(model).state
    is_valid = is_count(count)
    total_count, invalid_counts = all_reduce_sum((count if is_valid else 0, not is_valid), state.group, state.device)
    if invalid_counts:
        raise ValueError(f"a rank's count is not a number of items (on this rank it is {count!r}); give an int >= 0")
    if total_count == 0:
        raise ValueError("no rank has an item, so there is no mean; skip this step on all ranks")
    # Ranks of the ``tensor`` axis each count their common batch. Shares weigh the gradient once more.
    return total * (state.plan.ranks / total_count / state.plan.weight)
