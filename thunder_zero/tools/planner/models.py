"""Models by name for ``thunder-zero plan``, as plain torch modules: Llama 3 and a GPT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

THETA = 500_000.0  # base of Llama 3's rotary frequencies


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decoder-only transformer.

    Attributes:
        blocks, width, heads, key_heads, hidden, vocabulary: of the model; ``key_heads`` are those of keys and values.
        length: tokens of a sequence, unless somebody asks for others.
    """

    blocks: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    length: int


class Attention(nn.Module):
    """Causal attention; several heads of queries share one of keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = sizes.heads, sizes.key_heads, sizes.width // sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, self.key_heads * self.head, bias=False)
        self.value = nn.Linear(sizes.width, self.key_heads * self.head, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Of (batch, length, width); ``turns`` are the cosines and sines of positions, or None."""
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, self.head).transpose(1, 2)
        key, value = (
            linear(x).view(batch, length, self.key_heads, self.head).transpose(1, 2)
            for linear in (self.key, self.value)
        )
        if turns is not None:
            query, key = turned(query, *turns), turned(key, *turns)
        y = F.scaled_dot_product_attention(query, self._shared(key), self._shared(value), is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out

    def _shared(self, of_keys: Tensor) -> Tensor:
        """A head of keys or values for each head of queries."""
        if self.key_heads == self.heads:
            return of_keys
        batch, _, length, head = of_keys.shape
        copies = of_keys.unsqueeze(2).expand(batch, self.key_heads, self.heads // self.key_heads, length, head)
        return copies.reshape(batch, self.heads, length, head)


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Queries or keys, turned by their positions (rotary embedding)."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class LlamaBlock(nn.Module):
    """Attention and a gated MLP, each behind an RMSNorm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Of (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x), turns)
        y = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Llama 3: rotary positions, grouped queries, and a head of its own."""

    def __init__(self, sizes: Sizes) -> None:
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


class GptBlock(nn.Module):
    """Attention and an MLP, each behind a layer norm."""

    def __init__(self, sizes: Sizes) -> None:
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


class Gpt(nn.Module):
    """GPT-2's layout: learned positions, and an embedding that is the head, too."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(GptBlock(sizes) for _ in range(sizes.blocks))
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

    make: Callable[[Sizes], nn.Module]
    sizes: Sizes


# Llama 3: Dubey et al., The Llama 3 Herd of Models, 2024, table 3; its vocabulary has 128,256 entries.
KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "llama3-8b": Known(Llama, Sizes(32, 4096, 32, 8, 14336, 128256, 8192)),
        "llama3-70b": Known(Llama, Sizes(80, 8192, 64, 8, 28672, 128256, 8192)),
        "llama3-405b": Known(Llama, Sizes(126, 16384, 128, 8, 53248, 128256, 8192)),
        "gpt-1.3b": Known(Gpt, Sizes(24, 2048, 16, 16, 8192, 50304, 1024)),
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
