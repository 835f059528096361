"""Keeps the padding of shards zero around an optimizer's step: in gradients, parameters and states.

Padding belongs to nobody: no gather, norm, scaler or state dict reads it. But training code may write whole gradients
(``p.grad.fill_``), and an optimizer whole parameters (noise) or states (initial values).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor
from torch.optim import Optimizer

from thunder_zero.compat.torch_internals import zero_all
from thunder_zero.plan import Param
from thunder_zero.rows import padding_of
from thunder_zero.runtime.optimizers import StepsWhole
from thunder_zero.runtime.state import State


def clear_gradients(state: State, stepped: Collection[int]) -> None:
    """Zero the padding of gradients, in one call, on the ranks that have any.

    Args:
        state: the model's.
        stepped: the ids of the tensors that the optimizer steps.
    """
    params = _padded(state, stepped)
    _clear(state, [(param, shard.grad) for param, shard in params if shard.grad is not None])


def clear_parameters_and_states(state: State, stepped: Collection[int], optimizer: Optimizer) -> None:
    """Zero the padding of parameters and of the optimizer's states by rows; see :func:`clear_gradients`."""
    found: list[tuple[Param, Tensor]] = []
    for param, shard in _padded(state, stepped):
        values = () if isinstance(optimizer, StepsWhole) else optimizer.state.get(shard, {}).values()
        rows = [value for value in values if isinstance(value, Tensor) and value.shape == shard.shape]
        rows = [
            value for value in rows if value.is_floating_point() or value.is_complex()
        ]  # no masks: others count them
        found += [(param, tensor) for tensor in (shard, *rows)]
    _clear(state, found)


def _padded(state: State, stepped: Collection[int]) -> Iterator[tuple[Param, Tensor]]:
    """The shards that the optimizer steps and that have padding on this rank, with their parameters."""
    for param in state.plan.padded:
        shard = state.shards[param.path]
        if id(shard) in stepped:
            yield param, shard


def _clear(state: State, tensors: list[tuple[Param, Tensor]]) -> None:
    # Through .data: the versions of a rank with padding must not differ from those of the others.
    if tensors:
        zero_all([padding_of(tensor.data, param, state.plan) for param, tensor in tensors])
