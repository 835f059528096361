"""Named models, with functions that make them, losses, and plans for tensor parallelism.

::

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

from thunder_zero.tools.models.decoder import DecoderSizes, Gpt2, Llama


def cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean cross entropy over tokens, in float32. All targets are 0, since a plan has no data."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True)
class NamedModel:
    """A model that :func:`thunder_zero.tools.plan_training` makes itself, for sequences of any length.

    Attributes:
        name: the name in tables and messages.
        make: a function from the length of a sequence to a module. Its forward takes tokens (batch, length).
        sequence_length: the default number of tokens of a sequence.
        loss: a function from the result of forward to the loss (default: cross entropy of logits).
        tp_plan: a plan for torch's ``parallelize_module``, or None if the model cannot be sliced.
    """

    name: str
    make: Callable[[int], nn.Module] = field(repr=False)
    sequence_length: int
    loss: Callable[[Any], Tensor] = field(default=cross_entropy, repr=False)
    tp_plan: dict[str, ParallelStyle] | None = field(default=None, hash=False, repr=False)


COLUMNS = tuple(f"blocks.*.{name}" for name in ("attention.query", "attention.key", "attention.value"))
UP, GATE, DOWN, OUT = (f"blocks.*.{name}" for name in ("mlp.up", "mlp.gate", "mlp.down", "attention.out"))
PART, WHOLE = Shard(1), Replicate()  # activations: a part of the sequence, or the whole
LLAMA_STYLES: dict[str, ParallelStyle] = {
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
GPT2_STYLES: dict[str, ParallelStyle] = {
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=(WHOLE, None), desired_input_layouts=(WHOLE, None), use_local_output=False
    ),
    **{name: ColwiseParallel() for name in (*COLUMNS, UP)},
    **{name: RowwiseParallel() for name in (OUT, DOWN)},
}


def llama(name: str, sizes: DecoderSizes) -> NamedModel:
    """Return a Llama 3 of these sizes."""
    return NamedModel(name, lambda length: Llama(replace(sizes, length=length)), sizes.length, tp_plan=LLAMA_STYLES)


def gpt2(name: str, sizes: DecoderSizes) -> NamedModel:
    """Return a GPT-2 of these sizes."""
    return NamedModel(name, lambda length: Gpt2(replace(sizes, length=length)), sizes.length, tp_plan=GPT2_STYLES)


class NamedModels(dict[str, NamedModel]):
    """Models keyed by name. The text form has a line for each model."""

    def __repr__(self) -> str:
        return "".join(f"\n{name!r}: {model}" for name, model in self.items())


# Llama 3: Dubey et al., The Llama 3 Herd of Models, 2024, table 3; its vocabulary has 128,256 entries.
MODELS: Mapping[str, NamedModel] = MappingProxyType(
    NamedModels(
        (model.name, model)
        for model in (
            llama("llama3-8b", DecoderSizes(32, 4096, 32, 8, 14336, 128256, 8192)),
            llama("llama3-70b", DecoderSizes(80, 8192, 64, 8, 28672, 128256, 8192)),
            llama("llama3-405b", DecoderSizes(126, 16384, 128, 8, 53248, 128256, 8192)),
            gpt2("gpt-1.3b", DecoderSizes(24, 2048, 16, 16, 8192, 50304, 1024)),
        )
    )
)
