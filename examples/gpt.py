"""A byte-level GPT: a plain ``nn.Module``, without any code for ranks or shards.

Pre-norm transformer blocks (Radford et al., Language models are unsupervised multitask learners,
2019) with learned positions. The blocks are in a ``ModuleList``, so each is a unit by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        blocks: number of transformer blocks.
        width: features per token between the blocks.
        heads: number of attention heads; divides ``width``.
        context: most tokens in a sequence.
        tied: the output head uses the embedding's weight.

    Raises:
        ValueError: ``width`` is not a multiple of ``heads``, or a size is below 1.
    """

    blocks: int
    width: int
    heads: int
    context: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("blocks", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}; with heads={self.heads} it must be a multiple of {self.heads}")


class Attention(nn.Module):
    """Causal self-attention; one linear layer computes queries, keys and values of all heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width) -> the same
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, tokens, width / heads)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return mixed


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width) -> the same
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class GPT(nn.Module):
    """A GPT that takes bytes and returns, for each position, the logits of the next byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self._reset_parameters(config)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, tokens) -> (batch, tokens, 256)
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _reset_parameters(self, config: GPTConfig) -> None:
        """Draw small normal weights, smaller ones for layers that add to the residual stream; norms stay at 1.

        The deviation sqrt(2 / 5d) is from Nguyen and Salazar, Transformers without tears, 2019.
        """
        deviation = sqrt(2 / (5 * config.width))
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=deviation / sqrt(2 * config.blocks))
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=deviation)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
