"""FLOPs of lines beside torch's own counter, and the time of a traced step by arithmetic. No clock is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import thunder_zero as tz
from thunder_zero.schedule.timeline import Work

import thunder
from thunder.executors.torch_compile import torch_compile_ex

PAGE = Path(__file__).parents[2] / "docs/cost-model.md"
BATCH, LENGTH, HEADS, HEAD = 2, 5, 2, 4
WIDTH = HEADS * HEAD
NONE = tz.Policy(0, recompute="none")


class Attends(nn.Module):
    """A convolution, attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, WIDTH, 3, padding=1)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).transpose(1, 2)
        query, key, value = self.qkv(y).view(BATCH, LENGTH, 3 * HEADS, HEAD).transpose(1, 2).chunk(3, 1)
        y = y + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return y + self.down(F.gelu(self.up(y)))


class Convolves(nn.Module):
    """Convolutions with padding, stride and dilation, all of whose gradients are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, stride=2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Adds(nn.Module):
    """``addmm`` and ``baddbmm``, whose gradients torch computes."""

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


def flops(timeline: tz.Timeline, *works: Work) -> int:
    return sum(op.flops for op in timeline.ops if not works or op.work in works)


def trace(module: nn.Module, *args: Tensor, **how: Any) -> tz.Traces:
    return tz.trace(module, *args, **{"policy": NONE, "world_size": 2, **how})


X = torch.randn(BATCH, 3, LENGTH)


@pytest.mark.slow
def test_a_step_has_the_flops_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention decomposed, as torch counts it on CPUs: it does not count its flash attention there."""
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    module = Attends()
    with sdpa_kernel(SDPBackend.MATH):
        forward = counted(lambda: module(X))
        both = counted(lambda: module(X).sum().backward())
    traces = trace(module, X)
    assert flops(traces.forward_timeline) == forward
    assert flops(traces.timeline) == both
    assert traces.lifted is not None
    assert flops(traces.lifted) == both


@pytest.mark.slow
def test_flash_attention_has_the_flops_of_torch_formulas() -> None:
    traces = trace(Attends(), X)
    shape = (BATCH, HEADS, LENGTH, HEAD)
    assert flops(traces.forward_timeline, Work.ATTENTION) == sdpa_flop_count(shape, shape, shape)
    assert flops(traces.backward_timeline, Work.ATTENTION) == sdpa_backward_flop_count(shape, shape, shape, shape)


@pytest.mark.slow
def test_a_learned_mask_adds_the_products_of_its_gradient() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.zeros(1, HEADS, LENGTH, LENGTH + 1))

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)

    query, key = torch.randn(BATCH, HEADS, LENGTH, HEAD), torch.randn(BATCH, HEADS, LENGTH + 1, HEAD)
    traces = trace(Masked(), query, key, key)
    one = 2 * prod(query.shape) * (LENGTH + 1)  # a product of queries and keys, or of weights and values
    assert flops(traces.forward_timeline) == 2 * one
    assert flops(traces.backward_timeline) == 2 * one


@pytest.mark.slow
def test_convolutions_have_the_flops_that_torch_counts() -> None:
    module, x = Convolves(), torch.randn(2, 3, 9, 9)
    assert flops(trace(module, x).timeline) == counted(lambda: module(x).sum().backward()) > 0


@pytest.mark.slow
def test_added_products_have_the_flops_that_torch_counts_while_they_run() -> None:
    """Backward computes the products again, as Thunder does."""
    module, x = Adds(), torch.randn(5, 4)
    model = thunder.jit(module)
    model(x).sum().backward()  # compile
    assert flops(trace(module, x).timeline) == counted(lambda: model(x).sum().backward()) > 0


@pytest.mark.slow
def test_a_grouped_and_a_transposed_convolution_count_what_their_filters_meet() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped, self.transposed = nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose1d(6, 2, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.transposed(self.grouped(x))

    module, x = Grouped(), torch.randn(2, 4, 7)
    traces = trace(module, x)
    one = 2 * 2 * 6 * 5 * 2 * 3  # (batch, channels, length) of the grouped output, filters of (2, 3) in either layer
    assert flops(traces.forward_timeline) == counted(lambda: module(x)) == 2 * one
    assert flops(traces.backward_timeline) == one + 2 * one  # the input of the first needs no gradient


@pytest.mark.slow
def test_a_fused_region_has_the_flops_and_the_traffic_of_its_whole() -> None:
    module, x = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)), torch.randn(3, 4)
    plain, fused = trace(module, x), trace(module, x, executors=[torch_compile_ex])
    assert flops(plain.timeline) == flops(fused.timeline) == 2 * 3 * 4 * 8 * (2 + 3)  # x needs no gradient
    (region,) = (op for op in fused.forward_timeline.ops if op.flops)
    estimate = tz.estimate(fused, tz.DEVICES["h100"])
    cost = estimate.costs[fused.timeline.ops.index(region)]
    inputs = 4 * (3 * 4 + 2 * 4 * 8)
    assert cost.traffic_bytes == inputs + sum(fused.timeline.nbytes(name) for name in region.writes)


