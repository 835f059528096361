"""needed while: Thunder has no public API for the contents of a jitted module.

In: a module that ``thunder.jit`` made. Out: the plain module, and the tables in which programs look parameters
up.
"""

from __future__ import annotations

from torch import Tensor, nn

from thunder.core.module import ThunderModule
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction

# The autograd nodes that lead to a program's backward.
BACKWARD_NODES = (ThunderOutputFunction._backward_cls, ThunderFunction._backward_cls)


def plain_of(model: ThunderModule) -> nn.Module:
    """Return the module that was jitted."""
    plain: nn.Module = model._model
    return plain


def hold_parameter(model: ThunderModule, name: str, param: Tensor) -> None:
    """Let programs of a jitted module read ``param`` under ``name``."""
    model._overrides_parameters[name] = param


def forget_parameters(model: ThunderModule) -> None:
    """Let programs of a jitted module read the parameters of the plain module."""
    model._overrides_parameters.clear()


def forget_buffers(model: ThunderModule) -> None:
    """Let programs of a jitted module read the buffers of the plain module."""
    model._overrides_buffers.clear()
