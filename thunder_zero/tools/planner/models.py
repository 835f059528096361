"""What is planned: a model by its name (Llama 3, GPT-2), or a module with inputs, loss, blocks."""

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
from torch.nn import functional as F
from torch.utils._pytree import tree_iter

from thunder_zero.plan.policy import is_count
from thunder_zero.tools.from_file import module_and_inputs

THETA = 500_000.0  # base of Llama 3's rotary frequencies


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a decoder-only transformer; ``key_heads`` are those of keys and values, ``length`` is the tokens of
    a sequence, unless somebody asks for others."""

    blocks: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    length: int


class Attention(nn.Module):
    """Causal attention; several heads of queries share one of keys and values."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = sizes.heads, sizes.key_heads, sizes.width // sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, self.key_heads * self.head, bias=False)
        self.value = nn.Linear(sizes.width, self.key_heads * self.head, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Of (batch, length, width); ``turns`` are the cosines and sines of positions, or None."""
        batch, length, _ = x.shape
        query, key, value = (  # of this rank's heads
            linear(x).view(batch, length, -1, self.head).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if turns is not None:
            query, key = turned(query, *turns), turned(key, *turns)
        y = F.scaled_dot_product_attention(query, self._shared(key), self._shared(value), is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _shared(self, of_keys: Tensor) -> Tensor:
        """A head of keys or values for each head of queries."""
        if self.key_heads == self.heads:
            return of_keys
        batch, heads, length, head = of_keys.shape
        copies = of_keys.unsqueeze(2).expand(batch, heads, self.heads // self.key_heads, length, head)
        return copies.flatten(1, 2)


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Queries or keys, turned by their positions (rotary embedding)."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class GatedMlp(nn.Module):
    """Llama's two layers, of which one has a gate."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, length, width)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class LlamaBlock(nn.Module):
    """Attention and a gated MLP, each behind an RMSNorm."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention, self.mlp = Attention(sizes), GatedMlp(sizes)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Of (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """Llama 3: rotary positions, grouped queries, and a head of its own."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.blocks))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        head = sizes.width // sizes.heads
        angles = torch.outer(torch.arange(sizes.length), THETA ** -(torch.arange(0, head, 2) / head)).repeat(1, 2)
        for name, turns in (("cosines", angles.cos()), ("sines", angles.sin())):
            self.register_buffer(name, turns.to(torch.bfloat16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of (batch, length) tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, (self.cosines, self.sines))
        out: Tensor = self.head(self.norm(x))
        return out


class Gpt2Block(nn.Module):
    """Attention and an MLP, each behind a layer norm."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class Gpt2(nn.Module):
    """GPT-2's layout: learned positions, and an embedding that is the head, too."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Gpt2Block(sizes) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of (batch, length) tokens."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


@dataclass(frozen=True, slots=True)
class Known:
    """A model by name."""

    make: Callable[[ModelSizes], nn.Module]
    sizes: ModelSizes


# Llama 3: Dubey et al., The Llama 3 Herd of Models, 2024, table 3; its vocabulary has 128,256 entries.
KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "llama3-8b": Known(Llama, ModelSizes(32, 4096, 32, 8, 14336, 128256, 8192)),
        "llama3-70b": Known(Llama, ModelSizes(80, 8192, 64, 8, 28672, 128256, 8192)),
        "llama3-405b": Known(Llama, ModelSizes(126, 16384, 128, 8, 53248, 128256, 8192)),
        "gpt-1.3b": Known(Gpt2, ModelSizes(24, 2048, 16, 16, 8192, 50304, 1024)),
    }
)


def named(name: str, length: int) -> nn.Module:
    """A model of ``KNOWN`` for sequences of ``length`` tokens."""
    known = KNOWN[name]
    return known.make(replace(known.sizes, length=length))


