"""Holds the values drawn so far, planned parameters already cut to rest."""

from __future__ import annotations

from torch import Tensor

from thunder_zero.comm.backends import transport_for
from thunder_zero.runtime.initial_values.compare import Cuts
from thunder_zero.runtime.initial_values.data import CPU, PlainModel


class DrawnValues:
    """Drawn values: as they are at rest; in full, if the tensor is in no plan or will be broadcast."""

    def __init__(self, model: PlainModel, cuts: Cuts) -> None:
        self._model = model
        self._cuts = cuts
        self._values: dict[str, Tensor] = {}
        self._transport = transport_for(model.ranks.inside, model.device)

    def has(self, tensor: Tensor) -> bool:
        """Whether something was put for the tensor."""
        return self._model.name_of(tensor) in self._values

    def is_cut(self, tensor: Tensor) -> bool:
        """Whether the tensor is held as it is at rest."""
        return self._model.sender is None and self._model.param_of(tensor) is not None

    def put(self, tensor: Tensor, full: Tensor) -> None:
        """Hold a full value, or what is at rest of it."""
        name = self._model.name_of(tensor)
        self._values[name] = self._cuts.cut(full, name) if self.is_cut(tensor) else full

    def take(self, tensor: Tensor) -> Tensor:
        """What is held, which is then held no longer."""
        return self._values.pop(self._model.name_of(tensor))

    def in_full(self, tensor: Tensor) -> Tensor | None:
        """The value in full, on the CPU, to be put again; None if there is none. A collective, if it has to be
        gathered."""
        if not self.has(tensor):
            return None
        param = self._model.param_of(tensor)
        value = self.take(tensor)
        if param is not None and self.is_cut(tensor) and param.sharded and not param.resident:
            value = self._transport.all_gather([value.to(self._model.device)], [param]).wait()[0]
        return value.to(CPU)
