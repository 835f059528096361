"""Modules that ZeroTransform refuses, each with the sentence that says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thunder_zero.runtime.placeholders import is_all_nan
from thunder_zero.runtime.registry import is_transformed

from thunder import compile_data
from thunder.core.module import ThunderModule
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform


class UsedOnce(Protocol):
    """A transform that shards one module."""

    @property
    def used(self) -> bool:
        """Whether it already shards a module."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module that is about to be sharded.

    Attributes:
        model: the jitted module.
        module: the module that was jitted.
        transform: the one that shards it.
    """

    model: ThunderModule
    module: nn.Module
    transform: UsedOnce

    @property
    def name(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__


def require_untransformed(model: ThunderModule, transform: UsedOnce) -> None:
    """Refuse a module that we, Thunder or torch already shard, and a transform that already shards a module.

    Args:
        model: the jitted module.
        transform: the one that is about to shard it.

    Raises:
        RuntimeError: the module is already sharded, or is a copy of one; the transform was used before.
    """
    candidate = Candidate(model, model._model, transform)
    for refusal in REFUSALS:
        if sentence := refusal(candidate):
            raise RuntimeError(sentence)


def jitted_twice(candidate: Candidate) -> str | None:
    if not isinstance(candidate.module, ThunderModule):
        return None
    return (
        f"{type(candidate.module._model).__name__} is already jitted, and was given to thunder.jit again; give "
        f"thunder.jit the plain module, or apply thunder_zero.zero to the jitted one"
    )


def transformed_twice(candidate: Candidate) -> str | None:
    kinds = (type(candidate.transform), DDPTransform, FSDPTransform)
    others = [other for other in compile_data(candidate.model).transforms if isinstance(other, kinds)]
    if candidate.transform in others:
        others.remove(candidate.transform)  # once: a list that names it twice is refused
    if not others:
        return None
    return (
        f"{candidate.name} is transformed by {type(others[0]).__name__} as well, in the same list of transforms; apply "
        f"one of them, once, to the plain module"
    )


def sharded_by_thunder(candidate: Candidate) -> str | None:
    attributes = vars(candidate.module)
    if not (attributes.get("use_ddp") or attributes.get("use_fsdp")):
        return None
    return f"{candidate.name} is already sharded by thunder.distributed; build a new module for thunder_zero"


def graph_without_parameters(candidate: Candidate) -> str | None:
    module = candidate.module
    if not isinstance(module, torch.fx.GraphModule) or next(module.parameters(), None) is not None:
        return None
    return (
        "ZeroTransform was given a graph without parameters, as ThunderFX (thunder.dynamo) makes them, so there is "
        "nothing to shard; compile the module with thunder.jit(module, transforms=[...]) or thunder.compile"
    )


def wrapped_in_ddp(candidate: Candidate) -> str | None:
    if not isinstance(candidate.module, DistributedDataParallel):
        return None
    return "DistributedDataParallel already reduces gradients; give thunder.jit the module inside it"


def sharded_before(candidate: Candidate) -> str | None:
    if not any(map(is_transformed, candidate.module.parameters())):
        return None
    return (
        f"{candidate.name} is already transformed by ZeroTransform; use the model that the first transform returned, "
        f"or build a new module and a new ZeroTransform"
    )


def copied_from_sharded(candidate: Candidate) -> str | None:
    for path, param in candidate.module.named_parameters():
        if is_all_nan(param):
            return (
                f"every element of parameter {path!r} is NaN: {candidate.name} is a copy of a module that was "
                f"sharded, whose values moved to the shards; build a new module and load "
                f"thunder_zero.full_state_dict(model) into it"
            )
    return None


def hooked_in_backward(candidate: Candidate) -> str | None:
    for path, module in candidate.module.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return (
                f"submodule {path!r} of {candidate.name} has a backward hook, which would never be called, as backward "
                f"is one compiled program; remove it, or hook a parameter: model.get_parameter(...).register_hook(...)"
            )
    return None


def transform_used_before(candidate: Candidate) -> str | None:
    if not candidate.transform.used:
        return None
    return f"the ZeroTransform given for {candidate.name} already shards a module; give each module a new ZeroTransform"


Refusal = Callable[[Candidate], str | None]  # the sentence, or None where there is nothing to refuse
REFUSALS: tuple[Refusal, ...] = (
    jitted_twice,
    transformed_twice,
    sharded_by_thunder,
    graph_without_parameters,
    wrapped_in_ddp,
    sharded_before,
    copied_from_sharded,
    hooked_in_backward,
    transform_used_before,
)
