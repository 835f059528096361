"""Values that one rank sends to all others, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thunder_zero.comm import agree
from thunder_zero.runtime.initial_values.data import PlainModel, ValueSource, full_of
from thunder_zero.runtime.initial_values.existing import Existing


class Broadcast:
    """A source: what rank ``policy.broadcast_from`` has from its own sources."""

    def __init__(self, model: PlainModel, sender: int, own: Sequence[ValueSource]) -> None:
        self._model = model
        self._sender = sender
        self._own = own

    def has(self, tensor: Tensor) -> bool:
        """All but the parameters that the policy ignores."""
        return travels(tensor, self._model)

    def full(self, tensor: Tensor) -> Tensor:
        """The sender's values, in memory of this rank; a collective."""
        full = self._room(tensor) if arrives(tensor, self._model) else full_of(tensor, self._own)
        agree.broadcast(full, self._sender, self._model.ranks.everyone, self._model.device)
        return full

    def _room(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=self._model.device, requires_grad=False)
        return Existing(self._model).full(tensor)


def travels(tensor: Tensor, model: PlainModel) -> bool:
    """Whether one rank sends the tensor's values to all."""
    is_ignored = isinstance(tensor, nn.Parameter) and model.param_of(tensor) is None
    return model.sender is not None and not is_ignored


def arrives(tensor: Tensor, model: PlainModel) -> bool:
    """Whether another rank sends the tensor's values to this one."""
    return travels(tensor, model) and model.sender != model.ranks.everyone.rank()
