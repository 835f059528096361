"""needed while: Thunder gets some submodules and outputs wrong, or fails without naming them.

In: an error of Thunder. Out: the reason as a sentence (:func:`not_traced`, :func:`not_returned`). ``UNTRACEABLE`` lists
the kinds of submodules that Thunder silently traces wrong, or does not name in its errors.
"""

from __future__ import annotations

import re
from inspect import getfile
from pathlib import Path
from traceback import walk_tb

from torch import nn
from torch.utils._pytree import is_namedtuple_instance

from thunder_zero.compat.private import InstanceNorm, OptimizedModule
from thunder_zero.compat.uncapturable import RefusedPart

import thunder
from thunder.core.interpreter import InterpreterError
from thunder.core.jit_ext import build_value_from_wrapped

THUNDER = Path(getfile(thunder)).parent
UNKNOWN = "Trying to call function "  # begins Thunder's error about an operator that it lacks
EPILOGUE = "thunder.epilogue"  # begins the file names of generated code that builds forward's result


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
        lambda module: isinstance(module, InstanceNorm) and module.track_running_stats,
        "has track_running_stats=True",
        "use track_running_stats=False",
        "Thunder does not update the running statistics of instance norms",
    ),
    RefusedPart(
        lambda module: isinstance(module, nn.SyncBatchNorm),
        "is a SyncBatchNorm",
        "use a BatchNorm, whose statistics are each rank's own, or a LayerNorm or GroupNorm",
        "Thunder cannot trace its collectives",
    ),
)


class Untraceable(NotImplementedError):
    """Raised if a trace of forward would be wrong, and Thunder's front end would not raise."""


def not_traced(error: Exception) -> str | None:
    """Return the reason Thunder's front end gave, or None if the error came from elsewhere."""
    if isinstance(error, Untraceable):
        return str(error)
    if isinstance(error, TypeError) and str(error) == "exceptions must derive from BaseException":
        return "it raised a string"  # also where an argument of forward is called fn
    if not isinstance(error, NotImplementedError | InterpreterError | AssertionError):
        return None
    *_, (frame, _) = walk_tb(error.__traceback__)
    from_thunder = Path(frame.f_code.co_filename).is_relative_to(THUNDER) or str(error).startswith(UNKNOWN)
    return (
        re.split(r"\n|\. | while tracing | of ProvenanceRecord|, please use manual", str(error))[0].rstrip(".")
        if from_thunder
        else None
    )


def not_returned(error: Exception) -> str | None:
    """Return the kind of structure that Thunder failed to return, or None if the error came from elsewhere."""
    # The line that raised decides, since a user's own errors also get here.
    if isinstance(error, TypeError) and str(error).startswith("tree_flatten of type"):
        return f"another structure than tuples, lists, dicts and dataclasses ({error})"
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is build_value_from_wrapped.__code__ and is_namedtuple_instance(frame.f_locals.get("v")):
            return f"a named tuple, {type(frame.f_locals['v']).__name__}"
        if isinstance(error, NameError) and frame.f_code.co_filename.startswith(EPILOGUE):
            return f"a named tuple, {error.name}"
    return None
