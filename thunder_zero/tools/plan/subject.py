"""A module to plan for, with its inputs, its loss, and its identical blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_iter

from thunder_zero.plan.policy import is_count
from thunder_zero.tools.from_file import module_and_inputs
from thunder_zero.tools.models.named import MODELS, NamedModel


@dataclass(frozen=True)
class Subject:
    """A module to plan for."""

    name: str  # the name in tables and messages
    module: nn.Module  # the module. It may be on the meta device, since its values are never read.
    # args, kwargs: the arguments of forward, for one rank's share of a batch
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Tensor] | None  # a function from the outputs of forward to the loss, or None
    tokens: int  # number of tokens of one rank in a step
    alike: tuple[str, ...]  # the paths of the identical blocks of a list with the most parameters, if there are any
    batch: int  # number of rows of the inputs, or 1 if the caller cannot choose the number
    build: str  # a line of Python that makes the module, for the plan's code to paste
    tp_plan: Mapping[str, ParallelStyle] | None = None  # a named model's own plan for ``parallelize_module``

    @property
    def blocks(self) -> int:
        """The number of identical blocks."""
        return len(self.alike)

    @contextmanager
    def with_blocks(self, count: int) -> Iterator[nn.Module]:
        """Temporarily remove all but ``count`` of the identical blocks from the module."""
        if count >= len(self.alike):
            yield self.module
            return
        members = self.module.get_submodule(self.alike[0].rpartition(".")[0])._modules
        original, removed = dict(members), {path.rpartition(".")[2] for path in self.alike[count:]}
        kept = {name: block for name, block in original.items() if name not in removed}
        if all(name.isdecimal() for name in original):
            kept = {str(index): block for index, block in enumerate(kept.values())}
        members.clear()
        members.update(kept)
        try:
            yield self.module
        finally:
            members.clear()
            members.update(original)


def subject_of(
    model: nn.Module | NamedModel | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    loss: Callable[[Any], Tensor] | None = None,
    length: int | None = None,
    micro_batch: int = 1,
) -> Subject:
    """Return the subject that the arguments describe.

    ``model`` is a module, a named model or its key in ``MODELS``, or ``FILE.py:function``. ``length`` and
    ``micro_batch`` are options of a named model, and the other arguments those of a module or a file.
    """
    name = model.name if isinstance(model, NamedModel) else model
    if isinstance(model, nn.Module):
        if length is not None or micro_batch != 1:
            option = "micro_batch" if length is None else "sequence_length"
            raise ValueError(f"{option} belongs to models by name; change the shapes of the inputs")
        subject = of_module(model, args, kwargs, loss)
    elif not isinstance(model, NamedModel | str):
        raise TypeError(f"model is of type {type(model).__name__}; give a torch.nn.Module, a name, or FILE.py:function")
    elif args or kwargs:
        raise ValueError(f"{name} comes with inputs; give inputs with a module alone")
    elif isinstance(model, str) and ".py:" in model:
        if length is not None or micro_batch != 1:
            raise ValueError(f"{model} makes its own inputs; change their shapes there, not with other options")
        module, args, kwargs = module_and_inputs(model)
        build = f"module = ...  # yours: {model} returns it"
        subject = replace(of_module(module, args, kwargs, loss), name=model, batch=1, build=build)
    elif loss is not None:
        raise ValueError(f"{name} comes with a loss; give loss= with a model of your own")
    else:
        subject = _by_name(model, length, micro_batch)
    if not any(param.requires_grad for param in subject.module.parameters()):
        raise ValueError(f"{subject.name} has no parameter that requires a gradient; there is no training to plan")
    return subject


def _by_name(model: NamedModel | str, length: int | None, micro_batch: int) -> Subject:
    named = MODELS.get(model) if isinstance(model, str) else model
    if named is None:
        raise ValueError(f"there is no model {model!r}; choose {', '.join(MODELS)}, or give FILE.py:function")
    length = named.sequence_length if length is None else length
    for option, count, unit in (("sequence_length", length, "tokens"), ("micro_batch", micro_batch, "sequences")):
        if not is_count(count) or not count:
            raise ValueError(f"{option} is {count!r}; give a number of {unit}, at least 1")
    with torch.device("meta"):
        module = named.make(length)
        tokens = torch.empty(micro_batch, length, dtype=torch.long)
    if named is MODELS.get(named.name):
        build = f'module = tz.tools.MODELS["{named.name}"].make({length})  # untrained'
    else:
        build = f"module = ...  # yours: {named.name}, of {length} tokens"
    subject = of_module(module, (tokens,), loss=named.loss)
    return replace(subject, name=named.name, build=build, tp_plan=named.tp_plan)


def of_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    loss: Callable[[Any], Tensor] | None = None,
) -> Subject:
    """Return the subject of a module with its inputs.

    Tokens are the elements of the first integer tensor of two dimensions, or else the rows of the first tensor.
    """
    tensors = [leaf for leaf in tree_iter((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    integers = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.ndim == 2]
    tokens = integers[0].numel() if integers else prod(tensors[0].shape[:-1]) if tensors else 1
    name = type(module).__name__
    batch = len(tensors[0]) if tensors and tensors[0].ndim > 1 else 1
    build = f"module = ...  # yours: the {name} that was planned"
    return Subject(name, module, args, kwargs, loss, tokens, alike_blocks(module), batch, build)


def alike_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the successive identical blocks (equal except for values) with the most parameters."""
    best, best_count = tuple[str, ...](), 0
    for path, parent in module.named_modules():
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        for _, run in groupby(parent.named_children(), key=lambda child: _structure(child[1])):
            members = list(run)
            count = sum(param.numel() for _, child in members for param in child.parameters())
            if len(members) > 1 and count > best_count:
                best, best_count = tuple(f"{path}.{name}".lstrip(".") for name, _ in members), count
    return best


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for modules that differ only in values."""
    tensors: Sequence[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    return type(module), repr(module), shapes
