"""The models and settings whose memory is forecast and measured (``memory.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz  # before thunder
from examples.bench.model import Size, loss_of, make_batch, make_model
from examples.gpt import GPT, GPTConfig
from examples.llama import Llama, LlamaConfig

SEQUENCES, TOKENS, VOCABULARY = 2, 128, 4096
IMAGES, PIXELS, CLASSES = 4, 64, 100


@dataclass(frozen=True, slots=True)
class Task:
    """A model and what it is trained on.

    Attributes:
        model: makes it.
        inputs: keyword arguments of forward; one batch.
        loss: from what forward returns; closes over the targets.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Tensor]]
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A task, and how it is run.

    Attributes:
        task: a key of ``TASKS``.
        policy: how it is sharded.
        world_size: number of ranks.
        fused: with ``fuse="inductor"``.
        deferring: measures the second micro-batch under ``no_sync``.
        training: False: forward alone, under ``torch.no_grad``.
        peer: a key of ``PEERS``, which trains the same and is measured beside it; "" for none.
    """

    task: str
    policy: tz.Policy
    world_size: int = 2
    fused: bool = False
    deferring: bool = False
    training: bool = True
    peer: str = ""

    @property
    def words(self) -> str:
        """What is special about it, such as "GPT, stage 3, 3 ranks"; a name in tables and data files."""
        special = {
            f"{self.world_size} ranks": self.world_size != 2,
            "inductor": self.fused,
            f"recompute {self.policy.recompute}": self.policy.recompute != tz.ZERO3.recompute,
            "bfloat16": self.policy.mixed_precision != tz.MixedPrecision(),
            "no_sync": self.deferring,
            "forward alone": not self.training,
        }
        return ", ".join((self.task, f"stage {self.policy.stage}", *(word for word, holds in special.items() if holds)))

    @property
    def options(self) -> dict[str, Any]:
        """Those of ``tz.compile``."""
        return {"fuse": "inductor"} if self.fused else {}


def small_gpt() -> nn.Module:
    """A GPT of 4 blocks that knows bytes only."""
    torch.manual_seed(0)
    return GPT(GPTConfig(SMALL.blocks, SMALL.width, SMALL.heads, SMALL.tokens))


def tokens_of(size: Size) -> Callable[[], Mapping[str, Tensor]]:
    return lambda: {"tokens": make_batch(size, rank=0)[0]}


def next_token_loss(size: Size) -> Callable[[Tensor], Tensor]:
    return lambda logits: loss_of(logits, make_batch(size, rank=0)[1])


class Checkpointed(nn.Module):
    """A block whose activations backward computes again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


def checkpointed_gpt() -> nn.Module:
    model = make_model(Size())
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


def fsdp2(model: nn.Module) -> nn.Module:
    """Shard a GPT by blocks; parameters are freed after forward and after backward."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    return model


def fsdp2_checkpointed(model: nn.Module) -> nn.Module:
    """The same, and backward computes every block again."""
    blocks = model.get_submodule("blocks")
    for name, block in list(blocks.named_children()):
        blocks.register_module(name, checkpoint_wrapper(block.block if isinstance(block, Checkpointed) else block))
    return fsdp2(model)


def llama() -> nn.Module:
    """A Llama of 4 layers, with tied embeddings and grouped-query attention."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Llama(config)


def llama_inputs() -> Mapping[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
    return {"input_ids": tokens, "labels": tokens}


class Encoder(nn.Module):
    """Attention over all patches and a two-layer perceptron, each with a norm before it and a connection around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, patches, width = x.shape
        shape, h = (batch, patches, self.heads, width // self.heads), self.norm_1(x)
        q, k, v = (layer(h).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, patches, width)
        x = x + self.out(mixed)
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class ViT(nn.Module):
    """A vision transformer of 4 layers."""

    def __init__(self, width: int = 192, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.start = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (PIXELS // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.ModuleList(Encoder(width, heads=3) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.start.expand(len(x), -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


class Residual(nn.Module):
    """Two convolutions with batch norm, and a connection around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.second(F.relu(self.norm_1(self.first(x)))))
        return F.relu(y + self.around(x))


class ResNet(nn.Module):
    """Six residual blocks; takes images and returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        self.blocks = nn.Sequential(*(Residual(*width) for width in widths))
        self.head = nn.Linear(256, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


def class_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(IMAGES))


def images(name: str) -> Callable[[], Mapping[str, Tensor]]:
    return lambda: {name: torch.randn(IMAGES, 3, PIXELS, PIXELS)}


BENCH, SMALL = Size(), Size(blocks=4, width=256, heads=4, vocabulary=256)
TASKS = {
    "small GPT": Task(small_gpt, tokens_of(SMALL), next_token_loss(SMALL)),
    "GPT": Task(lambda: make_model(BENCH), tokens_of(BENCH), next_token_loss(BENCH)),
    "GPT, checkpointed": Task(checkpointed_gpt, tokens_of(BENCH), next_token_loss(BENCH)),
    "Llama": Task(llama, llama_inputs, lambda output: output.loss),
    "ViT": Task(ViT, images("images"), class_loss),
    "ResNet": Task(ResNet, images("images"), class_loss),
}
PEERS = {"FSDP2": fsdp2, "FSDP2, checkpoint_wrapper": fsdp2_checkpointed}
BFLOAT16 = tz.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
STAGES = (tz.ZERO1, tz.ZERO2, tz.ZERO3)
NONE, UNITS = replace(tz.ZERO3, recompute="none"), replace(tz.ZERO3, recompute="units")
CASES = (
    *(Case("small GPT", policy) for policy in STAGES[:2]),
    Case("small GPT", tz.ZERO3, peer="FSDP2"),
    Case("small GPT", NONE),
    Case("small GPT", UNITS, peer="FSDP2, checkpoint_wrapper"),
    Case("small GPT", tz.ZERO3, fused=True),
    *(Case("GPT", policy) for policy in STAGES[:2]),
    Case("GPT", tz.ZERO3, peer="FSDP2"),
    Case("GPT", NONE),
    Case("GPT", UNITS, peer="FSDP2, checkpoint_wrapper"),
    Case("GPT", tz.ZERO3, world_size=3),
    Case("GPT", tz.ZERO3, fused=True),
    Case("GPT, checkpointed", tz.ZERO3, peer="FSDP2, checkpoint_wrapper"),
    Case("GPT", tz.ZERO2, deferring=True),
    Case("GPT", replace(tz.ZERO3, mixed_precision=BFLOAT16)),
    Case("GPT", tz.ZERO3, training=False),
    *(Case(name, policy) for name in ("Llama", "ViT", "ResNet") for policy in STAGES),
    Case("Llama", tz.ZERO3, fused=True),
)
