"""Traces of real modules save less and recompute more by mode, and the numbers stay equal bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_zero as tz
from examples.gpt import GPT, GPTConfig
from tests.harness.tiers import deep, slow
from thunder_zero.plan.policy import RECOMPUTE
from thunder_zero.schedule.ops import Free
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.operators import operator_of
from thunder_zero.traces.work import is_cheap

import thunder
from thunder.core.symbol import BoundSymbol

TEXTBOOK = replace(tz.ZERO3, reshard_after_forward=True)
TOKENS = torch.zeros(2, 6, dtype=torch.int64)


def small_gpt() -> GPT:
    return GPT(GPTConfig(2, 8, 2, 6))


@cache
def traces_of_gpt(mode: str) -> tz.tools.Traces:
    with torch.device("meta"):
        module = small_gpt()
    policy = replace(TEXTBOOK, recompute=mode)
    return tz.trace(module, TOKENS, policy=policy, world_size=2)


def saved_shapes(traces: tz.tools.Traces) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that forward saves for backward, without parameters and inputs."""
    result = traces.forward.bound_symbols[-1].args[1][0]
    written = {name for op in traces.forward_timeline.ops if isinstance(op, tz.schedule.Compute) for name in op.writes}
    return sorted(tuple(proxy.shape) for proxy in result if proxy.name in written)


# Numbers


class Block(nn.Module):
    """A block with values that recomputation could change: random, updated and overwritten ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(x)
        h = F.dropout(self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.3)), 0.5) * 2
        a, b = h.tanh(), h[..., 1:].sigmoid()
        h.mul_(3)
        return a.exp() * h.tanh() + b.exp().sum(-1, keepdim=True)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "blocks": lambda: (nn.Sequential(Block(), Block()), torch.randn(2, 3, 4, 4)),
    "GPT": lambda: (small_gpt(), torch.randint(0, 256, (2, 6))),
}


def run_two_steps(name: str, policy: tz.Policy) -> list[Tensor]:
    """Return the output, the gradients and the buffers after two steps."""
    torch.manual_seed(0)
    module, x = MODELS[name]()
    model: Any = thunder.jit(module, transforms=[tz.ZeroTransform(policy)])
    torch.manual_seed(1)
    for _ in range(2):
        y = model(x)
        y.square().mean().backward()
    return [y.detach(), *(param.grad for param in model.parameters()), *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("name", "stage", "modes"),
    [*slow(("blocks", 3, RECOMPUTE), ("blocks", 0, ("none", "units"))), *deep(("GPT", 3, RECOMPUTE))],
)
def test_the_numbers_stay_equal_bit_for_bit(name: str, stage: int, modes: tuple[str, ...]) -> None:
    plain, *others = (run_two_steps(name, tz.Policy(stage=stage, recompute=mode)) for mode in modes)
    assert all(tensor.isfinite().all() for tensor in plain)
    for other in others:
        torch.testing.assert_close(other, plain, rtol=0, atol=0)


# What is saved


@pytest.mark.slow
def test_a_gpt_saves_less_and_less() -> None:
    none, cheap, units = (Counter(saved_shapes(traces_of_gpt(mode))) for mode in RECOMPUTE)
    x, wide = (2, 6, 8), ((2, 6, 32), (12, 32))  # Thunder multiplies the first shape, aten a view of it as a matrix
    assert cheap.total() < none.total()
    assert sum(none[shape] for shape in wide) == 4, "each perceptron saves the input and the output of its GELU"
    assert sum(cheap[shape] for shape in wide) == 2, "only the input"
    assert set(units) - {(6,)} == {x, (2, 6, 1)}, "and the mean and deviation of the last norm"
    assert units[x] == 4, "the inputs of the blocks and the last norm, and that norm's output, since it has a bias"


class Outer(nn.Module):
    """Each layer saves ``len(x) * len(y)`` numbers, or ``4 * (len(x) + len(y))`` from which they can be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for first, second in zip(self.a, self.b, strict=True):
            a, b = first(x), second(y)
            table = (a[:, None] + b[None]).sum(-1).exp()
            x, y = a + table.mean(1, keepdim=True), b + table.mean(0)[:, None]
        return x.sum() + y.sum()


def moves(timeline: Timeline, backward: bool, *, with_frees: bool) -> list[tuple[str, tuple[str, ...]]]:
    ops = [op for op in timeline.ops if op.params and op.backward is backward]
    return [(op.kind, op.params) for op in ops if with_frees or not isinstance(op, Free)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cheap", "units"])
def test_launches_do_not_depend_on_shapes(mode: str) -> None:
    policy = replace(TEXTBOOK, recompute=mode)
    module = Outer()
    narrow, square = (
        tz.trace(module, torch.zeros(rows, 4), torch.zeros(64, 4), policy=policy, world_size=2) for rows in (1, 64)
    )
    assert len(saved_shapes(narrow)) != len(saved_shapes(square)), "the cuts differ"
    for backward in (False, True):
        lines = [moves(traces.timeline, backward, with_frees=mode == "cheap") for traces in (narrow, square)]
        assert {"gather", "reduce"} & {kind for kind, _ in lines[0]}
        assert lines[0] == lines[1]


# Lines


def lines_of(function: Callable[[Tensor], Tensor], x: Tensor) -> list[BoundSymbol]:
    """Return the lines by which torch computes a function."""

    class Applies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    lines = tz.trace(Applies(), x).forward.bound_symbols
    return [line for line in lines if operator_of(line) is not None]


X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.gelu(x), True),
        (lambda x: x.to(torch.bfloat16), True),
        (lambda x: x.to("meta"), False),
        (lambda x: x.transpose(0, 1), True),
        (lambda x: x.softmax(-1), True),
        (lambda x: F.layer_norm(x, (4,)), True),
        (lambda x: x.sum(-1), True),
        (lambda x: x.amax((1, 2)), True),
        (lambda x: x.sum(), False),
        (lambda x: x @ x.transpose(1, 2), False),
        (lambda x: F.dropout(x, 0.5), False),
        (lambda x: F.embedding(x.long(), x[0]), False),
        (lambda x: F.max_pool1d(x, 2), False),
    ],
)
def test_cheap_lines_are_recognised(function: Callable[[Any], Any], expected: bool) -> None:
    assert all(map(is_cheap, lines_of(function, X))) == expected
