"""needed while: Thunder gets some submodules and outputs wrong, or fails without naming them.

In: a module that is about to be sharded, or compiled; an error of Thunder. Out: an error that names the submodule and
what to use instead (:func:`require_traceable`), or in words what Thunder could not do (:func:`not_traced`,
:func:`not_returned`)::

    submodule 'rnn' of Net (LSTM) is a recurrent layer, and Thunder cannot trace it; use a loop of linear layers, or ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getfile
from pathlib import Path
from traceback import walk_tb

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import is_namedtuple_instance

import thunder
from thunder.core.interpreter import InterpreterError
from thunder.core.jit_ext import build_value_from_wrapped

THUNDER = Path(getfile(thunder)).parent
EPILOGUE = "thunder.epilogue"  # begins the file names of generated code that builds what forward returns


@dataclass(frozen=True, slots=True)
class RefusedPart:
    """A kind of submodule that is refused; ``under_dynamo``: where dynamo captures graphs, too."""

    is_it: Callable[[nn.Module], bool]
    what: str
    instead: str
    why: str = "Thunder cannot trace it"
    under_dynamo: bool = True


def _prepared_by(module: nn.Module, *kinds: type) -> bool:
    return any(isinstance(hook, kinds) for hook in module._forward_pre_hooks.values())


def _has_composable_checkpoint(module: nn.Module) -> bool:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(hook.__module__ == "torch.distributed._composable.checkpoint_activation" for hook in hooks)


UNTRACEABLE: tuple[RefusedPart, ...] = (
    RefusedPart(
        lambda module: isinstance(module, OptimizedModule),
        "is under torch.compile",
        "give thunder.jit the module without torch.compile",
        under_dynamo=False,
    ),
    RefusedPart(
        _has_composable_checkpoint,
        "is under torch.distributed._composable.checkpoint",
        "call torch.utils.checkpoint.checkpoint(submodule, ..., use_reentrant=False) in forward",
        "Thunder cannot trace its hooks",
    ),
    RefusedPart(
        lambda module: bool(module._backward_hooks or module._backward_pre_hooks),
        "has backward hooks",
        "use hooks of the parameters (model.parameters()), or a torch.autograd.Function in forward",
        "Thunder never calls them",
        under_dynamo=False,
    ),
    RefusedPart(
        lambda module: isinstance(module, nn.MultiheadAttention),
        "is a MultiheadAttention",
        "use linear layers and torch.nn.functional.scaled_dot_product_attention",
        under_dynamo=False,
    ),
    RefusedPart(
        lambda module: isinstance(module, nn.RNNBase),
        "is a recurrent layer",
        "use a loop of linear layers, or leave it out of the module that thunder.jit is given",
        under_dynamo=False,
    ),
    RefusedPart(
        lambda module: isinstance(module, _InstanceNorm) and module.track_running_stats,
        "has track_running_stats=True",
        "use track_running_stats=False",
        "Thunder does not update the running statistics of instance norms",
        under_dynamo=False,
    ),
    RefusedPart(
        lambda module: isinstance(module, _BatchNorm) and module.track_running_stats and module.momentum is None,
        "has momentum=None",
        "give it a momentum",
        "Thunder cannot trace a cumulative average",
        under_dynamo=False,
    ),
    RefusedPart(
        lambda module: isinstance(module, nn.SyncBatchNorm),
        "is a SyncBatchNorm",
        "use a BatchNorm, whose statistics are each rank's own, or a LayerNorm or GroupNorm",
        "Thunder cannot trace its collectives",
        under_dynamo=False,
    ),
    RefusedPart(
        lambda module: _prepared_by(module, SpectralNorm) or isinstance(module, _SpectralNorm),
        "is under spectral_norm",
        "normalise the weight in forward",
        under_dynamo=False,
    ),
    RefusedPart(
        lambda module: _prepared_by(module, WeightNorm) or isinstance(module, _WeightNorm),
        "is under weight_norm",
        "compute g * v / v.norm(...) in forward",
        under_dynamo=False,
    ),
    RefusedPart(
        lambda module: isinstance(module, torch.jit.ScriptModule),
        "is a ScriptModule",
        "use the module before torch.jit.script",
    ),
)


def require_traceable(root: nn.Module, parts: tuple[RefusedPart, ...]) -> None:
    """Refuse submodules of these kinds; also when a sharded module is compiled or that failed, since one may have
    become so: torch's ``update_bn``, for one, sets ``momentum=None``."""
    for path, module in root.named_modules():
        for part in parts:
            if part.is_it(module):
                where = f"submodule {path!r} of {type(root).__name__}" if path else type(root).__name__
                raise RuntimeError(f"{where} ({type(module).__name__}) {part.what}, and {part.why}; {part.instead}")


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
