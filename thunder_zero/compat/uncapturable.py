"""needed while: no front end captures ScriptModules, or hooks of composable checkpoints.

In: a module that is about to be sharded, or compiled. Out: nothing, or an error that names the submodule and an
alternative (:func:`require_traceable`)::

    submodule 'a' of Net (RecursiveScriptModule) is a ScriptModule, and no front end can capture it; use the module ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class RefusedPart:
    """A kind of submodule that is refused.

    Attributes:
        is_it: says whether a module is of this kind.
        what: what the module is or has, behind its name.
        instead: what to do.
        why: why it is refused.
    """

    is_it: Callable[[nn.Module], bool]
    what: str
    instead: str
    why: str = "Thunder cannot trace it"


def _has_composable_checkpoint(module: nn.Module) -> bool:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(hook.__module__ == "torch.distributed._composable.checkpoint_activation" for hook in hooks)


UNCAPTURABLE = (
    RefusedPart(
        _has_composable_checkpoint,
        "is under torch.distributed._composable.checkpoint",
        "call torch.utils.checkpoint.checkpoint(submodule, ..., use_reentrant=False) in forward",
        "no front end can capture its hooks",
    ),
    RefusedPart(
        lambda module: isinstance(module, torch.jit.ScriptModule),
        "is a ScriptModule",
        "use the module before torch.jit.script",
        "no front end can capture it",
    ),
)


def require_traceable(root: nn.Module, parts: tuple[RefusedPart, ...]) -> None:
    """Refuse submodules of these kinds.

    Call it again when a sharded module is compiled, or when that fails: a hook may have been registered meanwhile.

    Raises:
        RuntimeError: there is such a submodule.
    """
    for path, module in root.named_modules():
        for part in parts:
            if part.is_it(module):
                where = f"submodule {path!r} of {type(root).__name__}" if path else type(root).__name__
                raise RuntimeError(f"{where} ({type(module).__name__}) {part.what}, and {part.why}; {part.instead}")
