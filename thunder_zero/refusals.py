"""Modules that ZeroTransform refuses, each with the sentence that says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from thunder_zero.compat.untraceable import UNTRACEABLE, Part
from thunder_zero.runtime.registry import is_transformed

from thunder import compile_data
from thunder.core.module import ThunderModule
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from thunder.transforms.cudagraph import CUDAGraphTransform


class UsedOnce(Protocol):
    """A transform that shards one module."""

    @property
    def used(self) -> bool:
        """Whether it already shards a module."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The kinds of submodules that its front end refuses."""


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


def captured_as_graphs(candidate: Candidate) -> str | None:
    if not any(isinstance(other, CUDAGraphTransform) for other in compile_data(candidate.model).transforms):
        return None
    return (
        f"{candidate.name} is transformed by CUDAGraphTransform (the plugin 'reduce-overhead') as well, which would "
        f"capture the collectives and replay them without the code that starts and ends them; leave it out"
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
        "nothing to shard; compile the module with thunder_zero.compile(module, ...), or thunder.compile with "
        "recipe=thunder_zero.Recipe(interpreter='thunder.fx')"
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


def transform_used_before(candidate: Candidate) -> str | None:
    if not candidate.transform.used:
        return None
    return f"the ZeroTransform given for {candidate.name} already shards a module; give each module a new ZeroTransform"


OWN_PARTS: tuple[Part, ...] = (
    Part(
        lambda module: isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None,
        "has max_norm",
        "forward writes to the weight, which is sharded",
        "normalise the rows in forward",
    ),
    Part(
        lambda module: isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse,
        "has sparse=True",
        "gradients are reduced as dense tensors",
        "use sparse=False",
    ),
    Part(
        lambda module: isinstance(module, nn.DataParallel),
        "is a DataParallel",
        "it splits batches in one process",
        "use the module inside of it",
    ),
    Part(
        lambda module: isinstance(module, DistributedDataParallel),
        "is a DistributedDataParallel",
        "it reduces gradients itself",
        "use the module inside of it",
    ),
)
PARTS = (*UNTRACEABLE, *OWN_PARTS)
DYNAMO_PARTS = tuple(part for part in PARTS if part.under_dynamo)


def uninitialised(candidate: Candidate) -> str | None:
    for path, tensor in (*candidate.module.named_parameters(), *candidate.module.named_buffers()):
        if is_lazy(tensor):
            return (
                f"{path!r} of {candidate.name} is a lazy module's and has no shape yet; call the module once with a "
                f"batch before thunder.jit"
            )
    return None


def untraceable_part(candidate: Candidate) -> str | None:
    return _untraceable(candidate.module, candidate.transform.parts)


def _untraceable(root: nn.Module, parts: tuple[Part, ...]) -> str | None:
    for path, module in root.named_modules():
        for part in parts:
            if part.is_it(module):
                where = f"submodule {path!r} of {type(root).__name__}" if path else type(root).__name__
                return f"{where} ({type(module).__name__}) {part.what}, and {part.why}; {part.instead}"
    return None


def require_traceable(module: nn.Module, parts: tuple[Part, ...]) -> None:
    """Refuse, when a sharded module is compiled or that failed, a submodule that became one of PARTS since.

    Raises:
        RuntimeError: naming the first; torch's ``update_bn``, for one, sets ``momentum=None``.
    """
    if sentence := _untraceable(module, parts):
        raise RuntimeError(sentence)


Refusal = Callable[[Candidate], str | None]  # the sentence, or None where there is nothing to refuse
REFUSALS: tuple[Refusal, ...] = (
    jitted_twice,
    transformed_twice,
    captured_as_graphs,
    sharded_by_thunder,
    graph_without_parameters,
    wrapped_in_ddp,
    sharded_before,
    transform_used_before,
    uninitialised,
    untraceable_part,
)
