"""A Llama that needs no library, with the names of Hugging Face's.

    thunder-zero report examples/llama.py:large --beside 2      # a picture of a step of a larger one
    thunder-zero plan examples/llama.py:large

Root mean square norms, rotary positions, query heads that share heads of keys and values, and gated layers (Touvron et
al., LLaMA: Open and efficient foundation language models, 2023). Parameters have the names and shapes of transformers'
``LlamaForCausalLM``, so ``tz.ZeroTransform(weights=folder)`` reads the folder of a trained model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the model, by the names of transformers' config.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: features of a token between the layers.
        intermediate_size: features inside a gated layer.
        num_hidden_layers: number of layers.
        num_attention_heads: of queries; divides ``hidden_size``.
        num_key_value_heads: of keys and values; divides the heads of queries.
        tie_word_embeddings: the output layer uses the embedding's weight.
        rms_norm_eps: is added to a mean square.
        rope_theta: the longest wave of a rotary position, in tokens, divided by 2 pi.
    """

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 192
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass
class Output:
    """What the model returns; no loss without labels."""

    loss: Tensor | None
    logits: Tensor


class RMSNorm(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(config.hidden_size)), config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (batch, tokens, features) -> the same
        batch, tokens, _ = x.shape
        q, k, v = (
            projection(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin).repeat_interleave(self.groups, 1)
        y = F.scaled_dot_product_attention(q, k, v.repeat_interleave(self.groups, 1), is_causal=True)
        mixed: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1))
        return mixed


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config), RMSNorm(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Layers(nn.Module):
    """All layers between tokens and the last norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        cos, sin = waves(self.config, tokens)
        for layer in self.layers:
            x = layer(x, cos.to(x.dtype), sin.to(x.dtype))
        y: Tensor = self.norm(x)
        return y


class Llama(nn.Module):
    """A Llama that takes tokens, and labels for a loss: the mean cross-entropy of each next label."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = Layers(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits: Tensor = self.lm_head(self.model(input_ids))
        if labels is None:
            return Output(None, logits)
        words = logits.shape[-1]
        return Output(F.cross_entropy(logits[:, :-1].reshape(-1, words).float(), labels[:, 1:].reshape(-1)), logits)


def waves(config: LlamaConfig, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of each position, (tokens, features of a head)."""
    places = torch.arange(0, config.head_dim, 2, device=tokens.device).float() / config.head_dim
    positions = torch.arange(tokens.shape[1], device=tokens.device).float()
    angles = positions[:, None] * config.rope_theta**-places
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features, (first half, second half), by the angles of their positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class WithLoss(nn.Module):
    """A model that returns only its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def large() -> tuple[nn.Module, Tensor]:
    """Return a Llama of 8 layers and its input, without values, for ``thunder-zero report`` and ``thunder-zero
    plan``."""
    config = LlamaConfig(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, tie_word_embeddings=True)
    with torch.device("meta"):
        return WithLoss(Llama(config)), torch.zeros(4, 1024, dtype=torch.long)
