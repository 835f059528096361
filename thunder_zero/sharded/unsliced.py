"""Finds gradients that differ between ranks of slices although their parameters are not sliced.

A parameter that is no DTensor may be used where activations are slices, as a norm of each head is. Each rank then has
the gradient of its own slice, nothing sums these, and the ranks drift apart. Nobody sees that in the module::

    q_norm.weight (8,)     rank 0: of heads 0 and 1     rank 1: of heads 2 and 3     -> RuntimeError
    norm.weight (8,)       rank 0: of all               rank 1: of all, the same
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakSet

import torch
from torch import Tensor

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.small_collectives import all_gather_tensor
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.state import State

SAME = 0.05  # of a gradient's norm: far more than an order of sums changes, far less than other heads do
NOISE = 1e-6  # of the largest norm: gradients that are zero in exact arithmetic
_compared: WeakSet[State] = WeakSet()


def require_equal_gradients(state: State, stepped: Collection[int]) -> None:
    """Compare the gradients of the parameters that nobody slices, among those whose shards have these ids; a collective
    of one small message.

    Raises:
        RuntimeError: naming the first parameter whose gradient differs between ranks of tensor parallelism.
    """
    plan, shards = state.plan, state.shards
    params = [param for param in plan.params if param.sliced is None and id(shards[param.path]) in stepped]
    numbers = torch.zeros(len(params), 2, device=state.device)
    for number, param in zip(numbers, params, strict=True):
        if (grad := shards[param.path].grad) is not None:
            number.copy_(_summary(local(grad).detach()))
    with doing(f"the first use of gradients of {state.name}"):
        found = torch.stack(all_gather_tensor(numbers, state.group)).view(-1, plan.mesh.tensor.size, len(params), 2)
    norms = found[..., 0].amax(1)
    off = (found.amax(1) - found.amin(1)).amax(-1)
    differ = (off > SAME * norms + NOISE * norms.amax()).any(0).tolist() if params else []
    for param, differs in zip(params, differ, strict=True):
        if differs:
            raise RuntimeError(
                f"the gradient of parameter {param.path!r} differs between ranks of tensor parallelism: each has that "
                f"of its own slice of an activation, and nothing sums these; place the parameter's module by torch's "
                f"SequenceParallel, along the dimension of the slices"
            )


def require_equal_gradients_once(state: State) -> None:
    """Compare the gradients of a model that nobody slices, unless this was done before; a collective.

    Raises:
        RuntimeError: as :func:`require_equal_gradients`.
    """
    if state not in _compared:
        require_equal_gradients(state, set(map(id, state.shards.values())))
        _compared.add(state)


def _summary(grad: Tensor) -> Tensor:
    """Return the norm and the sum of a gradient."""
    values = (torch.view_as_real(grad) if grad.is_complex() else grad).float()
    return torch.stack((torch.linalg.vector_norm(values), values.sum()))
