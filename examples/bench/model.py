"""The models that contestants train, their data, and the fewest bytes that a stage must send for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt import GPT, GPTConfig


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a model and of one rank's batch; ``family``: the repository's GPT, or the Llama of transformers."""

    blocks: int = 6
    width: int = 512
    heads: int = 8
    vocabulary: int = 4096
    sequences: int = 2  # per rank
    tokens: int = 128  # per sequence
    family: str = "gpt"


SIZES = {"gpt": Size(), "llama": Size(blocks=12, width=256, family="llama")}


class Words(nn.Module):
    """A Llama of transformers as the GPT is called."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # an extra

        sizes = {"num_hidden_layers": size.blocks, "hidden_size": size.width, "intermediate_size": 11 * size.width // 4}
        of_words = {"vocab_size": size.vocabulary, "num_attention_heads": size.heads, "use_cache": False}
        self.llama = LlamaForCausalLM(LlamaConfig(**sizes, **of_words))

    @property
    def blocks(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.llama.model.layers
        return layers

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.llama(input_ids=tokens).logits
        return logits


def make_model(size: Size) -> Any:
    """A float32 model with the same weights on every rank and in every call."""
    torch.manual_seed(0)
    if size.family == "llama":
        return Words(size)
    model = GPT(GPTConfig(size.blocks, size.width, size.heads, size.tokens))
    model.embedding = nn.Embedding(size.vocabulary, size.width)  # examples/gpt.py knows bytes only
    model.head = nn.Linear(size.width, size.vocabulary, bias=False)
    for table in (model.embedding, model.head):
        nn.init.normal_(table.weight, std=0.02)
    return model


def make_batch(size: Size, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens and targets, each (sequences, tokens)."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randint(size.vocabulary, (size.sequences, size.tokens + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(param.numel() * param.element_size() for param in model.parameters())


def is_spared(name: str) -> bool:
    """Whether backward does not read a parameter: embeddings, which are looked up, and biases, which are added."""
    return name.endswith("bias") or name.startswith(("embedding", "positions", "llama.model.embed"))


def spared_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that backward does not read."""
    return sum(param.numel() * param.element_size() for name, param in model.named_parameters() if is_spared(name))


def floor_bytes(stage: int, world_size: int, full: int, spared: int) -> float:
    """The fewest bytes that each rank sends in a step of a stage.

    With u = (W - 1) / W of the model's bytes: 2u for stages 0 to 2; for stage 3 one more u, which backward gathers
    again, except for ``spared`` bytes: parameters that backward does not read, or that stay unsharded.

    >>> [floor_bytes(stage, world_size=2, full=100, spared=10) for stage in (2, 3)]
    [100.0, 145.0]
    """
    share = (world_size - 1) / world_size
    return share * (2 * full if stage < 3 else 3 * full - spared)
