"""Modules that ZeroTransform refuses, each with the sentence that says why."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thunder_zero.runtime.placeholders import is_all_nan
from thunder_zero.runtime.registry import is_transformed

from thunder import compile_data
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform

Refusal = Callable[[nn.Module], str | None]  # the sentence, or None where there is nothing to refuse


def require_untransformed(model: ThunderModule, transform: Transform) -> None:
    """Refuse a module that we, Thunder or torch already shard.

    Args:
        model: the jitted module.
        transform: the one that is about to shard it.

    Raises:
        RuntimeError: the module is already sharded, or is a copy of one.
    """
    module: nn.Module = model._model
    sentences = [jitted_twice(module), transformed_twice(model, transform), *(refusal(module) for refusal in REFUSALS)]
    for sentence in filter(None, sentences):
        raise RuntimeError(sentence)


def jitted_twice(module: nn.Module) -> str | None:
    if not isinstance(module, ThunderModule):
        return None
    return (
        f"{type(module._model).__name__} is already jitted, and was given to thunder.jit again; give thunder.jit the "
        f"plain module, or apply thunder_zero.zero to the jitted one"
    )


def transformed_twice(model: ThunderModule, transform: Transform) -> str | None:
    kinds = (type(transform), DDPTransform, FSDPTransform)
    others = [other for other in compile_data(model).transforms if isinstance(other, kinds)]
    if transform in others:
        others.remove(transform)  # once: a list that names it twice is refused
    if not others:
        return None
    return (
        f"{type(model._model).__name__} is transformed by {type(others[0]).__name__} as well, in the same list of "
        f"transforms; apply one of them, once, to the plain module"
    )


def sharded_by_thunder(module: nn.Module) -> str | None:
    if not (vars(module).get("use_ddp") or vars(module).get("use_fsdp")):
        return None
    return f"{type(module).__name__} is already sharded by thunder.distributed; build a new module for thunder_zero"


def graph_without_parameters(module: nn.Module) -> str | None:
    if not isinstance(module, torch.fx.GraphModule) or next(module.parameters(), None) is not None:
        return None
    return (
        "ZeroTransform was given a graph without parameters, as ThunderFX (thunder.dynamo) makes them, so there is "
        "nothing to shard; compile the module with thunder.jit(module, transforms=[...]) or thunder.compile"
    )


def wrapped_in_ddp(module: nn.Module) -> str | None:
    if not isinstance(module, DistributedDataParallel):
        return None
    return "DistributedDataParallel already reduces gradients; give thunder.jit the module inside it"


def sharded_before(module: nn.Module) -> str | None:
    if not any(map(is_transformed, module.parameters())):
        return None
    return used_before(module)


def used_before(module: nn.Module) -> str:
    """The sentence about a module, or a ZeroTransform, that is used a second time."""
    return (
        f"{type(module).__name__} is already transformed by ZeroTransform; use the model that the first transform "
        f"returned, or build a new module and a new ZeroTransform"
    )


def copied_from_sharded(module: nn.Module) -> str | None:
    for path, param in module.named_parameters():
        if is_all_nan(param):
            return (
                f"every element of parameter {path!r} is NaN: {type(module).__name__} is a copy of a module that was "
                f"sharded, whose values moved to the shards; build a new module and load "
                f"thunder_zero.full_state_dict(model) into it"
            )
    return None


REFUSALS: tuple[Refusal, ...] = (
    sharded_by_thunder,
    graph_without_parameters,
    wrapped_in_ddp,
    sharded_before,
    copied_from_sharded,
)
