"""needed while: Thunder gets some submodules and outputs wrong, or fails without naming them.

In: an error of Thunder. Out: in words what Thunder could not do (:func:`not_traced`, :func:`not_returned`). The
submodules that it cannot trace are in ``UNTRACEABLE``.
"""

from __future__ import annotations

from inspect import getfile
from pathlib import Path
from traceback import walk_tb

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import is_namedtuple_instance

from thunder_zero.compat.private import BatchNorm, InstanceNorm, OptimizedModule, SpectralNormed, WeightNormed
from thunder_zero.compat.uncapturable import RefusedPart

import thunder
from thunder.core.interpreter import InterpreterError
from thunder.core.jit_ext import build_value_from_wrapped

THUNDER = Path(getfile(thunder)).parent
EPILOGUE = "thunder.epilogue"  # begins the file names of generated code that builds what forward returns


def _prepared_by(module: nn.Module, *kinds: type) -> bool:
    return any(isinstance(hook, kinds) for hook in module._forward_pre_hooks.values())


UNTRACEABLE: tuple[RefusedPart, ...] = (
    RefusedPart(
        lambda module: isinstance(module, OptimizedModule),
        "is under torch.compile",
        "give thunder.jit the module without torch.compile",
    ),
    RefusedPart(
        lambda module: bool(module._backward_hooks or module._backward_pre_hooks),
        "has backward hooks",
        "use hooks of the parameters (model.parameters()), or a torch.autograd.Function in forward",
        "Thunder never calls them",
    ),
    RefusedPart(
        lambda module: isinstance(module, nn.MultiheadAttention),
        "is a MultiheadAttention",
        "use linear layers and torch.nn.functional.scaled_dot_product_attention",
    ),
    RefusedPart(
        lambda module: isinstance(module, nn.RNNBase),
        "is a recurrent layer",
        "use a loop of linear layers, or leave it out of the module that thunder.jit is given",
    ),
    RefusedPart(
        lambda module: isinstance(module, InstanceNorm) and module.track_running_stats,
        "has track_running_stats=True",
        "use track_running_stats=False",
        "Thunder does not update the running statistics of instance norms",
    ),
    RefusedPart(
        lambda module: isinstance(module, BatchNorm) and module.track_running_stats and module.momentum is None,
        "has momentum=None",
        "give it a momentum",
        "Thunder cannot trace a cumulative average",
    ),
    RefusedPart(
        lambda module: isinstance(module, nn.SyncBatchNorm),
        "is a SyncBatchNorm",
        "use a BatchNorm, whose statistics are each rank's own, or a LayerNorm or GroupNorm",
        "Thunder cannot trace its collectives",
    ),
    RefusedPart(
        lambda module: _prepared_by(module, SpectralNorm) or isinstance(module, SpectralNormed),
        "is under spectral_norm",
        "normalise the weight in forward",
    ),
    RefusedPart(
        lambda module: _prepared_by(module, WeightNorm) or isinstance(module, WeightNormed),
        "is under weight_norm",
        "compute g * v / v.norm(...) in forward",
    ),
)


class Untraceable(NotImplementedError):
    """A reason why Thunder must not trace a forward, which its front end does not see."""


def not_traced(error: Exception) -> str | None:
    """Return the reason Thunder's front end gave, or None if the error came from elsewhere."""
    if isinstance(error, Untraceable):
        return str(error)
    if isinstance(error, TypeError) and str(error) == "exceptions must derive from BaseException":
        return "it raised a string"  # also where an argument of forward is called fn
    if not isinstance(error, NotImplementedError | InterpreterError):
        return None
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(error).partition("\n")[0].rstrip(".") if Path(frame.f_code.co_filename).is_relative_to(THUNDER) else None


def not_returned(error: Exception) -> str | None:
    """What forward returned, if Thunder failed to return it: judged by where it failed, as users' errors pass."""
    if isinstance(error, TypeError) and str(error).startswith("tree_flatten of type"):
        return f"another structure than tuples, lists, dicts and dataclasses ({error})"
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is build_value_from_wrapped.__code__ and is_namedtuple_instance(frame.f_locals.get("v")):
            return f"a named tuple, {type(frame.f_locals['v']).__name__}"
        if isinstance(error, NameError) and frame.f_code.co_filename.startswith(EPILOGUE):
            return f"a named tuple, {error.name}"
    return None
