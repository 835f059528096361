"""Detects replicated parameters whose gradients differ between tensor-parallel ranks.

A replicated parameter may be applied to sliced activations, as in a norm per attention head. Then each rank has the
gradient of its local slice, nothing sums these gradients, and ranks drift apart. So ranks compare their gradients::

    q_norm.weight (8,)     rank 0: heads 0 and 1        rank 1: heads 2 and 3        -> RuntimeError
    norm.weight (8,)       rank 0: all activations      rank 1: all activations      equal gradients
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.small_collectives import all_gather_tensor
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.state import State

SAME = 0.05  # relative to a gradient's norm: far above rounding, far below differences between heads
NOISE = 1e-6  # relative to the largest norm, for gradients that are zero in exact arithmetic


def require_equal_gradients_once(state: State, stepped: Iterable[ShardedParam]) -> None:
    """Compare gradients of unsliced parameters, once for each parameter; a collective of one small message."""
    params = [param for param in stepped if param.planned.sliced is None and not param.is_compared]
    if not params or not state.plan.mesh.is_sliced:
        return
    summaries = torch.zeros(len(params), 2, device=state.device)
    for summary, param in zip(summaries, params, strict=True):
        if (grad := param.shard.grad) is not None:
            summary.copy_(_summary(local(grad).detach()))
    with doing("the first use of gradients", state.name):
        summaries_of_ranks = torch.stack(all_gather_tensor(summaries, state.group))
    summaries_of_slices = summaries_of_ranks.view(-1, state.plan.mesh.tensor.size, len(params), 2)
    norms = summaries_of_slices[..., 0].amax(1)
    spread = (summaries_of_slices.amax(1) - summaries_of_slices.amin(1)).amax(-1)
    flags = (spread > SAME * norms + NOISE * norms.amax()).any(0).tolist()
    for param, differs in zip(params, flags, strict=True):
        if differs:
            raise RuntimeError(
                f"the gradient of parameter {param.path!r} differs between ranks of tensor parallelism: each has that "
                f"of its own slice of an activation, and nothing sums these; place the parameter's module by torch's "
                f"SequenceParallel, along the dimension of the slices"
            )
    if norms.any():  # otherwise no backward has run yet
        for param in params:
            param.is_compared = True


def _summary(grad: Tensor) -> Tensor:
    values = (torch.view_as_real(grad) if grad.is_complex() else grad).float()
    return torch.stack((torch.linalg.vector_norm(values), values.sum()))
