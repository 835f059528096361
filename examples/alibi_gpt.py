"""A GPT without positions: attention with linear biases (ALiBi; Press et al., arXiv 2108.12409).

Each head subtracts its own slope times the distance from the scores, so that any length can be read. Packed texts share
a sequence; attention looks past their borders, as is usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class AlibiConfig:
    """Sizes of the model.

    Attributes:
        layers, width, hidden, heads: transformer blocks, features, features inside the perceptron, attention heads.
        vocabulary: number of tokens.
        dropout: probability, after the embedding and in each residual branch.
        checkpointed: compute each block's activations again in backward.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    dropout: float = 0.1
    checkpointed: bool = False


def slopes(heads: int) -> Tensor:
    """Return the heads' slopes: a geometric sequence from 2^(-8 / heads) to 2^-8, exact for powers of two."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


def biases(heads: int, tokens: int, like: Tensor) -> Tensor:
    """Return what is added to the scores, (heads, tokens, tokens): minus slope times distance, -inf for later
    tokens."""
    positions = torch.arange(tokens, device=like.device)
    distance = positions[:, None] - positions[None, :]
    bias = -slopes(heads).to(like.device)[:, None, None] * distance
    return bias.masked_fill(distance < 0, float("-inf")).to(like.dtype)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm, with dropout and a residual connection."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # (rows, tokens, width) -> the same
        rows, tokens, width = x.shape
        split = (rows, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(rows, tokens, width)))
        z: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))
        return z


class AlibiGPT(nn.Module):
    """A GPT that takes tokens and returns, for each position, the logits of the next token. The embedding is its
    head."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._draw)

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, tokens) -> (rows, tokens, vocabulary)
        x = self.dropout(self.embedding(tokens))
        bias = biases(self.config.heads, tokens.shape[1], x)
        for block in self.blocks:
            x = checkpoint(block, x, bias, use_reentrant=False) if self.config.checkpointed else block(x, bias)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=1 / sqrt(3 * self.config.width))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
