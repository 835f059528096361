"""Models by name, for plans and reports: plain decoder-only transformers, Llama 3 and GPT-2.

::

    tokens (batch, length)  -> embedding -> blocks: x + attention(norm(x)), x + mlp(norm(x)) -> norm -> head -> logits

    Llama   rotary positions, RMSNorm, a gated MLP, grouped queries, a separate head
    Gpt2    learned positions, LayerNorm, an MLP with biases, a head tied to the embedding

The plans for tensor parallelism::

    attention.query, key, value    columns: each rank has some heads           mlp.gate, up    columns
    attention.out                  rows: the outputs of all ranks are summed   mlp.down        rows

Between the layers of a Llama, each rank has a part of the sequence (sequence parallelism). So the inputs of norms and
the tensors that norms save are also sharded. Logits are sharded over the vocabulary, for torch's ``loss_parallel``.
Between the layers of a GPT-2, each rank has whole activations, since the embedding is also the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from thunder_zero.tools.printing.words import ByName

BASE = 500_000.0  # the base of Llama 3's rotary frequencies

Styles = dict[str, ParallelStyle]
Rotation = tuple[Tensor, Tensor]  # cosines and sines of each position, (length, size of a head)


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes of a decoder."""

    blocks: int  # number of blocks
    width: int  # size of a token's vector between blocks
    heads: int  # number of query heads
    key_heads: int  # number of key and value heads. Each head is shared by ``heads / key_heads`` query heads.
    hidden: int  # size of a token's vector inside an MLP
    vocabulary: int  # number of rows of the embedding
    length: int  # number of tokens of a sequence


class Attention(nn.Module):
    """Causal attention, with rotary positions if a rotation is given."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = sizes.heads, sizes.key_heads, sizes.width // sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, self.key_heads * self.head, bias=False)
        self.value = nn.Linear(sizes.width, self.key_heads * self.head, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Return the attention's output for ``x`` (batch, length, width), in the shape of ``x``."""
        batch, length, _ = x.shape
        linears = self.query, self.key, self.value
        # -1, because under tensor parallelism a rank has only a part of the heads.
        query, key, value = (linear(x).view(batch, length, -1, self.head).transpose(1, 2) for linear in linears)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        y = F.scaled_dot_product_attention(query, self._repeat(key), self._repeat(value), is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _repeat(self, x: Tensor) -> Tensor:
        """Repeat each key or value head for the query heads that share it."""
        if self.key_heads == self.heads:
            return x
        batch, heads, length, head = x.shape
        copies = x.unsqueeze(2).expand(batch, heads, self.heads // self.key_heads, length, head)
        return copies.flatten(1, 2)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate queries or keys by their positions (Su et al., RoFormer, 2021)."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class Mlp(nn.Module):
    """Llama's MLP if it is gated, ``down(silu(gate(x)) * up(x))``, or GPT-2's, ``down(gelu(up(x)))``."""

    def __init__(self, sizes: DecoderSizes, *, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False) if gated else None
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=not gated)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, sizes: DecoderSizes, norm: Callable[[int], nn.Module], *, gated: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(sizes.width), norm(sizes.width)
        self.attention, self.mlp = Attention(sizes), Mlp(sizes, gated=gated)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Return the block's output for ``x`` (batch, length, width), in the shape of ``x``."""
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """Llama 3."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, nn.RMSNorm, gated=True) for _ in range(sizes.blocks))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for name in ("cosines", "sines"):
            table = torch.empty(sizes.length, sizes.width // sizes.heads, dtype=torch.bfloat16)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the rotation of each position."""
        length, head = self.cosines.shape
        angles = torch.outer(torch.arange(length), BASE ** -(torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.cosines.copy_(angles.cos())
        self.sines.copy_(angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, length, vocabulary) of tokens (batch, length)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, (self.cosines, self.sines))
        out: Tensor = self.head(self.norm(x))
        return out


class Gpt2(nn.Module):
    """GPT-2, without dropout."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, nn.LayerNorm, gated=False) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, length, vocabulary) of tokens (batch, length)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean cross entropy over tokens, in float32. All targets are 0, since a plan has no data."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True)
class NamedModel:
    """A model that :func:`thunder_zero.tools.plan_training` makes itself, for sequences of any length.

    ``make`` is a function from the length of a sequence to a module, whose forward takes tokens (batch, length).
    ``tp_plan`` is a plan for torch's ``parallelize_module``, or None if the model cannot be sliced.
    """

    name: str  # the name in tables and messages
    make: Callable[[int], nn.Module] = field(repr=False)
    sequence_length: int  # the default number of tokens of a sequence
    loss: Callable[[Any], Tensor] = field(default=cross_entropy, repr=False)  # a function from the result of forward
    tp_plan: Styles | None = field(default=None, hash=False, repr=False)


COLUMNS = tuple(f"blocks.*.{name}" for name in ("attention.query", "attention.key", "attention.value"))
UP, GATE, DOWN, OUT = (f"blocks.*.{name}" for name in ("mlp.up", "mlp.gate", "mlp.down", "attention.out"))
PART, WHOLE = Shard(1), Replicate()  # activations: a part of the sequence, or the whole
LLAMA_STYLES: Styles = {
    "embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=PART),
    **{f"blocks.*.{name}": SequenceParallel() for name in ("attention_norm", "mlp_norm")},
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=(PART, None), desired_input_layouts=(WHOLE, None), use_local_output=False
    ),
    "blocks.*.mlp": PrepareModuleInput(input_layouts=PART, desired_input_layouts=WHOLE, use_local_output=False),
    **{name: ColwiseParallel() for name in (*COLUMNS, GATE, UP)},
    **{name: RowwiseParallel(output_layouts=PART) for name in (OUT, DOWN)},
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=PART, output_layouts=Shard(-1)),
}
GPT2_STYLES: Styles = {
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=(WHOLE, None), desired_input_layouts=(WHOLE, None), use_local_output=False
    ),
    **{name: ColwiseParallel() for name in (*COLUMNS, UP)},
    **{name: RowwiseParallel() for name in (OUT, DOWN)},
}


def _decoder(name: str, kind: Callable[..., nn.Module], styles: Styles, sizes: DecoderSizes) -> NamedModel:
    return NamedModel(name, lambda length: kind(replace(sizes, length=length)), sizes.length, tp_plan=styles)


# Llama 3: Dubey et al., The Llama 3 Herd of Models, 2024, table 3; its vocabulary has 128,256 entries.
DECODERS = (
    _decoder("llama3-8b", Llama, LLAMA_STYLES, DecoderSizes(32, 4096, 32, 8, 14336, 128256, 8192)),
    _decoder("llama3-70b", Llama, LLAMA_STYLES, DecoderSizes(80, 8192, 64, 8, 28672, 128256, 8192)),
    _decoder("llama3-405b", Llama, LLAMA_STYLES, DecoderSizes(126, 16384, 128, 8, 53248, 128256, 8192)),
    _decoder("gpt-1.3b", Gpt2, GPT2_STYLES, DecoderSizes(24, 2048, 16, 16, 8192, 50304, 1024)),
)
MODELS: Mapping[str, NamedModel] = MappingProxyType(ByName((model.name, model) for model in DECODERS))
