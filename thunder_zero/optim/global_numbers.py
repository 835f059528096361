"""Numbers over all ranks: the norm that gradients are clipped by, a loss that weighs items equally.

In: a model with gradients, or a rank's loss and its number of items. Out: a norm that is equal on all ranks, or a loss
whose gradients average to those of all items; each rank sends one small message::

    clip_grad_norm_    norm of this rank's rows     -> all ranks' norms -> one norm -> gradients scaled in place
    global_mean        number of this rank's items  -> their sum        -> total * ranks / sum
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from thunder_zero.comm.small_collectives import all_gather_tensor, all_reduce_sum
from thunder_zero.plan.policy import is_count
from thunder_zero.sharded.accumulation import unreduced
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.sharded_model import sharded_model, tagged
from thunder_zero.sharded.state import State
from thunder_zero.sharded.unsliced import require_equal_gradients_once

READY, NO_GRADIENT, OPEN = range(3)  # a rank's status, which travels with its norm


@tagged("clip_grad_norm_")
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the global norm of a sharded model's gradients, as ``torch.nn.utils.clip_grad_norm_`` does.

    torch's own function works, too, and returns a DTensor. This function returns a plain tensor, refuses gradients that
    ``no_sync`` has not reduced, and leaves out parameters that the policy ignores, which are no DTensors.

    A collective: all ranks must call it, after the backward that reduces. Each rank sends one small message. A tied
    parameter counts once.

    >>> norm = tz.clip_grad_norm_(model, max_norm=1.0)

    Args:
        model: a model with ZeroTransform.
        max_norm: the largest norm; gradients whose norm is larger are scaled down to it.
        norm_type: p of the p-norm, more than 0; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or Inf; otherwise such gradients become NaN or 0, as torch's do.

    Returns:
        The norm before clipping: 0-dim, equal on all ranks.

    Raises:
        TypeError: ``model`` has no ZeroTransform.
        ValueError: ``max_norm`` or ``norm_type`` is out of its range.
        RuntimeError: there is no gradient yet; no_sync holds unreduced gradients; the norm is NaN or Inf and
            ``error_if_nonfinite``.
    """
    state = sharded_model(model).state
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; give a number, 0 or more")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type!r}; give a number above 0, or math.inf")
    return clip(state, float(max_norm), float(norm_type), error_if_nonfinite)


def clip(state: State, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``; return the norm before.

    It raises on every rank, or on none.
    """
    if state.plan.mesh.is_sliced:
        require_equal_gradients_once(state, set(map(id, state.shards.values())))
    norm, statuses = total_norm(state, norm_type)
    if OPEN in statuses:
        path = next(iter(state.accumulation.paths), None)
        where = f"on rank {statuses.index(OPEN)}" if path is None else f"of parameter {path!r}"
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
    clip_grads_with_norm_(_local_parts(state), max_norm, norm)
    return norm


def _local_parts(state: State) -> list[Tensor]:
    """Return this rank's part of each shard that has a gradient; its ``grad`` is this rank's part of the gradient."""
    parts = []
    for shard in state.shards.values():
        if shard.grad is not None:
            part = local(shard).detach()
            part.grad = local(shard.grad)
            parts.append(part)
    return parts


def total_norm(state: State, norm_type: float) -> tuple[Tensor, list[int]]:
    """Return the norm of all gradients as one vector, and each rank's status; one small collective.

    The norm has equal bits on every rank. In one copy of the model, each row of a sharded parameter counts on the rank
    that has it, and a replicated parameter counts on rank 0. A parameter that torch's tensor parallelism does not slice
    counts on the first rank of the slices.

    torch's own function hangs for an infinite ``norm_type`` if a rank has no rows.
    """
    grads = {param: state.shards[param.path].grad for param in state.plan.params}
    present = {param: local(grad) for param, grad in grads.items() if grad is not None}
    mesh = state.plan.mesh
    counted = [
        rows
        for param, rows in present.items()
        if rows.numel()
        and (param.sharded or mesh.shard.place == 0)
        and (param.sliced is not None or mesh.tensor.place == 0)
    ]
    dtype = torch.float32  # or more; equal on ranks that have no gradient
    for param in state.plan.params:
        dtype = torch.promote_types(dtype, param.dtype.to_real())
    local_norm = get_total_norm(counted, norm_type).to(state.device, dtype)
    status = OPEN if state.accumulation.paths else READY if present else NO_GRADIENT
    message = torch.stack([local_norm, torch.full_like(local_norm, status)])
    norms, statuses = torch.stack(all_gather_tensor(message, state.group)).unbind(1)
    norm: Tensor = torch.linalg.vector_norm(norms[list(state.ranks.first_copy)], norm_type)  # all copies are equal
    return norm, [int(status) for status in statuses.tolist()]


@tagged("global_mean")
def global_mean(model: nn.Module, total: Tensor, count: int) -> Tensor:
    """Return a loss that trains on the mean over all ranks' items, where ranks have different numbers of items.

    Gradients are averaged over ranks. If each rank took its own mean, the tokens (or rows) of a rank with few tokens
    would weigh more. The loss is ``total * W / (count of all ranks)``: its mean over the W ranks is the mean over all
    items. A collective: all ranks must call it; each rank sends one small message.

    >>> losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    >>> tz.global_mean(model, losses, int((targets != -100).sum())).backward()

    Args:
        model: a model with ZeroTransform.
        total: 0-dim; the sum of the losses of this rank's items.
        count: the number of this rank's items in the step, in all micro-batches if it accumulates. May be 0.

    Returns:
        The loss to call ``backward`` on.

    Raises:
        TypeError: ``model`` has no ZeroTransform.
        ValueError: a rank's ``count`` is not an int or is negative, or no rank has an item. It raises on every rank.
    """
    state = sharded_model(model).state
    valid = is_count(count)
    total_count, invalid = all_reduce_sum((count if valid else 0, not valid), state.group, state.device)
    if invalid:
        raise ValueError(f"a rank's count is not a number of items (on this rank it is {count!r}); give an int >= 0")
    if total_count == 0:
        raise ValueError("no rank has an item, so there is no mean; skip this step on all ranks")
    return total * (state.plan.ranks / total_count)  # ranks of slices have one batch, and each of them counts it
