"""In the schedule of a large model for GPUs, whole units travel, each behind the compute of another unit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import thunder_zero as tz
from examples.bench.model import Size, make_model
from tests.harness.tiers import slow
from thunder_zero.plan.sizes import Sizes
from thunder_zero.schedule import Mesh, make_plan
from thunder_zero.schedule.ops import Compute, Launch, Wait
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.forecast.figures import Holds

# A GPT with the width and the vocabulary of Llama-3 8B; its blocks, 384 MiB in bfloat16, are about as large.
SIZE = Size(blocks=3, width=4096, heads=32, vocabulary=128256, sequences=1, tokens=2048)
BLOCKS = [f"blocks.{number}" for number in range(SIZE.blocks)]
SMALL = Size(blocks=4, width=64, heads=4, vocabulary=16, sequences=1, tokens=16)  # almost only blocks
BEFORE, AFTER = ["embedding", "positions"], ["norm", "head"]  # before and after the blocks


def make_inputs(size: Size) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return make_model(size), torch.zeros(1, size.tokens, dtype=torch.long)


def schedule(policy: tz.Policy) -> Timeline:
    return tz.trace(*make_inputs(SIZE), policy=policy, world_size=8, device="h100").timeline


def hidden_behind(timeline: Timeline, kind: str, *, backward: bool) -> Iterator[tuple[str, int]]:
    """Yield the unit of each launch of a kind in a phase, and the FLOPs between the launch and its wait."""
    waits = {op.reads[0]: index for index, op in enumerate(timeline.ops) if isinstance(op, Wait)}
    for index, op in enumerate(timeline.ops):
        if op.kind == kind and op.backward is backward:
            unit = timeline.plan.by_name[op.params[0]].unit or op.params[0].rpartition(".")[0]
            between = timeline.ops[index : waits[op.writes[0]]]
            yield unit, sum(other.flops for other in between if isinstance(other, Compute))


def flops_of_a_block(timeline: Timeline, *, backward: bool, size: Size = SIZE) -> int:
    """Those of attention and of the four matrices."""
    every = sum(op.flops for op in timeline.ops if isinstance(op, Compute) and op.backward is backward)
    head = 2 * size.tokens * size.width * size.vocabulary * (1 + backward)
    return (every - head) // size.blocks


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(3, torch.bfloat16), (2, None)])
def test_each_collective_has_the_compute_of_a_unit_to_hide_behind(stage: int, dtype: torch.dtype | None) -> None:
    """But for what a phase begins with, and for the last reductions, behind which no unit computes."""
    timeline = schedule(tz.Policy(stage, mixed_precision=tz.MixedPrecision(dtype, dtype)))
    forward, backward = (flops_of_a_block(timeline, backward=backward) for backward in (False, True))
    gathers = list(hidden_behind(timeline, "gather", backward=False))
    assert [unit for unit, _ in gathers] == [*BEFORE, *BLOCKS, *AFTER]
    assert all(flops >= forward for _, flops in gathers[3:])
    again = list(hidden_behind(timeline, "gather", backward=True))
    assert len(again) >= (SIZE.blocks - 2 if stage == 3 else 0)
    assert [unit for unit, _ in again] == BLOCKS[: len(again)][::-1]
    reductions = list(hidden_behind(timeline, "reduce", backward=True))
    assert [unit for unit, _ in reductions] == [*AFTER[::-1], *BLOCKS[::-1], *BEFORE[::-1]]
    assert all(flops >= backward for _, flops in again + reductions[:-3])


@pytest.mark.parametrize(("buckets", "dtype"), slow((1, None), (3, None), (1, torch.bfloat16)))
def test_backward_that_keeps_nothing_unsharded_holds_three_blocks(buckets: int, dtype: torch.dtype | None) -> None:
    # One block computes, one is gathered ahead, one is in flight. All collectives hide behind a block's compute.
    module, tokens = make_inputs(SMALL)
    precision = tz.MixedPrecision(dtype, dtype)
    policy = replace(tz.ZERO3, reshard_after_forward=True, prefetch=1, mixed_precision=precision)
    block = make_plan(module, policy, Mesh.of(8)).largest_block_bytes
    policy = replace(policy, bucket_bytes=block // buckets, in_flight_bytes=2 * block)
    traces = tz.trace(module, tokens, policy=policy, world_size=8)
    kinds = (Holds.GATHERED, Holds.FULL_GRADIENT)
    memory = tz.tools.memory(traces, backend="nccl")
    lines = zip(memory.alive, memory.lines, strict=True)
    most = max(sum(alive.get(kind, 0) for kind in kinds) for alive, line in lines if line.phase == "backward")
    assert 2.9 * block < most <= 3 * block
    timeline, inner = traces.timeline, [f"blocks.{number}" for number in range(1, SMALL.blocks)]
    least = flops_of_a_block(timeline, backward=True, size=SMALL)
    reductions = [flops for unit, flops in hidden_behind(timeline, "reduce", backward=True) if unit in inner]
    gathers = [flops for unit, flops in hidden_behind(timeline, "gather", backward=True) if unit in inner[:-1]]
    assert len(reductions) >= len(inner)
    assert len(gathers) >= len(inner) - 1
    assert min(reductions + gathers) >= least


@pytest.mark.slow
def test_a_unit_with_norms_in_another_dtype_travels_in_two_buckets() -> None:
    precision = tz.MixedPrecision(torch.bfloat16, overrides={"*.norm_?": tz.MixedPrecision()})
    timeline = schedule(tz.Policy(3, mixed_precision=precision))
    buckets = [op.params for op in timeline.ops if isinstance(op, Launch) and "blocks.1.down.weight" in op.params]
    assert [len(params) for params in buckets] == [8, 4, 8], "backward reads no biases"
    least = flops_of_a_block(timeline, backward=False)
    inner = list(hidden_behind(timeline, "gather", backward=False))[4:-2]
    assert len(inner) == 2 * SIZE.blocks - 2
    assert all(flops >= least for _, flops in inner)


def test_fewer_bytes_are_in_flight_if_the_state_leaves_little_memory() -> None:
    policy = tz.Policy(3, mixed_precision=tz.MixedPrecision(torch.bfloat16))
    plan = make_plan(make_inputs(SIZE)[0], policy, Mesh.of(8))
    unit, head = plan.unit_bytes["blocks.0"], 2 * SIZE.width * SIZE.vocabulary
    numel = sum(math.prod(param.shape) for param in plan.params)
    assert plan.state_bytes == 4 * 4 * numel // 8  # parameters, gradients and AdamW's two states
    roomy, little = (80 << 30, unit + head + (16 << 20)), (plan.state_bytes + (1 << 30), 1 << 28)
    for memory_bytes, in_flight in (roomy, little, (1, 0)):
        assert replace(plan, memory_bytes=memory_bytes).sizes == Sizes(unit, 1, in_flight, in_flight)
    assert plan.sizes == Sizes(16 << 20, 2, 32 << 20, (32 << 20) - 1)  # the sizes for CPUs


@pytest.mark.parametrize(
    ("dtype", "masked", "dropped", "kernel"),
    [
        (torch.bfloat16, False, 0.1, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, True, 0.0, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, 0.0, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_is_a_kernel_of_the_gpu_and_saves_no_quadratic_tensor(
    dtype: torch.dtype, masked: bool, dropped: float, kernel: str
) -> None:
    # Even with dropout, for which torch traces the formula on CPUs. Saved bytes grow linearly with the length.

    class Attends(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = super().forward(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind()
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if masked else None
            return scaled_dot_product_attention(query, key, value, mask, dropped).sum()

    def peak(length: int) -> int:
        with torch.device("meta"):
            module, x = Attends(32, 96, dtype=dtype), torch.empty(1, length, 32, dtype=dtype)
        traces = tz.trace(module, x, world_size=2, device="h100")
        assert traces.backward is not None
        called = {line.sym.name for trace in (traces.forward, traces.backward) for line in trace.bound_symbols}
        assert {name for name in called if "attention" in name} == {kernel, f"{kernel}_backward"}
        return tz.tools.memory(traces).peak

    assert masked or peak(2048) < 2.2 * peak(1024)
    assert peak(64) > 0
