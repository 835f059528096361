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
from tests.harness.traced import fuser
from thunder_zero.plan.policy import RECOMPUTE
from thunder_zero.schedule.timeline import Kind, Timeline
from thunder_zero.traces.work import is_cheap, updated_by

import thunder
import thunder.torch as ltorch

TEXTBOOK = replace(tz.ZERO3, reshard_after_forward=True)
TOKENS = torch.zeros(2, 6, dtype=torch.int64)


def small_gpt() -> GPT:
    return GPT(GPTConfig(2, 8, 2, 6))


@cache
def traces_of_gpt(mode: str, *, fused: bool = False, frontend: str = "dynamo") -> tz.tools.Traces:
    with torch.device("meta"):
        module = small_gpt()
    policy = replace(TEXTBOOK, recompute=mode)
    options = fuser(frontend) if fused else {}
    return tz.trace(module, TOKENS, policy=policy, world_size=2, frontend=frontend, **options)


def saved_shapes(traces: tz.tools.Traces) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that forward saves for backward, without parameters and inputs."""
    result = traces.forward.bound_symbols[-1].args[1][0]
    written = {name for op in traces.forward_timeline.ops if op.kind is tz.schedule.Kind.COMPUTE for name in op.writes}
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
@pytest.mark.parametrize("frontend", ["dynamo", "thunder"])
def test_a_gpt_saves_less_and_less(frontend: str) -> None:
    none, cheap, units = (Counter(saved_shapes(traces_of_gpt(mode, frontend=frontend))) for mode in RECOMPUTE)
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


def moves(timeline: Timeline, backward: bool, *, with_frees: bool) -> list[tuple[Kind, tuple[str, ...]]]:
    ops = [op for op in timeline.ops if op.params and op.backward is backward]
    return [(op.kind, op.params) for op in ops if with_frees or op.kind is not Kind.FREE]


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
        assert {Kind.GATHER, Kind.REDUCE} & {kind for kind, _ in lines[0]}
        assert lines[0] == lines[1]


# Fusers


class Slices(nn.Module):
    """Backward needs two columns, made from a wide tensor: Thunder would save that one, as one is fewer than two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        u, v = h[:, :1].exp() * 2, h[:, 1:2].exp()
        return self.b(x * 1.5).sum(-1, keepdim=True) * u * v


@pytest.mark.slow
def test_thunders_rematerialisation_is_on_only_where_it_saves_fewer_bytes() -> None:
    for mode in ("none", "cheap"):
        policy = tz.Policy(recompute=mode)
        x = torch.zeros(16, 8)
        traces = tz.trace(Slices(), x, policy=policy, world_size=2, frontend="thunder", **fuser("thunder"))
        assert any(line.sym.is_fusion for line in traces.forward.bound_symbols)
        assert (16, 64) not in saved_shapes(traces)
    gpt = traces_of_gpt(TEXTBOOK.recompute, fused=True, frontend="thunder")
    assert Counter(saved_shapes(gpt))[2, 6, 32] == 2


# Lines


def lines_of(function: Callable[..., Any], *args: Tensor) -> list[Any]:
    trace = thunder.trace()(function, *args)
    return [line for line in trace.bound_symbols if line.sym.name not in ("unpack_trivial", "python_return")]


X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: ltorch.gelu(x), True),
        (lambda x: ltorch.to(x, torch.bfloat16), True),
        (lambda x: ltorch.to(x, "meta"), False),
        (lambda x: ltorch.transpose(x, 0, 1), True),
        (lambda x: ltorch.softmax(x, -1), True),
        (lambda x: ltorch.layer_norm(x, (4,)), True),
        (lambda x: ltorch.sum(x, -1), True),
        (lambda x: ltorch.amax(x, (1, 2)), True),
        (lambda x: ltorch.softmax(x, 1), False),
        (lambda x: ltorch.sum(x), False),
        (lambda x: ltorch.matmul(x, ltorch.transpose(x, 1, 2)), False),
        (lambda x: ltorch.dropout(x, 0.5), False),
        (lambda x: ltorch.embedding(ltorch.to(x, torch.int64), x[0]), False),
        (lambda x: ltorch.max_pool1d(x, 2), False),
    ],
)
def test_cheap_lines_are_recognised(function: Callable[[Any], Any], expected: bool) -> None:
    assert all(map(is_cheap, lines_of(function, X))) == expected


def test_overwritten_values_are_recognised() -> None:
    (line,) = lines_of(lambda x, y: ltorch.copy_(x, y), X, X)
    assert "x" in [proxy.name for proxy in updated_by(line)]
    norm = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    timeline = tz.trace(norm, torch.zeros(2, 3, 4, 4), policy=tz.DDP, world_size=2, frontend="thunder").timeline
    running = {name for name in timeline.inputs if "running" in name}
    assert running
    assert running <= {name for op in timeline.ops for name in op.updates}
