"""needed while: Thunder has no public API for the contents of a jitted module."""

from __future__ import annotations

from torch import nn

from thunder.core.module import ThunderModule
from thunder.extend import Executor, TemporaryExecutor


def plain_of(model: ThunderModule) -> nn.Module:
    plain: nn.Module = model._model
    return plain


def forget_tensors(model: ThunderModule) -> None:
    """Drop the parameters and buffers that a jitted module has kept from its creation."""
    model._overrides_parameters.clear()
    model._overrides_buffers.clear()


def is_empty(executor: Executor) -> bool:
    """Return whether an executor is Thunder's own for one jitted module, with nothing in it."""
    return isinstance(executor, TemporaryExecutor) and not executor._lookasides
