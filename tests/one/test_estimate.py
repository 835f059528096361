"""FLOPs of lines equal torch's own count, and the time of a traced step equals arithmetic. No clock is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import thunder_zero as tz
from tests.harness.errors import all_refused
from tests.harness.traced import Chain, traced
from thunder_zero.schedule.ops import Compute, Work
from thunder_zero.tools.views.page.report import page_of

pytestmark = pytest.mark.slow

BATCH, LENGTH, HEADS, HEAD = 2, 5, 2, 4
FEATURES = HEADS * HEAD


class Attends(nn.Module):
    """A convolution, attention with two heads, an MLP, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, FEATURES, 3, padding=1)
        self.qkv, self.norm = nn.Linear(FEATURES, 3 * FEATURES), nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)
        self.last = nn.ConvTranspose1d(FEATURES, FEATURES, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(self.first.forward(x).transpose(1, 2))
        x = F.softmax(self.down.forward(F.gelu(self.up.forward(self.norm.forward(x)))), -1)
        return self.last.forward(x.transpose(1, 2))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv.forward(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


NONE = tz.Policy(0, recompute="none")
H100 = tz.tools.DEVICES["h100"]


class Adds(nn.Module):
    """Calls ``addmm`` and ``baddbmm``, whose gradients torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x, self.weight)
        return torch.baddbmm(y.unsqueeze(0), y.unsqueeze(0), self.weight.t().unsqueeze(0) @ self.weight.unsqueeze(0))


def counted(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def flops(timeline: tz.schedule.Timeline, *works: Work) -> int:
    computations = [op for op in timeline.ops if isinstance(op, tz.schedule.Compute)]
    return sum(op.flops for op in computations if not works or op.work in works)


def trace(module: nn.Module, *args: Tensor, **options: Any) -> tz.tools.Traces:
    return tz.trace(module, *args, **{"policy": NONE, "world_size": 2, **options})


def test_a_step_has_the_flops_that_torch_counts() -> None:
    module, x = Attends(), torch.randn(BATCH, 3, LENGTH)
    flash, shape = trace(module, x), (BATCH, HEADS, LENGTH, HEAD)
    assert flops(flash.forward_timeline, Work.ATTENTION) == sdpa_flop_count(shape, shape, shape)
    assert flops(flash.backward_timeline, Work.ATTENTION) == sdpa_backward_flop_count(shape, shape, shape, shape)
    # Torch counts attention on CPUs only if it is decomposed.
    with sdpa_kernel(SDPBackend.MATH):
        forward = counted(lambda: module(x))
        forward_and_backward = counted(lambda: module(x).sum().backward())
        traces = trace(module, x)
    assert traces.lifted is not None
    assert flops(traces.forward_timeline) == forward
    assert flops(traces.timeline) == flops(traces.lifted) == forward_and_backward


def test_a_learned_mask_adds_the_products_of_its_gradient() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.zeros(1, HEADS, LENGTH, LENGTH + 1))

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)

    query, key = torch.randn(BATCH, HEADS, LENGTH, HEAD), torch.randn(BATCH, HEADS, LENGTH + 1, HEAD)
    traces = trace(Masked(), query, key, key)
    product = 2 * prod(query.shape) * (LENGTH + 1)  # a product of queries and keys, or of weights and values
    assert flops(traces.forward_timeline) == 2 * product
    assert flops(traces.backward_timeline) == product  # only the mask needs a gradient


def test_convolutions_and_added_products_have_the_flops_that_torch_counts() -> None:
    convolutions = Chain(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, stride=2, dilation=2))
    for module, shape in ((convolutions, (2, 3, 9, 9)), (Adds(), (5, 4))):
        x = torch.randn(shape)
        assert flops(trace(module, x).timeline) == counted(lambda: module(x).sum().backward()) > 0  # noqa: B023


def test_grouped_and_transposed_convolutions_count_their_filters_products() -> None:
    module, x = Chain(nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose1d(6, 2, 3, stride=2)), torch.randn(2, 4, 7)
    traces = trace(module, x)
    product = 2 * (2 * 6 * 5) * (2 * 3)  # batch, channels and length of the grouped output, and filters of both layers
    assert flops(traces.forward_timeline) == counted(lambda: module(x)) == 2 * product
    assert flops(traces.backward_timeline) == product + 2 * product  # the input of the first needs no gradient


def narrow() -> nn.Module:
    return Chain(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def test_a_fused_region_has_the_flops_of_its_lines_and_the_traffic_of_its_borders() -> None:
    plain, fused = (traced(narrow, (3, 4), NONE, fused=fused) for fused in (False, True))
    assert flops(plain.timeline) == flops(fused.timeline) == 2 * 3 * 4 * 8 * (2 + 3)  # x needs no gradient
    (region,) = (op for op in fused.forward_timeline.ops if isinstance(op, Compute) and op.flops)
    cost = tz.tools.estimate(fused, H100).costs[fused.timeline.ops.index(region)]
    inputs = 4 * (3 * 4 + 2 * 4 * 8)
    assert cost.traffic_bytes == inputs + sum(fused.timeline.nbytes(name) for name in region.writes)


def test_a_step_takes_the_seconds_of_arithmetic() -> None:
    # Two layers under ZeRO-3 on two ranks. A FLOP takes a second, a byte on the wire 10, memory none.
    rows, width = 3, 4
    policy = tz.Policy(3, bucket_bytes=0, prefetch=0, reshard_after_forward=True, recompute="none")
    module = Chain(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    device = tz.tools.Device("one", {"float32": 1.0}, 1e18, 1 << 30, intra_node=tz.tools.Link(0.1))
    estimate = tz.tools.estimate(trace(module, torch.ones(rows, width), policy=policy), device)
    product, phase = 2 * rows * width**2, 4 * width**2 // 2
    assert estimate.flops == 5 * product
    assert estimate.compute_seconds == pytest.approx(5 * product)
    assert estimate.busiest_bytes == 5 * phase  # forward gathers two, backward the last one, and reduces two
    assert estimate.wire_seconds == {"shard": pytest.approx(5 * phase * 10)}
    assert estimate.seconds == pytest.approx(estimate.compute_seconds + estimate.exposed_seconds)
    assert estimate.mfu == pytest.approx(5 * product / estimate.seconds)


def test_a_step_of_a_site_has_its_share_of_the_exchanges(tmp_path: Path) -> None:
    with torch.device("meta"):
        module, x = narrow(), torch.empty(3, 4)
    outer = tz.Outer(sync_every=8, fragments=2, wire=tz.Int8(block=8))
    traces = trace(module, x, policy=2, outer=outer)
    plain, between = tz.tools.estimate(traces, H100), tz.tools.Link(1e6)
    estimate = tz.tools.estimate(traces, H100, between=between)
    sent = [2 * 2 * outer.wire.nbytes(8)] * 2  # both ranks send half of their 16 elements, twice
    assert estimate.seconds == pytest.approx(plain.seconds + sum(sent) / 1e6 / 8)
    assert (estimate.seconds_alone, estimate.busiest_bytes) == (plain.seconds, plain.busiest_bytes)
    assert estimate.exposed_on["site"] == pytest.approx(estimate.wire_seconds["site"])
    table = tz.tools.step_table(traces, device=H100, between=between)
    rows = table.rows(lambda row: row.over == "site")
    assert [(row.params, row.sent, row.lane) for row in rows] == [
        ((f"{name}.weight",), nbytes // 2, "site") for name, nbytes in zip("02", sent, strict=True)
    ]
    assert [row.exposed for row in rows] == pytest.approx([nbytes / 1e6 / 8 for nbytes in sent])
    assert rows[-1].end == estimate.seconds
    with pytest.raises(ValueError, match=r"runs no operation of the timeline: .*outer step, site"):
        table.wait_of(rows[0])
    assert "between 2 sites, an exchange of 48 B takes" in str(estimate).replace("\n ", "")
    page = page_of(traces, H100, between=between)
    assert page["programs"][0]["lanes"][-1] == "other sites"
    assert "waiting for other sites" in page["top"][0]["note"]
    tz.tools.save_timeline(tmp_path / "step.json", traces, device=H100, between=between)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    exchanges = [event for event in events if event["name"] == "outer.step()"]
    assert [event["args"]["sent_bytes"] for event in exchanges] == [row.sent for row in rows]
    assert sum(event["dur"] for event in exchanges) == pytest.approx(estimate.wire_seconds["site"] * 1e6)


def test_wrong_traces_and_devices_are_refused() -> None:
    traces = traced(narrow, (3, 4), NONE)
    of_timeline, on = partial(tz.tools.estimate, cast(Any, traces.timeline), H100), partial(tz.tools.estimate, traces)
    all_refused(
        (of_timeline, TypeError, ("estimate takes Traces, got Timeline", "what trace or traces_of returns")),
        (partial(on, H100, between="1mbit"), ValueError, ("between is '1mbit', and the step has no outer step",)),
        (partial(on, "tpu-v2"), ValueError, ("TPU v2 has FLOP/s for bfloat16, but the step", "'float32'")),
    )


def test_the_loss_and_the_optimizer_are_counted_operator_by_operator() -> None:
    # A byte takes a second; an output has 96 B, a shard 128 B. SGD reads a parameter and its gradient, and writes the
    # parameter; with momentum it also reads and writes the buffer.
    traces = traced(lambda: nn.Linear(8, 8, bias=False), (3, 8), 2)
    device = tz.tools.Device("one", {"float32": 1e18}, 1.0, 1 << 30, intra_node=tz.tools.Link(1.0))
    plain = tz.tools.estimate(traces, device)
    for momentum, buffers in ((0.0, 3), (0.9, 2 + 3 + 3)):  # mul_, add_, add_
        sgd = tz.tools.estimate(traces, device, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=momentum))
        assert sgd.seconds - plain.seconds == buffers * 128
    with_loss = tz.tools.estimate(traces, device, loss=lambda y: y.square().sum())
    added = [op for op in with_loss.timeline.ops if op not in traces.timeline.ops]
    # forward squares and sums; backward: a one, y to the power of 1, times 2, times the gradient (4 B, expanded)
    assert [str(op.work) for op in added] == ["pointwise", "reduction", *["pointwise"] * 4]
    assert with_loss.seconds - plain.seconds == 192 + 100 + 8 + 192 + 192 + 196
    assert with_loss.timeline.ops.index(added[0]) == traces.timeline.backward_start
    assert (with_loss.flops, with_loss.model_seconds) == (plain.flops, plain.model_seconds)
