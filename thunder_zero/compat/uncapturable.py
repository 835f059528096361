"""needed while: dynamo captures neither ScriptModules, FSDP1 nor hooks of composable checkpoints.

::

    submodule 'a' of Net (RecursiveScriptModule) is a ScriptModule, and dynamo cannot capture it; use the module ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


@dataclass(frozen=True, slots=True)
class RefusedPart:
    matches: Callable[[nn.Module], bool]  # a predicate that is True for modules of this kind
    fault: str  # the reason in an error message, behind the module's name
    action: str  # the alternative to use
    cause: str  # the reason why modules of this kind are refused


def _has_composable_checkpoint(module: nn.Module) -> bool:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(hook.__module__ == "torch.distributed._composable.checkpoint_activation" for hook in hooks)


UNCAPTURABLE = (
    RefusedPart(
        _has_composable_checkpoint,
        "is under torch.distributed._composable.checkpoint",
        "call torch.utils.checkpoint.checkpoint(submodule, ..., use_reentrant=False) in forward",
        "dynamo cannot capture its hooks",
    ),
    RefusedPart(
        lambda module: isinstance(module, torch.jit.ScriptModule),
        "is a ScriptModule",
        "use the module before torch.jit.script",
        "dynamo cannot capture it",
    ),
    RefusedPart(
        lambda module: isinstance(module, FullyShardedDataParallel),
        "is under FSDP1",
        "use the module inside of it",
        "it shards parameters itself",
    ),
)


def require_traceable(root: nn.Module, parts: tuple[RefusedPart, ...]) -> None:
    """Raise RuntimeError if a submodule of ``root`` is of a kind in ``parts``.

    Call this again when a sharded module is compiled, or when compiling fails, since a hook may have been registered.
    """
    for path, module in root.named_modules():
        for part in parts:
            if part.matches(module):
                where = f"submodule {path!r} of {type(root).__name__}" if path else type(root).__name__
                raise RuntimeError(f"{where} ({type(module).__name__}) {part.fault}, and {part.cause}; {part.action}")
