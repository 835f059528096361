"""Finds gradients that differ between ranks of slices although their parameters are not sliced.

A parameter that is no DTensor may be used where activations are slices, as a norm of each head is. Each rank then has
the gradient of its own slice, nothing sums these, and the ranks drift apart. Nobody sees that in the module::

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
NOISE = 1e-6  # of the largest norm: gradients that are zero in exact arithmetic
_compared: WeakKeyDictionary[State, set[str]] = WeakKeyDictionary()  # paths of parameters; shared by all who ask


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
    numbers = torch.zeros(len(params), 2, device=state.device)
    for number, param in zip(numbers, params, strict=True):
        if (grad := shards[param.path].grad) is not None:
            number.copy_(_summary(local(grad).detach()))
    with doing(f"the first use of gradients of {state.name}"):
        found = torch.stack(all_gather_tensor(numbers, state.group)).view(-1, plan.mesh.tensor.size, len(params), 2)
    norms = found[..., 0].amax(1)
    off = (found.amax(1) - found.amin(1)).amax(-1)
    differ = (off > SAME * norms + NOISE * norms.amax()).any(0).tolist()
    for param, differs in zip(params, differ, strict=True):
        if differs:
            raise RuntimeError(
                f"the gradient of parameter {param.path!r} differs between ranks of tensor parallelism: each has that "
                f"of its own slice of an activation, and nothing sums these; place the parameter's module by torch's "
                f"SequenceParallel, along the dimension of the slices"
            )
    if norms.any():  # otherwise nothing was compared: no backward has run yet
        compared.update(param.path for param in params)


def _summary(grad: Tensor) -> Tensor:
    """Return the norm and the sum of a gradient."""
    values = (torch.view_as_real(grad) if grad.is_complex() else grad).float()
    return torch.stack((torch.linalg.vector_norm(values), values.sum()))
