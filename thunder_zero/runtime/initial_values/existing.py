"""Values that a module on a real device has."""

from __future__ import annotations

from torch import Tensor

from thunder_zero.runtime.initial_values.data import PlainModel


class Existing:
    """A source: the tensors that are on a real device."""

    def __init__(self, model: PlainModel) -> None:
        self._model = model

    def has(self, tensor: Tensor) -> bool:
        """Every tensor that is not on the meta device."""
        return not tensor.is_meta

    def full(self, tensor: Tensor) -> Tensor:
        """The tensor itself; of a planned parameter its data."""
        return tensor if self._model.param_of(tensor) is None else tensor.detach()