def cross_entropy(logits: Tensor) -> Tensor:
    """The loss of next tokens, in float32; the targets are anybody's."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True, slots=True)
class Alike:
    """Blocks of one list that are alike, one after the other: the path of the list, and their names in it, in order."""

    path: str
    names: tuple[str, ...]

    def units(self, count: int) -> tuple[str, ...]:
        """Paths of the first blocks."""
        return tuple(f"{self.path}.{name}" if self.path else name for name in self.names[:count])


@dataclass(frozen=True)
class Subject:
    """A module to plan for.

    Attributes:
        module: it needs no values.
        args, kwargs: the arguments of its forward: one rank's share of a batch.
        loss: from what forward returns to the loss; None if nobody gave one.
        tokens: of one rank in a step.
        alike: the most of its blocks that are alike; None if none are.
        batch: rows of the inputs that could be fewer; 1 if the caller cannot choose them.
        build: Python that makes the module, for the code to paste: imports, if any, and one line.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
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


def subject_of(
    model: nn.Module | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    loss: Callable[[Any], Tensor] | None = None,
    length: int | None = None,
    micro_batch: int = 1,
) -> Subject:
    """Return what to plan: a module, a model by its name, a key of ``KNOWN``, or one that a function of a file makes,
    ``FILE.py:function``. Inputs are given for a module, and a loss for that or a file's. Of a model by name, ``length``
    is the tokens of a sequence (None: the model's), and ``micro_batch`` the sequences of one rank in a step."""
    if isinstance(model, nn.Module):
        if length is not None or micro_batch != 1:
            given = "micro_batch" if length is None else "sequence_length"
            raise ValueError(f"{given} belongs to models by name; change the shapes of the inputs")
        subject = of_module(model, args, kwargs, loss)
    elif not isinstance(model, str):
        raise TypeError(f"model is of type {type(model).__name__}; give a torch.nn.Module, a name, or FILE.py:function")
    elif args or kwargs:
        raise ValueError(f"{model} comes with inputs; give inputs with a module alone")
    elif ".py:" in model:
        subject = _of_file(model, length, micro_batch, loss)
    elif loss is not None:
        raise ValueError(f"{model} comes with a loss; give loss= with a model of your own")
    else:
        subject = _by_name(model, length, micro_batch)
    if not any(param.requires_grad for param in subject.module.parameters()):
        raise ValueError(f"{subject.name} has no parameter that requires a gradient; there is no training to plan")
    return subject


def _of_file(place: str, length: int | None, micro_batch: int, loss: Callable[[Any], Tensor] | None) -> Subject:
    if length is not None or micro_batch != 1:
        raise ValueError(f"{place} makes its own inputs; change their shapes there, not with other options")
    module, args = module_and_inputs(place)
    subject = of_module(module, args, loss=loss)
    return replace(subject, name=place, batch=1, build=f"module = ...  # yours: {place} returns it")


def _by_name(name: str, length: int | None, micro_batch: int) -> Subject:
    if name not in KNOWN:
        raise ValueError(f"there is no model {name!r}; choose {', '.join(KNOWN)}, or give FILE.py:function")
    length = KNOWN[name].sizes.length if length is None else length
    for what, count, of in (("sequence_length", length, "tokens"), ("micro_batch", micro_batch, "sequences")):
        if not is_count(count) or not count:
            raise ValueError(f"{what} is {count!r}; give a number of {of}, at least 1")
    with torch.device("meta"):
        module = named(name, length)
        tokens = torch.empty(micro_batch, length, dtype=torch.long)
    build = f'from thunder_zero.tools.planner.models import named\nmodule = named("{name}", {length})  # untrained'
    return replace(of_module(module, (tokens,), loss=cross_entropy), name=name, build=build)


def of_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    loss: Callable[[Any], Tensor] | None = None,
) -> Subject:
    """A module with its inputs. Tokens are the elements of the first tensor of whole numbers of two dimensions, or the
    rows of the first tensor."""
    tensors = [leaf for leaf in tree_iter((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    whole = [one for one in tensors if not one.is_floating_point() and one.ndim == 2]
    tokens = whole[0].numel() if whole else prod(tensors[0].shape[:-1]) if tensors else 1
    name = type(module).__name__
    batch = len(tensors[0]) if tensors and tensors[0].ndim > 1 else 1
    build = f"module = ...  # yours: the {name} that was planned"
    return Subject(name, module, args, kwargs, loss, tokens, alike_blocks(module), batch, build)


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
