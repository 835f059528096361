"""The jitted module that a transform makes: Thunder's, with what sharded training asks of it beside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thunder_zero.runtime.clip import clip

from thunder.core.module import ThunderModule

if TYPE_CHECKING:
    from torch import Tensor

    from thunder_zero.runtime.state import State


class ZeroModule(ThunderModule):
    """A jitted module whose parameters are sharded; ``ZeroTransform`` turns a ThunderModule into one."""

    _zero_state: State

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep full gradients instead of reducing them; the next backward outside reduces the sum.

        As in PyTorch the forward counts: a backward defers or reduces as its forward stood inside or outside. Thunder's
        own ``no_sync`` reduces once more at its end; this one does not.

        >>> with model.no_sync():
        ...     for x in micro_batches[:-1]:
        ...         loss(model(x)).backward()
        >>> loss(model(micro_batches[-1])).backward()
        """
        with self._zero_state.unsynced():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, and forget the gradients that ``no_sync`` has deferred."""
        super().zero_grad(set_to_none)
        self._zero_state.drop_deferred()


def adopt(model: ThunderModule, state: State) -> None:
    """Make a jitted module a ZeroModule, in place, as torch's ``fully_shard`` does with a module's class."""
    model.__class__ = ZeroModule
    model._zero_state = state


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
    if not isinstance(model, ZeroModule):
        raise TypeError(
            f"expected a model with ZeroTransform, got {type(model).__name__}; for others there is "
            f"torch.nn.utils.clip_grad_norm_"
        )
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; give a number, 0 or more")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type!r}; give a number above 0, or math.inf")
    return clip(model._zero_state, float(max_norm), float(norm_type), error_if_nonfinite)
