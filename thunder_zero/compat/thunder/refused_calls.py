"""needed while: Thunder drops assignments to attributes, and fails on some checkpoints.

Thunder silently drops an assignment to an attribute of the root module. Assignments to buffers, and to attributes of
submodules, work. Thunder raises a string for a reentrant checkpoint, ignores ``context_fn``, and passes no keyword
arguments::

    self.name = value           ->   set_attribute          raises where the value would be lost
    checkpoint(function, x)     ->   call_checkpoint        passes keyword arguments, or raises
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from thunder_zero.compat.thunder.patches import Patch, is_ours

from thunder.core import jit_ext
from thunder.core.interpreter import PseudoInst, do_raise, unwrap, wrap_const

# Other options of ``checkpoint`` change nothing here: recomputed lines have forward's random numbers in any case.
OF_CHECKPOINT = frozenset(("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state"))
CONTEXT_FN = (
    "forward calls torch.utils.checkpoint.checkpoint with context_fn, which Thunder does not call; leave it out, and "
    "choose what backward computes again by Policy.recompute"
)
REENTRANT = (
    "forward calls torch.utils.checkpoint.checkpoint with use_reentrant=True, which Thunder cannot trace; pass "
    "use_reentrant=False"
)

_ABSENT = object()
_set_attribute = jit_ext._general_jit_object_setattr_lookaside
_call_checkpoint = jit_ext._general_jit_torch_checkpoint_lookaside


def set_attribute(obj: Any, name: str, value: Any) -> Any:
    """Assign an attribute, or raise inside forward if Thunder would lose the assignment."""
    if is_ours() and _is_lost(obj, unwrap(name), unwrap(value)):
        kind = type(unwrap(obj)).__name__
        return do_raise(
            RuntimeError(
                f"forward of {kind} changes its attribute {unwrap(name)!r}, and Thunder would drop the change; "
                f"return the value, or keep it in a buffer (self.register_buffer)"
            )
        )
    return _set_attribute(obj, name, value)


def call_checkpoint(function: Any, *args: Any, use_reentrant: Any = False, **kwargs: Any) -> Any:
    """Call a checkpoint with keyword arguments, or raise inside forward if Thunder cannot trace it."""
    if not is_ours():
        return _call_checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    if unwrap(use_reentrant):
        return do_raise(RuntimeError(REENTRANT))
    if unwrap(kwargs.get("context_fn")) not in (None, noop_context_fn):
        return do_raise(RuntimeError(CONTEXT_FN))
    named = {name: value for name, value in kwargs.items() if name not in OF_CHECKPOINT}
    if named:
        args = (function, wrap_const(tuple(named)), *args, *named.values())
        function = wrap_const(_with_keywords)
    return _call_checkpoint(function, *args)


def _with_keywords(function: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
    """Call a function whose last arguments are keyword arguments with these names. Thunder interprets this code."""
    first = len(args) - len(names)
    return function(*args[:first], **dict(zip(names, args[first:])))  # noqa: B905 (Thunder has no zip with strict)


def _is_lost(obj: Any, name: str, value: Any) -> bool:
    """Return whether an assignment changes an attribute of the root module."""
    module = unwrap(obj)
    if not isinstance(module, nn.Module) or obj.provenance.inst is not PseudoInst.INPUT_FN:
        return False
    before = vars(module).get(name, _ABSENT)
    plain = (bool, int, float, str, type(None))
    return before is not value and not (isinstance(value, plain) and type(before) is type(value) and before == value)


PATCHES = (
    Patch(jit_ext._general_jit_lookaside_map, object.__setattr__, set_attribute),
    Patch(jit_ext._general_jit_lookaside_map, checkpoint, call_checkpoint),
)
