"""The schedule of a large model for GPUs, from a dry run: whole units travel, each behind the compute of another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Timeline
from thunder_zero.sizes import Sizes

WIDTH, HEADS, PAIRS, HIDDEN, VOCABULARY, TOKENS, BLOCKS = 4096, 32, 8, 14336, 128256, 2048, 3  # of Llama-3 8B
HALVES = (False, True)


class Block(nn.Module):
    """One of Llama-3 8B, without rotary embeddings: 416 MiB in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        narrow = WIDTH // HEADS * PAIRS
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before.forward(x)
        q, k, v = (
            part.forward(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        k, v = (part.repeat_interleave(HEADS // PAIRS, dim=1) for part in (k, v))
        x = x + self.o.forward(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.after.forward(x)
        return x + self.down.forward(F.silu(self.gate.forward(y)) * self.up.forward(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding.forward(tokens)
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(self.norm.forward(x))


def schedule(policy: tz.Policy) -> Timeline:
    with torch.device("meta"):
        module, tokens = Llama(), torch.zeros(1, TOKENS, dtype=torch.long)
    return tz.trace(module, tokens, policy=policy, world_size=8, device=tz.DEVICES["h100"]).timeline


def hidden_behind(timeline: Timeline, kind: Kind, *, backward: bool) -> Iterator[tuple[str, int]]:
    """For each launch of this kind in a half, by its unit and in order: the FLOPs between it and its wait."""
    waits = {op.reads[0]: at for at, op in enumerate(timeline.ops) if op.kind is Kind.WAIT}
    for at, op in enumerate(timeline.ops):
        if op.kind is kind and op.backward is backward:
            path = op.params[0]
            unit = timeline.plan.by_name[path].unit or path
            yield unit, sum(other.flops for other in timeline.ops[at : waits[op.writes[0]]])


def flops_of_a_block(timeline: Timeline, *, backward: bool) -> int:
    """Those of attention and of the seven matrices."""
    every = sum(op.flops for op in timeline.ops if op.backward is backward)
    head = 2 * TOKENS * WIDTH * VOCABULARY * (1 + backward)
    return (every - head) // BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(3, torch.bfloat16), (2, None)])
def test_each_collective_has_the_compute_of_a_unit_to_hide_behind(stage: int, dtype: torch.dtype | None) -> None:
    """But for what a half begins with, and for the last reductions, behind which no unit computes."""
    timeline = schedule(tz.Policy(stage, mixed_precision=tz.MixedPrecision(dtype, dtype)))
    blocks = [f"blocks.{number}" for number in range(BLOCKS)]
    for backward in HALVES:
        least = flops_of_a_block(timeline, backward=backward)
        gathers = list(hidden_behind(timeline, Kind.GATHER, backward=backward))
        if not backward:
            assert [unit for unit, _ in gathers] == ["embedding.weight", *blocks, "norm.weight", "head.weight"]
            assert all(flops >= least for _, flops in gathers[2:])
        elif stage == 3:
            again = [unit for unit, _ in gathers]
            assert again == blocks[len(again) - 1 :: -1]
            assert len(again) >= BLOCKS - 2
            assert all(flops >= least for _, flops in gathers)
    reductions = list(hidden_behind(timeline, Kind.REDUCE, backward=True))
    assert [unit for unit, _ in reductions] == ["head.weight", "norm.weight", *blocks[::-1], "embedding.weight"]
    assert all(flops >= least for _, flops in reductions[:-2])


@pytest.mark.slow
def test_a_unit_with_norms_in_another_dtype_travels_in_two_buckets() -> None:
    precision = tz.MixedPrecision(
        torch.bfloat16, overrides={f"*.{norm}": tz.MixedPrecision() for norm in ("before", "after")}
    )
    timeline = schedule(tz.Policy(3, mixed_precision=precision))
    buckets = [op.params for op in timeline.ops if op.kind in LAUNCHES and "blocks.1.down.weight" in op.params]
    assert {len(params) for params in buckets} == {7}
    least = flops_of_a_block(timeline, backward=False)
    inner = list(hidden_behind(timeline, Kind.GATHER, backward=False))[3:-2]
    assert len(inner) == 2 * BLOCKS - 2
    assert all(flops >= least for _, flops in inner)


def test_less_is_in_flight_where_the_state_leaves_little_memory() -> None:
    with torch.device("meta"):
        plan = tz.make_plan(Llama(), tz.Policy(3, mixed_precision=tz.MixedPrecision(torch.bfloat16)), 8, 0)
    unit, head = plan.unit_bytes["blocks.0"], 2 * WIDTH * VOCABULARY
    numel = sum(math.prod(param.shape) for param in plan.params)
    assert plan.state_bytes == 4 * 4 * numel // 8  # parameters, gradients and AdamW's two states
    roomy = replace(plan, memory_bytes=80 << 30).sizes
    assert roomy == Sizes(unit, 1, unit + head + (16 << 20), unit + head + (16 << 20))
    tight = replace(plan, memory_bytes=plan.state_bytes + (1 << 30)).sizes
    assert tight == Sizes(unit, 1, 1 << 28, 1 << 28)
    assert replace(plan, memory_bytes=1).sizes == Sizes(unit, 1, 0, 0)
    assert plan.sizes == Sizes(16 << 20, 2, 32 << 20, (32 << 20) - 1)  # of the CPU
