"""Tensors beside parameters, with their rows: averages, or what sites agreed on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from thunder_zero.comm.agree import Claim
from thunder_zero.sharded.sharded_model import sharded_model


class RowsBeside(ABC):
    """Tensors beside each parameter that trains, with its placements; a checkpoint holds them by rows, as an extra."""

    root: ClassVar[str]  # of their keys in a checkpoint
    what: ClassVar[str]  # an article and a noun for errors
    before_another: ClassVar[str] = ""  # what a user does before making another, as a part of a sentence
    counts: Stateful  # numbers beside the tensors

    def __init__(self, model: nn.Module) -> None:
        sharded = sharded_model(model)
        self.state = sharded.state
        self.state.require_own_values(f"make {self.what}")
        self._params = {name: param for name, param in sharded.named_parameters() if param.is_floating_point()}
        self._trained = {name: param for name, param in self._params.items() if param.requires_grad}
        if not self._trained:
            raise ValueError(
                f"no parameter of {self.state.name} requires gradients; make {self.what} of a model that trains"
            )

    @property
    def noun(self) -> str:
        return self.what.rpartition(" ")[2]

    @abstractmethod
    def saved(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the tensors by kind, and by the name of their parameter."""

    @abstractmethod
    def claim(self, name: str) -> Claim:
        """Return what must be equal on all ranks, for an extra with this name."""

    def copies(self) -> dict[str, Tensor]:
        """Return a copy of each trained parameter, by name: in float32 for 16 bits, which would lose small changes."""
        return {name: _copy(param) for name, param in self._trained.items()}

    def require_all(self) -> None:
        """Raise RuntimeError if a parameter trains now that did not at the start, since nothing is beside it."""
        for name, param in self._params.items():
            if param.requires_grad and name not in self._trained:
                raise RuntimeError(
                    f"parameter {name!r} of {self.state.name} required no gradients when the {self.noun} was made, and "
                    f"does now; {self.before_another}make a new {self.noun}"
                )


def _copy(param: Tensor) -> Tensor:
    return param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
