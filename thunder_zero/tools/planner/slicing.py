"""How torch slices models: those by name, and copies of a module without values.

::

    attention.query, key, value    columns: each rank has some heads           mlp.gate, up    columns
    attention.out                  rows: the outputs of all ranks are summed   mlp.down        rows

Between them each rank of Llama has a part of the sequence (sequence parallelism), so that norms and what they save are
in slices, too; so are its logits, by words, as for torch's ``loss_parallel``. GPT-2 has
all of it there, as its embedding is its head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from thunder_zero.tools.planner.models import Llama

Slicing = Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], object]

COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up", "up")
ROWS = ("attention.out", "mlp.down", "down")


def in_slices(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Slice a model of :data:`thunder_zero.tools.planner.models.KNOWN` over a mesh of one dimension."""
    makes = styles_of_llama if isinstance(module, Llama) else styles_of_gpt2
    return parallelize_module(module, mesh, makes())


def styles_of_llama() -> dict[str, ParallelStyle]:
    """Llama's, with a part of the sequence on each rank between its layers, and of the words in its logits."""
    part, whole = Shard(1), Replicate()
    return {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=part),
        **{f"blocks.*.{name}": SequenceParallel() for name in ("attention_norm", "mlp_norm")},
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(part, None), desired_input_layouts=(whole, None), use_local_output=False
        ),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole, use_local_output=False),
        **{f"blocks.*.{name}": ColwiseParallel() for name in COLUMNS[:-1]},
        **{f"blocks.*.{name}": RowwiseParallel(output_layouts=part) for name in ROWS[:-1]},
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1)),
    }


def styles_of_gpt2() -> dict[str, ParallelStyle]:
    """GPT-2's, with whole activations between its layers."""
    whole = Replicate()
    return {
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=whole, desired_input_layouts=whole, use_local_output=False
        ),
        **{f"blocks.*.{name}": ColwiseParallel() for name in (*COLUMNS[:3], "up")},
        **{f"blocks.*.{name}": RowwiseParallel() for name in (ROWS[0], "down")},
    }


def sliced_copy(module: nn.Module, mesh: DeviceMesh, how: Slicing) -> nn.Module:
    """Slice a copy without values, over a mesh of one dimension."""
    tensors = chain(module.parameters(), module.buffers())
    memo: dict[int, Any] = {id(each): _without_values(each) for each in tensors}
    copy = deepcopy(module, memo)
    if callable(how):
        how(copy, mesh)
    else:
        parallelize_module(copy, mesh, dict(how))
    return copy


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
