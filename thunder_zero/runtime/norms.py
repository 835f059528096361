"""Refuses norms of this rank's rows alone, as ``torch.nn.utils.clip_grad_norm_`` would take them.

That function and ``get_total_norm`` read the gradients of a device with one operator of torch. A kernel of ours in
front of it looks for gradients that are rows of a sharded parameter, and for the rows themselves, by identity: a view
or a copy of them passes, as in our own clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thunder_zero.compat.in_front import put_in_front
from thunder_zero.runtime import registry


def watch() -> None:
    """From now on refuse norms of rows of any of our models."""
    put_in_front(torch.ops.aten._foreach_norm.Scalar, _norm)


def _norm(norms_of: Callable[..., list[Tensor]], tensors: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """torch's operator, on anything but rows.

    Raises:
        RuntimeError: one of ``tensors`` is this rank's rows of a sharded parameter, or of its gradient.
    """
    path = _rows_among(tensors)
    if path is not None:
        raise RuntimeError(
            f"torch.nn.utils.clip_grad_norm_ (or another norm) would see this rank's rows of parameter {path!r} only; "
            f"call thunder_zero.clip_grad_norm_(model, max_norm), which returns the norm over all ranks, too (a norm "
            f"of rows alone, on purpose: give it param.grad.detach())"
        )
    return norms_of(tensors, *args, **kwargs)


def _rows_among(tensors: Sequence[Tensor]) -> str | None:
    """The path of the first of these tensors that is rows; None if none is."""
    owners = registry.owners_by_gradient()
    for state in registry.states():
        if not state.plan.policy.trust_optimizer:  # some optimizers read a parameter's norm, such as Adafactor
            owners |= {id(shard): (state, path) for path, shard in state.shards.items()}
    for tensor in tensors:
        if (owner := owners.get(id(tensor))) is not None:
            state, path = owner
            if state.plan.world_size > 1 and state.plan.by_name[path].sharded:
                return path
    return None
