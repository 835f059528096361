"""needed while: Thunder has what a jitted module holds under private names alone.

In: a module that ``thunder.jit`` made, or a trace of it. Out: the plain module, and where its programs find parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from thunder.core.codeutils import SigInfo
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction

# The autograd nodes that lead to a program's backward.
BACKWARD_NODES = (ThunderOutputFunction._backward_cls, ThunderFunction._backward_cls)


def plain_of(model: ThunderModule) -> nn.Module:
    """Return the module that was jitted."""
    plain: nn.Module = model._model
    return plain


def hold_parameter(model: ThunderModule, name: str, param: Tensor) -> None:
    """Let programs of a jitted module read this parameter by its name."""
    model._overrides_parameters[name] = param


def forget_parameters(model: ThunderModule) -> None:
    """Let programs of a jitted module read the parameters of the plain module."""
    model._overrides_parameters.clear()


def forget_buffers(model: ThunderModule) -> None:
    """Let programs of a jitted module read the buffers of the plain module."""
    model._overrides_buffers.clear()


def set_signature(trace: TraceCtx, name: str, args: Iterable[str]) -> None:
    """Set the name and the arguments of the function that a trace is written as."""
    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(arg, None) for arg in args]
