"""What is planned: a module, its inputs and loss; the same module with fewer blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from thunder_zero.policy import is_count
from thunder_zero.tools.from_file import module_and_inputs
from thunder_zero.tools.planner.models import KNOWN, cross_entropy, named


@dataclass(frozen=True, slots=True)
class Alike:
    """Blocks of one list that are alike, one after the other.

    Attributes:
        path: of the list.
        names: of the blocks in it, in order.
    """

    path: str
    names: tuple[str, ...]

    def units(self, count: int) -> tuple[str, ...]:
        """Paths of the first blocks."""
        return tuple(f"{self.path}.{name}" if self.path else name for name in self.names[:count])


@dataclass(frozen=True)
class Subject:
    """A module to plan for.

    Attributes:
        name: for messages and tables.
        module: it needs no values.
        inputs: the arguments of its forward: one rank's share of a batch.
        loss: from what forward returns to the loss; None if nobody gave one.
        tokens: of one rank in a step.
        alike: the most of its blocks that are alike; None if none are.
        batch: rows of the inputs that could be fewer; 1 if the caller cannot choose them.
        build: Python that makes the module, for the code to paste: imports, if any, and one line.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Any], Tensor] | None
    tokens: int
    alike: Alike | None
    batch: int
    build: str

    @property
    def blocks(self) -> int:
        """How many blocks are alike."""
        return len(self.alike.names) if self.alike else 0

    @contextmanager
    def with_blocks(self, count: int) -> Iterator[nn.Module]:
        """Inside the block, the module has this many of the alike blocks."""
        if self.alike is None or count >= self.blocks:
            yield self.module
            return
        members = self.module.get_submodule(self.alike.path)._modules
        everything = dict(members)
        gone = set(self.alike.names[count:])
        members.clear()
        kept = [(name, block) for name, block in everything.items() if name not in gone]
        is_numbered = all(name.isdecimal() for name in everything)
        members.update((str(at) if is_numbered else name, block) for at, (name, block) in enumerate(kept))
        try:
            yield self.module
        finally:
            members.clear()
            members.update(everything)


def subject_of(model: str, length: int | None, micro_batch: int) -> Subject:
    """A model by its name, or one that a function of a file makes, ``FILE.py:function``.

    Args:
        model: a key of ``KNOWN``, or a place.
        length: tokens of a sequence; None: the model's.
        micro_batch: sequences of one rank in a step.

    Raises:
        ValueError: there is no such model or function; ``length`` or ``micro_batch`` is no count, or does not apply.
        OSError: the file cannot be read.
    """
    if ".py:" in model:
        if length is not None or micro_batch != 1:
            raise ValueError(f"{model} makes its own inputs; change their shapes there, not with other options")
        made, inputs = module_and_inputs(model)
        build = f"module = ...  # yours: {model} returns it"
        return replace(of_module(made, *inputs), name=model, batch=1, build=build)
    known = KNOWN.get(model)
    if known is None:
        raise ValueError(f"there is no model {model!r}; choose {', '.join(KNOWN)}, or give FILE.py:function")
    length = known.sizes.length if length is None else length
    for what, count, of in (("sequence_length", length, "tokens"), ("micro_batch", micro_batch, "sequences")):
        if not is_count(count) or not count:
            raise ValueError(f"{what} is {count!r}; give a number of {of}, at least 1")
    with torch.device("meta"):
        module = named(model, length)
        tokens = torch.empty(micro_batch, length, dtype=torch.long)
    build = f'from thunder_zero.tools.planner.models import named\nmodule = named("{model}", {length})  # untrained'
    return replace(of_module(module, tokens, loss=cross_entropy), name=model, build=build)


def of_module(module: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> Subject:
    """A module with its inputs. Tokens are the elements of the first tensor of whole numbers of two dimensions, or the
    rows of the first tensor."""
    tensors = [leaf for leaf in tree_iter(inputs) if isinstance(leaf, Tensor)]
    whole = [one for one in tensors if not one.is_floating_point() and one.ndim == 2]
    tokens = whole[0].numel() if whole else prod(tensors[0].shape[:-1]) if tensors else 1
    name = type(module).__name__
    batch = len(tensors[0]) if tensors and tensors[0].ndim > 1 else 1
    build = f"module = ...  # yours: the {name} that was planned"
    return Subject(name, module, inputs, loss, tokens, alike_blocks(module), batch, build)


def alike_blocks(module: nn.Module) -> Alike | None:
    """The blocks in a row of one list, alike in all but their values, that have the most parameters."""
    best, most = None, 0
    for path, parent in module.named_modules():
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        for _, run in groupby(parent.named_children(), key=lambda child: _looks(child[1])):
            members = list(run)
            count = sum(param.numel() for _, child in members for param in child.parameters())
            if len(members) > 1 and count > most:
                best, most = Alike(path, tuple(name for name, _ in members)), count
    return best


def _looks(module: nn.Module) -> tuple[Any, ...]:
    """What alike modules have in common."""
    tensors: Sequence[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    shapes = tuple((name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in tensors)
    return type(module), repr(module), shapes
