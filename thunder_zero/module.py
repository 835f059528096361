"""The jitted module that a transform makes: Thunder's, with what sharded training asks of it beside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thunder_zero.runtime.clip import clip

from thunder.core.module import ThunderModule

if TYPE_CHECKING:
    from torch import Tensor

    from thunder_zero.transform import ZeroTransform


class ZeroModule(ThunderModule):
    """A jitted module whose parameters are sharded; ``ZeroTransform`` turns a ThunderModule into one."""

    _zero_transform: ZeroTransform

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep full gradients instead of reducing them; the next backward outside reduces the sum.

        As in PyTorch the forward counts: a backward defers or reduces as its forward stood inside or outside. Thunder's
        own ``no_sync`` reduces once more at its end; this one does not.

        What is deferred is not in ``.grad``, so ``optimizer.zero_grad()`` does not drop it; ``zero_grad`` of the model
        does. Drop what the end of an epoch leaves, or it is added to the next gradients.

        >>> with model.no_sync():
        ...     for x in micro_batches[:-1]:
        ...         loss(model(x)).backward()
        >>> loss(model(micro_batches[-1])).backward()
        """
        with self._zero_transform.state.accumulation.unsynced():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, and forget the gradients that ``no_sync`` has deferred."""
        super().zero_grad(set_to_none)
        self._zero_transform.state.drop_deferred()


def adopt(model: ThunderModule, transform: ZeroTransform) -> None:
    """Make a jitted module a ZeroModule, in place, as torch's ``fully_shard`` does with a module's class."""
    model.__class__ = ZeroModule
    model._zero_transform = transform


def transform_of(model: object) -> ZeroTransform:
    """The ZeroTransform of a jitted model.

    Raises:
        TypeError: not a jitted module, or one without our transform.
    """
    if isinstance(model, ZeroModule):
        return model._zero_transform
    raise TypeError(
        f"expected a module jitted with ZeroTransform, got {type(model).__name__}; make one with "
        f"thunder.jit(module, transforms=[thunder_zero.ZeroTransform(...)])"
    )


def clip_grad_norm_(
    model: ThunderModule, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
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
    state = transform_of(model).state
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; give a number, 0 or more")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type!r}; give a number above 0, or math.inf")
    return clip(state, float(max_norm), float(norm_type), error_if_nonfinite)


def global_mean(model: ThunderModule, total: Tensor, count: int) -> Tensor:
    """A loss that trains on the mean over all ranks' items, where ranks have different numbers of them.

    Gradients are averaged over ranks, so a rank's own mean would give each of its tokens (or rows) more weight the
    fewer it has. This is ``total * W / (count of all ranks)``: its mean over ranks is the mean over all items. A
    collective: all ranks must call it; one small message a rank.

    >>> losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    >>> tz.global_mean(model, losses, int((targets != -100).sum())).backward()

    Args:
        model: a model with ZeroTransform.
        total: 0-dim; the sum of the losses of this rank's items.
        count: how many items this rank has in the step: in all its micro-batches, if it accumulates. May be 0.

    Returns:
        The loss to call ``backward`` on.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: a rank's ``count`` is no int or negative, or no rank has an item; on every rank.
    """
    state = transform_of(model).state
    is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
    everywhere, refused = state.add_over_ranks(count if is_count else 0, not is_count)
    if refused:
        raise ValueError(f"a rank's count is no number of items (here it is {count!r}); give an int, 0 or more")
    if everywhere == 0:
        raise ValueError("no rank has an item, so there is no mean; skip this step on all ranks")
    return total * (state.plan.ranks / everywhere)
