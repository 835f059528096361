"""Types of our own traces' lines: right programs have no fault, wrong ones are named with the user's line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import thunder_zero as tz
from tests.harness.tiers import slow
from thunder_zero.spmd.of_trace import types_of_trace
from thunder_zero.tools.models import DecoderSizes

SIZES = DecoderSizes(blocks=2, width=16, heads=8, key_heads=4, hidden=32, vocabulary=24, length=6)


class Heads(nn.Module):
    """Two slices with a norm of each head between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.RMSNorm(4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (-1, 4))
        return self.down(self.norm(heads).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


MLP: Mapping[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE: Mapping[str, Any] = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Replicate()),
}
X, TOKENS = (2, 4, 8), (2, 6)


def traced(
    build: Callable[[], nn.Module], styles: Mapping[str, Any], shape: tuple[int, ...], stage: int = 3, rank: int = 0
) -> tz.tools.Traces:
    inputs = torch.zeros(shape, dtype=torch.int64) if len(shape) == 2 else torch.zeros(shape)
    with tz.tools.fake_mesh((2, 2), rank=rank) as mesh:
        module = parallelize_module(build(), mesh["tp"], dict(styles))
        return tz.trace(module, inputs, policy=stage, mesh=mesh)


@cache
def traced_mlp(stage: int = 3) -> tz.tools.Traces:
    return traced(Mlp, MLP, X, stage)


@pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
def test_slices_of_a_layer_have_the_types_of_the_plan(stage: int) -> None:
    types = types_of_trace(traced_mlp(stage))
    assert types.faults == ()
    assert types.gradients == {
        **dict.fromkeys(("norm.weight", "norm.bias", "down.bias"), "R"),
        **dict.fromkeys(("up.weight", "up.bias", "down.weight"), "S"),
    }
