"""Models that dynamo captures train as one process: with graph breaks, and with modules that Thunder cannot trace."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import thunder_zero as tz
from tests.harness.as_one_process import trains_as_one_process
from tests.harness.errors import error_of
from tests.harness.loops import deferred_steps
from tests.harness.models import Halves, Zoo, count_sends, fresh
from tests.harness.ranks import RanksPool
from thunder_zero.capture.zero_module import captured_forward

pytestmark = pytest.mark.slow

WIDTH = 9  # of Zoo's inputs


class Layers(nn.Module):
    """Three layers of one class, each with a graph break in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Halves(WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Listed(nn.Module):
    """A module that reads parameters from a list, from a dict, and in a loop over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = x @ weight
        for param in self.parameters():
            x = x + param.reshape(-1)[:WIDTH]
        return x * self.named["scale"]


def make_hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, output: output.relu())
    return layer


class Router(nn.Module):
    """A module that works in place, also on a value that graph after graph adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1).topk(3).values
        weights /= weights.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            torch._dynamo.graph_break()
            total.add_(expert(x) * weights[:, index, None])
        return total


def make_one_graph() -> nn.Module:
    weight_norm = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    attention = nn.TransformerEncoderLayer(WIDTH, 1, 8, dropout=0.0, batch_first=True, norm_first=True)
    pairs_of_rows = nn.Unflatten(0, (-1, 2))
    return nn.Sequential(weight_norm, Listed(), make_hooked(), pairs_of_rows, attention)


MODULES: dict[str, tuple[Callable[[], nn.Module], int, int | None]] = {  # constructor, stage, graphs of a forward
    "one graph": (make_one_graph, 3, 1),
    "graph breaks": (Layers, 3, 6),
    "graph breaks, ZeRO-1": (Layers, 1, 6),
    "in place": (Router, 3, None),
    "parameters of every kind": (lambda: Zoo().eval(), 3, 1),
}


def train(rank: int, world_size: int, name: str) -> None:
    make, stage, graphs = MODULES[name]
    plain = fresh(make)
    model: Any = tz.compile(deepcopy(plain), stage=stage)
    steps = 1 if isinstance(plain, Zoo) else 2  # bfloat16 rounds, and its next step would differ
    trains_as_one_process([(model, plain)], partial(deferred_steps, width=WIDTH, lr=0.02, steps=steps))
    assert graphs in (None, len(captured_forward(model).ran)), len(captured_forward(model).ran)


@pytest.mark.parametrize("name", MODULES)
def test_trains_as_one_process(ranks_pool: RanksPool, name: str) -> None:
    ranks_pool.run(2, train, name)


# Reads outside of graphs


class ReadsOutside(nn.Module):
    """A module that reads a parameter outside of the graphs."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.read = torch.compiler.disable(read)

    def forward(self, x: Tensor) -> Tensor:
        self.read(self.inner.weight)
        return self.inner(x)


def read_outside(rank: int, world_size: int) -> None:
    model, x = tz.compile(ReadsOutside(lambda weight: weight.norm()), stage=3), torch.ones(2, WIDTH)
    with count_sends() as sent:
        error = error_of(lambda: model(x))
    for word in ("Linear", "'inner.weight'", "outside of the graphs", "dynamo ended a graph at"):
        assert word in error, error
    assert not sent, sent
    read_metadata = lambda weight: (weight.dtype, weight.shape, weight.device, weight.requires_grad, len(weight))  # noqa: E731
    model = tz.compile(ReadsOutside(read_metadata), stage=3)
    with count_sends() as sent:
        model(x)
    rows = 5 - rank
    assert sum(sent) == 4 * (rows * WIDTH + rows), "the graph's gather of weight and bias"


def test_a_read_outside_of_every_graph_is_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, read_outside)


def compile_again(rank: int, world_size: int) -> None:
    """Check that torch.compile around the model leaves its graphs to us."""
    plain, x = fresh(nn.Linear, WIDTH, WIDTH), torch.ones(2, WIDTH)
    expected = plain(x).detach()
    assert_close(torch.compile(tz.compile(plain, stage=3))(x).detach(), expected)
    with suppress(ImportError):
        import lightning.fabric  # noqa: F401  # it replaces torch.compile
    assert_close(torch.compile(tz.compile(fresh(nn.Linear, WIDTH, WIDTH), stage=3))(x).detach(), expected)


def test_torch_compile_around_the_model_changes_nothing(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, compile_again)


# Memory


def free_model(rank: int, world_size: int) -> None:
    model = tz.compile(Layers(), stage=3)
    for _ in range(2):
        model(torch.ones(4, WIDTH)).sum().backward()
    references = [ref(item) for item in (model, *model.parameters())]
    del model
    gc.collect()
    assert len(references) > 4
    assert [item() for item in references] == [None] * len(references)


def test_a_model_is_freed_with_its_last_reference(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, free_model)
