"""Values that one rank sends to all others, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thunder_zero.comm import agree
from thunder_zero.runtime.initial_values.data import Existing, Source, Target, full_of


class Broadcast:
    """A source: what rank ``policy.broadcast_from`` has from its own sources."""

    def __init__(self, target: Target, sender: int, own: Sequence[Source]) -> None:
        self._target = target
        self._sender = sender
        self._own = own

    def has(self, tensor: Tensor) -> bool:
        """All but the parameters that the policy ignores."""
        return travels(tensor, self._target)

    def full(self, tensor: Tensor) -> Tensor:
        """The sender's values, in memory of this rank; a collective."""
        full = self._room(tensor) if arrives(tensor, self._target) else full_of(tensor, self._own)
        agree.broadcast(full, self._sender, self._target.ranks.everyone, self._target.device)
        return full

    def _room(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=self._target.device, requires_grad=False)
        return Existing(self._target).full(tensor)


def travels(tensor: Tensor, target: Target) -> bool:
    """Whether one rank sends the tensor's values to all."""
    is_ignored = isinstance(tensor, nn.Parameter) and target.param_of(tensor) is None
    return target.sender is not None and not is_ignored


def arrives(tensor: Tensor, target: Target) -> bool:
    """Whether another rank sends the tensor's values to this one."""
    return travels(tensor, target) and target.sender != target.ranks.everyone.rank()
