"""Values that are read from a state dict, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thunder_zero.runtime.initial_values.data import CPU, PlainModel, fitted
from thunder_zero.runtime.initial_values.failures import Failures


class Read:
    """The tensors that are in the plain module's state dict, if ``weights`` is given."""

    def __init__(self, model: PlainModel, weights: Mapping[str, Tensor] | None, failures: Failures) -> None:
        self._model = model
        self._weights: Mapping[str, Tensor] = {} if weights is None else weights
        self._saved = frozenset(() if weights is None else model.module.state_dict())
        self._failures = failures

    def has(self, tensor: Tensor) -> bool:
        """Whether a state dict has the tensor; it has no buffers that are not persistent."""
        return any(name in self._saved for name in self._model.names[tensor])

    def require_names(self) -> None:
        """Refuse a state dict of another module.

        Raises:
            ValueError: naming the first tensor that is missing or unexpected.
        """
        kind = type(self._model.module).__name__
        for tensor, names in self._model.names.items():
            if self.has(tensor) and not any(name in self._weights for name in names):
                raise ValueError(f"weights has no {names[0]!r}; give the state dict of a {kind} like this one")
        for name in self._weights:
            if name not in self._saved:
                raise ValueError(
                    f"weights has {name!r}, which {kind} does not have; leave it out of the state dict, or build the "
                    f"module that it belongs to"
                )

    def full(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU; without values after a failure, since the other ranks may wait to receive it."""
        room = torch.empty_like(tensor, device=CPU, requires_grad=False)
        with self._failures.remembered():
            name = next(name for name in self._model.names[tensor] if name in self._weights)
            room.copy_(fitted(self._weights[name], tensor, f"weights has {name!r}"))
        return room
