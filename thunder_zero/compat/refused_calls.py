"""needed while: Thunder drops assignments to attributes, and fails on reentrant checkpoints.

It drops what forward assigns to an attribute of the module itself without a word; attributes of submodules, and
buffers, keep what was assigned. For a reentrant checkpoint it raises a string.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder.core.interpreter import PseudoInst, do_raise, unwrap
from thunder.core.jit_ext import (
    _general_jit_object_setattr_lookaside,
    _general_jit_torch_checkpoint_lookaside,
    register_general_jit_lookaside,
)

_ABSENT = object()


def refuse(is_ours: Callable[[], bool]) -> None:
    """Register our functions in front of Thunder's; it calls them while it traces any model.

    Args:
        is_ours: whether the model that is traced now is a sharded one; others keep what Thunder does.
    """

    def set_attribute(obj: Any, name: str, value: Any) -> Any:
        if is_ours() and _is_lost(obj, unwrap(name), unwrap(value)):
            kind = type(unwrap(obj)).__name__
            return do_raise(
                RuntimeError(
                    f"forward of {kind} changes its attribute {unwrap(name)!r}, and Thunder would drop the change; "
                    f"return the value, or keep it in a buffer (self.register_buffer)"
                )
            )
        return _general_jit_object_setattr_lookaside(obj, name, value)

    def call_checkpoint(function: Any, *args: Any, use_reentrant: Any = False, **kwargs: Any) -> Any:
        if is_ours() and unwrap(use_reentrant):
            return do_raise(
                RuntimeError(
                    "forward calls torch.utils.checkpoint.checkpoint with use_reentrant=True, which Thunder cannot "
                    "trace; pass use_reentrant=False"
                )
            )
        return _general_jit_torch_checkpoint_lookaside(function, *args, use_reentrant=use_reentrant, **kwargs)

    register_general_jit_lookaside(object.__setattr__)(set_attribute)
    register_general_jit_lookaside(checkpoint)(call_checkpoint)


def _is_lost(obj: Any, name: str, value: Any) -> bool:
    """Whether this assigns another value than there is to an attribute of the module that is traced itself."""
    module = unwrap(obj)
    if not isinstance(module, nn.Module) or obj.provenance.inst is not PseudoInst.INPUT_FN:
        return False
    before = vars(module).get(name, _ABSENT)
    plain = (bool, int, float, str, type(None))
    return before is not value and not (isinstance(value, plain) and type(before) is type(value) and before == value)
