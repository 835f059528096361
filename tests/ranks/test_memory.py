"""Forecasts of memory equal the allocator's record of a step on two ranks, and ``tz.tools.fit`` keeps its budget.

``tests/one/test_memory.py`` tests the categories, ``tests/one/test_fit.py`` the choices of ``fit``. The
table in docs/memory.md has more models and settings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from examples.llama import Llama, LlamaConfig
from examples.tensor_memory import added_at_peak, bytes_held, parameters_of
from tests.harness.as_one_process import gather_objects
from tests.harness.errors import error_of
from tests.harness.models import fresh, sharded
from tests.harness.ranks import LONG, RanksPool
from tests.harness.tiers import deep
from tests.harness.traced import Chain, ResidualBlock, mean_square
from thunder_zero.comm.agree import on_rank_0

WIDTH, ROWS = 192, 48  # a float32 weight has 147,456 bytes, and so has an activation of the wide layer
SHAPE = (ROWS, WIDTH)
HALF = tz.MixedPrecision(torch.bfloat16)
Make = Callable[[], nn.Module]


def make_net(width: int = WIDTH) -> nn.Module:
    """Build residual layers with norms and biases."""
    blocks = (ResidualBlock(width, torch.nn.functional.gelu) for _ in range(3))
    return Chain(*(module for block in blocks for module in (nn.LayerNorm(width), block)))


def make_wide() -> nn.Module:
    """Build a net whose largest gradient is reduced when only the caller still holds the input."""
    return Chain(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 16))


def make_adapted() -> nn.Module:
    """Build frozen layers between two layers that train."""
    frozen = make_net().requires_grad_(False)
    return Chain(nn.Linear(WIDTH, WIDTH), frozen, nn.Linear(WIDTH, WIDTH))


def make_convolutional() -> nn.Module:
    """Build convolutions, which compute on copies of their operands."""
    return Chain(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 3, 2, padding=1))


def compare_peaks(
    rank: int, world_size: int, make: Make, shape: tuple[int, ...], policy: tz.Policy, deferring: bool
) -> None:
    """Compare the peaks of a second step without the optimizer; ``deferring`` holds gradients under no_sync."""
    module, x = fresh(make), torch.randn(shape)
    measured = measure_peak(sharded(module, policy), x, deferring=deferring)
    if rank == 0:
        traces = tz.trace(module, x, policy=policy, world_size=world_size, synced=not deferring)
        difference = tz.tools.memory(traces, loss=mean_square, accumulating=deferring).peak / measured - 1
        # The matmuls of bfloat16 have workspaces, which docs/memory.md lists.
        assert (-0.06 if policy.mixed_precision else -0.01) < difference < 0.01, difference


def measure_peak(model: nn.Module, x: Tensor, *, deferring: bool = False) -> int:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        mean_square(model(x)).backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    at_rest = bytes_held([*parameters_of(model), x])
    with model.no_sync() if deferring else nullcontext():
        if deferring:
            step()
            at_rest += sum(param.grad_bytes for param in tz.traces_of(model).plan.params)
        return at_rest + added_at_peak(step, torch.device("cpu"))


BYTEWISE = replace(tz.ZERO2, gather_format=tz.Int8(), reduce_format=tz.Int8())
CASES: dict[str, tuple[Make, tuple[int, ...], tz.Policy, bool]] = {
    "ddp": (make_wide, (128, 512), tz.DDP, False),
    "zero1": (make_net, SHAPE, tz.ZERO1, False),
    "zero2-deferring": (make_net, SHAPE, tz.ZERO2, True),
    "zero3": (make_net, SHAPE, tz.ZERO3, False),
    "zero3-bfloat16": (make_net, SHAPE, replace(tz.ZERO3, mixed_precision=HALF), False),
    "zero2-shares": (make_net, SHAPE, replace(tz.ZERO2, shares=(2, 1)), False),
    "zero2-int8": (make_net, SHAPE, BYTEWISE, False),
    "zero2-owned": (make_net, SHAPE, replace(tz.ZERO2, owned=("*.weight",)), False),
    "zero3-nf4": (make_adapted, SHAPE, replace(tz.ZERO3, frozen_format=tz.NF4()), False),
    "zero3-convolutions": (make_convolutional, (4, 32, 32, 32), tz.ZERO3, False),
}
DEEP_CASES = {"ddp-norms": (make_net, SHAPE, tz.DDP, False), "zero2": (make_net, SHAPE, tz.ZERO2, False)}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *deep(*DEEP_CASES)])
def test_the_forecast_is_what_the_allocator_counts(ranks_pool: RanksPool, case: str) -> None:
    ranks_pool.run(2, compare_peaks, *(CASES | DEEP_CASES)[case])


def make_llama() -> nn.Module:
    """Build a Llama of one layer, whose forward makes positions on a device that it names."""
    sizes: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256}
    return Llama(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2))


def measure_fused_llama(rank: int, world_size: int) -> int:
    tokens = torch.arange(128).view(2, 64)
    model = tz.compile(fresh(make_llama), tz.ZERO3, fuse="inductor")

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()

    step()
    model.zero_grad()
    return bytes_held([*parameters_of(model), *model.buffers(), tokens]) + added_at_peak(step, torch.device("cpu"))


@pytest.mark.slow
def test_the_forecast_of_a_fused_llama_is_what_the_allocator_counts(ranks_pool: RanksPool) -> None:
    tokens = torch.arange(128).view(2, 64)
    traces = tz.trace(fresh(make_llama), tokens, labels=tokens, world_size=2, fuse="inductor")
    forecast = tz.tools.memory(traces, loss=lambda output: output.loss).peak
    measured = ranks_pool.run(2, measure_fused_llama, timeout=LONG)[0]
    assert abs(forecast / measured - 1) < 0.03, (forecast, measured)


def print_on_one_rank(rank: int, world_size: int) -> None:
    traces = tz.trace(fresh(make_net, 8), torch.randn(2, 8), world_size=world_size)
    for chosen in range(world_size):
        file = StringIO()
        tz.print_trace(traces, file=file, rank=chosen)
        assert bool(file.getvalue()) is (rank == chosen)


def test_one_rank_prints(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, print_on_one_rank)


# tz.tools.fit


def fit_on_ranks(rank: int, world_size: int) -> None:
    module, x = fresh(make_net, 128), torch.randn(128, 128)
    refusal = error_of(lambda: tz.tools.fit(module, x, memory_bytes=1000, file=StringIO()))
    assert refusal.startswith("DoesNotFit: no policy fits into 0.98 KiB"), refusal
    budget = int(0.85 * tz.tools.memory(tz.trace(module, x, world_size=world_size), loss=mean_square).peak)
    policy = tz.tools.fit(module, x, memory_bytes=budget * (1 + rank), loss=mean_square, file=StringIO())
    policies = gather_objects((policy, refusal))
    assert policies == [(policy, refusal)] * world_size, policies
    peak = measure_peak(sharded(module, policy), x)
    assert peak <= budget, (peak, budget)


@pytest.mark.slow
def test_all_ranks_have_rank_0s_policy_which_fits(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, fit_on_ranks)


class TwoArguments(Exception):
    """An exception of two arguments that gives pickle only the first."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)
        self.second = second


def decide_on_rank_0(rank: int, world_size: int) -> None:
    calls: list[int] = []

    def decide(go_on: Callable[[], None]) -> int:
        for number in range(3):
            go_on()
            calls.append(number)
        return 7

    def fail(go_on: Callable[[], None]) -> int:
        go_on()
        raise ValueError("no")

    def fail_with_two(go_on: Callable[[], None]) -> int:
        raise TwoArguments("bad loss", 2)

    assert on_rank_0("the test", decide, every=0.0) == 7
    assert calls == ([] if rank else [0, 1, 2]), calls
    assert error_of(lambda: on_rank_0("the test", fail, every=0.0)) == "ValueError: no"
    text = "RuntimeError: rank 0 raised TwoArguments: bad loss; see its traceback" if rank else "TwoArguments: bad loss"
    assert error_of(lambda: on_rank_0("the test", fail_with_two)) == text


def test_ranks_wait_for_rank_0_and_get_its_error(ranks_pool: RanksPool) -> None:
    """Send an error as text if it cannot be pickled."""
    ranks_pool.run(2, decide_on_rank_0)
