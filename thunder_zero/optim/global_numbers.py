"""Numbers over all ranks: the norm that gradients are clipped by, a loss that weighs items alike.

In: a model with gradients, or a rank's loss and its number of items. Out: the same number, or a loss that means the
same, on all ranks; one small message from each::

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

    That works, too, and returns a DTensor; this returns a plain tensor, knows of ``no_sync``, and leaves out parameters
    that the policy ignores, which are no DTensors.

    A collective: all ranks must call it, after the backward that reduces; each sends one small message. A tied
    parameter counts once.

    >>> norm = tz.clip_grad_norm_(model, max_norm=1.0)

    Args:
        model: a model with ZeroTransform.
        max_norm: the largest norm; gradients with a larger one are scaled down to it.
        norm_type: p of the p-norm, more than 0; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or Inf; otherwise such gradients become NaN or 0, as torch's do.

    Returns:
        The norm before clipping: 0-dim, equal on all ranks.

    Raises:
        TypeError: not a model with ZeroTransform.
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
    """Scale all gradients in place so that their global norm is at most ``max_norm``; returns the norm before that.
    Raises on every rank, or on none."""
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
    """This rank's part of each shard that has a gradient, with its part of that."""
    found = []
    for shard in state.shards.values():
        if shard.grad is not None:
            part = local(shard).detach()
            part.grad = local(shard.grad)
            found.append(part)
    return found


def total_norm(state: State, norm_type: float) -> tuple[Tensor, list[int]]:
    """The norm of all gradients as one vector, the same bits on every rank, and each rank's status; one small
    collective.

    Each row of a sharded parameter counts on the rank that has it, in one copy of the model; a replicated parameter
    counts on rank 0, and what torch's tensor parallelism does not slice counts on the first of its ranks. torch's own
    function hangs for an infinite ``norm_type`` where a rank has no rows.
    """
    grads = {param: state.shards[param.path].grad for param in state.plan.params}
    there = {param: local(grad) for param, grad in grads.items() if grad is not None}
    mesh = state.plan.mesh
    counted = [
        rows
        for param, rows in there.items()
        if rows.numel()
        and (param.sharded or mesh.shard.place == 0)
        and (param.sliced is not None or mesh.tensor.place == 0)
    ]
    dtype = torch.float32  # or more, and the same on ranks that have no gradient
    for param in state.plan.params:
        dtype = torch.promote_types(dtype, param.dtype.to_real())
    mine = get_total_norm(counted, norm_type).to(state.device, dtype)
    status = OPEN if state.accumulation.paths else READY if there else NO_GRADIENT
    message = torch.stack([mine, torch.full_like(mine, status)])
    norms, statuses = torch.stack(all_gather_tensor(message, state.group)).unbind(1)
    norm: Tensor = torch.linalg.vector_norm(norms[list(state.ranks.first_copy)], norm_type)  # the others have the same
    return norm, [int(status) for status in statuses.tolist()]


@tagged("global_mean")
def global_mean(model: nn.Module, total: Tensor, count: int) -> Tensor:
    """A loss that trains on the mean over all ranks' items, where ranks have different numbers of them.

    Gradients are averaged over ranks, so with each rank's own mean, the tokens (or rows) of a rank with few of them
    would weigh more. This is ``total * W / (count of all ranks)``: its mean over ranks is the mean over all items. A
    collective: all ranks must call it; each sends one small message.

    >>> losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    >>> tz.global_mean(model, losses, int((targets != -100).sum())).backward()

    Args:
        model: a model with ZeroTransform.
        total: 0-dim; the sum of the losses of this rank's items.
        count: number of items of this rank in the step, in all its micro-batches if it accumulates. May be 0.

    Returns:
        The loss to call ``backward`` on.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: a rank's ``count`` is not an int or is negative, or no rank has an item; on every rank.
    """
    state = sharded_model(model).state
    valid = is_count(count)
    everywhere, refused = all_reduce_sum((count if valid else 0, not valid), state.group, state.device)
    if refused:
        raise ValueError(f"a rank's count is not a number of items (on this rank it is {count!r}); give an int >= 0")
    if everywhere == 0:
        raise ValueError("no rank has an item, so there is no mean; skip this step on all ranks")
    return total * (state.plan.ranks / everywhere)  # ranks that have one batch, for tensor parallelism, each count it
