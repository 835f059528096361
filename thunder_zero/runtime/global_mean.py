"""A loss that weighs the items of all ranks alike."""

from __future__ import annotations

from torch import Tensor, nn

from thunder_zero.comm.small_collectives import all_reduce_sum
from thunder_zero.policy import is_count
from thunder_zero.runtime.sharded_model import is_place, sharded_model


@is_place("global_mean")
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
    return total * (state.plan.ranks / everywhere)
