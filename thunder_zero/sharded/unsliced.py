"""Finds gradients that differ between ranks of slices although their parameters are not sliced.

A parameter that is no DTensor may be used where activations are slices, as a norm of each head is. Each rank then has
the gradient of its own slice, nothing sums these, and the ranks drift apart. Nothing in the module shows it::

    q_norm.weight (8,)     rank 0: of heads 0 and 1     rank 1: of heads 2 and 3     -> RuntimeError
    norm.weight (8,)       rank 0: of all               rank 1: of all, the same
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.small_collectives import all_gather_tensor
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.state import State

SAME = 0.05  # of a gradient's norm: far more than an order of sums changes, far less than other heads do
NOISE = 1e-6  # of the largest norm, for gradients that are zero in exact arithmetic
_compared: WeakKeyDictionary[State, set[str]] = WeakKeyDictionary()  # paths of parameters, for all callers


def require_equal_gradients_once(state: State, stepped: Collection[int]) -> None:
    """Compare gradients between ranks of tensor parallelism, each parameter's once; a collective of one small message.

    Only parameters that nobody slices are compared, among those whose shards have the ids ``stepped``. Nothing is sent
    if all of them were compared before.

    Raises:
        RuntimeError: a gradient differs; it names the first such parameter.
    """
    plan, shards, compared = state.plan, state.shards, _compared.setdefault(state, set())
    params = [
        param
        for param in plan.params
        if param.sliced is None and param.path not in compared and id(shards[param.path]) in stepped
    ]
    if not params:
        return
    summaries = torch.zeros(len(params), 2, device=state.device)
    for summary, param in zip(summaries, params, strict=True):
        if (grad := shards[param.path].grad) is not None:
            summary.copy_(_summary(local(grad).detach()))
    with doing(f"the first use of gradients of {state.name}"):
        of_ranks = torch.stack(all_gather_tensor(summaries, state.group))
    by_copy = of_ranks.view(-1, plan.mesh.tensor.size, len(params), 2)
    norms = by_copy[..., 0].amax(1)
    spread = (by_copy.amax(1) - by_copy.amin(1)).amax(-1)
    differ = (spread > SAME * norms + NOISE * norms.amax()).any(0).tolist()
    for param, differs in zip(params, differ, strict=True):
        if differs:
            raise RuntimeError(
                f"the gradient of parameter {param.path!r} differs between ranks of tensor parallelism: each has that "
                f"of its own slice of an activation, and nothing sums these; place the parameter's module by torch's "
                f"SequenceParallel, along the dimension of the slices"
            )
    if norms.any():  # or no backward has run yet, and nothing was compared
        compared.update(param.path for param in params)


def _summary(grad: Tensor) -> Tensor:
    """Return the norm and the sum of a gradient."""
    values = (torch.view_as_real(grad) if grad.is_complex() else grad).float()
    return torch.stack((torch.linalg.vector_norm(values), values.sum()))