@pytest.mark.slow
def test_a_step_by_arithmetic() -> None:
    """Two layers without biases under ZeRO-3 on two ranks. A FLOP takes a second, a byte on the wire 10, memory 0."""
    rows, width = 3, 4
    module, x = (
        nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)),
        torch.ones(3, 4),
    )
    policy = tz.Policy(3, bucket_bytes=0, prefetch=0, gather_last_units_once=False, recompute="none")
    device = tz.Device("one", {"float32": 1.0}, 1e18, 1 << 30, inside=tz.Link(0.1))
    estimate = tz.estimate(tz.trace(module, x, policy=policy, world_size=2), device)
    product, half = 2 * rows * width**2, 4 * width**2 // 2
    assert estimate.flops == 5 * product
    assert estimate.compute_seconds == pytest.approx(5 * product)
    assert estimate.sent_bytes == 5 * half  # forward gathers two, backward the last one, and reduces two
    assert estimate.wire_seconds == {"inside": pytest.approx(5 * half * 10)}
    assert estimate.seconds == pytest.approx(estimate.compute_seconds + estimate.exposed_seconds)
    assert estimate.mfu == pytest.approx(5 * product / estimate.seconds)


@pytest.mark.slow
def test_work_done_again_is_no_work_of_the_model() -> None:
    units = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    module, x = nn.Sequential(*units), torch.ones(3, 8)
    policy = tz.Policy(3, recompute="none", unit_of=lambda module: ("0", "1"))
    plain = tz.estimate(trace(module, x, policy=policy), tz.DEVICES["h100"])
    again = tz.estimate(trace(module, x, policy=replace(policy, recompute="units")), tz.DEVICES["h100"])
    assert again.model_seconds == plain.model_seconds
    assert again.flops - plain.flops == 2 * 3 * 8 * 8  # the first product of the first unit


@pytest.mark.slow
def test_what_is_no_trace_or_no_device_is_refused() -> None:
    traces = trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match="estimate takes Traces, got Timeline; pass what trace or traces_of returns"):
        tz.estimate(traces.timeline, tz.DEVICES["h100"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="estimate takes a Device, got str"):
        tz.estimate(traces, "h100")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="TPU v2 has FLOP/s for bfloat16, but the step computes in 'float32'"):
        tz.estimate(traces, tz.DEVICES["tpu-v2"])


@pytest.mark.slow
def test_the_program_of_the_page_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    program, output = re.findall(r"```(?:python)?\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[:2]
    exec(compile(program, str(PAGE), "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == output


@pytest.mark.slow
def test_the_loss_and_the_optimizer_are_counted_operator_by_operator() -> None:
    """In bytes a second: 96 B of output, 128 B of a shard. SGD reads a parameter and its gradient, and writes it;
    with momentum the buffer too."""
    traces = tz.trace(nn.Linear(8, 8, bias=False), torch.ones(3, 8), policy=2, world_size=2)
    device = tz.Device("one", {"float32": 1e18}, 1.0, 1 << 30, inside=tz.Link(1.0))
    plain = tz.estimate(traces, device)
    of_sgd = tz.estimate(traces, device, optimizer=lambda params: torch.optim.SGD(params, 0.1))
    assert of_sgd.seconds - plain.seconds == 3 * 128
    of_momentum = tz.estimate(traces, device, optimizer=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
    assert of_momentum.seconds - plain.seconds == (2 + 3 + 3) * 128  # mul_, add_, add_
    with_loss = tz.estimate(traces, device, loss=lambda y: y.square().sum())
    added = [op for op in with_loss.timeline.ops if op not in traces.timeline.ops]
    # forward squares and sums; backward: a one, y to the power of 1, times 2, times the gradient (4 B, expanded)
    assert [str(op.work) for op in added] == ["pointwise", "reduction", "other", *["pointwise"] * 3]
    assert with_loss.seconds - plain.seconds == 192 + 100 + 8 + 192 + 192 + 196
    assert with_loss.timeline.ops.index(added[0]) == traces.timeline.border
    assert (with_loss.flops, with_loss.model_seconds) == (plain.flops, plain.model_seconds)
